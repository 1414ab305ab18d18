"""Files of a server, and how a server resumes from them."""

import json
import shutil

import numpy as np
import pytest

from jasgd import protocols
from jasgd import runtime
from jasgd import traces
from jasgd import workdir
from tests.runtime import cases
from tests.runtime import scripted

Fate, Flag, Verb = protocols.Fate, scripted.Flag, scripted.Verb
Message = scripted.Message
join, get_counts = scripted.join, scripted.get_counts
list_kinds = scripted.list_kinds


def get_rows(client, clock):
  """Rows of the metrics after a clock."""
  return json.loads(client.ask(Verb.METRICS, version=clock).text)


def test_stop_and_go_on(open_bench, tmp_path):
  bench = open_bench(
    protocols.softsync(1), workdir=workdir.Workdir(tmp_path), num_learners=2,
    num_updates=4,
  )  # fmt: skip
  first, second = join(bench, 2)
  first.push()
  second.push()
  first.push()  # Half of an update.
  launcher = bench.connect()
  assert launcher.ask(Verb.STOP, text='Enough.').verb == Verb.ANSWER
  for client in (first, second):
    client.hear()
    assert client.push()[0].verb == Verb.END
  # The last one left, and took the update with it that it was waited for.
  assert bench.server.clock == bench.settings.protocol.clock == 2
  assert bench.server.is_over
  bench.server.finish()
  assert bench.server.get_trace().is_ended
  bench.crash()
  bench.open(protocols.softsync(1))
  assert (bench.server.clock, bench.server.end_reason) == (2, None)
  assert not bench.server.get_trace().is_ended
  first, second = join(bench, 2)
  while bench.server.end_reason is None:
    first.push()
    second.push()
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)


def test_a_run_that_is_over_stays_so(open_bench, tmp_path):
  bench = open_bench(
    workdir=workdir.Workdir(tmp_path), num_learners=1, num_updates=2
  )
  (client,) = join(bench, 1)
  for _ in range(3):
    client.push()
  bench.server.finish()
  bench.crash()
  bench.open(protocols.asynchronous())
  assert bench.server.end_reason == 'All 2 updates were made.'
  assert not bench.server.is_over  # The learner may not know of the end.
  client.reconnect()
  (answer,) = client.hello()
  assert answer.verb == Verb.END
  assert bench.server.is_over
  assert bench.join().last.verb == Verb.END
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)


def test_waiting_learners_may_come_back_last(open_bench, tmp_path):
  """The learner for which the others wait comes back first."""
  bench = open_bench(
    protocols.hardsync(), workdir=workdir.Workdir(tmp_path), num_learners=3,
    num_updates=4, checkpoint_seconds=1.0,
  )  # fmt: skip
  clients = join(bench, 3)
  for client in clients:
    client.push()
  for client in clients:
    client.hear()
  held = [client.make_push() for client in clients]
  clients[0].send(held[0])
  clients[1].send(held[1])
  bench.tick(2.0)  # Saves a checkpoint: learners 0 and 1 wait for 2.
  bench.crash()
  bench.open(protocols.hardsync())
  for number in (2, 0, 1):
    client = clients[number]
    client.reconnect()
    (answer,) = client.hello(held[number])
    if number == 2:
      assert answer.flags == Flag.RESEND
      (answer,) = client.send(held[2])
    assert (answer.verb, answer.version, answer.push) == (Verb.SNAPSHOT, 2, 2)
  assert bench.server.describe()['fates'] == {'applied': 6}
  for client in clients:
    client.push()
  assert bench.server.clock == 3
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)
  bench.check_leases()


def test_new_learners_after_a_restart(open_bench, tmp_path):
  """Absent learners are given up once as many others have joined."""
  bench = open_bench(
    protocols.hardsync(), workdir=workdir.Workdir(tmp_path), num_learners=2,
    checkpoint_seconds=1.0,
  )  # fmt: skip
  clients = join(bench, 2)
  for client in clients:
    client.push()
  bench.tick(2.0)
  bench.crash()
  bench.open(protocols.hardsync())
  clients = join(bench, 2)
  assert [client.learner for client in clients] == [2, 3]
  for client in clients:
    client.push()
  assert bench.server.clock == 2
  assert list_kinds(bench, traces.Kind.LEAVE) == [0, 1]
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)


def test_absent_learners_are_lost_after_the_deadline(open_bench, tmp_path):
  deadlines = runtime.Deadlines(rejoin=30.0)
  bench = open_bench(
    protocols.hardsync(), workdir=workdir.Workdir(tmp_path), num_learners=2,
    checkpoint_seconds=1.0, deadlines=deadlines,
  )  # fmt: skip
  clients = join(bench, 2)
  for client in clients:
    client.push()
  bench.tick(2.0)
  bench.crash()
  bench.open(protocols.hardsync())
  client = bench.join()
  client.push()
  bench.tick(29.0)
  client.hear()
  assert bench.server.clock == 1
  assert 'absent' in client.waits[-1]
  bench.tick(2.0)
  assert bench.server.clock == 2


def test_metrics_and_evaluation(open_bench, tmp_path):
  bench = open_bench(
    workdir=workdir.Workdir(tmp_path), num_learners=1, num_updates=5,
    eval_every=2,
  )  # fmt: skip
  (client,) = join(bench, 1)
  kept = {}
  for _ in range(3):
    client.push()
    kept[client.last.version] = np.array(client.last.payload)
  status = json.loads(bench.connect().ask(Verb.STATUS).text)
  assert status['evaluation_clock'] == 2
  observer = bench.connect()
  weights = observer.ask(Verb.PULL, flags=Flag.AT_CLOCK)
  assert weights.version == 2
  np.testing.assert_array_equal(weights.payload, kept[2])
  assert observer.ask(Verb.PULL).version == 3
  assert [row['clock'] for row in get_rows(observer, -1)] == [2]
  for _ in range(3):
    client.push()
  assert not bench.server.is_over  # The observer has not left.
  # Rows stay until the observer says that it has written them.
  assert [row['clock'] for row in get_rows(observer, -1)] == [2, 4, 5]
  rows = get_rows(observer, 2)
  assert [row['clock'] for row in rows] == [4, 5]
  assert [row['server/staleness_mean'] for row in rows] == [0, 0]
  assert get_rows(observer, 5) == get_rows(observer, -1) == []
  observer.ask(Verb.LEAVE)
  bench.check_leases()


def test_metrics_go_on_after_a_restart(open_bench, tmp_path):
  bench = open_bench(
    workdir=workdir.Workdir(tmp_path), num_learners=1, num_updates=8,
    eval_every=2, checkpoint_seconds=1.0,
  )  # fmt: skip
  (client,) = join(bench, 1)
  for _ in range(4):
    client.push()
  assert len(get_rows(bench.connect(), 2)) == 1  # The first row is written.
  bench.tick(2.0)
  metrics = bench.server.describe()['metrics']
  client.push()
  client.push()
  assert len(get_rows(bench.connect(), 2)) == 2
  bench.crash()
  bench.open(protocols.asynchronous())
  status = bench.server.describe()
  assert status['metrics'] == metrics
  assert status['evaluation_clock'] == status['start_clock'] == 4
  assert status['fates'] == {'applied': 4}
  (row,) = get_rows(bench.connect(), -1)
  assert row['clock'] == 4
  assert row['train/loss'] == metrics['train/loss']
  pulled = bench.connect().ask(Verb.PULL, flags=Flag.AT_CLOCK)
  assert (pulled.incarnation, pulled.version) == (0, 4)


def test_a_damaged_checkpoint_is_set_aside(open_bench, tmp_path, caplog):
  """The run goes on from the one before it, and replay agrees."""
  folder = workdir.Workdir(tmp_path)
  bench = open_bench(workdir=folder, num_learners=1, num_updates=9)
  (client,) = join(bench, 1)
  for _ in range(3):
    client.push()
  bench.server.stop('Enough.')
  bench.server.finish()
  bench.crash()
  assert workdir.list_checkpoints(folder) == [0, 3]
  newest = folder.checkpoints / '3'
  (path, *_) = newest.glob('state/**/d/*')
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  bench.open(protocols.asynchronous())
  assert (bench.server.clock, bench.server.incarnation) == (0, 1)
  assert f"was renamed to '{newest}.broken'" in caplog.text
  assert str(path) in caplog.text
  (client,) = join(bench, 1)
  while bench.server.end_reason is None:
    client.push()
  bench.server.finish()
  assert bench.server.clock == 9
  assert workdir.list_checkpoints(folder) == [0, 9]
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)


# --- A broken trace.


def make_stopped_run(open_bench, folder):
  """A run of two joins and four updates, with a checkpoint of all of them."""
  bench = open_bench(workdir=folder, num_learners=2, num_updates=9)
  for client in join(bench, 2) * 2:
    client.push()
  bench.server.stop('Enough.')
  bench.server.finish()
  bench.crash()
  return bench


@pytest.mark.parametrize(
  ('fields', 'problem'),
  [
    ({'kind': 77}, 'kind=77, which must be from 0 to 10'),
    ({'kind': traces.Kind.MOVE}, 'kind=4, which must be one that its owner'),
    ({'fate': 99}, 'fate=99, which must be from 0 to 7'),
    ({'updates': 0}, 'version=3, which must be that of the record before'),
    ({'worker': -3}, 'worker=-3, which must be'),
    ({'worker': 2**31 - 1}, 'worker=2147483647, which must be'),
    ({'replica': -2}, 'replica=-2, which must be -1'),
    ({'step': -1}, 'step=-1, which must be'),
    ({'version': 2**62}, 'version=4611686018427387904, which must be that of'),
    ({'version': 1}, 'version=1, which must be that of the record before it'),
    ({'read_version': 3}, 'read_version=3, which must be a version that'),
    ({'read_version': -1}, 'read_version=-1, which must be a version that'),
    ({'incarnation': 2**31 - 1}, 'incarnation=2147483647, which must be at'),
    ({'incarnation': 1}, 'incarnation=1, which must be at most the number'),
    ({'group': 2**31 - 1}, 'group=2147483647, which must be from 0'),
  ],
)
def test_a_damaged_record_is_named_by_a_resume(
  fields, problem, open_bench, tmp_path
):
  folder = workdir.Workdir(tmp_path)
  bench = make_stopped_run(open_bench, folder)
  kinds = traces.Trace.load(folder.trace).records['kind']
  index = int(np.flatnonzero(kinds == traces.Kind.PUSH)[2])
  cases.damage_record(folder.trace, index, **fields)
  with pytest.raises(traces.TraceError) as caught:
    bench.open(protocols.asynchronous())
  message = str(caught.value)
  assert f'The trace {str(folder.trace)!r} is damaged.' in message
  assert f'Record {index} has {problem}' in message
  assert message.endswith('start the run again in another folder.')
  assert '\n' not in message  # The process ends with this one line.


@pytest.mark.parametrize(
  ('damage', 'problem'),
  [
    (lambda path: cases.shorten_trace(path, 3), 'has 3 records, and the last '),
    (lambda path: cases.shorten_trace(path, 0), 'has 0 records, and the last '),
    (lambda path: path.write_bytes(b''), 'is missing or empty, and there is a'),
    (lambda path: path.unlink(), 'is missing or empty, and there is a'),
  ],
)
def test_a_trace_without_its_records_is_named_by_a_resume(
  damage, problem, open_bench, tmp_path
):
  folder = workdir.Workdir(tmp_path)
  bench = make_stopped_run(open_bench, folder)
  damage(folder.trace)
  before = folder.trace.exists() and folder.trace.read_bytes()
  with pytest.raises(traces.TraceError) as caught:
    bench.open(protocols.asynchronous())
  message = str(caught.value)
  assert f'The trace {str(folder.trace)!r} {problem}' in message
  assert message.endswith('start the run again in another folder.')
  assert (folder.trace.exists() and folder.trace.read_bytes()) == before


@pytest.mark.parametrize(
  'fields',
  [{'incarnation': 2**31 - 1}, {'kind': 77, 'version': -5, 'worker': -9}],
)
def test_a_damaged_record_that_becomes_void_does_no_harm(
  fields, open_bench, tmp_path
):
  folder = workdir.Workdir(tmp_path)
  bench = make_stopped_run(open_bench, folder)
  # The END came after the checkpoint.
  cases.damage_record(folder.trace, -1, **fields)
  for incarnation in (1, 2):
    bench.open(protocols.asynchronous())
    assert bench.server.incarnation == incarnation
    for client in join(bench, 2):
      client.push()
    bench.server.stop('Enough.')
    bench.server.finish()
    bench.crash()
  cases.check_replay(bench.server, bench.server.get_trace(), bench.task)


def test_a_trace_without_checkpoints_is_void(open_bench, tmp_path):
  folder = workdir.Workdir(tmp_path)
  bench = make_stopped_run(open_bench, folder)
  shutil.rmtree(folder.checkpoints)
  bench.open(protocols.asynchronous())
  assert (bench.server.clock, bench.server.incarnation) == (0, 1)
  for client in join(bench, 2):
    client.push()
  trace = bench.server.get_trace()
  assert trace.num_updates == 2
  cases.check_replay(bench.server, trace, bench.task)
