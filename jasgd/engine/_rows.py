"""Trees whose leaves have a leading axis of rows: versions, learners, nodes."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp


def read_row(tree: Any, index: Any) -> Any:
  """A row, or rows, of every leaf."""
  return jax.tree.map(lambda leaf: leaf[index], tree)


def write_row(tree: Any, index: Any, row: Any) -> Any:
  """The leaves with one row replaced, in place where they are donated."""
  return jax.tree.map(
    lambda leaf, value: lax.dynamic_update_index_in_dim(
      leaf, jnp.astype(value, leaf.dtype), index, 0
    ),
    tree,
    row,
  )


def repeat_row(row: Any, num_rows: int) -> Any:
  """The same row so many times, in buffers of their own."""
  return jax.tree.map(
    lambda leaf: jnp.broadcast_to(leaf, (num_rows, *jnp.shape(leaf))).copy(),
    row,
  )


def stack_rows(rows: list[Any]) -> Any:
  """Several trees as the rows of one."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)
