"""Snapshot server of a node, or of the centre.

A thread of its own answers requests while the owner of the weights computes, so
that no peer ever waits for a step. The owner publishes copies of its weights.
"""

from collections.abc import Callable
import json
import math
import threading
from typing import Any

from jasgd import engine
from jasgd import traces
from jasgd.runtime import _front_desk
from jasgd.runtime import _snapshots
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_Verb = _messages.Verb

# Seconds between two checks whether the thread must end.
_TICK = 0.1
# Numbers of nodes are below this: messages have 32 bits for them.
_MAX_NODES = 1 << 31

# Function that takes a message, copies its payload, and gives a
# `gossip.Outcome`.
Receive = Callable[[_messages.Message], int]


class SnapshotServer:
  """Sends snapshots, and hands over the messages of other nodes.

  The thread that calls `run` handles requests. Another one may `publish`.

  Args:
    layout: Layout of the weights.
    fingerprint: Fingerprint of the run, which nodes must have.
    is_shared: Whether other processes can map snapshots.
    receive: Function that takes the messages of other nodes.
    describe: Function that gives the owner's status, a JSON-serialisable dict.
    on_node: Function called with number, address (or None) and start time of
      each node that says HELLO, or that a launcher reports dead.

  Attributes:
    inbox: Inbox of requests.
    desk: Front desk, with its counts.
    stopped: Event that is set when a client asks for the end, or `run` fails.
  """

  def __init__(
    self,
    layout: engine.Layout,
    fingerprint: str,
    *,
    is_shared: bool,
    receive: Receive,
    describe: Callable[[], dict[str, Any]],
    on_node: Callable[[int, str | None, float], None] = lambda *_: None,
  ) -> None:
    self.inbox = _wire.Inbox()
    self.stopped = threading.Event()
    self._fingerprint = fingerprint
    self._receive = receive
    self._on_node = on_node
    self._store = _snapshots.SnapshotStore(layout, is_shared=is_shared)
    self._known: set[_wire.Channel] = set()  # Channels that have said HELLO.
    self._is_closing = threading.Event()
    self._error: BaseException | None = None
    self.desk = _front_desk.FrontDesk(
      self._store,
      {
        _Verb.EXCHANGE: self._exchange,
        _Verb.HELLO: self._hello,
        _Verb.LOST: self._note_death,
      },
      describe=describe,
      on_stop=lambda _: self.stopped.set(),
      on_gone=lambda channel, _: self._known.discard(channel),
    )

  def publish(
    self, weights: Any, version: int, step: int, mass: float = 0.0
  ) -> None:
    """Publishes a copy of the weights. Their record must have been flushed.

    Args:
      weights: (params, stats), which are copied.
      version: Version of the weights.
      step: Steps that are in them.
      mass: Mass, in push-sum; else 0.
    """
    # Incarnation 0: a node that restarts takes a new version instead.
    snapshot = self._store.copy(weights, 0, version, step=step, mass=mass)
    self._store.publish(snapshot)

  def run(self) -> None:
    """Handles requests until `stop` is called, and all that came before it.

    An error ends it early, and sets `stopped`; `check` raises it.
    """
    try:
      while not self._is_closing.is_set() or len(self.inbox):
        self.handle_one(_TICK)
    except BaseException as error:  # The owner raises it, in `check`.
      self._error = error
      self.stopped.set()

  def check(self) -> None:
    """Raises the error that has ended `run`, if there is one."""
    if self._error is not None:
      raise self._error

  def handle_one(self, timeout: float) -> bool:
    """Handles one request, if one comes in time; whether there was one."""
    event = self.inbox.get(timeout)
    if event is None:
      return False
    self.desk.handle(event)
    return True

  def stop(self) -> None:
    """Ends `run`, from any thread."""
    self._is_closing.set()

  def close(self) -> None:
    """Closes buffers and file descriptors, once `run` has ended."""
    self.inbox.close()
    self._store.close()

  def _hello(self, channel: _wire.Channel, message: _messages.Message) -> None:
    """Handles the HELLO of a node, which may send messages from then on."""
    said = _front_desk.read_hello(message.text, self._fingerprint)
    node, address, since = _check_hello(said, message.text)
    self._known.add(channel)
    self._on_node(node, address, since)
    channel.send(_messages.Message(_Verb.ANSWER))

  def _note_death(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    """Handles a LOST: a launcher reports a dead node, which counts as met."""
    if not 0 <= message.worker < _MAX_NODES:
      raise _messages.MessageError(
        'worker',
        f'The number of a node must be at least 0, got {message.worker}.',
      )
    # Its start time is not known. If the node is started again, its HELLO has
    # another start time, so that the node counts as returned.
    self._on_node(message.worker, None, -1.0)
    channel.send(_messages.Message(_Verb.ANSWER))

  def _exchange(
    self, channel: _wire.Channel, message: _messages.Message
  ) -> None:
    if channel not in self._known:
      raise _messages.MessageError('stranger', 'Say HELLO before EXCHANGE.')
    if message.payload is None:
      raise _messages.MessageError('size', 'An EXCHANGE must have a payload.')
    # Answered last: if the weights changed, the owner has recorded and
    # published the change before it returns.
    fate = self._receive(message)
    channel.send(_messages.Message(_Verb.ANSWER, fate=fate))


def make_hello(
  fingerprint: str, node: int, address: str | None, since: float
) -> str:
  """Makes the text of a node's HELLO.

  Args:
    fingerprint: Fingerprint of the run.
    node: Number of the node.
    address: Address of its Flight; None: it has none.
    since: Time when it was started, by its own clock.

  Returns:
    The text.
  """
  return json.dumps(
    {
      'fingerprint': fingerprint,
      'node': node,
      'address': address,
      'since': since,
    }
  )


def _check_hello(
  said: dict[str, Any], text: str
) -> tuple[int, str | None, float]:
  """Checks node, address and start time of a HELLO: other nodes are told them.

  Raises:
    MessageError: if no node of this run can have sent this.
  """
  node: Any = said.get('node')
  address: Any = said.get('address')
  since: Any = said.get('since')
  try:
    if address is not None:
      _addresses.check_address(address)
    # `type` and not `isinstance`: a bool is an int.
    is_good = (
      type(node) is int
      and (node == traces.SERVER or 0 <= node < _MAX_NODES)
      and 'address' in said
      and (address is None or address.isprintable())
      and type(since) in (int, float)
      and math.isfinite(since)
    )
  except (OverflowError, TypeError, ValueError):
    is_good = False
  if not is_good:
    raise _messages.MessageError(
      'hello',
      'A HELLO must give node (from 0 on), address (HOST:PORT or null) and '
      f'since (a finite time), got {text[:200]!r}.',
    )
  return node, address, since
