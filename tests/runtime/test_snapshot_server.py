"""The snapshot server of a node: answers and refusals, over the queue wire."""

import contextlib
import json
import os
import queue
import threading

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd.runtime import nodes
from jasgd.runtime import wires

Message, Verb = wires.Message, wires.Verb
PATIENCE = 30.0  # Seconds: never reached, unless something is broken.
FINGERPRINT = 'of this run'
SIZE = 5
ADDRESS = '10.0.0.1:4000'


def make_weights(value):
  """(params, stats), all of one value."""
  return {'w': np.full(SIZE, value, np.float32)}, {}


LAYOUT = engine.make_layout(make_weights(0))


class Bench:
  """A snapshot server without a thread, and its calls to the owner."""

  def __init__(self, **options):
    self.received, self.nodes = [], []
    self.fate = gossip.Outcome.TAKEN
    self.status = {'step': 3, 'members': {'1': [ADDRESS, 0.5]}}
    options = {'is_shared': False, 'receive': self._receive, **options}
    self.server = nodes.SnapshotServer(
      LAYOUT,
      FINGERPRINT,
      describe=lambda: self.status,
      on_node=lambda *said: self.nodes.append(said),
      **options,
    )
    self.listener = wires.QueueListener(self.server.inbox, LAYOUT.size)

  def _receive(self, message):
    self.received.append((message.worker, message.payload.copy()))
    return self.fate

  def step(self):
    """Handles all messages that have come."""
    while self.server.handle_one(0):
      pass

  def publish(self, version):
    """Publishes weights that have the version in each number."""
    weights = make_weights(version)
    self.server.publish(weights, version, 2 * version, version / 4)

  def list_free(self):
    """The free buffers, without repetitions."""
    free = [buffer.index for buffer in self.server._store._pool._free]
    assert len(set(free)) == len(free)
    return free

  def check_refused(self, answer, *texts, count=1):
    """Checks that a message was refused with a reason, and counted."""
    assert answer.verb == Verb.REFUSED
    for text in texts:
      assert text in answer.text
    assert self.server.desk.num_refused == count

  def close(self):
    self.listener.close()
    self.server.close()


class Client:
  """The other end of a channel. It never blocks."""

  def __init__(self, bench):
    self._bench = bench
    self.connection = bench.listener.connect()
    self.channel = self.connection._channel

  def ask(self, verb, **fields):
    """The one answer to a message."""
    self.channel.receive(Message(verb, **fields))
    self._bench.step()
    answer = self.channel.answers.get_nowait()
    with pytest.raises(queue.Empty):
      self.channel.answers.get_nowait()
    return answer

  def hello(self, fingerprint=FINGERPRINT, node=1, address=None, since=1.5):
    text = nodes.make_hello(fingerprint, node, address, since)
    return self.ask(Verb.HELLO, text=text)

  def push(self, value=1.0, worker=1):
    payload = self.connection.outgoing
    LAYOUT.pack(make_weights(value), payload)
    return self.ask(Verb.EXCHANGE, worker=worker, payload=payload)

  def pull(self):
    return read(self.ask(Verb.PULL))

  def disconnect(self):
    self.connection.close()
    self._bench.step()


def read(answer):
  """Version, step, mass and all numbers of the weights in an answer."""
  assert answer.verb == Verb.SNAPSHOT
  params, _ = LAYOUT.unpack(answer.payload)
  return answer.version, answer.step, answer.mass, params['w'].tolist()


def expect(version):
  """The result of `pull` for a version that `Bench.publish` published."""
  return version, 2 * version, version / 4, [float(version)] * SIZE


@pytest.fixture
def bench():
  with contextlib.closing(Bench()) as bench:
    yield bench


# --- HELLO.


@pytest.mark.parametrize(
  'said',
  [
    (1, ADDRESS, 1.5),
    (1, None, 1.5),
    (0, 'grpc+tls://a.b:1', 0),
    (traces.SERVER, ADDRESS, -3.0),
  ],
)
def test_nodes_of_the_same_run_may_send(bench, said):
  client = Client(bench)
  assert client.hello(FINGERPRINT, *said).verb == Verb.ANSWER
  assert bench.nodes == [said]
  assert client.push().verb == Verb.ANSWER
  assert bench.server.desk.num_refused == 0


def test_nodes_of_another_run_are_refused(bench):
  client = Client(bench)
  answer = client.hello('another run', address=ADDRESS)
  bench.check_refused(answer, "'another run'", repr(FINGERPRINT))
  assert bench.nodes == []
  bench.check_refused(client.push(), 'Say HELLO before EXCHANGE', count=2)
  assert bench.received == []
  assert client.hello().verb == Verb.ANSWER
  assert client.push().verb == Verb.ANSWER


def test_a_client_that_leaves_must_say_hello_again(bench):
  client, other = Client(bench), Client(bench)
  client.hello()
  other.hello(node=2)
  assert client.ask(Verb.LEAVE).verb == Verb.ANSWER
  bench.check_refused(client.push(), 'HELLO')
  assert other.push().verb == Verb.ANSWER
  assert client.hello().verb == Verb.ANSWER
  assert client.push().verb == Verb.ANSWER


def make_hello(**changes):
  said = {
    'fingerprint': FINGERPRINT,
    'node': 1,
    'address': None,
    'since': 1.5,
  }
  return json.dumps({**said, **changes})


BAD_HELLOS = {
  'nothing': '',
  'no JSON': '{',
  'a number': '7',
  'a text': '"fingerprint"',
  'a list': '["fingerprint", "node", "address", "since"]',
  'deep': '[' * 60_000,
  'a deep field': '{"fingerprint": ' + '{"a": ' * 9_000,
  'a field is missing': '{"fingerprint": "of this run", "node": 1}',
  'fingerprint': make_hello(fingerprint=None),
  'node, text': make_hello(node='1'),
  'node, fraction': make_hello(node=1.0),
  'node, bool': make_hello(node=True),
  'node, negative': make_hello(node=-2),
  'node, too large': make_hello(node=1 << 31),
  'address, number': make_hello(address=4000),
  'address, none': make_hello(address=''),
  'address, no port': make_hello(address='localhost'),
  'address, no such port': make_hello(address='localhost:65536'),
  'address, surrogate': make_hello(address='\ud800:4000'),
  'since, text': make_hello(since='now'),
  'since, bool': make_hello(since=True),
  'since, NaN': make_hello(since=float('nan')),
  'since, infinite': make_hello(since=float('inf')),
  'since, too large': make_hello(since=10**400),
  'digits': '{"since": ' + '1' * 60_000 + '}',
}


@pytest.mark.parametrize('name', BAD_HELLOS)
def test_bad_fields_are_refused(bench, name):
  client = Client(bench)
  answer = client.ask(Verb.HELLO, text=BAD_HELLOS[name])
  bench.check_refused(answer)
  assert len(answer.text) < 1000
  assert bench.nodes == []
  bench.check_refused(client.push(), 'HELLO', count=2)


ANYTHING = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=5,
)
FIELDS = st.fixed_dictionaries(
  {
    'fingerprint': st.just(FINGERPRINT) | ANYTHING,
    'node': st.integers(-3, 3) | ANYTHING,
    'address': st.from_regex(r'.{1,3}:\d{1,6}') | ANYTHING,
    'since': st.floats() | ANYTHING,
  }
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
  text=st.text('[]{}":,0123456789.eE- ntfula\\') | FIELDS.map(json.dumps)
)
def test_any_hello_is_refused_or_usable(text):
  """It is refused and counted, or other nodes can use its fields."""
  with contextlib.closing(Bench()) as bench:
    answer = Client(bench).ask(Verb.HELLO, text=text)
    is_refused = answer.verb == Verb.REFUSED
    assert bench.server.desk.num_refused == is_refused
    assert len(bench.nodes) == (not is_refused)
    answer.text.encode()
    assert len(answer.text) < 1000
    for node, address, since in bench.nodes:
      assert node == traces.SERVER or node in range(1 << 31)
      assert -np.inf < since < np.inf
      if address is not None:
        wires.make_connect(server=address)
        address.encode()


# --- EXCHANGE, and other messages.


@pytest.mark.parametrize('fate', [gossip.Outcome.TAKEN, gossip.Outcome.FULL])
def test_the_answer_has_the_outcome(bench, fate):
  bench.fate = fate
  client = Client(bench)
  client.hello()
  answer = client.push(7.0, worker=4)
  assert (answer.verb, answer.fate) == (Verb.ANSWER, fate)
  ((worker, payload),) = bench.received
  assert worker == 4
  assert LAYOUT.unpack(payload)[0]['w'].tolist() == [7.0] * SIZE


def test_an_exchange_needs_a_payload(bench):
  client = Client(bench)
  client.hello()
  answer = client.ask(Verb.EXCHANGE, worker=1)
  bench.check_refused(answer, 'EXCHANGE must have a payload')
  assert bench.received == []


def test_refusals_of_the_owner_are_counted():
  def refuse(message):
    raise wires.MessageError('share', f'No {message.worker}.')

  with contextlib.closing(Bench(receive=refuse)) as bench:
    client = Client(bench)
    client.hello()
    bench.check_refused(client.push(worker=8), 'No 8.')
    bench.check_refused(client.push(worker=9), 'No 9.', count=2)


def test_refusals_of_the_wire_are_counted(bench, caplog):
  channel = Client(bench).channel
  for count in range(1, 4):
    error = wires.MessageError('garbage', f'It is no message {count}.')
    bench.server.inbox.put(wires.Event(channel, error=error))
    bench.step()
    assert bench.server.desk.num_refused == count
  # Strangers cannot fill the logs.
  assert [record.message for record in caplog.records] == [
    f'Refused (garbage), from {channel.name}: It is no message 1.'
  ]
  with pytest.raises(queue.Empty):  # The wire has already answered.
    channel.answers.get_nowait()


@pytest.mark.parametrize(
  'verb',
  sorted(
    set(Verb)
    - {Verb.HELLO, Verb.EXCHANGE, Verb.PULL, Verb.STATUS, Verb.STOP}
    - {Verb.LEAVE, Verb.LOST}
  ),
)
def test_other_verbs_are_refused(bench, verb):
  bench.publish(1)
  bench.check_refused(Client(bench).ask(verb), verb.name)
  assert not bench.server.stopped.is_set()


def test_a_node_that_died_counts_as_come(bench):
  client = Client(bench)
  assert client.ask(Verb.LOST, worker=2).verb == Verb.ANSWER
  assert [node for node, *_ in bench.nodes] == [2]
  answer = client.ask(Verb.LOST, worker=-2)
  bench.check_refused(answer, 'must be at least 0, got -2')
  assert len(bench.nodes) == 1


def test_status_is_that_of_the_owner(bench):
  client = Client(bench)
  for step in (3, 4):
    bench.status['step'] = step
    answer = client.ask(Verb.STATUS)
    assert json.loads(answer.text) == bench.status


def test_status_of_very_many_nodes_can_be_sent(bench):
  bench.status['members'] = {
    str(node): [f'node-{node}.cluster:40000', 1.7e9 + node / 7]
    for node in range(2_000)
  }
  assert len(json.dumps(bench.status)) > wires.MAX_TEXT
  answer = Client(bench).ask(Verb.STATUS)
  wires.encode_message(answer)
  assert json.loads(answer.text) == {**bench.status, 'members': {}}


def test_stop_sets_the_event_of_the_owner(bench):
  client = Client(bench)
  bench.publish(1)
  assert not bench.server.stopped.is_set()
  for _ in range(2):
    assert client.ask(Verb.STOP).verb == Verb.ANSWER
    assert bench.server.stopped.is_set()
  assert client.pull() == expect(1)  # It answers until its owner ends it.


# --- PULL.


def test_a_pull_gives_the_newest_weights(bench):
  client = Client(bench)  # Without a HELLO.
  bench.check_refused(client.ask(Verb.PULL), 'no weights yet')
  for version in (0, 1, 2, 5):
    weights = make_weights(version)
    bench.server.publish(weights, version, 2 * version, version / 4)
    weights[0]['w'][:] = -1  # The published weights are a copy.
    assert client.pull() == client.pull() == expect(version)
  assert bench.server.desk.num_sent == 8


def test_a_leased_snapshot_does_not_change(bench):
  bench.publish(1)
  clients = [Client(bench) for _ in range(3)]
  answers = []
  for version, client in enumerate(clients, 1):
    answers.append(client.ask(Verb.PULL))
    for _ in range(5):
      bench.publish(version + 1)
  for version, answer in enumerate(answers, 1):
    assert read(answer) == expect(version)
    with pytest.raises(ValueError, match='read-only'):
      answer.payload[0] = 1
  assert clients[0].pull() == expect(4)


@pytest.mark.parametrize('how', ['disconnect', 'leave', 'both', 'neither'])
def test_buffers_are_used_again(bench, how):
  """Three at once: the newest, a leased one, and the one that is written."""
  client = Client(bench)
  for version in range(100):
    bench.publish(version)
    assert client.pull() == expect(version)
    bench.publish(version)
    bench.publish(version)
    if how in ('leave', 'both'):
      assert client.ask(Verb.LEAVE).verb == Verb.ANSWER
    if how in ('disconnect', 'both'):
      client.disconnect()
      client = Client(bench)
    bench.list_free()
  assert len(bench.server._store) == 3
  # All but the newest, and a leased one.
  assert len(bench.list_free()) == (1 if how == 'neither' else 2)
  assert bool(bench.server.desk.list_leased()) == (how == 'neither')


def test_descriptors_are_closed():
  with contextlib.closing(Bench(is_shared=True)) as bench:
    clients = [Client(bench) for _ in range(3)]
    for version, client in enumerate(clients):
      bench.publish(version)
      client.pull()
    buffers = bench.server._store._pool._buffers
    assert len({buffer.fd for buffer in buffers}) == 3
    for buffer in buffers:
      assert os.fstat(buffer.fd).st_size == LAYOUT.size
  assert [buffer.fd for buffer in buffers] == [-1] * 3


# --- Its thread.


def test_every_pull_is_of_one_version(bench):
  """One thread publishes, one answers, and this one pulls."""
  num_versions = 2_000
  bench.publish(0)

  def publish():
    for version in range(1, num_versions + 1):
      bench.publish(version)

  threads = [
    threading.Thread(target=bench.server.run),
    threading.Thread(target=publish),
  ]
  for thread in threads:
    thread.start()
  versions = [0]
  connection = bench.listener.connect()
  try:
    while versions[-1] < num_versions:
      answer = connection.request(Message(Verb.PULL), deadline=PATIENCE)
      first = read(answer)
      assert first == expect(answer.version)
      versions.append(answer.version)
      assert read(answer) == first  # Later publications do not change it.
  finally:
    bench.server.stop()
    for thread in threads:
      thread.join(PATIENCE)
  assert not any(thread.is_alive() for thread in threads)
  assert versions == sorted(versions)
  assert bench.server.desk.num_sent == len(versions) - 1
  assert len(bench.server._store) <= 3


def test_messages_in_the_inbox_are_answered_before_run_ends(bench):
  """Otherwise their senders would not know the outcome."""
  clients = [Client(bench) for _ in range(3)]
  for client in clients:
    client.channel.receive(Message(Verb.STATUS))
  bench.server.stop()
  bench.server.run()
  for client in clients:
    assert client.channel.answers.get_nowait().verb == Verb.ANSWER
  assert not bench.server.handle_one(0)
  bench.server.run()  # Ends at once.


def test_the_owner_raises_the_error_of_run():
  """A process that cannot answer must end."""

  def fail(message):
    raise OSError('No space left')

  with contextlib.closing(Bench(receive=fail)) as bench:
    bench.server.check()
    client = Client(bench)
    client.hello()
    payload = client.connection.outgoing
    client.channel.receive(Message(Verb.EXCHANGE, worker=1, payload=payload))
    bench.server.run()
    assert bench.server.stopped.is_set()
    with pytest.raises(OSError, match='No space left'):
      bench.server.check()
