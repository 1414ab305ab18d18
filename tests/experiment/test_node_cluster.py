"""Members of a run on many machines: who can be one."""

import dataclasses
import os
import secrets
import shutil
import threading

import pytest

from jasgd import experiment
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_cluster
from jasgd.experiment import _node_running
from tests.experiment import test_real_nodes as nodes


def _make_config(name='pull', num_nodes=nodes.NUM_NODES, **parts):
  config = nodes.make_config('elastic', **parts)
  config.strategy.name = name
  config.strategy.num_nodes = num_nodes
  return config


@pytest.mark.parametrize(
  ('options', 'problem'),
  [
    ({'role': 'server'}, "Unknown role 'server'. Known: node, centre"),
    ({'node': 9}, 'have the numbers 0 to 2, got 9'),
    ({'node': -1}, 'have the numbers 0 to 2, got -1'),
    ({'role': 'centre'}, "got strategy.name='pull'"),
    ({'peers': ('a:1',)}, 'must be given its number'),
    ({'node': 1, 'peers': ('a',)}, "given as HOST:PORT, got 'a'"),
    ({'node': 1, 'peers': ('a:99999',)}, "below 65536, got 'a:99999'"),
    ({'listen': 'a:b'}, "HOST or HOST:PORT, got 'a:b'"),
    ({'listen': ':7'}, "HOST or HOST:PORT, got ':7'"),
  ],
)
def test_who_cannot_be_a_member_is_told_why(options, problem, tmp_path):
  with pytest.raises(ValueError, match=problem):
    experiment.run_member(_make_config(), tmp_path / 'run', **options)
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'options',
  [{}, {'node': 0}, {'peers': ('a:1',)}, {'node': 0, 'peers': ('a:1', 'b:1')}],
)
def test_an_all_reduce_needs_numbers_and_one_place(options, tmp_path):
  config = _make_config('allreduce')
  with pytest.raises(ValueError, match='one address where they meet, got'):
    experiment.run_member(config, tmp_path / 'run', **options)


def test_nodes_that_name_each_other_do_not_wait(tmp_path, monkeypatch):
  """Any may be the first: each listens, whether others answer yet or not."""
  monkeypatch.setenv('JASGD_TOKEN', secrets.token_hex(32))
  config = _make_config(
    num_nodes=2,
    deadlines={'start': 600.0, 'end': 0.1},
    runtime={'mode': 'local'},
  )
  config.num_epochs = 0.1
  peers = [f'127.0.0.1:{runtime.find_free_port()}' for _ in range(2)]
  stopped = threading.Event()
  threads = [
    threading.Thread(
      target=experiment.serve_member,
      args=(dataclasses.asdict(config), os.fspath(tmp_path / str(node))),
      kwargs={'role': 'node', 'node': node, 'peers': peers}
      | {'listen': peers[node], 'stopped': stopped},
    )
    for node in range(2)
  ]
  for node in range(2):
    (tmp_path / str(node)).mkdir()
    threads[node].start()
  for thread in threads:
    thread.join(60.0)
  are_alive = [thread.is_alive() for thread in threads]
  stopped.set()
  for thread in threads:
    thread.join(60.0)
  assert not any(are_alive)
  whole = tmp_path / 'whole'
  for node in range(2):
    shutil.copytree(tmp_path / str(node), whole, dirs_exist_ok=True)
  trace = traces.NodeTrace.load(whole / 'trace')
  assert trace.records['kind'].tolist().count(traces.NodeKind.END) == 2
  assert set(trace.mixes['node'].tolist()) == {0, 1}


class Strangers:
  """A registry of which some answer."""

  def __init__(self, *origins):
    self._origins = origins
    self.num_asked = 0

  def ask_strangers(self):
    self.num_asked += 1
    return [{'origin': origin} for origin in self._origins]


@pytest.mark.parametrize(
  ('origins', 'expected'), [((), None), ((7.0,), 7.0), ((9.0, 8.0), 8.0)]
)
def test_others_are_asked_once_when_it_began(origins, expected):
  registry = Strangers(*origins)
  assert _node_cluster._find_origin(registry, ('a:1', 'b:1')) == expected
  assert registry.num_asked == 1


def test_a_header_is_not_waited_for_for_ever(tmp_path):
  config = _make_config(deadlines={'start': 0.01})
  folder = workdirs.Workdir(tmp_path)
  with (
    workdirs.lock_file(tmp_path / 'header.lock'),
    pytest.raises(workdirs.WorkdirError, match=r'header\.lock.* for 0\.01 s'),
  ):
    _node_running.find_header(config, folder)
  header = _node_running.find_header(config, folder, 5.0)
  assert header == _node_running.find_header(config, folder, 6.0)
  assert header['began_at'] == 5.0


def test_addresses_are_no_shared_memory(tmp_path):
  config = _make_config(runtime={'wire': 'memory'})
  with pytest.raises(ValueError, match="the wire 'memory' and a:1"):
    experiment.watch_nodes(config, tmp_path / 'run', peers=('a:1',))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('strategy', 'parts', 'problem'),
  [
    ('pairs', {}, "simulate or devices, got 'local'"),
    (
      'allreduce',
      {'runtime': {'wire_dtype': 'bfloat16'}},
      "must be float32, got 'bfloat16'",
    ),
    (
      'pull',
      {'runtime': {'runner': 'tmap'}},
      "runtime.runner 'tmap'. Known: auto, pmap, shard_map, vmap",
    ),
  ],
)
def test_what_makes_no_sense_is_said(strategy, parts, problem):
  with pytest.raises(ValueError, match=problem):
    _make_config(strategy, **parts).validate()


@pytest.mark.parametrize('mode', ['local', 'devices'])
def test_failures_are_those_of_virtual_time(mode):
  config = _make_config(runtime={'mode': mode})
  config.validate()
  config.failures.mean_time_between = 10.0
  with pytest.raises(ValueError, match='failures are those of virtual time'):
    config.validate()
  config.runtime.mode = 'simulate'
  config.validate()


def test_devices_are_described():
  config = _make_config(runtime={'mode': 'devices'})
  assert 'nodes step together: on one device (vmap), of 1' in config.describe()
  config.runtime.runner = 'pmap'
  assert 'on a device each (pmap)' in config.describe()


def test_nodes_that_train_otherwise_are_of_another_run():
  settings = [
    _node_running.make_node_settings(
      config, header={'config': dataclasses.asdict(config)}
    )
    for config in (
      _make_config(),
      _make_config(),
      _make_config('push'),
      _make_config(optimizer={'rate': 0.123}),
      _make_config(schedule={'name': 'cosine'}),
      _make_config(num_nodes=9),
    )
  ]
  ways = [each.way for each in settings]
  assert ways[0] == ways[1]
  assert len(set(ways)) == 5


def test_devices_may_round_an_all_reduce():
  config = _make_config(
    'allreduce', runtime={'mode': 'devices', 'wire_dtype': 'bfloat16'}
  )
  config.validate()
