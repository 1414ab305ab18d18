"""The front desk of a server, a centre or a node: requests from the inbox.

It answers the requests that are alike for every owner of weights (PULL, STATUS,
STOP, LEAVE), refuses bad messages, and passes all other messages on to the
owner's handlers.
"""

import collections
from collections.abc import Callable, Mapping
import json
import logging
from typing import Any

from jasgd.runtime import _snapshots
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb

# Parts of a status that are left out if there are too many workers.
_LONG_PARTS = ('learners', 'members')

Handler = Callable[[_wire.Channel, _messages.Message], None]


class FrontDesk:
  """Handles events; belongs to the thread that takes them out of the inbox.

  Args:
    store: Snapshots that visitors pull.
    handlers: The owner's own handlers, by verb. They answer through the channel
      and raise a MessageError to refuse a message.
    describe: Function that gives the owner's status, a JSON-serialisable dict.
    on_stop: Function called with the text of a STOP, after it is answered.
    on_gone: Function called with a channel that has ended, and whether its
      client announced this with a LEAVE.
    pick: Function that gives a leased snapshot for a PULL, or None for the
      newest one.

  Attributes:
    counts: Numbers of accepted messages, and of refused ones by reason.
    num_sent: Number of snapshots that visitors have pulled.
  """

  def __init__(
    self,
    store: _snapshots.SnapshotStore,
    handlers: Mapping[_Verb, Handler],
    *,
    describe: Callable[[], dict[str, Any]],
    on_stop: Callable[[str], None],
    on_gone: Callable[[_wire.Channel, bool], None],
    pick: Callable[
      [_messages.Message], _snapshots.Snapshot | None
    ] = lambda _: None,
  ) -> None:
    self.counts: collections.Counter[str] = collections.Counter()
    self.num_sent = 0
    self._store = store
    self._handlers: dict[_Verb, Handler] = {
      _Verb.PULL: self._send_snapshot,
      _Verb.STATUS: self._send_status,
      _Verb.STOP: self._stop,
      _Verb.LEAVE: self._leave,
      **handlers,
    }
    self._describe = describe
    self._on_stop = on_stop
    self._on_gone = on_gone
    self._pick = pick
    # Visitors, with the snapshots that they have pulled.
    self._visitors: dict[_wire.Channel, _snapshots.Snapshot | None] = {}

  @property
  def num_visitors(self) -> int:
    """Clients that have asked for status or weights, and are still there."""
    return len(self._visitors)

  @property
  def num_refused(self) -> int:
    """Messages that were refused."""
    return self.counts.total() - self.counts['accepted']

  def handle(self, event: _wire.Event) -> None:
    """Handles an event; a bad message is refused, and changes nothing."""
    channel, message, error = event
    if error is not None:  # The wire has refused it already.
      self._count_refusal(channel, error)
      return
    if message is None:
      self._forget(channel)
      self._on_gone(channel, False)
      return
    try:
      handler = self._handlers.get(message.verb)
      if handler is None:
        raise _messages.MessageError(
          'verb', f'This process does not handle {message.verb.name}.'
        )
      handler(channel, message)
      self.counts['accepted'] += 1
    except _messages.MessageError as refusal:
      self.refuse(channel, refusal)

  def refuse(
    self, channel: _wire.Channel, refusal: _messages.MessageError
  ) -> None:
    """Counts a bad message, and sends the rule to its sender."""
    self._count_refusal(channel, refusal)
    channel.send(_messages.Message(_Verb.REFUSED, text=str(refusal)))

  def _count_refusal(
    self, channel: _wire.Channel, refusal: _messages.MessageError
  ) -> None:
    if not self.counts[refusal.reason]:  # One log line for each reason.
      _log.warning(
        'Refused (%s), from %s: %s', refusal.reason, channel.name, refusal
      )
    self.counts[refusal.reason] += 1

  def _send_snapshot(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    self._forget(channel)
    snapshot = self._pick(message) or self._store.lease_newest()
    if snapshot is None:
      raise _messages.MessageError('early', 'There are no weights yet.')
    self._visitors[channel] = snapshot  # It has the lease from now on.
    self.num_sent += 1
    channel.send(snapshot.make_message(), snapshot.buffer)

  def _send_status(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    del message
    self._visitors.setdefault(channel, None)
    status = self._describe()
    text = json.dumps(status)
    if len(text) > _messages.MAX_TEXT:
      short = {name: {} for name in _LONG_PARTS if name in status}
      text = json.dumps({**status, **short})
    channel.send(_messages.Message(_Verb.ANSWER, text=text))

  def _stop(self, channel: _wire.Channel, message: _messages.Message) -> None:
    channel.send(_messages.Message(_Verb.ANSWER))
    self._on_stop(message.text)

  def _leave(self, channel: _wire.Channel, message: _messages.Message) -> None:
    del message
    self._forget(channel)
    channel.send(_messages.Message(_Verb.ANSWER))
    self._on_gone(channel, True)

  def _forget(self, channel: _wire.Channel) -> None:
    """Ends the lease of a visitor."""
    snapshot = self._visitors.pop(channel, None)
    if snapshot is not None:
      self._store.end_lease(snapshot)

  def save(self) -> dict[str, int]:
    """Counts of messages, for a checkpoint."""
    return dict(self.counts)

  def restore(self, counts: dict[str, int]) -> None:
    """Inverse of `save`."""
    self.counts.update(counts)

  def list_leased(self) -> list[_snapshots.Snapshot]:
    """Snapshots that visitors have."""
    return [each for each in self._visitors.values() if each is not None]


def read_hello(text: str, fingerprint: str) -> dict[str, Any]:
  """Reads the text of a HELLO.

  Args:
    text: Text of the message.
    fingerprint: Fingerprint of the run, which the text must have.

  Returns:
    The JSON object. Its other fields are not checked.

  Raises:
    MessageError: if the text is no JSON object, or has another fingerprint.
  """
  try:
    said = json.loads(text)
  except (ValueError, RecursionError):
    said = None
  if not isinstance(said, dict) or 'fingerprint' not in said:
    raise _messages.MessageError(
      'hello',
      f'HELLO must give a fingerprint, in a JSON object, got {text[:200]!r}.',
    )
  if said['fingerprint'] != fingerprint:
    raise _messages.MessageError(
      'fingerprint',
      'Both sides must have the same task, batch, seed, wire dtype and '
      f'strategy: the fingerprint here is {fingerprint!r}, got '
      f'{said["fingerprint"]!r:.40}.',
    )
  return said
