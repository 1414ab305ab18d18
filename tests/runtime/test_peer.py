"""Nodes and a centre in threads: their traces replay to their weights."""

import dataclasses
import threading
import time

import numpy as np
import optax
import pytest

from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import nodes
from jasgd.runtime import wires
from tests.engine import node_cases
from tests.runtime import peer_cases

Kind = traces.Kind


def _get_statistics(weights):
  return weights[1]['mean']


@pytest.mark.parametrize(
  ('name', 'wire'),
  [
    pytest.param(
      name,
      wire,
      marks=pytest.mark.slow if (name, wire) == ('push', 'flight') else (),
    )
    for name in peer_cases.STRATEGIES
    for wire in ('memory', 'flight')
    # One strategy of each kind of exchange is enough for the second wire.
    if wire == 'memory' or name in ('easgd', 'push', 'push-sum')
  ],
)
def test_nodes_replay_to_the_same_bits(name, wire, tmp_path):
  """Statistics, as batch normalisation has them, are mixed like weights."""
  with peer_cases.start_group(
    tmp_path, name, wires=(wire,), deadlines=peer_cases.PATIENT
  ) as group:
    group.wait()
  replayed = group.check_replay()
  trace = group.load_trace()
  assert len(trace.steps) == 40 * peer_cases.NUM_NODES
  assert len(trace.mixes) > 20
  assert trace.header['bytes_per_push'] >= 4 * 40  # Of both.
  # As many messages, hence bytes, as hosts have sent.
  columns = traces.summarize(trace).workers.traffic
  num_sent = {
    node: peer._files.snapshots.desk.num_sent
    for node, peer in group.peers.items()
  }
  centre = num_sent.pop(traces.SERVER, None)
  if centre is not None:
    assert columns.num_received.sum() == centre
    assert columns.num_sent.sum() == len(trace.of_replica(traces.SERVER)) - 1
  elif 'pull' in name:
    assert columns.num_sent.tolist() == [num_sent[node] for node in range(3)]
  size = trace.header['bytes_per_push']
  assert columns.sent.tolist() == (size * columns.num_sent).tolist()
  # All weights are near each other, and so are all statistics.
  rows = np.asarray(_get_statistics(node_cases.stack_nodes(replayed)))
  assert np.ptp(rows, axis=0).max() < np.abs(rows).max()
  assert not np.array_equal(rows[0], rows[1])


def test_a_joiner_starts_from_the_weights_of_another_node(tmp_path):
  with peer_cases.start_group(
    tmp_path,
    'push-sum',
    nodes=(0, 1),
    num_steps=100_000,
    deadlines=peer_cases.PATIENT,
  ) as group:
    group.report_death(2)  # The others begin without it.
    group.wait_for_steps(0, 20)
    group.start(2)
    group.wait_for_steps(2, 21)  # By then it has joined, without mass.
    group.wait_for(2, 'mass', 1e-9)
    for node in range(peer_cases.NUM_NODES):
      group.stop(node)
    group.wait()
  trace = group.load_trace()
  own = trace.of_replica(2)
  join, mix = own[:2]
  assert join['kind'] == Kind.JOIN
  assert mix['kind'] == Kind.MIX
  assert (mix['own_weight'], mix['weight'], mix['mass']) == (0, 1, 0)
  assert mix['source_version'] > 0
  assert mix['source'] in (0, 1)
  # The first two have the whole mass at first, and share it with the joiner.
  last = [
    trace.of_replica(node)[-1]['mass'] for node in range(peer_cases.NUM_NODES)
  ]
  assert sum(last) == pytest.approx(2)
  assert last[2] > 0
  assert traces.summarize(trace).lost_mass == 0
  group.check_replay()


@pytest.mark.slow
def test_a_joiner_of_elastic_averaging_starts_from_the_centre(tmp_path):
  with peer_cases.start_group(
    tmp_path,
    'elastic',
    nodes=(0, 1),
    num_steps=100_000,
    deadlines=peer_cases.PATIENT,
  ) as group:
    group.report_death(2)  # The others begin without it.
    group.wait_for_steps(0, 20)
    group.start(2)
    group.wait_for_steps(2, 10)
    for node in (*range(peer_cases.NUM_NODES), traces.SERVER):
      group.stop(node)
    group.wait()
  join, mix = group.load_trace().of_replica(2)[:2]
  assert (join['kind'], mix['kind']) == (Kind.JOIN, Kind.MIX)
  assert (mix['own_weight'], mix['weight']) == (0, 1)
  assert mix['source'] == traces.SERVER
  assert mix['source_version'] > 0
  group.check_replay()


class MetOne:
  """Connections to one peer, which has begun."""

  alive = (0,)

  def get_status(self, peer):
    """Status of the peer."""
    assert peer == 0
    return {'has_begun': True, 'began_with': [0, 1, 2], 'origin': -50.0}


def test_a_first_member_that_met_only_one_peer_is_not_late(tmp_path):
  """Other nodes have met it, and list it as a first member."""
  group = peer_cases.Group(tmp_path, gossip.PushSum())
  node = group.make(1, threading.Event())
  node._begin(MetOne(), None)  # It does not join.
  assert node.describe()['began_with'] == [0, 1, 2]
  # Times count from the earliest origin that any node knows.
  assert node._files._describe()['origin'] == -50.0
  node._files._stack.close()


class MetLate(MetOne):
  """Connections to the same peer, which is found later."""

  alive = ()

  def wait_for(self, *_):
    """Finds the peer."""
    self.alive = (0,)


def test_compiling_is_not_part_of_the_deadline(tmp_path, monkeypatch):
  group = peer_cases.Group(tmp_path, gossip.PushSum())
  node = group.make(1, threading.Event())
  now, start = time.monotonic(), group.settings.deadlines.start
  monkeypatch.setattr(time, 'monotonic', lambda: now + 2 * start)
  node._begin(MetLate(), None)
  assert node.describe()['began_with'] == [0, 1, 2]
  node._files._stack.close()


def test_elastic_averaging_keeps_the_sum_of_all_copies(tmp_path):
  """Only gradients change the sum: here there are none."""
  strategy = gossip.Elastic(rate=0.1)
  group = peer_cases.Group(
    tmp_path, strategy, optimizer=optax.sgd(0.0), num_steps=30
  )
  first = group.settings.make_weights()[0]
  try:
    for number, node in enumerate(
      (traces.SERVER, *range(peer_cases.NUM_NODES))
    ):
      # Each member has weights of its own.
      own = (first + np.float32(number), {'mean': np.zeros(20, np.float32)})
      group.settings = dataclasses.replace(group.settings, init=own)
      group.start(node)
    group.wait()
  finally:
    group.close()
  weights = [
    workdirs.load_params(runtime.find_folder(group.run, member))
    for member in (traces.SERVER, *range(peer_cases.NUM_NODES))
  ]
  expected = 4 * np.asarray(first) + sum(range(peer_cases.NUM_NODES + 1))
  np.testing.assert_allclose(sum(weights), expected, rtol=1e-5, atol=1e-5)
  assert np.ptp(weights, axis=0).max() < 1  # At first it was 3.


def test_nodes_go_on_from_their_checkpoints(tmp_path):
  with peer_cases.start_group(tmp_path, 'pull', num_steps=10) as group:
    group.wait()
  assert [len(group.load_trace().of_replica(n)) > 10 for n in range(3)] == [
    True
  ] * 3
  with peer_cases.start_group(tmp_path, 'pull', num_steps=20) as group:
    group.wait()
  trace = group.load_trace()
  assert (
    np.count_nonzero(trace.records['kind'] == Kind.RESTART)
    == peer_cases.NUM_NODES
  )
  assert len(trace.steps) == 20 * peer_cases.NUM_NODES
  group.check_replay()


# --- Ends.


def find_last_masses(trace):
  """The last masses of nodes that have recorded their end."""
  last = [trace.of_replica(node)[-1] for node in range(peer_cases.NUM_NODES)]
  assert [record['kind'] for record in last] == [Kind.END] * len(last)
  return [record['mass'] for record in last]


@pytest.mark.parametrize('wire', ['memory', 'flight'])
def test_nodes_that_are_stopped_one_by_one_keep_all_mass(wire, tmp_path):
  """Slower nodes send to nodes that have ended, or have disconnected."""
  with peer_cases.start_group(
    tmp_path,
    'push-sum',
    wires=(wire,),
    num_steps=100_000,
    min_seconds=(0.002, 0.005, 0.02),
    deadlines=peer_cases.PATIENT,
  ) as group:
    for node in range(peer_cases.NUM_NODES):
      for other in range(node, peer_cases.NUM_NODES):
        step = group.peers[other].describe()['step']
        group.wait_for_steps(other, step + 6)
      group.stop(node)
    group.wait()
  trace = group.load_trace()
  assert sum(find_last_masses(trace)) == pytest.approx(peer_cases.NUM_NODES)
  assert Kind.LOST not in trace.records['kind']
  summary = traces.summarize(trace)
  assert (summary.lost_mass, summary.num_deaths) == (0, 0)
  assert not any(peer.describe()['is_done'] for peer in group.peers.values())
  group.check_replay()


@pytest.mark.parametrize('name', ['push', 'push-sum'])
def test_a_node_that_has_ended_takes_no_messages(name, tmp_path):
  """It still answers, so that its peers keep the mass that they sent."""
  with peer_cases.start_group(tmp_path, name, num_steps=100_000) as group:
    group.wait_for_steps(0, 5)
    files = group.peers[0]._files
    finish, fates = files.finish, []

    def finish_late(*state):
      registry = runtime.Registry(group.run)
      connection = registry.connect(0)(files.layout.size)
      greeting = nodes.make_hello(files._fingerprint, 1, None, 0.0)
      for message in (
        wires.Message(wires.Verb.HELLO, text=greeting),
        wires.Message(wires.Verb.EXCHANGE, worker=1, share=0.25),
      ):
        answer = connection.request(
          message,
          has_payload=message.verb == wires.Verb.EXCHANGE,
          deadline=peer_cases.PATIENCE,
        )
        fates.append(answer.fate)
      connection.close()
      finish(*state)

    files.finish = finish_late
    group.stop(0)
  assert fates == [0, gossip.Outcome.DONE]
  assert (
    group.peers[0].describe()['mass']
    == group.load_trace().of_replica(0)[-1]['mass']
  )
  group.check_replay()


@pytest.mark.parametrize('name', ['push', 'elastic'])
def test_a_member_fails_with_its_snapshot_server(name, tmp_path):
  """An error of the snapshot server must reach the caller of `run`."""
  member = traces.SERVER if name == 'elastic' else 0

  def fail(message):
    raise OSError('No space left')

  with peer_cases.start_group(tmp_path, name, num_steps=100_000) as group:
    for node in range(peer_cases.NUM_NODES):
      group.wait_for_steps(node, 1)
    group.peers[member]._files.snapshots._receive = fail
    group.stop(member, is_told=False)
  (error,) = group.errors
  assert 'No space left' in str(error)
  assert Kind.END not in group.load_trace().of_replica(member)['kind']


def test_a_node_fails_with_its_connecting_thread(tmp_path):
  def fail():
    raise OSError('Stale file handle')

  with peer_cases.start_group(tmp_path, 'pull', num_steps=100_000) as group:
    group.wait_for_steps(0, 1)
    group.peers[0]._registry.list_members = fail
    group.stop(0, is_told=False)
  (error,) = group.errors
  assert 'Stale file handle' in str(error)
