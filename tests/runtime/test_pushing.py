"""Pushing weights and sums: who is sent what, and no mass is forgotten."""

import math
import random
import threading

import numpy as np
import pytest

from jasgd import gossip
from jasgd.runtime import _host
from jasgd.runtime import _messages
from jasgd.runtime import _mixing
from tests.runtime import mixing_cases

ALONE = gossip.ring(1)  # Nobody to send to.


@pytest.mark.parametrize('num_received', [0, 1, 3])
def test_push_is_the_mean_of_all_that_has_come(num_received):
  """x <- (w x + sum of received) / (w + number), w is 1: it has sent."""
  peers = mixing_cases.Peers([1])
  mixing, weights, book = mixing_cases.make_pusher(
    gossip.Push(peers='matching'), peers, value=8.0
  )
  for number in range(num_received):
    assert (
      mixing.take(mixing_cases.make_push(1, 0.5, 100.0 + number)) == _host.TAKEN
    )
  mixing.mix(0)
  ((peer, message, value),) = peers.pushes
  assert (peer, message.learner, message.clock, message.step) == (1, 0, 7, 5)
  assert (message.rate, value) == (0.5, 8.0)
  received = [100.0 + number for number in range(num_received)]
  expected = (8.0 + sum(received)) / (1 + num_received)
  assert weights.value == pytest.approx(expected)
  assert len(weights.mixes) == bool(num_received)
  assert weights.mass == 0.0
  assert book.records == []


@pytest.mark.parametrize('why', ['nobody is drawn', 'full'])
def test_what_is_not_sent_is_kept(why):
  """w is 2: the node has drawn itself, or the other had no room."""
  peers = mixing_cases.Peers(
    [1] if why == 'full' else [], fates={1: _host.FULL}
  )
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(peers='matching'), peers, value=9.0
  )
  mixing.take(mixing_cases.make_push(1, 0.5, 30.0))
  mixing.mix(0)
  assert weights.value == pytest.approx((2 * 9 + 30) / 3)
  assert len(peers.pushes) == mixing.num_full == (why == 'full')


def test_push_along_a_topology():
  """One of three is dead, and what it would get is kept."""
  topology = gossip.complete(4)
  peers = mixing_cases.Peers([1, 3])
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(peers=topology), peers, value=8.0
  )
  mixing.take(mixing_cases.make_push(1, 0.25, 20.0))
  mixing.mix(0)
  sent = [(peer, message.rate) for peer, message, _ in peers.pushes]
  assert sent == [(1, 0.25), (3, 0.25)]
  assert weights.value == pytest.approx((0.5 * 8 + 0.25 * 20) / 0.75)


def test_shares_are_of_the_mass_before_any_was_sent():
  peers = mixing_cases.Peers([1, 2, 3])
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.PushSum(peers=gossip.complete(4)), peers, mass=2.0
  )
  mixing.mix(0)
  assert [message.rate for _, message, _ in peers.pushes] == [0.5] * 3
  assert weights.mass == 0.5


def test_a_mix_weighs_by_mass():
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.PushSum(peers=ALONE), mixing_cases.Peers(), value=10.0, mass=0.5
  )
  mixing.take(mixing_cases.make_push(1, 0.25, 40.0, clock=3, step=2))
  mixing.take(mixing_cases.make_push(2, 0.25, 80.0, clock=6, step=1))
  mixing.mix(0)
  # The record of the mix has the mass that is there after it.
  others = [(1, 3, 2, 0.25), (2, 6, 1, 0.25)]
  assert weights.mixes == [(others, 0.5, 11.0, 1.0)]
  assert weights.value == 0.5 * 10 + 0.25 * 40 + 0.25 * 80
  assert weights.mass == 1.0


def test_masses_of_zero_change_nothing():
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.PushSum(peers=ALONE), mixing_cases.Peers(), value=10.0, mass=0.0
  )
  mixing.take(mixing_cases.make_push(1, 0.0, 40.0))
  mixing.mix(0)
  assert (weights.value, weights.mass) == (10.0, 0.0)
  assert weights.mixes == [([(1, 4, 2, 0.0)], 1.0, 11.0, 0.0)]


@pytest.mark.parametrize('name', ['exponential', 'ring', 'star'])
def test_all_at_once_is_the_push_of_the_topology(name):
  """Masses, and weights times mass, of all nodes after one round."""
  num_nodes = 5
  topology = gossip.make_topology(name, num_nodes)
  values = np.arange(num_nodes) + 1.0
  masses = np.linspace(0.5, 1.5, num_nodes)
  nodes = []
  for node in range(num_nodes):
    others = [each for each in range(num_nodes) if each != node]
    peers = mixing_cases.Peers(others)
    mixing, weights, _ = mixing_cases.make_pusher(
      gossip.PushSum(peers=topology),
      peers,
      num_nodes,
      node=node,
      value=values[node],
      mass=masses[node],
    )
    nodes.append((mixing, weights, peers))
  for mixing, _, _ in nodes:
    mixing.mix(0)
  for _, _, peers in nodes:
    for peer, message, value in peers.pushes:
      nodes[peer][0].take(
        mixing_cases.make_push(message.learner, message.rate, value)
      )
  for mixing, _, _ in nodes:
    mixing.rest()
  mass = np.array([weights.mass for _, weights, _ in nodes])
  value = np.array([weights.value for _, weights, _ in nodes])
  np.testing.assert_allclose(mass, topology.push(masses), rtol=1e-12)
  np.testing.assert_allclose(
    value * mass, topology.push(values * masses), rtol=1e-6
  )


class Network(mixing_cases.Peers):
  """Delivers at once, or never."""

  def __init__(self, nodes, alive, is_lost=lambda: False):
    super().__init__(alive)
    self._nodes = nodes
    self._is_lost = is_lost
    self.num_full = 0

  def push(self, peer, message, write):
    if self._is_lost():
      return None
    payload = np.zeros(mixing_cases.LAYOUT.size, np.uint8)
    write(payload)
    message.payload = payload
    fate = self._nodes[peer][0].take(message)
    self.num_full += fate == _host.FULL
    payload[:] = 255  # It is the sender's again.
    return fate


@pytest.mark.parametrize(
  'peers',
  ['independent', 'permutation', gossip.exponential(5)],
  ids=['independent', 'permutation', 'exponential'],
)
def test_no_mass_is_made_or_forgotten(monkeypatch, peers):
  """Kept, waiting and lost masses sum to what there was at the start."""
  monkeypatch.setattr(_mixing, '_MAX_WAITING', 1)
  num_nodes, chance = 5, random.Random(3)
  strategy, nodes, networks = gossip.PushSum(peers=peers), [], []
  for node in range(num_nodes):
    others = [each for each in range(num_nodes) if each != node]
    network = Network(nodes, others, lambda: chance.random() < 0.1)
    nodes.append(
      mixing_cases.make_pusher(
        strategy, network, num_nodes, node=node, mass=1.0
      )
    )
    networks.append(network)

  def count_mass():
    kept = [weights.mass for _, weights, _ in nodes]
    waiting = [
      other.weight for mixing, _, _ in nodes for other, _ in mixing._waiting
    ]
    lost = [row['mass'] for _, _, book in nodes for _, row in book.records]
    return math.fsum(kept + waiting + lost), sum(lost)

  for round_index in range(60):
    for mixing, _, _ in nodes[bool(round_index % 8) :]:  # Node 0 is slow.
      mixing.mix(round_index)
      assert count_mass()[0] == pytest.approx(num_nodes, abs=1e-12)
  assert count_mass()[1] > 0.1
  num_full = [mixing.num_full for mixing, _, _ in nodes]
  assert num_full == [network.num_full for network in networks]
  assert sum(num_full) > 0


def test_push_sum_comes_to_the_mean():
  """Without losses, whatever the speeds: the masses are there for that."""
  num_nodes, chance = 4, random.Random(7)
  nodes = []
  for node in range(num_nodes):
    others = [each for each in range(num_nodes) if each != node]
    nodes.append(
      mixing_cases.make_pusher(
        gossip.PushSum(),
        Network(nodes, others),
        num_nodes,
        node=node,
        value=10.0 * node,
        mass=1.0,
      )
    )
  for round_index in range(300):
    nodes[chance.choice([0, 1, 1, 2, 2, 2, 3])][0].mix(round_index)
  for mixing, _, _ in nodes:
    mixing.rest()
  total = sum(weights.mass for _, weights, _ in nodes)
  assert total == pytest.approx(num_nodes, abs=1e-12)
  for _, weights, _ in nodes:
    assert weights.value == pytest.approx(15.0, abs=1e-3)


@pytest.mark.parametrize('strategy', [gossip.Push, gossip.PushSum])
def test_who_is_done_takes_no_mass_of_the_slower(strategy):
  """Or else it would have all of it in the end."""
  mixing, weights, _ = mixing_cases.make_pusher(
    strategy(), mixing_cases.Peers([1]), mass=0.5
  )
  before, slower, same = (
    mixing_cases.make_push(1, 0.25, step=step)
    for step in (weights.step - 1, weights.step - 1, weights.step)
  )
  assert mixing.take(before) == _host.TAKEN
  mixing.rest()
  has_mass = strategy is gossip.PushSum
  assert weights.mass == (0.75 if has_mass else 0.5)
  assert mixing.take(slower) == (_host.DONE if has_mass else _host.TAKEN)
  assert mixing.take(same) == _host.TAKEN


def test_mass_that_is_not_taken_is_kept(caplog):
  peers = mixing_cases.Peers([1], fates={1: _host.DONE})
  mixing, weights, book = mixing_cases.make_pusher(
    gossip.PushSum(peers='matching'), peers, mass=0.75
  )
  mixing.mix(0)
  assert len(peers.pushes) == 1
  assert weights.mass == 0.75
  assert not book.records
  assert (mixing.num_done, mixing.num_full) == (1, 0)
  assert not caplog.records


@pytest.mark.parametrize('strategy', [gossip.Push, gossip.PushSum])
def test_what_never_came_to_be_taken_is_kept(strategy):
  """Its receiver is known to have hung up before: nothing is lost."""
  peers = mixing_cases.Peers([1], fates={1: _host.UNTAKEN})
  mixing, weights, book = mixing_cases.make_pusher(
    strategy(peers='matching'), peers, value=9.0, mass=0.75
  )
  mixing.take(mixing_cases.make_push(1, 0.5, 30.0))
  mixing.mix(0)
  assert len(peers.pushes) == 1
  has_mass = strategy is gossip.PushSum
  assert weights.mass == (1.25 if has_mass else 0.75)
  own = 0.75 if has_mass else 1.0
  assert weights.value == pytest.approx((own * 9 + 0.5 * 30) / (own + 0.5))
  assert not book.records
  assert mixing.num_done == mixing.num_full == 0


@pytest.mark.parametrize('strategy', [gossip.Push, gossip.PushSum])
def test_who_has_ended_takes_nothing(strategy):
  """Not even of those who are as far: it would be in no checkpoint."""
  mixing, weights, _ = mixing_cases.make_pusher(
    strategy(), mixing_cases.Peers([1]), value=8.0, mass=0.5
  )
  message = mixing_cases.make_push(1, 0.25, 8.0, step=weights.step)
  assert mixing.take(message) == _host.TAKEN
  mixing.end()
  assert len(weights.mixes) == 1
  assert mixing.take(message) == _host.DONE
  mixing.end()
  assert len(weights.mixes) == 1
  assert weights.mass == (0.75 if strategy is gossip.PushSum else 0.5)


def test_nobody_waits_for_a_copy(monkeypatch):
  """What is being copied while a node ends is not taken, nor waited for."""
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.PushSum(), mixing_cases.Peers([1]), mass=0.5
  )
  copyto = np.copyto

  def copy_slowly(*arrays):
    thread = threading.Thread(target=mixing.end)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive()
    copyto(*arrays)

  monkeypatch.setattr(np, 'copyto', copy_slowly)
  assert mixing.take(mixing_cases.make_push(1, 0.25)) == _host.DONE
  assert weights.mixes == []
  assert len(mixing._pool._free) == len(mixing._pool) == 1


@pytest.mark.parametrize('strategy', [gossip.Push, gossip.PushSum])
def test_no_room_keeps_share_and_mass_and_is_counted(strategy, caplog):
  peers = mixing_cases.Peers([1], fates={1: _host.FULL})
  mixing, weights, book = mixing_cases.make_pusher(
    strategy(peers='matching'), peers, value=3.0, mass=0.75
  )
  for count in range(1, 4):
    mixing.mix(count)
    assert len(peers.pushes) == mixing.num_full == count
  assert weights.mass == 0.75
  assert book.records == weights.mixes == []
  (record,) = caplog.records  # Once is enough.
  assert 'Node 1 has no room' in record.message
  peers.fates = {}
  mixing.mix(5)
  assert mixing.num_full == 3
  has_mass = strategy is gossip.PushSum
  assert weights.mass == (0.375 if has_mass else 0.75)
  assert peers.pushes[-1][1].rate == (0.375 if has_mass else 0.5)


@pytest.mark.parametrize(
  ('strategy', 'mass', 'kept', 'lost'),
  [(gossip.Push, 0.0, 0.0, 0.0), (gossip.PushSum, 0.75, 0.375, 0.375)],
)
def test_an_unknown_fate_is_a_loss(strategy, mass, kept, lost):
  peers = mixing_cases.Peers([1], fates={1: None})
  mixing, weights, book = mixing_cases.make_pusher(
    strategy(peers='matching'), peers, value=3.0, mass=mass
  )
  mixing.mix(0)
  row = {'peer': 1, 'version': 7, 'step': 5, 'mass': lost}
  assert book.records == [(mixing_cases.Kind.LOST, row)]
  assert weights.mass == kept
  assert mixing.num_full == 0


def test_a_share_of_unknown_fate_is_gone():
  """It may be in another's mix: the own weight is what is left."""
  peers = mixing_cases.Peers([1], fates={1: None})
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(peers='matching'), peers, value=8.0
  )
  mixing.take(mixing_cases.make_push(1, 0.5, 20.0))
  mixing.mix(0)
  assert weights.value == pytest.approx((8 + 20) / 2)


def test_who_rests_mixes_what_comes():
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(), mixing_cases.Peers([1, 2]), value=8.0
  )
  mixing.rest()
  assert weights.mixes == []
  mixing.take(mixing_cases.make_push(2, 0.5, 20.0))
  mixing.rest()
  mixing.rest()
  assert weights.value == pytest.approx((1.0 * 8 + 0.5 * 20) / 1.5)
  assert len(weights.mixes) == 1


def test_what_waits_is_bounded_and_buffers_come_back():
  num_nodes = 3
  room = _mixing._MAX_WAITING * num_nodes
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(peers=ALONE), mixing_cases.Peers(), num_nodes
  )
  for _ in range(5):
    payload = mixing_cases.make_payload(6.0)
    for number in range(room):
      message = mixing_cases.make_push(1 + number % 2, 0.5)
      message.payload = payload
      assert mixing.take(message) == _host.TAKEN
    payload[:] = 255  # Its owner uses it again.
    for _ in range(3):
      assert mixing.take(mixing_cases.make_push(1, 0.5, 100.0)) == _host.FULL
    weights.value = 0.0
    mixing.mix(0)
    expected = 6.0 * 0.5 * room / (1 + 0.5 * room)
    assert weights.value == pytest.approx(expected, rel=1e-6)
  assert len(mixing._pool) == len(mixing._pool._free) == room
  assert mixing.num_full == 0  # That is for the sender to count.


def test_what_comes_meanwhile_waits_for_the_next_mix():
  """Takes come in another thread, also while weights are mixed."""
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.Push(peers=ALONE), mixing_cases.Peers()
  )
  mix = weights.mix

  def mix_slowly(others, own_weight, start):
    thread = threading.Thread(
      target=mixing.take, args=(mixing_cases.make_push(2, 0.5, 50.0),)
    )
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive()
    mix(others, own_weight, start)

  mixing.take(mixing_cases.make_push(1, 0.5, 9.0))
  weights.mix = mix_slowly
  mixing.mix(0)
  assert weights.value == pytest.approx(9 * 0.5 / 1.5)
  weights.mix = mix
  mixing.mix(1)
  assert weights.value == pytest.approx((3 + 50 * 0.5) / 1.5)


SENDERS = {
  'itself': (mixing_cases.make_push(2, 0.5), 'learner', 'another node than 2'),
  'nobody': (mixing_cases.make_push(-1, 0.5), 'learner', 'from 0 to 3, got -1'),
  'no such node': (
    mixing_cases.make_push(4, 0.5),
    'learner',
    'from 0 to 3, got 4',
  ),
  'version': (
    mixing_cases.make_push(1, 0.5, clock=-3),
    'clock',
    'at least 0, got -3 and 2',
  ),
  'step': (
    mixing_cases.make_push(1, 0.5, step=-9),
    'clock',
    'at least 0, got 4 and -9',
  ),
  'weight': (
    mixing_cases.make_push(1, -0.5),
    'weight',
    'from 0 to 4, got -0.5',
  ),
  'heavy': (mixing_cases.make_push(1, 4.5), 'weight', 'from 0 to 4, got 4.5'),
  'NaN': (
    mixing_cases.make_push(1, math.nan),
    'weight',
    'from 0 to 4, got nan',
  ),
  'infinite': (
    mixing_cases.make_push(1, math.inf),
    'weight',
    'from 0 to 4, got inf',
  ),
}


@pytest.mark.parametrize('name', SENDERS)
def test_what_nobody_can_have_sent_is_refused(name):
  message, reason, text = SENDERS[name]
  mixing, weights, _ = mixing_cases.make_pusher(
    gossip.PushSum(peers=ALONE), mixing_cases.Peers(), 4, node=2, mass=1.0
  )
  with pytest.raises(_messages.MessageError, match=text) as caught:
    mixing.take(message)
  assert caught.value.reason == reason
  mixing.mix(0)
  assert weights.mixes == []
  assert weights.mass == 1.0


@pytest.mark.parametrize('weight', [0.0, 4.0])
def test_the_bounds_themselves_are_good(weight):
  mixing, _, _ = mixing_cases.make_pusher(
    gossip.PushSum(), mixing_cases.Peers(), 4, node=2, mass=1.0
  )
  message = mixing_cases.make_push(3, weight, clock=0, step=0)
  assert mixing.take(message) == _host.TAKEN
