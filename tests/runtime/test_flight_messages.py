"""Good and bad messages over Arrow Flight."""

import contextlib
import socket

import numpy as np
import pyarrow as pa
from pyarrow import flight
import pytest

from jasgd.runtime import wires
from tests.runtime import flight_case

DEADLINE, SIZE = flight_case.DEADLINE, flight_case.SIZE
Message, Verb = wires.Message, wires.Verb


@pytest.fixture
def inbox():
  inbox = wires.Inbox()
  yield inbox
  inbox.close()


def _put(client):
  path = flight.FlightDescriptor.for_path('weights')
  writer, _ = client.do_put(path, flight_case.stream.SCHEMA)
  writer.write_batch(flight_case.make_batch(3))
  writer.close()


def _exchange(client):
  writer, reader = client.do_exchange(flight.FlightDescriptor.for_path('x'))
  try:
    reader.read_chunk()
  finally:
    with contextlib.suppress(*flight_case.stream.STREAM_ERRORS):
      writer.close()


VERBS = {
  'list_flights': lambda client: list(client.list_flights()),
  'get_flight_info': lambda client: client.get_flight_info(
    flight.FlightDescriptor.for_path('weights')
  ),
  'get_schema': lambda client: client.get_schema(
    flight.FlightDescriptor.for_path('weights')
  ),
  'do_get': lambda client: client.do_get(flight.Ticket(b'weights')).read_all(),
  'do_put': _put,
  'list_actions': lambda client: client.list_actions(),
  'action': lambda client: list(client.do_action(flight.Action('stop', b''))),
  'exchange': _exchange,
}


@pytest.mark.parametrize('verb', VERBS)
def test_other_verbs_are_refused(inbox, verb):
  with flight_case.listen(inbox) as listener:
    client = flight.FlightClient(listener.address)
    with pytest.raises((flight.FlightError, OSError), match=f'no {verb}') as e:
      VERBS[verb](client)
    assert 'Traceback' not in str(e.value)
    assert flight_case.get_error(inbox).reason == 'verb'


def _flip(data, index):
  return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


GARBAGE = {
  'text': (b'GET / HTTP/1.1', 'garbage'),
  'short': (flight_case.HELLO[:-1], 'truncated'),
  'long': (flight_case.HELLO + b'x', 'oversized'),
  'longer': (flight_case.HELLO + bytes(1_000_000), 'oversized'),
  'version': (_flip(flight_case.HELLO, 4), 'version'),
  'damaged': (_flip(flight_case.HELLO, 30), 'damaged'),
}


@pytest.mark.parametrize('name', GARBAGE)
@pytest.mark.parametrize('with_batch', [False, True])
def test_garbage_is_refused_and_the_exchange_goes_on(
  inbox, name, with_batch, capfd
):
  data, reason = GARBAGE[name]
  with flight_case.listen(inbox) as listener, flight_case.raw(listener) as raw:
    for _ in range(2):
      if with_batch:
        raw.writer.write_with_metadata(flight_case.make_batch(SIZE), data)
        raw.writer.write_batch(flight_case.make_batch(SIZE))
      else:
        raw.writer.write_metadata(data)
      answer = raw.read()
      error = flight_case.get_error(inbox)
      assert answer == Message(Verb.REFUSED, text=str(error))
      assert error.reason == reason
    raw.writer.write_with_metadata(
      flight_case.make_batch(SIZE), flight_case.EXCHANGE
    )
    event = inbox.get(DEADLINE)
    assert event.message.payload.shape == (SIZE,)
    event.channel.send(Message(Verb.ANSWER))
    assert raw.read().verb == Verb.ANSWER
  assert capfd.readouterr() == ('', '')


def _write(raw, *chunks):
  for batch, head in chunks:
    if batch is None:
      raw.writer.write_metadata(head)
    elif head is None:
      raw.writer.write_batch(batch)
    else:
      raw.writer.write_with_metadata(batch, head)


BROKEN = {
  'no head': ([(flight_case.make_batch(SIZE), None)], 'garbage'),
  'too much': (
    [(flight_case.make_batch(SIZE + 1), flight_case.EXCHANGE)],
    'size',
  ),
  'empty': (
    [(flight_case.make_batch(SIZE).slice(0, 0), flight_case.EXCHANGE)],
    'size',
  ),
  'unannounced': ([(flight_case.make_batch(SIZE), flight_case.HELLO)], 'size'),
  'no batch': ([(None, flight_case.EXCHANGE)], 'truncated'),
  'too little': (
    [
      (flight_case.make_batch(9), flight_case.EXCHANGE),
      (None, flight_case.HELLO),
    ],
    'truncated',
  ),
  'too late': (
    [
      (flight_case.make_batch(9), flight_case.EXCHANGE),
      (flight_case.make_batch(SIZE), None),
    ],
    'size',
  ),
}


@pytest.mark.parametrize('name', BROKEN)
def test_a_stream_without_boundaries_ends(inbox, name, capfd):
  chunks, reason = BROKEN[name]
  with flight_case.listen(inbox) as listener:
    with flight_case.raw(listener) as raw:
      _write(raw, *chunks)
      answer = raw.read()
      error = flight_case.get_error(inbox)
      assert answer == Message(Verb.REFUSED, text=str(error))
      assert error.reason == reason
      with pytest.raises(flight.FlightServerError):
        raw.read()
    assert inbox.get(DEADLINE).error is None  # The client is gone.
    with flight_case.connect(listener) as connection:
      flight_case.ask(inbox, connection)
  assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(
  'column',
  [
    pa.array([0.5] * 250, pa.float32()),
    pa.array([1] * SIZE, pa.int8()),
    pa.array([b'x' * SIZE]),
    pa.array([[1, 2]] * 500),
  ],
  ids=lambda column: str(column.type),
)
def test_other_types_are_refused(inbox, column):
  schema = pa.schema([pa.field('bytes', column.type, nullable=False)])
  batch = pa.record_batch([column], schema=schema)
  with (
    flight_case.listen(inbox) as listener,
    flight_case.raw(listener, schema) as raw,
  ):
    raw.writer.write_with_metadata(batch, flight_case.EXCHANGE)
    assert 'uint8' in raw.read().text
    assert flight_case.get_error(inbox).reason == 'schema'


def test_nulls_are_refused(inbox):
  column = pa.array([1, None] * (SIZE // 2), pa.uint8())
  batch = pa.RecordBatch.from_arrays([column], schema=flight_case.stream.SCHEMA)
  with flight_case.listen(inbox) as listener, flight_case.raw(listener) as raw:
    raw.writer.write_with_metadata(batch, flight_case.EXCHANGE)
    assert raw.read().verb == Verb.REFUSED
    assert flight_case.get_error(inbox).reason == 'schema'


def test_an_endless_payload_is_cut_off(inbox):
  with (
    flight_case.listen(inbox) as listener,
    flight_case.connect(listener, 100 << 20) as connection,
  ):
    # The client gets the reason, although it has read nothing before.
    with pytest.raises(
      (wires.WireError, wires.RefusedError), match=f'{SIZE} bytes'
    ):
      connection.request(
        Message(Verb.EXCHANGE), has_payload=True, deadline=DEADLINE
      )
    assert flight_case.get_error(inbox).reason == 'size'
    assert inbox.get(DEADLINE).error is None
    assert inbox.get(0.1) is None


@pytest.mark.parametrize('is_damaged', [False, True])
def test_checksums(inbox, is_damaged):
  payload = np.arange(SIZE, dtype=np.uint8)
  head = wires.encode_message(
    Message(Verb.EXCHANGE, payload=payload), with_checksum=True
  )
  (batch,) = flight_case.stream.make_batches(payload)
  payload[5] ^= is_damaged
  with flight_case.listen(inbox) as listener, flight_case.raw(listener) as raw:
    raw.writer.write_with_metadata(batch, head)
    event = inbox.get(DEADLINE)
    assert (event.error is not None) == is_damaged
    if is_damaged:
      assert event.error.reason == 'damaged'
      assert raw.read().verb == Verb.REFUSED
  with (
    flight_case.listen(inbox) as listener,
    flight_case.connect(listener, with_checksum=True) as connection,
  ):
    while inbox.get(0.0):
      pass
    event, _ = flight_case.ask(inbox, connection, has_payload=True)
    assert event.message.flags == wires.Flag.HAS_CHECKSUM


def test_bytes_that_are_no_http(inbox, capfd):
  with flight_case.listen(inbox) as listener:
    port = int(listener.address.rpartition(':')[2])
    garbage = np.random.default_rng(1).bytes(10_000)
    with (
      socket.create_connection(('127.0.0.1', port), DEADLINE) as stranger,
      contextlib.suppress(ConnectionError),  # The server may disconnect early.
    ):
      stranger.sendall(garbage)
      while stranger.recv(1000):
        pass
    with flight_case.connect(listener) as connection:
      flight_case.ask(inbox, connection)
  assert capfd.readouterr() == ('', '')
