"""How an exchange over Arrow Flight ends."""

import contextlib
import gc
import os
import signal
import socket
import threading
import time

from pyarrow import flight
import pytest

from jasgd.runtime import wires
from tests.runtime import flight_case

DEADLINE, SIZE = flight_case.DEADLINE, flight_case.SIZE
Message, Verb = wires.Message, wires.Verb
# Answers everything at once, until it is killed.
SERVER = """
import sys
from jasgd.runtime import wires
inbox = wires.Inbox()
listener = wires.FlightListener(inbox, int(sys.argv[1]))
print(listener.address, flush=True)
while (event := inbox.get(60.0)) is not None:
  if event.message is not None:
    event.channel.send(wires.Message(wires.Verb.ANSWER))
"""
# Sends the first of two batches, and then lives until it is killed.
SENDER = """
import sys
import numpy as np
from pyarrow import flight
from jasgd.runtime import wires
from tests.runtime.flight_case import stream
array = np.zeros(int(sys.argv[2]), np.uint8)
message = wires.Message(wires.Verb.EXCHANGE, payload=array)
client = flight.FlightClient(sys.argv[1])
writer, reader = client.do_exchange(
  flight.FlightDescriptor.for_command(stream.COMMAND)
)
writer.begin(stream.SCHEMA)
head = wires.encode_message(message)
writer.write_metadata(head[:40])  # The refusal shows that the server reads.
reader.read_chunk()
writer.write_with_metadata(stream.make_batches(array)[0], head)
print('sent', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def inbox():
  inbox = wires.Inbox()
  yield inbox
  inbox.close()


def test_a_sender_is_killed_within_a_payload(inbox):
  size = 2 * flight_case.stream.CHUNK
  with flight_case.listen(inbox, size) as listener:
    with flight_case.spawn(SENDER, listener.address, size) as process:
      assert flight_case.get_error(inbox).reason == 'truncated'
      assert process.stdout.readline() == 'sent\n'
      process.kill()
      event = inbox.get(DEADLINE)
    assert (event.message, event.error) == (None, None)
    assert inbox.get(0.1) is None


def test_a_server_stops():
  """Requests without a payload, and with a payload of several chunks, end."""
  size = 8 * flight_case.stream.CHUNK
  with flight_case.spawn(SERVER, size) as process:
    address = process.stdout.readline().strip()
    with (
      flight_case.connect(address, size) as first,
      flight_case.connect(address, size) as second,
    ):
      for connection in (first, second):
        connection.request(Message(Verb.HELLO), deadline=DEADLINE)
      process.send_signal(signal.SIGSTOP)
      for connection, has_payload in ((first, False), (second, True)):
        with pytest.raises(wires.WireError, match=r'silent for 0\.3 seconds'):
          connection.request(
            Message(Verb.EXCHANGE), has_payload=has_payload, deadline=0.3
          )
      with pytest.raises(wires.WireError, match='no server'):
        wires.connect_flight(address, size, deadline=0.3)


def test_a_server_is_killed():
  with flight_case.spawn(SERVER, SIZE) as process:
    address = process.stdout.readline().strip()
    with flight_case.connect(address) as connection:
      connection.request(Message(Verb.HELLO), deadline=DEADLINE)
      process.kill()
      process.wait(DEADLINE)
      with pytest.raises(wires.WireError, match='is gone'):
        connection.request(Message(Verb.HELLO), deadline=DEADLINE)
    with pytest.raises(wires.WireError, match='no server'):
      wires.connect_flight(address, SIZE, deadline=DEADLINE)


@pytest.mark.parametrize('host', ['127.0.0.1', 'localhost', '::1'])
def test_an_idle_client_can_be_disconnected(inbox, host):
  with (
    flight_case.listen(inbox, host=host) as listener,
    flight_case.raw(listener) as raw,
  ):
    raw.writer.write_metadata(flight_case.HELLO)
    channel = inbox.get(DEADLINE).channel
    channel.send(Message(Verb.ANSWER))
    assert raw.read().verb == Verb.ANSWER
    with flight_case.raw(listener) as other:
      other.writer.write_metadata(flight_case.HELLO)
      other_channel = inbox.get(DEADLINE).channel
      channel.close()
      channel.join()
      with pytest.raises((StopIteration, flight.FlightError)):
        raw.read()
      # Only the first client was cut off.
      other_channel.send(Message(Verb.ANSWER))
      assert other.read().verb == Verb.ANSWER


def test_a_client_that_does_not_read_its_answer_is_disconnected(
  inbox, monkeypatch
):
  monkeypatch.setattr('jasgd.runtime.wires._flight_server._PATIENCE', 0.3)
  size = 8 * flight_case.stream.CHUNK
  with (
    flight_case.listen(inbox, size) as listener,
    flight_case.raw(listener) as raw,
  ):
    raw.writer.write_metadata(flight_case.HELLO)
    channel = inbox.get(DEADLINE).channel
    channel.send(Message(Verb.SNAPSHOT), wires.Buffer(0, size))
    channel.close()
    start = time.monotonic()
    channel.join()
    assert time.monotonic() - start < DEADLINE / 2
    assert inbox.get(0.1) is None


def test_a_server_closes_whatever_its_clients_do(inbox):
  threads = set(threading.enumerate())
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(flight_case.listen(inbox))
    port = int(listener.address.rpartition(':')[2])
    # One client waits for an answer, one may send a request, one has sent
    # nothing, and one does not speak HTTP.
    parked, idle, _ = (
      stack.enter_context(flight_case.raw(listener)) for _ in range(3)
    )
    for raw in parked, idle:
      raw.writer.write_metadata(flight_case.HELLO)
      event = inbox.get(DEADLINE)
    event.channel.send(Message(Verb.ANSWER))
    assert idle.read().verb == Verb.ANSWER
    stack.enter_context(socket.create_connection(('127.0.0.1', port)))
    start = time.monotonic()
    listener.close()
    assert time.monotonic() - start < DEADLINE / 2
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(('127.0.0.1', port), DEADLINE)
    with pytest.raises((StopIteration, flight.FlightError)):
      parked.read()
    assert inbox.get(0.1) is None
  assert set(threading.enumerate()) <= threads


def test_a_connection_leaves_nothing(inbox):
  def count_sockets():
    count = 0
    for entry in os.listdir('/proc/self/fd'):
      with contextlib.suppress(FileNotFoundError):
        count += os.readlink(f'/proc/self/fd/{entry}').startswith('socket:')
    return count

  with flight_case.listen(inbox) as listener:
    threads, num_sockets = set(threading.enumerate()), count_sockets()
    with flight_case.connect(listener) as connection:
      flight_case.ask(inbox, connection)
      assert count_sockets() >= num_sockets + 2
    assert set(threading.enumerate()) <= threads
    gc.collect()
    # gRPC closes it after an unknown time.
    give_up = time.monotonic() + DEADLINE
    num_kept = count_sockets()
    while num_kept > num_sockets:
      assert time.monotonic() < give_up, num_kept
      num_kept = count_sockets()
