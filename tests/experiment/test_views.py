"""Metrics of real runs, and the views that a supervisor has of them."""

import dataclasses
import io
import itertools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import experiment
from jasgd import gossip
from jasgd import protocols
from jasgd import runtime
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.running import local
from jasgd.experiment.running import measuring
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import supervisor as supervisors
from jasgd.experiment.running import views
from jasgd.gossip import topologies
from tests.experiment import cases
from tests.experiment import test_real_nodes as nodes
from tests.runtime import scripted

CENTRE = recipes.SERVER
STATUS = {'loss': None, 'mass': 0.0, 'origin': 0.0}


class Files:
  """Files of nodes that grow."""

  def __init__(self, folder, trace):
    self._folder, self._trace = folder / 'trace', trace
    self._folder.mkdir()
    self._writers = {}

  def append(self, begin, end):
    """Writes some records; returns the trace of all records so far."""
    for record in self._trace.records[begin:end]:
      node = int(record['replica'])
      if node not in self._writers:
        self._writers[node] = traces.TraceWriter(
          self._folder / traces.get_file_name(node), self._trace.header
        )
      self._writers[node].append(record.reshape(1))
    for writer in self._writers.values():
      writer.flush()
    return traces.Trace(self._trace.records[:end], self._trace.header)

  def close(self):
    """Closes them."""
    for writer in self._writers.values():
      writer.close()


@pytest.mark.parametrize(
  'strategy',
  [
    gossip.Pull(),
    gossip.Pull(peers=topologies.ring(4)),
    gossip.Elastic(),
  ],
  ids=['pull', 'ring', 'elastic'],
)
def test_new_records_are_measured_as_in_the_whole(strategy, tmp_path):
  trace = simulation.simulate(
    strategy,
    num_workers=4,
    num_gradients=100,
    compute=simulation.normal(1.0, 0.3),
    network=simulation.Network(latency=0.13),
  )
  files = Files(tmp_path, trace)
  meter = measuring.NodeMeter(workdirs.Workdir(tmp_path))
  # Between two times: records of one time are written at once.
  changes = 1 + np.flatnonzero(np.diff(trace.records['end_time']))
  since = 0.0
  for begin, end in itertools.pairwise([0, *changes[20::40], len(trace)]):
    whole = files.append(begin, end)
    now = whole.duration
    found = meter.measure(dict.fromkeys(range(4), STATUS), ())
    wanted = measuring.MixMeter(whole).measure(since, now)
    assert 'gossip/age_mean' in wanted
    assert found == pytest.approx({'time': now, **wanted})
    since = now
  # Without new records the last metrics stay.
  assert meter.measure(dict.fromkeys(range(4), STATUS), ()) == found
  files.close()


def test_records_are_read_once(tmp_path):
  trace = simulation.simulate(gossip.Pull(), num_workers=2, num_gradients=18)
  files = Files(tmp_path, trace)
  tail = traces.TraceTail(tmp_path / 'trace')
  assert not len(tail.read())
  for begin, end in ((0, 7), (7, 8), (8, len(trace))):
    files.append(begin, end)
    (tmp_path / 'trace' / 'node-1.abcd.part').write_bytes(b'half of it')
    found = tail.read()
    assert len(found) == end - begin
    assert (np.diff(found['end_time']) >= 0).all()
    assert not len(tail.read())
  files.close()


def test_lost_mass_adds_up(tmp_path):
  """Lost are messages of any time, and the mass of nodes that are dead now."""
  records = np.zeros(8, traces.RECORD)
  records['replica'] = records['worker'] = [0, 1, 0, 0, 1, 0, 1, 0]
  records['kind'] = traces.Kind.STEP
  records['kind'][[2, 5]] = traces.Kind.LOST
  records['mass'] = 0.5
  records['end_time'] = np.arange(8)
  files = Files(tmp_path, traces.Trace(records, {'num_workers': 2}))
  meter = measuring.NodeMeter(workdirs.Workdir(tmp_path))
  statuses = {0: STATUS, 1: {**STATUS, 'mass': 0.25}, CENTRE: {}}
  found = []
  for begin in range(0, 8, 2):
    files.append(begin, begin + 2)
    lost = () if begin < 6 else (1, CENTRE)
    found.append(meter.measure(statuses, lost)['gossip/mass_lost'])
  assert found == [0.0, 0.5, 1.0, 1.25]
  files.close()


def test_refused_messages_are_a_metric(tmp_path):
  meter = measuring.NodeMeter(workdirs.Workdir(tmp_path))
  statuses = {
    0: {**STATUS, 'loss': 2.0, 'num_full': 3},
    1: {**STATUS, 'loss': 4.0, 'num_full': 4},
    2: {**STATUS, 'loss': 9.0, 'num_full': 5},
    CENTRE: {},
  }
  found = meter.measure(statuses, {2})
  assert found.pop('time') > 0
  assert found == {'train/loss': 3.0, 'gossip/refused_full': 12.0}


# --- The mean of nodes.


def test_only_weights_that_nodes_mix_are_averaged():
  """A counter is not averaged: as in replay, the first node's is taken."""
  rows = [
    (
      {'w': np.full(2, value, np.float32)},
      {'count': np.array(count), 'norm': np.float32(4 * value)},
    )
    for value, count in ((1.0, 3), (2.0, 8))
  ]
  halves = [
    ({'w': jnp.full(2, value, jnp.bfloat16)}, {}) for value in (1.0, 2.0)
  ]
  task = types.SimpleNamespace(test_data=None)
  (params, stats), _ = measuring.describe_nodes(task, rows, [], None)
  assert params['w'].tolist() == [1.5, 1.5]
  assert (stats['count'], stats['norm']) == (3, 6.0)
  (params, stats), _ = measuring.describe_nodes(task, rows, [1.0, 3.0], None)
  assert params['w'].tolist() == [1.75, 1.75]
  assert (stats['count'], stats['norm']) == (3, 7.0)
  (params, _), _ = measuring.describe_nodes(task, halves, [], None)
  assert params['w'].tolist() == [1.5, 1.5]


def test_nodes_that_have_diverged_are_described_without_a_warning():
  """They may have weights that are not finite: these have no distance."""
  task = types.SimpleNamespace(test_data=None)
  rows = [({'w': np.float32([np.inf, 1])}, {})] * 2
  mean, metrics = measuring.describe_nodes(task, rows, [], None)
  np.testing.assert_array_equal(mean[0]['w'], rows[0][0]['w'])
  assert not metrics


def test_nodes_that_are_equal_have_no_distance():
  task = types.SimpleNamespace(test_data=None)
  rows = [({'w': np.float32([0.1, 0.7])}, {})] * 3
  _, metrics = measuring.describe_nodes(task, rows, [], None)
  assert metrics == {'gossip/consensus_error': 0.0}


def test_the_centre_the_nodes_and_their_mean_are_evaluated_apart():
  """`local` is the mean of the nodes' losses, not the loss of their mean."""
  task = tasks.make_task('logistic', batch=4)
  rows = [
    jax.tree.map(
      lambda leaf, at=seed: leaf + at, task.init(jax.random.key(seed))
    )
    for seed in range(3)
  ]
  centre = jax.tree.map(lambda leaf: 0.3 * leaf, rows[1])
  mean, metrics = measuring.describe_nodes(task, rows, [], centre)
  losses = [float(tasks.evaluate(task, *node)['loss']) for node in rows]
  assert metrics['local/loss'] == pytest.approx(np.mean(losses))
  for group, weights in (('test', mean), ('centre', centre)):
    found = tasks.evaluate(task, *weights)
    for name, value in found.items():
      assert metrics[f'{group}/{name}'] == pytest.approx(float(value))
  found = [metrics[f'{group}/loss'] for group in ('test', 'local', 'centre')]
  assert len(set(np.round(found, 4))) == 3
  # Without a centre there are no metrics of one.
  _, metrics = measuring.describe_nodes(task, rows, [], None)
  assert not [name for name in metrics if name.startswith(('local', 'centre'))]


# --- The view of nodes.


class Node:
  """The observer of a node that answers some questions after it was stopped."""

  def __init__(self, events, member, num_answers):
    self._events, self._member = events, member
    self._num_answers = num_answers

  def get_status(self):
    self._num_answers -= 1
    if self._num_answers < 0:
      raise runtime.WireError('It is gone.')
    self._events.append(('ask', self._member))
    return {'members': {}}

  def stop(self, reason):
    del reason
    self._events.append(('stop', self._member))


class Time:
  """A time that advances only when a function waits."""

  now = 0.0

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds


@pytest.mark.parametrize('num_answers', [3, 10**6])
def test_a_watch_stops_the_centre_when_no_node_answers(
  num_answers, monkeypatch, tmp_path
):
  """A node may be about to send a force. A node that never ends is left."""
  monkeypatch.setattr(views, 'time', Time())
  recipe = recipes.from_config(nodes.make_config('elastic'))
  folder, events = workdirs.Workdir(tmp_path), []
  members = local.list_members(recipe)
  view = views.NodesView(
    recipe, folder, recipe.make_registry(folder), members, None
  )
  view._observers = {
    member: Node(events, member, num_answers if member == 1 else 0)
    for member in members
  }
  view.finish((), is_owner=False)
  stops = [('stop', member) for member in (0, 1, 2, CENTRE)]
  assert [event for event in events if event[0] == 'stop'] == stops
  assert events[:3] == stops[:3]
  assert events[-1] == stops[-1]
  assert events.count(('ask', 1)) >= min(num_answers, 100)
  # A launcher ends its own centre itself, after its nodes.
  events.clear()
  view.finish((), is_owner=True)
  assert events == stops[:3]


# --- The metrics of a server.


class Wire:
  """A connection to a server that handles each request at once."""

  def __init__(self, bench):
    self._client = bench.connect()

  def request(self, message, deadline):
    del deadline
    return self._client.send(message)[-1]

  def close(self):
    self._client.hang_up()


def test_metrics_of_a_server_that_is_killed_and_resumed(tmp_path):
  """One row per clock, in order; rows of lost updates are written anew."""
  folder, seen = workdirs.Workdir(tmp_path), []
  bench = scripted.Bench(
    protocols.asynchronous(), workdir=folder, num_learners=1, num_updates=10,
    eval_every=2, checkpoint_seconds=1.0,
  )  # fmt: skip
  recipe = types.SimpleNamespace(
    task=bench.task, make_layout=lambda: bench.server.layout
  )
  view = views.ServerView(
    recipe,
    folder,
    lambda size: Wire(bench),
    on_metrics=lambda clock, metrics: seen.append(clock),
  )
  (client,) = scripted.join(bench, 1)

  def push_and_look(num_pushes):
    for _ in range(num_pushes):
      client.push()
    view.ask(CENTRE)
    assert view.is_evaluation_due()
    view.evaluate(())

  push_and_look(3)
  bench.tick(2.0)  # Saves a checkpoint at clock 3.
  push_and_look(5)  # Only the weights of clock 8 are still there.
  assert seen == [2, 4, 6, 8]
  view.ask(CENTRE)
  assert not view.is_evaluation_due()
  view.forget(CENTRE)
  bench.crash()
  bench.open(protocols.asynchronous())
  (client,) = scripted.join(bench, 1)
  view.ask(CENTRE)
  assert workdirs.read_metrics(folder)['clock'].tolist() == [2]
  push_and_look(1)
  while bench.server.end_reason is None:
    client.push()
  view.ask(CENTRE)
  view.evaluate((), is_last=True)
  view.close()
  rows = workdirs.read_metrics(folder)
  assert rows['clock'].tolist() == [2, 4, 6, 8, 10]
  assert len(folder.metrics.read_text().splitlines()) == 5
  is_evaluated = np.isfinite(rows['test/loss'])
  assert is_evaluated.tolist() == [True, True, False, False, True]
  assert view.metrics['test/loss'] == rows['test/loss'][-1]
  assert np.all(np.isfinite(rows['train/loss']))
  bench.close()


# --- The end of a run of nodes.


def test_a_restarted_server_does_not_wait_for_a_dead_learner(tmp_path):
  """The view reports the dead again. Time stands still: no deadline passes."""
  bench = scripted.Bench(
    protocols.hardsync(), workdir=workdirs.Workdir(tmp_path), num_learners=2,
    checkpoint_seconds=1.0,
  )  # fmt: skip
  recipe = types.SimpleNamespace(
    task=bench.task, make_layout=lambda: bench.server.layout
  )
  view = views.ServerView(recipe, None, lambda size: Wire(bench))
  clients = [bench.join(pid=pid) for pid in (41, 42)]
  for client in clients:
    client.hear()
    client.push()
  bench.tick(2.0)  # Saves a checkpoint at clock 1, with both learners.
  clients[0].hear()
  held = clients[0].make_push()
  clients[1].hang_up()
  view.report_deaths({1: 42})
  view.forget(CENTRE)
  bench.crash()
  bench.open(protocols.hardsync())
  clients[0].reconnect()
  (answer,) = clients[0].hello(held)
  assert answer.flags == scripted.Flag.RESEND
  assert clients[0].send(held) == []  # It waits for the other learner.
  view.report_deaths({1: 42})
  (answer,) = clients[0].hear()
  assert (answer.version, bench.server.clock) == (2, 2)
  view.close()
  bench.close()


@pytest.mark.parametrize('is_written', [False, True])
def test_the_last_row_is_the_result(is_written, monkeypatch, tmp_path):
  """This holds even if the rounded weights of all steps were evaluated."""

  class Supervisor:
    lost, is_interrupted = frozenset(), False

    def __init__(self, view, starts, recipe, folder, **options):
      del starts, recipe, folder, options
      self._view = view

    def run(self):
      view = self._view
      view.statuses = {
        node: {'step': 80, 'is_diverged': False} for node in range(3)
      }
      view.metrics = {'test/loss': 0.5}
      view.unwritten_at = None if is_written else 240
      if is_written:
        view._writer.write(240, view.metrics)

    def list_lost(self):
      return []

  exact = {'test/loss': 0.4375}
  monkeypatch.setattr(supervisors, 'Supervisor', Supervisor)
  monkeypatch.setattr(local, '_describe_checkpoints', lambda *_: (None, exact))
  recipe = recipes.from_config(nodes.make_config('pull'))
  folder = workdirs.Workdir(tmp_path)
  result = local.supervise(recipe, folder, dict, stream=io.StringIO())
  assert result.clock == 240
  assert result.metrics['test/loss'] == exact['test/loss']
  lines = folder.metrics.read_text().splitlines()
  epoch = 240 * recipe.task.batch / recipe.task.num_samples
  whole = {**exact, 'epoch': epoch, 'train/rate': 0.05}
  assert json.loads(lines[-1]) == {'clock': 240, **whole}
  assert workdirs.read_metrics(folder)['test/loss'].tolist() == [0.4375]


def test_a_recipe_of_nodes_names_how_they_train():
  """Nodes with other settings belong to another run."""
  configs = [
    nodes.make_config('pull'),
    nodes.make_config('pull'),
    nodes.make_config('push by a ring'),
    nodes.make_config('pull', optimizer={'rate': 0.123}),
    nodes.make_config('pull', schedule={'name': 'cosine'}),
    nodes.make_config('pull a little'),
    # Only the seeds of these topologies differ, not their descriptions.
    *(nodes.make_config('pull') for _ in range(2)),
  ]
  configs[5].num_workers = 9
  for seed, config in enumerate(configs[6:]):
    config.strategy.peers, config.seed = 'random_matching', seed
  ways = []
  for config in configs:
    header = {'config': dataclasses.asdict(config), 'began_at': 0.0}
    ways.append(
      recipes.from_config(config).make_node_settings(header).fingerprint_text
    )
  assert ways[0] == ways[1]
  assert len(set(ways)) == 7


def test_stopped_before_it_is_evaluated_a_run_knows_its_steps(
  tmp_path, monkeypatch
):
  """It knows them from the traces of the run that it was to resume."""
  config = cases.make_config('pull')
  experiment.train_and_evaluate(config, tmp_path)
  folder = workdirs.Workdir(tmp_path)
  folder.result.unlink()
  trace = traces.Trace.load(folder.trace)
  folder.trace.unlink()
  files = Files(tmp_path, trace)
  files.append(0, len(trace))
  files.close()
  ended = types.SimpleNamespace(
    run=lambda: None, list_lost=list, lost=set(), is_interrupted=True
  )
  monkeypatch.setattr(supervisors, 'Supervisor', lambda *_, **__: ended)
  recipe = recipes.from_config(config)
  result = local.supervise(recipe, folder, dict)
  assert result.clock == 60
  assert result.is_interrupted
  assert not folder.result.exists()
