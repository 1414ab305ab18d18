"""The server's update against the memory bandwidth of this machine."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import engine
from launch.benchmarks import server_jasgd

_NUM_ROUNDS = 8


def print_bandwidth(num_parameters: int) -> None:
  """Prints the update's share of the bandwidth of a triad, in turns."""
  triad, update = _make_triad(num_parameters), _make_update(num_parameters)
  triad_seconds, update_seconds = [], []
  for _ in range(_NUM_ROUNDS):
    triad_seconds.append(triad())
    update_seconds.append(update())
  # a <- a + s b reads two arrays and writes one; the update reads gradient,
  # velocity and weights, and writes the last two.
  triad_bandwidth = 3 * 4 * num_parameters / min(triad_seconds)
  update_bandwidth = 5 * 4 * num_parameters / min(update_seconds)
  print(
    f'\nThe update of {num_parameters:,} parameters moves '
    f'{update_bandwidth / 1e9:.1f} GB/s, an in-place triad '
    f'{triad_bandwidth / 1e9:.1f} GB/s: '
    f'{100 * update_bandwidth / triad_bandwidth:.0f}%',
    flush=True,
  )


def _make_triad(num_parameters: int):  # noqa: ANN202
  """One in-place triad; gives its seconds."""
  add = jax.jit(lambda a, b: a + 3.0 * b, donate_argnums=0)
  state = [add(jnp.ones(num_parameters), jnp.ones(num_parameters))]
  other = jnp.ones(num_parameters)

  def run() -> float:
    begin = time.perf_counter()
    state[0] = jax.block_until_ready(add(state[0], other))
    return time.perf_counter() - begin

  run()
  return run


def _make_update(num_parameters: int):  # noqa: ANN202
  """One update of the server; gives its seconds."""
  task = server_jasgd.make_task(num_parameters)
  layout = engine.make_layout(jax.eval_shape(task.init, jax.random.key(0)))
  server = engine.make_server(
    engine.make_update(server_jasgd.make_optimizer()), layout
  )
  apply = functools.partial(server.apply, is_single=True)
  state = [server.init(*task.init(jax.random.key(0)))]
  buffer = np.zeros(layout.size + 64, np.uint8)
  offset = -buffer.ctypes.data % 64
  parts = layout.view(buffer[offset : offset + layout.size])

  def run() -> float:
    begin = time.perf_counter()
    state[0] = apply(state[0], parts, 0, parts, None, 1)
    jax.block_until_ready(state[0])
    return time.perf_counter() - begin

  run()
  return run
