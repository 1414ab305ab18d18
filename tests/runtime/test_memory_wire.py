"""Shared memory: kills, strangers, garbage, and the bytes on the socket."""

from concurrent import futures
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys

import numpy as np
import pytest

from jasgd.runtime import wires

DEADLINE = 60.0  # Seconds: never reached, unless something is broken.
SIZE = 10_000
Message, Verb = wires.Message, wires.Verb
# The format: a message of the server begins with the number of a buffer.
PREFIX = struct.Struct('<i')
NO_PAYLOAD = -1
MAX_PACKET = len(wires.encode_message(Message(Verb.PULL))) + wires.MAX_TEXT
# Answers FETCH with a snapshot, and no other message.
SERVER = """
import sys
from jasgd.runtime import wires
inbox = wires.Inbox()
listener = wires.MemoryListener(inbox, int(sys.argv[1]))
print(listener.address, flush=True)
snapshot = wires.Buffer(0, int(sys.argv[1]), is_shared=True)
snapshot.array[:] = 7
while (event := inbox.get(60)) is not None:
  if event.message and event.message.verb == wires.Verb.FETCH:
    answer = wires.Message(wires.Verb.SNAPSHOT)
    event.channel.send(answer, snapshot)
"""
# Asks, and waits for ever.
CLIENT = """
import sys
from jasgd.runtime import wires
address, size = sys.argv[1], int(sys.argv[2])
connection = wires.connect_memory(address, size, 30.0)
connection.outgoing[:] = 5
fetch = wires.Message(wires.Verb.EXCHANGE)
connection.request(fetch, has_payload=True, deadline=60.0)
connection.request(fetch, has_payload=True, deadline=60.0)
"""


class Server:
  """A listener whose owner is the test."""

  def __init__(self, **kwargs):
    self.inbox = wires.Inbox()
    self.listener = wires.MemoryListener(self.inbox, SIZE, **kwargs)
    self.name = '\0' + self.listener.address.removeprefix('memory:@')
    self.pool = wires.BufferPool(SIZE, is_shared=True)

  def get(self):
    event = self.inbox.get(DEADLINE)
    assert event is not None
    return event

  def close(self):
    self.listener.close()
    self.inbox.close()
    self.pool.close()


@pytest.fixture
def server():
  server = Server()
  yield server
  server.close()


@pytest.fixture
def thread():
  with futures.ThreadPoolExecutor(max_workers=1) as executor:
    yield executor


@contextlib.contextmanager
def _start(program, *args):
  """A process of its own; it is gone afterwards."""
  process = subprocess.Popen(
    [sys.executable, '-c', program, *map(str, args)], stdout=subprocess.PIPE
  )
  try:
    yield process
  finally:
    process.kill()
    process.communicate(timeout=DEADLINE)


@contextlib.contextmanager
def _connect_raw(server):
  """An accepted socket that follows no rules; its greeting is unread."""
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
    raw.settimeout(DEADLINE)
    raw.connect(server.name)
    assert server.inbox.get(0) is None
    yield raw


def _connect(server, thread, **kwargs):
  future = thread.submit(
    wires.connect_memory,
    server.listener.address,
    SIZE,
    DEADLINE,
    **kwargs,
  )
  future.add_done_callback(server.inbox.put)
  assert server.inbox.get(DEADLINE) is future
  return future.result(0)


def _receive(raw):
  """Number of the buffer, message, file descriptors."""
  data, fds, _, _ = socket.recv_fds(raw, 100_000, 4)
  (index,) = PREFIX.unpack_from(data)
  message, payload_size = wires.decode_message(data[PREFIX.size :])
  assert payload_size == (0 if index == NO_PAYLOAD else SIZE)
  return index, message, fds


def _has_name(address):
  """Whether there is a socket of that address; others have theirs."""
  with open('/proc/net/unix') as file:
    return any(
      line.split()[-1] == address.removeprefix('memory:') for line in file
    )


def _list_shared(pid='self'):
  """The names of all memory that a process writes, and others can map."""
  with open(f'/proc/{pid}/maps') as file:
    lines = [line.split(maxsplit=5) for line in file]
  return {line[5].strip() for line in lines if line[1] == 'rw-s'}


def _count_memory():
  """Shared memory that this process has."""
  gc.collect()
  with open('/proc/self/maps') as file:
    return sum('memfd:jasgd' in line for line in file)


def _encode(payload_size=0, **kwargs):
  payload = np.zeros(payload_size, np.uint8) if payload_size else None
  message = Message(Verb.EXCHANGE, payload=payload)
  return wires.encode_message(message, **kwargs)


def test_the_server_is_killed(thread):
  memory = _count_memory()
  with _start(SERVER, SIZE) as process:
    address = process.stdout.readline().decode().strip()
    waiting = wires.connect_memory(address, SIZE, DEADLINE)
    connection = wires.connect_memory(address, SIZE, DEADLINE)
    answer = connection.request(Message(Verb.FETCH), deadline=DEADLINE)
    assert _has_name(address)
    # No file in /dev/shm or elsewhere can be left behind.
    assert _list_shared(process.pid) == {'/memfd:jasgd (deleted)'}
    future = thread.submit(
      waiting.request, Message(Verb.STATUS), deadline=DEADLINE
    )
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE) == -signal.SIGKILL
    with pytest.raises(wires.WireError, match=r'gone|closed'):
      future.result(DEADLINE)
    with pytest.raises(wires.WireError, match=r'gone|closed'):
      connection.request(Message(Verb.STATUS), deadline=DEADLINE)
  # The client may use its mapped memory after the end of the server.
  assert (answer.payload == 7).all()
  connection.outgoing[:] = 1
  assert not _has_name(address)
  with pytest.raises(wires.WireError, match='no server'):
    wires.connect_memory(address, SIZE, DEADLINE)
  del connection, waiting, answer, future
  assert _count_memory() == memory


def test_a_client_is_killed(server):
  """It is killed while it reads an answer; in `test_wires`, while it waits."""
  memory = _count_memory()
  with _start(CLIENT, server.listener.address, SIZE) as process:
    event = server.get()
    channel = event.channel
    assert channel.pid == process.pid
    assert (event.message.payload == 5).all()
    assert _list_shared(process.pid) == {'/memfd:jasgd (deleted)'}
    channel.send(Message(Verb.SNAPSHOT), server.pool.take())
    process.send_signal(signal.SIGKILL)
    assert process.wait(DEADLINE) == -signal.SIGKILL
  events = [server.get()]
  while (event := server.inbox.get(0)) is not None:
    events.append(event)
  assert events[-1] == wires.Event(channel)
  assert all(event.message is not None for event in events[:-1])
  del event, events, channel
  assert _count_memory() == memory + len(server.pool)


def test_nothing_is_copied(server, thread):
  connection = _connect(server, thread)
  future = thread.submit(
    connection.request,
    Message(Verb.EXCHANGE),
    has_payload=True,
    deadline=DEADLINE,
  )
  channel, message, _ = server.get()
  connection.outgoing[:] = 3
  assert (message.payload == 3).all()
  assert not message.payload.flags.writeable
  snapshot = server.pool.take()
  channel.send(Message(Verb.SNAPSHOT), snapshot)
  answer = future.result(DEADLINE)
  snapshot.array[:] = 4
  assert (answer.payload == 4).all()
  connection.close()


def test_a_buffer_is_passed_once_to_each_client(server):
  buffers = [server.pool.take() for _ in range(2)]
  for _ in range(2):
    with _connect_raw(server) as raw:
      index, message, fds = _receive(raw)
      assert (index, message.verb, len(fds)) == (-2, Verb.ANSWER, 1)
      outgoing = wires.map_shared(fds[0], SIZE, is_writable=True)
      os.close(fds[0])
      outgoing[:] = 6
      raw.send(_encode(SIZE))
      channel, message, _ = server.get()
      assert (message.payload == 6).all()
      for number, is_new in ((0, True), (1, True), (0, False), (1, False)):
        channel.send(Message(Verb.SNAPSHOT), buffers[number])
        index, _, fds = _receive(raw)
        assert (index, len(fds)) == (number, is_new)
        for fd in fds:
          with pytest.raises(PermissionError):
            wires.map_shared(fd, SIZE, is_writable=True)
          os.close(fd)
      channel.send(Message(Verb.ANSWER, payload=np.zeros(3, np.uint8)))
      assert _receive(raw)[::2] == (-1, [])
      channel.close()


GARBAGE = {
  'nothing': (b'', 'garbage'),
  'garbage': (b'GET / HTTP/1.1\r\n\r\n', 'garbage'),
  'truncated': (_encode()[:-1], 'truncated'),
  'appended': (_encode() + b'!', 'oversized'),
  'damaged': (_encode()[:-1] + bytes([_encode()[-1] ^ 1]), 'damaged'),
  'payload too small': (_encode(SIZE - 1), 'size'),
  'payload too large': (_encode(SIZE + 1), 'size'),
  'payload damaged': (
    wires.encode_message(
      Message(Verb.EXCHANGE, payload=np.ones(SIZE, np.uint8)),
      with_checksum=True,
    ),
    'damaged',
  ),
  'just too long': (b'a' * (MAX_PACKET + 1), 'oversized'),
  'far too long': (
    _encode() + bytes(2 * MAX_PACKET),
    'oversized',
  ),
}


@pytest.mark.parametrize('kind', GARBAGE)
def test_garbage_is_refused_and_the_client_may_stay(kind, server):
  data, reason = GARBAGE[kind]
  with _connect_raw(server) as raw:
    for fd in _receive(raw)[2]:
      os.close(fd)
    for _ in range(3):
      raw.send(data)
      channel, message, error = server.get()
      assert message is None
      assert error.reason == reason
      _, answer, _ = _receive(raw)
      assert (answer.verb, answer.text) == (Verb.REFUSED, str(error))
    raw.send(_encode())
    assert server.get() == (channel, Message(Verb.EXCHANGE), None)
    # No bytes are left over for the next message.
    assert server.inbox.get(0) is None


def test_longest_message_that_is_allowed(server, thread):
  connection = _connect(server, thread)
  numbers = [1] * (wires.MAX_TEXT // 2 - 2) + [12]
  text = json.dumps(numbers, separators=(',', ':'))
  assert len(text) == wires.MAX_TEXT
  future = thread.submit(
    connection.request, Message(Verb.HELLO, text=text), deadline=DEADLINE
  )
  event = server.get()
  assert json.loads(event.message.text) == numbers
  event.channel.send(Message(Verb.ANSWER, text=text))
  assert json.loads(future.result(DEADLINE).text) == numbers
  with pytest.raises(wires.MessageError, match='at most'):
    connection.request(Message(Verb.HELLO, text=text + 'a'), deadline=1.0)
  connection.close()


@pytest.mark.parametrize('is_garbage', [False, True])
def test_a_client_that_does_not_read_is_dropped(is_garbage, server):
  with _connect_raw(server) as raw:
    raw.send(_encode())
    channel, _, _ = server.get()
    events = []
    for _ in range(100_000):
      if is_garbage:
        with contextlib.suppress(ConnectionError):
          raw.send(b'garbage')
      else:
        channel.send(Message(Verb.WAIT, text='a reason ' * 20))
      while (event := server.inbox.get(0)) is not None:
        events.append(event)
      if events and events[-1] == wires.Event(channel):
        break
    assert events.count(wires.Event(channel)) == 1
    assert events[-1] == wires.Event(channel)
    assert all(event.error is not None for event in events[:-1])
    assert bool(events[:-1]) == is_garbage
    channel.send(Message(Verb.ANSWER))
    assert server.inbox.get(0) is None


def test_many_silent_clients(server, thread):
  with contextlib.ExitStack() as stack:
    for _ in range(200):
      stack.enter_context(_connect_raw(server))
    connection = _connect(server, thread)
    future = thread.submit(
      connection.request, Message(Verb.FETCH), deadline=DEADLINE
    )
    event = server.get()
    event.channel.send(Message(Verb.ANSWER))
    future.result(DEADLINE)
    connection.close()
    assert server.get() == wires.Event(event.channel)


def test_the_number_of_clients_is_bounded(thread):
  server = Server(max_channels=2)
  connections = [_connect(server, thread) for _ in range(2)]
  future = thread.submit(
    wires.connect_memory, server.listener.address, SIZE, DEADLINE
  )
  error = server.get().error
  assert error.reason == 'crowded'
  with pytest.raises(wires.RefusedError, match='2 clients'):
    future.result(DEADLINE)
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
    raw.connect(server.name)  # It disconnects before it is refused.
  assert server.get().error.reason == 'crowded'
  assert server.inbox.get(0) is None
  connections[0].close()
  assert server.get().error is None
  _connect(server, thread).close()
  assert server.inbox.get(0).error is None
  connections[1].close()
  server.close()


@pytest.mark.parametrize('num_spare', [0, 1, 2])
def test_no_file_descriptor_is_left(num_spare, server):
  """None is left for the socket, the memory, or its mapping."""
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  raw = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  raw.settimeout(DEADLINE)
  probe = [os.dup(raw.fileno()) for _ in range(num_spare + 1)]
  for fd in probe:
    os.close(fd)
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(probe), limits[1]))
    raw.connect(server.name)
    event = server.get()
    assert event.error.reason == 'crowded'
    assert server.inbox.get(0) is None  # The server tries only once.
    _, answer, _ = _receive(raw)
    assert answer.verb == Verb.REFUSED
    assert 'Too many open files' in answer.text
    assert raw.recv(100) == b''
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    raw.close()
  with _connect_raw(server) as later:
    index, _, fds = _receive(later)
    assert index == -2
    os.close(fds[0])


def _assert_stranger_is_refused(server, raw):
  raw.send(_encode(SIZE))  # No thread reads this message.
  event = server.get()
  assert event.message is None
  assert event.error.reason == 'credentials'
  assert not server.listener.channels
  assert server.inbox.get(0) is None


def test_another_user_is_refused(server, monkeypatch):
  other = os.geteuid() + 1
  monkeypatch.setattr(os, 'geteuid', lambda: other)
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
    raw.connect(server.name)
    _assert_stranger_is_refused(server, raw)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root can be someone else')
def test_credentials_come_from_the_kernel(server):
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
    os.seteuid(65534)
    try:
      raw.connect(server.name)
    finally:
      os.seteuid(0)
    _assert_stranger_is_refused(server, raw)


def test_a_server_of_another_user_is_not_trusted(server, monkeypatch):
  other = os.geteuid() + 1
  monkeypatch.setattr(os, 'geteuid', lambda: other)
  with pytest.raises(wires.WireError, match='user'):
    wires.connect_memory(server.listener.address, SIZE, DEADLINE)


@pytest.mark.parametrize('has_fd', [False, True])
@pytest.mark.parametrize(
  'packet',
  [
    b'',
    b'abc',
    PREFIX.pack(-2),
    PREFIX.pack(-2) + b'garbage',
    PREFIX.pack(-1) + wires.encode_message(Message(Verb.ANSWER)),
    PREFIX.pack(0) + _encode(2 * SIZE),
    PREFIX.pack(-2) + _encode(2 * SIZE),
  ],
  ids=repr,
)
def test_a_server_that_sends_garbage(packet, has_fd, thread):
  name = f'jasgd-test-{os.getpid()}'
  gc.collect()
  fds = len(os.listdir('/proc/self/fd'))
  memory, array = wires.make_shared(SIZE, is_sealed=False)
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind('\0' + name)
    listener.listen()
    future = thread.submit(
      wires.connect_memory, f'memory:@{name}', SIZE, DEADLINE
    )
    accepted, _ = listener.accept()
    with accepted:
      if has_fd:
        socket.send_fds(accepted, [packet], [memory])
      else:
        accepted.send(packet)
      with pytest.raises((wires.WireError, wires.RefusedError)):
        future.result(DEADLINE)
  os.close(memory)
  del future, array
  gc.collect()
  assert len(os.listdir('/proc/self/fd')) == fds


def test_a_client_that_is_never_accepted(server):
  with pytest.raises(wires.WireError, match=r'0\.05'):
    wires.connect_memory(server.listener.address, SIZE, 0.05)


@pytest.mark.parametrize('address', ['queue:', 'memory:', '@jasgd-1', ''])
def test_no_address(address):
  with pytest.raises(ValueError, match=f'memory:@.*{address}'):
    wires.connect_memory(address, SIZE, DEADLINE)


def test_checksums(server, thread):
  connection = _connect(server, thread, with_checksum=True)
  connection.outgoing[:] = 9
  future = thread.submit(
    connection.request,
    Message(Verb.EXCHANGE),
    has_payload=True,
    deadline=DEADLINE,
  )
  event = server.get()
  assert event.message.flags == wires.Flag.HAS_CHECKSUM
  assert (event.message.payload == 9).all()
  event.channel.send(Message(Verb.ANSWER))
  future.result(DEADLINE)
  connection.close()


@pytest.mark.parametrize(
  ('size', 'is_shared'), [(SIZE, False), (SIZE + 1, True)]
)
def test_a_snapshot_that_can_not_be_passed(size, is_shared, server):
  with _connect_raw(server) as raw:
    raw.send(_encode())
    channel, _, _ = server.get()
    buffer = wires.Buffer(0, size, is_shared=is_shared)
    with pytest.raises(ValueError, match=f'shared and have {SIZE} bytes'):
      channel.send(Message(Verb.SNAPSHOT), buffer)
    buffer.close()
