"""A server that a test drives step by step, and clients for any message."""

import json
import queue
import secrets

from jasgd import runtime
from jasgd.runtime import _learner
from jasgd.runtime import wires
from tests.runtime import cases

Message, Verb, Flag = wires.Message, wires.Verb, wires.Flag


class Bench:
  """A server without a thread, at a time that the test sets."""

  def __init__(self, protocol=None, task=None, workdir=None, **options):
    self.task = cases.make_task() if task is None else task
    self.time = 0.0
    self._workdir = workdir
    self._options = options
    self.open(protocol)

  def open(self, protocol):
    """Starts a server; it resumes a run that the workdir contains."""
    settings = cases.make_settings(self.task, protocol, **self._options)
    self.server = runtime.Server(settings, self._workdir, now=lambda: self.time)
    self.settings = settings
    self.listener = wires.QueueListener(
      self.server.inbox, self.server.layout.size
    )

  def step(self):
    """Handles all requests in the inbox, and checks deadlines."""
    while self.server.step(0):
      pass

  def tick(self, seconds):
    """Moves the clock forward, then handles requests and deadlines."""
    self.time += seconds
    self.step()

  def connect(self):
    """A client that is connected and has sent no message."""
    return Client(self)

  def join(self, **said):
    """A client that has sent a HELLO."""
    client = Client(self)
    client.hello(**said)
    return client

  def check_leases(self):
    """Checks that every buffer is free, or leased by a known holder."""
    server = self.server
    holders = [server._store.newest, *server._desk.list_leased()]
    if server._metrics.next is not None:
      holders.append(server._metrics.next)
    for session in server._sessions:
      holders += session.leases.values()
    if server._recovery.checkpoints is not None:
      holders += server._recovery.checkpoints._leased
    snapshots = {id(each): each for each in holders}
    for snapshot in snapshots.values():
      assert snapshot.num_leases == sum(each is snapshot for each in holders)
    free = server._store._pool._free
    assert len({id(buffer) for buffer in free}) == len(free)
    held = {id(each.buffer) for each in snapshots.values()}
    assert not held & {id(buffer) for buffer in free}
    assert len(held) + len(free) == len(server._store)

  def crash(self):
    """Ends the server without a checkpoint."""
    self.listener.close()
    self.server.close()

  close = crash


class Client:
  """A client that never blocks: it only reads answers that have come."""

  def __init__(self, bench):
    self.bench = bench
    self.reconnect()
    self.computing = _learner.Computing(
      bench.task,
      seed=bench.settings.seed,
      wire_dtype=bench.settings.wire_dtype,
      num_devices=1,
      min_seconds=(),
    )
    self.instance = secrets.token_hex(4)
    self.learner = -1
    self.weights = None  # The last weights that it got and has not used.
    self.waits = []
    self.last = None

  def reconnect(self):
    """Opens a new channel to the present server."""
    self.connection = self.bench.listener.connect()
    self.channel = self.connection._channel

  def say(self, verb, *, is_handled=True, **fields):
    """Sends a message, and lets the server handle it."""
    self.channel.receive(Message(verb, **fields))
    if is_handled:
      self.bench.step()

  def hear(self):
    """All unread answers; texts of WAITs go to `waits`."""
    answers = []
    while True:
      try:
        answer = self.channel.answers.get_nowait()
      except queue.Empty:
        return answers
      if answer is None:
        answers.append(None)
        continue
      if answer.verb == Verb.WAIT:
        self.waits.append(answer.text)
        continue
      answers.append(answer)
      self.last = answer
      if answer.verb == Verb.SNAPSHOT:
        self.weights = answer
      if answer.worker >= 0:
        self.learner = answer.worker

  def ask(self, verb, **fields):
    """The one answer to a message."""
    self.say(verb, **fields)
    answers = self.hear()
    assert len(answers) == 1, answers
    return answers[0]

  def hello(self, held=None, worker=None, **said):
    """Sends a HELLO; `held` is the push that was not answered."""
    said = {
      'fingerprint': self.bench.server.fingerprint,
      'instance': self.instance,
      **said,
    }
    message = Message(Verb.HELLO) if held is None else held
    self.say(
      Verb.HELLO,
      worker=self.learner if worker is None else worker,
      push=message.push,
      version=message.version,
      incarnation=message.incarnation,
      text=json.dumps(said),
    )
    return self.hear()

  def make_push(self, **fields):
    """The gradient at its last weights, as a message."""
    weights = self.weights
    num_steps = self.bench.settings.protocol.steps_per_push
    self.computing.learner = self.learner
    self.computing.local_rate = self.bench.settings.local_rate
    push, _ = self.computing.compute(
      weights, weights.push * num_steps, num_steps
    )
    self.computing.layout.pack(push.message, self.connection.outgoing)
    return Message(
      Verb.EXCHANGE,
      **{
        'worker': self.learner,
        'push': weights.push,
        'version': weights.version,
        'incarnation': weights.incarnation,
        'loss': float(push.loss),
        'seconds': 0.1,
        'payload': self.connection.outgoing,
        **fields,
      },
    )

  def send(self, message, is_handled=True):
    """Sends a message that was made before."""
    self.channel.receive(message)
    if is_handled:
      self.bench.step()
    return self.hear()

  def push(self, is_handled=True, **fields):
    """Computes a gradient and sends it; returns the unread answers."""
    message = self.make_push(**fields)
    self.weights = None
    return self.send(message, is_handled)

  def hang_up(self):
    """Disconnects without a LEAVE."""
    self.connection.close()
    self.bench.step()


def join(bench, count):
  """Clients that have joined and received the first weights."""
  clients = [bench.join() for _ in range(count)]
  for client in clients:
    client.hear()
  return clients


def get_counts(bench):
  """Numbers of accepted messages, and of refused ones by reason."""
  return bench.server.describe()['counts']


def list_kinds(bench, kind):
  """The learners of all records of a kind."""
  return [
    record['worker']
    for record in bench.server.get_trace().records
    if record['kind'] == kind
  ]
