"""Roles in a run on many hosts: refusals, and how nodes meet."""

import dataclasses
import os
import secrets
import shutil
import signal
import threading

import pytest

from jasgd import experiment
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.running import cluster
from jasgd.experiment.running import recipe as recipes
from tests.experiment import test_real_nodes as nodes


def _make_config(name='pull', num_nodes=nodes.NUM_NODES, **parts):
  config = nodes.make_config('elastic', **parts)
  config.strategy.name = name
  config.num_workers = num_nodes
  return config


@pytest.mark.parametrize(
  ('options', 'problem'),
  [
    ({'role': 'server'}, "Unknown role 'server' .* Known: node, centre, watch"),
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
    experiment.run_role(
      _make_config(), tmp_path / 'run', **{'role': 'node', **options}
    )
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'options',
  [{}, {'node': 0}, {'peers': ('a:1',)}, {'node': 0, 'peers': ('a:1', 'b:1')}],
)
def test_an_all_reduce_needs_numbers_and_one_place(options, tmp_path):
  config = _make_config('allreduce')
  with pytest.raises(ValueError, match='one address where they meet, got'):
    experiment.run_role(config, tmp_path / 'run', 'node', **options)


def test_nodes_that_name_each_other_do_not_wait(tmp_path, monkeypatch):
  """Any node may be the first: each listens, even if no other answers yet."""
  monkeypatch.setenv('JASGD_TOKEN', secrets.token_hex(32))
  config = _make_config(
    num_nodes=2,
    deadlines={'start': 600.0, 'end': 0.1},
    runtime={'mode': 'local'},
  )
  config.num_updates = 50
  peers = [f'127.0.0.1:{runtime.find_free_port()}' for _ in range(2)]
  stopped = threading.Event()
  threads = [
    threading.Thread(
      target=cluster.serve_member,
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
  trace = traces.Trace.load(whole / 'trace')
  assert trace.records['kind'].tolist().count(traces.Kind.END) == 2
  assert set(trace.mixes['replica'].tolist()) == {0, 1}


class Strangers:
  """A registry in which some of the nodes answer."""

  def __init__(self, *origins):
    self._origins = origins
    self.num_asked = 0

  def contact_addresses(self):
    self.num_asked += 1
    return [{'origin': origin} for origin in self._origins]


@pytest.mark.parametrize(
  ('origins', 'expected'), [((), None), ((7.0,), 7.0), ((9.0, 8.0), 8.0)]
)
def test_others_are_asked_once_when_it_began(origins, expected):
  registry = Strangers(*origins)
  assert cluster.find_origin(registry, ('a:1', 'b:1')) == expected
  assert registry.num_asked == 1


def test_a_header_is_not_waited_for_for_ever(tmp_path):
  recipe = recipes.from_config(_make_config(deadlines={'start': 0.01}))
  folder = workdirs.Workdir(tmp_path)
  with (
    workdirs.lock_file(tmp_path / 'header.lock'),
    pytest.raises(workdirs.WorkdirError, match=r'header\.lock.* for 0\.01 s'),
  ):
    recipe.find_header(folder)
  header = recipe.find_header(folder, 5.0)
  assert header == recipe.find_header(folder, 6.0)
  assert header['began_at'] == 5.0


def test_addresses_are_no_shared_memory(tmp_path):
  config = _make_config(runtime={'wire': 'memory'})
  with pytest.raises(ValueError, match="the wire 'memory' and a:1"):
    experiment.run_role(config, tmp_path / 'run', 'watch', peers=('a:1',))
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  ('strategy', 'code', 'meaning'),
  [
    ('allreduce', 75, '; the reason is above'),
    ('allreduce', -9, ', as it was killed'),
    ('allreduce', -signal.SIGABRT, 'jax has ended it'),
    ('pull', -signal.SIGABRT, ', as it was killed'),
  ],
)
def test_exit_codes_are_explained(strategy, code, meaning):
  assert meaning in cluster.explain_code(_make_config(strategy), code)
