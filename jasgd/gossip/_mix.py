"""Mixing over a named axis: the same function for devices, hosts and `vmap`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from jasgd.gossip import _allreduce
from jasgd.gossip import _checks
from jasgd.gossip import _edges
from jasgd.gossip import _exchange
from jasgd.gossip import _packing
from jasgd.gossip import _peers
from jasgd.gossip import _pull
from jasgd.gossip import _push_sum
from jasgd.gossip import _random_rounds
from jasgd.gossip import _strategy

_PULL = _pull.Pull()


def mix(
  params: Any,
  axis_name: str,
  strategy: _strategy.PeerStrategy = _PULL,
  *,
  step: Any = 1,
  key: jax.Array | None = None,
  mass: Any = None,
  dtype: Any = None,
) -> Any:
  r"""Averages with peers: one round of a strategy, for all nodes at once.

  .. math:: x_i \leftarrow W_{ii} x_i + \sum_j W_{ij} x_j

  =============  ========================================================
  strategy       what a node gets
  =============  ========================================================
  `Pull`         :math:`(1 - \beta) x_i + \beta x_j`
  `Push`         the mean of its own and of all that was sent to it; its own
                 counts twice if it drew itself
  `Pairs`        :math:`(x_i + x_j) / 2`, as does its peer j
  `PushSum`      the share it keeps and the shares sent to it, of x and of mass
  `AllReduce`    the mean of all
  =============  ========================================================

  A pure function of what each node has, to be called inside of `jax.pmap` (the
  way for the devices of one host), of `jax.shard_map` over a mesh (many hosts),
  or of `jax.vmap` (any number of nodes on one device), with the axis of the
  nodes named. (For `jax.shard_map` make the mesh with `axis_types=
  (jax.sharding.AxisType.Auto,)`, or place what it is given on it: by default
  meshes of jax are explicit.) Nodes agree on random peers without talking, for
  all of them draw with the same key. Peers may change from round to round
  without compiling:

  - `'independent'` peers need everything at every node (`lax.all_gather`).
  - `'permutation'` and `'matching'` cost one message (`lax.ppermute`), one of
    n permutations that are compiled. They are such that a node's peer is any
    node with equal probability (of pairs: any other), and that nodes agree
    exactly at `consensus_rate`. With more than 64 nodes they are 64, drawn at
    random, and nodes agree at about that rate.
  - With a topology, mix number r is its round r. A round is sent as so many
    messages as a node has peers; if those are more than half of the nodes, or
    more than 16, or if there are more than 64 rounds, everything is gathered.
    Everybody with everybody at equal weights is `lax.psum`.

  Gradients flow through a mix, but for `'independent'` peers of `Push` and
  `PushSum` and for topologies that gather: these loop over what has come, which
  jax does not differentiate. Take `jax.grad` of a node's own loss, as a mean of
  losses over the axis is differentiated n times too much by all runners but
  `jax.shard_map` with `check_vma=True`.

  On a CPU, devices share a few threads, and some 30 calls of a program with any
  such exchange that are under way at once may wait for each other for ever. So
  wait for the result of one (`jax.block_until_ready`) before the next but one.

  The mean of all nodes is kept by `AllReduce`, by `Pairs`, by permutations and
  by topologies that are doubly stochastic. `PushSum` keeps it with every peers:
  all masses begin as 1, a node's weights are :math:`z = x / \text{mass}`, and
  gradients are computed at z and applied to x.

  Args:
    params: A tree of arrays. Floats are mixed, in their own dtype, with sums in
      float32 at least, but for means of all, which are summed as they are sent;
      everything else is left alone.
    axis_name: Of the axis of nodes.
    strategy: Who mixes with whom, and how; for `Elastic` see `mix_elastic`.
    step: Steps made so far, from 1 on, the same number on all nodes. A mix is
      due after every `strategy.period` of them; otherwise nothing is sent or
      changed. May be traced.
    key: A jax key, the same on all nodes, for random peers.
    mass: The node's mass, for `PushSum`.
    dtype: Of what is sent, such as `jnp.bfloat16`; None: as it is. A node's own
      part stays exact, so that a mean which is kept otherwise is kept only up
      to roundings. In the mean of `AllReduce` it does not, and sums are of this
      dtype, so that all nodes get the same. (Of `jnp.float16`, small gradients
      become 0 there.)

  Returns:
    The new params; for `PushSum` the pair (params, mass).

  Raises:
    ValueError: if the strategy does not fit the number of nodes or makes no
      pairs, a key or mass is missing, a mass is not needed, or dtype is not a
      float's.

  Examples:
    Four nodes on one device, with different numbers:

    >>> import jax, jax.numpy as jnp
    >>> from jasgd import gossip
    >>> pull = gossip.Pull(peers=gossip.one_peer_hypercube(4))
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
  values, rebuild = split_floats(params)
  packed, unpack = _packing.pack(values)
  masses = [] if mass is None else [_to_float(mass)]

  def mix_now(values: list[jax.Array], number: Any) -> list[jax.Array]:
    messages = values
    if dtype is not None:  # Of the weights; the masses stay exact.
      sent = [_exchange.round_to(each, dtype) for each in values[: len(packed)]]
      messages = sent + values[len(packed) :]
    if isinstance(strategy, _peers.Gossip):
      return _gossip(values, messages, axis_name, strategy, number, key)
    return _exchange.average(values, messages, axis_name)

  mixed = run_if_due(mix_now, [*packed, *masses], step, strategy.period)
  params = rebuild(unpack(mixed[: len(packed)]))
  return (params, mixed[-1]) if masses else params


def run_if_due(
  mix_now: Callable[[Any, Any], Any], values: Any, step: Any, period: int
) -> Any:
  """Does a mix after every `period`-th step, and nothing after others.

  Args:
    mix_now: From values and the number of the mix, from 0 on, to new values.
    values: A tree of arrays.
    step: Steps made so far; may be traced.
    period: Steps between mixes.

  Returns:
    The new values, or the same.
  """
  if isinstance(step, int | np.integer):
    step = _checks.check_count('step', step)
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


def split_floats(
  tree: Any,
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
  """The float leaves of a tree, and a function that puts others there."""
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


def _gossip(
  values: list[jax.Array],
  messages: list[jax.Array],
  axis_name: str,
  strategy: _peers.Gossip,
  number: Any,
  key: Any,
) -> list[jax.Array]:
  """Mix number `number` with the strategy's peers."""
  num_nodes = lax.axis_size(axis_name)
  topology, index = strategy.peers, number
  if isinstance(topology, str):
    key = jax.random.fold_in(key, number)
    if topology == 'independent':
      row = _draw_row(strategy, key, axis_name)
      return _exchange.exchange_row(values, messages, row, axis_name)
    weight = strategy.beta if isinstance(strategy, _pull.Pull) else 0.5
    topology = _random_rounds.make_random_rounds(topology, num_nodes, weight)
    index = jax.random.randint(key, (), 0, topology.num_rounds)
  else:
    index %= topology.num_rounds
  rounds = _edges.list_rounds(strategy, topology)
  is_exact = all(a is b for a, b in zip(values, messages, strict=True))
  if is_exact and all(each.is_mean for each in rounds):
    return _exchange.average(values, messages, axis_name)
  return _exchange.exchange_rounds(values, messages, rounds, index, axis_name)


def _draw_row(
  strategy: _peers.Gossip, key: jax.Array, axis_name: str
) -> _exchange.Row:
  """Every node draws from all, itself too: what that is for this one."""
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
  """A mass as a float array; 1 becomes 1.0."""
  mass = jnp.asarray(mass)
  is_float = jnp.issubdtype(mass.dtype, jnp.floating)
  return mass if is_float else mass.astype(jnp.result_type(float))


def _check(
  strategy: _strategy.PeerStrategy,
  num_nodes: int,
  key: Any,
  mass: Any,
  dtype: Any,
) -> None:
  """Raises a ValueError if the arguments of `mix` do not fit each other."""
  is_gossip = isinstance(strategy, _peers.Gossip)
  if not is_gossip and not isinstance(strategy, _allreduce.AllReduce):
    raise ValueError(
      f'mix does gossip and AllReduce, got {strategy!r}; for Elastic there is '
      'mix_elastic.'
    )
  strategy.check_together(num_nodes)
  if is_gossip and isinstance(strategy.peers, str) and not _is_key(key):
    raise ValueError(
      f'Random peers ({strategy.peers!r}) need a key of jax.random, the same '
      f'on all nodes, got {key!r}.'
    )
  if isinstance(strategy, _push_sum.PushSum) != (mass is not None):
    raise ValueError(
      'PushSum, and nothing else, has a mass, 1.0 on every node at first; got '
      f'mass={mass!r} for {type(strategy).__name__}.'
    )
  if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(f'dtype must be that of floats, got {dtype!r}.')


def _is_key(key: Any) -> bool:
  """Whether that can be a key, of the new kind or of the old."""
  if not isinstance(key, jax.Array | np.ndarray):
    return False
  is_new = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
  return bool(is_new or key.dtype == jnp.uint32)
