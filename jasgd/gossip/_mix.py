"""Mixing over a named axis: one function for devices, hosts and `jax.vmap`."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.gossip import _exchange
from jasgd.gossip import strategies
from jasgd.gossip.strategies import _allreduce
from jasgd.gossip.strategies import _base
from jasgd.gossip.strategies import _elastic
from jasgd.gossip.strategies import _gossip
from jasgd.gossip.strategies import _pull
from jasgd.gossip.strategies import _push_sum

# Arrays of fewer numbers are sent together: copying them costs less than a
# further message.
SMALL_SIZE = 2**14

_PULL = _pull.Pull()


def mix(
  params: Any,
  axis_name: str,
  strategy: _base.PeerStrategy = _PULL,
  *,
  step: Any = 1,
  key: jax.Array | None = None,
  mass: Any = None,
  dtype: Any = None,
) -> Any:
  r"""Averages with peers: one round of a strategy, for all nodes at once.

  .. math:: x_i \leftarrow W_{ii} x_i + \sum_j W_{ij} x_j

  =============  ========================================================
  strategy       new weights of a node
  =============  ========================================================
  `Pull`         :math:`(1 - \beta) x_i + \beta x_j`
  `Push`         the mean of its own weights and all messages to it; its own
                 count twice if it drew itself
  `Pairs`        :math:`(x_i + x_j) / 2`, as does its peer j
  `PushSum`      the sum of the share it keeps and the shares sent to it, of x
                 and of mass
  `AllReduce`    the mean of all nodes
  =============  ========================================================

  This is a pure function of one node's values. Call it inside `jax.pmap` (the
  devices of one host), `jax.shard_map` (a mesh over many hosts) or `jax.vmap`
  (any number of nodes on one device), with a name for the axis of nodes. (For
  `jax.shard_map`, make the mesh with `axis_types=(jax.sharding.AxisType.Auto,)`
  or place the inputs on it: meshes of jax are explicit by default.) All nodes
  draw random peers with the same key, so that they agree without communication.
  Peers may change from round to round without a new compilation:

  - `'independent'` peers need all values at all nodes (`lax.all_gather`).
  - `'permutation'` and `'matching'` cost one message (`lax.ppermute`), by one
    of n compiled permutations. These are chosen such that a node's peer is
    every node with equal probability (every other node, in pairs) and that
    `consensus_rate` holds exactly. With more than 64 nodes there are 64 random
    permutations, and the rate holds approximately.
  - With a topology, mix number r is its round r. A round costs as many messages
    as a node has peers. If these are more than half of the nodes or more than
    16, or if there are more than 64 rounds, all values are gathered. A complete
    graph with equal weights is a `lax.psum`.

  Gradients flow through a mix, with two exceptions, which loop over a variable
  number of messages: `'independent'` peers of `Push` and `PushSum`, and
  topologies whose values are gathered. Take `jax.grad` of a node's own loss:
  the gradient of a mean of losses over the axis is n times too large under all
  runners except `jax.shard_map` with `check_vma=True`.

  On a CPU, devices share a few threads, and about 30 calls in flight of a
  program with collectives can deadlock. Wait for the result of one call
  (`jax.block_until_ready`) before you make the next but one.

  The mean of all nodes is kept by `AllReduce`, `Pairs`, permutations, and
  doubly stochastic topologies. `PushSum` keeps it with any peers: all masses
  begin at 1, a node's weights are :math:`z = x / \text{mass}`, and gradients
  are computed at z and applied to x.

  Args:
    params: Tree of arrays. Floats are mixed in their own dtype, with sums in
      float32 or wider (except the mean of all nodes, which is summed in the
      dtype of the messages). Other arrays stay unchanged.
    axis_name: Name of the axis of nodes.
    strategy: Strategy of jasgd; for `Elastic` see `mix_elastic`. Strategies
      with a `node_class` of your own do not run on devices.
    step: Number of steps made, at least 1, equal on all nodes. A mix is due
      after every `strategy.period` steps; otherwise nothing is sent or changed.
      May be traced.
    key: Key of jax for random peers, equal on all nodes.
    mass: Mass of this node, for `PushSum`.
    dtype: Dtype of messages, such as `jnp.bfloat16`; None for that of the
      params. A node's own part stays exact, so that the mean is kept up to
      roundings of messages. In the mean of `AllReduce` the own part is rounded
      too, and sums have this dtype, so that all nodes get equal values. (Small
      gradients become 0 in `jnp.float16`.)

  Returns:
    The new params; for `PushSum` the pair (params, mass).

  Raises:
    ValueError: if the strategy does not fit the number of nodes, a key or a
      mass is missing, a mass is not needed, or dtype is not a float's.

  Examples:
    Four nodes on one device, with different numbers:

    >>> import jax, jax.numpy as jnp
    >>> from jasgd import gossip
    >>> pull = gossip.Pull(peers='one_peer_hypercube')
    >>> mix = lambda x, step: gossip.mix(x, 'nodes', pull, step=step)
    >>> mix_all = jax.vmap(mix, in_axes=(0, None), axis_name='nodes')
    >>> x = mix_all(jnp.array([0.0, 1.0, 2.0, 9.0]), 1)
    >>> print(x, mix_all(x, 2))
    [0.5 0.5 5.5 5.5] [3. 3. 3. 3.]

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016; Assran et al., `Stochastic
    Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  _check(strategy, lax.axis_size(axis_name), key, mass, dtype)
  values, rebuild = _split_floats(params)
  packed, unpack = _pack(values)
  masses = [] if mass is None else [_to_float(mass)]

  def mix_now(values: list[jax.Array], number: Any) -> list[jax.Array]:
    messages = values
    if dtype is not None:  # The masses are sent as they are.
      sent = [_exchange.round_to(each, dtype) for each in values[: len(packed)]]
      messages = sent + values[len(packed) :]
    if isinstance(strategy, _gossip.Gossip):
      return _mix_with_peers(values, messages, axis_name, strategy, number, key)
    return _exchange.average(values, messages, axis_name)

  mixed = _run_if_due(mix_now, [*packed, *masses], step, strategy.period)
  params = rebuild(unpack(mixed[: len(packed)]))
  return (params, mixed[-1]) if masses else params


def mix_elastic(
  params: Any,
  centre: Any,
  axis_name: str,
  strategy: _elastic.Elastic,
  *,
  step: Any = 1,
) -> tuple[Any, Any]:
  r"""Moves all nodes and the centre towards each other, at once.

  .. math::

    e_i = \alpha (x_i - c), \quad x_i \leftarrow x_i - e_i, \quad
    c \leftarrow c + \sum_i e_i

  The sum of the nodes and the centre is kept. With p nodes, the difference
  between their mean and the centre is multiplied by
  :math:`1 - (p + 1) \alpha`, so that it grows if the rate is above 2 / (p + 1).
  Jin et al. use 0.8 / p.

  Call it like `mix`. Every node holds the centre, and gets the same new one.

  Args:
    params: Tree of arrays. Floats are mixed, other arrays stay unchanged.
      Forces are sent in float32 or wider, so that the sum of all weights is
      kept, up to roundings of narrower params.
    centre: Tree of arrays of the same shapes, equal on all nodes.
    axis_name: Name of the axis of nodes.
    strategy: Strategy with the rate alpha. Its `order` has no effect here.
    step: Number of steps made, as in `mix`.

  Returns:
    The new params, and the new centre.

  Raises:
    ValueError: if the strategy is not `Elastic`, or the centre has other shapes
      than params.

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
  nodes, rebuild = _split_floats(params)
  centres, rebuild_centre = _split_floats(centre)

  def mix_now(
    values: tuple[list[jax.Array], list[jax.Array]], number: Any
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    del number  # All rounds are equal.
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

  nodes, centres = _run_if_due(mix_now, (nodes, centres), step, strategy.period)
  return rebuild(nodes), rebuild_centre(centres)


def consensus_distance(params: Any, axis_name: str) -> jax.Array:
  r"""Root mean square distance of the nodes from their mean.

  .. math:: \sqrt{\frac{1}{n} \sum_i \|x_i - \bar x\|^2}

  Call it like `mix`.

  Args:
    params: Tree of arrays; only floats count.
    axis_name: Name of the axis of nodes.

  Returns:
    The distance, equal on all nodes: float32 or wider, shape=().

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
  values = [_widen(leaf) for leaf in _split_floats(params)[0]]
  means = lax.pmean(values, axis_name)
  squares = [
    jnp.sum(jnp.square(jnp.abs(value - mean)))
    for value, mean in zip(values, means, strict=True)
  ]
  return jnp.sqrt(lax.pmean(sum(squares, jnp.zeros(())), axis_name))


# --- Parts of a mix.


def _run_if_due(
  mix_now: Callable[[Any, Any], Any], values: Any, step: Any, period: int
) -> Any:
  """Calls a function after every `period` steps.

  Args:
    mix_now: Function of values and the number of the mix, from 0 on, that
      returns new values.
    values: Tree of arrays.
    step: Number of steps made; may be traced.
    period: Number of steps between mixes.

  Returns:
    The new values, or the old ones if no mix is due.
  """
  if isinstance(step, int | np.integer):
    step = protocols.check_count('step', step)
    if step % period:
      return values
    return mix_now(values, step // period - 1)
  if not jnp.issubdtype(jnp.result_type(step), jnp.integer):
    raise ValueError(f'step must be a whole number of at least 1, got {step}.')
  number = step // period - 1
  if period == 1:
    return mix_now(values, number)
  return lax.cond(
    step % period == 0, lambda x: mix_now(x, number), lambda x: x, values
  )


def _split_floats(
  tree: Any,
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
  """The float leaves of a tree, and a function that replaces them."""
  leaves, treedef = jax.tree.flatten(tree)
  leaves = [jnp.asarray(leaf) for leaf in leaves]
  chosen = [
    index
    for index, leaf in enumerate(leaves)
    if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]

  def rebuild(values: list[jax.Array]) -> Any:
    new = list(leaves)
    for index, value in zip(chosen, values, strict=True):
      new[index] = value
    return jax.tree.unflatten(treedef, new)

  return [leaves[index] for index in chosen], rebuild


def _mix_with_peers(
  values: list[jax.Array],
  messages: list[jax.Array],
  axis_name: str,
  strategy: _gossip.Gossip,
  number: Any,
  key: Any,
) -> list[jax.Array]:
  """Mix number `number` with the strategy's peers."""
  num_nodes = lax.axis_size(axis_name)
  if strategy.is_random:
    peers = str(strategy.peers)
    key = jax.random.fold_in(key, number)
    if peers == 'independent':
      row = _draw_row(strategy, key, axis_name)
      return _exchange.exchange_row(values, messages, row, axis_name)
    weight = strategy.beta if isinstance(strategy, _pull.Pull) else 0.5
    topology = _exchange.make_random_rounds(peers, num_nodes, weight)
    index = jax.random.randint(key, (), 0, topology.num_rounds)
  else:
    topology = strategy.find_topology(num_nodes)
    index = number % topology.num_rounds
  rounds = _exchange.list_rounds(strategy, topology)
  is_exact = all(a is b for a, b in zip(values, messages, strict=True))
  if is_exact and all(each.is_mean for each in rounds):
    return _exchange.average(values, messages, axis_name)
  return _exchange.exchange_rounds(values, messages, rounds, index, axis_name)


def _draw_row(
  strategy: _gossip.Gossip, key: jax.Array, axis_name: str
) -> _exchange.Row:
  """This node's part of a round in which each node draws among all nodes."""
  num_nodes = lax.axis_size(axis_name)
  nodes, node = jnp.arange(num_nodes), lax.axis_index(axis_name)
  drawn = jax.random.randint(key, (num_nodes,), 0, num_nodes)
  is_self = drawn[node] == node
  if isinstance(strategy, _pull.Pull):
    beta = jnp.where(is_self, 0, strategy.beta)
    return _exchange.Row(1 - beta, drawn[node][None], beta[None], 1)
  is_sender = (drawn == node) & (nodes != node)
  senders, count = jnp.argsort(~is_sender), is_sender.sum()
  if isinstance(strategy, _push_sum.PushSum):
    own, weight = jnp.where(is_self, 1.0, 0.5), 0.5
  else:
    total = 1 + is_self + count
    own, weight = (1 + is_self) / total, 1 / total
  weights = jnp.where(is_sender[senders], weight, 0)
  return _exchange.Row(own, senders, weights, count)


def _to_float(mass: Any) -> jax.Array:
  """A mass as a float array."""
  mass = jnp.asarray(mass)
  is_float = jnp.issubdtype(mass.dtype, jnp.floating)
  return mass if is_float else mass.astype(jnp.result_type(float))


def _check(
  strategy: _base.PeerStrategy,
  num_nodes: int,
  key: Any,
  mass: Any,
  dtype: Any,
) -> None:
  """Raises a ValueError if the arguments of `mix` do not fit each other."""
  is_gossip = isinstance(strategy, _gossip.Gossip)
  if not is_gossip and not isinstance(strategy, _allreduce.AllReduce):
    raise ValueError(
      f'mix takes gossip strategies and AllReduce, got {strategy!r}; for '
      'Elastic there is mix_elastic.'
    )
  known = [kind.node_class for kind in strategies.STRATEGIES.values()]
  if strategy.node_class not in known:
    raise ValueError(
      'mix runs without the state machines of nodes, and knows only the rules '
      f'of jasgd, got {strategy!r} with its own node_class: use the simulator '
      'or real processes.'
    )
  strategy.check_together(num_nodes)
  if is_gossip and strategy.is_random and not _is_key(key):
    raise ValueError(
      f'Random peers ({strategy.peers!r}) need a key of jax.random, equal on '
      f'all nodes, got {key!r}.'
    )
  if isinstance(strategy, _push_sum.PushSum) != (mass is not None):
    raise ValueError(
      'PushSum, and no other strategy, takes a mass, 1.0 on every node at '
      f'first; got mass={mass!r} for {type(strategy).__name__}.'
    )
  if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f'dtype must be a dtype of floats, got {dtype!r}.')


def _is_key(key: Any) -> bool:
  """Whether a value can be a key: a typed one, or a raw array of uint32."""
  if not isinstance(key, jax.Array | np.ndarray):
    return False
  is_new = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  return bool(is_new or key.dtype == jnp.uint32)


def _check_centre(params: Any, centre: Any) -> None:
  """Raises a ValueError if the centre has other shapes than params."""
  expected, found = (
    {
      jax.tree_util.keystr(path): jnp.shape(leaf)
      for path, leaf in jax.tree.leaves_with_path(tree)
    }
    for tree in (params, centre)
  )
  if expected != found:
    raise ValueError(
      f'The centre must have the shapes of params, {expected}, got {found}.'
    )


def _widen(leaf: jax.Array) -> jax.Array:
  """Converts an array to float32 if it is narrower."""
  return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _pack(
  arrays: list[jax.Array],
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], list[jax.Array]]]:
  """Concatenates the small arrays of each dtype; large ones stay as they are.

  A message has a fixed cost, whatever its length.

  Args:
    arrays: Arrays of any shapes and dtypes.

  Returns:
    The arrays to send, and the inverse function, which splits such arrays into
    the given shapes and order.
  """
  groups: dict[object, list[int]] = {}
  for index, array in enumerate(arrays):
    is_small = array.size < SMALL_SIZE
    groups.setdefault(array.dtype if is_small else index, []).append(index)
  packed = [
    arrays[group[0]]
    if len(group) == 1
    else jnp.concatenate([arrays[index].ravel() for index in group])
    for group in groups.values()
  ]
  shapes = [array.shape for array in arrays]

  def unpack(packed: list[jax.Array]) -> list[jax.Array]:
    found: dict[int, jax.Array] = {}
    for group, whole in zip(groups.values(), packed, strict=True):
      if len(group) == 1:
        found[group[0]] = whole
        continue
      start = 0
      for index in group:
        stop = start + math.prod(shapes[index])
        found[index] = whole[start:stop].reshape(shapes[index])
        start = stop
    return [found[index] for index in range(len(shapes))]

  return packed, unpack
