"""Real nodes drive the same state machines as the simulator."""

import dataclasses
import functools
import itertools
import threading

import numpy as np
import pytest

from jasgd import gossip
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
STRATEGIES = {
  'pull': gossip.Pull(beta=0.3),
  'pull, ring': gossip.Pull(peers=gossip.topologies.ring(NUM_NODES), period=2),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'elastic': gossip.Elastic(rate=0.25, period=2),
  'elastic, easgd': gossip.Elastic(rate=0.25, order='easgd'),
  'pull and push, own': own_strategies.Neighbour(),
}


class Host:
  """One end of a wire without a socket: a node, or the centre.

  Requests are handled at once. A dead end does not answer.
  """

  def __init__(self, script, node):
    self._script = script
    self._node = node
    self.is_dead = False
    self.snapshot = None
    self.lost = set()  # Nodes that this node could not reach.

  # --- What a node shows.

  def publish(self, weights, version, step, mass):
    payload = np.zeros(self._script.layout.size, np.uint8)
    self._script.layout.pack(weights, payload)
    self.snapshot = (version, step, payload)

  # --- What it can do with others.

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
    if peer == gossip.CENTRE:
      return self._script.move_centre(message)
    return self._script.exchangers[peer].receive(message)


class Book:
  """A trace that is a list."""

  def __init__(self, rows, node):
    self._rows = rows
    self._node = node
    self.num_mixes = self.last_version = 0

  def get_time(self):
    return 0.0

  def write(self, kind, *rows):
    for row in rows:
      self._rows.append({'kind': kind, 'replica': self._node, **row})


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
    self.hosts, self.exchangers = {}, {}
    for node in range(NUM_NODES):
      machine = strategy.make_node(node, NUM_NODES, SEED)
      host = self.hosts[node] = Host(self, node)
      book = Book(self.rows, node)
      weights = _weights.NodeWeights(
        self.settings, node, self.layout, book, host, machine
      )
      weights.publish()
      self.exchangers[node] = _exchange.Exchanger(
        machine, weights, host, book, self.layout
      )
    centre = self.hosts[gossip.CENTRE] = Host(self, gossip.CENTRE)
    centre.publish(self.settings.make_weights(), 0, 0, 0.0)
    self._num_moves = 0

  def move_centre(self, message):
    """The centre moves: what its weights are does not matter here."""
    version = self._num_moves = self._num_moves + 1
    self.rows.append(
      {
        'kind': Kind.MOVE,
        'replica': gossip.CENTRE,
        'source': message.worker,
        'source_version': message.version,
        'own_weight': 1.0,
        'weight': message.share,
        'version': version,
        'step': version,
      }
    )
    _, _, payload = self.hosts[gossip.CENTRE].snapshot
    self.hosts[gossip.CENTRE].snapshot = (version, version, payload)
    return gossip.Outcome.TAKEN

  def run(self, trace):
    """Steps and deaths in the order of the trace."""
    is_told = np.isin(trace.records['kind'], (Kind.STEP, Kind.LEAVE))
    num_steps = dict.fromkeys(range(NUM_NODES), 0)
    for record in trace.records[is_told]:
      node = int(record['replica'])
      if record['kind'] == Kind.LEAVE:
        self.hosts[node].is_dead = True
        continue
      self.exchangers[node].make_step()
      num_steps[node] += 1
      for each, exchanger in self.exchangers.items():
        if num_steps[each] == NUM_STEPS and not self.hosts[each].is_dead:
          exchanger.mix_waiting()  # As a real one does all the time.


def _list(rows, kinds):
  """Fields of the records without times, in order for each node."""
  names = ('kind', 'source', 'step', 'version', 'read_version')
  names += ('source_version', 'source_step')
  weights = ('own_weight', 'weight', 'mass')
  found = {}
  for row in rows:
    if row['kind'] in kinds:
      values = [int(row.get(name, 0)) for name in names]
      values += [round(row.get(name, 0.0), 9) for name in weights]
      found.setdefault(int(row['replica']), []).append(values)
  return found


@pytest.mark.parametrize('has_kill', [False, True])
@pytest.mark.parametrize('name', STRATEGIES)
def test_simulated_and_real_nodes_leave_equal_records(name, has_kill):
  """Driven by one script: the order of all steps, and one death."""
  strategy = STRATEGIES[name]
  trace = simulation.simulate(
    strategy,
    num_workers=NUM_NODES,
    num_gradients=NUM_STEPS * NUM_NODES,
    compute=simulation.exponential(1.0),
    failures=[simulation.Failure(4.0, 2)] if has_kill else [],
    seed=SEED,
  )
  script = Script(strategy)
  script.run(trace)
  names = trace.records.dtype.names
  simulated = [
    dict(zip(names, record, strict=True)) for record in trace.records.tolist()
  ]
  kinds = (Kind.STEP, Kind.MIX, Kind.MOVE, Kind.LOST)
  found, expected = _list(script.rows, kinds), _list(simulated, kinds)
  if traces.SERVER in expected:  # No one reads the number of steps in a force.
    for rows in (*found.values(), *expected.values()):
      for row in rows:
        row[6] = 0
  assert found == expected
  assert any(row[0] == Kind.MIX for rows in found.values() for row in rows)
  if has_kill and 'elastic' not in name:
    is_lost = [row[0] == Kind.LOST for rows in found.values() for row in rows]
    assert any(is_lost) == name.startswith('pull')


# --- The calls of a real run, repeated on a fresh machine.

_METHODS = (
  *('on_alive', 'on_step', 'on_replies', 'on_outcome', 'on_message'),
  *('mix_waiting', 'on_done', 'on_end', 'on_join', 'on_join_reply'),
  *('on_restart', 'restore', 'save'),
)


def _record_calls(strategy, calls):
  """Lets all machines of a strategy log their calls and results."""
  numbers = itertools.count()
  lock = threading.Lock()

  def make_method(name):
    plain = getattr(strategy.node_class, name)

    @functools.wraps(plain)
    def call(self, *arguments):
      is_outer = not getattr(self, 'is_inside', False)
      self.is_inside = True
      try:
        result = plain(self, *arguments)
      finally:
        self.is_inside = not is_outer
      if is_outer:
        # Lists that are changed later must stay what they were.
        kept = tuple(
          list(each) if isinstance(each, list) else each for each in arguments
        )
        with lock:
          said = None if name == 'restore' else result
          calls.append((next(numbers), self, name, kept, said))
      return result

    return call

  methods = {name: make_method(name) for name in _METHODS}
  node_class = type('Recorded', (strategy.node_class,), methods)
  kind = type(strategy)
  values = {
    field.name: getattr(strategy, field.name)
    for field in dataclasses.fields(strategy)
  }
  return type(kind.__name__, (kind,), {'node_class': node_class})(**values)


@pytest.mark.parametrize('name', ['pull', 'push', 'push-sum', 'elastic'])
def test_a_fresh_machine_repeats_a_real_run_with_a_kill(name, tmp_path):
  """Every call of a real run, fed to a fresh object, gives an equal result."""
  calls = []
  strategy = _record_calls(peer_cases.STRATEGIES[name], calls)
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
