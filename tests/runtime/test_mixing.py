"""Pulling, and moving with a centre: who is asked, and what it weighs."""

import inspect
import threading

import pytest

from jasgd import gossip
from jasgd import traces
from jasgd.runtime import _messages
from jasgd.runtime import _mixing
from jasgd.runtime import _node_books
from jasgd.runtime import _node_weights
from jasgd.runtime import _peers
from tests.runtime import mixing_cases


def test_pull_takes_the_weighted_mean():
  strategy = gossip.Pull(peers='matching', beta=0.25)
  peers = mixing_cases.Peers([1], {1: [mixing_cases.answer(9, 8, 40.0)]})
  mixing, weights, book = mixing_cases.make_pull(strategy, peers, value=20.0)
  mixing.mix(0)
  assert weights.value == 0.75 * 20 + 0.25 * 40
  # It began before anybody was asked.
  assert weights.mixes == [([(1, 9, 8, 0.25)], 0.75, 11.0, 0.0)]
  assert book.records == []


def test_what_does_not_answer_leaves_its_weight_to_the_node():
  """1 of 6 each, but for node 2, which has died just now, and 5, long ago."""
  strategy = gossip.Pull(peers=gossip.complete(6))
  peers = mixing_cases.Peers([1, 2, 3, 4])
  peers.answers = {
    peer: [mixing_cases.answer(peer, peer, 6.0 * peer)] for peer in (1, 3, 4)
  }
  mixing, weights, book = mixing_cases.make_pull(strategy, peers, value=12.0)
  mixing.mix(3)
  ((others, own_weight, start, _),) = weights.mixes
  assert [other[0] for other in others] == [1, 3, 4]
  assert own_weight == pytest.approx(1 / 2)
  assert weights.value == pytest.approx(12 / 2 + (6 + 18 + 24) / 6)
  assert own_weight + sum(other[3] for other in others) == pytest.approx(1)
  # The book's clock ticks whenever it is looked at: 11 at first, then once for
  # each question, and once when there was no answer.
  times = {'start_time': 13.0, 'end_time': 14.0}
  row = {'peer': 2, 'version': -1, 'step': 5, **times}
  assert book.records == [(mixing_cases.Kind.LOST, row)]
  assert start == 11.0 + (14.0 - 13.0)  # No second counts twice.


def test_if_nobody_answers_nothing_is_mixed():
  mixing, weights, book = mixing_cases.make_pull(
    gossip.Pull(peers=gossip.ring(4)), mixing_cases.Peers([1, 3]), value=1.0
  )
  mixing.mix(0)
  assert weights.mixes == []
  assert [row['peer'] for _, row in book.records] == [1, 3]


def test_a_node_alone_asks_nobody():
  for peers in ('independent', 'permutation', 'matching', gossip.ring(4)):
    mixing, weights, book = mixing_cases.make_pull(
      gossip.Pull(peers=peers), mixing_cases.Peers()
    )
    for round_index in range(10):
      mixing.mix(round_index)
      mixing.rest()
    assert weights.mixes == book.records == []
    assert mixing.num_full == 0


def is_never():
  """Nobody asks for the end."""
  return False


def make_elastic(peers, **options):
  parts = mixing_cases.make_parts(peers, node=3, value=10.0)
  mixing = _mixing.ElasticMixing(
    gossip.Elastic(rate=0.25, **options), 4.5, is_never, **parts
  )
  return mixing, parts['weights'], parts['book']


@pytest.mark.parametrize(
  ('order', 'is_before'), [('a3', False), ('easgd', True)]
)
def test_the_force_is_sent_once(order, is_before):
  peers = mixing_cases.Peers(
    [traces.CENTRE], {traces.CENTRE: [mixing_cases.answer(30, 30, 2.0)]}
  )
  mixing, weights, book = make_elastic(peers, order=order)
  mixing.mix(0)
  assert weights.pulls == [((traces.CENTRE, 30, 30, 0.25), 11.0, is_before)]
  assert weights.value == 10 - 0.25 * 8
  ((peer, message, force),) = peers.pushes
  assert (peer, force) == (traces.CENTRE, 0.25 * 8)
  assert (message.learner, message.step, message.rate) == (3, 5, 0.25)
  assert message.clock == 7  # Before the move: so replay finds the force.
  assert weights.version == 8
  assert book.records == []
  assert peers.waits == []


def test_a_force_that_does_not_come_is_a_loss():
  peers = mixing_cases.Peers(
    [traces.CENTRE], {traces.CENTRE: [mixing_cases.answer(30, 30, 2.0)]}
  )
  peers.fates = {traces.CENTRE: None}
  mixing, weights, book = make_elastic(peers)
  mixing.mix(0)
  assert len(peers.pushes) == 1
  row = {'peer': traces.CENTRE, 'version': 7, 'step': 5}
  assert book.records == [(mixing_cases.Kind.LOST, row)]
  assert weights.value == 8.0  # The node has moved, and nobody knows.


def test_without_an_answer_nothing_happens():
  peers = mixing_cases.Peers()
  mixing, weights, book = make_elastic(peers)
  mixing.mix(0)
  assert peers.waits == [(1, 4.5, is_never)]
  assert peers.pushes == weights.pulls == book.records == []
  assert weights.value == 10.0


def test_a_centre_that_comes_back_is_asked_again():
  peers = mixing_cases.Peers(
    [], {traces.CENTRE: [None, mixing_cases.answer(31, 31, 6.0)]}
  )
  peers.comes_back = True
  mixing, weights, _ = make_elastic(peers)
  mixing.mix(0)
  assert len(peers.waits) == len(peers.pushes) == 1
  assert weights.value == 10 - 0.25 * 4
  mixing.mix(1)  # Gone again: asked, waited for, and asked; no more.
  assert len(peers.waits) == 2
  assert len(peers.pushes) == 1


def test_a_centre_that_is_gone_is_waited_for_once():
  peers = mixing_cases.Peers()
  mixing, weights, book = make_elastic(peers)
  for round_index in range(5):
    mixing.mix(round_index)
  assert len(peers.waits) == 1
  assert peers.pushes == weights.pulls == book.records == []
  # Once it is there it is asked, and the next time waited for.
  peers.answers = {traces.CENTRE: [mixing_cases.answer(31, 31, 6.0)]}
  mixing.mix(5)
  assert len(peers.pushes) == len(peers.waits) == 1
  for round_index in range(6, 9):
    mixing.mix(round_index)
  assert len(peers.waits) == 2


class NoMembers:
  """A registry in which there is nobody."""

  def ask_strangers(self):
    """There are none."""

  def list_members(self):
    """There are none."""
    return []


def test_who_is_told_to_stop_waits_for_nobody():
  peers = _peers.Peers(NoMembers(), bool, str, 0)
  peers.start()
  try:
    stopped = threading.Event()
    stopped.set()
    assert not peers.wait_for(1, 3600.0, stopped.is_set)
  finally:
    peers.close()


def test_who_is_asked_takes_nothing():
  mixings = [
    mixing_cases.make_pull(gossip.Pull(), mixing_cases.Peers())[0],
    make_elastic(mixing_cases.Peers())[0],
  ]
  for mixing in mixings:
    with pytest.raises(_messages.MessageError, match='takes no weights'):
      mixing.take(mixing_cases.make_push(1, 0.5))
    mixing.rest()


@pytest.mark.parametrize(
  ('fake', 'real', 'names'),
  [
    (
      mixing_cases.Weights,
      _node_weights.NodeWeights,
      ('mix', 'pull_centre', 'pack'),
    ),
    (mixing_cases.Peers, _peers.Peers, ('pull', 'push', 'wait_for')),
    (mixing_cases.Book, _node_books.NodeBook, ('get_time', 'write')),
  ],
)
def test_fakes_are_called_like_the_real_ones(fake, real, names):
  for name in names:
    given, wanted = (
      list(inspect.signature(getattr(each, name)).parameters)
      for each in (fake, real)
    )
    assert given == wanted
