"""A node's weights: each change is recorded before it is published."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import gossip
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd.runtime import wires
from jasgd.runtime.nodes import _weights

Kind = traces.Kind
DIMENSION, RATE, NODE = 4, 0.25, 2
# f(w) = |w - w*|^2 / 2, without noise: a gradient is w - w*.
TASK = tasks.make_task(
  'quadratic', batch=1, dimension=DIMENSION, condition=1.0, noise=0.0
)
OPTIMUM = np.linspace(-1, 1, DIMENSION)
OPTIMIZER = optax.sgd(RATE)


class Log:
  """A recorder and a snapshot server in one, with their calls in order."""

  def __init__(self, layout):
    self.events = []
    self.num_mixes = self.last_version = self.incarnation = 0
    self.last_mass = 0.25
    self._layout = layout
    self._time = 0.0

  # --- The interface of a recorder.

  def get_time(self):
    self._time += 1
    return self._time

  def write(self, kind, *rows):
    self.events.append(('write', kind, list(rows)))
    self.last_version = max(row['version'] for row in rows)

  # --- The interface of a snapshot server.

  def publish(self, weights, version, step, mass):
    payload = np.zeros(self._layout.size, np.uint8)
    self._layout.pack(weights, payload)  # As it is now.
    params, _ = self._layout.unpack(payload)
    self.events.append(('publish', version, step, mass, params))


def open_node(**options):
  """The weights of a node, with their records and publications."""
  settings = runtime.NodeSettings(
    task=TASK,
    optimizer=OPTIMIZER,
    strategy=gossip.Pull(),
    num_nodes=4,
    num_steps=10,
    **options,
  )
  layout = settings.make_layout()
  log = Log(layout)
  machine = settings.strategy.make_node(NODE, 4)
  weights = _weights.NodeWeights(settings, NODE, layout, log, log, machine)
  weights.publish()
  ((_, version, step, mass, params),) = log.events
  assert (version, step, mass) == (0, 0, 0.0)
  log.events.clear()
  return types.SimpleNamespace(
    weights=weights, machine=machine, log=log, layout=layout, params=params
  )


@pytest.fixture
def node():
  return open_node()


def make_other(node, peer, version, step, weight, value):
  payload = wires.make_aligned(node.layout.size)
  node.layout.pack((np.full(DIMENSION, value, np.float32), {}), payload)
  return _weights.Source(peer, version, step, weight, payload)


def check_change(node, kind, **expected):
  """One record, then one publication, which agree; gives both."""
  written, published = node.log.events
  node.log.events.clear()
  assert (written[0], published[0]) == ('write', 'publish')
  assert written[1] == kind
  _, version, step, mass, params = published
  for row in written[2]:
    assert (row['version'], row['step'], row['mass']) == (version, step, mass)
    assert {name: row[name] for name in expected} == expected
  weights = node.weights
  assert (weights.version, weights.step, node.machine.mass) == (
    version,
    step,
    mass,
  )
  np.testing.assert_array_equal(params, weights.state.params)
  node.params = params
  return written[2], params


def step_from(params, at=None):
  """The weights after one step."""
  return params - RATE * ((params if at is None else at) - OPTIMUM)


def test_a_step_is_recorded_before_it_is_published(node):
  node.machine.mass = 0.5
  for step in range(4):
    expected = step_from(node.params)
    node.weights.make_step(node.machine.on_step)
    (row,), params = check_change(
      node, Kind.STEP, version=step + 1, read_version=step, step=step + 1
    )
    assert row['start_time'] == step + 1  # The time at which the step began.
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
    assert np.isfinite(node.weights.loss)


def test_a_mix_is_recorded_before_it_is_published(node):
  node.weights.make_step(node.machine.on_step)
  check_change(node, Kind.STEP)
  for number in range(3):
    others = [
      make_other(node, 0, 7, 6, 0.25, 8.0),
      make_other(node, 3, 9, 5, 0.125, -4.0),
    ]
    # Push-sum changes the mass before it mixes.
    node.machine.mass = 0.5 + number
    before = node.params
    node.weights.mix(others, 0.625, 3.5)
    rows, params = check_change(
      node,
      Kind.MIX,
      version=number + 2,
      step=1,
      group=number + 1,
      own_weight=0.625,
      mass=0.5 + number,
      start_time=3.5,
    )
    names = ('source', 'source_version', 'source_step', 'weight')
    assert [tuple(row[name] for name in names) for row in rows] == [
      (0, 7, 6, 0.25),
      (3, 9, 5, 0.125),
    ]
    np.testing.assert_allclose(
      params, 0.625 * before + 0.25 * 8 - 0.125 * 4, rtol=1e-5
    )
    # The wire may overwrite a message's memory now.
    for other in others:
      other.payload[:] = 255
    np.testing.assert_array_equal(node.weights.state.params, params)


@pytest.mark.parametrize('is_before', [False, True])
def test_a_move_to_the_centre_is_recorded_before_it_is_published(
  node, is_before
):
  """With `is_before`, the next gradient is of the weights before the move."""
  for number in range(3):
    before, version = node.params, node.weights.version
    centre = make_other(node, traces.SERVER, 40, 40, 0.125, 2.0)
    force, stats = node.weights.pull_centre(
      centre, 0.5, keeps_gradient=is_before
    )
    (row,), moved = check_change(
      node,
      Kind.MIX,
      version=version + 1,
      step=number,
      group=number + 1,
      own_weight=0.875,
      start_time=0.5,
    )
    assert (row['source'], row['weight']) == (traces.SERVER, 0.125)
    assert (row['source_version'], row['source_step']) == (40, 40)
    assert not stats
    np.testing.assert_allclose(force, 0.125 * (before - 2.0), rtol=1e-5)
    np.testing.assert_array_equal(moved, before - np.asarray(force))
    node.weights.make_step(node.machine.on_step)
    read_version = version if is_before else version + 1
    _, params = check_change(
      node, Kind.STEP, version=version + 2, read_version=read_version
    )
    expected = step_from(moved, before if is_before else moved)
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


def test_only_the_next_gradient_is_taken_before_the_move(node):
  centre = make_other(node, traces.SERVER, 40, 40, 0.125, 2.0)
  node.weights.pull_centre(centre, 0.5, keeps_gradient=True)
  for read_version in (0, 2, 3):
    node.log.events.clear()
    node.weights.make_step(node.machine.on_step)
    check_change(node, Kind.STEP, read_version=read_version)


@pytest.mark.parametrize('change', ['step', 'mix', 'centre'])
def test_a_change_that_cannot_be_recorded_is_not_published(node, change):
  """The disk is full: no peer may see weights that replay cannot make."""

  def write(kind, *rows):
    raise OSError('No space left on device')

  node.log.write = write
  weights = node.weights
  other = make_other(node, 1, 1, 1, 0.5, 1.0)
  changes = {
    'step': lambda: weights.make_step(node.machine.on_step),
    'mix': lambda: weights.mix([other], 0.5, 0.0),
    'centre': lambda: weights.pull_centre(other, 0.0, keeps_gradient=False),
  }
  with pytest.raises(OSError, match='No space'):
    changes[change]()
  assert node.log.events == []


def test_a_node_that_comes_back_has_a_version_of_its_own(node):
  node.weights.make_step(node.machine.on_step)
  node.weights.make_step(node.machine.on_step)
  kept = jax.tree.map(jnp.array, node.weights.state)
  position = node.weights.position
  saved = {'step': 2, 'mass': 0.0}
  assert position == {'clock': 2, **saved, 'machine': saved}
  node.weights.make_step(
    node.machine.on_step
  )  # Others may have seen version 3.
  node.log.events.clear()
  node.weights.restore(kept, position)
  node.weights.publish()
  check_change(node, Kind.RESTART, version=4, read_version=2, step=2, mass=0.25)
  assert node.log.incarnation == 1
  expected = step_from(node.params)
  node.weights.make_step(node.machine.on_step)
  _, params = check_change(node, Kind.STEP, version=5, read_version=4, step=3)
  np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)


def test_warming_up_changes_nothing(node):
  before = np.array(node.weights.state.params)
  node.weights.warm_up()
  assert node.log.events == []
  np.testing.assert_array_equal(node.weights.state.params, before)


def test_a_schedule_counts_the_epochs_of_all_nodes():
  """Four nodes take one sample each per step, of 1,000 samples."""
  asked = []

  def get_rate(epochs):
    asked.append(epochs)
    return 0.5 ** (1 + len(asked))

  node = open_node(get_rate=get_rate)
  for factor in (0.25, 0.125):
    expected = node.params + factor * (step_from(node.params) - node.params)
    node.weights.make_step(node.machine.on_step)
    _, params = check_change(node, Kind.STEP)
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-6)
  assert asked == pytest.approx([0.0, 4 / 1_000])


def test_packed_as_a_message(node):
  payload = np.zeros(node.layout.size, np.uint8)
  node.weights.pack(payload)
  params, _ = node.layout.unpack(payload)
  np.testing.assert_array_equal(params, node.params)
