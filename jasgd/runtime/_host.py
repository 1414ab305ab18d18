"""What a node, or a centre, shows of itself: its newest weights.

It answers while its owner computes, so that nobody ever waits for a step. A
thread of its own takes requests; whoever owns the weights publishes copies.
"""

from collections.abc import Callable
import json
import logging
import math
import threading
from typing import Any

from jasgd import engine
from jasgd import traces
from jasgd.runtime import _inbox
from jasgd.runtime import _messages
from jasgd.runtime import _snapshots
from jasgd.runtime import _wire
from jasgd.runtime import addresses

_log = logging.getLogger(__name__)
_Verb = _messages.Verb

# How often it looks whether it is to end, in seconds.
_TICK = 0.1

# Gets a message with a payload, which is to be copied; gives a
# `gossip.Outcome`.
Take = Callable[[_messages.Message], int]


class Host:
  """Serves snapshots, and takes in what others send.

  Requests are handled by the thread that calls `run`. `publish` may be called
  by another one.

  Args:
    layout: Of the weights.
    fingerprint: What others must say before they may send.
    is_shared: Whether snapshots can be mapped by other processes.
    take: Gets what others send.
    describe: How its owner stands, as JSON can say it.
    meet: Called with number, address, if any, and time when somebody comes who
      learns the same.

  Attributes:
    inbox: Where requests come in.
    stopped: Set when somebody asked for the end, or `run` has failed.
    num_refused: Messages that were no good.
    num_sent: Snapshots that were sent.
  """

  def __init__(
    self,
    layout: engine.Layout,
    fingerprint: str,
    *,
    is_shared: bool,
    take: Take,
    describe: Callable[[], dict[str, Any]],
    meet: Callable[[int, str | None, float], None] = lambda *_: None,
  ) -> None:
    self.inbox = _inbox.Inbox()
    self.stopped = threading.Event()
    self.num_refused = 0
    self.num_sent = 0
    self._layout = layout
    self._fingerprint = fingerprint
    self._take = take
    self._describe = describe
    self._meet = meet
    self._store = _snapshots.SnapshotStore(layout, is_shared=is_shared)
    self._newest: _snapshots.Snapshot | None = None
    self._newest_step, self._newest_mass = 0, 0.0
    self._leases: dict[_wire.Channel, _snapshots.Snapshot] = {}
    self._friends: set[_wire.Channel] = set()  # They have said who they are.
    # Of the store, the newest and the leases.
    self._lock = threading.Lock()
    self._is_closing = threading.Event()
    self._error: BaseException | None = None

  def publish(
    self, weights: Any, version: int, step: int, mass: float = 0.0
  ) -> None:
    """Shows new weights from now on; returns after one copy.

    Args:
      weights: (params, stats), which are copied.
      version: How often they have changed.
      step: How many steps are in them.
      mass: Of push-sum; else 0.
    """
    with self._lock:
      buffer = self._store.reserve()
    self._layout.pack(weights, buffer.array)  # Nobody else has it yet.
    with self._lock:
      old = self._newest
      self._newest = self._store.wrap(0, version, 1.0, buffer)
      self._newest_step, self._newest_mass = step, mass
      if old is not None:
        self._store.end_lease(old)

  def run(self) -> None:
    """Answers until `stop` is called, and then what has come before.

    What ends it before that is for `check` to raise, and lets the owner stop.
    """
    try:
      while not self._is_closing.is_set() or len(self.inbox):
        self.answer(_TICK)
    except BaseException as error:  # The owner raises it.
      self._error = error
      self.stopped.set()

  def check(self) -> None:
    """Raises what has ended `run`, if anything but `stop` has."""
    if self._error is not None:
      raise self._error

  def answer(self, timeout: float) -> bool:
    """Handles one request, or the lack of one; whether there was one."""
    event = self.inbox.get(timeout)
    if event is None:
      return False
    channel, message, error = event
    if error is not None:  # The wire has refused it already.
      self._count_refusal(channel, error)
    elif message is None:
      self._forget(channel)
    else:
      try:
        self._handle(channel, message)
      except _messages.MessageError as refusal:
        self._count_refusal(channel, refusal)
        channel.send(_messages.Message(_Verb.REFUSED, text=str(refusal)))
    return True

  def stop(self) -> None:
    """Ends `run`, from any thread."""
    self._is_closing.set()

  def close(self) -> None:
    """Gives buffers and file descriptors back, once `run` has ended."""
    self.inbox.close()
    self._store.close()

  def _handle(self, channel: _wire.Channel, message: _messages.Message) -> None:
    verb = message.verb
    if verb == _Verb.PULL:
      self._send_weights(channel)
    elif verb == _Verb.EXCHANGE:
      self._take_in(channel, message)
    elif verb == _Verb.HELLO:
      self._welcome(channel, message)
    elif verb == _Verb.STATUS:
      status = self._describe()
      text = json.dumps(status)
      if len(text) > _messages.MAX_TEXT:  # There are very many nodes.
        text = json.dumps({**status, 'members': {}})
      channel.send(_messages.Message(_Verb.ANSWER, text=text))
    elif verb == _Verb.STOP:
      self.stopped.set()
      channel.send(_messages.Message(_Verb.ANSWER))
    elif verb == _Verb.LOST:
      self._note_death(message)
      channel.send(_messages.Message(_Verb.ANSWER))
    elif verb == _Verb.LEAVE:
      self._forget(channel)
      channel.send(_messages.Message(_Verb.ANSWER))
    else:
      raise _messages.MessageError('verb', f'A node does not take {verb.name}.')

  def _welcome(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    """Lets somebody send who learns the same."""
    greeting = _read_greeting(message.text)
    if greeting['fingerprint'] != self._fingerprint:
      raise _messages.MessageError(
        'fingerprint',
        'The other side learns something else: its model, data, batch or seed '
        f'differ (fingerprint {greeting["fingerprint"][:32]!r}, here '
        f'{self._fingerprint!r}).',
      )
    self._friends.add(channel)
    self._meet(greeting['node'], greeting['address'], greeting['since'])
    channel.send(_messages.Message(_Verb.ANSWER))

  def _note_death(self, message: _messages.Message) -> None:
    """A launcher says that a node is dead: it counts as one that has come."""
    if not 0 <= message.learner < _MAX_NODES:
      raise _messages.MessageError(
        'learner', f'A node has a number from 0 on, got {message.learner}.'
      )
    # Should it be started again, its time will differ: it has come back then.
    self._meet(message.learner, None, -1.0)

  def _send_weights(self, channel: _wire.Channel) -> None:
    with self._lock:
      snapshot = self._newest
      step, mass = self._newest_step, self._newest_mass
      if snapshot is None:
        raise _messages.MessageError('early', 'There are no weights yet.')
      old = self._leases.pop(channel, None)
      if old is not None:
        self._store.end_lease(old)
      self._leases[channel] = self._store.lease(snapshot)
    self.num_sent += 1
    channel.send(
      _messages.Message(
        _Verb.SNAPSHOT, clock=snapshot.clock, step=step, rate=mass
      ),
      snapshot.buffer,
    )

  def _take_in(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    if channel not in self._friends:
      raise _messages.MessageError('stranger', 'Say HELLO before EXCHANGE.')
    if message.payload is None:
      raise _messages.MessageError('size', 'An EXCHANGE must have a payload.')
    fate = self._take(message)
    channel.send(_messages.Message(_Verb.ANSWER, fate=fate))

  def _forget(self, channel: _wire.Channel) -> None:
    """Somebody is gone, and has no weights of ours any more."""
    self._friends.discard(channel)
    with self._lock:
      snapshot = self._leases.pop(channel, None)
      if snapshot is not None:
        self._store.end_lease(snapshot)

  def _count_refusal(
    self, channel: _wire.Channel, refusal: _messages.MessageError
  ) -> None:
    if not self.num_refused:
      _log.warning(
        'Refused (%s), from %s: %s', refusal.reason, channel.name, refusal
      )
    self.num_refused += 1


_GREETING: dict[str, tuple[type, ...]] = {
  'fingerprint': (str,),
  'node': (int,),
  'address': (str, type(None)),
  'since': (int, float),
}
# More than any number of a node: messages have 32 bits for it.
_MAX_NODES = 1 << 31
# Letters of a greeting that is no good, in what is said of it.
_MAX_SHOWN = 200


def make_greeting(
  fingerprint: str, node: int, address: str | None, since: float
) -> str:
  """What a node says when it comes to another one.

  Args:
    fingerprint: Of what it learns.
    node: Its number.
    address: Of its Flight; None: it has none.
    since: When it came there, by its own clock.

  Returns:
    The text of a HELLO.
  """
  values = (fingerprint, node, address, since)
  return json.dumps(dict(zip(_GREETING, values, strict=True)))


def _read_greeting(text: str) -> dict[str, Any]:
  """What `make_greeting` was given.

  Raises:
    MessageError: if it was not.
  """
  greeting: Any = None
  try:
    greeting = json.loads(text)
    is_good = _is_greeting(greeting)
  except (KeyError, OverflowError, RecursionError, TypeError, ValueError):
    is_good = False
  if not is_good:
    raise _messages.MessageError(
      'hello',
      f'A node says {", ".join(_GREETING)} when it comes: text, a number from '
      '0 on, HOST:PORT or null, and a finite time; got '
      f'{text[:_MAX_SHOWN]!r}.',
    )
  return greeting


def _is_greeting(said: Any) -> bool:
  """Whether that is one: others are told of it, and must be able to use it."""
  if not all(type(said[name]) in kinds for name, kinds in _GREETING.items()):
    return False  # A bool is no number here.
  node, address = said['node'], said['address']
  if address is not None:
    addresses.make_connect(server=address)  # A ValueError if it is none.
    if not address.isprintable() or int(address.rsplit(':')[-1]) >= 1 << 16:
      return False
  return (node == traces.CENTRE or 0 <= node < _MAX_NODES) and math.isfinite(
    said['since']
  )
