"""Replay: exact against fast, resumed, its history, and damaged traces."""

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
from tests import trees
from tests.engine import cases
from tests.engine import node_cases
from tests.engine import twins

pytestmark = pytest.mark.usefixtures('quick_compiler')

# The same objects in all tests, so that nothing is compiled twice.
SGD, MOMENTUM, ADAM = optax.sgd(0.1), optax.sgd(0.02, 0.5), optax.adam(0.01)
every_mode = pytest.mark.parametrize('mode', engine.MODES)
NUM_UPDATES = 60

# Every protocol and strategy.
RUNS = [*cases.PROTOCOLS, *node_cases.STRATEGIES]
# Every kind of operation is in one that is fast: dropped gradients, groups,
# local steps, mixes of one's own and of a peer's replica, means, a centre.
FAST_RUNS = (
  *('asynchronous', 'backup', 'downpour, rarely', 'downpour, unevenly'),
  *('ringmaster', 'softsync', 'allreduce', 'local sgd', 'elastic'),
  *('elastic, easgd', 'pairs', 'pull', 'push-sum'),
)
SOME_RUNS = marks.slow_but(
  RUNS, 'downpour, rarely', 'softsync', 'allreduce', 'elastic, easgd', 'pairs'
)


@functools.cache
def _make_task(name='logistic'):
  return tasks.make_task(name, batch={'quadratic': 1, 'logistic': 8}[name])


def _simulate(name, num_updates=NUM_UPDATES, **arguments):
  """A trace of a protocol or a strategy, and options of its replay."""
  if name in cases.PROTOCOLS:
    trace = cases.simulate(name, num_updates, **arguments)
    return trace, {'policy': 'inverse', 'local_rate': 0.01}
  trace = node_cases.simulate(
    node_cases.STRATEGIES[name],
    num_steps=num_updates // node_cases.NUM_NODES,
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=0.3),
    **arguments,
  )
  return trace, {}


def _check_close(first, second):
  """Checks that two results agree up to rounding."""
  for name in ('replicas', 'params', 'stats'):
    one, other = getattr(first, name), getattr(second, name)
    trees.assert_close(one, other, rtol=1e-4, atol=2e-5)
  assert first.versions == second.versions
  assert first.num_updates == second.num_updates
  for one, other in (
    (first.history, second.history),
    (first.evaluations, second.evaluations),
  ):
    for name in one:
      np.testing.assert_allclose(
        one[name], other[name], rtol=1e-3, atol=1e-4, err_msg=name
      )


@pytest.mark.parametrize('name', marks.slow_but(RUNS, *FAST_RUNS))
def test_exact_and_fast_agree(name):
  """With a schedule; and with overlap, where the protocol allows it."""
  is_server = name in cases.PROTOCOLS
  can_overlap = is_server and name not in ('backup', 'hardsync', 'rennala')
  overlap = {'overlap': True} if can_overlap else {}
  trace, options = _simulate(name, **overlap)
  options['get_rate'] = lambda epoch: 1 / (1 + epoch)
  task = _make_task()
  fast, exact = (
    jasgd.replay(task, ADAM, trace, mode=mode, eval_every=25, **options)
    for mode in ('fast', 'exact')
  )
  _check_close(fast, exact)
  assert fast.num_updates == NUM_UPDATES
  assert float(jnp.abs(fast.params).max()) > 1e-3  # They began at 0.
  has_locals = np.any(trace.records['kind'] == traces.Kind.FETCH)
  workers = (
    list(range(trace.num_workers)) if has_locals or not is_server else []
  )
  owner = [engine.SERVER] if is_server or 'elastic' in name else []
  assert sorted(fast.replicas) == sorted(fast.versions) == owner + workers
  assert list(fast.opt_states) == (owner if is_server else workers)
  columns = {'clock', 'epoch', 'time', 'loss'}
  columns |= {'staleness', 'factor', 'gap'} if is_server else {'worker'}
  assert set(fast.history) == columns


@every_mode
def test_a_downpour_learner_has_a_replica(mode):
  """Two steps, a push, a fetch, one more step, and a push."""
  push, fetch, join = traces.Kind.PUSH, traces.Kind.FETCH, traces.Kind.JOIN
  trace = traces.Trace(
    traces.make_records(
      kind=[join, fetch, push, fetch, push],
      worker=0,
      step=[0, 0, 2, 2, 3],
      read_version=[0, 0, 0, 1, 1],
      clock=[0, 0, 0, 1, 1],
    ),
    {'num_workers': 1},
  )
  task = _make_task('quadratic')
  result = jasgd.replay(task, SGD, trace, local_rate=0.3, seed=3, mode=mode)
  gradient = engine.make_gradient(task)
  params, stats = task.init(jax.random.key(3, impl='threefry2x32'))
  own, gathered = params, 0
  for step in (0, 1):
    found = gradient(own, stats, task.data, 3, 0, step).gradient
    own, gathered = own - 0.3 * found, gathered + found
  params = params - 0.1 * gathered
  own = params - 0.3 * gradient(params, stats, task.data, 3, 0, 2).gradient
  trees.assert_close(result.replicas[0][0], own, rtol=1e-5, atol=1e-6)
  assert not np.allclose(result.params, own, atol=1e-3)
  assert result.versions == {engine.SERVER: 2, 0: 5}  # 3 steps, 2 fetches.


@pytest.mark.parametrize('name', SOME_RUNS)
def test_failures_are_replayed_too(name):
  if name == 'constant_delay':
    pytest.skip('Learners of a constant delay do not fail.')
  trace, options = _simulate(
    name, failures=simulation.draw_failures(3, 60.0, 6.0, 3.0, seed=2)
  )
  assert np.any(trace.records['kind'] == traces.Kind.LEAVE)
  options.pop('policy', None)
  fast, exact = (
    jasgd.replay(_make_task(), MOMENTUM, trace, mode=mode, **options)
    for mode in ('fast', 'exact')
  )
  _check_close(fast, exact)
  trees.assert_close(fast.opt_states, exact.opt_states, rtol=1e-3, atol=1e-4)


@every_mode
@pytest.mark.parametrize('name', SOME_RUNS)
def test_a_resumed_replay_has_the_same_bits(name, mode):
  trace, options = _simulate(name)
  plan = node_cases.make_plan(trace, _make_task())

  def make():
    return engine.Replay(
      _make_task(), MOMENTUM, plan, mode=mode, chunk=25, seed=1, **options
    )

  whole, rest = make(), make()
  histories = []
  while not whole.is_done:
    histories.append(whole.advance())
    if whole.clock == 25:  # As if saved on a disk, and loaded.
      saved = jax.tree.map(np.array, whole.carry)
      row = whole.evaluate()
  like = jax.eval_shape(lambda: rest.carry)
  assert jax.tree.structure(like) == jax.tree.structure(saved)
  rest.restore(25, jax.tree.map(jnp.asarray, saved))
  assert rest.evaluate() == row
  resumed = []
  while not rest.is_done:
    resumed.append(rest.advance())
  assert [len(each['loss']) for each in histories] == [25, 25, 10]
  for one, other in zip(resumed, histories[1:], strict=True):
    for column in one:
      np.testing.assert_array_equal(one[column], other[column])
  trees.assert_same_bits(rest.replicas, whole.replicas)
  trees.assert_same_bits(rest.opt_states, whole.opt_states)
  assert rest.versions == whole.versions


@every_mode
def test_a_second_replay_has_the_same_bits(mode):
  trace, _ = _simulate('softsync')
  first, second, other = (
    jasgd.replay(_make_task(), ADAM, trace, mode=mode, seed=seed)
    for seed in (5, 5, 6)
  )
  trees.assert_same_bits(first.opt_states, second.opt_states)
  assert not np.array_equal(first.params, other.params)


@pytest.mark.parametrize('column', ['worker', 'read_version', 'order'])
def test_one_changed_record_gives_other_weights(column):
  """And those before it are the same, bit for bit."""
  trace, _ = _simulate('asynchronous')
  records = np.array(trace.records)
  if column == 'order':
    for name in ('worker', 'step', 'read_version'):
      records[name][[30, 31]] = records[name][[31, 30]]
    records['read_version'][30] = min(records['read_version'][30], 30)
  elif column == 'read_version':
    records[column][30 + np.argmax(trace.staleness[30:] > 0)] += 1
  else:
    records[column][30] = (records[column][30] + 1) % 8
  first = int(np.flatnonzero(records != trace.records)[0])
  task = _make_task()
  runs = [
    engine.Replay(
      task,
      SGD,
      node_cases.make_plan(traces.Trace(each, trace.header), task),
      mode='exact',
      chunk=1,
    )
    for each in (trace.records, records)
  ]
  for clock in range(1, first + 2):
    for run in runs:
      run.advance()
    one, other = (np.asarray(run.weights[0]) for run in runs)
    assert (one.tobytes() == other.tobytes()) == (clock <= first)


def test_dropped_gradients_do_nothing():
  trace, _ = _simulate('ringmaster')
  records = np.array(trace.records)
  is_dropped = records['fate'] == Fate.DROPPED_STALE
  assert np.any(is_dropped)
  first, second = (
    jasgd.replay(_make_task(), SGD, traces.Trace(each, trace.header))
    for each in (records, records[~is_dropped])
  )
  trees.assert_same_bits(first.opt_states, second.opt_states)


# --- Rates, epochs, history, divergence.


def test_an_epoch_is_counted_in_the_tasks_samples():
  """Independent of the batch that a trace was simulated with."""
  task = _make_task()
  for batch in (1, 100):
    trace, options = _simulate('downpour, rarely', 25, batch=batch)
    result = jasgd.replay(task, MOMENTUM, trace, **options)
    # 25 pushes of 2 minibatches of 8 samples each.
    assert result.history['epoch'][-1] == 25 * 2 * 8 / task.num_samples


@every_mode
def test_the_rate_of_a_server_follows_epochs(mode):
  """With rate 0 from epoch 1 on, weights stay where they are."""
  task = _make_task()
  trace, _ = _simulate('asynchronous')
  plan = engine.make_plan(
    trace,
    num_samples=160,  # That is 20 gradients.
    batch=task.batch,
    get_rate=lambda epoch: float(epoch < 1),
  )
  np.testing.assert_array_equal(plan.steps.rate, [1.0] * 20 + [0.0] * 40)
  run = engine.Replay(task, SGD, plan, mode=mode, chunk=20)
  run.advance()
  params = np.array(run.weights[0])
  run.advance()
  np.testing.assert_array_equal(run.weights[0], params)


@every_mode
def test_the_rate_of_a_node_follows_its_own_steps(mode):
  """A node assumes that all nodes have made as many steps."""
  task = node_cases.make_plain_task()
  speeds = simulation.with_speeds(simulation.constant(1.0), [1, 1, 3, 9])
  trace = node_cases.simulate(
    gossip.Pull(period=100), num_steps=5, compute=speeds
  )
  result = jasgd.replay(
    task,
    node_cases.SGD,
    trace,
    mode=mode,
    get_rate=lambda epoch: 1 / (1 + 50 * epoch),
  )
  params = jnp.zeros(20)
  for step in range(5):
    epoch = step * node_cases.NUM_NODES * task.batch / task.num_samples
    rate = 0.1 / (1 + 50 * epoch)
    params = params - rate * node_cases.get_gradient(params, 3, step)
  np.testing.assert_allclose(
    result.replicas[3][0], params, rtol=1e-5, atol=1e-7
  )


@every_mode
def test_history_says_what_the_trace_says(mode):
  task = _make_task()
  trace, _ = _simulate('softsync', 30)
  result = jasgd.replay(
    task, SGD, trace, policy='inverse', eval_every=10, mode=mode
  )
  applied = trace.fate == Fate.APPLIED
  clock = trace.clock[applied]
  sizes = np.bincount(clock)
  mean = np.bincount(clock, trace.staleness[applied]) / sizes
  np.testing.assert_allclose(result.history['staleness'], mean)
  factors = 1 / np.maximum(trace.staleness[applied], 1)
  np.testing.assert_allclose(
    result.history['factor'], np.bincount(clock, factors) / sizes, rtol=1e-6
  )
  ends = np.cumsum(sizes) - 1
  np.testing.assert_array_equal(
    result.history['time'], trace.end_time[applied][ends]
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


@every_mode
@pytest.mark.parametrize('name', ['asynchronous', 'pull'])
def test_a_run_that_diverges_ends_early(name, mode):
  """A quadratic of curvature up to L is unstable at rates above 2 / L."""
  trace, _ = _simulate(name, 400)
  result = jasgd.replay(
    _make_task('quadratic'), optax.sgd(1e6), trace, mode=mode, eval_every=100
  )
  assert result.is_diverged
  assert result.num_updates == 100
  assert not np.isfinite(result.history['loss'][-1])
  assert np.all(np.isfinite(result.history['loss'][:-1]))


def test_weights_that_are_not_finite_are_marked():
  """Also if no loss was computed on the last weights."""
  for trace in (
    simulation.simulate(
      protocols.asynchronous(), num_workers=1, num_gradients=1
    ),
    simulation.simulate(gossip.Pull(), num_workers=2, num_gradients=2),
  ):
    result = jasgd.replay(_make_task(), optax.sgd(1e39), trace)
    assert np.all(np.isfinite(result.history['loss']))
    assert result.is_diverged


# --- Versions, slots, statistics.


def test_versions_are_those_of_the_records():
  for strategy in node_cases.STRATEGIES.values():
    trace = node_cases.simulate(strategy, num_steps=6)
    plan = node_cases.make_plan(trace)
    versions = plan.locate(plan.num_updates).version
    for node in range(node_cases.NUM_NODES):
      assert versions[node] == trace.of_replica(node)['version'].max()


def test_slots_are_few():
  """One per replica, and a few for versions that are still to be read."""
  for name, most in (('pull', 1), ('allreduce', 1), ('push-sum', 8)):
    plan = node_cases.make_plan(
      node_cases.simulate(node_cases.STRATEGIES[name], num_steps=50)
    )
    assert plan.num_slots <= node_cases.NUM_NODES + most
    assert plan.num_states <= node_cases.NUM_NODES
  for name, most in (('asynchronous', 8 + 1), ('constant_delay', 5 + 1)):
    trace, _ = _simulate(name, 200)
    # Including the slot for versions that nothing reads.
    assert node_cases.make_plan(trace).num_slots <= most + 1


@every_mode
@pytest.mark.parametrize(
  'name',
  marks.slow_but(node_cases.STRATEGIES, 'elastic, easgd', 'pull'),
)
def test_statistics_are_mixed_like_weights(mode, name):
  """Such as those of batch normalisation; integers are not mixed."""
  trace = node_cases.simulate(node_cases.STRATEGIES[name], num_steps=6)
  result = jasgd.replay(twins.make_task(), twins.OPTIMIZER, trace, mode=mode)
  for params, stats in (
    *result.replicas.values(),
    (result.params, result.stats),
  ):
    twins.check(params, stats)


@every_mode
def test_the_server_keeps_a_moving_mean_of_statistics(mode):
  """s <- (1 - c / lambda) s + (c / lambda) mean, whatever policy or rate."""
  task = node_cases.make_task()
  trace = simulation.simulate(
    protocols.softsync(2), num_workers=4, num_gradients=2
  )
  result = jasgd.replay(
    task, optax.sgd(0.0), trace, policy=('fixed_fraction', 7), mode=mode
  )
  params, stats = task.init(jax.random.key(0))
  gradient = engine.make_gradient(task)
  pushed = [
    gradient(params, stats, task.data, 0, learner, 0).stats['mean']
    for learner in range(2)
  ]
  expected = 0.5 * stats['mean'] + 0.5 * (pushed[0] + pushed[1]) / 2
  trees.assert_close(result.stats['mean'], expected)
  assert np.abs(result.stats['mean'] - stats['mean']).max() > 1e-2


def test_streamed_batches_are_replayed():
  """A batch that is not in memory is read when its gradient is computed."""
  task = _make_task()
  data = jax.tree.map(np.asarray, task.data['examples'])
  source = [
    {name: column[index] for name, column in data.items()}
    for index in range(100)
  ]
  streamed = tasks.stream(task, source, shards='shards', num_learners=8)
  trace, _ = _simulate('asynchronous', 30)
  fast = jasgd.replay(streamed, SGD, trace, eval_every=7)
  exact = jasgd.replay(streamed, SGD, trace, mode='exact')
  trees.assert_close(fast.params, exact.params)
  local = simulation.simulate(
    protocols.downpour(2, 2), num_workers=8, num_gradients=8
  )
  with pytest.raises(ValueError, match='is streamed, and learners step on'):
    jasgd.replay(streamed, SGD, local, local_rate=0.1)


def test_a_gradient_is_of_the_weights_that_were_read():
  """A node that is mixed while it computes uses its older weights."""
  trace, _ = _simulate('pairs')
  steps = trace.steps
  assert np.any(steps['read_version'] < steps['version'] - 1)
  records = np.array(trace.records)
  is_step = records['kind'] == traces.Kind.STEP
  records['read_version'][is_step] = records['version'][is_step] - 1
  first, second = (
    jasgd.replay(_make_task(), node_cases.SGD, traces.Trace(each, trace.header))
    for each in (trace.records, records)
  )
  assert not np.allclose(first.params, second.params, atol=1e-6)


# --- Errors.

# (trace, record, field, value, message)
DAMAGES = {
  'kind': ('asynchronous', 7, 'kind', 77, 'Record 7 has kind=77, which must'),
  'fate': ('asynchronous', 7, 'fate', 99, 'Record 7 has fate=99, which must'),
  'worker': ('asynchronous', 7, 'worker', -3, 'Record 7 has worker=-3'),
  'weights of the future': (
    *('asynchronous', 7, 'read_version', 9),
    'Record 7 was computed at clock 9 and applied at clock 7: those weights',
  ),
  'a version before the first': (
    *('softsync', 7, 'read_version', -1),
    'Record 7 was computed at clock -1',
  ),
  'a gap': (
    *('asynchronous', 7, 'version', 15),
    'in order and without gaps; record 7 is of the update at clock 14',
  ),
  'a fetch from the future': (
    *('downpour, rarely', 8, 'read_version', 9),
    'Record 8 read the weights of clock 9, which did not exist then',
  ),
  'kind of a node': ('pull', 3, 'kind', 99, 'Record 3 has kind=99, which must'),
  'node': (
    'pull',
    3,
    'replica',
    4,
    'Record 3 has replica=4, which must be from 0 to 3',
  ),
  'a negative step': (
    'pull',
    3,
    'step',
    -2,
    'Record 3 has step=-2, which must',
  ),
  'no step': ('pull', 0, 'step', 0, 'Record 0 has step=0, which must be at le'),
  'version of a peer': (
    *('pull', 5, 'source_version', 77),
    'Record 5 reads version 77 of node ., which does not exist then',
  ),
  'own version': (
    *('pairs', 0, 'read_version', 1),
    r'Record 0 reads version 1 of node \d, which does not exist then',
  ),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_record_is_named(damage):
  name, index, field, value, sentence = DAMAGES[damage]
  trace, _ = _simulate(name, 20)
  records = np.array(trace.records)
  records[field][index] = value
  with pytest.raises(traces.TraceError, match=sentence):
    jasgd.replay(_make_task(), SGD, type(trace)(records, trace.header))


@pytest.mark.parametrize('name', ['asynchronous', 'pull'])
def test_a_trace_without_updates_is_refused(name):
  trace, _ = _simulate(name, 20)
  empty = type(trace)(trace.records[:0], trace.header)
  with pytest.raises(traces.TraceError, match='A trace without any '):
    jasgd.replay(_make_task(), SGD, empty)


def test_arguments_that_make_no_sense_are_refused():
  nodes, _ = _simulate('pull', 20)
  server, _ = _simulate('downpour, rarely', 20)
  task = _make_task()
  for trace, options, sentence in (
    (nodes, {'policy': 'inverse'}, 'Nodes have no server, hence no policy'),
    (nodes, {'local_rate': 0.1}, 'Nodes have no server, hence no policy'),
    (nodes, {'mode': 'slow'}, "mode must be one of .*, got 'slow'"),
    (server, {}, 'pass local_rate, the rate of these steps'),
  ):
    with pytest.raises(ValueError, match=sentence):
      jasgd.replay(task, SGD, trace, **options)
  for trace, options in ((nodes, {'num_updates': 3}), (server, {'until': {}})):
    with pytest.raises(ValueError, match='num_updates is for traces with a'):
      node_cases.make_plan(trace, task, **options)
  with pytest.raises(ValueError, match="mode='exact' has a digest"):
    engine.Replay(task, SGD, node_cases.make_plan(nodes)).get_digest()


@pytest.mark.parametrize('mode', ['exact', 'fast'])
@pytest.mark.parametrize('strategy', [gossip.Pull(), gossip.Elastic()])
def test_a_joiner_counts_on_from_the_step_it_takes_over(strategy, mode):
  """Otherwise its schedule and Adam's bias correction would start again."""
  trace = simulation.simulate(
    strategy,
    num_workers=3,
    num_gradients=60,
    network=simulation.Network(latency=0.05),
    failures=[(5.2, 1, 9.7)],
  )
  (join,) = trace.of_kind(traces.Kind.JOIN)
  assert join['step'] > 0
  schedule = optax.cosine_decay_schedule(0.1, 20)
  result = jasgd.replay(
    tasks.make_task('quadratic', batch=1),
    optax.adam(schedule),
    trace,
    mode=mode,
  )
  for node in range(3):
    counts = optax.tree.get_all_with_path(result.opt_states[node], 'count')
    assert [int(count) for _, count in counts] == [20, 20]
