"""Connections of a node to its peers: which of them are alive.

A thread connects to peers that are not connected, so that the node itself never
waits for a peer that may not exist.
"""

from collections.abc import Callable
import contextlib
import json
import logging
import threading
import time
from typing import Any

from jasgd import gossip
from jasgd.runtime import _settings
from jasgd.runtime.nodes import _registry
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb

# Seconds between two tries to connect.
_INTERVAL = 0.2
# Least seconds of an adaptive deadline for an answer.
_MIN_DEADLINE = 1.0


class PeerConnections:
  """Connections to other nodes, or to the centre.

  Only the node's own thread sends requests. `start` starts the other thread,
  which connects.

  Args:
    registry: Addresses of other nodes.
    is_wanted: Function that tells whether to connect to a member, by number.
    make_hello: Function that gives the text of the HELLO.
    size: Bytes of a payload.
    deadlines: Deadlines: a peer is lost that does not answer within `step`; an
      adaptive one is at most `silence`.
    clock: Function that gives the time in seconds.
  """

  def __init__(
    self,
    registry: _registry.Registry,
    is_wanted: Callable[[int], bool],
    make_hello: Callable[[], str],
    size: int,
    deadlines: _settings.Deadlines,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    self._registry = registry
    self._is_wanted = is_wanted
    self._make_hello = make_hello
    self._size = size
    self._deadlines = deadlines
    self._clock = clock
    self._longest = 0.0
    self._error: BaseException | None = None
    self._ready: dict[int, _wire.Connection] = {}
    self._lost: set[int] = set()
    self._is_refused = False
    self._changed = threading.Condition()
    self._is_closing = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name='jasgd-peers', daemon=True
    )

  def start(self) -> None:
    """Begins to connect."""
    self._thread.start()

  def check(self) -> None:
    """Raises the error that has ended the thread, if there is one."""
    if self._error is not None:
      raise self._error

  @property
  def alive(self) -> list[int]:
    """Numbers of the connected peers, sorted."""
    with self._changed:
      return sorted(self._ready)

  def wait_for(
    self, count: int, timeout: float, is_stopping: Callable[[], bool]
  ) -> bool:
    """Waits until `count` peers are connected; gives whether they are."""
    deadline = time.monotonic() + timeout
    with self._changed:
      while len(self._ready) < count:
        left = deadline - time.monotonic()
        if left <= 0 or is_stopping():
          return False
        self._changed.wait(min(left, _INTERVAL))
    return True

  def pull(self, peer: int) -> _messages.Message | None:
    """The peer's weights; None if it is gone, or silent for too long.

    The payload does not change until the next request to the same peer.
    """
    return self._try_request(peer, _messages.Message(_Verb.PULL))

  def get_status(self, peer: int) -> dict[str, Any] | None:
    """Status of a peer; None if it is gone."""
    answer = self._try_request(peer, _messages.Message(_Verb.STATUS))
    return None if answer is None else json.loads(answer.text)

  def push(
    self,
    peer: int,
    message: _messages.Message,
    write: Callable[[Any], None],
  ) -> gossip.Outcome:
    """Sends a payload.

    Args:
      peer: Number of the peer.
      message: Message without its payload.
      write: Function that writes the payload into a buffer.

    Returns:
      Outcome of the message.
    """
    try:
      return gossip.Outcome(self._request(peer, message, write).fate)
    except (_wire.UntakenError, _wire.RefusedError):
      return gossip.Outcome.UNREACHABLE
    except _wire.WireError:
      return gossip.Outcome.UNKNOWN

  def close(self) -> None:
    """Ends the thread, and closes all connections."""
    self._is_closing.set()
    if self._thread.is_alive():
      self._thread.join()
    for connection in self._ready.values():
      connection.close()
    self._ready.clear()

  def _try_request(
    self, peer: int, message: _messages.Message
  ) -> _messages.Message | None:
    """The answer to a request; None if the peer is lost."""
    try:
      return self._request(peer, message)
    except (_wire.WireError, _wire.RefusedError):
      return None

  def _request(
    self,
    peer: int,
    message: _messages.Message,
    write: Callable[[Any], None] | None = None,
  ) -> _messages.Message:
    """The answer to a request.

    Raises:
      WireError: if the peer is lost; see `Connection.request`.
      RefusedError: likewise, if it has refused the request.
    """
    with self._changed:
      connection = self._ready.get(peer)
    if connection is None:
      raise _wire.UntakenError(
        f'{_registry.name_member(peer)} is not connected.'
      )
    begin = self._clock()
    try:
      if write is not None:
        write(connection.outgoing)
      answer = connection.request(
        message,
        has_payload=write is not None,
        deadline=self._find_deadline(),
      )
    except (_wire.WireError, _wire.RefusedError) as error:
      self._lose(peer, connection, error)
      raise
    seconds = self._clock() - begin
    self._longest = _settings.update_longest(self._longest, seconds)
    return answer

  def _find_deadline(self) -> float:
    """Seconds for an answer."""
    found = self._deadlines.find_step(self._longest, _MIN_DEADLINE)
    return self._deadlines.step or min(found, self._deadlines.silence)

  def _lose(
    self, peer: int, connection: _wire.Connection, error: Exception
  ) -> None:
    """Drops the connection of a peer, until the thread connects again."""
    connection.close()
    with self._changed:
      self._ready.pop(peer, None)
      self._lost.add(peer)
    _log.warning('%s is lost: %s', _registry.name_member(peer), error)

  # --- The thread that connects.

  def _run(self) -> None:
    try:
      while not self._is_closing.is_set():
        self._connect_all()
        self._is_closing.wait(_INTERVAL)
    except BaseException as error:  # The owner raises it, in `check`.
      self._error = error

  def _connect_all(self) -> None:
    """Tries to connect to all wanted members that are not connected."""
    self._contact_addresses()
    for peer in filter(self._is_wanted, self._registry.list_members()):
      with self._changed:
        is_known = peer in self._ready
      if not is_known and not self._is_closing.is_set():
        self._connect(peer)

  def _contact_addresses(self) -> None:
    """Contacts nodes that are known by address only; logs the first refusal."""
    try:
      self._registry.contact_addresses()
    except _wire.RefusedError as error:
      if not self._is_refused:
        _log.warning('%s', error)
      self._is_refused = True

  def _connect(self, peer: int) -> None:
    """Connects to a peer, if it exists, and asks it for other addresses."""
    deadline = self._deadlines.step or _MIN_DEADLINE
    with contextlib.ExitStack() as stack:
      try:
        connection = self._registry.connect(peer)(self._size)
        stack.callback(connection.close)
        connection.request(
          _messages.Message(_Verb.HELLO, text=self._make_hello()),
          deadline=deadline,
        )
        answer = connection.request(
          _messages.Message(_Verb.STATUS), deadline=deadline
        )
        status = json.loads(answer.text)
        if status.get('node') != peer:
          return  # Another process has its address now.
        self._registry.merge(status['members'])
      except _wire.WireError:
        return  # It has not started yet, or has ended.
      except _wire.RefusedError as error:
        if peer not in self._lost:
          _log.warning(
            '%s refuses this node: %s', _registry.name_member(peer), error
          )
        self._lost.add(peer)
        return
      stack.pop_all()
    with self._changed:
      self._ready[peer] = connection
      if peer in self._lost:
        self._lost.discard(peer)
        _log.warning('%s is back.', _registry.name_member(peer))
      self._changed.notify_all()
