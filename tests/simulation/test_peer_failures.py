"""Nodes that die and come back, with each strategy."""

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.gossip import topologies
from tests.simulation import cases

NUM_STEPS = 8
# Round numbers, so that deaths, returns, steps and messages coincide.
EVEN_TIMES = {
  'equal': simulation.constant(1.0),
  'random': simulation.exponential(1.0),
}
_spans = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0, 1.3, 2.0, 5.0])


@st.composite
def any_failures(draw):
  """Failures of some nodes, one after another; some for good."""
  failures = []
  for node in draw(st.sets(st.integers(0, cases.NUM_NODES - 1))):
    time = 0.0
    for _ in range(draw(st.integers(1, 3))):
      time += draw(_spans)
      until = (
        time + draw(_spans.filter(bool)) if draw(st.booleans()) else np.inf
      )
      failures.append(simulation.Failure(time, node, until))
      if until == np.inf:
        break
      time = until
  return failures


def _check_peers(trace, failures, is_collective):
  """Checks what holds for every trace with deaths."""
  records = trace.records
  assert np.all(np.diff(records['end_time']) >= 0)
  assert np.all(records['start_time'] <= records['end_time'])
  is_for_good = {each.worker for each in failures if each.until == np.inf}
  for node in range(trace.num_workers):
    own = trace.of_replica(node)
    gone = [failure for failure in failures if failure.worker == node]
    # Deaths and returns alternate, and a dead node has no records. Steps are
    # consecutive, from the step of its checkpoint or of the peer it joined.
    is_alive, step = True, 0
    for record in own:
      kind = record['kind']
      if kind == traces.Kind.LEAVE:
        assert is_alive
        is_alive = False
      elif kind in (traces.Kind.JOIN, traces.Kind.RESTART):
        is_alive, step = True, record['step']
      elif kind in (traces.Kind.STEP, traces.Kind.MIX, traces.Kind.MEAN):
        assert is_alive
        step += kind == traces.Kind.STEP
        assert record['step'] == step
        assert not any(
          time < record['end_time'] < until for time, _, until in gone
        )
    cannot = is_for_good if is_collective else is_for_good & {node}
    assert step == NUM_STEPS or cannot
  final = cases.get_last(cases.execute(trace))
  if traces.SERVER not in records['replica']:  # Forces may overshoot.
    assert min(final) >= -1e-9
    assert max(final) <= trace.num_workers - 1 + 1e-9
  # Mass is held by nodes, was lost with them or with messages, or came back.
  if records['mass'].any():
    sums = {
      kind: records['mass'][records['kind'] == kind].sum()
      for kind in (
        traces.Kind.END,
        traces.Kind.LEAVE,
        traces.Kind.LOST,
        traces.Kind.RESTART,
      )
    }
    lost = (
      sums[traces.Kind.LEAVE]
      + sums[traces.Kind.LOST]
      - sums[traces.Kind.RESTART]
    )
    assert lost > -1e-9
    assert sums[traces.Kind.END] + lost == pytest.approx(trace.num_workers)
    found = traces.summarize(trace).lost_mass
    assert found == pytest.approx(lost, abs=1e-6)


@cases.every_peer_network
@cases.every_strategy
@hypothesis.given(
  failures=any_failures(),
  times=st.sampled_from(sorted(EVEN_TIMES)),
  checkpoint_seconds=st.sampled_from([np.inf, 0.5, 2.5]),
  restart_seconds=st.sampled_from([0.0, 0.5]),
  detection_seconds=st.sampled_from([0.0, 0.3]),
)
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
def test_the_other_nodes_continue_after_any_death(
  name, network, failures, times, **seconds
):
  trace = cases.run_peers(
    name,
    network,
    NUM_STEPS,
    compute=EVEN_TIMES[times],
    failures=failures,
    **seconds,
  )
  _check_peers(trace, failures, cases.STRATEGIES[name].is_collective)


@cases.every_strategy
def test_random_failures(name):
  failures = simulation.draw_failures(cases.NUM_NODES, 20.0, 6.0, 2.0)
  trace = cases.run_peers(name, 'slow', NUM_STEPS, failures=failures)
  _check_peers(trace, failures, cases.STRATEGIES[name].is_collective)
  summary = traces.summarize(trace)
  assert summary.num_deaths > 5
  assert summary.num_returns > 5
  again = cases.run_peers(name, 'slow', NUM_STEPS, failures=failures[::-1])
  np.testing.assert_array_equal(again.records, trace.records)


@cases.every_strategy
def test_failures_after_the_end_do_not_matter(name):
  plain = cases.run_peers(name, 'slow')
  late = [simulation.Failure(1e6, 2, 1e7), simulation.Failure(1e6, 3)]
  trace = cases.run_peers(name, 'slow', failures=late)
  np.testing.assert_array_equal(trace.records, plain.records)


def _run_constant(
  strategy, failures, num_workers=3, num_steps=3, checkpoint=np.inf, **network
):
  return cases.simulate_peers(
    strategy,
    num_workers=num_workers,
    num_steps=num_steps,
    network=simulation.Network(**network),
    failures=failures,
    checkpoint_seconds=checkpoint,
  )


def _list(trace, kind, *names):
  """Some fields of all records of a kind."""
  records = trace.records[trace.records['kind'] == kind]
  return records[list(names)].tolist()


@pytest.mark.parametrize(
  ('checkpoint', 'first_step'), [(np.inf, 0), (1.0, 2), (2.0, 2), (0.3, 2)]
)
def test_an_allreduce_goes_back_to_the_last_common_checkpoint(
  checkpoint, first_step
):
  """Node 2 dies in the third step, and is back at 5: then all begin again."""
  failures = [simulation.Failure(2.5, 2, 5.0)]
  trace = _run_constant(gossip.AllReduce(), failures, checkpoint=checkpoint)
  # The others have made their third step, and wait for node 2.
  steps = _list(trace, traces.Kind.STEP, 'replica', 'step', 'end_time')
  assert steps[6:8] == [(0, 3, 3.0), (1, 3, 3.0)]
  # A step and a mean are two versions; of the third step there is one.
  fields = ('replica', 'step', 'version', 'read_version', 'end_time')
  restarts = _list(trace, traces.Kind.RESTART, *fields)
  assert restarts == [
    (0, first_step, 6, 2 * first_step, 5.0),
    (1, first_step, 6, 2 * first_step, 5.0),
    (2, first_step, 5, 2 * first_step, 5.0),
  ]
  assert trace.duration == 5 + 3 - first_step
  # No mean has the number of another, and no number is left out.
  numbers = [number for (number,) in _list(trace, traces.Kind.MEAN, 'group')]
  num_means = 2 + 3 - first_step
  assert numbers == np.repeat(np.arange(num_means) + 1, 3).tolist()
  incarnations = trace.records['incarnation']
  is_after = trace.records['end_time'] >= 5
  np.testing.assert_array_equal(incarnations, is_after)


def test_an_allreduce_ends_with_a_node_that_is_gone_for_good():
  trace = _run_constant(gossip.AllReduce(), [simulation.Failure(1.5, 2)])
  assert trace.mixes['end_time'].tolist() == [1, 1, 1]
  assert trace.steps['step'].max() == 2
  assert not np.any(trace.records['kind'] == traces.Kind.RESTART)


def test_an_allreduce_does_not_count_on_a_node_that_died_while_it_waited():
  """Node 0 has made its step at 1, waits for the others, and dies at 2."""
  trace = cases.simulate_peers(
    gossip.AllReduce(),
    num_workers=3,
    num_steps=2,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.25, 0.25]),
    failures=[simulation.Failure(2.0, 0)],
  )
  assert not len(trace.mixes)
  assert trace.num_gradients == 3
  assert trace.header['num_missing'] == 3


def test_an_allreduce_waits_for_all_dead_nodes():
  failures = [simulation.Failure(1.5, 2, 3.0), simulation.Failure(2.5, 0, 7.0)]
  trace = _run_constant(gossip.AllReduce(), failures)
  times = [time for (time,) in _list(trace, traces.Kind.RESTART, 'end_time')]
  assert times == [7.0] * 3


def test_a_dead_peer_is_asked_once():
  """The question takes two latencies and the detection time; it is recorded."""
  for strategy in (gossip.Pull, gossip.Pairs):
    trace = cases.simulate_peers(
      strategy(peers=topologies.ring(2)),
      num_workers=2,
      num_steps=3,
      network=simulation.Network(
        latency=0.2, bandwidth=1.0, bytes_per_push=1.0
      ),
      failures=[simulation.Failure(0.5, 1)],
      detection_seconds=0.3,
    )
    assert not len(trace.mixes)
    lost = _list(trace, traces.Kind.LOST, 'replica', 'source', 'read_version')
    assert lost == [(0, 1, -1)]
    np.testing.assert_allclose(trace.duration, 3 + 0.4 + 0.3)
    waiting = traces.summarize(trace).workers.times.waiting
    np.testing.assert_allclose(waiting, [0.7, 0])


def test_a_dead_receiver_is_noticed_after_the_detection_time():
  """Until then the sender still believes that it is alive, and sends again."""
  strategy = gossip.PushSum(
    peers=topologies.with_constant_weights(topologies.ring(2), 0.5)
  )
  trace = cases.simulate_peers(
    strategy,
    num_workers=2,
    num_steps=5,
    failures=[simulation.Failure(0.5, 1)],
    detection_seconds=2.5,
  )
  own = trace.of_replica(0)
  steps = own[own['kind'] == traces.Kind.STEP]
  # It sends after the steps at 1, 2 and 3. The mass of the first message comes
  # back at 3.5, that of the others at 4.5 and 5.5.
  np.testing.assert_allclose(
    steps['mass'], [1 / 2, 1 / 4, 1 / 8, 1 / 8 + 1 / 2, 1 / 8 + 3 / 4]
  )
  (end,) = own[own['kind'] == traces.Kind.END]
  assert end['mass'] == 1


def test_a_sender_that_dies_before_it_notices_loses_the_mass():
  strategy = gossip.PushSum(
    peers=topologies.with_constant_weights(topologies.ring(3), 0.25)
  )
  failures = [simulation.Failure(0.5, 1), simulation.Failure(1.5, 0)]
  trace = cases.simulate_peers(
    strategy,
    num_workers=3,
    num_steps=1,
    failures=failures,
    detection_seconds=1.0,
  )
  lost = _list(trace, traces.Kind.LOST, 'replica', 'source', 'mass', 'end_time')
  assert lost == [(0, 1, 0.25, 2.0)]
  (end,) = _list(trace, traces.Kind.END, 'mass')
  assert traces.summarize(trace).lost_mass == pytest.approx(3 - end[0])


def test_a_peer_that_is_back_before_it_is_missed_counts_as_alive():
  trace = cases.simulate_peers(
    gossip.Push(peers=topologies.ring(2)),
    num_workers=2,
    num_steps=6,
    failures=[simulation.Failure(0.5, 1, 1.25)],
    detection_seconds=0.5,
  )
  mixes = trace.mixes[trace.mixes['replica'] == 1]
  assert mixes['source_step'].tolist() == [1, 2, 3, 4, 5, 6]


def test_random_peers_are_drawn_among_those_believed_alive():
  """Of four nodes one is dead: each draws among three, itself included."""
  trace = cases.simulate_peers(
    gossip.Pull(),
    num_workers=4,
    num_steps=3000,
    failures=[simulation.Failure(0.5, 2)],
  )
  lost = _list(trace, traces.Kind.LOST, 'replica', 'source')
  assert sorted(lost) == [(0, 2), (1, 2), (3, 2)]
  for node in (0, 1, 3):
    share = np.mean(trace.mixes['replica'] == node) * len(trace.mixes) / 3000
    assert abs(share - 2 / 3) < 0.03


def test_the_weight_of_a_dead_peer_goes_to_the_node():
  failures = [simulation.Failure(0.5, 1)]
  trace = _run_constant(gossip.Pull(peers=topologies.complete(3)), failures)
  mixes = trace.mixes[trace.mixes['replica'] == 0]
  assert mixes['source'].tolist() == [2, 2, 2]
  np.testing.assert_allclose(mixes['weight'], 1 / 3)
  np.testing.assert_allclose(mixes['own_weight'], 2 / 3)


@pytest.mark.parametrize(
  'name',
  [
    name
    for name, strategy in cases.STRATEGIES.items()
    if not strategy.is_collective
  ],
)
def test_a_joiner_takes_over_weights_and_step(name):
  failures = [
    simulation.Failure(2.5, 5, 4.0),
    simulation.Failure(1.0, 6),
  ]
  trace = cases.run_peers(name, 'slow', NUM_STEPS, failures=failures)
  own = trace.of_replica(5)
  (index,) = np.flatnonzero(own['kind'] == traces.Kind.JOIN)
  join, mix = own[index], own[index + 1]
  assert mix['kind'] == traces.Kind.MIX
  assert (mix['own_weight'], mix['weight']) == (0, 1)
  assert join['start_time'] == mix['start_time'] == 4
  assert join['mass'] == mix['mass'] == 0
  if 'elastic' in name:
    assert mix['source'] == traces.SERVER
    moves = trace.of_replica(traces.SERVER)
    num_moves = np.count_nonzero(moves['end_time'] <= mix['end_time'] - 0.7)
    period = cases.STRATEGIES[name].period
    assert mix['step'] == join['step'] == num_moves * period // 7
    assert mix['step'] > 0
  else:
    assert mix['source'] == 0  # Node 6 is dead.
    assert mix['step'] == join['step'] == mix['source_step'] > 0
    # It knows that node 6 is dead: one latency there and back.
    assert mix['end_time'] == pytest.approx(4 + 2 * 0.3 + 4 / 10)


def test_a_joiner_finds_out_that_a_peer_has_just_died():
  """Its question is under way for 0.25, and node 2 dies meanwhile."""
  trace = cases.simulate_peers(
    gossip.Pull(period=100),
    num_workers=3,
    num_steps=9,
    network=simulation.Network(latency=0.25),
    failures=[simulation.Failure(1.5, 1, 4.0), simulation.Failure(4.125, 2)],
    detection_seconds=1.0,
  )
  (join,) = _list(trace, traces.Kind.JOIN, 'start_time', 'end_time', 'step')
  # A latency there and back for each question, and the detection time.
  assert join == (4.0, 4 + 1.0 + 4 * 0.25, 5)


def test_nodes_without_steps_cannot_help_a_joiner():
  """Node 0 is back before any node has made a step, and starts anew."""
  trace = _run_constant(gossip.Pull(), [simulation.Failure(0.25, 0, 0.5)])
  assert not len(trace.records[trace.records['kind'] == traces.Kind.JOIN])
  fields = ('replica', 'step', 'read_version', 'end_time')
  assert _list(trace, traces.Kind.RESTART, *fields) == [(0, 0, 0, 0.5)]
  assert trace.steps['end_time'].max() == 3.5


class _FreshElastic(gossip.Elastic):
  """Its centre refuses forces that were computed with an old version."""

  def make_centre(self):
    return protocols.ringmaster(1)


def test_the_centre_moves_only_if_its_protocol_updates():
  """Three nodes ask together: their forces have staleness 0, 1 and 2."""
  trace = cases.simulate_peers(
    _FreshElastic(),
    num_workers=3,
    num_steps=4,
    network=simulation.Network(latency=0.25),
  )
  moves = trace.of_replica(traces.SERVER)
  assert moves['version'].tolist() == [*range(1, 9)]
  # The last one is too stale, and the centre does not move by it.
  assert moves['source'].tolist() == [0, 1] * 4
  lost = _list(trace, traces.Kind.LOST, 'replica', 'source', 'read_version')
  versions = trace.mixes['version'][trace.mixes['replica'] == 2] - 1
  assert lost == [(2, traces.SERVER, version) for version in versions]


def test_a_node_goes_on_from_its_checkpoint():
  """Its weights are those of the checkpoint, at a new version."""
  trace = cases.simulate_peers(
    gossip.PushSum(peers=topologies.ring(2)),
    num_workers=2,
    num_steps=6,
    failures=[simulation.Failure(4.5, 0, 5.0)],
    checkpoint_seconds=2.0,
    restart_seconds=0.25,
  )
  own = trace.of_replica(0)
  (index,) = np.flatnonzero(own['kind'] == traces.Kind.RESTART)
  restart, before = own[index], own[index - 2]
  assert restart['end_time'] == 5.25
  assert restart['step'] == 4
  assert own[index - 1]['kind'] == traces.Kind.LEAVE
  assert restart['version'] == before['version'] + 1
  assert restart['mass'] == before['mass'] > 0
  assert own['step'][own['kind'] == traces.Kind.STEP].tolist() == [*range(1, 7)]
  (saved,) = own[
    (own['version'] == restart['read_version'])
    & (own['step'] == 4)
    & (own['kind'] == traces.Kind.MIX)
  ]
  assert saved['end_time'] == 4.0


@pytest.mark.parametrize(
  ('time', 'records'),
  [
    # Before the answer arrives, which is then lost.
    (
      1.1,
      [
        (traces.Kind.STEP, 0, 1.0),
        (traces.Kind.LEAVE, 0, 1.1),
        (traces.Kind.LOST, traces.SERVER, 1.6),
      ],
    ),
    # After the node has moved: its force still moves the centre.
    (
      1.7,
      [
        (traces.Kind.STEP, 0, 1.0),
        (traces.Kind.MIX, 0, 1.6),
        (traces.Kind.LEAVE, 0, 1.7),
        (traces.Kind.MOVE, traces.SERVER, 1.9),
      ],
    ),
  ],
)
def test_messages_sent_before_a_death_arrive(time, records):
  trace = _run_constant(
    gossip.Elastic(),
    [simulation.Failure(time, 0)],
    num_workers=1,
    latency=0.3,
  )
  found = trace.records
  kinds = list(zip(found['kind'], found['replica'], strict=True))
  assert kinds == [(kind, node) for kind, node, _ in records]
  np.testing.assert_allclose(found['end_time'], [end for _, _, end in records])


@pytest.mark.parametrize(('time', 'lost'), [(0.5, 1.0), (1.1, 1.5)])
def test_push_sum_reports_the_mass_that_is_lost(time, lost):
  """Mass of the dead node and of a message under way; no other mass is lost."""
  trace = _run_constant(
    gossip.PushSum(
      peers=topologies.with_constant_weights(topologies.ring(2), 0.5)
    ),
    [simulation.Failure(time, 1)],
    num_workers=2,
    latency=0.2,
  )
  summary = traces.summarize(trace)
  sent = 0.5 if time > 1 else 0.0  # By node 1, and taken by node 0.
  assert summary.lost_mass == pytest.approx(lost - sent)
  assert summary.num_lost == (time > 1)
  assert f'mass lost  {lost - sent:g} of 2' in str(summary)


def test_a_returning_node_without_peers_starts_again():
  trace = _run_constant(
    gossip.PushSum(), [simulation.Failure(1.5, 0, 4.0)], num_workers=1
  )
  found = trace.records[['kind', 'step', 'mass', 'end_time']].tolist()
  assert found == [
    (traces.Kind.STEP, 1, 1, 1),
    (traces.Kind.LEAVE, 1, 1, 1.5),
    (traces.Kind.RESTART, 0, 1, 4),
    *((traces.Kind.STEP, step, 1, 4 + step) for step in (1, 2, 3)),
    (traces.Kind.END, 3, 1, 7),
  ]
  assert traces.summarize(trace).lost_mass == 0


def test_a_node_that_dies_before_it_has_weights_never_joined():
  failures = [simulation.Failure(0.5, 0, 2.0), simulation.Failure(2.5, 0, 3.0)]
  trace = _run_constant(gossip.PushSum(), failures, latency=0.4)
  kinds = trace.of_replica(0)['kind']
  assert np.count_nonzero(kinds == traces.Kind.LEAVE) == 1
  (join,) = trace.of_replica(0)[kinds == traces.Kind.JOIN]
  assert (join['start_time'], join['end_time']) == (3.0, 3.8)
  # The weights that were sent to it, and arrive at 2.8, are recorded as lost.
  lost = trace.records[trace.records['kind'] == traces.Kind.LOST]
  assert np.any(np.isclose(lost['end_time'], 2.8) & (lost['source'] == 0))
