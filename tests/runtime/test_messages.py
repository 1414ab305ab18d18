"""Messages: they are decoded as they were sent, or refused."""

import dataclasses
import json
import struct
import zlib

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd.runtime import wires

MAGIC = b'jasg'
HEAD_SIZE = len(wires.encode_message(wires.Message(wires.Verb.PULL)))
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
# Floats are compared by their bits, so that a NaN equals itself.
FLOAT = st.floats(width=64)
MESSAGES = st.builds(
  wires.Message,
  verb=st.sampled_from(wires.Verb),
  fate=st.integers(0, 255),
  # `encode_message` sets the flag of a checksum.
  flags=st.integers(0, 2**32 - 1).map(
    lambda flags: flags & ~int(wires.Flag.HAS_CHECKSUM)
  ),
  worker=INT32,
  incarnation=INT32,
  push=INT64,
  step=INT64,
  version=INT64,
  seconds=FLOAT,
  loss=FLOAT,
  rate=FLOAT,
  share=FLOAT,
  mass=FLOAT,
  elastic_rate=FLOAT,
  read_version=INT64,
  # Other characters are replaced: see the tests of texts.
  text=st.text(
    st.characters(codec='ascii', categories=['L', 'P']), max_size=40
  ),
  payload=st.none()
  | st.integers(0, 40).map(lambda n: np.arange(n, dtype='u1')),
)
settings = hypothesis.settings(
  max_examples=60, deadline=None, derandomize=True, database=None
)


def _list_fields(message):
  """All fields but the payload; floats as their bits."""
  return [
    struct.pack('<d', value) if isinstance(value, float) else value
    for field in dataclasses.fields(message)
    if field.name != 'payload'
    for value in [getattr(message, field.name)]
  ]


def _reseal(data):
  """A bad message with a right checksum."""
  size = HEAD_SIZE
  head, text = bytes(data[: size - 4]), bytes(data[size:])
  return head + struct.pack('<I', zlib.crc32(head + text)) + text


@pytest.mark.parametrize('as_type', [bytes, bytearray, memoryview])
@hypothesis.given(message=MESSAGES)
@settings
def test_round_trip(as_type, message):
  data = wires.encode_message(message)
  decoded, payload_size = wires.decode_message(as_type(data))
  assert _list_fields(decoded) == _list_fields(message)
  assert type(decoded.verb) is wires.Verb
  assert decoded.payload is None
  assert payload_size == (
    0 if message.payload is None else message.payload.nbytes
  )


@hypothesis.given(message=MESSAGES)
@settings
def test_every_flipped_bit_is_found(message):
  data = wires.encode_message(message)
  for bit in range(8 * len(data)):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(wires.MessageError):
      wires.decode_message(damaged)


@hypothesis.given(message=MESSAGES)
@settings
def test_every_truncation_is_found(message):
  data = wires.encode_message(message)
  for size in range(len(data)):
    with pytest.raises(wires.MessageError) as caught:
      wires.decode_message(data[:size])
    assert caught.value.reason == ('truncated' if size else 'garbage')


@hypothesis.given(message=MESSAGES, more=st.binary(min_size=1, max_size=100))
@settings
def test_appended_bytes_are_found(message, more):
  with pytest.raises(wires.MessageError) as caught:
    wires.decode_message(wires.encode_message(message) + more)
  assert caught.value.reason == 'oversized'


@pytest.mark.parametrize('start', [b'', MAGIC, MAGIC + b'\x03\x00'], ids=repr)
@hypothesis.given(garbage=st.binary(max_size=300))
@settings
def test_garbage_is_refused(start, garbage):
  with pytest.raises(wires.MessageError):
    wires.decode_message(start + garbage)


@pytest.mark.parametrize(
  ('position', 'value', 'reason'),
  [
    pytest.param(4, b'\x04\x00', 'version', id='newer'),
    pytest.param(6, b'\x00', 'garbage', id='no such verb'),
    pytest.param(20, b'\xff\xff\xff\xff', 'oversized', id='endless text'),
    pytest.param(HEAD_SIZE, b'\xff', 'garbage', id='no UTF-8'),
  ],
)
def test_wrong_but_with_a_right_checksum(position, value, reason):
  message = wires.Message(wires.Verb.HELLO, text='all is well')
  data = bytearray(wires.encode_message(message))
  wires.decode_message(_reseal(data))
  data[position : position + len(value)] = value
  with pytest.raises(wires.MessageError) as caught:
    wires.decode_message(_reseal(data))
  assert caught.value.reason == reason


def test_longest_text():
  message = wires.Message(wires.Verb.HELLO, text='ä' * (wires.MAX_TEXT // 2))
  data = wires.encode_message(message)
  assert len(data) == HEAD_SIZE + wires.MAX_TEXT
  assert set(wires.decode_message(data)[0].text) == {'ä', '.'}
  message.text += 'a'
  with pytest.raises(wires.MessageError, match=r'65536.*65537') as caught:
    wires.encode_message(message)
  assert caught.value.reason == 'oversized'


def _send(verb, text):
  """The text of a message, as its receiver gets it."""
  data = wires.encode_message(wires.Message(verb, text=text))
  return wires.decode_message(data)[0].text


HARMFUL = {
  'a bell': 'a\x07b',
  'a null': 'a\0b',
  'a terminal sequence': '\x1b[2J\x1b]0;title\x07',
  'an 8-bit terminal sequence': '\x9b31mred',
  'a bidirectional override': 'abc\u202egpj.exe\u2066',
  'an invisible character': 'a\u200bb\ufeff',
  'a line that looks like a log': 'Done.\r\nERROR all is lost\u2028',
  'a private character': '\ue000',
}
every_verb = pytest.mark.parametrize('verb', wires.Verb)


@every_verb
@pytest.mark.parametrize('name', HARMFUL)
def test_texts_are_cleaned(name, verb):
  text = HARMFUL[name]
  found = _send(verb, text)
  assert found.isprintable()
  assert len(found) == len(text)
  for got, sent in zip(found, text, strict=True):
    assert got == sent if sent.isprintable() else got in '? '


@every_verb
def test_texts_are_cut(verb):
  found = _send(verb, 'x' * 65_000)
  assert found == 'x' * (wires.MAX_SHOWN - 3) + '...'


@pytest.mark.parametrize('name', HARMFUL)
@pytest.mark.parametrize('verb', ['HELLO', 'SNAPSHOT', 'ANSWER'])
def test_each_string_of_json_is_cleaned_and_cut(verb, name):
  bad, long = HARMFUL[name], 'x' * 10_000
  said = {'ok': [1, 2.5, None, True], bad: {'deep': [bad, long]}, long: []}
  (ok, numbers), (key, value), (cut, empty) = json.loads(
    _send(wires.Verb[verb], json.dumps(said))
  ).items()
  assert (ok, numbers, empty) == ('ok', [1, 2.5, None, True], [])
  for text in (key, value['deep'][0]):
    assert text.isprintable()
    assert len(text) == len(bad)
  assert cut == value['deep'][1] == 'x' * (wires.MAX_SHOWN - 3) + '...'


@pytest.mark.parametrize(
  'verb', ['STOP', 'STATUS', 'LEAVE', 'WAIT', 'END', 'REFUSED']
)
def test_json_is_plain_text_in_other_verbs(verb):
  text = json.dumps(['\x1b[2J'] * 5000)
  found = _send(wires.Verb[verb], text)
  assert found == text[: wires.MAX_SHOWN - 3] + '...'


@pytest.mark.parametrize('text', ['[' * 60_000, '9' * 60_000, '{"a": \x1b}'])
def test_malformed_json_is_cleaned_and_cut(text):
  found = _send(wires.Verb.HELLO, text)
  assert found.isprintable()
  assert len(found) <= wires.MAX_SHOWN


def test_a_long_list_of_json_comes_whole():
  said = {'members': {str(node): f'host-{node}:80' for node in range(2000)}}
  assert json.loads(_send(wires.Verb.ANSWER, json.dumps(said))) == said


def test_an_error_that_quotes_a_message_is_clean():
  error = wires.MessageError('garbage', 'got \x1b[2J' + 'x' * 10_000)
  assert str(error).isprintable()
  assert len(str(error)) == wires.MAX_SHOWN


@hypothesis.given(
  payload=st.binary(min_size=1, max_size=50), bit=st.integers(0, 10**6)
)
@settings
def test_checksum_of_the_payload(payload, bit):
  array = np.frombuffer(payload, np.uint8).copy()
  message = wires.Message(wires.Verb.EXCHANGE, flags=1, payload=array)
  data = wires.encode_message(message, with_checksum=True)
  decoded, _ = wires.decode_message(data)
  assert decoded.flags == 1 | wires.Flag.HAS_CHECKSUM
  wires.check_payload(data, array)
  bit %= 8 * array.nbytes
  array[bit // 8] ^= 1 << bit % 8
  with pytest.raises(wires.MessageError) as caught:
    wires.check_payload(data, array)
  assert caught.value.reason == 'damaged'
  # Without a checksum, any payload is accepted.
  wires.check_payload(wires.encode_message(message), array)


def test_without_a_payload_there_is_no_checksum():
  message = wires.Message(wires.Verb.FETCH)
  data = wires.encode_message(message, with_checksum=True)
  assert data == wires.encode_message(message)
