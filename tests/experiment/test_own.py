"""`jasgd.train`: a user's own model, in threads and in processes."""

import io
import re
import signal

import numpy as np
import optax
import pytest

import jasgd
from jasgd import protocols
from jasgd import traces
from tests import live
from tests import trees
from tests.experiment import own_model

OPTIONS = {**own_model.OPTIONS, 'num_updates': 150}


def _train(make_task=own_model.make_task, **options):
  return jasgd.train(
    make_task,
    own_model.OPTIMIZER,
    **{**OPTIONS, 'stream': io.StringIO(), **options},
  )


@pytest.mark.slow  # The README's own model is one, too.
def test_own_model_is_trained_and_replayed(processes, tmp_path):
  stream = io.StringIO()
  result = _train(
    workdir=tmp_path,
    processes=True,
    arguments={'num_samples': 400},
    stream=stream,
  )
  assert result.clock == result.trace.num_updates == 150
  assert result.end_reason == 'All 150 updates were made.'
  assert result.metrics['test/accuracy'] > 0.6  # By chance, a third.
  assert not result.is_diverged
  assert own_model.is_replayed(result)
  assert re.search(
    r'clock 150/150 100%.* acc 0\.\d+  learners 2$', stream.getvalue()
  )
  assert not processes.find()
  trees.assert_same_bits(
    jasgd.load_params(tmp_path), jasgd.load_params(tmp_path, 150)
  )
  # What is over is only read again.
  again = _train(
    workdir=tmp_path,
    processes=True,
    arguments={'num_samples': 400},
  )
  trees.assert_same_bits(again.params, result.params)
  assert again.metrics == result.metrics
  assert again.trace == result.trace
  assert again.end_reason == result.end_reason
  assert own_model.is_replayed(again)
  with pytest.raises(ValueError, match='num_updates is 150 there and 151 here'):
    _train(
      workdir=tmp_path,
      processes=True,
      arguments={'num_samples': 400},
      num_updates=151,
    )


def test_threads_need_neither_names_nor_folders():
  result = _train(lambda: own_model.make_task(), processes=False)
  assert result.clock == 150
  assert own_model.is_replayed(result)


def test_processes_need_names():
  def make_task():
    return own_model.make_task()

  for function in (make_task, lambda: own_model.make_task()):
    with pytest.raises(
      ValueError, match=r'must be one of a module, got .*: processes=False'
    ):
      _train(function)


def _read(output):
  """What the script printed, by name."""
  return dict(re.findall(r'^(clock|end|same) (.*)$', output, re.MULTILINE))


@pytest.mark.slow
def test_a_script_that_was_stopped_goes_on(processes, tmp_path):
  workdir = tmp_path / 'work'

  def start():
    return processes.start_python(
      own_model.__file__, workdir, '400', PYTHONPATH=str(live.ROOT)
    )

  program = start()
  path = workdir / 'trace'
  live.wait_until(
    lambda: (
      path.exists()
      and traces.Trace.load(path, allow_truncated=True).num_updates >= 20
    ),
    program,
  )
  program.kill(signal.SIGINT)
  said = _read(program.wait())
  assert said['end'] == 'It was interrupted.'
  assert said['same'] == 'True'
  assert 20 <= int(said['clock']) < 400
  assert not processes.find()
  said = _read(start().wait())
  assert said == {
    'clock': '400',
    'end': 'All 400 updates were made.',
    'same': 'True',
  }
  assert not processes.find()
  kinds = traces.Trace.load(path).records['kind']
  assert np.count_nonzero(kinds == traces.Kind.RESTART) == 1
  refused = processes.start('launch.replay', f'--workdir={workdir}').wait(1)
  assert 'was made by jasgd.train' in refused
  assert 'jasgd.replay(' in refused
  assert 'Traceback' not in refused


def test_another_optimizer_does_not_go_on(tmp_path):
  _train(workdir=tmp_path, processes=False, num_updates=10)
  for change in (
    {'policy': 'constant'},
    {'get_rate': lambda epoch: 0.5},
    {'per_gradient': optax.clip(1.0)},
  ):
    with pytest.raises(ValueError, match='another config: update is'):
      _train(workdir=tmp_path, processes=False, num_updates=10, **change)
  with pytest.raises(ValueError, match='another config: update is'):
    jasgd.train(
      own_model.make_task,
      optax.sgd(0.06, momentum=0.9),
      workdir=tmp_path,
      processes=False,
      **{**OPTIONS, 'num_updates': 10},
    )


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_updates': 0}, 'num_updates must be .* at least 1, got 0'),
    ({'protocol': protocols.downpour(2, 3)}, 'say at which local_rate'),
    ({'make_task': lambda: 3}, 'make_task must give a Task, got 3'),
  ],
)
def test_nonsense_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    _train(processes=False, **options)
