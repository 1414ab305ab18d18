"""Arrow Flight, for the tests that every wire must pass, and for its own."""

import contextlib
import subprocess
import sys
import threading

import numpy as np
from pyarrow import flight

from jasgd.runtime import wires
from jasgd.runtime.wires import _flight_stream as stream

DEADLINE = 60.0  # Seconds: never reached, unless something is broken.
SIZE = 1000
Message, Verb = wires.Message, wires.Verb
EXCHANGE = wires.encode_message(
  Message(Verb.EXCHANGE, payload=np.zeros(SIZE, np.uint8))
)
HELLO = wires.encode_message(Message(Verb.HELLO))


def make_flight(inbox, payload_size):
  """A listener, and a function that connects to it."""
  listener = wires.FlightListener(inbox, payload_size)

  def connect(payload_size=payload_size):
    return wires.connect_flight(
      listener.address, payload_size, deadline=DEADLINE
    )

  return listener, connect


@contextlib.contextmanager
def listen(inbox, size=SIZE, **kwargs):
  listener = wires.FlightListener(inbox, size, **kwargs)
  try:
    yield listener
  finally:
    listener.close()


@contextlib.contextmanager
def connect(listener, size=SIZE, *, deadline=DEADLINE, **kwargs):
  address = listener if isinstance(listener, str) else listener.address
  connection = wires.connect_flight(address, size, deadline=deadline, **kwargs)
  try:
    yield connection
  finally:
    connection.close()


@contextlib.contextmanager
def spawn(program, *arguments):
  process = subprocess.Popen(
    [sys.executable, '-c', program, *map(str, arguments)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    yield process
  finally:
    process.kill()  # This ends a process that was stopped, too.
    process.communicate(timeout=DEADLINE)


class Raw:
  """A client that may send any bytes."""

  def __init__(self, listener, schema=stream.SCHEMA, **kwargs):
    self._client = flight.FlightClient(listener.address)
    self.writer, self.reader = self._client.do_exchange(
      flight.FlightDescriptor.for_command(stream.COMMAND), **kwargs
    )
    self.writer.begin(schema)
    # No call of a test may wait forever.
    self._timer = threading.Timer(DEADLINE, self.reader.cancel)
    self._timer.start()

  def read(self):
    """The next answer."""
    return wires.decode_message(
      memoryview(self.reader.read_chunk().app_metadata)
    )[0]

  def close(self):
    self._timer.cancel()
    self._timer.join(DEADLINE)
    self.reader.cancel()
    with contextlib.suppress(*stream.STREAM_ERRORS):
      self.writer.close()


@contextlib.contextmanager
def raw(*args, **kwargs):
  client = Raw(*args, **kwargs)
  try:
    yield client
  finally:
    client.close()


def ask(inbox, connection, answer=None, snapshot=None, **kwargs):
  """The event of a request, and its answer."""
  results = []

  def request():
    results.append(
      connection.request(Message(Verb.EXCHANGE), deadline=DEADLINE, **kwargs)
    )

  thread = threading.Thread(target=request)
  thread.start()
  event = inbox.get(DEADLINE)
  event.channel.send(answer or Message(Verb.ANSWER), snapshot)
  thread.join(DEADLINE)
  return event, results[0]


def get_error(inbox):
  """The next event, which must be an error."""
  event = inbox.get(DEADLINE)
  assert event.message is None
  assert event.channel.name.startswith('flight ')
  return event.error


def make_batch(size):
  (batch,) = stream.make_batches(np.zeros(size, np.uint8))
  return batch
