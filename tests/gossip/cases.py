"""Every kind of topology, with possible sizes and its promised properties.

A new kind is tested by `test_topologies.py` once it is listed in `CASES`;
the first test there fails until it is listed. Sizes are 1 and 2, where graphs
degenerate, an odd one and an even one.
"""

import dataclasses
from typing import Any

import pytest

from jasgd import gossip

ANY = (1, 2, 5, 12)
POWERS = (1, 2, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A kind of topology, sizes to test, and its promised properties."""

  kind: str
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  sizes: tuple[int, ...] = ANY
  is_symmetric: bool = True
  is_doubly_stochastic: bool = True

  def make(self, num_nodes: int) -> gossip.topologies.Topology:
    return gossip.topologies.make_topology(
      self.kind, num_nodes, **self.arguments
    )


CASES = (
  Case(kind='complete'),
  Case(kind='ring'),
  Case(kind='torus', sizes=(1, 4, 12, 15)),
  Case(kind='exponential', is_symmetric=False),
  Case(kind='hypercube', sizes=POWERS),
  Case(kind='star'),
  Case(
    kind='random_regular',
    arguments={'degree': 2, 'seed': 3},
    sizes=(3, 8),
  ),
  Case(
    kind='random_regular',
    arguments={'degree': 3, 'seed': 4},
    sizes=(4, 10),
  ),
  Case(
    kind='random_regular',
    arguments={'degree': 6, 'seed': 5},
    sizes=(7, 14),
  ),
  Case(kind='one_peer_exponential', is_symmetric=False),
  Case(kind='one_peer_hypercube', sizes=POWERS),
  Case(kind='random_matching', arguments={'num_rounds': 12, 'seed': 6}),
  Case(
    kind='random_permutation',
    arguments={'num_rounds': 12, 'seed': 7},
    is_symmetric=False,
  ),
  Case(
    kind='random_independent',
    arguments={'num_rounds': 24, 'seed': 8},
    is_symmetric=False,
    is_doubly_stochastic=False,
  ),
)

every_case = pytest.mark.parametrize(
  'case',
  [
    pytest.param(case, id=f'{case.kind}{list(case.arguments.values())[:1]}')
    for case in CASES
  ],
)
