"""Pictures of nodes: what is in them, and that they are files."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import reports
from jasgd import simulation
from jasgd import traces

STRATEGIES = (
  gossip.AllReduce(period=2),
  gossip.Elastic(),
  gossip.Pairs(),
  gossip.Pull(peers=gossip.topologies.ring(4)),
  gossip.PushSum(),
)
every_strategy = pytest.mark.parametrize(
  'strategy', STRATEGIES, ids=lambda strategy: type(strategy).__name__
)


def _simulate(strategy, failures=(), num_steps=5):
  return simulation.simulate(
    strategy,
    num_workers=4,
    num_gradients=4 * num_steps,
    compute=simulation.normal(1.0, 0.2),
    network=simulation.Network(latency=0.1),
    failures=failures,
  )


@every_strategy
@pytest.mark.parametrize(
  'plot', [reports.plot_ages, reports.plot_timeline, reports.plot_members]
)
def test_pictures_are_files(plot, strategy, tmp_path):
  trace = _simulate(strategy, [simulation.Failure(1.5, 1, 3.0)])
  plot(trace, tmp_path / 'picture.png')
  data = (tmp_path / 'picture.png').read_bytes()
  assert data.startswith(b'\x89PNG')
  assert len(data) > 5_000


def _list_bars(trace, what, **arguments):
  """Node, start and end of each bar of a kind."""
  arguments = {'num_rounds': 1e3, **arguments}
  axes = reports.plot_timeline(trace, **arguments).axes[0]
  return [
    (round((box.y0 + box.y1) / 2), box.x0, box.x1)
    for collection in axes.collections
    if collection.get_label() == what
    for box in (path.get_extents() for path in collection.get_paths())
  ]


@every_strategy
def test_a_bar_for_each_step_and_for_each_mix_that_took_time(strategy):
  trace = _simulate(strategy)
  steps, waits = (_list_bars(trace, what) for what in ('computes', 'waits'))
  mixes = trace.mixes[trace.mixes['end_time'] > trace.mixes['start_time']]
  num_mixes = len(set(zip(mixes['replica'], mixes['group'], strict=True)))
  assert (len(steps), len(waits)) == (4 * 5, num_mixes)
  times = traces.summarize(trace).workers.times
  for bars, seconds in ((steps, times.busy), (waits, times.waiting)):
    length = sum(end - start for _, start, end in bars)
    assert length == pytest.approx(seconds.sum())


def test_deaths_are_drawn():
  failures = [simulation.Failure(1.5, 1, 3.0), simulation.Failure(2.0, 2)]
  trace = _simulate(gossip.PushSum(), failures)
  (first, second) = _list_bars(trace, 'is gone')
  (back,) = trace.of_kind(traces.Kind.JOIN)
  assert first == (1, 1.5, back['end_time'])
  assert second[:2] == (2, 2.0)
  assert second[2] > 100


def test_an_all_reduce_that_loses_a_node():
  """All go back to a checkpoint, but only one of them was gone."""
  trace = simulation.simulate(
    gossip.AllReduce(),
    num_workers=3,
    num_gradients=30,
    failures=[(2.5, 1, 4.0)],
    checkpoint_seconds=1.0,
  )
  assert len(trace.of_kind(traces.Kind.RESTART)) == 3
  assert _list_bars(trace, 'is gone') == [(1, 2.5, 4.0)]
  axes = reports.plot_members(trace).axes[0]
  marks = {line.get_label(): line for line in axes.lines}
  assert marks['left or lost'].get_xydata().tolist() == [[2.5, 1]]
  assert marks['came'].get_xydata().tolist() == [[4.0, 1]]


def test_deaths_of_real_nodes_are_drawn():
  """0 ends, 1 is killed, 2 is killed and comes back, 3 is stopped meanwhile."""
  kind = traces.Kind
  rows = [
    *((node, kind.STEP, 10 + node) for node in range(4)),
    (0, kind.LOST, 14.5),
    (1, kind.LOST, 14.75),  # Of its sender, in somebody else's file.
    (3, kind.END, 15),
    (2, kind.RESTART, 17),
    (3, kind.RESTART, 18),
    *((node, kind.END, 20 + node) for node in (0, 2, 3)),
  ]
  node, what, time = zip(*rows, strict=True)
  records = traces.make_records(
    kind=what,
    replica=node,
    worker=node,
    start_time=time,
    end_time=time,
    updates=np.isin(what, (kind.STEP, kind.RESTART)),
  )
  trace = traces.Trace(records, {'num_workers': 4, 'is_recorded': True})
  gone = _list_bars(trace, 'is gone')  # In seconds since the first step.
  assert [bar[:2] for bar in gone] == [(1, 1.0), (2, 2.0)]
  assert gone[0][2] > 100
  assert gone[1][2] == 7.0


def test_real_nodes_that_may_be_alive_are_not_drawn_as_dead():
  trace = _simulate(gossip.Pull(), num_steps=20)
  header = {**trace.header, 'is_recorded': True}  # And nobody has ended yet.
  trace = traces.Trace(trace.records[:60], header)
  assert not _list_bars(trace, 'is gone')


def test_only_the_first_nodes_and_rounds_are_drawn():
  trace = _simulate(gossip.Push(), num_steps=40)
  arguments = {'max_workers': 2, 'num_rounds': 8.0}
  bars = _list_bars(trace, 'computes', **arguments)
  assert {node for node, _, _ in bars} == {0, 1}
  assert 14 <= len(bars) <= 20
  axes = reports.plot_timeline(trace, **arguments).axes[0]
  assert axes.get_xlim()[1] == pytest.approx(8, rel=0.1)


def test_a_bar_for_each_age_and_lag():
  trace = _simulate(gossip.Pull(), num_steps=30)
  summary = traces.summarize(trace)
  left, right = reports.plot_ages(trace).axes
  for axes, spread in ((left, summary.age), (right, summary.lag)):
    heights = {
      round(bar.get_x() + bar.get_width() / 2): bar.get_height()
      for bar in axes.patches
      if bar.get_height()
    }
    assert heights == dict(
      zip(spread.values.tolist(), spread.counts.tolist(), strict=True)
    )
  assert f'mean {summary.age.mean:.2f}' in left.get_title()
  assert len(summary.lag.values) > 3


def test_all_reduce_has_no_ages():
  left, right = reports.plot_ages(_simulate(gossip.AllReduce())).axes
  assert not left.patches
  assert not right.patches


@pytest.mark.parametrize(
  'plot', [reports.plot_timeline, reports.plot_ages, reports.plot_members]
)
def test_a_trace_without_records(plot, tmp_path):
  trace = traces.Trace(np.zeros(0, traces.RECORD), {'num_workers': 2})
  plot(trace, tmp_path / 'picture.png')
  assert (tmp_path / 'picture.png').stat().st_size > 1_000
