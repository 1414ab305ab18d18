"""Nodes that are late or restarted: their first weights and their mass."""

import shutil
import threading

import numpy as np
import pytest

from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd import workdir
from jasgd.runtime import wires
from jasgd.runtime.nodes import _peer
from tests import live
from tests.runtime import cases
from tests.runtime import peer_cases

Kind = traces.Kind


class KilledError(Exception):
  """Ends a node at once, without a checkpoint or a message."""


def kill(group, node):
  """Lets a node die before its next step, and waits until it has."""

  def die(_):
    raise KilledError

  group.peers[node]._weights.make_step = die
  group.stop(node, is_told=False)
  assert isinstance(group.errors.pop(), KilledError)


@pytest.mark.parametrize('name', ['pull', 'push-sum'])
def test_a_node_killed_before_its_first_checkpoint_joins(name, tmp_path):
  with peer_cases.start_group(
    tmp_path, name, num_steps=100_000, checkpoint_seconds=1e9
  ) as group:
    for node in range(peer_cases.NUM_NODES):
      group.wait_for_steps(node, 3)
    kill(group, 2)
    group.start(2)
    group.wait_for_steps(2, 10)
    if name == 'push-sum':  # Others have sent it mass.
      group.wait_for(2, 'mass', 1e-9)
    for node in range(peer_cases.NUM_NODES):
      group.stop(node)
    assert not group.errors
  trace = group.load_trace()
  own = trace.of_replica(2)
  (index,) = np.flatnonzero(own['kind'] == Kind.RESTART)
  restart, join, mix = own[index : index + 3]
  assert restart['read_version'] == restart['step'] == 0
  assert (join['kind'], join['version']) == (Kind.JOIN, restart['version'])
  assert (mix['kind'], mix['version']) == (Kind.MIX, restart['version'] + 1)
  assert (mix['own_weight'], mix['weight'], mix['mass']) == (0, 1, 0)
  assert mix['source'] in (0, 1)
  assert mix['source_step'] > 0
  summary = traces.summarize(trace)
  assert (summary.num_deaths, summary.num_returns) == (1, 1)
  if name == 'push-sum':  # Its mass died with it, and no new mass was made.
    masses = [trace.of_replica(node)[-1]['mass'] for node in range(3)]
    assert sum(masses) < 3
    assert masses[2] > 0
    assert summary.lost_mass == pytest.approx(3 - sum(masses))
  group.check_replay()


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
  """All nodes restart, so none is late: each has its last recorded mass."""
  with peer_cases.start_group(
    tmp_path, 'push-sum', num_steps=100_000, checkpoint_seconds=1e9
  ) as group:
    for node in range(peer_cases.NUM_NODES):
      group.wait_for_steps(node, 2)
    for node in range(peer_cases.NUM_NODES):
      kill(group, node)
  with peer_cases.start_group(tmp_path, 'push-sum') as group:
    group.wait()
  trace = group.load_trace()
  assert Kind.JOIN not in trace.records['kind']
  restarts = trace.records[trace.records['kind'] == Kind.RESTART]
  assert sorted(restarts['replica']) == [0, 1, 2]
  for node in range(3):
    own = trace.of_replica(node)
    own = own[own['kind'] != Kind.LOST]
    (index,) = np.flatnonzero(own['kind'] == Kind.RESTART)
    assert own[index]['mass'] == own[index - 1]['mass']
  masses = [trace.of_replica(node)[-1]['mass'] for node in range(3)]
  lost = traces.summarize(trace).lost_mass
  assert lost == pytest.approx(3 - sum(masses), abs=1e-9)
  assert lost > -1e-9
  group.check_replay()


def test_a_node_goes_on_from_an_earlier_checkpoint_if_the_last_is_damaged(
  tmp_path,
):
  with peer_cases.start_group(
    tmp_path, 'pull', num_steps=100_000, checkpoint_seconds=0.0
  ) as group:
    own = runtime.find_folder(group.run, 2)
    live.wait_until(lambda: len(workdir.list_checkpoints(own)) == 2)
    kill(group, 2)
    earlier, last = workdir.list_checkpoints(own)
    (own.checkpoints / str(last) / 'manifest.json').write_text('{')
    group.start(2)
    group.wait_for_steps(2, group.peers[2].describe()['step'] + 3)
    for node in range(peer_cases.NUM_NODES):
      group.stop(node)
    assert not group.errors
  records = group.load_trace().of_replica(2)
  (restart,) = records[records['kind'] == Kind.RESTART]
  assert restart['read_version'] == earlier
  assert (own.checkpoints / f'{last}.broken').is_dir()
  group.check_replay()


class Others:
  """Node 0, as another node sees it, with weights of version 6."""

  alive = (0,)

  def __init__(self, size, **status):
    self._size = size
    nothing = {'has_begun': False, 'began_with': [], 'origin': 0.0}
    self._status = {**nothing, **status}

  def get_status(self, peer):
    """Status of the node."""
    assert peer == 0
    return self._status

  def pull(self, peer):
    """Its weights."""
    payload = wires.make_aligned(self._size)
    payload[:] = 0
    return wires.Message(
      wires.Verb.SNAPSHOT, version=6, step=4, payload=payload
    )


def begin(group, node, **status):
  """Status and records of a node that has begun."""
  peer = group.make(node, threading.Event())
  book, kinds = peer._files.recorder, []
  write = book.write

  def note(kind, rows):
    kinds.append(kind)
    write(kind, rows)

  book.write = note
  try:
    peer._restore()
    others = Others(peer._files.layout.size, **status)
    peer._begin(others, peer._make_exchanger(others))
    return peer.describe(), kinds
  finally:
    peer._files._stack.close()


@pytest.mark.parametrize(
  ('status', 'is_late'),
  [
    ({'has_begun': True, 'began_with': [0, 1, 2]}, False),
    ({'has_begun': True, 'began_with': [0, 2]}, True),
    # It goes on from a checkpoint, and is still waiting for others.
    ({'is_resumed': True}, True),
  ],
)
def test_a_new_node_joins_nodes_with_steps(status, is_late, tmp_path):
  group = peer_cases.Group(tmp_path, gossip.PushSum())
  said, kinds = begin(group, 1, **status)
  assert kinds == ([Kind.JOIN, Kind.MIX] if is_late else [])
  assert said['mass'] == (0.0 if is_late else 1.0)
  # A late node does not know the first members.
  assert said['began_with'] == ([1] if is_late else [0, 1, 2])


def test_a_restarted_node_is_no_first_member(tmp_path):
  group = peer_cases.Group(tmp_path, gossip.PushSum())
  peer = group.make(0, threading.Event())
  files = peer._files

  def list_company():
    return files._describe()['began_with']

  try:
    for node in (1, 2):
      files._note_node(node, None, 1.0)
    peer._began_with = [0, 1, 2]
    files._note_node(1, None, 1.0)  # Only a connection was lost.
    assert list_company() == [0, 1, 2]
    files._note_node(1, None, 5.0)
    files._note_node(1, None, 5.0)
    assert list_company() == [0, 2]
  finally:
    files._stack.close()


class Dead:
  """Connections to peers of which one is gone, or was never seen."""

  def __init__(self, *alive):
    self._alive = list(alive)

  @property
  def alive(self):
    return self._alive.pop(0) if len(self._alive) > 1 else self._alive[0]

  def get_status(self, peer):
    return {'has_begun': False, 'began_with': [], 'origin': 0.0}

  def wait_for(self, *_):
    return False


@pytest.mark.parametrize('is_seen', [True, False])
def test_a_node_that_came_and_died_counts_as_come(
  is_seen, tmp_path, monkeypatch
):
  """It may have begun already, before all other nodes."""
  monkeypatch.setattr(_peer, '_GRACE', 0.0)
  group = peer_cases.Group(
    tmp_path, gossip.PushSum(), deadlines=runtime.Deadlines(start=1e6)
  )
  peer = group.make(0, threading.Event())
  try:
    if not is_seen:
      peer._files._note_node(1, None, 1.0)
    others = Dead([1], [2]) if is_seen else Dead([2])
    peer._begin(others, peer._make_exchanger(others))
    peer._files._note_node(1, None, 2.0)
    # The node has come back, and is late.
    assert peer._files._describe()['began_with'] == [0, 2]
  finally:
    peer._files._stack.close()


# --- A broken trace.


@pytest.fixture(scope='module')
def ended_group(tmp_path_factory):
  """A run of nodes that has ended, with a centre."""
  folder = tmp_path_factory.mktemp('ended')
  with peer_cases.start_group(folder, 'elastic', num_steps=8) as group:
    group.wait()
  return group


def reopen(group, folder, node, damage):
  """The sentence by which a node, or the centre, refuses its damaged trace."""
  shutil.copytree(group.run.root, folder, dirs_exist_ok=True)
  again = peer_cases.Group(folder, group.settings.strategy, num_steps=8)
  path = again.run.trace / traces.get_file_name(node)
  damage(path)
  with pytest.raises(traces.TraceError) as caught:
    again.make(node, threading.Event())
  message = str(caught.value)
  assert message.startswith(f'The trace {str(path)!r} ')
  assert message.endswith('start the run again in another folder.')
  assert '\n' not in message  # The process ends with this one line.
  return message


@pytest.mark.parametrize('node', [1, traces.SERVER])
@pytest.mark.parametrize(
  ('fields', 'problem'),
  [
    ({'kind': 77}, 'kind=77, which must be from 0 to 10'),
    ({'kind': Kind.FETCH}, 'kind=2, which must be one that its owner writes'),
    ({'updates': 0}, 'updates=0, which must be that of its kind'),
    ({'worker': -3}, 'worker=-3, which must be'),
    ({'worker': 3}, 'worker=3, which must be at most 2'),
    ({'source': 3}, 'source=3, which must be'),
    ({'replica': 2}, 'replica=2, which must be'),
    ({'step': -1}, 'step=-1, which must be'),
    ({'version': 2**62}, 'version=4611686018427387904, which must be that of'),
    ({'version': 1}, 'version=1, which must be that of the record before it'),
    ({'source_version': -1}, 'source_version=-1, which must be at least 0'),
    ({'incarnation': 2**31 - 1}, 'incarnation=2147483647, which must be at'),
    ({'group': 2**31 - 1}, 'group=2147483647, which must be from 0'),
    ({'mass': np.nan}, 'mass=nan, which must be finite'),
    ({'weight': np.inf}, 'weight=inf, which must be finite'),
  ],
)
def test_a_damaged_record_is_named_by_a_resume(
  node, fields, problem, ended_group, tmp_path
):
  def damage(path):
    cases.damage_record(path, 5, **fields)

  message = reopen(ended_group, tmp_path, node, damage)
  assert f'is damaged. Record 5 has {problem}' in message


@pytest.mark.parametrize('version', [-1, 99])
def test_a_read_that_was_impossible_is_named_by_a_resume(
  version, ended_group, tmp_path
):
  records = ended_group.load_trace().of_replica(1)
  index = int(np.flatnonzero(records['kind'] == Kind.STEP)[3])
  message = reopen(
    ended_group,
    tmp_path,
    1,
    lambda path: cases.damage_record(path, index, read_version=version),
  )
  assert f'Record {index} has read_version={version}, which must be' in message


@pytest.mark.parametrize('node', [1, traces.SERVER])
@pytest.mark.parametrize(
  ('damage', 'problem'),
  [
    (lambda path: cases.shorten_trace(path, 3), 'ends at version 3, and the'),
    (lambda path: cases.shorten_trace(path, 0), 'ends at version 0, and the'),
    (lambda path: path.write_bytes(b''), 'is missing or empty, and there is a'),
    (lambda path: path.unlink(), 'is missing or empty, and there is a'),
  ],
)
def test_a_trace_without_its_records_is_named_by_a_resume(
  node, damage, problem, ended_group, tmp_path
):
  assert problem in reopen(ended_group, tmp_path, node, damage)
