"""How values travel over a named axis, and are added up where they arrive.

All functions take what a node has (`values`) and what it sends (`messages`, the
same in another precision, maybe), as lists of arrays, and give the new values.
Sums are in float32 at least, and in the same order under every runner. What
comes with weight 0 is not looked at: it may be anything, also NaN.
"""

import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd.gossip import _edges
from jasgd.gossip import _random_rounds

# More messages of a node in one round than this are gathered instead: every
# node gets everything then, at once, and takes what it needs.
_MAX_MESSAGES = 16

Arrays = list[jax.Array]


class Row(NamedTuple):
  """What one node takes of all: own x + sum of weights_k x_(sources_k)."""

  own: Any  # shape=()
  sources: Any  # shape=(d,), int
  weights: Any  # shape=(d,)
  count: Any  # shape=(), int: how many of them count.


def exchange_rounds(
  values: Arrays,
  messages: Arrays,
  rounds: list[_edges.Round],
  index: Any,
  axis_name: str,
) -> Arrays:
  """Does one of several rounds, all known beforehand.

  Args:
    values: What this node has.
    messages: What it sends.
    rounds: All there are.
    index: Which; may be traced, and must be the same on all nodes.
    axis_name: Of the nodes.

  Returns:
    The new values.
  """
  node, num_nodes = lax.axis_index(axis_name), len(rounds[0].own)
  most = min(max(1, num_nodes // 2), _MAX_MESSAGES)
  is_sparse = all(each.num_messages <= most for each in rounds)
  if not is_sparse or len(rounds) > _random_rounds.MAX_ROUNDS:
    table = jax.tree.map(jnp.asarray, _make_table(rounds))
    row = jax.tree.map(lambda leaf: leaf[index, node], table)
    return exchange_row(values, messages, row, axis_name)
  if isinstance(index, int):
    rounds, index = [rounds[index]], 0
  own, sources, weights = _edges.split_rounds(rounds)
  sums = _scale(values, jnp.asarray(own)[index, node])
  for number in range(sources.shape[1]):
    received = _send(messages, sources[:, number], index, axis_name)
    sums = _add(sums, received, jnp.asarray(weights)[index, number, node])
  return _restore(sums, values)


def exchange_row(
  values: Arrays, messages: Arrays, row: Row, axis_name: str
) -> Arrays:
  """Everybody gets everything, and takes what its row says."""
  gathered = lax.all_gather(messages, axis_name)

  def add(index: Any, sums: Arrays) -> Arrays:
    received = [leaf[row.sources[index]] for leaf in gathered]
    return _add(sums, received, row.weights[index])

  sums = _scale(values, row.own)
  if row.sources.shape[0] == 1:
    sums = add(0, sums)
  elif row.sources.shape[0]:
    sums = lax.fori_loop(0, row.count, add, sums)
  return _restore(sums, values)


def average(values: Arrays, messages: Arrays, axis_name: str) -> Arrays:
  """Everybody gets the mean of what all send, in the messages' precision."""
  node = lax.axis_index(axis_name)
  num_nodes = lax.axis_size(axis_name)
  # What is narrow is divided first: a sum of large numbers would be infinite.
  is_narrow = [message.dtype.itemsize < 4 for message in messages]
  sums = lax.psum(
    [
      message / num_nodes if narrow else message
      for message, narrow in zip(messages, is_narrow, strict=True)
    ],
    axis_name,
  )
  means = [
    (total if narrow else total / num_nodes).astype(value.dtype)
    for total, value, narrow in zip(sums, values, is_narrow, strict=True)
  ]
  # A sum is known to be the same everywhere, and jax.shard_map wants what goes
  # through a branch or a loop to stay what it was: different, maybe. This says
  # so, and is compiled to nothing.
  return [jnp.where(node == node, mean, mean) for mean in means]


def round_to(array: jax.Array, dtype: Any) -> jax.Array:
  """A float array in a narrower dtype; as it is if that is not narrower."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    return array
  limits = jnp.finfo(dtype)
  if limits.bits >= jnp.finfo(array.dtype).bits:
    return array
  # A conversion alone might be optimised away with the one that undoes it.
  rounded = lax.reduce_precision(array, limits.nexp, limits.nmant)
  return rounded.astype(dtype)


def _send(
  messages: Arrays, sources: np.ndarray, index: Any, axis_name: str
) -> Arrays:
  """Sends by one of several permutations, [round, node] -> source."""
  branches = [
    functools.partial(
      lax.ppermute,
      axis_name=axis_name,
      perm=[(int(source), node) for node, source in enumerate(row)],
    )
    for row in sources
  ]
  if len(branches) == 1:
    return branches[0](messages)
  return lax.switch(index, branches, messages)


def _scale(values: Arrays, weight: jax.Array) -> Arrays:
  """The nodes' own part."""
  scaled = []
  for value in values:
    dtype = jnp.promote_types(value.dtype, jnp.float32)
    scaled.append(weight.astype(dtype) * value.astype(dtype))
  return scaled


def _add(sums: Arrays, received: Arrays, weight: jax.Array) -> Arrays:
  """Adds what has come, if it counts."""
  added = []
  for total, other in zip(sums, received, strict=True):
    part = weight.astype(total.dtype) * other.astype(total.dtype)
    added.append(total + jnp.where(weight > 0, part, 0))
  return added


def _restore(sums: Arrays, values: Arrays) -> Arrays:
  """The sums in the dtypes of the values."""
  return [
    total.astype(value.dtype) for total, value in zip(sums, values, strict=True)
  ]


def _make_table(rounds: list[_edges.Round]) -> Row:
  """The rows of all nodes in all rounds, with the axes [round, node]."""
  num_nodes = len(rounds[0].own)
  counts = np.stack(
    [np.bincount(each.targets, minlength=num_nodes) for each in rounds]
  )
  shape = (*counts.shape, int(counts.max()))
  sources, weights = np.zeros(shape, np.int32), np.zeros(shape)
  for index, each in enumerate(rounds):
    order = np.argsort(each.targets, kind='stable')
    # Row by row, which is the order of a mask's entries.
    is_taken = np.arange(shape[2]) < counts[index][:, None]
    sources[index][is_taken] = each.sources[order]
    weights[index][is_taken] = each.weights[order]
  own = np.stack([each.own for each in rounds])
  return Row(own, sources, weights, counts.astype(np.int32))
