"""Pictures of nodes: what is in them, and that they are files."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import reports
from jasgd import simulation
from jasgd import traces
from jasgd.reports import _node_pictures

STRATEGIES = (
  gossip.AllReduce(period=2),
  gossip.Elastic(),
  gossip.Pairs(),
  gossip.Pull(peers=gossip.ring(4)),
  gossip.PushSum(),
)
every_strategy = pytest.mark.parametrize(
  'strategy', STRATEGIES, ids=lambda strategy: type(strategy).__name__
)


def _simulate(strategy, failures=(), num_steps=5):
  return simulation.simulate_nodes(
    strategy,
    num_nodes=4,
    num_steps=num_steps,
    compute=simulation.normal(1.0, 0.2),
    network=simulation.Network(latency=0.1),
    failures=failures,
  )


@every_strategy
@pytest.mark.parametrize(
  'plot', [reports.plot_ages, reports.plot_node_timeline]
)
def test_pictures_are_files(plot, strategy, tmp_path):
  trace = _simulate(strategy, [simulation.Failure(1.5, 1, 3.0)])
  plot(trace, tmp_path / 'picture.png')
  data = (tmp_path / 'picture.png').read_bytes()
  assert data.startswith(b'\x89PNG')
  assert len(data) > 5_000


@every_strategy
def test_a_bar_for_each_step_and_for_each_mix_that_took_time(strategy):
  trace = _simulate(strategy)
  figure = _node_pictures.draw_node_timeline(trace, 4, 1e3)
  bars = figure.axes[0].patches
  mixes = trace.mixes[trace.mixes['node'] >= 0]
  mixes = mixes[mixes['end_time'] > mixes['start_time']]
  num_mixes = len(set(zip(mixes['node'], mixes['mix'], strict=True)))
  assert len(bars) == 4 * 5 + num_mixes
  length = sum(bar.get_width() for bar in bars)
  nodes = traces.summarize_nodes(trace).nodes
  assert length == pytest.approx((nodes.computing + nodes.waiting).sum())


def _list_grey(trace):
  """Node, start and length of each bar of a dead node."""
  axes = _node_pictures.draw_node_timeline(trace, 4, 1e3).axes[0]
  return [
    (round(bar.get_y() + 0.4), bar.get_x(), bar.get_width())
    for bar in axes.patches
    if bar.get_facecolor()[:3] == pytest.approx((200 / 255,) * 3)
  ]


def test_deaths_are_drawn():
  failures = [simulation.Failure(1.5, 1, 3.0), simulation.Failure(2.0, 2)]
  grey = _list_grey(_simulate(gossip.PushSum(), failures))
  assert [node for node, _, _ in grey] == [1, 2]
  assert grey[0][1:] == (1.5, 1.5)
  assert grey[1][1] == 2.0
  assert grey[1][2] > 100


def test_deaths_of_real_nodes_are_drawn():
  """0 ends, 1 is killed, 2 is killed and comes back, 3 is stopped meanwhile."""
  kind = traces.NodeKind
  rows = [
    *((node, kind.STEP, 10 + node) for node in range(4)),
    (0, kind.LOST, 14.5),
    (1, kind.LOST, 14.75),  # Of its sender, in somebody else's file.
    (3, kind.END, 15),
    (2, kind.RESTART, 17),
    (3, kind.RESTART, 18),
    *((node, kind.END, 20 + node) for node in (0, 2, 3)),
  ]
  records = np.zeros(len(rows), traces.NODE_RECORD)
  for record, (node, what, time) in zip(records, rows, strict=True):
    record['node'], record['kind'] = node, what
    record['start_time'] = record['end_time'] = time
  header = {'num_nodes': 4, 'is_recorded': True}
  grey = _list_grey(traces.NodeTrace(records, header))
  assert [bar[:2] for bar in grey] == [(1, 11.0), (2, 12.0)]
  assert grey[0][2] > 1000 / 2
  assert grey[1][2] == 5.0


def test_real_nodes_that_may_be_alive_are_not_drawn_as_dead():
  trace = _simulate(gossip.Pull(), num_steps=20)
  header = {**trace.header, 'is_recorded': True}  # And nobody has ended yet.
  assert not _list_grey(traces.NodeTrace(trace.records[:60], header))


def test_only_the_first_nodes_and_rounds_are_drawn():
  trace = _simulate(gossip.Push(), num_steps=40)
  axes = _node_pictures.draw_node_timeline(trace, 2, 8.0).axes[0]
  rows = {round(bar.get_y() + 0.4) for bar in axes.patches}
  assert rows == {0, 1}
  assert 14 <= len(axes.patches) <= 20
  assert axes.get_xlim()[1] == pytest.approx(8, rel=0.1)


def test_a_bar_for_each_age_and_lag():
  trace = _simulate(gossip.Pull(), num_steps=30)
  summary = traces.summarize_nodes(trace)
  left, right = _node_pictures.draw_ages(trace).axes
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
  left, right = _node_pictures.draw_ages(_simulate(gossip.AllReduce())).axes
  assert not left.patches
  assert not right.patches


def test_a_trace_without_records(tmp_path):
  trace = traces.NodeTrace(np.zeros(0, traces.NODE_RECORD), {'num_nodes': 2})
  reports.plot_node_timeline(trace, tmp_path / 'timeline.png')
  reports.plot_ages(trace, tmp_path / 'ages.png')
  assert (tmp_path / 'timeline.png').stat().st_size > 1_000
