"""What is measured of real nodes, and what is written down in the end."""

import io
import itertools
import json
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_local
from jasgd.experiment import _node_metrics
from jasgd.experiment import _node_running
from jasgd.experiment import _node_supervisor
from jasgd.experiment import _node_train
from jasgd.experiment import _node_watch
from tests.experiment import test_real_nodes as nodes

STATUS = {'loss': None, 'mass': 0.0, 'origin': 0.0}


class Files:
  """Files of nodes that grow."""

  def __init__(self, folder, trace):
    self._folder, self._trace = folder / 'trace', trace
    self._folder.mkdir()
    self._writers = {}

  def append(self, begin, end):
    """Writes some records down; gives all that were written so far."""
    for record in self._trace.records[begin:end]:
      node = int(record['node'])
      if node not in self._writers:
        name = 'centre' if node == traces.CENTRE else f'node-{node}'
        self._writers[node] = traces.NodeTraceWriter(
          self._folder / name, self._trace.header
        )
      self._writers[node].append(record.reshape(1))
    for writer in self._writers.values():
      writer.flush()
    return traces.NodeTrace(self._trace.records[:end], self._trace.header)

  def close(self):
    """Closes them."""
    for writer in self._writers.values():
      writer.close()


@pytest.mark.parametrize(
  'strategy',
  [gossip.Pull(), gossip.Pull(peers=gossip.ring(4)), gossip.Elastic()],
  ids=['pull', 'ring', 'elastic'],
)
def test_what_is_new_is_measured_as_in_the_whole(strategy, tmp_path):
  trace = simulation.simulate_nodes(
    strategy,
    num_nodes=4,
    num_steps=25,
    compute=simulation.normal(1.0, 0.3),
    network=simulation.Network(latency=0.13),
  )
  files = Files(tmp_path, trace)
  meter = _node_metrics.NodeMeter(workdirs.Workdir(tmp_path))
  # Between two times: what happened at once is written at once.
  changes = 1 + np.flatnonzero(np.diff(trace.records['end_time']))
  since = 0.0
  for begin, end in itertools.pairwise([0, *changes[20::40], len(trace)]):
    whole = files.append(begin, end)
    now = whole.duration
    found = meter.measure(dict.fromkeys(range(4), STATUS), ())
    wanted = _node_train.Mixing(whole).measure(since, now)
    assert 'gossip/age_mean' in wanted
    assert found == pytest.approx({'time': now, **wanted})
    since = now
  # Nothing is new: what was said last still holds.
  assert meter.measure(dict.fromkeys(range(4), STATUS), ()) == found
  files.close()


def test_records_are_read_once(tmp_path):
  trace = simulation.simulate_nodes(gossip.Pull(), num_nodes=2, num_steps=9)
  files = Files(tmp_path, trace)
  tail = traces.NodeTail(tmp_path / 'trace')
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
  """What messages have lost at any time, and what the dead have now."""
  records = np.zeros(8, traces.NODE_RECORD)
  records['node'] = [0, 1, 0, 0, 1, 0, 1, 0]
  records['kind'][[2, 5]] = traces.NodeKind.LOST
  records['mass'] = 0.5
  records['end_time'] = np.arange(8)
  files = Files(tmp_path, traces.NodeTrace(records, {'num_nodes': 2}))
  meter = _node_metrics.NodeMeter(workdirs.Workdir(tmp_path))
  statuses = {0: STATUS, 1: {**STATUS, 'mass': 0.25}, traces.CENTRE: {}}
  found = []
  for begin in range(0, 8, 2):
    files.append(begin, begin + 2)
    lost = () if begin < 6 else (1, traces.CENTRE)
    found.append(meter.measure(statuses, lost)['gossip/mass_lost'])
  assert found == [0.0, 0.5, 1.0, 1.25]
  files.close()


def test_what_was_refused_is_a_metric(tmp_path):
  meter = _node_metrics.NodeMeter(workdirs.Workdir(tmp_path))
  statuses = {
    0: {**STATUS, 'loss': 2.0, 'num_full': 3},
    1: {**STATUS, 'loss': 4.0, 'num_full': 4},
    2: {**STATUS, 'loss': 9.0, 'num_full': 5},
    traces.CENTRE: {},
  }
  found = meter.measure(statuses, {2})
  assert found.pop('time') > 0
  assert found == {'train/loss': 3.0, 'gossip/refused_full': 12.0}


def test_only_what_nodes_mix_is_averaged():
  """A counter of each node is no weight: as in replay, the first one's."""
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
  (params, stats), _ = _node_watch.describe_nodes(task, rows, [], None)
  assert params['w'].tolist() == [1.5, 1.5]
  assert (stats['count'], stats['norm']) == (3, 6.0)
  (params, stats), _ = _node_watch.describe_nodes(task, rows, [1.0, 3.0], None)
  assert params['w'].tolist() == [1.75, 1.75]
  assert (stats['count'], stats['norm']) == (3, 7.0)
  (params, _), _ = _node_watch.describe_nodes(task, halves, [], None)
  assert params['w'].tolist() == [1.5, 1.5]


@pytest.mark.parametrize('unwritten_at', [None, 240])
def test_the_last_row_is_the_result(unwritten_at, monkeypatch, tmp_path):
  """Also if all had been evaluated, as messages have it, when they ended."""
  ended = {
    'clock': 240,
    'mean': None,
    'metrics': {'test/loss': 0.5},
    'unwritten_at': unwritten_at,
    'lost': [],
    'is_interrupted': False,
    'is_diverged': False,
  }

  class Supervisor:
    def __init__(self, watch, starts, folder, writer, **options):
      if unwritten_at is None:
        writer.write(240, ended['metrics'])

    def run(self):
      return ended

  exact = {'test/loss': 0.4375}
  monkeypatch.setattr(_node_supervisor, 'NodeSupervisor', Supervisor)
  monkeypatch.setattr(_node_local, '_read_end', lambda *_: {})
  monkeypatch.setattr(
    _node_local, '_describe_checkpoints', lambda *_: (None, exact)
  )
  config, folder = nodes.make_config('pull'), workdirs.Workdir(tmp_path)
  registry = _node_running.make_registry(config, folder)
  options = {'is_owner': True, 'stream': io.StringIO(), 'on_metrics': None}
  result = _node_local.supervise(config, folder, registry, {}, **options)
  assert result['test/loss'] == exact['test/loss']
  lines = folder.metrics.read_text().splitlines()
  per_epoch = config.make_task().num_samples / config.task.batch
  whole = {**exact, 'epoch': 240 / per_epoch, 'train/rate': 0.05}
  assert json.loads(lines[-1]) == {'clock': 240, **whole}
  assert workdirs.read_metrics(folder)['test/loss'].tolist() == [0.4375]
