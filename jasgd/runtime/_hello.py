"""What a learner says of itself when it comes."""

import json
from typing import Any, NamedTuple

from jasgd.runtime import _messages

_MAX_INSTANCE = 64  # Characters.
_MAX_COUNT = 2**31 - 1  # Of steps, clocks and incarnations.


class Hello(NamedTuple):
  """A HELLO that is as it should be.

  Attributes:
    wanted: The number that the learner had; -1: it had none.
    instance: What it is known by.
    num_devices: Over how many devices it spreads a minibatch.
    pid: Its process, as it says; 0: it does not say.
  """

  wanted: int
  instance: str
  num_devices: int
  pid: int


def read_hello(
  message: _messages.Message, fingerprint: str, batch: int
) -> Hello:
  """Reads and checks a HELLO.

  Args:
    message: The message.
    fingerprint: What it must say.
    batch: Samples of a minibatch.

  Returns:
    What it says.

  Raises:
    MessageError: if it is not what a learner of this run says.
  """
  said = _read_text(message.text)
  found = said.get('fingerprint')
  if found != fingerprint:
    raise _messages.MessageError(
      'fingerprint',
      'The learner must have the same task, batch, seed and wire dtype as the '
      f'server, which is {fingerprint}, got {found!r:.40}.',
    )
  instance = said.get('instance', '')
  if not isinstance(instance, str) or not (
    instance.isascii() and len(instance) <= _MAX_INSTANCE
  ):
    raise _messages.MessageError(
      'hello',
      f'An instance has at most {_MAX_INSTANCE} ASCII characters, got '
      f'{instance!r:.80}.',
    )
  num_devices = said.get('num_devices', 1)
  if (
    type(num_devices) is not int
    or not 0 <= num_devices <= batch
    or (batch % max(num_devices, 1))
  ):
    raise _messages.MessageError(
      'hello',
      f'num_devices must divide the batch of {batch}, got {num_devices!r:.40}.',
    )
  pid = said.get('pid', 0)
  if type(pid) is not int or not 0 <= pid <= _MAX_COUNT:
    raise _messages.MessageError('hello', f'There is no pid {pid!r:.40}.')
  _check_held(message)
  return Hello(message.learner, instance, max(num_devices, 1), pid)


def _read_text(text: str) -> dict[str, Any]:
  """The text, which must be a JSON object."""
  try:
    said = json.loads(text)
  except (ValueError, RecursionError):
    said = None
  if not isinstance(said, dict) or 'fingerprint' not in said:
    raise _messages.MessageError(
      'hello', 'HELLO must say its fingerprint, as a JSON object.'
    )
  return said


def _check_held(message: _messages.Message) -> None:
  """Checks what it says of a gradient that was not answered."""
  counts = (message.step, message.clock, message.incarnation)
  if not -1 <= message.step <= _MAX_COUNT or not all(
    count <= _MAX_COUNT for count in counts
  ):
    raise _messages.MessageError(
      'hello',
      f'A HELLO is of no such (step, clock, incarnation): {counts}.',
    )
  if message.step >= 0 and not (
    message.clock >= 0
    and message.incarnation >= 0
    and 0 <= message.seconds < float('inf')
  ):
    raise _messages.MessageError(
      'hello', 'A gradient has a clock, an incarnation and seconds from 0 up.'
    )
