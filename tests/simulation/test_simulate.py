"""`simulate`: arguments, reproducibility, headers, memory."""

import json
import tracemalloc

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from tests.simulation import cases

Kind = traces.Kind

# Arguments that are refused whatever the strategy.
BAD = [
  ({'num_workers': 0}, 'num_workers must be .* at least 1, got 0'),
  ({'num_workers': 2.5}, 'num_workers must be a whole number.* got 2.5'),
  ({'num_workers': None}, 'num_workers must be given: .* learners or nodes'),
  ({'num_gradients': 0}, 'num_gradients must be .* at least 1, got 0'),
  ({'num_gradients': 1.5}, 'num_gradients must be a whole number .* got 1.5'),
  ({'batch': 0}, 'batch must be .* at least 1, got 0'),
  ({'seed': -1}, 'seed must be .* at least 0, got -1'),
  ({'seed': 2**64}, r'seed must be below 2\*\*64, got 18446744073709551616'),
  ({'overlap': 1}, 'overlap must be True or False, got 1'),
  ({'overlap': 'no'}, "overlap must be True or False, got 'no'"),
  ({'compute': 1.0}, r'compute must be a ComputeTime, .*constant\(1.0\)'),
  ({'network': 3}, r'network must be a Network, .* make_network.* got 3'),
  ({'network': simulation.Network(latency=-1)}, 'latency must be finite'),
  (
    {'network': simulation.Network(num_shards=1.5)},
    'num_shards must be a whole number',
  ),
  (
    {'compute': simulation.with_speeds(simulation.constant(1.0), [1.0] * 3)},
    'There are 3 speeds, but 4 workers',
  ),
  (
    {'failures': [simulation.Failure(1.0, 1.5)]},
    'worker of a failure must be a whole number.* got 1.5',
  ),
  ({'failures': [(1.0,)]}, r'A failure is \(time, worker\) or .* got \(1.0,\)'),
  ({'failures': [(1.0, 1, 2.0, 3)]}, 'A failure is .* got .*2.0, 3'),
  ({'failures': [7]}, 'A failure is .* got 7'),
  ({'failures': 7}, 'failures must be a list of Failure, got 7'),
  ({'failures': [('x', 1)]}, "time of a failure must be a number, got 'x'"),
  (
    {'failures': [simulation.Failure(1.0, 4)]},
    'names worker 4, but there are 4: they are numbered from 0 to 3',
  ),
  (
    {'failures': [simulation.Failure(2.0, 1, 1.0)]},
    'Worker 1 cannot fail from 2.0 to 1.0',
  ),
  (
    {'failures': [(2.0, 1, 5.0), (3.0, 1)]},
    'Worker 1 cannot fail from 3.0 to inf: .* up from 5.0',
  ),
  (
    {'strategy': 'pull'},
    "strategy must be a protocol, .*'pull'",
  ),
]


@pytest.mark.parametrize(
  'strategy', [protocols.asynchronous(), gossip.Pull()], ids=['server', 'nodes']
)
@pytest.mark.parametrize(('arguments', 'message'), BAD)
def test_bad_arguments(strategy, arguments, message):
  good = {'strategy': strategy, 'num_workers': 4, 'num_gradients': 10}
  with pytest.raises(ValueError, match=message):
    simulation.simulate(**{**good, **arguments})


@pytest.mark.parametrize(
  ('strategy', 'arguments', 'message'),
  [
    (protocols.asynchronous, {}, 'strategy must be .* got <class'),
    (gossip.Pull, {}, r'strategy must be .*Pull\(\), got <class'),
    (
      protocols.ramp_up(protocols.rennala(2), 10),
      {'overlap': True},
      'With overlap a learner pulls before',
    ),
    (
      protocols.ramp_up(protocols.backup(1), 10),
      {'overlap': True},
      'With overlap a learner pulls before',
    ),
    (
      protocols.hardsync(),
      {'overlap': True},
      'With overlap a learner pulls before .* Use overlap=False',
    ),
    (
      protocols.ramp_up(protocols.constant_delay(3), 10),
      {'compute': cases.TIMES['normal']},
      'A constant delay comes from equal, constant times',
    ),
    (
      protocols.constant_delay(3),
      {'compute': cases.TIMES['normal']},
      r'got compute=normal.* With other times use asynchronous\(\)',
    ),
    (
      protocols.constant_delay(3),
      {'failures': [(1.0, 1)]},
      'A constant delay comes from equal.* got .*1 failures',
    ),
    (protocols.softsync(9), {}, 'n must be at most num_learners=4'),
    *(
      (
        protocols.softsync(2),
        {name: 0.5},
        'are for peer strategies: .* at once',
      )
      for name in ('detection_seconds', 'checkpoint_seconds', 'restart_seconds')
    ),
    (gossip.Pull(), {'overlap': True}, 'overlap is for learners'),
    (
      gossip.Pull(),
      {'restart_seconds': -1.0},
      'restart_seconds must be finite',
    ),
    (
      gossip.Pull(),
      {'checkpoint_seconds': 0.0},
      'checkpoint_seconds must be above 0, got 0.0',
    ),
    (
      gossip.Pull(peers=gossip.topologies.ring(5)),
      {},
      'The topology has 5 nodes, but there are 4',
    ),
    (
      gossip.Pairs(peers=gossip.topologies.ring(4)),
      {},
      'Pairs need a topology with one peer',
    ),
  ],
)
def test_arguments_that_a_strategy_refuses(strategy, arguments, message):
  with pytest.raises(ValueError, match=message):
    simulation.simulate(
      strategy, **{'num_workers': 4, 'num_gradients': 10, **arguments}
    )


@pytest.mark.parametrize(
  'strategy', [protocols.asynchronous(), gossip.Pull(period=np.int64(2))]
)
def test_numbers_may_be_numpy_scalars(strategy):
  trace = simulation.simulate(
    strategy,
    num_workers=np.int32(3),
    num_gradients=np.int64(12),
    batch=np.int16(2),
    seed=np.uint8(5),
  )
  assert trace.header['num_workers'] == 3
  assert type(trace.header['num_workers']) is int
  assert trace.num_gradients == 12


def test_nodes_make_equally_many_steps():
  trace = simulation.simulate(gossip.Pull(), num_workers=4, num_gradients=9)
  assert np.bincount(trace.worker).tolist() == [3] * 4
  assert trace.header['num_steps'] == 3


@pytest.mark.parametrize(
  ('make', 'num_workers', 'fastest'),
  [
    (protocols.asynchronous, 100, 1.0),
    (protocols.asynchronous, 100, 1000.0),
    (protocols.asynchronous, 20_000, 1.0),
    (lambda: protocols.rennala(5), 100, 1.0),
  ],
)
def test_memory_is_about_that_of_the_trace(make, num_workers, fastest):
  speeds = [1.0] * (num_workers - 1) + [fastest]
  compute = simulation.with_speeds(simulation.normal(1.0, 0.2), speeds)
  tracemalloc.start()
  try:
    trace = simulation.simulate(
      make(), num_workers=num_workers, num_gradients=100_000, compute=compute
    )
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # Blocks of durations that are kept, and the state of each learner.
  fixed = (1 << 26) + 1000 * num_workers
  assert peak < 3.5 * trace.records.nbytes + fixed


STRATEGIES = {
  **cases.STRATEGIES,
  'ssp': protocols.ssp(2),
  'softsync': protocols.softsync(2),
}


@pytest.mark.parametrize('name', STRATEGIES)
def test_the_same_seed_gives_the_same_trace(name):
  first, second, other = (
    simulation.simulate(
      STRATEGIES[name],
      num_workers=cases.NUM_NODES,
      num_gradients=200,
      compute=cases.TIMES['lognormal'],
      network=cases.PEER_NETWORKS['slow'],
      seed=seed,
    )
    for seed in (3, 3, 4)
  )
  assert first == second
  assert not np.array_equal(first.end_time, other.end_time)


@cases.every_strategy
def test_equal_times_are_ordered_by_node(name):
  """All nodes step at once: their steps are recorded in order."""
  compute = simulation.constant(1.0)
  trace = cases.run_peers(name, num_steps=1, compute=compute)
  np.testing.assert_array_equal(trace.worker, np.arange(cases.NUM_NODES))
  assert trace.duration == 1


@cases.every_strategy
def test_fields_without_use_are_0(name):
  failures = simulation.draw_failures(cases.NUM_NODES, 20.0, 6.0, 2.0)
  trace = cases.run_peers(name, 'slow', 8, failures=failures)
  used = {
    'fate': [],
    'source': [Kind.MIX, Kind.MOVE, Kind.LOST],
    'group': [Kind.MIX, Kind.MEAN],
    'samples': [Kind.STEP],
    'read_version': [Kind.STEP, Kind.LOST, Kind.RESTART],
    'source_version': [Kind.MIX, Kind.MOVE],
    'source_step': [Kind.MIX, Kind.MOVE],
    'stands': [],
    'own_weight': [Kind.MIX, Kind.MOVE, Kind.MEAN],
    'weight': [Kind.MIX, Kind.MOVE, Kind.MEAN],
    'compute_time': [],
    'release_time': [],
  }
  for field, kinds in used.items():
    is_unused = ~np.isin(trace.records['kind'], kinds)
    assert not np.any(trace.records[field][is_unused]), field
  assert np.all(trace.records['worker'] >= 0)
  grouped = trace.of_kind(Kind.MIX, Kind.MEAN)['group']
  assert np.all(grouped > 0)
  for node in range(cases.NUM_NODES):
    own = trace.of_replica(node)
    np.testing.assert_array_equal(
      own['incarnation'], np.cumsum(own['kind'] == Kind.RESTART)
    )


def test_same_on_every_machine():
  """A change of these numbers changes all runs."""
  network = simulation.make_network(
    100,
    latency=0.05,
    bandwidth=1e4,
    server_bandwidth=5e3,
    server_time=simulation.gamma(0.02, 2.0),
  )
  trace = simulation.simulate(
    protocols.ssp(1),
    num_workers=3,
    num_gradients=8,
    compute=simulation.exponential(1.0),
    network=network,
    failures=simulation.draw_failures(3, 5.0, 3.0, 1.0, seed=2024),
    seed=2024,
  )
  leave, join = Kind.LEAVE, Kind.JOIN
  members = trace.of_kind(leave, join)
  assert members['kind'].tolist() == [leave, join] * 4 + [leave]
  assert members['worker'].tolist() == [2] * 4 + [1] * 5
  assert trace.worker.tolist() == [1, 1, 2, 0, 0, 1, 0, 2]
  assert trace.read_version.tolist() == [0, 1, 1, 0, 4, 4, 5, 3]
  assert trace.clock.tolist() == list(range(8))
  nan = float('nan')
  times = [
    (0.9399326850936777, 0.9604366205913585),
    (1.7657238507472102, nan),
    (1.8797437304166091, 1.8933750609263609),
    (2.4432584135486493, 2.4600479050145165),
    (3.756396245375796, 3.7669576782021976),
    (4.0804805864638425, 4.110384049864603),
    (5.042896150903527, 5.864794886335011),
    (5.842329047491107, 5.864794886335011),
  ]
  np.testing.assert_allclose(
    np.stack([trace.end_time, trace.release_time], axis=-1),
    times,
    rtol=1e-12,
  )


def test_the_header_holds_the_arguments():
  network = cases.NETWORKS['slow']._replace(
    server_time=simulation.exponential(0.01)
  )
  trace = simulation.simulate(
    protocols.asynchronous(),
    num_workers=3,
    num_gradients=5,
    network=network,
    failures=[(9.0, 1)],
    overlap=True,
    seed=2**64 - 1,
  )
  header = json.loads(json.dumps(trace.header))
  expected = {**network._asdict(), 'server_time': 'exponential(0.01)'}
  expected |= {'bandwidth': 'inf', 'server_bandwidth': 'inf'}
  assert header['network'] == expected
  assert header['numpy'] == np.__version__
  assert header['num_failures'] == 1
  assert header['num_missing'] == 0
  assert header['overlap'] is True
  assert header['seed'] == 2**64 - 1


def test_the_header_of_nodes_holds_the_arguments():
  trace = cases.simulate_peers(
    gossip.Pull(2), num_workers=4, num_steps=3, failures=[(1.5, 2)]
  )
  assert trace.header['numpy'] == np.__version__
  assert trace.header['num_failures'] == 1
  assert trace.header['num_missing'] == 2
  assert trace.header['network'] == simulation.Network().to_header()
  for period, averages in ((1, 'gradients'), (2, 'weights')):
    trace = cases.simulate_peers(
      gossip.AllReduce(period=period), num_workers=2, num_steps=2
    )
    assert trace.header['averages'] == averages
    assert trace.header['num_missing'] == 0


def test_steps_that_a_joiner_takes_over_are_not_missing():
  trace = cases.simulate_peers(
    gossip.Pull(), num_workers=4, num_steps=8, failures=[(1.5, 2, 4.0)]
  )
  assert trace.num_gradients < 4 * 8
  assert trace.header['num_missing'] == 0


def test_overlap_changes_read_versions_but_no_times():
  first, second = (
    simulation.simulate(
      protocols.softsync(2),
      num_workers=6,
      num_gradients=100,
      compute=cases.TIMES['normal'],
      network=cases.NETWORKS['shared'],
      overlap=overlap,
    )
    for overlap in (False, True)
  )
  np.testing.assert_array_equal(first.end_time, second.end_time)
  np.testing.assert_array_equal(first.worker, second.worker)
  assert np.any(first.read_version != second.read_version)


@pytest.mark.parametrize(
  ('make', 'per_gradient'),
  [
    (protocols.asynchronous, 7),
    (lambda: protocols.rennala(3), 7),
    (lambda: protocols.downpour(2, 4), 14),
  ],
)
def test_samples_are_counted_in_batches(make, per_gradient):
  trace = simulation.simulate(
    make(),
    num_workers=5,
    num_gradients=100,
    compute=cases.TIMES['exponential'],
    batch=7,
  )
  is_applied = trace.fate == protocols.Fate.APPLIED
  np.testing.assert_array_equal(
    trace.samples, per_gradient * np.cumsum(is_applied)
  )


def test_samples_of_nodes_are_counted_in_batches():
  trace = cases.simulate_peers(
    gossip.Push(), num_workers=3, num_steps=4, batch=7
  )
  np.testing.assert_array_equal(trace.samples, 7 * np.arange(1, 13))


def test_a_ramp_up_knows_the_learners_of_a_constant_delay():
  trace = simulation.simulate(
    protocols.ramp_up(protocols.constant_delay(3), 10), num_gradients=100
  )
  assert trace.header['num_workers'] == 4
  np.testing.assert_array_equal(trace.staleness[30:], 3)
