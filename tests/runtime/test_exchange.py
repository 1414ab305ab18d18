"""Real nodes drive the same state machines as the simulator."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import runtime
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd.runtime import wires
from jasgd.runtime.nodes import _exchange
from jasgd.runtime.nodes import _weights
from tests.experiment import own_strategies
from tests.runtime import peer_cases

Kind = traces.Kind
NUM_NODES, NUM_STEPS, SEED = 4, 12, 3


class Choosy(protocols.Protocol):
  """Refuses a push of the learner that pushed last."""

  holds_learners = False
  updates_each = True

  def initial_state(self):
    return {'last': -1}

  def save_state(self):
    return {'last': self.last}

  def restore_state(self, state):
    self.last = state['last']

  def handle_push(self, learner, read_clock):
    is_taken, self.last = learner != self.last, learner
    fate = protocols.Fate.APPLIED if is_taken else protocols.Fate.DROPPED_LATE
    return protocols.Decision(fate, is_taken, (learner,))


class ChoosyElastic(gossip.Elastic):
  """Its centre refuses forces."""

  def make_centre(self):
    return Choosy()


STRATEGIES = {
  'pull': gossip.Pull(beta=0.3),
  'pull, ring': gossip.Pull(peers=gossip.topologies.ring(NUM_NODES), period=2),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'elastic': gossip.Elastic(rate=0.25, period=2),
  'elastic, easgd': gossip.Elastic(rate=0.25, order='easgd'),
  'elastic, choosy': ChoosyElastic(rate=0.25),
  'pull and push, own': own_strategies.Neighbour(),
}
# Failures of node 2, and seconds between two checkpoints.
SCRIPTS = {
  'no failure': ([], math.inf),
  'a death': ([simulation.Failure(4.0, 2)], math.inf),
  'a restart': ([simulation.Failure(5.0, 2, 7.0)], 2.0),
  'a join': ([simulation.Failure(4.0, 2, 6.0)], math.inf),
}


class Host:
  """One end of a wire without a socket: a node, or the centre.

  Requests are handled immediately. A dead host does not answer.
  """

  def __init__(self, script, node):
    self._script = script
    self._node = node
    self.is_dead = False
    self.snapshot = None
    self.lost = set()  # Nodes that this node could not reach.

  # --- The interface of a snapshot server.

  def publish(self, weights, version, step, mass):
    payload = np.zeros(self._script.layout.size, np.uint8)
    self._script.layout.pack(weights, payload)
    self.snapshot = (version, step, payload)

  # --- The interface of connections to peers.

  @property
  def alive(self):
    return sorted(set(range(NUM_NODES)) - self.lost - {self._node})

  def pull(self, peer):
    other = self._script.hosts[peer]
    if other.is_dead:
      self.lost.add(peer)
      return None
    version, step, payload = other.snapshot
    return wires.Message(
      wires.Verb.SNAPSHOT, version=version, step=step, payload=payload
    )

  def push(self, peer, message, write):
    if self._script.hosts[peer].is_dead:
      self.lost.add(peer)
      return gossip.Outcome.UNREACHABLE
    message.payload = np.zeros(self._script.layout.size, np.uint8)
    write(message.payload)
    self._script.messages.append(message)
    if peer == gossip.CENTRE:
      return self._script.move_centre(message)
    return self._script.exchangers[peer].receive(message)


class Book:
  """A recorder that writes to a list."""

  def __init__(self, rows, node):
    self._rows = rows
    self._node = node
    self.num_mixes = self.last_version = self.incarnation = 0
    self.last_mass = 0.0

  def get_time(self):
    return 0.0

  def write(self, kind, *rows):
    for row in rows:
      own = {'replica': self._node, 'incarnation': self.incarnation}
      self._rows.append({'kind': kind, **own, **row})
      self.last_version = max(self.last_version, row.get('version', 0))
      if kind != Kind.LOST:
        self.last_mass = row.get('mass', 0.0)


class Script:
  """Real nodes, whose steps come in the order of a simulated trace."""

  def __init__(self, strategy):
    self.settings = runtime.NodeSettings(
      task=tasks.make_task('quadratic', batch=1, dimension=2),
      optimizer=peer_cases.OPTIMIZER,
      strategy=strategy,
      num_nodes=NUM_NODES,
      num_steps=NUM_STEPS,
      seed=SEED,
    )
    self.layout = self.settings.make_layout()
    self.rows = []
    self.messages = []
    self.hosts = {}
    self.books = {node: Book(self.rows, node) for node in range(NUM_NODES)}
    self.weights, self.exchangers, self.saved = {}, {}, {}
    for node in range(NUM_NODES):
      self.open(node)
      self.weights[node].publish()
    if strategy.has_centre:
      centre = self.hosts[gossip.CENTRE] = Host(self, gossip.CENTRE)
      centre.publish(self.settings.make_weights(), 0, 0, 0.0)
      self.protocol = strategy.make_centre()
      self.protocol.start(NUM_NODES)

  def open(self, node):
    """A new process of a node, which knows the others that are alive."""
    machine = self.settings.strategy.make_node(node, NUM_NODES, SEED)
    host = self.hosts[node] = Host(self, node)
    host.lost = {each for each, other in self.hosts.items() if other.is_dead}
    book = self.books[node]
    weights = self.weights[node] = _weights.NodeWeights(
      self.settings, node, self.layout, book, host, machine
    )
    self.exchangers[node] = _exchange.Exchanger(
      machine, weights, host, book, self.layout
    )

  def restart(self, node, version):
    """A node goes on from its checkpoint of a version, or else joins."""
    self.open(node)
    if version is None:
      # A real node without a checkpoint has recorded a restart before it joins,
      # which the simulator leaves out.
      self.weights[node].version = self.books[node].last_version
      self.exchangers[node].join()
    else:
      self.weights[node].restore(*self.saved[node, version])
      self.weights[node].publish()
    for host in self.hosts.values():  # Other nodes can reach it again.
      host.lost.discard(node)

  def step(self, node):
    """Makes a step with its exchange, and saves a checkpoint."""
    weights = self.weights[node]
    self.exchangers[node].make_step()
    state = jax.tree.map(jnp.array, weights.state)
    self.saved[node, weights.version] = (state, weights.position)

  def move_centre(self, message):
    """Moves the centre. Its weights do not matter here, and do not change."""
    if message.worker not in self.protocol.alive:
      self.protocol.on_join(message.worker)
    decision = self.protocol.on_push(
      message.worker, message.step, message.read_version
    )
    if not decision.updates:
      return gossip.Outcome.REFUSED
    version = self.protocol.clock
    self.rows.append(
      {
        'kind': Kind.MOVE,
        'replica': gossip.CENTRE,
        'source': message.worker,
        'source_version': message.version,
        'own_weight': 1.0,
        'weight': message.elastic_rate,
        'version': version,
        'step': version,
      }
    )
    _, _, payload = self.hosts[gossip.CENTRE].snapshot
    self.hosts[gossip.CENTRE].snapshot = (version, version, payload)
    return gossip.Outcome.TAKEN

  def run(self, trace):
    """Repeats steps, deaths and returns in the order of the trace."""
    for record in trace.records:
      node, kind = int(record['replica']), record['kind']
      if kind == Kind.LEAVE:
        self.hosts[node].is_dead = True
      elif kind == Kind.RESTART:
        self.restart(node, int(record['read_version']))
      elif kind == Kind.JOIN:
        self.restart(node, None)
      elif kind == Kind.STEP:
        self.step(node)
        for each, exchanger in self.exchangers.items():
          is_done = self.weights[each].step == NUM_STEPS
          if is_done and not self.hosts[each].is_dead:
            exchanger.mix_waiting()  # A real node does so while it waits.


def _list(rows, kinds):
  """Fields of the records without times, in order for each node."""
  names = ('kind', 'source', 'step', 'version', 'read_version')
  names += ('source_version', 'source_step', 'incarnation')
  weights = ('own_weight', 'weight', 'mass')
  found = {}
  for row in rows:
    if row['kind'] in kinds:
      values = [int(row.get(name, 0)) for name in names]
      values += [round(row.get(name, 0.0), 9) for name in weights]
      found.setdefault(int(row['replica']), []).append(values)
  return found


@pytest.mark.parametrize('events', SCRIPTS)
@pytest.mark.parametrize('name', STRATEGIES)
def test_simulated_and_real_nodes_leave_equal_records(name, events):
  """One script gives the order of all steps, deaths and returns."""
  strategy = STRATEGIES[name]
  failures, checkpoint_seconds = SCRIPTS[events]
  trace = simulation.simulate(
    strategy,
    num_workers=NUM_NODES,
    num_gradients=NUM_STEPS * NUM_NODES,
    compute=simulation.exponential(1.0),
    failures=failures,
    checkpoint_seconds=checkpoint_seconds,
    seed=SEED,
  )
  script = Script(strategy)
  script.run(trace)
  names = trace.records.dtype.names
  simulated = [
    dict(zip(names, record, strict=True)) for record in trace.records.tolist()
  ]
  returns = {'a restart': Kind.RESTART, 'a join': Kind.JOIN}.get(events)
  assert returns is None or returns in trace.records['kind']
  kinds = (Kind.STEP, Kind.MIX, Kind.MOVE, Kind.LOST, Kind.RESTART, Kind.JOIN)
  found, expected = _list(script.rows, kinds), _list(simulated, kinds)
  if traces.SERVER in expected:  # The step of a force is not used.
    for rows in (*found.values(), *expected.values()):
      for row in rows:
        row[6] = 0
  assert found == expected
  assert any(row[0] == Kind.MIX for rows in found.values() for row in rows)
  is_lost = [row[0] == Kind.LOST for rows in found.values() for row in rows]
  if events == 'a death' and 'elastic' not in name:
    assert any(is_lost) == name.startswith('pull')
  elif 'elastic' in name:
    assert any(is_lost) == ('choosy' in name)


@pytest.mark.parametrize('name', STRATEGIES)
def test_fields_of_messages_mean_what_their_names_say(name):
  """Tests the share of a mix, the mass of push-sum, and the elastic rate."""
  strategy = STRATEGIES[name]
  script = Script(strategy)
  trace = simulation.simulate(
    strategy, num_workers=NUM_NODES, num_gradients=NUM_STEPS * NUM_NODES
  )
  script.run(trace)
  sent = [
    (message.share, message.mass, message.elastic_rate)
    for message in script.messages
  ]
  shares = {'push': 0.5, 'pull and push, own': 0.1}
  if name in shares:
    assert set(sent) == {(shares[name], 0.0, 0.0)}
  elif strategy.has_mass:
    assert all(share == rate == 0 < mass < 1 for share, mass, rate in sent)
    assert sent
  elif strategy.has_centre:
    assert set(sent) == {(1.0, 0.0, 0.25)}
  else:
    assert not sent
  for message in script.messages:
    assert message.push == -1  # Nodes make no pushes.
    assert 1 <= message.step <= NUM_STEPS


# --- The calls of a real run, repeated on a fresh machine.


@pytest.mark.parametrize('name', ['pull', 'push', 'push-sum', 'elastic'])
def test_a_fresh_machine_repeats_a_real_run_with_a_kill(name, tmp_path):
  """Every call of a real run, fed to a fresh object, gives an equal result."""
  calls = []
  strategy = peer_cases.record_calls(peer_cases.STRATEGIES[name], calls)
  group = peer_cases.Group(tmp_path, strategy, num_steps=100_000)
  nodes = list(range(peer_cases.NUM_NODES))
  try:
    for node in [traces.SERVER] * strategy.has_centre + nodes:
      group.start(node)
    for node in nodes:
      group.wait_for_steps(node, 3)

    def die(_):
      raise InterruptedError

    group.peers[2]._weights.make_step = die
    group.stop(2, is_told=False)
    assert isinstance(group.errors.pop(), InterruptedError)
    group.start(2)
    for node in nodes:
      group.wait_for_steps(node, group.peers[node].describe()['step'] + 5)
    for node in nodes:
      group.stop(node)
  finally:
    group.close()
  assert not group.errors
  machines = {id(machine): machine for _, machine, *_ in calls}
  assert len(machines) == peer_cases.NUM_NODES + 1
  for machine in machines.values():
    fresh = peer_cases.STRATEGIES[name].make_node(
      machine.node, machine.num_nodes, machine.seed
    )
    own = [each for each in calls if each[1] is machine]
    assert len(own) > 5
    for _, _, method, arguments, result in own:
      again = getattr(fresh, method)(*arguments)
      assert method == 'restore' or again == result, (method, arguments)
    assert fresh.save() == machine.save()
