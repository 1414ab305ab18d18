"""The mean over all nodes, summed in the order of their numbers.

The order of additions in `lax.psum` depends on the library, the processes and
the length of the arrays. A replay on another machine would differ by roundings,
which grow from step to step. With a fixed order, the mean has the same bits on
every machine.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Up to this many bytes, each node receives the arrays of all others and adds
# them. Above it, each node adds up one share of the arrays, and all nodes
# exchange the sums: as few bytes as with `lax.psum`, but twice the messages.
_MAX_GATHERED = 2**22


@jax.jit
def average(trees: Sequence[Any]) -> Any:
  """The mean of trees of arrays.

  Args:
    trees: The trees of the nodes, in the order of their numbers.

  Returns:
    A tree with the mean of the floats, in their own dtypes, summed in float32
    or wider. All other leaves are those of the first tree.
  """
  return jax.tree.map(lambda *leaves: _average_rows(leaves), *trees)


def make_group_average(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  """`average` for nodes in several processes, with the same bits.

  Args:
    mesh: Mesh of the first device of each process, along one axis.

  Returns:
    A function from the tree of this node to the mean of the trees of all nodes.
    All nodes must call it together.
  """
  (axis_name,) = mesh.axis_names
  spec = jax.P(axis_name)
  run = jax.jit(
    jax.shard_map(
      functools.partial(_average_over, axis_name=axis_name),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=False,
    )
  )
  placed = jax.NamedSharding(mesh, spec)

  def join(leaf: jax.Array) -> jax.Array:
    """Declares this node's array as its part of one global array: no copy."""
    leaf = leaf if leaf.ndim else leaf[None]
    shape = (mesh.size * leaf.shape[0], *leaf.shape[1:])
    return jax.make_array_from_single_device_arrays(shape, placed, [leaf])

  def average_group(tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    means = [
      whole.addressable_shards[0].data for whole in run(list(map(join, leaves)))
    ]
    return treedef.unflatten(
      [
        mean if leaf.ndim else mean[0]
        for leaf, mean in zip(leaves, means, strict=True)
      ]
    )

  return average_group


def count_mean_messages(size: int, num_nodes: int) -> float:
  """Number of messages of weights that a node sends for one mean of all.

  Args:
    size: Size of the weights, in bytes.
    num_nodes: Number of nodes.

  Returns:
    The number. A message with a part of the weights counts as a fraction.

  Examples:
    >>> from jasgd import engine
    >>> engine.count_mean_messages(1_000, 4)
    3.0
    >>> engine.count_mean_messages(10_000_000, 4)
    1.5
  """
  if num_nodes * size <= _MAX_GATHERED:
    return num_nodes - 1.0
  return 2 * (num_nodes - 1) / num_nodes


def _average_over(leaves: list[jax.Array], axis_name: str) -> list[jax.Array]:
  """The mean over a named axis; leaves of one dtype share a message."""
  means: list[Any] = [None] * len(leaves)
  for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
    group = [index for index, leaf in enumerate(leaves) if leaf.dtype == dtype]
    flat = jnp.concatenate([leaves[index].ravel() for index in group])
    mean = _average_flat(flat, axis_name)
    sizes = [math.prod(leaves[index].shape) for index in group]
    for index, part in zip(
      group, jnp.split(mean, np.cumsum(sizes)[:-1]), strict=True
    ):
      means[index] = part.reshape(leaves[index].shape)
  return means


def _average_flat(own: jax.Array, axis_name: str) -> jax.Array:
  num_nodes = lax.axis_size(axis_name)
  if num_nodes * own.nbytes <= _MAX_GATHERED:
    return _average_rows(lax.all_gather(own, axis_name))
  padding = -own.size % num_nodes
  shares = jnp.pad(own, (0, padding)).reshape(num_nodes, -1)
  received = lax.all_to_all(shares, axis_name, 0, 0, tiled=True)
  mean = lax.all_gather(_average_rows(received), axis_name, tiled=True)
  return mean[: own.size]


def _average_rows(rows: Any) -> jax.Array:
  """The mean of rows: a sum in order, then one division.

  A compiler may fuse a product with a sum, which changes the rounding; it does
  not fuse a division.
  """
  if not jnp.issubdtype(rows[0].dtype, jnp.inexact):
    return rows[0]
  dtype = jnp.promote_types(rows[0].dtype, jnp.float32)
  total = rows[0].astype(dtype)
  for index in range(1, len(rows)):
    total += rows[index].astype(dtype)
  return (total / len(rows)).astype(rows[0].dtype)
