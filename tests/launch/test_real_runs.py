"""Real runs by the command line, as people run them."""

import dataclasses
import io
import json
import os
import re
import signal

import jax
import numpy as np
import pytest

import jasgd
from jasgd import experiment
from jasgd import protocols
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live
from tests import marks
from tests.launch import quick

NUM_NODES = quick.NUM_NODES
LONG = '--config.num_updates=1000000'
NUMBER = r'-?\d[\d.e-]*'
SERVER_LINE = re.compile(
  rf'^clock (\d+)/\1 100%  {NUMBER}/s  took \w+  '
  rf'staleness {NUMBER} \(max \d+\)  loss {NUMBER}  acc {NUMBER}  learners 2$',
  re.MULTILINE,
)
NODES_LINE = re.compile(
  rf'^steps (\d+)/\1 100%  {NUMBER}/s  took \w+  (age {NUMBER} \(max \d+\)  )?'
  rf'loss {NUMBER}  acc {NUMBER}  nodes {NUM_NODES}$',
  re.MULTILINE,
)


def _train(processes, workdir, *flags, strategy='asynchronous'):
  return processes.start(
    'launch.train',
    f'--config=tests/launch/quick.py:{strategy}',
    f'--workdir={workdir}',
    *flags,
  )


def _replay(processes, workdir, code=0):
  return processes.start('launch.replay', f'--workdir={workdir}').wait(code)


def _read_result(workdir):
  return json.loads((workdir / 'result.json').read_text())


def _damage_nodes(workdir):
  """Changes the weight of a peer in one mix of one node."""
  path = workdir / 'trace' / 'node-1'
  trace = traces.Trace.load(workdir / 'trace')
  records = trace.of_replica(1).copy()
  rows = np.flatnonzero(records['kind'] == traces.Kind.MIX)
  records['weight'][rows[len(rows) // 2]] *= 1.5
  data = path.read_bytes()
  path.write_bytes(data[: -records.nbytes] + records.tobytes())


def _damage(workdir, change):
  """Changes the applied gradients in a trace's file."""
  path = workdir / 'trace'
  records = traces.Trace.load(path).records.copy()
  rows = np.flatnonzero(
    (records['kind'] == traces.Kind.PUSH)
    & (records['fate'] == protocols.Fate.APPLIED)
  )
  clock = change(records, rows)
  data = path.read_bytes()
  path.write_bytes(data[: -records.nbytes] + records.tobytes())
  return clock


def _change_a_step(records, rows):
  records['step'][rows[60]] += 5000
  return 61


def _swap_learners(records, rows):
  learners = records['worker'][rows]
  (first, *_) = 50 + np.flatnonzero(learners[50:-1] != learners[51:])
  for name in ('worker', 'step', 'read_version'):
    records[name][rows[first : first + 2]] = records[name][
      rows[first : first + 2]
    ][::-1]
  return first + 1


def _check_result(workdir, output, clock):
  """Everything in result.json was printed; the report is there."""
  result = _read_result(workdir)
  assert result['clock'] == clock
  assert not result['lost']
  for name in ('clock', *result['metrics']):
    assert re.search(rf'^{name} ', output, re.MULTILINE), name
  assert result['end_reason'] in output
  assert 'processes start and compile' in output
  assert 'Lost on the way' not in output
  return result['metrics'], (workdir / 'report.html').read_text()


def test_a_server_to_its_end(processes, tmp_path):
  output = _train(processes, tmp_path).wait()
  assert output.startswith('asynchronous: the server updates with every')
  assert SERVER_LINE.search(output), output
  assert not processes.find()
  metrics, page = _check_result(tmp_path, output, 100)
  assert 'All 100 updates were made.' in output
  assert metrics['test/accuracy'] > 0.7
  assert '<html' in page
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.num_updates == 100
  provenance = json.loads((tmp_path / 'provenance.json').read_text())
  assert provenance == trace.header
  assert not (tmp_path / 'server.json').exists()
  assert live.Run(tmp_path).check_replay() == 100
  original = (tmp_path / 'trace').read_bytes()
  clock = _damage(tmp_path, _swap_learners)
  found = experiment.verify(tmp_path, stream=io.StringIO())
  assert (found.is_same, found.first_difference) == (False, clock)
  (tmp_path / 'trace').write_bytes(original)
  clock = _damage(tmp_path, _change_a_step)
  said = _replay(processes, tmp_path, 1)
  assert 'Different: the server; the largest difference is' in said
  assert f'first weights that differ are those of clock {clock}, ' in said
  result = live.Run(tmp_path).go_on()  # The run is already over.
  assert result.metrics == metrics


@pytest.mark.parametrize(
  'strategy', marks.slow_but(['pull', 'elastic', 'allreduce'], 'pull')
)
def test_nodes_to_their_end(strategy, processes, tmp_path):
  output = _train(processes, tmp_path, strategy=strategy).wait()
  assert NODES_LINE.search(output), output
  assert not processes.find()
  metrics, page = _check_result(tmp_path, output, 60 * NUM_NODES)
  assert ('gossip/age_mean' in metrics) == (strategy != 'allreduce')
  assert ('gossip/lag_mean' in metrics) == (strategy == 'pull')
  groups = {'test', 'local', 'centre'} if strategy == 'elastic' else {'test'}
  for group in groups:
    assert metrics[f'{group}/accuracy'] > 0.8
  assert 'Traffic' in page
  assert ('centre' in page) == (strategy == 'elastic')
  # Evaluations during the run are at the clocks that they name.
  columns = workdirs.read_metrics(tmp_path)
  assert np.all(np.diff(columns['clock']) > 0)
  assert np.all(np.diff(columns['test/loss']))
  assert columns['test/loss'][-1] == metrics['test/loss']
  # The weights are the mean of those of the nodes.
  own = [
    workdirs.load_weights(tmp_path / 'nodes' / str(node))
    for node in range(NUM_NODES)
  ]
  mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *own)
  np.testing.assert_allclose(
    jasgd.load_params(tmp_path), mean[0], rtol=1e-5, atol=1e-6
  )
  said = _replay(processes, tmp_path)
  assert 'Bit-identical: the replay gives the weights' in said
  assert f'node {NUM_NODES - 1} (version ' in said
  assert ('the centre (version ' in said) == (strategy == 'elastic')
  if strategy == 'pull':
    _damage_nodes(tmp_path)
    said = io.StringIO()
    assert not experiment.verify(tmp_path, stream=said).is_same


def _wait_for_clock(run, program, clock=20):
  live.wait_until(lambda: run.get_clock() >= clock, program)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(processes, tmp_path):
  """The run of a server that was lost, and was started again."""
  run = live.Run(tmp_path)
  flag = '--config.num_updates=500'
  program = _train(processes, tmp_path, flag)
  _wait_for_clock(run, program)
  os.kill(run.get_server_pid(), signal.SIGKILL)
  live.wait_until(lambda: run.get_server_pid(incarnation=1), program)
  _wait_for_clock(run, program)
  clock = _stop(processes, program, signal.SIGINT)
  assert run.check_replay() == clock
  output = _train(processes, tmp_path, flag).wait()
  assert 'All 500 updates were made.' in output
  assert not processes.find()
  assert run.check_replay() == 500
  restarts = run.load_trace().records['kind'] == traces.Kind.RESTART
  assert np.count_nonzero(restarts) == 2
  assert _read_result(tmp_path)['metrics']['server/num_restarts'] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
  ('strategy', 'child'), [('asynchronous', 'server'), ('pull', 'node-0')]
)
def test_a_run_that_was_stopped_as_it_began_goes_on(
  strategy, child, processes, tmp_path
):
  program = _train(processes, tmp_path, strategy=strategy)
  live.wait_until(lambda: processes.find_children(child), program)
  _stop(processes, program, signal.SIGTERM)
  assert not (tmp_path / 'result.json').exists()
  assert 'were made.' in live.Run(tmp_path).go_on().end_reason
  found = experiment.verify(tmp_path, stream=io.StringIO())
  assert found.is_same, found


def _stop(processes, program, number):
  """Ends a launcher by a signal; returns the clock at which it resumes."""
  program.kill(number)
  output = program.wait()
  found = re.search(
    r'^The same command goes on from clock (\d+)\.$', output, re.M
  )
  assert found, output
  assert 'It was interrupted.' in output
  assert 'Traceback' not in output
  assert not processes.find()
  return int(found[1])


def test_a_learner_dies_as_it_starts_and_then_the_launcher(processes, tmp_path):
  """The server would wait ten minutes for a learner not reported as lost.

  No child outlives its launcher.
  """
  run = live.Run(tmp_path)
  program = _train(processes, tmp_path, LONG, '--config.deadlines.start=600')
  (pid,) = live.wait_until(
    lambda: processes.find_children('learner-1'), program
  )
  os.kill(pid, signal.SIGKILL)
  _wait_for_clock(run, program)
  live.wait_until(
    lambda: 'learner-1 was lost (exit code -9)' in program.output, program
  )
  assert len(processes.find()) == 3
  program.kill(signal.SIGKILL)
  program.wait(-signal.SIGKILL)
  live.wait_until(lambda: not processes.find())
  assert run.check_replay() >= 20  # It has saved a checkpoint.
  assert len(set(run.load_trace().worker.tolist())) == 1


@pytest.mark.slow
def test_a_lost_learner_can_end_the_run(processes, tmp_path):
  run = live.Run(tmp_path)
  program = _train(
    processes,
    tmp_path,
    '--config.num_updates=500',
    '--config.server.on_learner_lost=fail',
  )
  _wait_for_clock(run, program)
  (pid,) = processes.find_children('learner-1')
  os.kill(pid, signal.SIGKILL)
  output = program.wait(1)
  assert re.search(r'Learner \d was lost: its connection is gone\.', output)
  assert 'learner-1 was lost (exit code -9)' in output
  assert 'The same command goes on from clock' in output
  assert 'Traceback' not in output
  assert not processes.find()
  assert run.go_on().end_reason == 'All 500 updates were made.'
  assert run.check_replay() == 500


@pytest.mark.slow
def test_a_run_that_diverges_says_why(processes, tmp_path):
  output = _train(
    processes,
    tmp_path,
    '--config.optimizer.rate=1e9',
    '--config.optimizer.policy=constant',
  ).wait()
  assert re.search(
    r'The loss diverged: the last \d+ gradients were not finite .*the mean '
    r'staleness was \d\.\d \(at most \d+\) and the rate 1e\+09. A rule of '
    r'thumb: divide a rate .* by the staleness; the policy inverse does so',
    output,
  ), output
  assert 'Traceback' not in output
  assert _read_result(tmp_path)['is_diverged']
  assert live.Run(tmp_path).check_replay() < 100


CLUSTER = '--config.runtime.mode=cluster'
BAD_FLAGS = [
  (
    'asynchronous',
    ('--role=server',),
    'Only processes of a cluster have roles: give --role=server or',
  ),
  ('asynchronous', (CLUSTER, '--role=learner'), 'may give --server instead'),
  (
    'asynchronous',
    ('--config.deadlines.silence=0.0',),
    'The deadline silence must be finite and at least 0.001',
  ),
  (
    'asynchronous',
    ('--config.runtime.wire=pigeon',),
    "Unknown runtime.wire 'pigeon'. Known: auto, memory, flight",
  ),
  ('pull', (CLUSTER, '--role=server'), 'give --role=node or --role=centre or'),
  ('pull', ('--node=1',), '--node is for --role=node, centre or watch'),
  (
    'pull',
    (CLUSTER, '--role=node', '--node=9'),
    'have the numbers 0 to 1, got 9',
  ),
]


@pytest.mark.parametrize(('strategy', 'flags', 'problem'), BAD_FLAGS)
def test_usage_errors_take_a_line(strategy, flags, problem, commands, tmp_path):
  folder = [] if '--role=learner' in flags else [f'--workdir={tmp_path}/work']
  done = commands.run(
    'launch.train',
    f'--config=tests/launch/quick.py:{strategy}',
    *folder,
    *flags,
  )
  assert done.returncode == 1
  output = done.stdout + done.stderr
  assert problem in output
  assert output.endswith('\nSee --help.\n')
  assert output.count('\n') <= 3, output
  assert not (tmp_path / 'work').exists()


@pytest.mark.slow
def test_the_config_of_the_readme(processes, tmp_path):
  """Other strategies differ by one field, which the quick config has, too."""
  output = processes.start(
    'launch.train',
    '--config=configs/gossip_digits.py:push_sum,smoke',
    f'--workdir={tmp_path}',
  ).wait()
  assert re.search(r'^steps (\d+)/\1 100% .* nodes 4$', output, re.MULTILINE)
  assert (tmp_path / 'report.html').exists()
  assert experiment.verify(tmp_path, stream=io.StringIO()).is_same


@pytest.mark.parametrize(
  ('strategy', 'mode'),
  [
    ('asynchronous', 'local'),
    ('asynchronous', 'simulate'),
    ('pull', 'devices'),
  ],
)
def test_one_launch_at_a_time(strategy, mode, commands, tmp_path):
  config = quick.get_config(strategy)
  config.runtime.mode = mode
  folder = workdirs.open_workdir(tmp_path / 'run', dataclasses.asdict(config))
  with workdirs.hold_workdir(folder, 'launcher'):
    done = commands.run(
      'launch.train',
      f'--config=tests/launch/quick.py:{strategy}',
      f'--config.runtime.mode={mode}',
      f'--workdir={folder.root}',
    )
  assert done.returncode == 1
  assert 'is in use: there is a launcher already' in done.stderr
  assert 'Traceback' not in done.stderr


def test_stopped_while_it_loads(processes, tmp_path):
  starting = _train(processes, tmp_path)
  live.wait_until(lambda: live.catches(starting.pid, signal.SIGTERM), starting)
  starting.kill(signal.SIGINT)
  assert 'Stopped before it began.' in starting.wait()
