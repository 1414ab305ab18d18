"""Connections of a node to peers that come, go, are silent, and come back."""

import contextlib
import json
import logging
import threading

import pytest

from jasgd import gossip
from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.runtime import wires
from jasgd.runtime.nodes import _connections

Message, Verb = wires.Message, wires.Verb
PATIENCE = 30.0  # Seconds: never reached, unless something is broken.
SIZE = 8


class Connection:
  """A connection to a peer whose answers and delays the test sets."""

  def __init__(self, registry, peer):
    self._registry = registry
    self._peer = peer
    self.outgoing = bytearray(SIZE)
    self.is_closed = False

  def request(self, message, *, has_payload=False, deadline):
    registry = self._registry
    registry.requests.append((self._peer, message.verb, has_payload, deadline))
    if message.verb == Verb.HELLO:
      assert message.text == 'hello'
      if self._peer in registry.unfriendly:
        raise wires.RefusedError('You learn something else.')
      return Message(Verb.ANSWER)
    if message.verb == Verb.STATUS:
      node = registry.moved.get(self._peer, self._peer)
      status = {'node': node, 'members': {'9': ['a:1', 1.0]}}
      return Message(Verb.ANSWER, text=json.dumps(status))
    registry.now += registry.seconds
    if registry.errors:
      raise registry.errors.pop(0)
    return Message(Verb.ANSWER, version=4, fate=gossip.Outcome.FULL)

  def close(self):
    self.is_closed = True


class Registry:
  """A registry whose members the test sets."""

  def __init__(self, *there):
    self.there = set(there)
    self.known = [1, 2, 7]
    self.unfriendly, self.moved, self.merged = set(), {}, []
    self.errors = []  # Errors of the next requests for weights.
    self.refusals = 0  # Refusals of `contact_addresses`.
    self.requests, self.connections = [], []
    self.now = self.seconds = 0.0

  def contact_addresses(self):
    if self.refusals:
      raise wires.RefusedError('The token is wrong.')
    return []

  def list_members(self):
    return self.known

  def connect(self, peer):
    def connect(size):
      assert size == SIZE
      if peer not in self.there:
        raise wires.WireError('There is no server.')
      self.connections.append(Connection(self, peer))
      return self.connections[-1]

    return connect

  def merge(self, entries):
    self.merged.append(entries)


def make_peers(registry, **deadlines):
  return _connections.PeerConnections(
    registry,
    lambda member: member < 5,
    lambda: 'hello',
    SIZE,
    runtime.Deadlines(**deadlines),
    clock=lambda: registry.now,
  )


def look(peers):
  """Does one round of the connecting thread."""
  peers._connect_all()
  return peers.alive


def test_wanted_peers_that_answer_are_alive():
  registry = Registry(2, 7)
  peers = make_peers(registry)
  assert peers.alive == []
  assert look(peers) == [2]
  registry.there.add(1)
  assert look(peers) == look(peers) == [1, 2]
  assert len(registry.connections) == 2  # One connection for each peer.
  assert registry.merged == [{'9': ['a:1', 1.0]}] * 2
  assert peers.pull(2).version == 4
  assert peers.get_status(1)['node'] == 1
  peers.close()
  assert peers.alive == []
  assert all(each.is_closed for each in registry.connections)


def test_a_lost_peer_may_come_back(caplog):
  caplog.set_level(logging.WARNING)
  registry = Registry(1, 2)
  peers = make_peers(registry)
  look(peers)
  registry.errors = [wires.WireError('It was silent.')]
  assert peers.pull(1) is None
  assert peers.alive == [2]
  assert [each.is_closed for each in registry.connections] == [True, False]
  assert peers.pull(1) is None  # A lost peer gets no request.
  assert peers.get_status(1) is None
  assert len(registry.requests) == 2 * 2 + 1
  registry.there.remove(1)
  assert look(peers) == [2]
  registry.there.add(1)
  assert look(peers) == [1, 2]
  assert peers.pull(1).version == 4
  assert [record.message for record in caplog.records] == [
    'node 1 is lost: It was silent.',
    'node 1 is back.',
  ]


@pytest.mark.parametrize(
  ('error', 'fate'),
  [
    (None, gossip.Outcome.FULL),
    # The payload may have arrived.
    (wires.WireError('It was silent.'), gossip.Outcome.UNKNOWN),
    (wires.UntakenError('It has hung up.'), gossip.Outcome.UNREACHABLE),
    (wires.RefusedError('Say HELLO.'), gossip.Outcome.UNREACHABLE),
  ],
)
def test_the_outcome_of_a_payload(error, fate):
  registry = Registry(1)
  peers = make_peers(registry)
  look(peers)
  registry.errors = [] if error is None else [error]
  written = []
  assert peers.push(1, Message(Verb.EXCHANGE), written.append) == fate
  assert written == [registry.connections[0].outgoing]
  assert registry.requests[-1][:3] == (1, Verb.EXCHANGE, True)
  assert peers.alive == ([1] if error is None else [])
  if error is not None:  # Nothing is sent to a peer that is not connected.
    assert (
      peers.push(1, Message(Verb.EXCHANGE), None) == gossip.Outcome.UNREACHABLE
    )


def test_a_peer_that_refuses_is_asked_again_and_logged_once(caplog):
  registry = Registry(1)
  registry.unfriendly.add(1)
  peers = make_peers(registry)
  for _ in range(3):
    assert look(peers) == []
  assert len(registry.connections) == 3
  assert all(each.is_closed for each in registry.connections)
  (record,) = caplog.records
  assert record.message == 'node 1 refuses this node: You learn something else.'
  registry.unfriendly.clear()
  assert look(peers) == [1]


def test_another_node_at_the_address_is_ignored():
  registry = Registry(1)
  registry.moved[1] = 3
  peers = make_peers(registry)
  assert look(peers) == []
  assert registry.merged == []
  assert registry.connections[0].is_closed
  registry.moved.clear()
  assert look(peers) == [1]


def test_an_unknown_address_that_refuses_is_logged_once(caplog):
  registry = Registry(1)
  registry.refusals = True
  peers = make_peers(registry)
  for _ in range(3):
    assert look(peers) == [1]
  assert [record.message for record in caplog.records] == [
    'The token is wrong.'
  ]


# --- Deadlines.


def pull(peers, registry, seconds):
  """Pulls from node 1, which takes `seconds`; gives the deadline."""
  registry.seconds = seconds
  assert peers.pull(1) is not None
  return registry.requests[-1][-1]


def test_the_adaptive_deadline_follows_recent_answers():
  registry = Registry(1)
  peers = make_peers(registry, silence=60.0)
  look(peers)
  assert pull(peers, registry, 0.01) == 1.0
  assert pull(peers, registry, 0.9) == 1.0
  assert pull(peers, registry, 0.01) == pytest.approx(9.0)
  assert pull(peers, registry, 0.01) == pytest.approx(9.0 * 0.98)
  for _ in range(300):
    patience = pull(peers, registry, 0.01)
  assert patience == 1.0  # One slow answer no longer counts.


def test_the_adaptive_deadline_is_at_most_silence():
  registry = Registry(1)
  peers = make_peers(registry, silence=20.0)
  look(peers)
  for seconds in (0.9, 8.9, 19.0):
    pull(peers, registry, seconds)
  assert pull(peers, registry, 0.01) == 20.0


def test_a_deadline_that_is_given_is_kept():
  registry = Registry(1)
  peers = make_peers(registry, step=3.0)
  look(peers)
  pull(peers, registry, 2.9)
  assert pull(peers, registry, 0.01) == 3.0
  assert {deadline for *_, deadline in registry.requests} == {3.0}


def test_wait_for_a_number_of_peers():
  registry = Registry(1)
  peers = make_peers(registry)
  stopped = threading.Event()
  assert not peers.wait_for(1, 0.0, stopped.is_set)
  with contextlib.closing(peers):
    peers.start()
    assert peers.wait_for(1, PATIENCE, stopped.is_set)
    stopped.set()
    assert not peers.wait_for(2, PATIENCE, stopped.is_set)


# --- The thread.


@pytest.mark.parametrize(
  'error', [OSError('Stale file handle'), workdirs.WorkdirError('mode 0644')]
)
def test_the_owner_raises_the_error_of_the_thread(error):
  registry = Registry(1)
  peers = make_peers(registry)

  def fail():
    raise error

  with contextlib.closing(peers):
    peers.check()
    registry.list_members = fail
    peers.start()
    peers._thread.join(PATIENCE)
    assert not peers._thread.is_alive()
    with pytest.raises(type(error), match=str(error)):
      peers.check()
