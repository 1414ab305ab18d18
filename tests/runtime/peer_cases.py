"""Nodes and a centre, each in a thread, over their real wires."""

import contextlib
import dataclasses
import functools
import itertools
import threading
import time

import optax

from jasgd import engine
from jasgd import gossip
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import wires
from tests.engine import node_cases

NUM_NODES = 3
PATIENCE = 60.0  # Seconds: never reached, unless something is broken.
# No peer counts as silent on a slow machine.
PATIENT = runtime.Deadlines(step=PATIENCE)
STRATEGIES = {
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pull by a ring': gossip.Pull(peers=gossip.topologies.ring(NUM_NODES)),
  'elastic': gossip.Elastic(rate=0.2),
  'easgd': gossip.Elastic(rate=0.2, order='easgd', period=2),
}
OPTIMIZER = optax.sgd(0.05, 0.9)


_METHODS = (
  *('on_alive', 'on_step', 'on_replies', 'on_outcome', 'on_message'),
  *('mix_waiting', 'on_done', 'on_end', 'on_join', 'on_join_reply'),
  *('on_restart', 'on_regroup', 'restore', 'save'),
)


def record_calls(strategy, calls):
  """Makes a strategy whose machines log their calls.

  Args:
    strategy: A peer strategy.
    calls: List to which each call adds (number, machine, method, arguments,
      result).

  Returns:
    An equal strategy, of a new class.
  """
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


class Group:
  """Nodes of one run, each in a thread, in a folder that all of them see."""

  def __init__(self, folder, strategy, **options):
    options = {
      'num_steps': 40,
      'optimizer': OPTIMIZER,
      'min_seconds': (0.002,),
      'checkpoint_seconds': 1e-3,
      **options,
    }
    self.run = workdirs.Workdir(folder)
    self.wires = options.pop('wires', ('memory',))
    self.settings = runtime.NodeSettings(
      task=node_cases.make_task(),
      strategy=strategy,
      num_nodes=NUM_NODES,
      seed=node_cases.SEED,
      **options,
    )
    self._threads = {}
    self._stops = {}
    self.errors = []
    self.peers = {}

  def make(self, node, stopped):
    """A node, or the centre."""
    parts = {
      'settings': self.settings,
      'run': self.run,
      'registry': runtime.Registry(
        self.run, wire='flight' if self.wires == ('flight',) else 'auto'
      ),
      'bind': runtime.BindAddress(wires=self.wires),
      'linger': 0.0,
      'stopped': stopped,
    }
    if node == traces.SERVER:
      return runtime.Centre(**parts)
    return runtime.Peer(**parts, node=node)

  def start(self, node):
    """Starts a node, or the centre."""
    stopped = threading.Event()
    member = self.peers[node] = self.make(node, stopped)

    thread = threading.Thread(target=self.work, args=(member, node))
    thread.start()
    self._threads[node] = thread
    self._stops[node] = stopped

  def work(self, member, node):
    """The work of a node's thread."""
    del node
    try:
      member.run()
    except Exception as error:
      self.errors.append(error)

  def stop(self, node, *, is_told=True):
    """Waits until a node has ended; sets its stop event first if `is_told`."""
    if is_told:
      self._stops[node].set()
    self._threads[node].join(PATIENCE)
    assert not self._threads[node].is_alive()

  def wait_for(self, node, name, least):
    """Waits until a number in the status of a node is large enough."""
    deadline = time.monotonic() + PATIENCE
    while self.peers[node].describe()[name] < least:
      assert not self.errors
      assert time.monotonic() < deadline
      self._stops[node].wait(0.01)

  def wait_for_steps(self, node, count):
    """Waits until a node has made a number of steps."""
    self.wait_for(node, 'step', count)

  def report_death(self, node):
    """Tells all members that a node is dead, as a launcher does."""
    registry = runtime.Registry(self.run)
    size = self.settings.make_layout().size
    message = wires.Message(wires.Verb.LOST, worker=node)
    deadline = time.monotonic() + PATIENCE
    for member in self.peers:
      while True:
        try:
          with contextlib.closing(registry.connect(member)(size)) as connection:
            connection.request(message, deadline=PATIENCE)
          break
        except runtime.WireError:  # It has not opened its wires yet.
          assert time.monotonic() < deadline
          self._stops[member].wait(0.01)

  def join(self):
    """Waits until all have ended."""
    for thread in self._threads.values():
      thread.join(PATIENCE)
      assert not thread.is_alive()

  def wait(self):
    """Waits until all have ended, and checks that none has failed."""
    self.join()
    assert not self.errors

  def close(self):
    """Ends all members."""
    for stopped in self._stops.values():
      stopped.set()
    for thread in self._threads.values():
      thread.join(PATIENCE)

  def load_trace(self):
    """The trace of all members."""
    return traces.Trace.load(self.run.trace)

  def check_replay(self):
    """Checks that each member has the weights that the trace replays to."""
    members = runtime.list_members(self.run)
    folders = {
      member: runtime.find_folder(self.run, member) for member in members
    }
    versions = {
      member: workdirs.list_checkpoints(folder)[-1]
      for member, folder in folders.items()
    }
    replicas = {
      member: engine.SERVER if member == traces.SERVER else member
      for member in members
    }
    replayed = node_cases.replay_until(
      self.settings.task,
      self.settings.optimizer,
      self.load_trace(),
      seed=node_cases.SEED,
      mode='exact',
      until={replicas[member]: each for member, each in versions.items()},
    )
    for member, folder in folders.items():
      saved = workdirs.load_weights(folder)
      own = replayed.replicas[replicas[member]]
      node_cases.assert_same_bits(saved, own)
    return replayed


@contextlib.contextmanager
def start_group(folder, name, nodes=range(NUM_NODES), **options):
  """A group that has been started."""
  strategy = STRATEGIES[name]
  group = Group(folder, strategy, **options)
  if isinstance(strategy, gossip.Elastic):
    nodes = [traces.SERVER, *nodes]
  try:
    for node in nodes:
      group.start(node)
    yield group
  finally:
    group.close()
