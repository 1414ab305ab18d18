"""`jasgd.train`: a user's own model, in threads and in processes."""

import functools
import io
import re
import signal
import threading

import jax
import numpy as np
import optax
import pytest

import jasgd
from jasgd import experiment
from jasgd import gossip
from jasgd import protocols
from jasgd import reports
from jasgd import runtime
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd.experiment.running import closures
from jasgd.gossip import topologies
from tests import live
from tests import marks
from tests import trees
from tests.experiment import own_model
from tests.experiment import own_strategies

pytestmark = pytest.mark.usefixtures('quick_compiler')

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
  _check_metrics(result)
  assert not result.is_diverged
  assert own_model.is_replayed(result)
  assert re.search(
    r'clock 150/150 100%.* acc 0\.\d+  learners 2$', stream.getvalue()
  )
  assert not processes.find()
  trees.assert_same_bits(
    jasgd.load_params(tmp_path), jasgd.load_params(tmp_path, 150)
  )
  # A run that is over is only read again.
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


def test_processes_need_names():
  def make_task():
    return own_model.make_task()

  for function in (make_task, lambda: own_model.make_task()):
    with pytest.raises(
      ValueError, match=r'the top level of a module, got .*: processes=False'
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


def test_a_run_with_another_topology_is_not_resumed(tmp_path):
  """The two topologies differ, but their `repr` and descriptions are equal."""
  strategies = [
    gossip.Pull(peers=topologies.random_regular(6, 3, seed=seed))
    for seed in (0, 1)
  ]
  assert repr(strategies[0]) == repr(strategies[1])
  assert strategies[0].describe() == strategies[1].describe()
  options = {
    'num_workers': 6,
    'processes': False,
    'workdir': tmp_path,
    'num_updates': 12,
    'stream': io.StringIO(),
  }
  train = functools.partial(jasgd.train, own_model.make_task, optax.sgd(0.1))
  result = train(strategies[0], **options)
  assert train(strategies[0], **options).trace == result.trace
  with pytest.raises(ValueError, match=r'seed is 0 there and 1 here\. Give'):
    train(strategies[1], **options)


# --- Peer strategies.


def _is_replayed(result, optimizer, **options):
  """Whether a replay has the same bits."""
  again = jasgd.replay(
    own_model.make_task(), optimizer, result.trace, mode='exact', **options
  )
  found, replayed = ((each.params, each.stats) for each in (result, again))
  return jax.tree.all(jax.tree.map(np.array_equal, found, replayed))


def _halve(epochs):
  return 0.5 ** int(epochs)


PEERS = {
  'push-sum by a ring': gossip.PushSum(peers=topologies.ring(2), period=2),
  'elastic': gossip.Elastic(rate=0.2, order='easgd'),
  'allreduce': gossip.AllReduce(),
  'own': own_strategies.Neighbour(),
}


def _check_metrics(result):
  """The last metrics are those of the weights.

  Their values depend on the order in which real workers have mixed.
  """
  measured = tasks.evaluate(own_model.make_task(), result.params, result.stats)
  for name, value in measured.items():
    assert result.metrics[f'test/{name}'] == pytest.approx(value, rel=1e-6)
  assert np.isfinite(result.metrics['train/loss'])


@pytest.mark.parametrize('name', marks.slow_but(PEERS, 'own'))
def test_own_model_is_trained_by_nodes_and_replayed(name, processes, tmp_path):
  """In processes, optimizer and schedule are sent as closures."""
  optimizer = optax.chain(optax.clip(1.0), optax.adam(0.01))
  stream = io.StringIO()
  options = {
    'num_workers': 2,
    'num_updates': 100,
    'workdir': tmp_path,
    'get_rate': lambda epochs: _halve(epochs) + 0.25,
    'arguments': {'num_samples': 400},
    'eval_every': 60,
    'stream': stream,
  }
  strategy = PEERS[name]
  result = jasgd.train(own_model.make_task, optimizer, strategy, **options)
  assert result.clock == 100
  assert result.end_reason == 'All 50 steps of each node were made.'
  assert not result.lost
  _check_metrics(result)
  assert _is_replayed(result, optimizer, get_rate=options['get_rate'])
  assert re.search(r'steps 100/100 100%.* nodes 2$', stream.getvalue())
  assert not processes.find()
  trees.assert_same_bits(jasgd.load_params(tmp_path), result.params)
  # A run that is over is only read again.
  again = jasgd.train(own_model.make_task, optimizer, strategy, **options)
  assert again == result
  trees.assert_same_bits(again.params, result.params)
  with pytest.raises(ValueError, match=r'was made by jasgd\.train'):
    experiment.verify(tmp_path)
  if name == 'own':
    _check_own_strategy(strategy, result)


def test_threads_need_neither_names_nor_folders():
  result = jasgd.train(
    lambda: own_model.make_task(),
    own_model.OPTIMIZER,
    gossip.Pull(),
    num_workers=2,
    num_updates=60,
    processes=False,
    stream=io.StringIO(),
  )
  assert result.clock == 60
  assert _is_replayed(result, own_model.OPTIMIZER)


def test_the_last_metrics_are_those_of_the_weights_not_of_messages():
  result = _train(processes=False, wire_dtype='bfloat16')
  _check_metrics(result)


def test_a_learner_that_fails_before_it_joins_is_named(monkeypatch):
  """A thread has no process id to report, so others would wait for it."""
  make = runtime.Learner

  def make_or_fail(*arguments, **options):
    if threading.current_thread().name.endswith('learner-1'):
      raise RuntimeError('This is a bug.')
    return make(*arguments, **options)

  monkeypatch.setattr(runtime, 'Learner', make_or_fail)
  deadlines = runtime.Deadlines(start=1e6)
  with pytest.raises(
    experiment.RunError, match=r'(?s)learner-1 failed before .*This is a bug\.'
  ):
    _train(processes=False, deadlines=deadlines)


@pytest.mark.parametrize('is_process', [False, True])
def test_own_protocol_is_replayed_predicted_and_reported(
  is_process, processes, tmp_path
):
  strategy = own_strategies.Every()
  result = jasgd.train(
    own_model.make_task if is_process else own_model.make_task(),
    own_model.OPTIMIZER,
    strategy,
    num_workers=2,
    num_updates=60,
    workdir=tmp_path,
    processes=is_process,
    stream=io.StringIO(),
  )
  assert not processes.find()
  assert _is_replayed(result, own_model.OPTIMIZER)
  _check_own_strategy(strategy, result)


def _check_own_strategy(strategy, result):
  """It can be simulated, predicted and reported.

  Only the trace names it, as 'module:name'.
  """
  module, _, name = result.trace.header['strategy']['name'].partition(':')
  assert (module, name) == (own_strategies.__name__, type(strategy).__name__)
  simulated = jasgd.simulate(strategy, num_workers=2, num_gradients=60)
  predicted = simulation.predict(result.trace)
  numbers = [
    simulation.measure_exchanges(trace)
    for trace in (result.trace, simulated, predicted)
  ]
  for each in numbers:
    if strategy.has_server:
      assert each['updates_per_gradient'] == pytest.approx(0.5, rel=0.1)
    else:  # A mix of each answer; messages may be mixed several at a time.
      assert 0.9 < each['mixes_per_step'] < 2.1
  page = reports.write_report(result.workdir).read_text()
  assert 'There is no prediction' not in page


def test_functions_travel():
  """Closures over closures, over themselves, and over arrays."""

  def outer(start):
    values = np.arange(start, start + 3)

    def count(n, *, factor=2):
      return 0 if n == 0 else factor * values[0] + count(n - 1, factor=factor)

    return {'count': count, 'sum': lambda: values.sum()}

  again = closures.load(closures.dump(outer(3)))
  assert again['count'](4) == 24
  assert again['sum']() == 12
  with pytest.raises(ValueError, match='cannot be sent to other processes'):
    closures.dump(threading.Lock())


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_updates': 0}, 'num_updates must be .* at least 1, got 0'),
    ({'strategy': protocols.downpour(2, 3)}, 'steps as local_rate'),
    ({'make_task': lambda: 3}, 'make_task must return a Task, got 3'),
    ({'make_task': 3}, 'must be a function that returns a Task, got 3'),
    ({'strategy': gossip.Pull}, 'must be a protocol, .* or a peer strategy'),
    (
      {'strategy': gossip.Pairs()},
      'Pairs run in the simulator and on devices only',
    ),
    ({'strategy': gossip.AllReduce()}, 'cannot be threads'),
    ({'strategy': gossip.Pull()}, 'policy is for protocols'),
    ({'num_workers': 0}, 'num_workers must be .* at least 1, got 0'),
  ],
)
def test_nonsense_is_refused(options, message):
  with pytest.raises(ValueError, match=message):
    _train(processes=False, **options)


def test_a_task_is_not_a_function():
  with pytest.raises(ValueError, match='a function that returns the task'):
    _train(own_model.make_task())
