"""Pictures of traces: their bars, and the places and kinds of these."""

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import reports
from jasgd import simulation
from jasgd import traces

KINDS = {'computes', 'communicates', 'waits', 'is gone'}
FATES = {
  'asynchronous': protocols.asynchronous(),
  'softsync': protocols.softsync(2),
  'rennala': protocols.rennala(3),
  'hardsync': protocols.hardsync(),
}
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


def _list_bars(axes):
  """Kind -> [(row, start, end)] of each bar, in order."""
  bars = {}
  for collection in axes.collections:
    if collection.get_label() in KINDS:
      corners = [path.get_extents() for path in collection.get_paths()]
      bars[collection.get_label()] = sorted(
        (round((box.y0 + box.y1) / 2), round(box.x0, 6), round(box.x1, 6))
        for box in corners
      )
  return bars


def _draw(trace, max_workers, num_rounds):
  return reports.plot_timeline(
    trace, max_workers=max_workers, num_rounds=num_rounds
  )


def _simulate(protocol, **arguments):
  return simulation.simulate(
    protocol, **{'num_workers': 3, 'num_gradients': 12, **arguments}
  )


def test_a_bar_for_each_thing_that_took_time():
  """Pulls and pushes take 0.5; learner 1 computes for 2 s, 0 for 1 s."""
  trace = _simulate(
    protocols.hardsync(),
    num_workers=2,
    num_gradients=4,
    compute=simulation.with_speeds(simulation.constant(2.0), [2, 1]),
    network=simulation.Network(latency=0.5),
  )
  axes = _draw(trace, 4, 1e3).axes[0]
  assert _list_bars(axes) == {
    'computes': [(0, 0.5, 1.5), (0, 3.5, 4.5), (1, 0.5, 2.5), (1, 3.5, 5.5)],
    'communicates': [
      *((0, 0.0, 0.5), (0, 1.5, 2.0), (0, 3.0, 3.5), (0, 4.5, 5.0)),
      *((1, 0.0, 0.5), (1, 2.5, 3.0), (1, 3.0, 3.5), (1, 5.5, 6.0)),
    ],
    'waits': [(0, 2.0, 3.0), (0, 5.0, 6.0)],
  }
  (updates,) = [
    lines for lines in axes.collections if lines.get_label() == 'updates'
  ]
  times = [segment[0, 0] for segment in updates.get_segments()]
  assert times == [3.0, 6.0]


def test_the_dead_do_not_wait():
  """Learner 0 waits from 1 on, and dies at 3; learner 1 needs 10 s."""
  trace = _simulate(
    protocols.hardsync(),
    num_gradients=6,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.1, 1]),
    failures=[(3.0, 0, 12.0)],
  )
  bars = _list_bars(_draw(trace, 4, 1e3).axes[0])
  assert bars['waits'][:2] == [(0, 1.0, 3.0), (0, 13.0, 20.0)]


def test_who_was_gone_has_no_bar_of_waiting():
  trace = _simulate(
    protocols.asynchronous(),
    num_gradients=5,
    network=simulation.Network(latency=1.0),
    failures=[(2.5, 0)],
  )
  assert trace.fate[0] == protocols.Fate.DROPPED_GONE
  bars = _list_bars(_draw(trace, 4, 1e3).axes[0])
  assert 'waits' not in bars
  assert [bar[0] for bar in bars['computes']].count(0) == 1


def test_who_waits_at_the_end_waits_to_the_end():
  trace = _simulate(
    protocols.hardsync(),
    num_workers=2,
    num_gradients=3,
    compute=simulation.with_speeds(simulation.constant(1.0), [1, 0.5]),
  )
  bars = _list_bars(_draw(trace, 4, 1e3).axes[0])
  assert bars['waits'] == [(0, 1.0, 2.0)]  # The second wait has just begun.


def test_the_picture_costs_the_same_for_any_number_of_learners():
  numbers = {}
  for num_learners in (20, 10_000):
    trace = simulation.simulate(
      protocols.asynchronous(),
      num_workers=num_learners,
      num_gradients=5 * num_learners,
      compute=simulation.normal(1.0, 0.2),
    )
    axes = _draw(trace, 16, 8.0).axes[0]
    numbers[num_learners] = len(axes.get_children())
    bars = _list_bars(axes)
    assert {bar[0] for bar in bars['computes']} == set(range(16))
  assert numbers[10_000] <= numbers[20] < 30


def test_updates_are_lines_unless_they_are_too_many():
  for num_gradients, is_drawn in ((300, True), (301, False)):
    trace = _simulate(
      protocols.asynchronous(), num_workers=1, num_gradients=num_gradients
    )
    axes = _draw(trace, 1, 1e4).axes[0]
    lines = [
      len(lines.get_segments())
      for lines in axes.collections
      if lines.get_label() == 'updates'
    ]
    assert lines == ([num_gradients] if is_drawn else [])


@pytest.mark.parametrize('num_learners', [1, 2, 3, 16])
def test_ticks_are_whole_numbers(num_learners):
  trace = _simulate(
    protocols.asynchronous(), num_workers=num_learners, num_gradients=40
  )
  axes = _draw(trace, 16, 8.0).axes[0]
  bottom, top = axes.get_ylim()
  ticks = [tick for tick in axes.get_yticks() if top <= tick <= bottom]
  assert ticks
  assert all(tick == round(tick) for tick in ticks)


def test_the_figures_counts_from_the_first_start():
  trace = _simulate(protocols.ssp(1), compute=simulation.normal(1.0, 0.2))
  records = np.array(trace.records)
  for name in ('start_time', 'end_time', 'release_time'):
    records[name] += 1e6
  later = traces.Trace(records, trace.header)
  first, second = (
    _list_bars(_draw(each, 3, 3.0).axes[0]) for each in (trace, later)
  )
  assert len(first['computes']) >= 9
  for kind in first.keys() | second.keys():
    np.testing.assert_allclose(first[kind], second[kind], atol=1e-5)


@pytest.mark.parametrize('name', FATES)
def test_the_mean_is_of_applied_gradients(name):
  trace = simulation.simulate(
    FATES[name],
    num_workers=7,
    num_gradients=101,
    compute=simulation.exponential(1.0),
  )
  summary = traces.summarize(trace)
  axes = reports.plot_staleness(trace).axes[0]
  assert f'mean {summary.staleness.mean:.2f}, ' in axes.get_title()
  dropped = sum(
    count
    for fate, count in summary.fates.items()
    if fate not in (traces.Fate.APPLIED, traces.Fate.PENDING)
  )
  expected = {
    'applied': summary.fates[traces.Fate.APPLIED],
    'pending': summary.fates[traces.Fate.PENDING],
    'dropped': dropped,
  }
  heights = {
    bars[0].get_label(): sum(bar.get_height() for bar in bars)
    for bars in axes.containers
  }
  expected = {kind: count for kind, count in expected.items() if count}
  assert heights == expected
  texts = [text.get_text() for text in axes.get_legend().get_texts()]
  assert sorted(texts) == sorted(expected)


@pytest.mark.parametrize(
  'plot',
  [
    reports.plot_ages,
    reports.plot_members,
    reports.plot_staleness,
    reports.plot_timeline,
  ],
)
def test_a_trace_without_gradients(plot, tmp_path):
  """Nothing was recorded, or every learner died before its first gradient."""
  died = _simulate(
    protocols.asynchronous(), failures=[(0.5, i) for i in range(3)]
  )
  assert (died.num_gradients, len(died)) == (0, 3)
  empty = traces.Trace(np.zeros(0, traces.RECORD), {'num_workers': 2})
  for trace in (empty, died):
    figure = plot(trace, tmp_path / 'picture.png')
    assert (tmp_path / 'picture.png').read_bytes().startswith(b'\x89PNG')
  if plot in (reports.plot_staleness, reports.plot_timeline):
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ['no gradients']


# --- Nodes.


def _simulate_nodes(strategy, failures=(), num_steps=5):
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
  trace = _simulate_nodes(strategy, [simulation.Failure(1.5, 1, 3.0)])
  plot(trace, tmp_path / 'picture.png')
  data = (tmp_path / 'picture.png').read_bytes()
  assert data.startswith(b'\x89PNG')
  assert len(data) > 5_000


def _list_bars_of(trace, kind, **options):
  """Node, start and end of each bar of a kind."""
  options = {'num_rounds': 1e3, **options}
  return _list_bars(reports.plot_timeline(trace, **options).axes[0]).get(
    kind, []
  )


@every_strategy
def test_a_bar_for_each_step_and_for_each_mix_that_took_time(strategy):
  trace = _simulate_nodes(strategy)
  steps, waits = (_list_bars_of(trace, kind) for kind in ('computes', 'waits'))
  mixes = trace.mixes[trace.mixes['end_time'] > trace.mixes['start_time']]
  num_mixes = len(set(zip(mixes['replica'], mixes['group'], strict=True)))
  assert (len(steps), len(waits)) == (4 * 5, num_mixes)
  times = traces.summarize(trace).workers.times
  for bars, seconds in ((steps, times.busy), (waits, times.waiting)):
    length = sum(end - start for _, start, end in bars)
    assert length == pytest.approx(seconds.sum())


def test_deaths_are_drawn():
  failures = [simulation.Failure(1.5, 1, 3.0), simulation.Failure(2.0, 2)]
  trace = _simulate_nodes(gossip.PushSum(), failures)
  (first, second) = _list_bars_of(trace, 'is gone')
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
  assert _list_bars_of(trace, 'is gone') == [(1, 2.5, 4.0)]
  axes = reports.plot_members(trace).axes[0]
  marks = {line.get_label(): line for line in axes.lines}
  assert marks['left or lost'].get_xydata().tolist() == [[2.5, 1]]
  assert marks['came'].get_xydata().tolist() == [[4.0, 1]]


def test_deaths_of_real_nodes_are_drawn():
  """Node 0 ends, 1 is killed, 2 is killed and comes back, 3 is stopped."""
  kind = traces.Kind
  rows = [
    *((node, kind.STEP, 10 + node) for node in range(4)),
    (0, kind.LOST, 14.5),
    (1, kind.LOST, 14.75),  # A message of node 1, in the file of another node.
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
  gone = _list_bars_of(trace, 'is gone')  # In seconds since the first step.
  assert [bar[:2] for bar in gone] == [(1, 1.0), (2, 2.0)]
  assert gone[0][2] > 100
  assert gone[1][2] == 7.0


def test_real_nodes_that_may_be_alive_are_not_drawn_as_dead():
  trace = _simulate_nodes(gossip.Pull(), num_steps=20)
  header = {**trace.header, 'is_recorded': True}  # No node has ended yet.
  trace = traces.Trace(trace.records[:60], header)
  assert not _list_bars_of(trace, 'is gone')


def test_only_the_first_nodes_and_rounds_are_drawn():
  trace = _simulate_nodes(gossip.Push(), num_steps=40)
  arguments = {'max_workers': 2, 'num_rounds': 8.0}
  bars = _list_bars_of(trace, 'computes', **arguments)
  assert {node for node, _, _ in bars} == {0, 1}
  assert 14 <= len(bars) <= 20
  axes = reports.plot_timeline(trace, **arguments).axes[0]
  assert axes.get_xlim()[1] == pytest.approx(8, rel=0.1)


def test_a_bar_for_each_age_and_lag():
  trace = _simulate_nodes(gossip.Pull(), num_steps=30)
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
  left, right = reports.plot_ages(_simulate_nodes(gossip.AllReduce())).axes
  assert not left.patches
  assert not right.patches
