"""The inbox: events from threads and from sockets, in order, in time."""

import os
import socket
import threading
import time

import pytest

from jasgd.runtime import wires


@pytest.fixture
def inbox():
  inbox = wires.Inbox()
  yield inbox
  inbox.close()


@pytest.fixture
def pair():
  left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
  yield left, right
  left.close()
  right.close()


def test_order_and_length(inbox):
  for number in range(5):
    inbox.put(number)
  assert len(inbox) == 5
  assert [inbox.get(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]
  assert len(inbox) == 0


def test_every_event_of_every_thread_arrives(inbox):
  def put(name):
    for number in range(200):
      inbox.put((name, number))

  threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
  for thread in threads:
    thread.start()
  events = [inbox.get(10) for _ in range(4 * 200)]
  for thread in threads:
    thread.join(10)
  for name in range(4):
    assert [event for event in events if event[0] == name] == [
      (name, number) for number in range(200)
    ]
  assert inbox.get(0) is None


def test_wakes_a_thread_that_waits(inbox):
  got = []
  thread = threading.Thread(target=lambda: got.append(inbox.get(10)))
  thread.start()
  inbox.put('event')
  thread.join(10)
  assert got == ['event']


@pytest.mark.parametrize('timeout', [0.0, 0.05])
def test_returns_when_the_time_is_over_and_not_before(inbox, timeout):
  inbox.put('event')
  inbox.get(0)  # Taken from the queue; the wake-up event is still set.
  start = time.monotonic()
  assert inbox.get(timeout) is None
  assert timeout <= time.monotonic() - start


def test_a_negative_timeout_does_not_block(inbox):
  thread = threading.Thread(target=inbox.get, args=(-1.0,))
  thread.start()
  thread.join(5)
  is_late = thread.is_alive()
  inbox.put('wake up')
  thread.join(5)
  assert not is_late


def test_a_socket_without_events_does_not_end_the_wait(inbox, pair):
  left, right = pair
  calls = []

  def read():
    calls.append(left.recv(100))
    return () if len(calls) < 3 else ('third',)

  inbox.watch(left.fileno(), read)
  for data in (b'1', b'2', b'3'):
    right.send(data)
  assert inbox.get(10) == 'third'
  assert calls == [b'1', b'2', b'3']


def test_a_socket_may_give_several_events(inbox, pair):
  left, right = pair
  inbox.watch(left.fileno(), lambda: left.recv(100).split())
  right.send(b'a b c')
  assert [inbox.get(10) for _ in range(3)] == [b'a', b'b', b'c']
  assert inbox.get(0) is None


def test_events_of_threads_and_of_sockets(inbox, pair):
  left, right = pair
  inbox.watch(left.fileno(), lambda: (left.recv(100),))
  right.send(b'sent')
  inbox.put('put')
  assert {inbox.get(10), inbox.get(10)} == {'put', b'sent'}


def test_unwatch(inbox, pair):
  left, right = pair
  inbox.watch(left.fileno(), lambda: ('never',))
  inbox.unwatch(left.fileno())
  inbox.unwatch(left.fileno())
  right.send(b'data')
  assert inbox.get(0) is None


def test_a_callback_may_unwatch_another(inbox):
  pairs = [socket.socketpair() for _ in range(2)]
  lefts = [left for left, _ in pairs]
  for left in lefts:

    def read(left=left):
      for other in lefts:
        inbox.unwatch(other.fileno())
      return (left,)

    inbox.watch(left.fileno(), read)
  for _, right in pairs:
    right.send(b'data')
  assert inbox.get(10) in lefts
  assert inbox.get(0) is None
  for left, right in pairs:
    left.close()
    right.close()


def test_close(pair):
  before = len(os.listdir('/proc/self/fd'))
  inbox = wires.Inbox()
  inbox.watch(pair[0].fileno(), tuple)
  inbox.close()
  inbox.close()
  assert len(os.listdir('/proc/self/fd')) == before
  inbox.unwatch(pair[0].fileno())
  # The number of the closed descriptor may belong to another file now.
  stranger = os.eventfd(0, os.EFD_NONBLOCK)
  inbox.put('event')
  with pytest.raises(BlockingIOError):
    os.eventfd_read(stranger)
  os.close(stranger)
  assert len(inbox) == 0
