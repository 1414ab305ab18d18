"""The order that replay relies on: update, record, publish, answer; sync, save.

Each test fails if two of these actions are swapped, or if a gradient is
computed at other weights than those in the message.
"""

import contextlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import engine
from jasgd import protocols
from jasgd import runtime
from jasgd import traces
from jasgd import workdir
from jasgd.runtime import wires
from tests import trees
from tests.runtime import cases
from tests.runtime import peer_cases

Kind = traces.Kind


class Client(wires.Channel):
  """A channel of the server that reads the trace's file at each answer."""

  def __init__(self, server, folder):
    self.name = 'test'
    self._server = server
    self._folder = folder
    self.answer = None
    self.weights = None  # The last answer with weights.
    self.kinds = []  # Kinds of the records in the file at the last answer.
    self.num_answers = 0

  @property
  def num_records(self):
    return len(self.kinds)

  def send(self, message, snapshot=None):
    self.answer = message
    self.num_answers += 1
    if snapshot is not None:
      self.weights = message
    trace = traces.Trace.load(self._folder.trace, allow_truncated=True)
    self.kinds = [Kind(each) for each in trace.records['kind']]

  def close(self):
    pass

  def ask(self, verb, **fields):
    """Lets the server handle a message; gives the answer."""
    message = wires.Message(verb, **fields)
    self._server.inbox.put(wires.Event(self, message))
    while self._server.step(0):
      pass
    return self.answer

  def join(self):
    said = {'fingerprint': self._server.fingerprint}
    return self.ask(wires.Verb.HELLO, text=json.dumps(said))

  def push(self, flags=0):
    return self.ask(
      wires.Verb.EXCHANGE,
      flags=flags,
      worker=self.answer.worker,
      push=self.answer.push,
      version=self.weights.version,
      payload=np.zeros(self._server.layout.size, np.uint8),
    )

  def notice(self):
    """Sends a NOTICE that a gradient was not finite."""
    return self.ask(
      wires.Verb.NOTICE,
      worker=self.answer.worker,
      push=self.answer.push,
      version=self.weights.version,
      loss=math.nan,
    )

  def fetch(self, step):
    return self.ask(wires.Verb.FETCH, worker=self.answer.worker, step=step)


@pytest.fixture
def folder(tmp_path):
  return workdir.Workdir(tmp_path)


@pytest.fixture
def open_server(folder):
  """A function that opens the one server of a test."""
  with contextlib.ExitStack() as stack:

    def open_server(protocol=None):
      settings = cases.make_settings(
        protocol=protocol, num_learners=1, checkpoint_seconds=1e6
      )
      server = runtime.Server(settings, folder)
      return stack.enter_context(contextlib.closing(server))

    yield open_server


@pytest.fixture
def server(open_server):
  return open_server()


def test_a_learner_is_answered_after_its_record_is_flushed(server, folder):
  client = Client(server, folder)
  client.join()
  for number in range(1, 4):
    answer = client.push()
    assert (answer.verb, answer.version) == (wires.Verb.SNAPSHOT, number)
    assert client.num_records == 1 + number  # The join, and each push.


def test_weights_are_sent_after_the_record_of_their_fetch(open_server, folder):
  """If a learner has its own replica, each SNAPSHOT has a FETCH record."""
  server = open_server(protocols.downpour(2, 3))
  client = Client(server, folder)
  expected = [Kind.JOIN, Kind.FETCH]

  def check(answer, verb, *kinds):
    expected.extend(kinds)
    assert answer.verb == verb
    assert client.kinds == expected
    if verb == wires.Verb.SNAPSHOT:
      assert answer.version == server.clock

  check(client.join(), wires.Verb.SNAPSHOT)
  for start in (0, 6):  # Pushes after 2, 4 and 6 steps; fetches after 3 and 6.
    keep = wires.Flag.KEEPS_WEIGHTS
    check(client.push(keep), wires.Verb.ANSWER, Kind.PUSH)
    check(client.fetch(start + 3), wires.Verb.SNAPSHOT, Kind.FETCH)
    check(client.push(keep), wires.Verb.ANSWER, Kind.PUSH)
    check(client.push(), wires.Verb.SNAPSHOT, Kind.PUSH, Kind.FETCH)
  assert client.num_answers == 9


@pytest.mark.parametrize(
  ('protocol', 'kinds'),
  [
    (protocols.asynchronous, [Kind.PUSH]),
    # A learner whose own replica is not finite joins again.
    (
      lambda: protocols.downpour(2, 3),
      [Kind.PUSH, Kind.LEAVE, Kind.JOIN, Kind.FETCH],
    ),
  ],
  ids=['asynchronous', 'downpour'],
)
def test_a_notice_is_answered_after_its_record(
  open_server, folder, protocol, kinds
):
  """The end of a diverged run is recorded before the learner is told."""
  client = Client(open_server(protocol()), folder)
  client.join()
  expected = list(client.kinds)
  while (answer := client.notice()).verb == wires.Verb.SNAPSHOT:
    expected += kinds
    assert client.kinds == expected
  assert answer.verb == wires.Verb.END
  assert client.kinds == [*expected, Kind.PUSH, Kind.END, Kind.LEAVE]
  assert 2 < client.num_answers < 20


def test_weights_that_cannot_be_recorded_are_not_published(
  server, folder, monkeypatch
):
  """The disk is full: no client may see weights that replay cannot make."""
  client, visitor = Client(server, folder), Client(server, folder)
  client.join()
  assert client.push().version == 1

  def fail(writer):
    raise OSError('No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(traces.TraceWriter, 'flush', fail)
    with pytest.raises(OSError, match='No space'):
      client.push()
  assert server.clock == 2
  assert client.answer.version == 1
  assert visitor.ask(wires.Verb.PULL).version == 1


def test_a_trace_that_cannot_be_synced_has_no_new_checkpoint(
  server, folder, monkeypatch
):
  """After a loss of power, no checkpoint refers to records that are lost."""
  client = Client(server, folder)
  client.join()
  client.push()
  assert workdir.list_checkpoints(folder) == [0]

  def fail(writer):
    raise OSError('Input/output error')

  with monkeypatch.context() as patch:
    patch.setattr(traces.TraceWriter, 'sync', fail)
    with pytest.raises(OSError, match='Input/output'):
      server.finish()
  assert workdir.list_checkpoints(folder) == [0]
  server.finish()
  assert workdir.list_checkpoints(folder)[-1] == 1


def test_a_node_publishes_after_its_record_is_flushed(tmp_path, monkeypatch):
  """When a record reaches the file, peers still see the earlier version."""
  flush = traces.TraceWriter.flush
  append = traces.TraceWriter.append
  appended, pulled = {}, []

  def note_append(writer, records):
    appended[writer.path] = records
    append(writer, records)

  def pull_and_flush(writer):
    records = appended.pop(writer.path, None)
    if records is not None and records['kind'][0] == traces.Kind.STEP:
      pulled.append((int(records['version'][0]), _pull_version(group)))
    flush(writer)

  monkeypatch.setattr(traces.TraceWriter, 'append', note_append)
  monkeypatch.setattr(traces.TraceWriter, 'flush', pull_and_flush)
  with peer_cases.start_group(
    tmp_path,
    'pull',
    nodes=[0],
    num_steps=5,
    deadlines=runtime.Deadlines(start=1e-3),
  ) as group:
    group.wait()
  assert pulled == [(version, version - 1) for version in range(1, 6)]


def _pull_version(group):
  """The version that node 0 has published."""
  size = group.settings.make_layout().size
  connection = runtime.Registry(group.run).connect(0)(size)
  message = wires.Message(wires.Verb.PULL)
  version = connection.request(message, deadline=peer_cases.PATIENCE).version
  connection.close()
  return version


def test_gradients_that_are_not_finite_are_never_applied():
  """Learners say so instead, and the server ends a run that diverges."""
  server, trace = cases.train(
    cases.make_task(),
    protocols.asynchronous(),
    optimizer=optax.sgd(1e38, 0.9),
    num_learners=2,
    num_updates=1000,
  )
  assert server.describe()['is_diverged']
  assert 'not finite' in server.end_reason
  assert protocols.Fate.NOT_FINITE in trace.fate


def test_a_gradient_is_computed_in_float32_at_rounded_weights():
  """Messages of bfloat16 are cast back before anything is computed."""
  task = cases.make_task()
  weights = task.init(jax.random.key(0))
  weights = jax.tree.map(lambda leaf: leaf + 1 / 3, weights)
  rounded = jax.tree.map(
    lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype), weights
  )
  pushes = []
  for dtype, sent in (('bfloat16', weights), ('float32', rounded)):
    layout = engine.make_layout(weights, dtype)
    message = wires.make_aligned(layout.size)
    layout.pack(sent, message)
    learner = engine.make_learner(task, layout)
    pushes.append(
      learner.compute(
        layout.view(message), task.data, seed=0, learner=0, step=0
      )
    )
  trees.assert_same_bits(*pushes)
