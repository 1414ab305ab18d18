"""How long a gradient takes."""

import numpy as np
import pytest

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
    (lambda: simulation.make_network(0), 'num_parameters must be at least 1'),
  ],
)
def test_bad_times(build, message):
  with pytest.raises(ValueError, match=message):
    build()
