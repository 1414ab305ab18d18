"""How the processes of a group reach each other: a device of each."""

from collections.abc import Callable
import math
import os
import threading
from typing import Any

import jax
import numpy as np

from jasgd.runtime import _settings


def join_group(
  coordinator: str,
  num_nodes: int,
  node: int,
  deadlines: _settings.Deadlines,
  stopped: threading.Event | None = None,
) -> None:
  """Makes this process one of a group; before anything is computed.

  Args:
    coordinator: 'HOST:PORT', where the first process listens.
    num_nodes: How many processes there are.
    node: Which one this is.
    deadlines: `start` is for all to come; whoever is silent for twice `silence`
      ends the group, if nobody who watches has done so before.
    stopped: Set while it waits for the others, it ends the process at once:
      there is nothing to be lost yet.
  """
  has_joined = threading.Event()

  def give_up(stopped: threading.Event) -> None:
    stopped.wait()
    if not has_joined.is_set():
      os._exit(0)  # jax cannot be asked.

  if stopped is not None:
    threading.Thread(target=give_up, args=(stopped,), daemon=True).start()
  # A CPU's own collectives reach no other process.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # It would take SIGTERM for itself, and never give it back.
  jax.config.update('jax_enable_preemption_service', False)
  jax.distributed.initialize(
    coordinator,
    num_nodes,
    node,
    initialization_timeout=math.ceil(deadlines.start),
    heartbeat_timeout_seconds=math.ceil(2 * deadlines.silence),
  )
  has_joined.set()


def make_mesh(num_nodes: int) -> jax.sharding.Mesh:
  """The first device of each process of a group, however many they have.

  Args:
    num_nodes: How many processes there are.

  Returns:
    A mesh with one axis, `nodes`.
  """
  first: dict[int, Any] = {}
  for device in jax.devices():
    first.setdefault(device.process_index, device)
  return jax.sharding.Mesh(
    np.array([first[process] for process in range(num_nodes)]),
    ('nodes',),
    axis_types=(jax.sharding.AxisType.Auto,),
  )


def make_tell_all(
  mesh: jax.sharding.Mesh,
) -> Callable[[list[int]], np.ndarray]:
  """A function by which processes tell each other some numbers.

  Args:
    mesh: One device of each.

  Returns:
    A function of what this one says, which gives a row of each; all must call
    it together, and say as many numbers.
  """
  sharding = jax.sharding.NamedSharding(mesh, jax.P('nodes'))
  gather = jax.jit(
    lambda rows: rows,
    out_shardings=jax.sharding.NamedSharding(mesh, jax.P()),
  )

  def tell_all(numbers: list[int]) -> np.ndarray:
    own = np.asarray([numbers], np.int32)
    rows = jax.make_array_from_callback(
      (mesh.size, len(numbers)), sharding, lambda _: own
    )
    return np.asarray(gather(rows))

  return tell_all
