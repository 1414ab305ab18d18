"""Every kind of topology by its name, for configs and for tests."""

from collections.abc import Callable
import inspect
from typing import Any

from jasgd.gossip import _checks
from jasgd.gossip import _graphs
from jasgd.gossip import _regular
from jasgd.gossip import _rounds
from jasgd.gossip import _topology

_FACTORIES: dict[str, Callable[..., _topology.Topology]] = {
  factory.__name__: factory
  for factory in (
    _graphs.complete,
    _graphs.exponential,
    _graphs.hypercube,
    _rounds.one_peer_exponential,
    _rounds.one_peer_hypercube,
    _rounds.random_independent,
    _rounds.random_matching,
    _rounds.random_permutation,
    _regular.random_regular,
    _graphs.ring,
    _graphs.star,
    _graphs.torus,
  )
}

KINDS: tuple[str, ...] = tuple(_FACTORIES)


def make_topology(
  kind: str, num_nodes: int, **arguments: Any
) -> _topology.Topology:
  """Builds a topology from the name of its kind.

  Args:
    kind: One of `KINDS`.
    num_nodes: n.
    **arguments: What else the kind takes, such as `num_rounds` or `degree`.

  Returns:
    The topology.

  Raises:
    ValueError: if the name is unknown, or the arguments do not fit.

  Examples:
    >>> from jasgd import gossip
    >>> gossip.make_topology('random_regular', 16, degree=3, seed=1)
    Topology(random_regular, num_nodes=16, num_rounds=1, max_degree=3)

  References:
    Assran et al., `Stochastic Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019
  """
  _checks.check_choice('topology', kind, KINDS)
  factory = _FACTORIES[kind]
  signature = inspect.signature(factory)
  try:
    signature.bind(num_nodes, **arguments)
  except TypeError as error:
    parameters = ', '.join(signature.parameters)
    raise ValueError(
      f'Topology {kind!r} takes ({parameters}), got {arguments}: {error}.'
    ) from None
  return factory(num_nodes, **arguments)
