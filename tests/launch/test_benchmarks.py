"""The suites of `launch.benchmark`: short runs, and their arithmetic."""

import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from jasgd import experiment
from jasgd import gossip as peer_strategies
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from launch.benchmarks import faults
from launch.benchmarks import gossip
from launch.benchmarks import gossip_worker
from launch.benchmarks import measuring
from launch.benchmarks import prediction
from launch.benchmarks import processes
from launch.benchmarks import server
from launch.benchmarks import server_peers
from launch.benchmarks import simulator
from launch.benchmarks import stragglers
from launch.benchmarks import training
from tests import live
from tests.experiment import own_strategies

# Suite -> patterns, and the number of output lines that match each of them. The
# run of `faults` is the quick case of tests/experiment/test_faults.py.
SMOKES = {
  'gossip': {
    r'^2 in [12] +(pmap|shard_map) ': 3 * 4,
    '^2 in [12] +- .* copy ': 2,
    '^2 nodes +(memory|flight) +1 pull ': 2,
    'Goal: at most 1.25 x: (met|missed), ': len(gossip_worker.STRATEGIES),
  },
  'prediction': {
    r'^(softsync|pull) +\w+ .* (within|OUTSIDE) ': 2 + 3,
  },
  'server': {
    r'^(unix|our \w+) +[\d.]+ .* 0$': 4,
    r'^our \w+ +wait \d+%, ': 3,
    'GB/s: ': 1,
    r'^our (memory|flight): \d+ updates/s for 1 s, .* 0 refused, 0 wrong': 2,
  },
  'simulator': {
    r'^[a-z].* [\d,]+ +[\d.]+$': len(simulator.ROWS),
    r'^replay, .* [\d.]+ x bare steps \((met|missed)\)': 2,
    '^Bound: .*: (met|missed), ': 2,
  },
  'stragglers': {'^(pull|allreduce)(-disturbed)? +\\d': 4, '^Goal: ': 2},
  'training': {
    r'^1 +lenet +16 +(0|scan) ': 2,
    '^1 +(met|missed|not measured) ': 6,
  },
}


@pytest.mark.slow
@pytest.mark.parametrize('suite', SMOKES)
def test_smoke(suite, tmp_path):
  command = [sys.executable, '-m', 'launch.benchmark', f'--suite={suite}']
  done = subprocess.run(
    [
      *command,
      '--quick',
      *([f'--workdir={tmp_path}'] * (suite == 'stragglers')),
    ],
    cwd=processes.ROOT,
    timeout=600,
    capture_output=True,
    text=True,
  )
  lines = done.stdout.splitlines()
  for pattern, count in SMOKES[suite].items():
    found = [line for line in lines if re.search(pattern, line)]
    assert len(found) == count, (pattern, done.stdout, done.stderr)
  # On a busy machine a crowd may be served unfairly, and goals be missed.
  if suite == 'server' and done.returncode:
    problems = [line for line in done.stderr.splitlines() if 'served' in line]
    assert problems == done.stderr.splitlines()
  elif suite == 'stragglers':
    assert done.returncode == ('missed' in done.stdout)
    assert 'Goal: all-reduce falls' in (tmp_path / 'report.html').read_text()
  else:
    assert done.returncode == 0, done.stderr


def test_programs_take_turns_after_the_warm_up():
  order = []
  programs = {
    name: lambda name=name: order.append(name) or len(order) for name in 'abc'
  }
  results = measuring.run_in_turns(programs, num_rounds=4, num_warm_up=1)
  assert [*results] == ['a', 'b', 'c']
  assert all(sorted(order[i : i + 3]) == [*'abc'] for i in range(0, 15, 3))
  for name, found in results.items():
    assert found == [i + 1 for i in range(3, 15) if order[i] == name]


def test_ratios_are_medians_of_rounds_and_goals_are_as_precise_as_printed():
  # The second round met a machine that was ten times slower.
  assert measuring.get_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
  assert measuring.is_met(1.254, at_most=1.25)
  assert not measuring.is_met(1.256, at_most=1.25)
  assert measuring.is_met(0.996, at_least=1.0)
  assert not measuring.is_met(0.994, at_least=1.0)


# Workers.


def _start(program):
  return processes.start_workers([[sys.executable, '-c', program]], {})


@pytest.mark.parametrize(
  ('program', 'timeout', 'problem'),
  [
    ('exit("no such luck")', 60, 'returned 1. no such luck'),
    ('import signal; signal.pause()', 0.2, 'took too long'),
  ],
)
@pytest.mark.parametrize('read', ['read', 'read_all'])
def test_workers_that_fail_are_named_and_ended(program, timeout, problem, read):
  with (
    pytest.raises(processes.WorkerError, match=problem),
    _start(program) as workers,
  ):
    getattr(workers[0], read)(timeout)
  assert workers[0]._process.returncode is not None


def test_peers_import_neither_jax_nor_each_other():
  program = (
    'import sys\n'
    'from launch.benchmarks import server_peers, training_torch\n'
    'print({"jax", "jasgd", "torch", "mpi4py", "absl"} & {*sys.modules})'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=processes.ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.strip() == 'set()'


# The suite `server`.

WORK = server_peers.Work(
  5, 2, num_warm_up=6, num_updates=26, folder='', timeout=60
)


def test_the_numpy_server_is_exact_and_its_log_leaves_the_warm_up_out(
  monkeypatch,
):
  now = 0.0
  clock = types.SimpleNamespace(
    perf_counter=lambda: now, process_time=lambda: now / 2
  )
  monkeypatch.setattr(server_peers, 'time', clock)
  numpy_server, push = server_peers.Server(WORK), server_peers.Message(5)
  push.values[:] = server_peers.GRADIENT
  for number in range(WORK.num_updates + 2):
    now += 0.5 if number >= WORK.num_warm_up else 100.0
    # The staleness is 0, 1, 0, 1, ... after the warm-up, and 5 before.
    push.clock = number - (number % 2 if number >= WORK.num_warm_up else 5)
    numpy_server.update(push)
    reached = min(number + 1, WORK.num_updates)
    assert numpy_server.answer.clock == reached
    assert (numpy_server.answer.values == np.float32(-reached / 1024)).all()
  assert numpy_server.log.make_report() == {
    'updates_per_second': 2.0,
    'mean_staleness': 0.5,
    'max_staleness': 1,
    'cpu_per_update': 0.25,
    'seconds': 10.0,
  }


def test_a_learner_counts_torn_and_old_answers():
  def exchange(push, pull):
    pull.clock = push.clock + 1
    pull.values[:] = -pull.clock / 1024
    pull.values[3] += pull.clock == 2  # Torn.
    pull.values[:] += (pull.clock == 3) / 1024  # Old.
    return pull.clock < 9

  report = server_peers.learn(WORK, exchange)
  assert report == {'num_answers': 9, 'num_errors': 2}


def test_server_goals_and_problems(capsys):
  speeds = {'mpi': 100, 'our memory': 49, 'our flight': 5, 'torch': 5}
  reports = {
    name: [{'updates_per_second': speed, 'num_errors': 0}]
    for name, speed in speeds.items()
  }
  server.print_goals(60_000, reports)
  assert capsys.readouterr().out.splitlines() == [
    'Goal: our memory is 0.5 x mpi: missed, 0.49',
    'Goal: our flight is 1.0 x torch: met, 1.00',
  ]
  reports['mpi'].append({'updates_per_second': 1, 'num_errors': 2})
  assert server.find_problems(reports) == [
    'our threads did not run.',
    'mpi gave wrong weights, 2 times.',
  ]


def test_crowd_problems():
  report = {
    'least_applied': 5, 'most_applied': 10, 'memory_growth': 1.0,
    'num_refused': 0, 'num_errors': 0,
  }  # fmt: skip
  assert not server.find_crowd_problems('memory', report)
  bad = {'least_applied': 4, 'memory_growth': 1.2, 'num_refused': 1}
  for key, value in {**bad, 'num_errors': 1}.items():
    assert len(server.find_crowd_problems('memory', report | {key: value})) == 1


def test_short_runs_get_longer_and_failures_are_left_out(monkeypatch, capsys):
  budgets = []

  def run_work(commands, work):
    budgets.append(work.num_updates - work.num_warm_up)
    if len(budgets) > 3:
      raise processes.WorkerError('it returned 1')
    assert json.loads(commands[0][4]) == work._asdict()
    return {'seconds': budgets[-1] / 2000}

  monkeypatch.setattr(server, 'run_work', run_work)
  case = server.Case('unix', sys.executable, 60_000, 2, 0.5)
  assert case() == case() == {'seconds': 0.75}
  assert budgets == [400, 1500, 1500]
  assert case() is None is case()
  assert capsys.readouterr().out == 'unix is left out: it returned 1\n'


# Goals of the other suites.


def _make_training_results(**changes):
  """Results that meet each goal of the suite `training` exactly."""
  cpu = {'0': 100, '256': 115, 'scan': 100, 'steps': 100, 'async': 110}
  results = {}
  for model, speedup in (('lenet', 2.0), ('a1', 1.2), ('resnet20', 1.0)):
    for way, cost in cpu.items():
      cost = changes.get(f'{model}_{way}', cost)
      case = training.Case(model, 16, way)
      results[training.OURS, case] = training.Result(1e6 / cost, cost, 0, 0, 1)
    cost = speedup * results[training.OURS, case._replace(way='0')][1]
    torch = training.Result(1e6 / cost, cost, 0, 0, 1)
    results[training.TORCH, case._replace(way='0')] = torch
  return results


@pytest.mark.parametrize('clock', training.Ratio._fields)
def test_training_goals(clock):
  def judge(**changes):
    lines = training.judge(_make_training_results(**changes), clock)
    return [line.split()[0] for line in lines]

  assert judge() == ['met'] * 6
  assert judge(a1_256=117) == ['met'] * 3 + ['missed', 'met', 'met']
  assert judge(lenet_async=112) == ['met'] * 4 + ['missed', 'met']
  assert judge(lenet_steps=98) == ['met'] * 5 + ['missed']
  slow = _make_training_results()
  case = training.Case('lenet', 16, '0')
  slow[training.TORCH, case] = training.Result(5200, 192, 0, 0, 1)
  line = training.judge(slow, clock)[0]
  assert line.startswith('missed wall  1.92 CPU  1.92  >= 2.0')
  assert line.endswith('(lenet 16 0)')
  assert 'not measured' in training.judge({}, clock)[0]


def test_gossip_counts_the_worst_number_of_nodes_and_the_faster_bare_program():
  results = {}
  for number, pull in ((8, 1.1), (32, 1.3), (128, 1.2)):
    found = {name: [1.2] for name in gossip_worker.STRATEGIES}
    found |= {'bare steps': [1.5], 'bare loop': [1.0], 'pull': [pull]}
    results['digits', number] = found
  assert 'missed, 1.30 with 32 nodes' in gossip.judge(results)[0]
  assert 'met, 1.20' in gossip.judge(results)[1]
  results['digits', 128]['bare steps'] = [0.9]
  assert 'missed, 1.33 with 128 nodes' in gossip.judge(results)[0]


def _judge_stragglers(**changes):
  rates = {
    'pull': [20.0, 20.0, 20.0, 20.0],
    'pull-disturbed': [19.6, 19.8, 6.6, 6.5],
    'allreduce': [18.0, 18.0, 18.0, 18.0],
    'allreduce-disturbed': [6.3, 6.3, 6.3, 6.3],
    **{name.replace('_', '-'): rate for name, rate in changes.items()},
  }
  lines, is_met = stragglers.judge(
    {name: np.array(rate) for name, rate in rates.items()}
  )
  words = [line.split(': ')[2].split(',')[0] for line in lines[2:]]
  assert is_met == ('missed' not in words)
  return words


def test_stragglers_goals():
  assert _judge_stragglers() == ['met', 'met']
  slowed = [17.9, 20.0, 6.6, 6.5]
  assert _judge_stragglers(pull_disturbed=slowed) == ['missed', 'met']
  free = [9.0, 6.3, 6.3, 6.3]
  assert _judge_stragglers(allreduce_disturbed=free) == ['met', 'missed']
  # If all nodes are slow in both runs, no speed falls.
  assert _judge_stragglers(allreduce=[6.5] * 4) == ['met', 'missed']


# The suite `simulator`.


def test_simulator_bounds():
  planning = {'hardsync': 0.3, 'downpour': 5.0}
  lines, is_met = simulator.judge(planning, 2.5)
  assert is_met
  assert ['missed' in line for line in lines] == [False, False]
  assert lines[0].endswith('met, at most 5.00 (downpour)')
  assert lines[1].endswith('met, 2.50')
  for slower, memory, missed in ((5.1, 1.0, 0), (1.0, 2.6, 1)):
    lines, is_met = simulator.judge(planning | {'downpour': slower}, memory)
    assert not is_met
    assert ['missed' in line for line in lines].index(True) == missed


# The suite `prediction`.


def _judge_prediction(row='', **numbers):
  """Verdicts on numbers, each given as (measured, predicted)."""
  trace = simulation.simulate(
    protocols.asynchronous(), num_workers=2, num_gradients=10
  )
  measured, predicted = (
    {name: pair[place] for name, pair in numbers.items()} for place in (0, 1)
  )
  comparison = dataclasses.replace(
    simulation.compare(trace, trace), measured=measured, predicted=predicted
  )
  found = {}
  for line, is_good in prediction.judge(comparison, row):
    assert ('OUTSIDE' in line) != is_good
    found[line.split()[0]] = is_good
  return found


def test_prediction_bounds():
  inside = {
    'updates_per_gradient': (0.46, 0.5),
    'mixes_per_step': (0.46, 0.5),
    'staleness': (1.24, 1.0),
    'age': (0.15, 0.01),
    'lost_mass': (3.0, 1.3),
  }
  assert _judge_prediction(**inside) == dict.fromkeys(prediction.BOUNDS, True)
  outside = {
    'updates_per_gradient': (0.44, 0.5),
    'mixes_per_step': (0.56, 0.5),
    'staleness': (1.26, 1.0),
    'age': (0.17, 0.01),
    'lost_mass': (0.1, 0.0),
  }
  assert _judge_prediction(**outside) == dict.fromkeys(prediction.BOUNDS, False)
  # A number that the rule alone determines has a narrower bound, or none.
  rates = {'updates_per_gradient': (0.98, 1.0), 'staleness': (0.09, 0.0)}
  assert _judge_prediction(**rates) == dict.fromkeys(rates, True)
  for row, is_good in (
    ('asynchronous', (False, False)),
    ('hardsync', (True, False)),
    ('ssp', (False, True)),
  ):
    assert tuple(_judge_prediction(row, **rates).values()) == is_good
  # Numbers without a bound, and means without an age, have no row.
  assert not _judge_prediction(
    gradients_per_second=(1.0, 9.0), age=(math.nan, math.nan)
  )
  assert _judge_prediction(age=(math.nan, 0.1)) == {'age': False}


def test_every_strategy_of_real_processes_is_predicted():
  listed = {
    fields.get('name', name) for name, fields in prediction.ROWS.items()
  }
  assert prediction.NARROW.keys() < prediction.ROWS.keys()
  known = {*protocols.PROTOCOLS} - {'constant_delay', 'ramp_up'}
  known |= {
    kind.name
    for kind in vars(peer_strategies).values()
    if isinstance(kind, type)
    and issubclass(kind, peer_strategies.PeerStrategy)
    and kind.name
    and not kind.refusal_of_processes
  } - {'gossip', 'peerstrategy'}
  assert listed == known
  assert prediction.ROWS['ramp_up']['ramp_up']


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'numbers'),
  [
    ('Every', ['updates_per_gradient', 'staleness']),
    ('Neighbour', ['mixes_per_step', 'age', 'lost_mass']),
  ],
)
def test_own_strategies_have_rows_in_the_table(name, numbers, tmp_path):
  config = experiment.StrategyConfig(name=f'{own_strategies.__name__}:{name}')
  rows = prediction.judge(prediction.run_strategy(config, tmp_path, 100))
  assert [line.split()[0] for line, _ in rows] == numbers
  assert all(is_good for _, is_good in rows), rows


# The suite `faults`; its kills are tested in tests/experiment/test_faults.py.


def test_a_bad_fault_fails_the_suite(monkeypatch, capsys):
  good = faults.Outcome(1, 0, 3, 0, 0, True, 0.5)
  outcomes = iter([good, good._replace(recovery=2.0), good])
  monkeypatch.setattr(faults, 'run_fault', lambda *_: next(outcomes))
  faults.run(quick=False, rounds=3, seed=0)
  said = capsys.readouterr().out
  assert '3 of 3 runs ended well' in said
  for bad in ({'num_twice': 1}, {'num_missing': 1}, {'is_same': False}):
    outcomes = iter([good._replace(**bad)])
    with pytest.raises(SystemExit) as ended:
      faults.run(quick=True, rounds=3, seed=0)
    assert ended.value.code == 1
  assert faults.describe_recovery(
    {'server': [0.5, 2.0, 1.0], 'learner': [], 'node': [0.25]}
  ) == [
    'server killed: 1.00 s to the next applied push in the median of 3, at '
    'most 2.00 s.',
    'node killed: 0.25 s to the next mix in the median of 1, at most 0.25 s.',
  ]


def test_recovery_is_from_the_kill_to_the_next_applied_push(tmp_path):
  numbers = itertools.count(1)

  def save():
    records = traces.make_records(step=np.arange(next(numbers)))
    records['fate'] = protocols.Fate.APPLIED
    traces.Trace(records).save(tmp_path / 'trace')

  save()
  # The victim waits for its job.
  command = [sys.executable, '-m', 'jasgd.runtime.child', 'server']
  victim = subprocess.Popen(command, stdin=subprocess.PIPE)
  with faults.time_recovery(os.fspath(tmp_path)) as seconds:
    os.kill(victim.pid, signal.SIGKILL)
    # The supervisor may have waited for it first.
    assert victim.wait() == -signal.SIGKILL
    live.wait_until(lambda: save() or seconds)
  victim.stdin.close()
  assert seconds[0] > 0
