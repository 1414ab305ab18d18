"""Learners that push and fetch after fixed numbers of steps."""

import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from tests.simulation import cases


def test_downpour_fetches_after_n_fetch_steps():
  trace = simulation.simulate(
    protocols.downpour(2, 6), num_workers=3, num_gradients=90
  )
  own = trace.read_version[trace.worker == 0]
  # Three pushes on each fetch.
  assert all(len(set(own[i : i + 3])) == 1 for i in range(0, 30, 3))
  np.testing.assert_allclose(trace.compute_time, 2.0)


def test_between_fetches_nothing_is_communicated():
  """On a free network a downpour learner computes all the time."""
  trace = simulation.simulate(
    protocols.downpour(1, 3), num_workers=2, num_gradients=12, overlap=True
  )
  np.testing.assert_array_equal(
    trace.end_time - trace.start_time, trace.compute_time
  )
  # With overlap too, the read clock moves with fetches alone.
  own = trace.read_version[trace.worker == 0]
  assert len(set(own[:3])) == len(set(own[3:6])) == 1


@pytest.mark.parametrize(
  ('n_push', 'n_fetch'), [(1, 3), (2, 6), (2, 3), (3, 2), (4, 1)]
)
@pytest.mark.parametrize('latency', [0.0, 0.25])
def test_pushes_and_fetches_come_after_n_steps(n_push, n_fetch, latency):
  """Dean's loop: fetch if step mod n_fetch is 0, push if step mod n_push is."""
  trace = simulation.simulate(
    protocols.downpour(n_push, n_fetch),
    num_workers=3,
    num_gradients=60,
    network=simulation.Network(latency=latency, bytes_per_pull=10.0),
  )
  own = trace.records[trace.records['worker'] == 1]
  is_fetch = own['kind'] == traces.Kind.FETCH
  fetches = own[is_fetch]
  np.testing.assert_array_equal(
    fetches['step'], n_fetch * np.arange(len(fetches))
  )
  np.testing.assert_array_equal(fetches['read_version'], fetches['version'])
  np.testing.assert_array_equal(
    own['step'][~is_fetch], n_push * np.arange(1, 21)
  )
  for index in np.flatnonzero(~is_fetch):
    # A push carries the clock of the last fetch before it.
    before = own[:index][is_fetch[:index]]
    assert own['read_version'][index] == before['read_version'][-1]
    assert own['compute_time'][index] == n_push
    num_steps = own['step'][index] - before['step'][-1]
    assert 0 < num_steps <= n_fetch
  received = traces.statistics.count_traffic(trace).received
  assert received[1] == 10 * len(fetches)


def test_a_push_and_a_fetch_at_once_need_no_record_of_their_own():
  trace = simulation.simulate(
    protocols.downpour(3, 3), num_workers=2, num_gradients=10
  )
  assert np.all(trace.records['kind'] == traces.Kind.PUSH)
  np.testing.assert_allclose(trace.compute_time, 3.0)
  assert trace.header['steps_per_push'] == trace.header['steps_per_fetch'] == 3


@cases.every_network
@pytest.mark.parametrize(
  ('n_push', 'n_fetch'), [(1, 2), (2, 1), (2, 3), (3, 2), (1, 5)]
)
@pytest.mark.parametrize('mean_up', [0.0, 15.0])
def test_a_fetch_is_answered_after_the_update_of_its_clock(
  network_name, n_push, n_fetch, mean_up
):
  """The server sends weights only after it has computed their update."""
  failures = []
  if mean_up:
    failures = simulation.draw_failures(5, 50.0, mean_up, 2.0, seed=1)
  network = cases.NETWORKS[network_name]
  if network_name != 'free':  # A server that is busy most of the time.
    network = network._replace(server_time=0.3)
  trace = simulation.simulate(
    protocols.downpour(n_push, n_fetch),
    num_workers=5,
    num_gradients=200,
    compute=cases.TIMES['exponential'],
    network=network,
    failures=failures,
  )
  made_at = np.zeros(trace.num_updates + 1)
  pushes = trace.of_kind(traces.Kind.PUSH)
  pushes = pushes[pushes['updates'] > 0]
  made_at[pushes['version']] = pushes['release_time']
  fetches = trace.of_kind(traces.Kind.FETCH)
  assert len(fetches) > 30
  assert np.all(fetches['release_time'] >= made_at[fetches['read_version']])
  # The outgoing link serves in the order of time.
  assert np.all(np.diff(fetches['release_time']) >= 0)
