"""Strategies and tasks, and nodes whose real calls are made by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from jasgd import tasks
from jasgd import traces

Kind = traces.Kind
CENTRE = traces.SERVER
SEED = 3

NUM_NODES = 4
# Every strategy; a new one is tested by being listed.
STRATEGIES = {
  'allreduce': gossip.AllReduce(),
  'local sgd': gossip.AllReduce(period=3),
  'elastic': gossip.Elastic(rate=0.2, period=2),
  'elastic, easgd': gossip.Elastic(rate=0.2, order='easgd'),
  'pull': gossip.Pull(beta=0.3),
  'pull, ring': gossip.Pull(peers=gossip.topologies.ring(NUM_NODES)),
  'push': gossip.Push(peers=gossip.topologies.exponential(NUM_NODES)),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(peers='permutation'),
}
SGD = optax.sgd(0.1)
MOMENTUM = optax.sgd(0.1, 0.5)
ADAM = optax.adam(0.05)
OPTIMIZERS = {'sgd': SGD, 'momentum': MOMENTUM, 'adam': ADAM}


@functools.cache
def make_plain_task():
  """Logistic regression."""
  return tasks.make_task('logistic', batch=8)


def simulate(strategy, num_steps=15, **arguments):
  """Four nodes."""
  return simulation.simulate(
    strategy,
    num_workers=NUM_NODES,
    num_gradients=num_steps * NUM_NODES,
    **arguments,
  )


def make_plan(trace, task=None, **arguments):
  """What replay computes."""
  task = task or make_plain_task()
  return engine.make_plan(
    trace, num_samples=task.num_samples, batch=task.batch, **arguments
  )


def replay_until(
  task, optimizer, trace, until=None, get_rate=None, **arguments
):
  """A finished `engine.Replay` that ends with some versions."""
  plan = make_plan(trace, task, until=until, get_rate=get_rate)
  replay = engine.Replay(task, optimizer, plan, **arguments)
  while not replay.is_done:
    replay.advance()
  return replay


def stack_nodes(replayed):
  """(params, stats) of all nodes, with a leading axis."""
  nodes = [each for node, each in replayed.replicas.items() if node >= 0]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *nodes)


def get_gradient(params, node, step):
  """The gradient of a node's minibatch."""
  task = make_plain_task()
  gradient = engine.make_gradient(task)
  return gradient(params, {}, task.data, 0, node, step).gradient


@functools.cache
def make_task():
  """Logistic regression with a running mean, as in batch normalisation."""
  task = tasks.make_task('logistic', batch=8)

  def loss(params, stats, batch, key):
    value, _ = task.loss(params, {}, batch, key)
    return value, {'mean': 0.9 * stats['mean'] + 0.1 * params}

  return tasks.Task(
    name='logistic with statistics',
    batch=task.batch,
    num_samples=task.num_samples,
    init=lambda key: (
      jax.random.normal(key, (20,)),
      {'mean': jnp.full(20, 0.5)},
    ),
    loss=loss,
    metrics=lambda params, stats, batch: task.metrics(params, {}, batch),
    batches=task.batches,
    data=task.data,
    test_data=task.test_data,
  )


def assert_same_bits(first, second):
  """Two trees are equal in every bit."""
  leaves = [jax.tree.leaves(tree) for tree in (first, second)]
  for one, other in zip(*leaves, strict=True):
    one, other = np.asarray(one), np.asarray(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    assert one.tobytes() == other.tobytes()


class RealNodes:
  """Makes the calls that real nodes and a real centre make, and records them.

  Attributes:
    saved: (node, version) -> its whole state, on the host.
    sent: (node, version) -> buffer of the message with its weights.
  """

  def __init__(self, folder, optimizer, num_nodes, wire_dtype, get_rate=None):
    """Starts all nodes and the centre from the same weights."""
    self._task, self._folder = make_task(), folder
    self._num_nodes, self._get_rate = num_nodes, get_rate
    weights = self._task.init(jax.random.key(SEED, impl='threefry2x32'))
    self._layout = engine.make_layout(weights, wire_dtype)
    self._whole = engine.make_layout(weights)
    self._functions = engine.make_node_functions(
      self._task, optimizer, self._layout
    )
    self._header = {
      'num_workers': num_nodes,
      'seed': SEED,
      'config': {},
      'wire_dtype': wire_dtype,
    }
    self._nodes = {
      node: self._functions.start(weights) for node in range(num_nodes)
    }
    self._nodes[CENTRE] = jax.tree.map(jnp.array, weights)
    self._forces = []
    self._files = {node: [] for node in self._nodes}
    self._time = 0.0
    self.version = dict.fromkeys(self._nodes, 0)
    self.num_steps = dict.fromkeys(self._nodes, 0)
    self.saved, self.sent = {}, {}
    for node in self._nodes:
      self._publish(node)

  # --- Events.

  def step(self, node, read_version=None):
    """A node makes a step, with a gradient of an older version if given."""
    if read_version is None:
      read_version = self.version[node]
    step = self.num_steps[node]
    rate = None
    if self._get_rate is not None:
      epochs = engine.count_epochs(
        step,
        num_nodes=self._num_nodes,
        batch=self._task.batch,
        num_samples=self._task.num_samples,
      )
      rate = self._get_rate(epochs)
    where = (self._task.data, SEED, node, step, rate)
    if read_version == self.version[node]:
      made, _ = self._functions.step(self._nodes[node], *where)
    else:
      params, stats, _ = self.saved[node, read_version]
      buffer = self._pack(self._whole, (params, stats))
      parts = self._whole.view(buffer)
      made, _ = self._functions.step_at(self._nodes[node], parts, *where)
    self.num_steps[node] += 1
    self._change(node, made)
    self._note(node, Kind.STEP, read_version=read_version)

  def mix(self, node, others, own_weight):
    """A node mixes with others: [(peer, version, weight)]."""
    self.version[node] += 1
    first = own_weight
    for peer, version, weight in others:
      parts = self._layout.view(self.sent[peer, version])
      self._nodes[node] = self._functions.mix(
        self._nodes[node], parts, first, weight
      )
      first = 1.0
    self._publish(node)
    for peer, version, weight in others:
      fields = {'source': peer, 'source_version': version, 'weight': weight}
      fields |= {'group': self.version[node], 'own_weight': own_weight}
      self._note(node, Kind.MIX, **fields)

  def join(self, node, peer):
    """A node joins with the weights of a peer."""
    self._note(node, Kind.JOIN)
    self.mix(node, [(peer, self.version[peer], 1.0)], 0.0)

  def pull(self, node, version, rate):
    """A node moves towards a version of the centre, and sends its force."""
    parts = self._layout.view(self.sent[CENTRE, version])
    made, force = self._functions.pull_centre(self._nodes[node], parts, rate)
    buffer = self._pack(self._layout, force)
    self._forces.append((node, self.version[node], rate, buffer))
    self._change(node, made)
    fields = {'source': CENTRE, 'source_version': version, 'weight': rate}
    fields |= {'group': self.version[node], 'own_weight': 1 - rate}
    self._note(node, Kind.MIX, **fields)

  def move(self):
    """The centre moves by the force that has waited longest."""
    node, version, rate, buffer = self._forces.pop(0)
    parts = self._layout.view(buffer)
    made = self._functions.move_centre(self._nodes[CENTRE], parts, 1.0)
    self._change(CENTRE, made)
    fields = {'source': node, 'source_version': version, 'weight': rate}
    self._note(CENTRE, Kind.MOVE, worker=node, own_weight=1.0, **fields)

  def restart(self, node, version, num_steps):
    """A node, or the centre, restarts from a checkpoint."""
    saved = jax.tree.map(jnp.array, self.saved[node, version])
    self.num_steps[node] = num_steps
    self._change(node, saved if node == CENTRE else engine.NodeState(*saved))
    self._note(node, Kind.RESTART, read_version=version)

  @property
  def num_forces(self):
    """Number of forces that the centre has not received."""
    return len(self._forces)

  def load(self):
    """The trace, from the files of all nodes and of the centre."""
    for node, rows in self._files.items():
      name = traces.get_file_name(node)
      records = np.zeros(len(rows), traces.RECORD)
      for record, row in zip(records, rows, strict=True):
        for field, value in row.items():
          record[field] = value
      header = {**self._header, 'host': name}
      with traces.TraceWriter(self._folder / name, header) as writer:
        writer.append(records)
    return traces.Trace.load(self._folder)

  # --- State and records.

  def _change(self, node, made):
    self._nodes[node] = made
    self.version[node] += 1
    self._publish(node)

  def _publish(self, node):
    made = self._nodes[node]
    key = node, self.version[node]
    self.sent[key] = self._pack(self._layout, tuple(made)[:2])
    self.saved[key] = jax.tree.map(np.array, tuple(made))

  def _pack(self, layout, tree):
    buffer = np.empty(layout.size, np.uint8)
    layout.pack(tree, buffer)
    return buffer

  def _note(self, node, kind, **fields):
    self._time += 1.0
    row = {'kind': kind, 'replica': node, 'version': self.version[node]}
    row |= {'worker': max(node, 0), 'updates': kind != Kind.JOIN}
    row |= {'step': self.num_steps[node], 'end_time': self._time, **fields}
    self._files[node].append(row)
