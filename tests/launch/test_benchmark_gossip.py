"""The suite `gossip`: its tables and verdicts, and its smallest piece."""

import contextlib
import functools
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest

from jasgd import gossip as mixing
from launch.benchmarks import gossip
from launch.benchmarks import gossip_nodes as nodes
from launch.benchmarks import gossip_tables as tables
from launch.benchmarks import gossip_worker
from launch.benchmarks import workers
from tests import live

RULES = ['all-reduce', 'ring', 'permutation', 'independent']
STRATEGIES = ['pull', 'push', 'push-sum', 'pairs', 'elastic', 'all-reduce']
SIZE = 1 << 16


class _FakeWorker:
  """Answers by a function of the line."""

  def __init__(self, answer):
    self._answer = answer

  def ask(self, line, timeout):
    assert timeout > 0
    return self._answer(line)


def _fake_start(monkeypatch, answer):
  """No processes; gives the jobs that they would have."""
  started = []

  @contextlib.contextmanager
  def start(module, jobs, variables):
    del variables
    started.append((module.rpartition('.')[2], jobs))
    yield [_FakeWorker(answer) for _ in jobs]

  monkeypatch.setattr(gossip, '_start', start)
  return started


def _read_rows(text, start):
  return [line.split() for line in text.splitlines() if line.startswith(start)]


def _make_seconds(line, slow=(), **seconds):
  """Of a program: a bare loop takes 1 s, all else 1.2 s, or as is said."""
  program = line.split(maxsplit=3)[3]
  given = {'bare loop': 1.0, 'bare steps': 1.5, **seconds}
  return 1.26 if program in slow else given.get(program, 1.2)


def test_every_strategy_and_rule_is_measured():
  assert [*nodes.STRATEGIES] == STRATEGIES
  assert [*gossip_worker.make_rules(2)] == RULES
  for num_devices in (3, 4, 8):
    assert [*gossip_worker.make_rules(num_devices)] == [*RULES, 'pairs']


@pytest.mark.parametrize('num_devices', [2, 3, 4, 8])
def test_only_the_all_reduce_is_one(num_devices):
  """Or a mix would be measured against itself."""
  mesh = jax.sharding.AbstractMesh(
    (num_devices,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  for name, strategy in gossip_worker.make_rules(num_devices).items():
    mix = functools.partial(
      mixing.mix, axis_name='nodes', strategy=strategy, key=jax.random.key(0)
    )
    mapped = jax.shard_map(
      mix, mesh=mesh, in_specs=jax.P('nodes'), out_specs=jax.P('nodes')
    )
    traced = str(jax.make_jaxpr(mapped)(jnp.ones((num_devices, 2))))
    assert ('psum' in traced) == (name == 'all-reduce'), (name, traced)


def test_what_the_suite_measures(monkeypatch, capsys):
  asked = []
  monkeypatch.setattr(
    gossip, 'run_devices', lambda *given: asked.append(given) or {}
  )
  monkeypatch.setattr(
    gossip, 'run_wire', lambda *given: asked.append(('wire', *given[:2]))
  )
  _fake_start(monkeypatch, lambda line: {'seconds': _make_seconds(line)})
  gossip.run(quick=False)
  sizes = [1 << 20, 10 << 20, 100 << 20]
  assert [each[:3] for each in asked] == [
    *[(count, 1, sizes) for count in (2, 4, 8)],
    *[
      each
      for count in (2, 3, 4)
      for each in ((count, count, sizes), ('wire', count, sizes))
    ],
  ]
  out = capsys.readouterr().out
  for task in ('mnist', 'digits'):
    rows = _read_rows(out, task)
    assert {row[1] for row in rows if row[1].isdecimal()} == {'8', '32', '128'}
    verdicts = [row for row in rows if 'Goal:' in row]
    assert [row[1] for row in verdicts] == STRATEGIES
    assert all('met,' in row for row in verdicts)


def test_a_row_for_each_rule_and_runner(monkeypatch, capsys):
  rows = [{'runner': '', 'rule': 'copy', 'size': SIZE, 'seconds': [1.0, 3.0]}]
  for runner, seconds in (('pmap', [4.0, 12.0]), ('shard_map', [2.0, 6.0])):
    rows += [
      {
        'runner': runner,
        'rule': rule,
        'size': SIZE,
        'seconds': seconds if rule == 'all-reduce' else [8.0, 24.0],
      }
      for rule in RULES
    ]
  started = _fake_start(monkeypatch, lambda line: {'rows': rows})
  assert gossip.run_devices(2, 1, [SIZE], 2) == {(1, SIZE): [2.0, 6.0]}
  ((_, (job,)),) = started
  assert job['cases'] == [(SIZE, 2)]
  said = capsys.readouterr()
  assert said.err == '... devices: 2 in 1 process(es), 0.0625 MB\n'
  lines = _read_rows(said.out, '2 in 1')
  expected = [
    [runner, rule] for runner in ('pmap', 'shard_map') for rule in RULES
  ]
  assert [[line[3], line[5]] for line in lines] == [*expected, ['-', 'copy']]
  found = {(line[3], line[5]): line[6:] for line in lines}
  assert found['pmap', 'all-reduce'] == ['8000.000', '1.00', '4.00', '2.00']
  assert found['pmap', 'ring'] == ['16000.000', '2.00', '8.00', '1.00']
  assert found['shard_map', 'ring'] == ['16000.000', '4.00', '8.00', '-']
  assert found['-', 'copy'] == ['2000.000', '-', '-', '-']


@pytest.mark.parametrize('strategy', STRATEGIES)
def test_a_ratio_above_the_goal_is_missed(strategy, monkeypatch, capsys):
  _fake_start(
    monkeypatch,
    lambda line: {'seconds': _make_seconds(line, slow=[strategy])},
  )
  results = gossip.run_nodes({'digits': 64}, [8], 2)
  said = capsys.readouterr()
  rows = _read_rows(said.out, 'digits')
  names = [' '.join(row[2:-4]) for row in rows]
  assert names == ['bare steps', 'bare loop', 'one node', *STRATEGIES]
  found = dict(zip(names, [row[-4:] for row in rows], strict=True))
  assert found[strategy] == ['19687.5', '1.26', '0.84', '1.05']
  assert found['bare steps'] == ['23437.5', '1.50', '1.00', '1.25']
  assert said.err.count('... simulated: digits, 8 nodes, ') == 3
  for name, line in zip(STRATEGIES, tables.judge(results), strict=True):
    word = 'missed, 1.26' if name == strategy else 'met, 1.20'
    end = f'Goal: at most 1.25 x: {word} with 8 nodes'
    assert line.split() == ['digits', name, *end.split()]


def test_the_worst_number_of_nodes_and_the_faster_plain_one_count():
  results = {
    ('digits', number): {
      program: [_make_seconds(f'digits 0 0 {program}', pull=pull)]
      for program in (*nodes.PLAIN, *STRATEGIES)
    }
    for number, pull in ((8, 1.1), (32, 1.3), (128, 1.2))
  }
  results['digits', 128]['bare steps'] = [0.9]
  line = tables.judge(results)[0]
  assert line.endswith('Goal: at most 1.25 x: missed, 1.33 with 128 nodes')


def test_ratios_are_medians_of_rounds():
  # The second round met a machine that was ten times slower.
  assert tables.get_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0


def test_a_line_that_makes_no_sense_is_refused():
  with pytest.raises(ValueError, match=r"task of .* got 'vgg 2 8 pull'"):
    nodes.answer('vgg 2 8 pull')
  with pytest.raises(ValueError, match='A line is "task nodes steps program"'):
    nodes.answer('tiny 2 8 nothing')


def _list_descendants():
  """The command lines of processes of the suite that live."""
  found = []
  for path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):
    with contextlib.suppress(OSError):  # It has just ended.
      line = path.read_bytes().decode().split('\0')
      if any(f'mark={os.getpid()}' in word for word in line):
        found.append(line)
  return found


def test_workers_are_ended_whatever_happens():
  job = {'mark': f'mark={os.getpid()}'}

  def fail(staff):
    assert len(staff) == 2
    live.wait_until(lambda: len(_list_descendants()) == 2)
    raise KeyError('Something else.')

  with (
    pytest.raises(KeyError, match='Something else'),
    gossip._start('launch.benchmarks.gossip_nodes', [job] * 2, {}) as staff,
  ):
    fail(staff)
  assert not _list_descendants()


def test_a_worker_that_fails_is_told_of():
  with (
    pytest.raises(workers.WorkerError, match='No module named launch'),
    gossip._start('launch.nothing', [{}], {}) as (worker,),
  ):
    worker.ask('next', timeout=60.0)


@pytest.mark.slow
def test_the_smallest_piece(capsys):
  gossip.run_devices(2, 1, [SIZE], 2)
  reduced = gossip.run_devices(2, 2, [SIZE], 2)
  assert [*reduced] == [(2, SIZE)]
  gossip.run_wire(2, [SIZE], 6, reduced)
  results = gossip.run_nodes({'tiny': 8}, [2], 1)
  said = capsys.readouterr()
  lines = _read_rows(said.out, '2 in 1')
  assert [line[5] for line in lines] == [*RULES, *RULES, 'copy']
  assert all(float(each) > 0 for line in lines[:4] for each in line[6:])
  lines = _read_rows(said.out, '2 in 2')
  assert [line[5] for line in lines] == [*RULES, 'copy']
  assert all(float(each) > 0 for line in lines[:-1] for each in line[6:9])
  lines = _read_rows(said.out, '2 nodes')
  assert [line[2:5] for line in lines] == [
    [wire, '0.0625', 'pull'] for wire in gossip.WIRES
  ]
  assert all(float(each) > 0 for line in lines for each in line[5:8])
  rows = _read_rows(said.out, 'tiny')
  assert len(rows) == 3 + len(STRATEGIES)
  assert all(float(each) > 0 for row in rows for each in row[-4:])
  assert len(tables.judge(results)) == len(STRATEGIES)
