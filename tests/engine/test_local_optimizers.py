"""AdamW in learners, Nesterov at the server, two fragments: by records alone.

No strategy writes such a trace yet. That the schema can hold one, and that
replay executes it, shows that the model of replicas and operations is general.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import engine
from jasgd import tasks
from jasgd import traces

PUSH, FETCH, JOIN = traces.Kind.PUSH, traces.Kind.FETCH, traces.Kind.JOIN
FRAGMENTS = [[0, 3], [1, 2]]  # Leaves of replicas -1 and -2.
HEADER = {'pushes': 'differences', 'fragments': FRAGMENTS, 'num_workers': 2}
INNER = optax.adamw(0.01, weight_decay=0.1)
OUTER = optax.sgd(0.7, 0.9, nesterov=True)

# (kind, replica, worker, step, version read). Each replica has its own clock.
EVENTS = [
  (JOIN, -1, 0, 0, 0),
  (FETCH, -1, 0, 0, 0),
  (FETCH, -2, 0, 0, 0),
  (JOIN, -1, 1, 0, 0),
  (FETCH, -1, 1, 0, 0),
  (FETCH, -2, 1, 0, 0),
  (PUSH, -1, 0, 3, 0),
  (FETCH, -1, 0, 3, 1),
  (PUSH, -1, 1, 2, 0),  # One update late.
  (FETCH, -1, 1, 2, 2),
  (PUSH, -2, 1, 4, 0),
  (PUSH, -2, 0, 5, 0),  # One update late.
  (FETCH, -2, 0, 5, 2),
  (PUSH, -1, 0, 7, 1),
  (JOIN, -1, 1, 4, 0),  # It restarts with a fresh AdamW.
  (FETCH, -1, 1, 4, 3),
  (FETCH, -2, 1, 4, 2),
  (PUSH, -2, 1, 6, 2),
  (PUSH, -1, 1, 6, 3),
]


@pytest.fixture(scope='module')
def task():
  return tasks.make_task('digits', model='mlp', batch=8)


def _make_trace(events=EVENTS, header=HEADER):
  version, rows = {-1: 0, -2: 0}, []
  for kind, replica, worker, step, read_version in events:
    version[replica] += kind == PUSH
    rows.append((kind, kind == PUSH, replica, worker, step, read_version))
    rows[-1] += (version[replica],)
  names = ('kind', 'updates', 'replica', 'worker', 'step', 'read_version')
  columns = zip(*rows, strict=True)
  records = traces.make_records(
    **dict(zip((*names, 'version'), map(list, columns), strict=True)),
    samples=8,
  )
  return traces.Trace(records, header)


def _reference(task, first, events, policy):
  """The same by loops over leaves, without operations, plans and buffers."""
  gradient = engine.make_gradient(task)
  treedef = jax.tree.structure(first)
  start = jax.tree.leaves(first)
  servers, learners = {}, {}
  for replica, leaves in zip((-1, -2), FRAGMENTS, strict=True):
    params = {n: start[n] for n in leaves}
    servers[replica] = ([params], OUTER.init(params))
  fetched = {}
  for kind, replica, worker, step, read_version in events:
    if kind == JOIN:
      learners[worker] = (start, INNER.init(first), step)
      continue
    leaves, state, done = learners[worker]
    for number in range(done, step):
      params = jax.tree.unflatten(treedef, leaves)
      result = gradient(params, {}, task.data, 5, worker, number)
      updates, state = INNER.update(result.gradient, state, params)
      leaves = jax.tree.leaves(optax.apply_updates(params, updates))
    versions, outer = servers[replica]
    if kind == FETCH:
      leaves = list(leaves)
      for number, leaf in versions[read_version].items():
        leaves[number] = leaf
      fetched[worker, replica] = read_version
    else:
      assert fetched[worker, replica] == read_version
      factor = policy(len(versions) - 1 - read_version)
      difference = {
        number: factor * (leaf - leaves[number])
        for number, leaf in versions[read_version].items()
      }
      updates, outer = OUTER.update(difference, outer, versions[-1])
      versions.append(optax.apply_updates(versions[-1], updates))
      servers[replica] = (versions, outer)
    learners[worker] = (leaves, state, step)
  final = servers[-1][0][-1] | servers[-2][0][-1]
  return jax.tree.unflatten(treedef, [final[n] for n in range(len(start))])


@pytest.mark.parametrize('policy', ['constant', 'inverse'])
def test_local_optimizers_and_fragments(task, policy):
  result = jasgd.replay(
    task,
    OUTER,
    _make_trace(),
    policy=policy,
    local_optimizer=INNER,
    seed=5,
    mode='exact',
  )
  first, stats = task.init(jax.random.key(5, impl='threefry2x32'))
  assert not jax.tree.leaves(stats)
  expected = _reference(
    task,
    jax.tree.map(jnp.asarray, first),
    EVENTS,
    (lambda tau: 1.0) if policy == 'constant' else lambda tau: 1 / max(1, tau),
  )
  for leaf, other in zip(
    jax.tree.leaves(result.params), jax.tree.leaves(expected), strict=True
  ):
    np.testing.assert_allclose(leaf, other, rtol=2e-5, atol=2e-6)
  # A learner's replica changes with each of its steps and fetches.
  assert result.versions == {-1: 4, -2: 3, 0: 7 + 4, 1: 6 + 5}
  assert sorted(result.replicas) == [-1, 0, 1]
  # Learner 1 counts from its second JOIN on.
  assert optax.tree.get(result.opt_states[1], 'count') == 2
  assert result.history['staleness'].tolist() == [0, 1, 0, 1, 1, 0, 0]


@pytest.mark.parametrize('order', [(-1, -2), (-2, -1)])
def test_the_fates_of_fragments_are_told_by_their_own_versions(order):
  """The last push to each fragment was taken, and is in no update yet."""
  renamed = dict(zip((-1, -2), order, strict=True))
  events = [(kind, renamed[replica], *more) for kind, replica, *more in EVENTS]
  trace = _make_trace(events)
  assert trace.fate.tolist() == [traces.Fate.APPLIED] * 7
  assert trace.samples.tolist() == [8, 16, 24, 32, 40, 48, 56]
  summary = traces.summarize(trace)
  assert summary.num_updates == summary.fates[traces.Fate.APPLIED] == 7
  assert summary.staleness.values.tolist() == [0, 1]
  assert summary.staleness.counts.tolist() == [4, 3]
  assert summary.workers.num_applied.tolist() == [3, 4]
  for replica in order:
    # As in a group of several gradients whose update was never made.
    records = np.array(trace.records)
    of_fragment = (records['kind'] == PUSH) & (records['replica'] == replica)
    last = np.flatnonzero(of_fragment)[-1]
    records['version'][last] -= 1
    records['updates'][last] = 0
    fate = traces.Trace(records, HEADER).fate
    is_pending = fate == traces.Fate.PENDING
    (place,) = np.flatnonzero(is_pending)
    assert place == np.count_nonzero(records['kind'][:last] == PUSH)


def test_what_does_not_fit_is_refused(task):
  trace = _make_trace()
  arguments = {'mode': 'exact', 'seed': 5}
  with pytest.raises(ValueError, match='pass local_optimizer'):
    jasgd.replay(task, OUTER, trace, **arguments)
  with pytest.raises(ValueError, match="need mode='exact'"):
    jasgd.replay(task, OUTER, trace, local_optimizer=INNER)
  gradients = _make_trace(header={'num_workers': 2})
  with pytest.raises(ValueError, match='local_optimizer must be None'):
    jasgd.replay(task, OUTER, gradients, local_optimizer=INNER, **arguments)
  overlapping = _make_trace(header=HEADER | {'fragments': [[0, 1, 2, 3], [1]]})
  with pytest.raises(ValueError, match='each of the leaves 0 to 3 once'):
    jasgd.replay(task, OUTER, overlapping, local_optimizer=INNER, **arguments)
  early = [*EVENTS[:6], (FETCH, -2, 0, 3, 1), *EVENTS[6:]]
  with pytest.raises(traces.TraceError, match='Record 6 read the weights of'):
    jasgd.replay(
      task, OUTER, _make_trace(early), local_optimizer=INNER, **arguments
    )
