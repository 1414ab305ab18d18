"""Replay against itself, against plain optax, and against large batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd.protocols import Fate
from tests import marks
from tests.engine import cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

# The same objects in all tests, so that nothing is compiled twice.
OPTIMIZERS = {'momentum': optax.sgd(0.02, 0.5), 'adam': optax.adam(0.01)}
ADAM = OPTIMIZERS['adam']


@functools.cache
def _make_task(name):
  if name == 'digits':
    return tasks.make_task('digits', model='mlp', batch=16)
  return tasks.make_task(name, batch={'quadratic': 1, 'logistic': 8}[name])


def _distance(first, second):
  """The largest difference of two trees, relative to the largest weight."""
  pairs = list(
    zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
  )
  difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs)
  return difference / max(float(jnp.max(jnp.abs(b))) for _, b in pairs)


def _is_same(first, second):
  """Whether two trees have the same bits."""
  return all(
    np.asarray(a).tobytes() == np.asarray(b).tobytes()
    for a, b in zip(
      jax.tree.leaves(first), jax.tree.leaves(second), strict=True
    )
  )


@pytest.mark.parametrize(
  ('name', 'task_name'),
  [
    *((name, 'logistic') for name in cases.PROTOCOLS),
    *(
      pytest.param(name, 'quadratic', marks=pytest.mark.slow)
      for name in ('asynchronous', 'downpour, rarely', 'hardsync')
    ),
  ],
)
def test_exact_and_fast_agree(name, task_name):
  task = _make_task(task_name)
  is_refused = name in ('backup', 'hardsync', 'rennala')
  trace = cases.simulate(
    name, 200, overlap=task_name == 'logistic' and not is_refused
  )
  optimizer = OPTIMIZERS['momentum' if task_name == 'quadratic' else 'adam']
  first, second = (
    jasgd.replay(
      task,
      optimizer,
      trace,
      policy='inverse',
      local_rate=0.01,
      get_rate=lambda epoch: 1 / (1 + epoch),
      mode=mode,
    )
    for mode in ('fast', 'exact')
  )
  start, _ = task.init(jax.random.key(0))
  assert _distance(start, first.params) > 1e-3  # Something happened.
  assert _distance(first.params, second.params) < 1e-5
  assert first.clock == second.clock == 200
  for column in first.history:
    np.testing.assert_allclose(
      first.history[column], second.history[column], rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize(
  'name',
  marks.slow_but(
    ('backup', 'downpour, rarely', 'hardsync', 'softsync', 'ssp'),
    *('downpour, rarely', 'hardsync', 'softsync'),
  ),
)
def test_failures_and_networks_are_replayed_too(name):
  trace = cases.simulate(
    name,
    100,
    failures=simulation.draw_failures(3, 200.0, 8.0, 3.0, seed=1),
    network=simulation.Network(latency=0.2, server_time=0.01),
  )
  assert np.any(trace.events['kind'] == traces.Kind.LEAVE)
  first, second = (
    jasgd.replay(
      _make_task('quadratic'),
      OPTIMIZERS['momentum'],
      trace,
      local_rate=0.01,
      mode=mode,
    )
    for mode in ('fast', 'exact')
  )
  assert _distance(first.params, second.params) < 1e-5


@pytest.mark.parametrize(
  ('name', 'num_parallel'),
  marks.slow_but(
    [
      *(('asynchronous', 7), ('softsync', 7), ('constant_delay', 7)),
      *(('asynchronous', 64), ('softsync', 2)),
    ],
    *(('asynchronous', 7), ('softsync', 7)),
  ),
)
@pytest.mark.parametrize('use_vmap', [False, True])
def test_gradients_at_once_are_the_same(
  name, num_parallel, use_vmap, monkeypatch
):
  if use_vmap:
    monkeypatch.setattr(
      engine._loop, '_map', lambda function, rows: jax.vmap(function)(rows)
    )
  task, trace = _make_task('logistic'), cases.simulate(name, 60)
  plain, parallel = (
    jasgd.replay(task, ADAM, trace, num_parallel=number)
    for number in (1, num_parallel)
  )
  assert _distance(parallel.params, plain.params) < 1e-5
  np.testing.assert_allclose(
    parallel.history['loss'], plain.history['loss'], rtol=1e-4
  )


def test_windows_are_as_long_as_they_can_be():
  """At a constant delay d, d + 1 gradients in a row are independent."""
  trace = simulation.simulate(protocols.constant_delay(3), num_gradients=40)
  task = _make_task('quadratic')
  run = engine.Replay(
    task,
    engine.make_update(optax.sgd(0.1)),
    engine.make_plan(trace, num_samples=task.num_samples, batch=task.batch),
    seed=0,
    mode='fast',
    local_rate=None,
    chunk=40,
    num_parallel=16,
  )
  windows, count = run._engine._list_windows(0, 40)
  assert windows.size[:count].tolist() == [4] * 10


@pytest.mark.parametrize(
  ('optimizer', 'mode'),
  marks.slow_but(
    [('momentum', 'fast'), ('momentum', 'exact'), ('adam', 'exact')],
    ('momentum', 'fast'),
  ),
)
def test_one_learner_is_a_plain_optax_loop(optimizer, mode):
  """Bit for bit in exact mode; fast fuses differently, and rounds so."""
  task = _make_task('digits')
  trace = simulation.simulate(
    protocols.asynchronous(), num_learners=1, num_gradients=50
  )
  result = jasgd.replay(task, OPTIMIZERS[optimizer], trace, mode=mode, seed=3)
  optimizer = OPTIMIZERS[optimizer]
  params, stats = task.init(jax.random.key(3))
  opt_state = optimizer.init(params)

  @jax.jit
  def get_gradient(params, step, data):
    batch = task.batches(data, 3, 0, step)
    key = tasks.fold_key(3, 0, step)
    differentiate = jax.value_and_grad(task.loss, has_aux=True)
    # With the loss: what else a program computes may change its rounding.
    (loss, _), grads = differentiate(params, stats, batch, key)
    return grads, loss

  @jax.jit
  def update(params, opt_state, grads):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  for step in range(50):
    grads, _ = get_gradient(params, step, task.data)
    params, opt_state = update(params, opt_state, grads)
  # Adam divides, and a program that reads its gradient from a flat buffer is
  # another one to the compiler, which may round a division in another way.
  if mode == 'exact' and optimizer is not OPTIMIZERS['adam']:
    assert _is_same(result.params, params)
  assert _distance(result.params, params) < 1e-5


def test_hardsync_is_sgd_with_a_large_batch():
  num_learners = 4
  task = _make_task('digits')
  trace = cases.simulate('hardsync', 20)
  result = jasgd.replay(task, optax.sgd(0.1, 0.9), trace, mode='exact')
  optimizer = optax.sgd(0.1, 0.9)
  params, stats = task.init(jax.random.key(0))
  opt_state = optimizer.init(params)

  @jax.jit
  def step_once(params, opt_state, step):
    def measure(params):
      batches = [
        task.batches(task.data, 0, learner, step)
        for learner in range(num_learners)
      ]
      batch = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *batches)
      return task.loss(params, stats, batch, jax.random.key(0))[0]

    updates, opt_state = optimizer.update(
      jax.grad(measure)(params), opt_state, params
    )
    return optax.apply_updates(params, updates), opt_state

  for step in range(20):
    params, opt_state = step_once(params, opt_state, step)
  assert _distance(result.params, params) < 1e-6


@pytest.mark.parametrize(
  ('delay', 'optimizer'),
  marks.slow_but([(0, 'adam'), (1, 'adam'), (7, 'momentum')], (7, 'momentum')),
)
def test_a_constant_delay_is_the_delayed_optimizer(delay, optimizer):
  """Gradient k is of batch (learner k mod (d + 1), step k div (d + 1))."""
  task = _make_task('digits')
  num_updates = 40
  trace = simulation.simulate(
    protocols.constant_delay(delay), num_gradients=num_updates
  )
  result = jasgd.replay(task, OPTIMIZERS[optimizer], trace)
  optimizer = jasgd.delayed(OPTIMIZERS[optimizer], delay)
  gradient = engine.make_gradient(task)
  params, stats = task.init(jax.random.key(0))
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for k in range(num_updates + delay):
    grads = gradient(
      params, stats, task.data, 0, k % (delay + 1), k // (delay + 1)
    ).gradient
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  assert _distance(result.params, params) < 1e-4


@pytest.mark.parametrize('mode', ['exact', 'fast'])
def test_twice_is_the_same_bits(mode):
  task, trace = _make_task('logistic'), cases.simulate('softsync', 100)
  first, second = (
    jasgd.replay(task, ADAM, trace, mode=mode, seed=5) for _ in range(2)
  )
  assert _is_same(first.state, second.state)
  other = jasgd.replay(task, ADAM, trace, mode=mode, seed=6)
  assert not _is_same(first.params, other.params)


@pytest.mark.parametrize('mode', marks.slow_but(['exact', 'fast'], 'fast'))
@pytest.mark.parametrize(
  'name',
  marks.slow_but(
    ('downpour, rarely', 'hardsync', 'ringmaster', 'softsync'),
    *('downpour, rarely', 'hardsync', 'softsync'),
  ),
)
def test_a_resumed_run_has_the_same_bits(name, mode):
  task, trace = _make_task('logistic'), cases.simulate(name, 60)
  server = engine.make_update(ADAM, policy='inverse')
  plan = engine.make_plan(trace, num_samples=task.num_samples, batch=task.batch)

  def start():
    return engine.Replay(
      task, server, plan, seed=0, mode=mode, local_rate=0.01, chunk=20
    )

  whole = start()
  histories = []
  while not whole.is_done:
    histories.append(whole.advance())
    if whole.clock == 40:
      saved = jax.tree.map(np.array, whole.carry)
  resumed = start()
  resumed.restore(40, jax.tree.map(jnp.asarray, saved))
  history = resumed.advance()
  assert resumed.is_done
  assert _is_same(whole.state, resumed.state)
  np.testing.assert_array_equal(history['loss'], histories[-1]['loss'])


@pytest.mark.parametrize('column', ['learner', 'read_clock', 'order'])
def test_one_changed_record_gives_other_weights(column):
  task, trace = _make_task('logistic'), cases.simulate('asynchronous', 60)
  records = np.array(trace.records)
  if column == 'order':
    moved = ['learner', 'step', 'read_clock']
    for name in moved:
      records[name][[30, 31]] = records[name][[31, 30]]
    records['read_clock'][30] = min(records['read_clock'][30], 30)
  elif column == 'read_clock':
    index = 30 + np.argmax(trace.staleness[30:] > 0)
    records['read_clock'][index] += 1
  else:
    records['learner'][30] = (records['learner'][30] + 1) % 8
  changed = traces.Trace(records, trace.header)
  where = np.flatnonzero(records != trace.records)[0] + 1
  found = engine.find_difference(task, optax.sgd(0.1), trace, changed)
  assert found == where
  assert engine.find_difference(task, optax.sgd(0.1), trace, trace) is None


def test_an_epoch_is_counted_in_the_tasks_samples():
  """Whatever batch a trace was simulated with."""
  task = _make_task('logistic')
  for batch in (1, 8, 100):
    trace = cases.simulate('downpour, rarely', 25, batch=batch)
    result = jasgd.replay(task, OPTIMIZERS['momentum'], trace, local_rate=0.01)
    # 25 pushes of 2 minibatches of 8 samples each.
    assert result.history['epoch'][-1] == 25 * 2 * 8 / task.num_samples


def test_weights_that_are_not_finite_are_marked():
  """Also if no loss was computed on them any more."""
  trace = simulation.simulate(
    protocols.asynchronous(), num_learners=1, num_gradients=1
  )
  result = jasgd.replay(_make_task('logistic'), optax.sgd(1e39), trace)
  assert np.all(np.isfinite(result.history['loss']))
  assert result.is_diverged


def test_traces_of_nodes_have_no_clock_to_differ_at():
  nodes = simulation.simulate_nodes(
    gossip.AllReduce(), num_nodes=2, num_steps=2
  )
  with pytest.raises(ValueError, match='Traces of nodes have no clock'):
    engine.find_difference(_make_task('logistic'), ADAM, nodes, nodes)


def test_dropped_gradients_do_nothing():
  trace = cases.simulate('ringmaster', 40)
  records = np.array(trace.records)
  is_dropped = records['fate'] == Fate.DROPPED_STALE
  assert np.any(is_dropped)
  task = _make_task('quadratic')
  kept = traces.Trace(records[~is_dropped], trace.header)
  assert engine.find_difference(task, optax.sgd(0.1), trace, kept) is None


@pytest.mark.parametrize('mode', ['exact', 'fast'])
def test_a_run_that_diverges_ends_early(mode):
  """A quadratic of curvature up to L is unstable at rates above 2 / L."""
  task, trace = _make_task('quadratic'), cases.simulate('asynchronous', 2000)
  result = jasgd.replay(task, optax.sgd(1e4), trace, mode=mode, eval_every=100)
  assert result.is_diverged
  assert result.clock == 100
  assert not np.isfinite(result.history['loss'][-1])
  assert np.all(np.isfinite(result.history['loss'][:-1]))


@pytest.mark.parametrize('mode', ['exact', 'fast'])
def test_history_says_what_the_trace_says(mode):
  task, trace = _make_task('logistic'), cases.simulate('softsync', 30)
  result = jasgd.replay(
    task, optax.sgd(0.1), trace, policy='inverse', eval_every=10, mode=mode
  )
  applied = trace.fate == Fate.APPLIED
  clock = trace.apply_clock[applied]
  sizes = np.bincount(clock)
  mean = np.bincount(clock, trace.staleness[applied]) / sizes
  np.testing.assert_allclose(result.history['staleness'], mean)
  factors = 1 / np.maximum(trace.staleness[applied], 1)
  np.testing.assert_allclose(
    result.history['factor'], np.bincount(clock, factors) / sizes, rtol=1e-6
  )
  ends = np.cumsum(sizes) - 1
  np.testing.assert_array_equal(
    result.history['time'], trace.arrive_time[applied][ends]
  )
  np.testing.assert_allclose(
    result.history['epoch'], np.cumsum(sizes) * 8 / task.num_samples
  )
  assert result.evaluations['clock'].tolist() == [10, 20, 30]
  final = tasks.evaluate(task, result.params, result.stats)
  np.testing.assert_allclose(result.evaluations['loss'][-1], final['loss'])
  # Fresh gradients have no gap, and stale ones mostly do.
  is_fresh = mean == 0
  assert np.all(result.history['gap'][is_fresh] == 0)
  assert np.all(result.history['gap'][~is_fresh] > 0)


@pytest.mark.parametrize('mode', ['exact', 'fast'])
def test_the_rate_follows_epochs(mode):
  """With rate 0 from epoch 1 on, weights stay where they are."""
  task, trace = _make_task('logistic'), cases.simulate('asynchronous', 60)
  plan = engine.make_plan(
    trace,
    num_samples=160,  # That is 20 gradients.
    batch=task.batch,
    get_rate=lambda epoch: float(epoch < 1),
  )
  np.testing.assert_array_equal(plan.rate, [1.0] * 20 + [0.0] * 40)
  run = engine.Replay(
    task,
    engine.make_update(optax.sgd(0.1)),
    plan,
    seed=0,
    mode=mode,
    local_rate=None,
    chunk=20,
  )
  run.advance()
  params = jax.tree.map(np.array, run.state.params)
  run.advance()
  assert _is_same(run.state.params, params)
