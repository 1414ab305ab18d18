"""Pages on runs of nodes: rates, traffic, ages, and several side by side."""

import dataclasses

import numpy as np
import pytest

from jasgd import gossip
from jasgd import reports
from jasgd import simulation
from jasgd import traces
from tests.experiment import own_strategies
from tests.reports import cases

pytestmark = pytest.mark.usefixtures('blank_pictures')

SIZE = 1000.0  # Bytes of the weights.


def _simulate(strategy, *, slowest=1.0, num_nodes=4, latency=0.0):
  """The second half of the nodes is slower by a factor."""
  half = num_nodes // 2
  return simulation.simulate(
    strategy,
    num_workers=num_nodes,
    num_gradients=40 * num_nodes,
    compute=simulation.with_speeds(
      simulation.constant(),
      [1.0] * half + [1 / slowest] * (num_nodes - half),
    ),
    network=simulation.Network(
      latency=latency, bytes_per_push=SIZE, bytes_per_pull=SIZE
    ),
  )


def _write(root, trace, **settings):
  return cases.write_run(root, {'strategy': settings}, trace)


@pytest.mark.parametrize(
  ('strategy', 'slow'),
  [(gossip.Pull(), 1.0), (gossip.Elastic(), 1.0), (gossip.AllReduce(), 1 / 3)],
)
def test_slow_nodes_hold_up_only_an_all_reduce(strategy, slow, tmp_path):
  runs = [
    _write(tmp_path / f'{slowest}', _simulate(strategy, slowest=slowest), s=n)
    for n, slowest in enumerate((1.0, 3.0))
  ]
  rates = reports.measure_step_rates(traces.Trace.load(runs[1] / 'trace'))
  np.testing.assert_allclose(rates, [slow, slow, 1 / 3, 1 / 3])
  page = cases.Page(reports.write_report(runs, tmp_path / 'both.html'))
  assert page.column('Gradients per second', 1) == dict.fromkeys('0123', '1')
  disturbed = page.column('Gradients per second', 2)
  fast = '1 (100%)' if slow == 1 else '0.3333 (33%)'
  assert disturbed == {
    **dict.fromkeys('01', fast),
    **dict.fromkeys('23', '0.3333 (33%)'),
  }
  assert (tmp_path / 'both/rates.png').exists()


def test_rates_leave_out_the_time_before_the_first_step():
  records = traces.make_records(
    kind=traces.Kind.STEP,
    worker=[0, 0, 0, 1],
    end_time=[100.0, 101.0, 102.0, 5.0],
  )
  trace = traces.Trace(records, {'num_workers': 3})
  rates = reports.measure_step_rates(trace)
  np.testing.assert_array_equal(rates, [1.0, np.nan, np.nan])


def test_the_time_in_which_nobody_was_there_does_not_count(tmp_path):
  """Both nodes stop at 3 and are back at 50 and 51; later, one of them dies."""
  restart, step = traces.Kind.RESTART, traces.Kind.STEP
  rows = [
    *[(node, step, end) for end in (1.0, 2.0, 3.0) for node in (0, 1)],
    *[(0, restart, 50.0), (1, restart, 51.0)],
    *[(node, step, end) for end in (52.0, 53.0) for node in (0, 1)],
    *[(0, step, 54.0), (0, step, 55.0), (1, restart, 55.0)],
    *[(node, step, 56.0) for node in (0, 1)],
  ]
  node, kind, end = zip(*rows, strict=True)
  records = traces.make_records(
    kind=kind,
    replica=node,
    worker=node,
    start_time=np.array(end) - 1,
    end_time=end,
    updates=1,
  )
  trace = traces.Trace(records, {'num_workers': 2, 'is_recorded': True})
  back_at, seconds = traces.statistics.find_downtimes(trace)
  assert back_at.tolist() == [50.0, 51.0, 55.0]
  assert seconds.tolist() == [47.0, 1.0, 0.0]
  # From 1 to 56, without 48.
  rates = reports.measure_step_rates(trace)
  np.testing.assert_allclose(rates, [7 / 7, 5 / 7])
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  # 14 steps in 8 seconds.
  assert page.column('Results')['gradients per second'] == '1.75'


@pytest.mark.parametrize(
  ('strategy', 'sent', 'busiest', 'centre'),
  [
    # A ring: each node sends and receives 2 (n - 1) / n of the weights.
    (gossip.AllReduce(), 1.5, 3.0, None),
    (gossip.AllReduce(period=2), 0.75, 1.5, None),
    (gossip.Elastic(), 1.0, 2.0, 8.0),
    (gossip.Pull(peers=gossip.topologies.ring(4)), 2.0, 4.0, None),
  ],
)
def test_traffic_beside_that_of_a_server(
  strategy, sent, busiest, centre, tmp_path
):
  run = _write(tmp_path, _simulate(strategy))
  traffic = cases.Page(reports.write_report(run)).column('Traffic')
  values = {name: float(text) for name, text in traffic.items()}
  assert values['the weights'] == 1.0  # kB.
  assert values['sent by a node, per gradient'] == pytest.approx(sent)
  assert values['received by a node, per gradient'] == pytest.approx(sent)
  assert values["through the busiest node's link, per round"] == pytest.approx(
    busiest
  )
  assert values.get("through the centre's link, per round") == centre
  server = "with a server: through the server's link, per round"
  assert values[server] == 2 * 4


def test_results_of_elastic_averaging_have_centre_and_nodes(tmp_path):
  trace = _simulate(gossip.Elastic(), latency=0.1)
  lines = [
    (
      40 * clock,
      {
        'epoch': clock,
        'train/loss': 1.0,
        'test/loss': 0.9,
        'centre/loss': 0.8,
        'local/loss': 0.95,
        'gossip/consensus_error': 0.1,
        'gossip/age_mean': 0.5,
        'gossip/age_max': 2.0,
        'gossip/lag_mean': -1.0,
      },
    )
    for clock in (1, 2, 4)
  ]
  cases.write_run(tmp_path, {'strategy': {'name': 'elastic'}}, trace, lines)
  page = cases.Page(reports.write_report(tmp_path))
  assert page.column('Results')['end'] == 'at step 160'
  assert page.column('Results')['centre/loss, final'].startswith('0.8 (step')
  assert page.column('Results')['local/loss, final'].startswith('0.95 (step')
  assert 'with 160 steps' in page.paragraphs[0]


def test_an_own_strategy_of_real_nodes(tmp_path):
  trace = _record(_simulate(own_strategies.Neighbour(period=2)), compiles=False)
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  assert 'eighbour(2): an exchange every 2 steps' in page.paragraphs[0]
  # An answer at each of 80 exchanges; messages may be mixed together.
  assert 80 < int(page.column('Results')['mixes']) <= 160
  assert (tmp_path / 'report' / 'members.png').exists()


def test_nodes_that_are_lost_are_named(tmp_path):
  trace = simulation.simulate(
    gossip.AllReduce(),
    num_workers=3,
    num_gradients=30,
    failures=[(2.5, 1, 4.0)],
    checkpoint_seconds=1.0,
  )
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  results = page.column('Results')
  assert results['nodes that left or were lost'] == '1 (node 1 at step 2)'
  assert (
    results['nodes that joined late or came back'] == '1 (node 1 at step 2)'
  )
  assert 'Before the end, 1 node left or was lost.' in page.paragraphs[0]


@pytest.mark.parametrize('last', [3.0, 9.0])
def test_report_summary_and_prediction_agree_on_who_died(last, tmp_path):
  """Node 1 stops at 2; when node 0 has gone on to 3, it may be at work."""
  rows = [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0), (0, last)]
  node, end = map(np.array, zip(*rows, strict=True))
  records = traces.make_records(
    kind=traces.Kind.STEP,
    worker=node,
    step=[1, 1, 2, 2, 3],
    start_time=end - 1,
    end_time=end,
  )
  config = gossip.Pull().to_config()
  header = {'num_workers': 2, 'is_recorded': True, 'strategy': config}
  trace = traces.Trace(records, header)
  num_dead = int(last > 3)
  assert traces.summarize(trace).num_deaths == num_dead
  predicted = simulation.predict(trace)
  assert traces.summarize(predicted).num_deaths == num_dead
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  named = page.column('Results').get('nodes that left or were lost')
  assert named == ('1 (node 1 at step 2)' if num_dead else None)


def test_lost_mass_is_in_the_report(tmp_path):
  trace = simulation.simulate(
    gossip.PushSum(),
    num_workers=4,
    num_gradients=80,
    failures=[simulation.Failure(5.5, 3)],
  )
  lost = traces.summarize(trace).lost_mass
  page = cases.Page(reports.write_report(_write(tmp_path, trace)))
  assert lost > 0
  assert page.column('Results')['mass lost'].startswith(f'{lost:.4g} (')


def test_messages_without_room_are_in_the_report(tmp_path):
  trace = _simulate(gossip.Push())
  for count in (0, 7):
    lines = [(160, {'epoch': 1.0, 'gossip/refused_full': count})]
    folder = tmp_path / str(count)
    run = cases.write_run(folder, {'strategy': {}}, trace, lines)
    found = cases.Page(reports.write_report(run)).column('Results')
    said = found.get('messages refused, as there was no room')
    assert said == ('7' if count else None)


def _record(trace, compiled=50.0, compiles=True):
  """A trace as of real nodes, which compile before or in their first step."""
  records = trace.records.copy()
  is_first = (records['kind'] == traces.Kind.STEP) & (records['step'] == 1)
  records['end_time'] += compiled
  records['start_time'][~is_first | (not compiles)] += compiled
  header = {**trace.header, 'is_recorded': True}
  return dataclasses.replace(trace, records=records, header=header)


def test_a_timeline_of_real_nodes_starts_when_all_have_compiled():
  trace = _record(_simulate(gossip.Pull()))
  (axes,) = reports.plot_timeline(trace).axes
  start, end = axes.get_xlim()
  assert start == pytest.approx(51.0)
  assert end - start == pytest.approx(8.0, rel=0.1)


def test_the_time_before_real_nodes_step_does_not_count(tmp_path):
  trace = _simulate(gossip.AllReduce())
  plain = _write(tmp_path / 'plain', trace)
  real = _write(tmp_path / 'real', _record(trace, compiles=False))
  pages = [cases.Page(reports.write_report(run)) for run in (plain, real)]
  names = ('Table of nodes', 'Traffic', 'Gradients per second')
  for name in names:
    assert pages[0].tables[name] == pages[1].tables[name]
  rates = [page.column('Results')['gradients per second'] for page in pages]
  assert rates == ['4', '4']
  assert '160 steps and 160 mixes in 40 s' in pages[1].paragraphs[0]


def test_a_real_run_is_finished_once_it_has_a_result(tmp_path):
  trace = _simulate(gossip.Pull())
  header = {**trace.header, 'is_recorded': True}
  lines = [(160, {'epoch': 1.0, 'train/loss': 1.0})]
  trace = dataclasses.replace(trace, header=header)
  run = cases.write_run(tmp_path, {'strategy': {}}, trace, lines)
  page = cases.Page(reports.write_report(run))
  assert page.column('Results')['end'] == 'unfinished: step 160'
  (run / 'result.json').write_text('{"clock": 160}')
  page = cases.Page(reports.write_report(run))
  assert page.column('Results')['end'] == 'at step 160'
