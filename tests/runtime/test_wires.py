"""The contract of every wire, tested on every wire."""

import collections
from concurrent import futures
import contextlib
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jasgd.runtime import wires
from tests.runtime import wire_cases

DEADLINE = wire_cases.DEADLINE
PATIENCE = 2 * DEADLINE  # Deadline of clients that must end sooner.
SIZE = 100_003
Message, Verb = wires.Message, wires.Verb
every_wire = pytest.mark.parametrize('name', wire_cases.EVERY)
every_remote_wire = pytest.mark.parametrize('name', wire_cases.REMOTE)
# Says HELLO on two connections: one is answered, the other one waits. Then it
# lives until it is killed.
CLIENT = """
import sys
from jasgd.runtime import wires
connect = getattr(wires, sys.argv[1])
hello = wires.Message(wires.Verb.HELLO)
connections = []  # None is closed.
for deadline in (30.0, 600.0):
  connections.append(connect(sys.argv[2], int(sys.argv[3]), deadline=30.0))
  connections[-1].request(hello, deadline=deadline)
"""


class Bench:
  """A server, whose owner is the test, with clients in threads."""

  def __init__(self, name, size=SIZE):
    self.inbox = wires.Inbox()
    self.listener, self._connect = wire_cases.EVERY[name](self.inbox, size)
    # Shared memory needs shared buffers; all other wires can use them, too.
    self.pool = wires.BufferPool(size, is_shared=True)
    self._events = collections.deque()
    self._threads = futures.ThreadPoolExecutor(max_workers=8)
    self._connections = []

  def run(self, function, *args, **kwargs):
    """The result of a client's call, while the server collects events."""
    future = self._threads.submit(function, *args, **kwargs)
    future.add_done_callback(self.inbox.put)
    while (event := self.inbox.get(DEADLINE)) is not future:
      assert event is not None, 'The client neither came nor failed.'
      self._events.append(event)
    return future.result(0)

  def connect(self):
    return self.run(self.connect_here)

  def connect_here(self, **kwargs):
    """Connects, in a thread in which the server does not run."""
    connection = self._connect(**kwargs)
    self._connections.append(connection)
    return connection

  def ask(self, connection, message, *, deadline=DEADLINE, **kwargs):
    """The future of an answer, and the event that the server got."""
    future = self.submit(
      connection.request, message, deadline=deadline, **kwargs
    )
    return future, self.get()

  def submit(self, function, *args, **kwargs):
    return self._threads.submit(function, *args, **kwargs)

  def get(self):
    """The next event; there must be one."""
    event = self.peek(DEADLINE)
    assert event is not None
    return event

  def peek(self, timeout=0.1):
    """The next event, if there is one."""
    return self._events.popleft() if self._events else self.inbox.get(timeout)

  def fill(self, contents):
    """A snapshot."""
    buffer = self.pool.take()
    buffer.array[:] = contents
    return buffer

  def close(self):
    for connection in self._connections:
      connection.close()
    self.listener.close()
    self._threads.shutdown()
    self.inbox.close()
    self.pool.close()


@pytest.fixture
def bench(name):
  bench = Bench(name)
  yield bench
  bench.close()


def _draw(seed, size=SIZE):
  return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def _assert_gone(event, channel):
  assert event == wires.Event(channel)


@every_wire
@pytest.mark.parametrize('size', [1, 64, SIZE, 5_000_000])
def test_bits_both_ways(name, size):
  bench = Bench(name, size)
  connection = bench.connect()
  gradient, weights = _draw(1, size), _draw(2, size)
  assert connection.outgoing.shape == (size,)
  assert connection.outgoing.dtype == np.uint8
  connection.outgoing[:] = gradient
  future, event = bench.ask(
    connection, Message(Verb.EXCHANGE), has_payload=True
  )
  payload = event.message.payload
  assert payload.dtype == np.uint8
  assert payload.ctypes.data % wires.ALIGNMENT == 0
  np.testing.assert_array_equal(payload, gradient)
  event.channel.send(Message(Verb.SNAPSHOT), bench.fill(weights))
  answer = future.result(DEADLINE)
  np.testing.assert_array_equal(answer.payload, weights)
  assert answer.payload.dtype == np.uint8
  assert answer.payload.ctypes.data % wires.ALIGNMENT == 0
  assert not answer.payload.flags.writeable
  assert connection.outgoing.ctypes.data % wires.ALIGNMENT == 0
  bench.close()


@every_wire
def test_every_field_both_ways(name, bench):
  fields = {
    'fate': 3,
    'flags': 13,
    'worker': 2**31 - 1,
    'incarnation': 4,
    'push': 2**41,
    'step': 2**40,
    'version': 2**50 + 1,
    'seconds': 0.1,
    'loss': float('inf'),
    'rate': -1e-300,
    'share': 0.25,
    'mass': 1e300,
    'elastic_rate': 0.125,
    'read_version': 2**60,
    'text': 'Grüße',
  }
  every = {field.name for field in dataclasses.fields(Message)}
  assert every == {'verb', *fields, 'payload', 'copy_seconds'}
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.HELLO, **fields))
  assert event == (event.channel, Message(Verb.HELLO, **fields), None)
  assert event.channel.name
  assert hash(event.channel) is not None
  event.channel.send(Message(Verb.ANSWER, **fields))
  assert future.result(DEADLINE) == Message(Verb.ANSWER, **fields)


@every_wire
def test_the_payload_of_an_answer_is_the_snapshot_or_nothing(name, bench):
  connection = bench.connect()
  message = Message(Verb.ANSWER, payload=np.zeros(3, np.uint8))
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(message)
  assert future.result(DEADLINE).payload is None
  message = Message(Verb.SNAPSHOT, payload=np.zeros(3, np.uint8))
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(message, bench.fill(9))
  assert (future.result(DEADLINE).payload == 9).all()


@every_wire
def test_many_rounds_leave_the_last_two_payloads_intact(name, bench):
  connection = bench.connect()
  leased = collections.deque()
  answers = collections.deque(maxlen=2)
  for round_index in range(40):
    connection.outgoing[:] = _draw(2 * round_index)
    future, event = bench.ask(
      connection,
      Message(Verb.EXCHANGE, step=round_index),
      has_payload=True,
    )
    assert event.message.step == round_index
    np.testing.assert_array_equal(event.message.payload, _draw(2 * round_index))
    if len(leased) == 2:  # The client may use the last two.
      bench.pool.give_back(leased.popleft())
    leased.append(bench.fill(_draw(2 * round_index + 1)))
    event.channel.send(Message(Verb.SNAPSHOT, version=round_index), leased[-1])
    answers.append(future.result(DEADLINE))
    for answer in answers:
      np.testing.assert_array_equal(
        answer.payload, _draw(2 * answer.version + 1)
      )
  assert [answer.version for answer in answers] == [38, 39]
  assert len(bench.pool) == 2


@every_wire
def test_an_answer_without_weights_leaves_those_before(name, bench):
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(Message(Verb.SNAPSHOT), bench.fill(1))
  first = future.result(DEADLINE)
  for _ in range(3):
    future, event = bench.ask(connection, Message(Verb.STATUS))
    event.channel.send(Message(Verb.ANSWER))
    future.result(DEADLINE)
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(Message(Verb.SNAPSHOT), bench.fill(2))
  assert (future.result(DEADLINE).payload == 2).all()
  assert (first.payload == 1).all()


def _exchange_often(connection, learner, num_rounds):
  """Sends a value of this learner only, and expects that plus one."""
  for step in range(num_rounds):
    contents = (17 * learner + step) % 200
    connection.outgoing[:] = contents
    answer = connection.request(
      Message(Verb.EXCHANGE, worker=learner, step=step),
      has_payload=True,
      deadline=DEADLINE,
    )
    assert (answer.worker, answer.step) == (learner, step)
    assert (answer.payload == contents + 1).all()


@every_wire
def test_several_clients_at_once(name, bench):
  num_clients, num_rounds = 4, 25
  connections = [bench.connect() for _ in range(num_clients)]
  clients = [
    bench.submit(_exchange_often, connection, learner, num_rounds)
    for learner, connection in enumerate(connections)
  ]
  channels, leases = {}, {}
  for _ in range(num_clients * num_rounds):
    channel, message, error = bench.get()
    assert error is None
    assert channels.setdefault(message.worker, channel) is channel
    lease = leases.setdefault(message.worker, collections.deque())
    if len(lease) == 2:
      bench.pool.give_back(lease.popleft())
    lease.append(bench.fill(message.payload + 1))
    channel.send(
      Message(Verb.SNAPSHOT, worker=message.worker, step=message.step),
      lease[-1],
    )
  for client in clients:
    client.result(DEADLINE)
  assert len(set(channels.values())) == num_clients


@every_wire
def test_answers_may_be_given_in_any_order(name, bench):
  connections = [bench.connect() for _ in range(3)]
  asked = [
    bench.ask(connection, Message(Verb.FETCH, worker=learner))
    for learner, connection in enumerate(connections)
  ]
  for future, event in reversed(asked):
    assert not future.done()
    event.channel.send(Message(Verb.ANSWER, worker=event.message.worker))
    assert future.result(DEADLINE).worker == event.message.worker


def test_wait_renews_the_deadline():
  """Tests all wires at once, as this takes longer than the deadline."""
  with contextlib.ExitStack() as stack:
    waits, requests = {}, []
    start = time.monotonic()
    for name in wire_cases.EVERY:
      bench = stack.enter_context(contextlib.closing(Bench(name)))
      waits[name] = []
      future, event = bench.ask(
        bench.connect(),
        Message(Verb.FETCH),
        deadline=2.5,
        on_wait=waits[name].append,
      )
      requests.append((bench, future, event.channel))
    for reason in 'abcd':
      for number, (bench, _, channel) in enumerate(requests):
        assert bench.peek(0 if number else 0.6) is None
        channel.send(Message(Verb.WAIT, text=reason))
    for number, (bench, future, channel) in enumerate(requests):
      assert bench.peek(0 if number else 0.6) is None
      channel.send(Message(Verb.ANSWER))
      assert future.result(DEADLINE).verb == Verb.ANSWER
    assert waits == {name: ['a', 'b', 'c', 'd'] for name in wire_cases.EVERY}
    assert time.monotonic() - start > 2.5  # Otherwise no WAIT was needed.


@every_wire
def test_wait_without_a_listener(name, bench):
  future, event = bench.ask(bench.connect(), Message(Verb.FETCH))
  event.channel.send(Message(Verb.WAIT, text='why'))
  event.channel.send(Message(Verb.ANSWER))
  assert future.result(DEADLINE).verb == Verb.ANSWER


@every_wire
def test_a_silent_server_counts_as_gone(name, bench):
  connection = bench.connect()
  start = time.monotonic()
  future, event = bench.ask(connection, Message(Verb.FETCH), deadline=0.2)
  with pytest.raises(wires.WireError, match=r'0\.2') as caught:
    future.result(DEADLINE)
  # The server may have handled the request.
  assert caught.type is wires.WireError
  assert time.monotonic() - start > 0.19
  _assert_gone(bench.get(), event.channel)
  event.channel.send(Message(Verb.ANSWER))
  with pytest.raises(wires.WireError):
    bench.run(connection.request, Message(Verb.FETCH), deadline=DEADLINE)
  assert bench.peek() is None


@every_wire
def test_a_request_that_was_broken_off_leaves_no_answer(name, bench):
  connection = bench.connect()

  def give_up(reason):
    raise KeyboardInterrupt(reason)

  future, event = bench.ask(connection, Message(Verb.FETCH), on_wait=give_up)
  event.channel.send(Message(Verb.WAIT, text='enough'))
  with pytest.raises(KeyboardInterrupt, match='enough'):
    future.result(DEADLINE)
  event.channel.send(Message(Verb.ANSWER, text='to the first request'))
  with pytest.raises(wires.WireError):
    bench.run(connection.request, Message(Verb.FETCH), deadline=DEADLINE)
  _assert_gone(bench.get(), event.channel)


@every_wire
def test_a_client_may_go_on_after_a_refusal(name, bench):
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.HELLO))
  event.channel.send(Message(Verb.REFUSED, text='Say HELLO first.'))
  with pytest.raises(wires.RefusedError, match='Say HELLO first'):
    future.result(DEADLINE)
  future, event = bench.ask(connection, Message(Verb.HELLO))
  event.channel.send(Message(Verb.ANSWER, text='Welcome.'))
  assert future.result(DEADLINE).text == 'Welcome.'


@every_remote_wire
@pytest.mark.parametrize('size', [1, SIZE - 1, SIZE + 1, 10 * SIZE])
def test_a_payload_of_another_size_is_refused(name, size, bench):
  def push():
    connection = bench.connect_here(payload_size=size)
    connection.request(
      Message(Verb.EXCHANGE), has_payload=True, deadline=DEADLINE
    )

  with pytest.raises(
    wires.RefusedError, match=f'{SIZE}.* {size}|{size}.*{SIZE}'
  ):
    bench.run(push)
  while (event := bench.peek()) is not None:
    assert event.message is None
    assert event.error is None or event.error.reason == 'size'


@every_wire
def test_the_server_disconnects(name, bench):
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.FETCH), deadline=PATIENCE)
  event.channel.close()
  event.channel.close()
  with pytest.raises(wires.WireError):
    future.result(DEADLINE)
  with pytest.raises(wires.WireError):
    bench.run(connection.request, Message(Verb.FETCH), deadline=DEADLINE)
  event.channel.send(Message(Verb.ANSWER))
  connection.close()
  assert bench.peek() is None


@every_remote_wire
@pytest.mark.parametrize('is_idle', [False, True])
def test_a_request_after_the_disconnect_is_untaken(name, is_idle, bench):
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(Message(Verb.ANSWER))
  future.result(DEADLINE)
  if is_idle:
    bench.listener.close()
  future = bench.submit(
    connection.request, Message(Verb.EXCHANGE), deadline=PATIENCE
  )
  bench.listener.close()  # The last event may have arrived or not.
  with pytest.raises(wires.UntakenError):
    future.result(PATIENCE)


@every_wire
def test_answers_arrive_before_the_server_disconnects(name, bench):
  connection = bench.connect()
  waits = []
  future, event = bench.ask(
    connection, Message(Verb.EXCHANGE), on_wait=waits.append
  )
  event.channel.send(Message(Verb.WAIT, text='wait'))
  event.channel.send(Message(Verb.END, text='enough'), bench.fill(5))
  event.channel.close()
  answer = future.result(DEADLINE)
  assert waits == ['wait']
  assert (answer.verb, answer.text) == (Verb.END, 'enough')
  assert (answer.payload == 5).all()
  with pytest.raises(wires.WireError):
    bench.run(connection.request, Message(Verb.FETCH), deadline=DEADLINE)
  assert bench.peek() is None


@every_wire
def test_a_client_disconnects(name, bench):
  connection, other = bench.connect(), bench.connect()
  future, event = bench.ask(connection, Message(Verb.LEAVE))
  event.channel.send(Message(Verb.ANSWER))
  future.result(DEADLINE)
  connection.close()
  connection.close()
  _assert_gone(bench.get(), event.channel)
  for snapshot in (None, bench.fill(1)):  # Does nothing.
    event.channel.send(Message(Verb.ANSWER), snapshot)
  event.channel.close()
  assert bench.peek() is None
  future, event = bench.ask(other, Message(Verb.FETCH))
  event.channel.send(Message(Verb.ANSWER))
  future.result(DEADLINE)


@every_wire
def test_answers_to_a_client_that_has_just_gone(name, bench):
  connection = bench.connect()
  future, event = bench.ask(connection, Message(Verb.FETCH))
  event.channel.send(Message(Verb.ANSWER))
  future.result(DEADLINE)
  connection.close()
  for snapshot in (None, bench.fill(1), bench.fill(2)):
    event.channel.send(Message(Verb.ANSWER), snapshot)
  _assert_gone(bench.get(), event.channel)
  assert bench.peek() is None


@every_remote_wire
def test_a_client_is_killed(name, bench):
  """Both its channels end: the answered one and the waiting one."""
  arguments = [wire_cases.REMOTE[name], bench.listener.address, str(SIZE)]
  process = subprocess.Popen(
    [sys.executable, '-c', CLIENT, *arguments],
    cwd=os.getcwd(),
  )
  try:
    answered = bench.get()
    answered.channel.send(Message(Verb.SNAPSHOT), bench.fill(1))
    waiting = bench.get()
    for event in (answered, waiting):
      assert event.message.verb == Verb.HELLO
      assert event.channel.pid in (0, process.pid)
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE) == -signal.SIGKILL
  finally:
    process.kill()
    process.communicate(timeout=DEADLINE)
  lost = {bench.get(), bench.get()}
  assert lost == {wires.Event(answered.channel), wires.Event(waiting.channel)}
  for event in (answered, waiting):
    event.channel.send(Message(Verb.ANSWER))
  assert bench.peek() is None


def _use_and_close(name):
  """A server with a client that waits and one that does not; all is closed."""
  bench = Bench(name)
  parked, idle = bench.connect(), bench.connect()
  future, event = bench.ask(idle, Message(Verb.FETCH))
  event.channel.send(Message(Verb.SNAPSHOT), bench.fill(1))
  future.result(DEADLINE)
  future, _ = bench.ask(parked, Message(Verb.FETCH), deadline=PATIENCE)
  bench.listener.close()
  bench.listener.close()
  with pytest.raises(wires.WireError):
    future.result(DEADLINE)
  with pytest.raises(wires.WireError):
    idle.request(Message(Verb.FETCH), deadline=DEADLINE)
  with pytest.raises(wires.WireError):
    bench.run(bench.connect_here)
  assert bench.peek() is None
  bench.close()


@every_wire
def test_nothing_is_left_of_a_server(name):
  _use_and_close(name)  # The first call may make objects that are kept.
  gc.collect()
  threads = set(threading.enumerate())
  fds = len(os.listdir('/proc/self/fd'))
  _use_and_close(name)
  gc.collect()
  assert set(threading.enumerate()) <= threads
  # gRPC closes its polling descriptors a moment after its last call.
  give_up = time.monotonic() + DEADLINE
  while len(os.listdir('/proc/self/fd')) > fds:
    assert time.monotonic() < give_up


@every_remote_wire
def test_texts_are_clean_on_both_sides(bench):
  """Texts of the other side are printable and short."""
  text = '\x1b[2J\u202e' + 'x' * 60_000
  message = Message(Verb.STOP, text=text)
  future, event = bench.ask(bench.connect(), message)
  event.channel.send(Message(Verb.REFUSED, text=text))
  with pytest.raises(wires.RefusedError) as caught:
    future.result(DEADLINE)
  for found in (event.message.text, str(caught.value)):
    assert found.startswith('?[2J?xxx')
    assert found.endswith('x...')
    assert len(found) == wires.MAX_SHOWN
