"""Nodes that die and come back, with every strategy."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip
from jasgd import simulation
from jasgd import traces
from jasgd.simulation import _node_gossip
from jasgd.simulation import _node_loop
from tests.simulation import node_cases

NUM_STEPS = 8
Kind = traces.NodeKind
# Round numbers, so that deaths, returns, steps and messages coincide.
TIMES = {
  'equal': simulation.constant(1.0),
  'random': simulation.exponential(1.0),
}
spans = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 1.3, 2.0, 5.0])


@st.composite
def any_failures(draw):
  """Failures of some nodes, one after another; some for good."""
  failures = []
  for node in draw(st.sets(st.integers(0, node_cases.NUM_NODES - 1))):
    time = 0.0
    for _ in range(draw(st.integers(1, 3))):
      time += draw(spans)
      until = time + draw(spans.filter(bool)) if draw(st.booleans()) else np.inf
      failures.append(simulation.Failure(time, node, until))
      if until == np.inf:
        break
      time = until
  return failures


def _check(trace, failures):
  """What must be true of every trace, whoever died when."""
  records = trace.records
  assert np.all(np.diff(records['end_time']) >= 0)
  assert np.all(records['start_time'] <= records['end_time'])
  for node in range(trace.num_nodes):
    own = trace.of_node(node)
    steps = own['step'][own['kind'] == Kind.STEP]
    np.testing.assert_array_equal(steps, 1 + np.arange(len(steps)))
    gone = [failure for failure in failures if failure.learner == node]
    is_gone_for_good = any(failure.until == np.inf for failure in gone)
    assert len(steps) == NUM_STEPS or is_gone_for_good
    # It dies, is back, dies again; while it is dead, it does nothing.
    is_alive = True
    for record in own:
      if record['kind'] == Kind.LEAVE:
        assert is_alive
        is_alive = False
      elif record['kind'] == Kind.JOIN:
        assert not is_alive
        is_alive = True
      elif record['kind'] in (Kind.STEP, Kind.MIX):
        assert is_alive
        assert not any(
          time < record['end_time'] < until for time, _, until in gone
        )
  final = node_cases.get_last(node_cases.execute(trace))
  if traces.CENTRE not in records['node']:  # Forces may move it too far.
    assert min(final) >= -1e-9
    assert max(final) <= trace.num_nodes - 1 + 1e-9


@node_cases.every_network
@node_cases.every_strategy
@pytest.mark.parametrize('times', TIMES)
@hypothesis.given(failures=any_failures())
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def test_whoever_dies_the_others_go_on(name, network, times, failures):
  trace = node_cases.run(
    name, network, NUM_STEPS, compute=TIMES[times], failures=failures
  )
  _check(trace, failures)


@node_cases.every_strategy
def test_random_failures(name):
  failures = simulation.draw_failures(node_cases.NUM_NODES, 20.0, 6.0, 2.0)
  trace = node_cases.run(name, 'slow', NUM_STEPS, failures=failures)
  _check(trace, failures)
  kinds = trace.records['kind']
  assert np.count_nonzero(kinds == Kind.LEAVE) > 5
  assert np.count_nonzero(kinds == Kind.JOIN) > 5
  again = node_cases.run(name, 'slow', NUM_STEPS, failures=failures[::-1])
  np.testing.assert_array_equal(again.records, trace.records)


@node_cases.every_strategy
def test_failures_after_the_end_do_not_matter(name):
  plain = node_cases.run(name, 'slow')
  late = [simulation.Failure(1e6, 2, 1e7), simulation.Failure(1e6, 3)]
  trace = node_cases.run(name, 'slow', failures=late)
  np.testing.assert_array_equal(trace.records, plain.records)


def _run(strategy, failures, num_nodes=3, num_steps=3, **network):
  return simulation.simulate_nodes(
    strategy,
    num_nodes=num_nodes,
    num_steps=num_steps,
    network=simulation.Network(**network),
    failures=failures,
  )


def test_allreduce_goes_on_without_the_dead():
  trace = _run(gossip.AllReduce(), [simulation.Failure(1.5, 2)])
  mixes = trace.mixes
  assert mixes['node'].tolist() == [0, 1, 2, 0, 1, 0, 1]
  assert mixes['end_time'].tolist() == [1, 1, 1, 2, 2, 3, 3]
  np.testing.assert_allclose(mixes['peer_weight'], [1 / 3] * 3 + [1 / 2] * 4)


def test_who_waits_for_the_one_that_dies_is_released():
  times = simulation.with_speeds(simulation.constant(1.0), [1, 1, 0.01])
  trace = simulation.simulate_nodes(
    gossip.AllReduce(),
    num_nodes=3,
    num_steps=2,
    compute=times,
    failures=[simulation.Failure(7.0, 2)],
  )
  assert trace.mixes['end_time'].tolist() == [7, 7, 8, 8]


def test_an_allreduce_begins_again_if_one_dies_in_it():
  failures = [simulation.Failure(1.3, 2)]
  trace = _run(gossip.AllReduce(), failures, num_steps=1, latency=0.1)
  # With three nodes it would take from 1 to 1.4; with two, 0.2 from 1.3 on.
  np.testing.assert_allclose(trace.mixes['end_time'], 1.5)
  assert trace.mixes['node'].tolist() == [0, 1]
  np.testing.assert_allclose(trace.mixes['own_weight'], 1 / 2)


def test_a_dead_peer_refuses():
  """It costs two latencies, and is noted; the weights stay as they are."""
  for strategy in (gossip.Pull, gossip.Pairs):
    trace = _run(
      strategy(peers=gossip.ring(2)),
      [simulation.Failure(0.5, 1)],
      num_nodes=2,
      latency=0.2,
      bandwidth=1.0,
      bytes_per_push=1.0,
    )
    assert not len(trace.mixes)
    lost = trace.records[trace.records['kind'] == Kind.LOST]
    assert lost['peer'].tolist() == [1, 1, 1]
    assert lost['version'].tolist() == [-1, -1, -1]
    np.testing.assert_allclose(trace.duration, 3 * 1.4)
    waiting = traces.summarize_nodes(trace).nodes.waiting
    np.testing.assert_allclose(waiting, [3 * 0.4, 0])


def test_the_weight_of_a_dead_peer_goes_to_the_node():
  failures = [simulation.Failure(0.5, 1)]
  trace = _run(gossip.Pull(peers=gossip.complete(3)), failures)
  mixes = trace.mixes[trace.mixes['node'] == 0]
  assert mixes['peer'].tolist() == [2, 2, 2]
  np.testing.assert_allclose(mixes['peer_weight'], 1 / 3)
  np.testing.assert_allclose(mixes['own_weight'], 2 / 3)


@node_cases.every_strategy
def test_a_joiner_starts_from_others_weights(name):
  """It does the step again that it died in, and makes up no others."""
  failures = [
    simulation.Failure(2.5, 5, 4.0),
    simulation.Failure(1.0, 6),
  ]
  trace = node_cases.run(name, 'slow', NUM_STEPS, failures=failures)
  own = trace.of_node(5)
  (index,) = np.flatnonzero(own['kind'] == Kind.JOIN)
  join, mix = own[index], own[index + 1]
  assert mix['kind'] == Kind.MIX
  assert (mix['own_weight'], mix['peer_weight']) == (0, 1)
  assert join['start_time'] == mix['start_time'] == 4
  assert mix['step'] == join['step'] == own[index - 1]['step']
  if 'elastic' in name:
    assert mix['peer'] == traces.CENTRE
    moves = trace.of_node(traces.CENTRE)
    assert mix['peer_version'] in {0, *moves['version']}
    assert len(moves) == len(set(moves['version']))
  else:
    assert mix['peer'] == 0  # Node 6 is dead.
    # A latency there, and one with the weights back.
    assert mix['end_time'] == pytest.approx(4 + 0.3 + 0.3 + 4 / 10)


@pytest.mark.parametrize(
  ('time', 'records'),
  [
    # Before the answer comes, which nobody is there to get.
    (
      1.1,
      [
        (Kind.STEP, 0, 1.0),
        (Kind.LEAVE, 0, 1.1),
        (Kind.LOST, traces.CENTRE, 1.6),
      ],
    ),
    # After it has moved: so does the centre.
    (
      1.7,
      [
        (Kind.STEP, 0, 1.0),
        (Kind.MIX, 0, 1.6),
        (Kind.LEAVE, 0, 1.7),
        (Kind.MIX, traces.CENTRE, 1.9),
      ],
    ),
  ],
)
def test_what_is_sent_before_a_death_arrives(time, records):
  trace = _run(
    gossip.Elastic(),
    [simulation.Failure(time, 0)],
    num_nodes=1,
    latency=0.3,
  )
  found = trace.records
  kinds = list(zip(found['kind'], found['node'], strict=True))
  assert kinds == [(kind, node) for kind, node, _ in records]
  np.testing.assert_allclose(found['end_time'], [end for _, _, end in records])


def test_push_sum_reports_the_mass_that_is_lost():
  """That of the dead node, and 1/2, 1/4, 1/8 that are sent to it."""
  strategy = gossip.PushSum(peers='matching')
  trace = _run(strategy, [simulation.Failure(0.5, 1)], num_nodes=2)
  summary = traces.summarize_nodes(trace)
  assert summary.lost_mass == pytest.approx(1 + 1 / 2 + 1 / 4 + 1 / 8)
  assert summary.num_lost == 3
  assert 'mass     1.875 lost, of 2' in str(summary)


@pytest.mark.parametrize('network', node_cases.NETWORKS)
@hypothesis.given(failures=any_failures())
@hypothesis.settings(max_examples=100, deadline=None, derandomize=True)
def test_no_mass_is_lost_uncounted(network, failures):
  n = node_cases.NUM_NODES
  setup = _node_loop.Setup(
    node_cases.STRATEGIES['push-sum'],
    n,
    NUM_STEPS,
    simulation.exponential(1.0),
    node_cases.NETWORKS[network],
    failures,
    1,
  )
  loop = _node_gossip.PushSumLoop(setup)
  trace = traces.NodeTrace(loop.run(), {'num_nodes': n})
  joins = trace.records[trace.records['kind'] == Kind.JOIN]
  lost = traces.summarize_nodes(trace).lost_mass
  assert sum(loop._mass) + lost == pytest.approx(n + joins['mass'].sum())


def test_who_is_alone_goes_on_with_what_it_had():
  trace = _run(gossip.PushSum(), [simulation.Failure(1.5, 0, 4.0)], num_nodes=1)
  kinds = trace.records['kind'].tolist()
  assert kinds == [Kind.STEP, Kind.LEAVE, Kind.JOIN, Kind.STEP, Kind.STEP]
  assert trace.records['mass'].tolist() == [1, 1, 1, 1, 1]
  assert trace.records['end_time'].tolist() == [1, 1.5, 4, 5, 6]


def test_who_dies_before_it_has_weights_was_never_back():
  failures = [simulation.Failure(0.5, 0, 2.0), simulation.Failure(2.5, 0, 3.0)]
  trace = _run(gossip.PushSum(), failures, latency=0.4)
  kinds = trace.of_node(0)['kind']
  assert np.count_nonzero(kinds == Kind.LEAVE) == 1
  (join,) = trace.of_node(0)[kinds == Kind.JOIN]
  assert (join['start_time'], join['end_time']) == (3.0, 3.8)
  # The weights that came to it at 2.8 are noted, with their mass.
  lost = trace.records[trace.records['kind'] == Kind.LOST]
  is_first_fetch = np.isclose(lost['end_time'], 2.8)
  assert np.any(is_first_fetch & (lost['mass'] > 0) & (lost['peer'] == 0))
