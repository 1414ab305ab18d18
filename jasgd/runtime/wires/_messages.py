"""Messages between workers and owners of weights.

A message is a head of fixed size, a text, and a payload: one flat buffer of
weights or of a gradient. All numbers are little-endian, and the checksum is
CRC-32, of head and text:

======  =====  =================================================================
offset  bytes
======  =====  =================================================================
0       4      `MAGIC`
4       2      `VERSION` of the protocol
6       1      the verb
7       1      fate of the worker's gradient or weights, in answers
8       4      flags
12      4      number of the worker that the message is about, or -1
16      4      incarnation of the weights that the message is about
20      4      bytes of the text, n
24      8      number of a learner's push, or -1
32      8      step: minibatches that the worker has computed
40      8      version of the weights that the message is about
48      8      bytes of the payload
56      8      seconds that the worker computed
64      8      loss of the minibatch
72      8      rate of steps on a learner's own replica
80      8      share: weight of the payload in the receiver's weights
88      8      mass of the weights in the payload, in push-sum
96      8      elastic rate, by which a node has made a force
104     8      version of the centre's weights that a force is computed with
112     4      checksum of the payload, if the flag says so
116     4      checksum of the 116 bytes before it and of the text
120     n      text, in UTF-8; most verbs have none
======  =====  =================================================================

Each wire sends the payload in its own way.

Texts end up in terminals, logs and reports, and their senders may be hostile.
`decode_message` therefore cleans and cuts every text, before any consumer sees
it. If a text is JSON, it cleans and cuts each string in it.
"""

import dataclasses
import enum
import json
import struct
from typing import Any
import zlib

import numpy as np

MAGIC = b'jasg'
VERSION = 3
_HEAD = struct.Struct('<4sHBBIiiIqqqQddddddqI')
_CHECKSUM = struct.Struct('<I')
HEAD_SIZE = _HEAD.size + _CHECKSUM.size
# Bytes of a text, at most; a longer one is refused unread.
MAX_TEXT = 1 << 16
# Characters of a cleaned text; of JSON, characters of each string in it.
MAX_SHOWN = 500
_ELLIPSIS = '...'


class Verb(enum.IntEnum):
  """Kind of a message, and what its text says; answers are from 64 up."""

  HELLO = 1  # A worker connects. The text identifies it.
  EXCHANGE = 2  # A gradient for new weights; between nodes, weights or a force.
  NOTICE = 3  # A gradient was not finite, and is not sent.
  FETCH = 4  # Asks for new weights, without a gradient.
  PULL = 5  # Asks for the newest weights; any client may.
  METRICS = 6  # Asks a server for its rows of metrics after `version`.
  STATUS = 7  # Asks for the status, as text.
  LEAVE = 8  # The client is about to disconnect.
  STOP = 9  # Asks the receiver to save and end; the text says why.
  # A process that the client has started is dead: the node `worker`, or a
  # learner, which has no number before it joins: the text is its pid.
  LOST = 10
  SNAPSHOT = 64  # Weights, and the fate of the gradient.
  ANSWER = 65  # The fate without weights; or a text.
  WAIT = 66  # The answer is withheld; the text says why. More will come.
  END = 67  # The run is over for this learner; the text says why.
  REFUSED = 68  # The message was bad; the text names the rule.


# Verbs whose text is JSON, if they have one.
_JSON_VERBS = frozenset((Verb.HELLO, Verb.SNAPSHOT, Verb.ANSWER))


class Flag(enum.IntFlag):
  """Flags of a message."""

  NONE = 0
  KEEPS_WEIGHTS = 1  # The learner wants no new weights with the answer.
  HAS_CHECKSUM = 2  # The head has a checksum of the payload.
  RESEND = 4  # The learner is to send its unanswered gradient again.
  AT_CLOCK = 8  # A PULL of the weights that are to be evaluated next.


class MessageError(ValueError):
  """A bad message.

  Its text may quote the message, and is cleaned for this reason.

  Attributes:
    reason: One word, by which bad messages are counted.
  """

  def __init__(self, reason: str, text: str) -> None:
    super().__init__(clean_text(text))
    self.reason = reason


@dataclasses.dataclass(slots=True)
class Message:
  """A message. Fields that a verb does not use have their defaults.

  Attributes:
    verb: Kind of the message.
    fate: Fate of the learner's last gradient (`protocols.Fate`) or of a node's
      message (`gossip.Outcome`), in answers.
    flags: `Flag`s.
    worker: Number of the learner or node that the message is about: the one
      that asks or is answered, or in a LOST the node that is dead; -1: none.
    incarnation: Incarnation of the owner of the weights.
    push: Number of a learner's push, from 0: of the one that the message is
      about, or in answers of the next one; -1: none.
    step: Minibatches that a worker has computed: a learner before its FETCH, or
      a node for the weights in the payload. Of the centre, its moves.
    version: Version of the weights; of a server, its clock.
    seconds: Seconds that the worker computed.
    loss: Loss of the minibatch.
    rate: Rate of steps on a learner's own replica.
    share: Weight of the payload in the receiver's weights, between nodes: a
      share of a mix, or 1 for a force, which the centre adds as it is. 0 in
      push-sum, where the mass is the weight.
    mass: Mass of the weights in the payload, in push-sum.
    elastic_rate: Rate by which a node has made the force in the payload.
    read_version: Version of the centre's weights with which a node computed the
      force in the payload.
    text: Text; see `Verb`.
    payload: Bytes: a flat uint8 array, aligned to 64 bytes, that does not
      change until the message is answered.
    copy_seconds: Seconds that the wire took to copy the payload. Not sent.
  """

  verb: Verb
  fate: int = 0
  flags: int = 0
  worker: int = -1
  incarnation: int = 0
  push: int = -1
  step: int = 0
  version: int = 0
  seconds: float = 0.0
  loss: float = 0.0
  rate: float = 0.0
  share: float = 0.0
  mass: float = 0.0
  elastic_rate: float = 0.0
  read_version: int = 0
  text: str = ''
  payload: np.ndarray | None = None
  copy_seconds: float = 0.0


def encode_message(message: Message, with_checksum: bool = False) -> bytes:
  """Encodes head and text.

  Args:
    message: The message.
    with_checksum: Whether to add a checksum of the payload.

  Returns:
    The bytes, without the payload.

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
    message.worker,
    message.incarnation,
    len(text),
    message.push,
    message.step,
    message.version,
    0 if payload is None else payload.nbytes,
    message.seconds,
    message.loss,
    message.rate,
    message.share,
    message.mass,
    message.elastic_rate,
    message.read_version,
    payload_sum,
  )
  checksum = zlib.crc32(text, zlib.crc32(head))
  return head + _CHECKSUM.pack(checksum) + text


def decode_message(data: bytes | bytearray | memoryview) -> tuple[Message, int]:
  """Decodes head and text.

  Args:
    data: Bytes of head and text, and no more.

  Returns:
    The message without its payload, and the number of bytes that the payload
    must have. Call `check_payload` once it is there. The text is cleaned and
    cut: see `clean_text`.

  Raises:
    MessageError: if it is garbage, of another version, cut off, too long, or
      damaged. Only the sizes are used before the checksum is verified.
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
    format_version,
    verb,
    fate,
    flags,
    worker,
    incarnation,
    text_size,
    push,
    step,
    version,
    payload_size,
    seconds,
    loss,
    rate,
    share,
    mass,
    elastic_rate,
    read_version,
    _,
  ) = _HEAD.unpack_from(data)
  if format_version != VERSION:
    raise MessageError(
      'version',
      f'Messages must be of version {VERSION}, got version {format_version}.',
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
        worker,
        incarnation,
        push,
        step,
        version,
        seconds,
        loss,
        rate,
        share,
        mass,
        elastic_rate,
        read_version,
        _clean_message(verb, text.decode()) if text else '',
      ),
      payload_size,
    )
  except ValueError:  # UnicodeDecodeError too.
    raise MessageError(
      'garbage', f'There is no verb {verb}, or the text is not UTF-8.'
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
  """Cleans the text of a message: JSON string by string."""
  if verb in _JSON_VERBS:
    try:
      return json.dumps(_clean_json(json.loads(text)))
    except (ValueError, RecursionError):
      pass  # Not JSON. The consumer refuses it, and may quote it.
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
    (expected,) = _CHECKSUM.unpack_from(data, _HEAD.size - _CHECKSUM.size)
    if zlib.crc32(payload.data) != expected:
      raise MessageError('damaged', 'The checksum of the payload is wrong.')
