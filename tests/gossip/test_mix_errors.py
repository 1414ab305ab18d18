"""Mixing: what is refused."""

import jax
import jax.numpy as jnp
import pytest

from jasgd import gossip
from tests.gossip import mix_vmap

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize(
  ('strategy', 'arguments', 'message'),
  [
    (gossip.Pull(), {}, r"Random peers \('independent'\) need a key"),
    (gossip.Push(peers='matching'), {}, r"peers \('matching'\) need a key"),
    (gossip.Pull(), {'key': mix_vmap.KEY, 'mass': 1.0}, 'mass=1.0 for Pull'),
    (gossip.AllReduce(), {'mass': 1.0}, 'mass=1.0 for AllReduce'),
    (
      gossip.PushSum(peers=gossip.ring(4)),
      {'mass': None},
      'has a mass, 1.0 on every node at first; got mass=None',
    ),
    (gossip.Pull(peers=gossip.ring(5)), {}, 'has 5 nodes, but there are 4'),
    (gossip.Elastic(), {}, 'for Elastic there is mix_elastic'),
    (
      gossip.Pairs(),
      {'key': mix_vmap.KEY},
      "Pairs need peers='matching' .* got 'independent'",
    ),
    (
      gossip.Pairs(peers='permutation'),
      {'key': mix_vmap.KEY},
      "got 'permutation'",
    ),
    (gossip.Pairs(peers=gossip.ring(4)), {}, 'got ring with 2'),
    (
      gossip.Pairs(peers=gossip.one_peer_exponential(4)),
      {},
      'one peer per node and round, got one_peer_exponential',
    ),
    (gossip.AllReduce(), {'dtype': jnp.int8}, 'dtype must be that of floats'),
    (gossip.AllReduce(), {'step': 0}, 'step must be a whole number of at'),
    (gossip.AllReduce(), {'step': 1.5}, 'step must be a whole .* got 1.5'),
    (gossip.Pull(), {'key': 0}, r'need a key of jax.random, .* got 0'),
  ],
)
def test_errors_say_what_was_given(strategy, arguments, message):
  with pytest.raises(ValueError, match=message):
    jax.vmap(
      lambda row: gossip.mix(row, mix_vmap.AXIS, strategy, **arguments),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))


@pytest.mark.parametrize('centre', [jnp.zeros(2), {'a': jnp.zeros(())}])
def test_elastic_wants_a_centre_like_the_nodes(centre):
  with pytest.raises(ValueError, match=r"of the shapes {'': \(\)}, got {"):
    jax.vmap(
      lambda row: gossip.mix_elastic(
        row, centre, mix_vmap.AXIS, gossip.Elastic(rate=0.1)
      ),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))


def test_elastic_wants_its_own_strategy():
  with pytest.raises(ValueError, match=r'mix_elastic is for Elastic, got Pull'):
    jax.vmap(
      lambda row: gossip.mix_elastic(row, row, mix_vmap.AXIS, gossip.Pull()),
      axis_name=mix_vmap.AXIS,
    )(jnp.arange(4.0))
