"""Three ways to run one function for all nodes: a device each, or together."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import sharding
import jax.numpy as jnp
import numpy as np

from jasgd import protocols

AXIS = 'nodes'  # Name of the axis of nodes.
RUNNERS = ('pmap', 'shard_map', 'vmap')


class Runner:
  """Runs a function of one node for all nodes, connected by a named axis.

  Rows are trees whose leaves have a leading axis of nodes. Under `shard_map`
  over several processes, each process has a part of the rows.

  Attributes:
    name: Name of the runner, one of `RUNNERS`.
    num_nodes: Number of nodes in all processes.
    axis_name: Name of the axis of nodes.
  """

  def __init__(
    self, name: str, num_nodes: int, mesh: sharding.Mesh | None = None
  ) -> None:
    """Finds a device for each node; see `make_device_program`."""
    protocols.check_choice('runner', name, RUNNERS)
    if mesh is not None and name != 'shard_map':
      raise ValueError(f"A mesh is for runner='shard_map', got {name!r}.")
    self.name = name
    self.num_nodes = num_nodes
    self.axis_name = AXIS
    self._mesh = None if name == 'vmap' else _make_mesh(name, num_nodes, mesh)
    if mesh is not None:
      (self.axis_name,) = mesh.axis_names

  @property
  def num_devices(self) -> int:
    """Number of devices that run the nodes."""
    return 1 if self._mesh is None else self.num_nodes

  @property
  def local_nodes(self) -> np.ndarray:
    """The nodes of this process: int [num_local_nodes], ascending."""
    if self._mesh is None:
      return np.arange(self.num_nodes)
    process = jax.process_index()
    owners = [device.process_index for device in self._mesh.devices.flat]
    return np.flatnonzero(np.array(owners) == process)

  def compile(
    self,
    function: Callable[..., Any],
    has_rows: tuple[bool, ...],
    *,
    donates: bool = False,
  ) -> Callable[..., Any]:
    """Compiles a function of one node for all nodes.

    Args:
      function: Function of the values of one node, returning such values.
      has_rows: For each argument, whether it is rows; other arguments are the
        same for all nodes.
      donates: Whether the first argument is donated.

    Returns:
      The function of rows, which returns rows.
    """
    donated = (0,) if donates else ()
    axes = tuple(0 if each else None for each in has_rows)
    if self.name == 'vmap':
      mapped = jax.vmap(
        function, axes, axis_name=AXIS, axis_size=self.num_nodes
      )
      return jax.jit(mapped, donate_argnums=donated)
    assert self._mesh is not None
    if self.name == 'pmap':
      map_over = functools.partial(
        jax.pmap, axis_name=AXIS, devices=list(self._mesh.devices.flat)
      )
      if any(has_rows):
        return map_over(function, in_axes=axes, donate_argnums=donated)
      # pmap needs at least one argument that it maps over.
      mapped = map_over(lambda _, *same: function(*same), in_axes=(0, *axes))
      return functools.partial(mapped, np.arange(self.num_nodes))

    def run_block(*arguments: Any) -> Any:
      own = [
        jax.tree.map(lambda leaf: leaf[0], each) if is_row else each
        for each, is_row in zip(arguments, has_rows, strict=True)
      ]
      return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*own))

    specs = (sharding.PartitionSpec(), sharding.PartitionSpec(self.axis_name))
    mapped = jax.shard_map(
      run_block,
      mesh=self._mesh,
      in_specs=tuple(specs[each] for each in has_rows),
      out_specs=specs[True],
      # The check rejects models with loops that do not mark varying values.
      check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=donated)

  def place(self, tree: Any) -> tuple[Any, bool]:
    """Puts values that are the same for all nodes on the nodes' devices, once.

    Args:
      tree: Tree of arrays, the same in all processes.

    Returns:
      The tree on the devices, and whether it has become rows.
    """
    if self.name == 'vmap':
      return jax.tree.map(jnp.asarray, tree), False
    if self.name == 'pmap':
      return self.compile(lambda tree: tree, (False,))(tree), True
    return self._put(tree, sharding.PartitionSpec()), False

  def put_rows(self, rows: Any) -> Any:
    """Puts the rows of this process's nodes, numpy arrays, on their devices."""
    if self.name == 'shard_map':
      return self._put(rows, sharding.PartitionSpec(self.axis_name))
    keep = self.compile(lambda row: row, (True,))
    # A copy: jax may share numpy's memory, which the caller may overwrite.
    return keep(jax.tree.map(np.array, rows))

  def read_rows(self, rows: Any) -> Any:
    """The rows of this process's nodes, as numpy arrays."""

    def read(leaf: jax.Array) -> np.ndarray:
      if self.name != 'shard_map':
        return np.array(leaf)
      shards = sorted(
        leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0
      )
      return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(read, rows)

  def read_one(self, rows: Any) -> Any:
    """The row of one node of this process."""

    def read(leaf: jax.Array) -> Any:
      if self.name == 'vmap':
        return leaf[0]
      # Through the host: jax refuses an array on one device while a user's
      # mesh of several devices is active.
      return np.asarray(leaf.addressable_shards[0].data).reshape(leaf.shape[1:])

    return jax.tree.map(read, rows)

  def _put(self, tree: Any, spec: sharding.PartitionSpec) -> Any:
    assert self._mesh is not None
    placed = sharding.NamedSharding(self._mesh, spec)
    return jax.tree.map(
      lambda leaf: jax.make_array_from_process_local_data(
        placed, np.asarray(leaf)
      ),
      tree,
    )


def _make_mesh(
  name: str, num_nodes: int, mesh: sharding.Mesh | None
) -> sharding.Mesh:
  """A mesh with one device for each node."""
  if mesh is not None:
    if len(mesh.axis_names) != 1 or mesh.size != num_nodes:
      raise ValueError(
        f'The mesh must have one axis, of num_nodes={num_nodes} devices, got '
        f'{dict(mesh.shape)}.'
      )
    return mesh
  if name == 'pmap' and jax.process_count() > 1:
    raise ValueError(
      "runner='pmap' is for the devices of one process; over "
      f"{jax.process_count()} processes use runner='shard_map'."
    )
  if num_nodes > jax.device_count():
    raise ValueError(
      f'{num_nodes} nodes need a device each, and there are '
      f"{jax.device_count()}. Use runner='vmap', or on a CPU set XLA_FLAGS="
      f'--xla_force_host_platform_device_count={num_nodes}.'
    )
  if jax.process_count() > 1 and num_nodes != jax.device_count():
    raise ValueError(
      f'Over several processes every device is a node: num_nodes must be '
      f'{jax.device_count()}, got {num_nodes}; or give a mesh.'
    )
  return sharding.Mesh(
    np.array(jax.devices()[:num_nodes]),
    (AXIS,),
    axis_types=(sharding.AxisType.Auto,),
  )
