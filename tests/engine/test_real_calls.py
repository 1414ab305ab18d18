"""Exact replay has the bits of real calls, made here by hand."""

import jax
import numpy as np
import optax
import pytest

from jasgd import engine
from jasgd import traces
from tests import marks
from tests.engine import node_cases
from tests.engine.node_cases import CENTRE

pytestmark = pytest.mark.usefixtures('quick_compiler')

NUM_NODES = 3
ADAM = optax.adam(0.05)
MOMENTUM = optax.sgd(0.1, 0.9)
RATES = {'no schedule': None, 'schedule': lambda epoch: 1 / (1 + 3 * epoch)}


def _begin(real):
  """All nodes make a step, and save a checkpoint."""
  for node in range(NUM_NODES):
    real.step(node)
  return dict.fromkeys(range(NUM_NODES), (1, 1))


def _gossip(real, rng, num_actions=60):
  """Nodes step, mix with random versions of peers, and restart."""
  checkpoints = _begin(real)
  for _ in range(num_actions):
    node = int(rng.integers(NUM_NODES))
    action = rng.choice(
      ['step', 'stale', 'mix', 'restart'], p=[0.4, 0.2, 0.3, 0.1]
    )
    if action == 'step':
      real.step(node)
    elif action == 'stale':  # It was mixed while it computed the gradient.
      real.step(node, max(0, real.version[node] - 2))
    elif action == 'mix':
      others = rng.permutation(
        [peer for peer in range(NUM_NODES) if peer != node]
      )
      others = others[: rng.integers(1, NUM_NODES)].tolist()
      shares = rng.dirichlet(np.ones(len(others) + 1)).tolist()
      messages = [
        (peer, int(rng.integers(real.version[peer] + 1)), share)
        for peer, share in zip(others, shares[1:], strict=True)
      ]
      real.mix(node, messages, shares[0])
    else:
      real.restart(node, *checkpoints[node])
    if rng.random() < 0.2:
      checkpoints[node] = (real.version[node], real.num_steps[node])


def _elastic(real, rng, num_actions=60):
  """Nodes read any version of the centre; forces arrive at any time."""
  checkpoints = {**_begin(real), CENTRE: (0, 0)}
  for _ in range(num_actions):
    node = int(rng.integers(NUM_NODES))
    action = rng.choice(
      ['step', 'easgd', 'pull', 'move', 'restart'], p=[0.3, 0.1, 0.3, 0.2, 0.1]
    )
    if action == 'step':
      real.step(node)
    elif action == 'easgd':
      real.step(node, max(0, real.version[node] - 1))
    elif action == 'pull':
      version = int(rng.integers(real.version[CENTRE] + 1))
      real.pull(node, version, 0.3)
    elif action == 'move':
      node = CENTRE
      if real.num_forces:
        real.move()
    else:
      node = CENTRE if rng.random() < 0.3 else node
      real.restart(node, *checkpoints[node])
    if rng.random() < 0.2:
      checkpoints[node] = (real.version[node], real.num_steps[node])


RUNS = {'gossip': _gossip, 'elastic': _elastic}


def _replay(trace, optimizer, mode='exact', **arguments):
  return node_cases.replay_until(
    node_cases.make_task(),
    optimizer,
    trace,
    mode=mode,
    seed=node_cases.SEED,
    **arguments,
  )


def _get_node(result, node):
  """(params, stats, opt_state) of a node, or the centre's (params, stats)."""
  if node == CENTRE:
    return result.replicas[engine.SERVER]
  return (*result.replicas[node], result.opt_states[node])


@pytest.mark.parametrize('rates', marks.slow_but(RATES, 'schedule'))
@pytest.mark.parametrize('wire_dtype', engine.WIRE_DTYPES)
@pytest.mark.parametrize('run', RUNS)
def test_replay_gives_the_bits_of_real_nodes(tmp_path, run, wire_dtype, rates):
  real = node_cases.RealNodes(
    tmp_path, ADAM, NUM_NODES, wire_dtype, RATES[rates]
  )
  RUNS[run](real, np.random.default_rng(1))
  trace = real.load()
  assert trace.header['wire_dtype'] == wire_dtype
  arguments = {'get_rate': RATES[rates]}
  result = _replay(trace, ADAM, chunk=7, **arguments)
  last = {node: real.version[node] for node in range(NUM_NODES)}
  if run == 'elastic':
    last[engine.SERVER] = real.version[CENTRE]
    centre = real.saved[CENTRE, real.version[CENTRE]]
    node_cases.assert_same_bits(_get_node(result, CENTRE), centre)
  assert result.versions == last
  for node in range(NUM_NODES):
    saved = real.saved[node, real.version[node]]
    node_cases.assert_same_bits(_get_node(result, node), saved)
  # The run had mixes and restarts.
  kinds = set(trace.records['kind'].tolist())
  assert {traces.Kind.RESTART, traces.Kind.MIX} <= kinds
  fast = _replay(trace, ADAM, 'fast', **arguments)
  assert fast.versions == last
  # A number halfway between two narrow ones may be rounded to either.
  tolerance = 2e-5 if wire_dtype == 'float32' else 2e-3
  for one, other in zip(
    jax.tree.leaves(fast.replicas),
    jax.tree.leaves(result.replicas),
    strict=True,
  ):
    np.testing.assert_allclose(one, other, atol=tolerance)


@pytest.mark.parametrize('run', RUNS)
def test_replay_up_to_checkpoints(tmp_path, run):
  """Replays any versions of nodes, and only their dependencies."""
  real = node_cases.RealNodes(tmp_path, MOMENTUM, NUM_NODES, 'float32')
  rng = np.random.default_rng(2)
  RUNS[run](real, rng, 40)
  trace = real.load()
  whole = _replay(trace, MOMENTUM)
  owners = [*range(NUM_NODES), CENTRE] if run == 'elastic' else [0, 1, 2]
  for _ in range(6):
    chosen = rng.permutation(owners)[: rng.integers(4)].tolist()
    until = {
      node: int(rng.integers(1, real.version[node] + 1))
      for node in {0, *chosen}
    }
    goals = {
      engine.SERVER if node == CENTRE else node: version
      for node, version in until.items()
    }
    result = _replay(trace, MOMENTUM, until=goals)
    assert result.clock <= whole.clock
    assert goals.items() <= result.versions.items()
    for node, version in until.items():
      saved = real.saved[node, version]
      node_cases.assert_same_bits(_get_node(result, node), saved)


def test_errors_of_unneeded_records_are_ignored(tmp_path):
  """Node 1 mixes a version without a record; its past can be replayed."""
  real = node_cases.RealNodes(tmp_path, MOMENTUM, 2, 'float32')
  for node in (0, 1, 0, 1):
    real.step(node)
  real.mix(1, [(0, 2, 0.5)], 0.5)
  trace = real.load()
  records = trace.records.copy()
  records['source_version'][-1] = 9
  broken = traces.Trace(records, trace.header)
  with pytest.raises(traces.TraceError, match='reads version 9 of node 0'):
    _replay(broken, MOMENTUM)
  result = _replay(broken, MOMENTUM, until={0: 1, 1: 2})
  assert result.clock == 3
  node_cases.assert_same_bits(_get_node(result, 1), real.saved[1, 2])
  with pytest.raises(traces.TraceError, match='Node 0 never had a version 3'):
    _replay(broken, MOMENTUM, until={0: 3})


def test_a_joiner_has_others_weights_and_its_own_optimizer(tmp_path):
  real = node_cases.RealNodes(tmp_path, MOMENTUM, 2, 'bfloat16')
  for _ in range(3):
    real.step(0)
  real.join(1, 0)
  real.step(1)
  result = _replay(real.load(), MOMENTUM)
  node_cases.assert_same_bits(_get_node(result, 1), real.saved[1, 2])


def test_the_sum_of_all_copies_stays(tmp_path):
  """Also with bfloat16: the force is rounded before it is used."""
  for wire_dtype in engine.WIRE_DTYPES:
    folder = tmp_path / wire_dtype
    folder.mkdir()
    real = node_cases.RealNodes(folder, optax.sgd(0.1), 2, wire_dtype)
    real.step(0)
    real.step(1)

    def add(real=real):
      weights = [
        real.saved[node, real.version[node]][:2] for node in (0, 1, CENTRE)
      ]
      return jax.tree.map(lambda *leaves: sum(leaves), *weights)

    before = add()
    for _ in range(5):
      real.pull(0, real.version[CENTRE], 0.3)
      real.pull(1, real.version[CENTRE], 0.3)
      real.move()
      real.move()
    for one, other in zip(
      jax.tree.leaves(before), jax.tree.leaves(add()), strict=True
    ):
      np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


def test_a_force_that_was_never_sent_is_named(tmp_path):
  real = node_cases.RealNodes(tmp_path, MOMENTUM, 1, 'float32')
  real.step(0)
  real.pull(0, 0, 0.5)
  real.move()
  trace = real.load()
  records = trace.records.copy()
  records['source_version'][-1] = 0
  with pytest.raises(
    traces.TraceError, match='by a force of node 0 at its vers'
  ):
    _replay(traces.Trace(records, trace.header), MOMENTUM)
