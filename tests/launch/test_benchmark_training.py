"""The suite `training`: its cases, its workers, its verdicts."""

import io
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from jasgd import tasks
from launch.benchmarks import environments
from launch.benchmarks import serving
from launch.benchmarks import training
from launch.benchmarks import training_cases as cases
from launch.benchmarks import training_goals as goals
from launch.benchmarks import training_jax
from launch.benchmarks import workers
from tests import marks

SIDES = [goals.TORCH, goals.OURS]
TURNS = [turn for group in training.GROUPS for turn in group.list_turns(SIDES)]
NUM_PARAMS = {'lenet': 61_706, 'a1': 89_578, 'resnet20': 269_722}
TORCH_PYTHON = workers.ROOT / '.venv-torch' / 'bin' / 'python'

ANSWER = {
  'images_per_second': 100.0,
  'cpu_us_per_image': 10.0,
  'compile_seconds': 1.0,
  'peak_mb': 1.0,
  'num_params': 1,
}

# A child that answers each line with its length.
ECHO = 'import sys\nfor line in sys.stdin: print(len(line), flush=True)'


def _start(program):
  return workers.Worker('The child', [sys.executable, '-c', program], {})


@pytest.mark.parametrize('case', sorted({case for _, case in TURNS}), ids=str)
def test_every_case_is_a_line(case):
  assert cases.parse_case(case.line) == case
  assert case.num_steps >= 2
  assert case.num_images == case.num_steps * case.batch


@pytest.mark.parametrize(
  ('line', 'problem'),
  [
    ('lenet 64', 'A case is "model batch way", got'),
    ('lenet 0 0', 'A case is "model batch way", got'),
    ('lenet x 0', 'A case is "model batch way", got'),
    ('vgg 64 0', "model must be one of .*, got 'vgg'"),
    ('lenet 64 -1', "way must be a delay, .*, got '-1'"),
  ],
)
def test_bad_lines_are_named(line, problem):
  with pytest.raises(ValueError, match=problem):
    cases.parse_case(line)


def test_the_suite_covers_what_was_promised():
  both = {case for side, case in TURNS if side == goals.TORCH}
  assert both == {case for _, case in TURNS if case.way.isdecimal()}
  assert {case.model for case in both} == set(cases.MODELS)
  for batch in (16, 32, 64, 128, 256, 1024):
    for delay in ('0', '32', '256'):
      assert cases.Case('lenet', batch, delay) in both
  own = {case.way for _, case in TURNS} - {case.way for case in both}
  assert own == {cases.SCAN, cases.STEPS, cases.ASYNC}


@pytest.mark.parametrize('model', cases.MODELS)
def test_our_networks(model):
  task = training_jax.make_task(model, batch=2)
  params, _ = jax.eval_shape(task.init, tasks.fold_key(0, 0, 0))
  assert training_jax.count(params) == NUM_PARAMS[model]
  image = jax.eval_shape(task.batches, task.data, 0, 0, 0)['image']
  assert image.shape == (2, *cases.MODELS[model].shape)


@pytest.mark.slow
@pytest.mark.skipif(not TORCH_PYTHON.exists(), reason='There is no torch.')
@pytest.mark.parametrize('model', cases.MODELS)
def test_the_same_networks_in_torch(model):
  command = [TORCH_PYTHON, '-m', 'launch.benchmarks.training_torch', '1']
  with workers.Worker('torch', command, {}) as worker:
    answer = worker.ask(f'{model} 2 1', timeout=300)
  assert answer['num_params'] == NUM_PARAMS[model]


def _make_small_program(monkeypatch, way):
  """Two steps per turn of a task that compiles in no time."""
  monkeypatch.setattr(
    training_jax,
    'make_task',
    lambda model, batch: tasks.make_task('quadratic', batch=batch),
  )
  program = training_jax.make_program(cases.Case('resnet20', 128, way))
  task = tasks.make_task('quadratic', batch=1)
  assert program.num_params == task.init(tasks.fold_key(0, 0, 0))[0].size
  return program


@pytest.mark.parametrize('way', marks.slow_but(['0', '3', cases.ASYNC], '3'))
def test_replay_begins_again_where_its_trace_ends(way, monkeypatch):
  program = _make_small_program(monkeypatch, way)
  losses = [program.advance() for _ in range(training_jax.NUM_TURNS + 2)]
  # The same minibatches, on weights that are trained by now.
  np.testing.assert_allclose(losses[:2], losses[-2:], rtol=0.1)
  assert len({*losses}) == len(losses)


def test_a_loop_does_what_steps_do(monkeypatch):
  loop, steps = (
    [program.advance() for _ in range(3)]
    for program in (
      _make_small_program(monkeypatch, cases.SCAN),
      _make_small_program(monkeypatch, cases.STEPS),
    )
  )
  np.testing.assert_allclose(loop, steps, rtol=1e-5)
  assert len({*loop}) == 3


class _FakeProgram:
  num_params = 7

  def __init__(self, loss=0.5):
    self.num_turns = 0
    self._loss = loss

  def advance(self):
    self.num_turns += 1
    return self._loss


def test_serving_starts_a_case_once_and_forgets_other_batches():
  made = []

  def make_program(case):
    made.append((case.line, _FakeProgram()))
    return made[-1][1]

  lines = ['lenet 8 0', 'lenet 8 1', 'lenet 8 0', 'lenet 4 0', 'lenet 8 0']
  answers = io.StringIO()
  serving.serve(io.StringIO('\n'.join(lines)), answers, make_program)
  assert [line for line, _ in made] == [*lines[:2], *lines[3:]]
  # Two turns to start with, and one for each time that it was asked for.
  assert [program.num_turns for _, program in made] == [4, 3, 3, 3]
  for line in answers.getvalue().splitlines():
    answer = json.loads(line)
    assert answer.keys() == ANSWER.keys()
    assert answer['num_params'] == 7
    assert answer['peak_mb'] > 1
    assert answer['images_per_second'] > 0


def test_serving_refuses_a_loss_that_is_not_finite():
  with pytest.raises(FloatingPointError, match='must stay finite, got nan'):
    serving.measure(_FakeProgram(loss=float('nan')), 1)


def test_workers_answer_and_end():
  with _start(ECHO) as worker:
    assert worker.ask('lenet', timeout=60) == 6
    assert worker.ask('a1', timeout=60) == 3
  assert worker._process.returncode == 0


@pytest.mark.parametrize(
  ('program', 'timeout', 'problem'),
  [
    ('raise SystemExit("no such luck")', 60, 'is gone, .*no such luck'),
    ('input()\nraise ValueError("a pity")', 60, 'is gone, .*(?s:.)*a pity'),
    ('import sys\nsys.stdin.read()', 0.1, "in time, asked 'lenet 1 2'"),
  ],
)
def test_workers_that_fail_are_named(program, timeout, problem):
  with (
    _start(program) as worker,
    pytest.raises(workers.WorkerError, match=problem),
  ):
    worker.ask('lenet 1 2', timeout)


@pytest.mark.parametrize('error', [KeyboardInterrupt, workers.WorkerError])
def test_workers_end_on_errors(error):
  # One that would neither listen nor go.
  deaf = 'import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n'

  def fail():
    with _start(f'{deaf}{ECHO}\nsignal.pause()') as worker:
      held.append(worker)
      assert worker.ask('', timeout=60) == 1
      raise error

  held = []
  with pytest.raises(error):
    fail()
  assert held[0]._process.returncode == -signal.SIGKILL


class _FakeWorker:
  def __init__(self, side, log, **answer):
    self._side, self._log, self._answer = side, log, {**ANSWER, **answer}

  def ask(self, line, timeout):
    assert timeout > 0
    self._log.append((self._side, line))
    # Faster each time; the first time does not count.
    speed = 1e6 if len(self._log) <= 3 else len(self._log)
    return {**self._answer, 'images_per_second': speed}


def test_sides_take_turns():
  log = []
  staff = {side: _FakeWorker(side, log) for side in SIDES}
  group = training.Group('lenet', 4, (0,), (cases.SCAN,))
  results = training.measure_group(group, staff, num_rounds=2)
  one_round = [
    (goals.TORCH, 'lenet 4 0'),
    (goals.OURS, 'lenet 4 0'),
    (goals.OURS, 'lenet 4 scan'),
  ]
  assert log == 3 * one_round
  assert [result.images_per_second for result in results.values()] == [7, 8, 9]


def test_sides_must_train_the_same_network():
  log = []
  staff = {
    side: _FakeWorker(side, log, num_params=number)
    for number, side in enumerate(SIDES)
  }
  with pytest.raises(ValueError, match=r'same lenet, .* \[0, 1\]'):
    training.measure_group(training.Group('lenet', 4, (0,)), staff, 1)


def _make_results(goal, factor):
  """Results that are `factor` times the goal's limit, in every case."""
  # What the goal is about is known by who has to be slower for it to change.
  speeds = dict.fromkeys(TURNS, 100.0)
  slow = {
    'speed': lambda side, case: side == goals.TORCH,
    'delay': lambda side, case: side == goals.OURS and case.way == '256',
    '128 a': lambda side, case: case.way == cases.ASYNC,
    'a loo': lambda side, case: case.way == cases.SCAN,
  }[goal.text.removeprefix('cost of ')[:5]]
  for turn in TURNS:
    if slow(*turn):
      speeds[turn] /= goal.limit * factor
  return {
    turn: goals.Result(speed, 1e6 / speed, 0.0, 0.0, 1)
    for turn, speed in speeds.items()
  }


@pytest.mark.parametrize('clock', goals.Ratio._fields)
@pytest.mark.parametrize('goal', goals.GOALS, ids=lambda goal: goal.text)
def test_goals(goal, clock):
  better, worse = (1.02, 0.98) if goal.is_minimum else (0.98, 1.02)
  judge = lambda factor: goals.judge(goal, _make_results(goal, factor), clock)
  assert judge(better).startswith('met')
  assert judge(1.0).startswith('met')
  number = f'{goal.limit * worse:.2f}'
  assert judge(worse).startswith(f'missed wall  {number} CPU  {number} ')
  assert goals.judge(goal, {}, clock).startswith('not measured')


@pytest.mark.parametrize(
  ('clock', 'change'),
  [('wall', {'images_per_second': 1.0}), ('cpu', {'cpu_us_per_image': 1e6})],
)
@pytest.mark.parametrize('goal', goals.GOALS, ids=lambda goal: goal.text)
def test_one_bad_case_by_the_clock_misses_a_goal(goal, clock, change):
  results = _make_results(goal, 1.0)
  bad = [*goal.list_ratios(results)][-1]
  for side, case in results:
    if case.line == bad and side == goals.OURS:
      results[side, case] = results[side, case]._replace(**change)
  line = goals.judge(goal, results, clock)
  assert line.startswith('missed')
  assert line.endswith(f'({bad})')
  (other,) = {*goals.Ratio._fields} - {clock}
  assert goals.judge(goal, results, other).startswith('met')


def test_share_of_a_core():
  results = _make_results(goals.GOALS[0], 1.0)
  assert goals.get_share(results) == pytest.approx(1.0)
  halved = {
    turn: result._replace(images_per_second=result.images_per_second / 2)
    for turn, result in results.items()
  }
  assert goals.get_share(halved) == pytest.approx(0.5)


def test_big_batches_of_lenet_have_no_goal():
  ratios = goals.GOALS[0].list_ratios(_make_results(goals.GOALS[0], 1.0))
  assert 'lenet 256 32' in ratios
  assert 'lenet 1024 32' not in ratios


@pytest.mark.parametrize('num_threads', [1, 4])
def test_threads_are_set_before_a_worker_starts(num_threads):
  environment = training.make_environment(num_threads)
  assert environment['NPROC'] == environment['OMP_NUM_THREADS']
  assert environment['NPROC'] == str(num_threads)
  assert environment['XLA_FLAGS'].endswith(
    '=false' if num_threads == 1 else '=true'
  )


def test_no_torch_is_said_in_a_line(tmp_path, capsys):
  (tmp_path / 'file').write_text('Not a folder.')
  assert environments.find_python(environments.TORCH, tmp_path / 'file') is None
  said = capsys.readouterr().out
  assert 'Installing torch==' in said
  assert 'There is no torch to compare with: ' in said


def test_torch_and_jax_stay_out_of_each_others_process():
  program = (
    'import sys\n'
    'from launch.benchmarks import training_torch\n'
    'print({"jax", "jasgd", "torch", "absl"} & {*sys.modules})'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=workers.ROOT,
    env=os.environ,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert done.stdout.strip() == 'set()'


@pytest.mark.slow
def test_quick_suite():
  done = subprocess.run(
    [sys.executable, '-m', 'launch.benchmark', '--suite=training', '--quick'],
    cwd=workers.ROOT,
    capture_output=True,
    text=True,
    timeout=300,
    check=True,
  )
  table = done.stdout.splitlines()
  rows = [line.split() for line in table if line.startswith('1   lenet')]
  assert [row[3] for row in rows] == ['0', '32', cases.SCAN]
  assert all(float(row[5]) > 0 for row in rows)
  verdicts = table[-len(goals.GOALS) :]
  for goal, line in zip(goals.GOALS, verdicts, strict=True):
    assert goal.text in line
