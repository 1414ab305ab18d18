"""The others, as a node sees them: who is alive, and how to reach them.

A thread looks for those who are not connected, so that the node itself never
waits for somebody who may not be there. Nodes leave their addresses in the
workdir, each in a folder of its own.
"""

from collections.abc import Callable, Mapping
import contextlib
import json
import logging
import threading
import time
from typing import Any

from jasgd.runtime import _messages
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb

# Between two looks for others, in seconds.
_INTERVAL = 0.2
# A peer is silent if it takes so many times as long as the longest answer so
# far, and no less than so many seconds.
_PATIENCE_FACTOR, _LEAST_PATIENCE = 10.0, 1.0

Connect = Callable[[int], _wire.Connection]


class Peers:
  """Connections to other nodes, which come and go.

  Requests belong to one thread, the node's.

  Args:
    find: Gives ways to connect, by number, to all others that are known.
    fingerprint: What they want to hear.
    size: Of a payload, in bytes.
    deadline: Seconds for an answer; 0: it follows what was observed.
  """

  def __init__(
    self,
    find: Callable[[], Mapping[int, Connect]],
    fingerprint: str,
    size: int,
    deadline: float = 0.0,
  ) -> None:
    self._find = find
    self._fingerprint = fingerprint
    self._size = size
    self._deadline = deadline
    self._longest = 0.0
    self._ready: dict[int, _wire.Connection] = {}
    self._lost: set[int] = set()
    self._changed = threading.Condition()
    self._is_closing = threading.Event()
    self._thread = threading.Thread(
      target=self._look, name='jasgd-peers', daemon=True
    )
    self._thread.start()

  @property
  def alive(self) -> list[int]:
    """The numbers of those who are connected, sorted."""
    with self._changed:
      return sorted(self._ready)

  def wait_for(
    self, count: int, timeout: float, stopped: threading.Event
  ) -> bool:
    """Waits until so many others are there; whether they are."""
    deadline = time.monotonic() + timeout
    with self._changed:
      while len(self._ready) < count:
        left = deadline - time.monotonic()
        if left <= 0 or stopped.is_set():
          return False
        self._changed.wait(min(left, _INTERVAL))
    return True

  def pull(self, peer: int) -> _messages.Message | None:
    """The peer's weights; None if it is gone, or silent for too long.

    The payload stays as it is until the next request to the same peer.
    """
    return self._request(peer, _messages.Message(_Verb.PULL))

  def ask(self, peer: int) -> dict[str, Any] | None:
    """How a peer stands; None if it is gone."""
    answer = self._request(peer, _messages.Message(_Verb.STATUS))
    return None if answer is None else json.loads(answer.text)

  def push(
    self,
    peer: int,
    message: _messages.Message,
    write: Callable[[Any], None],
  ) -> int | None:
    """Sends a payload.

    Args:
      peer: To whom.
      message: What to say.
      write: Writes the payload into the buffer that it gets.

    Returns:
      What became of it, TAKEN or FULL; None if the peer is gone.
    """
    answer = self._request(peer, message, write)
    return None if answer is None else answer.fate

  def close(self) -> None:
    """Hangs up on everybody."""
    self._is_closing.set()
    self._thread.join()
    for connection in self._ready.values():
      connection.close()
    self._ready.clear()

  def _request(
    self,
    peer: int,
    message: _messages.Message,
    write: Callable[[Any], None] | None = None,
  ) -> _messages.Message | None:
    with self._changed:
      connection = self._ready.get(peer)
    if connection is None:
      return None
    begin = time.monotonic()
    try:
      if write is not None:
        write(connection.outgoing)
      answer = connection.request(
        message,
        has_payload=write is not None,
        deadline=self._deadline
        or max(_LEAST_PATIENCE, _PATIENCE_FACTOR * self._longest),
      )
    except (_wire.WireError, _wire.RefusedError) as error:
      self._lose(peer, connection, error)
      return None
    self._longest = max(self._longest, time.monotonic() - begin)
    return answer

  def _lose(
    self, peer: int, connection: _wire.Connection, error: Exception
  ) -> None:
    """Goes on without a peer, until it can be reached again."""
    connection.close()
    with self._changed:
      self._ready.pop(peer, None)
      self._lost.add(peer)
    _log.warning('%s is lost: %s', _name(peer), error)

  # --- The thread that looks for others.

  def _look(self) -> None:
    while not self._is_closing.is_set():
      for peer, connect in self._find().items():
        with self._changed:
          is_known = peer in self._ready
        if not is_known and not self._is_closing.is_set():
          self._try(peer, connect)
      self._is_closing.wait(_INTERVAL)

  def _try(self, peer: int, connect: Connect) -> None:
    """Connects, if the peer is there."""
    with contextlib.ExitStack() as stack:
      try:
        connection = connect(self._size)
        stack.callback(connection.close)
        connection.request(
          _messages.Message(_Verb.HELLO, text=self._fingerprint),
          deadline=self._deadline or _LEAST_PATIENCE,
        )
      except _wire.WireError:
        return  # Not there yet, or no longer.
      except _wire.RefusedError as error:
        if peer not in self._lost:
          _log.warning('%s does not want us: %s', _name(peer), error)
        self._lost.add(peer)
        return
      stack.pop_all()
    with self._changed:
      self._ready[peer] = connection
      if peer in self._lost:
        self._lost.discard(peer)
        _log.warning('%s is back.', _name(peer))
      self._changed.notify_all()


def _name(peer: int) -> str:
  return 'The centre' if peer < 0 else f'Node {peer}'
