"""What learners and the server say to each other.

A message is a head of fixed size, a text, and a payload: one flat buffer of
weights or of a gradient. All numbers are little-endian, and the checksum is
CRC-32, of head and text:

======  =====  =================================================================
offset  bytes
======  =====  =================================================================
0       4      `MAGIC`
4       2      `VERSION` of the protocol
6       1      the verb
7       1      the fate of the learner's gradient, in answers
8       4      flags
12      4      the learner, or -1
16      4      incarnation of the weights that this is about
20      4      bytes of the text, n
24      8      step
32      8      clock of the weights that this is about
40      8      bytes of the payload
48      8      seconds that the learner computed
56      8      loss of the minibatch
64      8      rate for steps on a learner's own copy, in answers
72      4      checksum of the payload, if the flag says so
76      4      checksum of the 76 bytes before it and of the text
80      n      the text, in UTF-8; most verbs have none
======  =====  =================================================================

The payload travels apart, as the wire can do it best.

Texts end up in terminals, logs and reports, and whoever sent them may mean
harm. `decode_message` therefore cleans and cuts every text, before any consumer
sees it. Of a text that is JSON, it cleans and cuts each string in it.
"""

import dataclasses
import enum
import json
import struct
from typing import Any
import zlib

import numpy as np

MAGIC = b'jasg'
VERSION = 1
_HEAD = struct.Struct('<4sHBBIiiIqqQdddI')
_CHECKSUM = struct.Struct('<I')
HEAD_SIZE = _HEAD.size + _CHECKSUM.size
# More text than any verb has; what is longer is refused unread.
MAX_TEXT = 1 << 16
# Characters of a cleaned text; of JSON, characters of each string in it.
MAX_SHOWN = 500
_ELLIPSIS = '...'


class Verb(enum.IntEnum):
  """What a message wants; answers are from 64 up."""

  HELLO = 1  # A client comes. The text says who it is.
  EXCHANGE = 2  # A gradient, for new weights.
  NOTICE = 3  # The gradient was not finite, and is not sent.
  FETCH = 4  # New weights for a learner, without a gradient.
  PULL = 5  # The newest weights, for someone who does not learn.
  REPORT = 6  # Metrics of an evaluation, as text.
  STATUS = 7  # How the run stands, as text.
  LEAVE = 8  # The client goes.
  STOP = 9  # The run is to end, in good order.
  # A process that the client has started is dead. `learner` is the number of a
  # node; of a learner, which has none before it comes, the text is its pid.
  LOST = 10
  SNAPSHOT = 64  # Weights, and what became of the gradient.
  ANSWER = 65  # What became of it, without weights; or a text.
  WAIT = 66  # Go on waiting; the text says for what. More will come.
  END = 67  # The run is over, for this learner; the text says why.
  REFUSED = 68  # The message was no good; the text says what it should be.


# Verbs whose text is JSON, if they have one.
_JSON_VERBS = frozenset((Verb.HELLO, Verb.REPORT, Verb.SNAPSHOT, Verb.ANSWER))


class Flag(enum.IntFlag):
  """What else a message says."""

  NONE = 0
  KEEPS_WEIGHTS = 1  # The learner wants no new weights with the answer.
  HAS_CHECKSUM = 2  # The payload's checksum is given.
  RESEND = 4  # The learner is to send the gradient that it still has.
  AT_CLOCK = 8  # A PULL of the weights that are to be evaluated next.


class MessageError(ValueError):
  """A message that is not what it should be.

  Its text may quote the message, and is cleaned for this reason.

  Attributes:
    reason: A word for it, by which such messages are counted.
  """

  def __init__(self, reason: str, text: str) -> None:
    super().__init__(clean_text(text))
    self.reason = reason


@dataclasses.dataclass(slots=True)
class Message:
  """A message. Which fields mean something depends on the verb."""

  verb: Verb
  fate: int = 0
  flags: int = 0
  learner: int = -1
  incarnation: int = 0
  step: int = 0
  clock: int = 0
  seconds: float = 0.0
  loss: float = 0.0
  rate: float = 0.0
  text: str = ''
  # Bytes: a flat array of uint8, aligned to 64 bytes, that is left alone until
  # the message is answered.
  payload: np.ndarray | None = None
  # Seconds that the wire took to copy the payload. Not sent.
  copy_seconds: float = 0.0


def encode_message(message: Message, with_checksum: bool = False) -> bytes:
  """Head and text, ready to be sent.

  Args:
    message: What to say.
    with_checksum: Whether to add a checksum of the payload.

  Returns:
    The bytes; the payload is to be sent apart.

  Raises:
    MessageError: if the text is too long.
  """
  text = message.text.encode()
  if len(text) > MAX_TEXT:
    raise MessageError(
      'oversized',
      f'A text must have at most {MAX_TEXT} bytes, got {len(text)}.',
    )
  payload, flags, payload_sum = message.payload, int(message.flags), 0
  if with_checksum and payload is not None:
    flags |= Flag.HAS_CHECKSUM
    payload_sum = zlib.crc32(payload.data)
  head = _HEAD.pack(
    MAGIC,
    VERSION,
    message.verb,
    message.fate,
    flags,
    message.learner,
    message.incarnation,
    len(text),
    message.step,
    message.clock,
    0 if payload is None else payload.nbytes,
    message.seconds,
    message.loss,
    message.rate,
    payload_sum,
  )
  checksum = zlib.crc32(text, zlib.crc32(head))
  return head + _CHECKSUM.pack(checksum) + text


def decode_message(data: bytes | bytearray | memoryview) -> tuple[Message, int]:
  """The message of a head and a text, without its payload.

  Args:
    data: What `encode_message` gave, and nothing behind it.

  Returns:
    The message and the bytes that its payload must have. If the message has a
    checksum of it, `check_payload` is to be called once it is there. The text
    is cleaned and cut: see `clean_text`.

  Raises:
    MessageError: if it is garbage, of another version, cut off, too long, or
      damaged. Nothing is believed before the checksum was right.
  """
  if bytes(data[:4]) != MAGIC[: len(data)] or not len(data):
    raise MessageError(
      'garbage',
      f'A message begins with {MAGIC!r}, got {bytes(data[:4])!r}.',
    )
  if len(data) < HEAD_SIZE:
    raise MessageError(
      'truncated',
      f'A message has a head of {HEAD_SIZE} bytes, got {len(data)}.',
    )
  (
    _,
    version,
    verb,
    fate,
    flags,
    learner,
    incarnation,
    text_size,
    step,
    clock,
    payload_size,
    seconds,
    loss,
    rate,
    _,
  ) = _HEAD.unpack_from(data)
  if version != VERSION:
    raise MessageError(
      'version',
      f'The message is of version {version}; this is version {VERSION}.',
    )
  if text_size > MAX_TEXT or len(data) > HEAD_SIZE + text_size:
    raise MessageError(
      'oversized',
      f'A text of {text_size} bytes was announced, at most {MAX_TEXT} are '
      f'allowed, and {len(data) - HEAD_SIZE} came.',
    )
  if len(data) < HEAD_SIZE + text_size:
    raise MessageError(
      'truncated',
      f'The text must have {text_size} bytes, got {len(data) - HEAD_SIZE}.',
    )
  text = bytes(data[HEAD_SIZE:])
  (expected,) = _CHECKSUM.unpack_from(data, _HEAD.size)
  if zlib.crc32(text, zlib.crc32(data[: _HEAD.size])) != expected:
    raise MessageError('damaged', 'The checksum of the message is wrong.')
  try:
    return (
      Message(
        Verb(verb),
        fate,
        flags,
        learner,
        incarnation,
        step,
        clock,
        seconds,
        loss,
        rate,
        _clean_message(verb, text.decode()) if text else '',
      ),
      payload_size,
    )
  except ValueError:  # UnicodeDecodeError too.
    raise MessageError(
      'garbage', f'There is no verb {verb}, or the text is none.'
    ) from None


def clean_text(text: str) -> str:
  r"""Makes a text from the network harmless to a terminal, a log or a report.

  Characters that are not printable become '?': control characters, the escape
  character of terminal sequences, bidirectional overrides, invisible
  characters. White space of every kind becomes a space, so that the text
  stays on one line.

  Args:
    text: Any text.

  Returns:
    A printable text of at most `MAX_SHOWN` characters. One that was cut ends
    in '...'.

  Examples:
    >>> clean_text('all\x1b[2J\nis well')
    'all?[2J is well'
  """
  if len(text) > MAX_SHOWN:
    text = text[: MAX_SHOWN - len(_ELLIPSIS)] + _ELLIPSIS
  if text.isprintable():
    return text
  return ''.join(
    each if each.isprintable() else ' ' if each.isspace() else '?'
    for each in text
  )


def _clean_message(verb: int, text: str) -> str:
  """The text of a message, cleaned as its verb demands."""
  if verb in _JSON_VERBS:
    try:
      return json.dumps(_clean_json(json.loads(text)))
    except (ValueError, RecursionError):
      pass  # It is no JSON. The consumer refuses it, and may quote it.
  return clean_text(text)


def _clean_json(value: Any) -> Any:
  """A value of JSON, with clean strings as keys and as values."""
  if isinstance(value, str):
    return clean_text(value)
  if isinstance(value, list):
    return [_clean_json(each) for each in value]
  if isinstance(value, dict):
    return {clean_text(key): _clean_json(each) for key, each in value.items()}
  return value


def check_payload(
  data: bytes | bytearray | memoryview, payload: np.ndarray
) -> None:
  """Raises a MessageError if the payload is not the one that was sent."""
  flags = int.from_bytes(data[8:12], 'little')
  if flags & Flag.HAS_CHECKSUM:
    (expected,) = struct.unpack_from('<I', data, 72)
    if zlib.crc32(payload.data) != expected:
      raise MessageError('damaged', 'The checksum of the payload is wrong.')
