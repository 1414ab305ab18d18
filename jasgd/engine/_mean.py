"""The mean of all nodes, added up in the order of their numbers.

`lax.psum` adds in an order that depends on the library, the processes and the
length of the arrays, so that a replay elsewhere is off by roundings, which grow
from step to step. In this order, the mean is the same bits everywhere.
"""

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Up to so many bytes each node receives the arrays of all others and adds them.
# Beyond, each node adds up its share, and all nodes exchange the sums: as few
# bytes as with `lax.psum`, but twice as many messages.
_MAX_GATHERED = 2**22


@jax.jit
def average(trees: Sequence[Any]) -> Any:
  """The mean of trees of arrays.

  Args:
    trees: The trees of the nodes, in the order of their numbers.

  Returns:
    A tree with the mean of the floats, in their own dtypes; sums are in float32
    at least. Everything else is that of the first.
  """
  return jax.tree.map(lambda *leaves: _average_rows(leaves), *trees)


def make_group_average(mesh: jax.sharding.Mesh) -> Callable[[Any], Any]:
  """`average` for nodes in several processes, with the same bits.

  Args:
    mesh: The first device of each process, along one axis.

  Returns:
    A function from the tree of this node to the mean of all nodes'. All must
    call it together.
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
    """All nodes' arrays, end to end; nothing is copied."""
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
    The number; parts of a message count as fractions.

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
  """The mean over a named axis; the leaves of each dtype travel together."""
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
  """The mean: additions, then one division, which no compiler fuses."""
  if not jnp.issubdtype(rows[0].dtype, jnp.inexact):
    return rows[0]
  dtype = jnp.promote_types(rows[0].dtype, jnp.float32)
  total = rows[0].astype(dtype)
  for index in range(1, len(rows)):
    total += rows[index].astype(dtype)
  return (total / len(rows)).astype(rows[0].dtype)
