"""How nodes end: nothing that was sent is lost if nobody dies."""

import pytest

from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd.runtime import _host
from jasgd.runtime import _messages
from tests.runtime import peer_cases

Kind = traces.NodeKind


def find_last_masses(trace):
  """The masses with which nodes have ended in good order."""
  last = [trace.of_node(node)[-1] for node in range(peer_cases.NUM_NODES)]
  assert [record['kind'] for record in last] == [Kind.END] * len(last)
  return [record['mass'] for record in last]


@pytest.mark.parametrize(
  'wires', [('memory',), ('flight',)], ids=lambda wires: wires[0]
)
def test_nodes_that_are_stopped_one_by_one_keep_all_mass(wires, tmp_path):
  """The slower send to those who have ended, and to those who are gone."""
  with peer_cases.start_group(
    tmp_path,
    'push-sum',
    wires=wires,
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
  summary = traces.summarize_nodes(trace)
  assert (summary.lost_mass, summary.num_deaths) == (0, 0)
  assert not any(peer.describe()['is_done'] for peer in group.peers.values())
  group.check_replay()


@pytest.mark.parametrize('name', ['push', 'push-sum'])
def test_who_saves_for_the_last_time_takes_nothing(name, tmp_path):
  """It still answers, so that its peers know and keep what they sent."""
  with peer_cases.start_group(tmp_path, name, num_steps=100_000) as group:
    group.wait_for_steps(0, 5)
    station = group.peers[0]._station
    finish, fates = station.finish, []

    def finish_late(*state):
      registry = runtime.Registry(group.run)
      connection = registry.connect(0)(station.layout.size)
      greeting = _host.make_greeting(station.fingerprint, 1, None, 0.0)
      for message in (
        _messages.Message(_messages.Verb.HELLO, text=greeting),
        _messages.Message(_messages.Verb.EXCHANGE, learner=1, rate=0.25),
      ):
        answer = connection.request(
          message,
          has_payload=message.verb == _messages.Verb.EXCHANGE,
          deadline=peer_cases.PATIENCE,
        )
        fates.append(answer.fate)
      connection.close()
      finish(*state)

    station.finish = finish_late
    group.stop(0)
  assert fates == [0, gossip.Outcome.DONE]
  assert (
    group.peers[0].describe()['mass']
    == group.load_trace().of_node(0)[-1]['mass']
  )
  group.check_replay()


@pytest.mark.parametrize('name', ['push', 'elastic'])
def test_a_node_or_centre_ends_with_its_thread(name, tmp_path):
  """What others sent could not be handled: whoever started it must know."""
  member = traces.CENTRE if name == 'elastic' else 0

  def fail(message):
    raise OSError('No space left')

  with peer_cases.start_group(tmp_path, name, num_steps=100_000) as group:
    for node in range(peer_cases.NUM_NODES):
      group.wait_for_steps(node, 1)
    group.peers[member]._station.host._take = fail
    group.stop(member, is_told=False)
  (error,) = group.errors
  assert 'No space left' in str(error)
  assert Kind.END not in group.load_trace().of_node(member)['kind']


def test_a_node_ends_with_the_search_for_others(tmp_path):
  def fail():
    raise OSError('Stale file handle')

  with peer_cases.start_group(tmp_path, 'pull', num_steps=100_000) as group:
    group.wait_for_steps(0, 1)
    group.peers[0]._registry.list_members = fail
    group.stop(0, is_told=False)
  (error,) = group.errors
  assert 'Stale file handle' in str(error)
