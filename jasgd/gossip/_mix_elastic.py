"""Elastic averaging over a named axis, and how far nodes are apart."""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from jasgd.gossip import _elastic
from jasgd.gossip import _mix


def mix_elastic(
  params: Any,
  centre: Any,
  axis_name: str,
  strategy: _elastic.Elastic,
  *,
  step: Any = 1,
) -> tuple[Any, Any]:
  r"""Nodes and the centre move towards each other, all at once.

  .. math::

    e_i = \alpha (x_i - c), \quad x_i \leftarrow x_i - e_i, \quad
    c \leftarrow c + \sum_i e_i

  The sum of the nodes and the centre is kept. With p nodes, their mean less the
  centre shrinks to :math:`1 - (p + 1) \alpha` of itself: with a rate above
  2 / (p + 1) it grows. Jin et al. have 0.8 / p.

  To be called like `mix`; every node has the centre, and gets the same one.

  Args:
    params: A tree of arrays; floats are mixed, all else is left alone. What is
      sent is float32 at least, so that the sum of all copies is kept; of params
      that are narrower, up to their roundings.
    centre: The like, the same on all nodes.
    axis_name: Of the axis of nodes.
    strategy: With the rate alpha; its `order` is for who computes gradients.
    step: Steps made so far, as in `mix`.

  Returns:
    The new params, and the new centre.

  Raises:
    ValueError: if the strategy is another, or the centre is not like params.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from jasgd import gossip
    >>> elastic = gossip.Elastic(rate=0.25)
    >>> mix = lambda x, c: gossip.mix_elastic(x, c, 'nodes', elastic)
    >>> x, c = jnp.array([0.0, 4.0]), jnp.array(0.0)
    >>> x, c = jax.vmap(mix, (0, None), (0, None), axis_name='nodes')(x, c)
    >>> print(x, c)
    [0. 3.] 1.0

  References:
    Zhang et al., `Deep learning with Elastic Averaging SGD
    <https://arxiv.org/abs/1412.6651>`_, 2015; Jin et al., `How to scale
    distributed deep learning? <https://arxiv.org/abs/1611.04581>`_, 2016
  """
  if not isinstance(strategy, _elastic.Elastic):
    raise ValueError(f'mix_elastic is for Elastic, got {strategy!r}.')
  _check_centre(params, centre)
  nodes, rebuild = _mix.split_floats(params)
  centres, rebuild_centre = _mix.split_floats(centre)

  def mix_now(
    values: tuple[list[jax.Array], list[jax.Array]], number: Any
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    del number  # All rounds are alike.
    forces = [
      strategy.rate * (_widen(x) - _widen(c))
      for x, c in zip(*values, strict=True)
    ]
    sums = lax.psum(forces, axis_name)
    return (
      [
        (_widen(x) - force).astype(x.dtype)
        for x, force in zip(values[0], forces, strict=True)
      ],
      [
        (_widen(c) + total).astype(c.dtype)
        for c, total in zip(values[1], sums, strict=True)
      ],
    )

  nodes, centres = _mix.run_if_due(
    mix_now, (nodes, centres), step, strategy.period
  )
  return rebuild(nodes), rebuild_centre(centres)


def consensus_distance(params: Any, axis_name: str) -> jax.Array:
  r"""How far nodes are from their mean.

  .. math:: \sqrt{\frac{1}{n} \sum_i \|x_i - \bar x\|^2}

  To be called like `mix`.

  Args:
    params: A tree of arrays, of which floats count.
    axis_name: Of the axis of nodes.

  Returns:
    The distance, the same on all nodes: float32 at least, shape=().

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from jasgd import gossip
    >>> measure = lambda x: gossip.consensus_distance(x, 'nodes')
    >>> print(jax.vmap(measure, axis_name='nodes')(jnp.array([1.0, 5.0])))
    [2. 2.]

  References:
    Kong et al., `Consensus Control for Decentralized Deep Learning
    <https://arxiv.org/abs/2102.04828>`_, 2021
  """
  values = [_widen(leaf) for leaf in _mix.split_floats(params)[0]]
  means = lax.pmean(values, axis_name)
  squares = [
    jnp.sum(jnp.square(jnp.abs(value - mean)))
    for value, mean in zip(values, means, strict=True)
  ]
  return jnp.sqrt(lax.pmean(sum(squares, jnp.zeros(())), axis_name))


def _check_centre(params: Any, centre: Any) -> None:
  """Raises a ValueError if the centre could not be the mean of params."""
  expected, found = (
    {
      jax.tree_util.keystr(path): jnp.shape(leaf)
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    for tree in (params, centre)
  )
  if expected != found:
    raise ValueError(
      f'The centre must be like params, of the shapes {expected}, got {found}.'
    )


def _widen(leaf: jax.Array) -> jax.Array:
  """As float32 at least."""
  return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
