"""The two forms of push-sum, by hand: a step of nodes with unequal masses.

On devices it is SGP: x and its mass w are held, z = x / w is the weights, and
an update u of a gradient at z is added to x, so that z moves by u / w. Real
nodes and replay do GoSGD: z and its mass are held, and z moves by u. Where all
masses are 1, these are the same.
"""

import numpy as np
import pytest

from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from tests.engine import device_cases
from tests.engine import node_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

# Node 0 gives 3/4 of its mass to node 1, which gives 1/2, after two steps.
STRATEGY = gossip.PushSum(
  peers=gossip.topologies.from_peers([[1], [0]], [[0.75], [0.5]]), period=2
)
RATE = 0.1


def _step(z, step, *, masses=(1.0, 1.0)):
  """A step of both nodes, each divided by its mass."""
  task = device_cases.make_quadratic()
  grads = device_cases.get_gradients(task, z, step)
  return z - RATE * grads / np.reshape(masses, (2, 1))


def _make_starts():
  return device_cases.make_starts(device_cases.make_quadratic())[:2]


def test_on_devices_an_update_is_divided_by_the_mass():
  program = device_cases.make_program(
    device_cases.make_quadratic(), device_cases.SGD, STRATEGY, num_nodes=2
  )
  state, _ = device_cases.run(program, 2)
  z = _step(_step(_make_starts(), 0), 1)
  # Both mix at once: each has the share that it kept and the other's message.
  masses = np.array([0.25 + 0.5, 0.5 + 0.75])
  z = np.stack([0.25 * z[0] + 0.5 * z[1], 0.5 * z[1] + 0.75 * z[0]])
  z = (z / masses[:, None]).astype(np.float32)
  state, _ = program.step(state)  # A step without a mix.
  arrays = program.fetch(state)
  np.testing.assert_allclose(arrays.mass, masses)
  found = arrays.node.params / arrays.mass[:, None]
  expected = _step(z, 2, masses=masses)
  np.testing.assert_allclose(found, expected, atol=1e-6)
  assert np.abs(expected - _step(z, 2)).max(axis=1).min() > 0.01
  # Hence the mean by mass moves by the mean of all updates.
  before, after = masses @ z / 2, masses @ found / 2
  mean = (_step(z, 2) - z).mean(axis=0)
  np.testing.assert_allclose(after - before, mean, atol=1e-6)


@pytest.mark.parametrize('mode', engine.MODES)
def test_in_replay_an_update_is_not_divided(mode):
  trace = simulation.simulate(STRATEGY, num_workers=2, num_gradients=6)
  result = node_cases.replay_until(
    device_cases.make_quadratic(),
    device_cases.SGD,
    trace,
    mode=mode,
    seed=device_cases.SEED,
    until={0: 3, 1: 4},  # Before they mix the remaining messages.
  )
  z = _step(_step(_make_starts(), 0), 1)
  # Node 1 has mixed node 0's message; its own has not been mixed yet.
  masses = np.array([0.25, 0.5 + 0.75])
  z[1] = (0.5 * z[1] + 0.75 * z[0]) / masses[1]
  expected = _step(z, 2)
  np.testing.assert_allclose(
    node_cases.stack_nodes(result)[0], expected, atol=1e-6
  )
  steps = trace.steps[trace.steps['step'] == 3]
  np.testing.assert_allclose(steps['mass'], masses)
  other = _step(z, 2, masses=masses)
  assert np.abs(expected - other).max(axis=1).min() > 0.01
