"""Time models of gradients."""

import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from tests.simulation import cases


@cases.every_time
def test_durations_depend_on_step_and_learner_alone(name):
  time = cases.TIMES[name]
  whole = time.table(3, 0, 4000, 7)
  assert whole.shape == (4000, 7)
  assert np.all(whole > 0)
  np.testing.assert_array_equal(time.table(3, 1000, 50, 7), whole[1000:1050])
  if name not in ('constant', 'recorded', 'slow spells'):
    assert np.any(time.table(4, 0, 10, 7) != whole[:10])


@pytest.mark.parametrize(
  ('time', 'mean'),
  [
    (simulation.normal(2.0, 0.4), 2.0),
    (simulation.lognormal(2.0, 0.5), 2.0),
    (simulation.exponential(2.0), 2.0),
    (simulation.gamma(2.0, 10.0), 2.0),
    (simulation.pareto(1.0, 3.0), 1.5),
    (simulation.with_slow_minority(simulation.constant(1.0), 0.5, 3.0), 2.0),
    (simulation.with_slow_spells(simulation.constant(1.0), 10, 5, 3.0), 2.0),
  ],
)
def test_mean_times(time, mean):
  np.testing.assert_allclose(time.table(0, 0, 5000, 20).mean(), mean, rtol=0.02)


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: simulation.constant(0), 'mean must be finite and above 0, got 0'),
    (lambda: simulation.normal(1, -1), 'std must be .* got -1'),
    (lambda: simulation.pareto(1, 0), 'exponent must be .* got 0'),
    (lambda: simulation.recorded([]), r'shape \(0,\)'),
    (lambda: simulation.recorded([1, -1]), 'finite and above 0'),
    (
      lambda: simulation.with_speeds(simulation.constant(), [1, 0]),
      'speeds must be',
    ),
    (
      lambda: simulation.with_slow_minority(simulation.constant(), 2, 3),
      r'fraction must be in \[0, 1\], got 2',
    ),
    (
      lambda: simulation.with_slow_spells(simulation.constant(), 5, 6, 2),
      'length must be from 0 to period=5, got 6',
    ),
    (
      lambda: simulation.with_slow_spells(simulation.constant(), 5.5, 2, 2),
      'period must be a whole number of at least 1, got 5.5',
    ),
    (
      lambda: simulation.with_slow_spells(simulation.constant(), 5, 2.5, 2),
      'length must be a whole number of at least 0, got 2.5',
    ),
    (lambda: simulation.constant('1'), "mean must be a number, got '1'"),
    (lambda: simulation.constant(None), 'mean must be a number, got None'),
    (lambda: simulation.gamma(1, True), 'shape must be a number, got True'),
    (lambda: simulation.make_network(0), 'num_parameters must be .* got 0'),
  ],
)
def test_bad_times(build, message):
  with pytest.raises(ValueError, match=message):
    build()


# Entries (3, 0) and (3, 4), and of another block (4000, 0) and (4000, 4).
PINNED = {
  'constant': (1, 1, 1, 1),
  'normal': (1.07608642079, 1.45239183368, 0.622686345604, 1.10119491016),
  'lognormal': (0.98446757509, 4.43517615715, 0.160533181801, 1.08847718415),
  'exponential': (
    *(0.141692085317, 2.98954921523),
    *(0.528465511881, 0.000451284696209),
  ),
  'gamma': (1.32172922531, 1.4401224895, 1.50951497386, 1.00807474942),
  'pareto': (1.05831374424, 3.30626676097, 1.23538937619, 1.00018053017),
  'recorded': (1, 1, 2, 2),
  'slow minority': (
    *(1.07608642079, 7.26195916842),
    *(0.622686345604, 5.50597455081),
  ),
  'slow spells': (3, 1, 3, 1),
}


@cases.every_time
def test_same_on_every_machine(name):
  """A change of these numbers changes all runs."""
  time = cases.TIMES[name]
  drawn = [time.table(2024, step, 1, 5)[0, [0, 4]] for step in (3, 4000)]
  np.testing.assert_allclose(np.ravel(drawn), PINNED[name], rtol=1e-10)


def test_normal_is_truncated_not_reflected():
  """The mean of N(1, 1), truncated above 0, is 1 + phi(1) / Phi(1) = 1.2876."""
  times = simulation.normal(1.0, 1.0).table(0, 0, 20_000, 20)
  np.testing.assert_allclose(times.mean(), 1.2876, rtol=0.005)


@pytest.mark.parametrize(
  ('time', 'expected'),
  [
    (simulation.constant(1e-300), 1e-12),
    (simulation.constant(1e300), 1e12),
    (simulation.with_speeds(simulation.constant(1.0), [1e300]), 1e-12),
    (simulation.lognormal(1.0, 1e4), 1e-12),
    (simulation.pareto(1e308, 0.01), 1e12),
  ],
)
def test_time_advances_and_stays_finite(time, expected):
  with np.errstate(over='ignore', under='ignore', invalid='raise'):
    table = time.table(0, 0, 3, 1)
    np.testing.assert_array_equal(table, expected)
    trace = simulation.simulate(
      protocols.asynchronous(), num_workers=1, num_gradients=20, compute=time
    )
  assert np.all(np.diff(trace.end_time) > 0)
  assert np.all(np.isfinite(trace.end_time))


def test_seeds_of_64_bits_differ():
  tables = [
    simulation.normal().table(seed, 0, 1, 4) for seed in (2**63, 2**64 - 1)
  ]
  assert np.all(tables[0] != tables[1])
