"""Mixes of all nodes on one device, compiled quickly."""

import jax
import pytest

from jasgd import gossip
from tests.gossip import mix_cases

AXIS = mix_cases.AXIS
KEY = jax.random.key(3)
# Every rule, and every way to send, is among them.
_FEW = (
  (gossip.Pull, 'independent'),
  (gossip.Pull, 'matching'),
  (gossip.Push, 'independent'),
  (gossip.Push, 'one_peer_exponential'),
  (gossip.PushSum, 'independent'),
  (gossip.PushSum, 'permutation'),
  (gossip.PushSum, 'star'),
)
every_rule = pytest.mark.parametrize('rule', mix_cases.RULES)


def with_peers(*peers):
  """For tests of every rule with these peers; but for a few they are slow.

  Args:
    *peers: Names of random peers, or of kinds of topologies with 8 nodes.

  Returns:
    What sets the arguments `rule` and `peers` of a test.
  """
  topologies = mix_cases.list_topologies(8)
  return pytest.mark.parametrize(
    ('rule', 'peers'),
    [
      pytest.param(
        rule,
        topologies.get(name, name),
        id=f'{rule.__name__}, {name}',
        marks=[] if (rule, name) in _FEW else [pytest.mark.slow],
      )
      for rule in mix_cases.RULES
      for name in peers
    ],
  )


def make_mix(strategy, **arguments):
  """A mix of all nodes, `(values, step, key) -> params`, compiled once."""
  if isinstance(strategy, gossip.PushSum):
    arguments.setdefault('mass', 1.0)

  def mix(row, step, key):
    mixed = gossip.mix(row, AXIS, strategy, step=step, key=key, **arguments)
    return mixed[0] if isinstance(strategy, gossip.PushSum) else mixed

  return jax.jit(jax.vmap(mix, (0, None, None), axis_name=AXIS))


def run(function, *rows):
  """A function of one node's rows, for all nodes."""
  return jax.jit(jax.vmap(function, axis_name=AXIS))(*rows)


def mix_all(values, strategy, key=KEY, **arguments):
  """The first mix of all nodes."""
  return make_mix(strategy, **arguments)(values, 1, key)
