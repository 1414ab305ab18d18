"""Mixes of all nodes on one device, compiled quickly."""

import functools

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
  (gossip.PushSum, 'permutation'),
  (gossip.PushSum, 'star'),
)
every_rule = pytest.mark.parametrize('rule', mix_cases.RULES)


@functools.cache
def list_topologies():
  """One topology of every kind, with 8 nodes."""
  return mix_cases.list_topologies(8)


def with_peers(*pairs):
  """Parameters `rule` and `peers` of a test: the few above, if none are given.

  Args:
    *pairs: Rules, and names of random peers or of kinds of topologies.

  Returns:
    The decorator of the test.
  """
  return pytest.mark.parametrize(
    ('rule', 'peers'),
    [
      pytest.param(
        rule, list_topologies().get(name, name), id=f'{rule.__name__}, {name}'
      )
      for rule, name in pairs or _FEW
    ],
  )


@functools.cache
def make_mix(strategy, **arguments):
  """A mix of all nodes, `(values, step, key) -> params`, compiled once.

  Tests that give it values of one shape share the compiled program.
  """
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
