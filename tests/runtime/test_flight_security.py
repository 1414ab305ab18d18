"""Tokens, certificates and bounds of Arrow Flight."""

import re

from pyarrow import flight
import pytest

from jasgd.runtime import wires
from tests.runtime import certificates
from tests.runtime import flight_case

DEADLINE, SIZE = flight_case.DEADLINE, flight_case.SIZE
Message, Verb = wires.Message, wires.Verb
TOKEN = 'a-Token.that/nobody=knows'


@pytest.fixture
def inbox():
  inbox = wires.Inbox()
  yield inbox
  inbox.close()


@pytest.mark.parametrize('host', ['0.0.0.0', '::', '10.1.2.3', 'example.org'])
def test_other_hosts_than_loopback_need_a_token(inbox, host):
  with pytest.raises(ValueError, match=f'{host}.* token'):
    wires.FlightListener(inbox, SIZE, host=host)


@pytest.mark.parametrize('host', ['127.0.0.1', '127.1.2.3', 'localhost', '::1'])
def test_loopback_needs_none(inbox, host):
  with (
    flight_case.listen(inbox, host=host) as listener,
    flight_case.connect(listener) as connection,
  ):
    flight_case.ask(inbox, connection)


def test_clients_with_the_token_are_accepted(inbox):
  with flight_case.listen(inbox, host='0.0.0.0', token=TOKEN) as listener:
    address = listener.address.replace('0.0.0.0', '127.0.0.1')
    with flight_case.connect(address, token=TOKEN) as connection:
      flight_case.ask(inbox, connection)
    assert inbox.get(DEADLINE).error is None


@pytest.mark.parametrize('token', [None, 'x', TOKEN[:-1], TOKEN + 'x'])
def test_a_wrong_token(inbox, token, capfd):
  with flight_case.listen(inbox, token=TOKEN) as listener:
    with pytest.raises(wires.RefusedError, match='token') as info:
      wires.connect_flight(
        listener.address, SIZE, token=token, deadline=DEADLINE
      )
    error = flight_case.get_error(inbox)
    assert error.reason == 'token'
    shown = [str(error), repr(error), repr(info.value), repr(listener)]
    assert not any(TOKEN[:-1] in text for text in shown)
  assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize(
  'headers',
  [
    [],
    [(b'authorization', b'Bearer')],
    [(b'authorization', TOKEN.encode())],
    [(b'authorization', b'Bearer x'), (b'authorization', b'Bearer ' + b'y')],
    [(b'authorization-bin', b'\xff\x00')],
  ],
)
def test_nothing_is_read_without_the_token(inbox, headers):
  options = flight.FlightCallOptions(headers=headers)

  def push():
    with flight_case.raw(listener, options=options) as raw:
      raw.writer.write_with_metadata(
        flight_case.make_batch(SIZE), flight_case.EXCHANGE
      )
      raw.read()

  with flight_case.listen(inbox, token=TOKEN) as listener:
    with pytest.raises(flight.FlightUnauthenticatedError):
      push()
    assert flight_case.get_error(inbox).reason == 'token'
    assert inbox.get(0.1) is None


@pytest.mark.parametrize('token', ['', 'two words', 'line\n', 'ümlaut', '\x00'])
def test_tokens_that_no_header_can_carry(inbox, token):
  with pytest.raises(ValueError, match='token must') as info:
    wires.FlightListener(inbox, SIZE, token=token)
  assert not token or token not in str(info.value)
  with pytest.raises(ValueError, match='token must'):
    wires.connect_flight(
      'grpc+tcp://127.0.0.1:1', SIZE, token=token, deadline=DEADLINE
    )


@pytest.fixture(scope='module')
def tls(tmp_path_factory):
  return certificates.make_authority(tmp_path_factory.mktemp('tls'), 'ours')


@pytest.fixture(scope='module')
def other_tls(tmp_path_factory):
  return certificates.make_authority(tmp_path_factory.mktemp('tls'), 'theirs')


def test_mutual_tls(inbox, tls):
  with flight_case.listen(inbox, tls=tls, token=TOKEN) as listener:
    assert listener.address.startswith('grpc+tls://127.0.0.1:')
    with flight_case.connect(listener, tls=tls, token=TOKEN) as connection:
      connection.outgoing[:] = 7
      event, _ = flight_case.ask(inbox, connection, has_payload=True)
      assert (event.message.payload == 7).all()
    assert inbox.get(DEADLINE) == wires.Event(event.channel)
    with pytest.raises(wires.RefusedError, match='token'):
      wires.connect_flight(listener.address, SIZE, tls=tls, deadline=DEADLINE)


def test_both_sides_must_show_a_certificate(inbox, tls, other_tls):
  stranger = wires.Tls(other_tls.certificate, other_tls.key, tls.authority)
  believer = wires.Tls(tls.certificate, tls.key, other_tls.authority)
  with flight_case.listen(inbox, tls=tls) as listener:
    for wrong in stranger, believer:
      with pytest.raises(wires.WireError):
        wires.connect_flight(listener.address, SIZE, tls=wrong, deadline=3.0)
    nobody = flight.FlightClient(
      listener.address, tls_root_certs=tls.authority.read_bytes()
    )
    with pytest.raises((flight.FlightError, OSError)):
      list(
        nobody.do_action(
          flight.Action(flight_case.stream.READY, b''),
          flight.FlightCallOptions(timeout=3.0),
        )
      )
  assert inbox.get(0.0) is None


@pytest.mark.parametrize(
  ('address', 'with_tls'),
  [('grpc+tls://h:1', False), ('grpc+tcp://h:1', True), ('memory:@x', False)],
)
def test_an_address_says_whether_it_is_tls(tls, address, with_tls):
  with pytest.raises(ValueError, match=re.escape(address)):
    wires.connect_flight(
      address, SIZE, tls=tls if with_tls else None, deadline=DEADLINE
    )


def test_a_port_that_is_taken(inbox):
  with flight_case.listen(inbox) as listener:
    port = int(listener.address.rpartition(':')[2])
    with pytest.raises(OSError, match='in use'):
      wires.FlightListener(inbox, SIZE, port=port)
  with (
    flight_case.listen(inbox, port=port) as listener,
    flight_case.connect(listener) as connection,
  ):
    assert listener.address.endswith(f':{port}')
    flight_case.ask(inbox, connection)


def test_the_number_of_clients_is_bounded(inbox):
  with flight_case.listen(inbox, max_channels=1) as listener:
    with flight_case.connect(listener) as first:
      flight_case.ask(inbox, first)
      with (
        flight_case.connect(listener) as second,
        pytest.raises(wires.WireError, match='1 clients already'),
      ):
        second.request(Message(Verb.HELLO), deadline=DEADLINE)
      assert flight_case.get_error(inbox).reason == 'crowded'
    assert inbox.get(DEADLINE).error is None
    with flight_case.connect(listener) as third:
      flight_case.ask(inbox, third)
