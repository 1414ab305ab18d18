"""The mean of all nodes: the same order of additions everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd.engine import _mean
from tests import trees


def _make_trees(num_nodes):
  rng = np.random.default_rng(num_nodes)
  return [
    {
      'wide': jnp.float32(
        rng.normal(size=(7, 5)) * 10.0 ** rng.integers(-9, 9)
      ),
      'narrow': jnp.bfloat16(rng.normal(size=11)),
      'half': jnp.float16(rng.uniform(3e4, 6e4, size=3)),
      'scalar': jnp.float32(rng.normal()),
      'count': jnp.int32(node),
    }
    for node in range(num_nodes)
  ]


def _average_over(nodes):
  """The mean at each node of an axis, computed by collectives."""
  leaves, treedef = jax.tree.flatten(jax.tree.map(_stack, *nodes))
  run = functools.partial(_mean._average_over, axis_name='nodes')
  means = jax.jit(jax.vmap(run, axis_name='nodes'))(leaves)
  rows = treedef.unflatten(means)
  return [
    jax.tree.map(lambda leaf, node=node: leaf[node], rows)
    for node in range(len(nodes))
  ]


def _stack(*leaves):
  return jnp.stack(leaves)


@pytest.mark.parametrize('num_nodes', [1, 2, 3, 8])
@pytest.mark.parametrize('most', [0, 2**22])
def test_messages_do_not_change_a_bit(monkeypatch, num_nodes, most):
  """Gathered or in shares, all nodes get the bits of the plain mean."""
  monkeypatch.setattr(_mean, '_MAX_GATHERED', most)
  nodes = _make_trees(num_nodes)
  mean = _mean.average(nodes)
  for own in _average_over(nodes):
    trees.assert_same_bits(own, mean)


def test_it_is_the_mean_and_leaves_other_numbers_alone():
  nodes = _make_trees(5)
  mean = _mean.average(nodes)
  assert mean['count'] == 0
  for name in ('wide', 'narrow', 'half', 'scalar'):
    rows = np.float64([node[name].astype(float) for node in nodes])
    assert mean[name].dtype == nodes[0][name].dtype
    np.testing.assert_allclose(
      np.float64(mean[name]),
      rows.mean(axis=0),
      rtol=1e-2,
      atol=1e-6 * np.abs(rows).max(),
    )
