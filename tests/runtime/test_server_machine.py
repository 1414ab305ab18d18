"""Random clients: sessions and leases stay right, and the trace replays."""

import collections
import tempfile

import hypothesis
from hypothesis import stateful
from hypothesis import strategies
import numpy as np

from jasgd import protocols
from jasgd import runtime
from jasgd import workdir
from tests.runtime import cases
from tests.runtime import scripted

Flag, Message, Verb = scripted.Flag, scripted.Message, scripted.Verb
MOST_CLIENTS = 6
# Protocols without own replicas of learners: these clients cannot step.
NAMES = sorted(set(cases.PROTOCOLS) - {'downpour, rarely', 'downpour, often'})


class Counted(scripted.Client):
  """A client that counts its requests and its answers."""

  def __init__(self, bench):
    super().__init__(bench)
    self.num_asked = 0
    self.num_heard = 0
    self.pushed = None  # Its last push, to be repeated.

  def say(self, *args, **fields):
    self.num_asked += 1
    super().say(*args, **fields)

  def send(self, message, is_handled=True):
    self.num_asked += 1
    return super().send(message, is_handled)

  def hear(self):
    answers = super().hear()
    self.num_heard += len([each for each in answers if each is not None])
    return answers


class Machine(stateful.RuleBasedStateMachine):
  """A server and its clients."""

  @stateful.initialize(
    name=strategies.sampled_from(NAMES),
    max_group=strategies.sampled_from([1, 4]),
    num_updates=strategies.sampled_from([6, 1000]),
    overlap=strategies.booleans(),
    num_first=strategies.sampled_from([0, 4, 5]),
    has_files=strategies.booleans(),
  )
  def begin(self, name, max_group, num_updates, overlap, num_first, has_files):
    self.folder = tempfile.TemporaryDirectory() if has_files else None
    self.name = name
    protocol = cases.PROTOCOLS[name]()
    self.bench = scripted.Bench(
      protocol,
      workdir=workdir.Workdir(self.folder.name) if has_files else None,
      checkpoint_seconds=1.0,
      num_updates=num_updates,
      max_group=max_group,
      overlap=overlap and not protocol.needs_current_clock,
      eval_every=3,
      deadlines=runtime.Deadlines(step=50.0, first_step=50.0, start=100.0),
    )
    self.clients = []
    for _ in range(num_first):
      self.join()

  def hear_all(self):
    self.bench.step()
    for client in self.clients:
      client.hear()

  def pick(self, data, condition):
    """One of the clients that can do something; None if there is none."""
    found = [client for client in self.clients if condition(client)]
    return data.draw(strategies.sampled_from(found)) if found else None

  @stateful.precondition(lambda self: len(self.clients) < MOST_CLIENTS)
  @stateful.rule()
  def join(self):
    client = Counted(self.bench)
    self.clients.append(client)
    client.hello()
    self.hear_all()

  @stateful.rule(data=strategies.data())
  def come_back(self, data):
    """Comes back on another channel; the old one may still count as open."""
    client = self.pick(data, lambda client: client.learner >= 0)
    if client is None:
      return
    held = self.make_held(client)
    self.clients.remove(client)
    again = Counted(self.bench)
    again.instance, again.learner = client.instance, client.learner
    self.clients.append(again)
    again.hello(held if data.draw(strategies.booleans()) else None)
    self.hear_all()
    self.check_answers(client)

  def make_held(self, client):
    """The gradient that a client has when its connection breaks."""
    return client.pushed if client.weights is None else client.make_push()

  @stateful.precondition(lambda self: self.folder is not None)
  @stateful.rule(data=strategies.data(), is_saved=strategies.booleans())
  def restart(self, data, is_saved):
    """The server dies, and another one resumes the run."""
    if is_saved:
      self.tick(2.0)
    held = [self.make_held(client) for client in self.clients]
    self.bench.crash()
    self.bench.open(cases.PROTOCOLS[self.name]())
    clients, self.clients = self.clients, []
    for client, message in zip(clients, held, strict=True):
      if data.draw(strategies.integers(0, 3)):
        client.num_asked = client.num_heard = 0
        client.weights = None
        client.reconnect()
        self.clients.append(client)
        client.hello(message)
        if client.last is not None and client.last.flags & Flag.RESEND:
          client.pushed = message
          client.last = None
          client.send(message)
        self.hear_all()

  @stateful.rule(
    data=strategies.data(), flags=strategies.sampled_from(list(Flag)[:1])
  )
  def push(self, data, flags):
    client = self.pick(data, lambda client: client.weights is not None)
    if client is not None:
      client.pushed = client.make_push(flags=flags)
      client.weights = None
      client.send(client.pushed)
      self.hear_all()

  @stateful.rule()
  def push_together(self):
    for client in self.clients:
      if client.weights is not None:
        client.pushed = client.make_push()
        client.weights = None
        client.send(client.pushed, is_handled=False)
    self.hear_all()

  @stateful.rule(data=strategies.data())
  def fetch_first(self, data):
    """Fetches before a push, as a learner with overlap does."""
    client = self.pick(data, lambda client: client.weights is not None)
    if client is None:
      return
    client.pushed = client.make_push(flags=Flag.KEEPS_WEIGHTS)
    client.say(Verb.FETCH, worker=client.learner)
    client.hear()
    fetched, client.weights = client.weights, None
    if client.last.verb == Verb.SNAPSHOT:
      client.send(client.pushed)
      self.hear_all()
      if client.last.verb == Verb.ANSWER:  # Otherwise the answer is withheld.
        fetched.push = client.last.push
        client.weights = fetched

  @stateful.rule(data=strategies.data())
  def repeat(self, data):
    client = self.pick(
      data,
      lambda client: client.weights is not None and client.pushed is not None,
    )
    if client is not None:
      before = self.bench.server.clock
      client.send(client.pushed)
      self.hear_all()
      assert self.bench.server.clock == before

  @stateful.rule(data=strategies.data())
  def notice(self, data):
    client = self.pick(data, lambda client: client.weights is not None)
    if client is not None:
      weights, client.weights = client.weights, None
      client.say(
        Verb.NOTICE,
        worker=client.learner,
        push=weights.push,
        version=weights.version,
        incarnation=weights.incarnation,
      )
      self.hear_all()

  @stateful.rule(
    data=strategies.data(),
    verb=strategies.sampled_from(list(Verb)),
    numbers=strategies.tuples(*[strategies.integers(-2, 9)] * 4),
    text=strategies.sampled_from(['', '{}', '[', '{"fingerprint": 1}']),
  )
  def garbage(self, data, verb, numbers, text):
    client = self.pick(data, lambda client: True)
    # Good messages may be drawn, too, but none that ends the client or the run.
    if client is None or verb in (Verb.LEAVE, Verb.STOP, Verb.FETCH):
      return
    learner, push, clock, incarnation = numbers
    client.send(
      Message(
        verb,
        worker=learner + 100,
        push=push,
        version=clock,
        incarnation=incarnation,
        text=text,
        payload=np.zeros(3, np.uint8) if push > 3 else None,
      )
    )
    if verb not in (Verb.STATUS, Verb.PULL):
      client.hear()
    else:  # A client may not compute on weights that it has pulled.
      weights = client.weights
      client.hear()
      client.weights = weights
    self.hear_all()

  @stateful.rule(data=strategies.data())
  def leave(self, data):
    client = self.pick(data, lambda client: client.learner >= 0)
    if client is not None:
      client.weights = None
      client.say(Verb.LEAVE, worker=client.learner)
      self.hear_all()
      self.clients.remove(client)

  @stateful.rule(data=strategies.data())
  def hang_up(self, data):
    client = self.pick(data, lambda client: True)
    if client is not None:
      client.hang_up()
      client.weights = None
      self.hear_all()
      self.clients.remove(client)

  @stateful.rule(seconds=strategies.sampled_from([1.0, 30.0, 60.0]))
  def tick(self, seconds):
    self.bench.tick(seconds)
    self.hear_all()
    for client in list(self.clients):
      if client.channel._is_closed:  # The server gave it up.
        self.clients.remove(client)

  # --- Invariants.

  def check_answers(self, client):
    session = self.bench.server._sessions.find(client.channel)
    is_waiting = session is not None and session.state == 'waiting'
    num_open = client.num_asked - client.num_heard
    if client.channel._is_closed:
      assert num_open in (0, 1)  # It may have been cut off before an answer.
    else:
      assert num_open == is_waiting

  @stateful.invariant()
  def the_sessions_are_right(self):
    server, settings = self.bench.server, self.bench.settings
    if server.end_reason is None:
      assert settings.protocol.clock == server.clock
    self.bench.check_leases()
    for client in self.clients:
      self.check_answers(client)
    status = server.describe()
    num_applied = status['fates'].get('applied', 0)
    assert status['samples'] == num_applied * settings.samples_per_push
    for each in server._sessions:
      assert (each.state in ('gone', 'absent')) == (each.channel is None)
      assert each.state != 'gone' or not each.leases

  def teardown(self):
    if not hasattr(self, 'bench'):
      return
    trace = self.bench.server.get_trace()
    applied = trace.fate == protocols.Fate.APPLIED
    pairs = collections.Counter(
      zip(trace.worker[applied], trace.step[applied], strict=True)
    )
    assert max(pairs.values(), default=1) == 1
    if self.bench.server.clock:
      cases.check_replay(self.bench.server, trace, self.bench.task)
    self.bench.close()
    if self.folder is not None:
      self.folder.cleanup()


Machine.TestCase.settings = hypothesis.settings(
  max_examples=25,
  stateful_step_count=30,
  deadline=None,
  derandomize=True,
  suppress_health_check=list(hypothesis.HealthCheck),
)
TestMachine = Machine.TestCase
