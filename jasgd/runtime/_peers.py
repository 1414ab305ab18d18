"""The others, as a node sees them: who is alive, and how to reach them.

A thread looks for those who are not connected, so that the node itself never
waits for somebody who may not be there.
"""

from collections.abc import Callable
import contextlib
import json
import logging
import threading
import time
from typing import Any

from jasgd import gossip
from jasgd.runtime import _messages
from jasgd.runtime import _wire
from jasgd.runtime import members

_log = logging.getLogger(__name__)
_Verb = _messages.Verb

# Between two looks for others, in seconds.
_INTERVAL = 0.2
# A peer is silent if it takes so many times as long as the longest answer of
# late, and no less than so many seconds.
_PATIENCE_FACTOR, _LEAST_PATIENCE = 10.0, 1.0
# How much of the longest answer is left after another one: after some hundred,
# it is forgotten.
_MEMORY = 0.99


class Peers:
  """Connections to other nodes, which come and go.

  Nobody is looked for before `start`. Requests belong to one thread, the
  node's.

  Args:
    registry: Where the others are.
    is_wanted: Whether to connect to a member, by number.
    greet: What to say to them.
    size: Of a payload, in bytes.
    deadline: Seconds for an answer; 0: it follows what was observed.
    silence: The most that it can come to then.
    clock: Tells the time, in seconds.
  """

  def __init__(
    self,
    registry: members.Registry,
    is_wanted: Callable[[int], bool],
    greet: Callable[[], str],
    size: int,
    deadline: float = 0.0,
    silence: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    self._registry = registry
    self._is_wanted = is_wanted
    self._greet = greet
    self._size = size
    self._deadline = deadline
    self._silence = silence
    self._clock = clock
    self._longest = 0.0
    self._error: BaseException | None = None
    self._ready: dict[int, _wire.Connection] = {}
    self._lost: set[int] = set()
    self._is_refused = False
    self._changed = threading.Condition()
    self._is_closing = threading.Event()
    self._thread = threading.Thread(
      target=self._look, name='jasgd-peers', daemon=True
    )

  def start(self) -> None:
    """Begins to look for others."""
    self._thread.start()

  def check(self) -> None:
    """Raises what has ended the search for others, if anything has."""
    if self._error is not None:
      raise self._error

  @property
  def alive(self) -> list[int]:
    """The numbers of those who are connected, sorted."""
    with self._changed:
      return sorted(self._ready)

  def wait_for(
    self, count: int, timeout: float, is_stopping: Callable[[], bool]
  ) -> bool:
    """Waits until so many others are there; whether they are."""
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

    The payload stays as it is until the next request to the same peer.
    """
    return self._ask(peer, _messages.Message(_Verb.PULL))

  def ask(self, peer: int) -> dict[str, Any] | None:
    """How a peer stands; None if it is gone."""
    answer = self._ask(peer, _messages.Message(_Verb.STATUS))
    return None if answer is None else json.loads(answer.text)

  def push(
    self,
    peer: int,
    message: _messages.Message,
    write: Callable[[Any], None],
  ) -> gossip.Outcome:
    """Sends a payload.

    Args:
      peer: To whom.
      message: What to say.
      write: Writes the payload into the buffer that it gets.

    Returns:
      What became of it.
    """
    try:
      return gossip.Outcome(self._request(peer, message, write).fate)
    except (_wire.UntakenError, _wire.RefusedError):
      return gossip.Outcome.UNREACHABLE
    except _wire.WireError:
      return gossip.Outcome.UNKNOWN

  def close(self) -> None:
    """Hangs up on everybody."""
    self._is_closing.set()
    if self._thread.is_alive():
      self._thread.join()
    for connection in self._ready.values():
      connection.close()
    self._ready.clear()

  def _ask(
    self, peer: int, message: _messages.Message
  ) -> _messages.Message | None:
    """The answer to a question; None if there is none."""
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
    """The answer to a request; without one, the peer is lost.

    Raises:
      WireError: as a connection's request does.
      RefusedError: likewise.
    """
    with self._changed:
      connection = self._ready.get(peer)
    if connection is None:
      raise _wire.UntakenError(f'{members.name_member(peer)} is not connected.')
    begin = self._clock()
    try:
      if write is not None:
        write(connection.outgoing)
      answer = connection.request(
        message,
        has_payload=write is not None,
        deadline=self._deadline or self._get_patience(),
      )
    except (_wire.WireError, _wire.RefusedError) as error:
      self._lose(peer, connection, error)
      raise
    self._longest = max(_MEMORY * self._longest, self._clock() - begin)
    return answer

  def _get_patience(self) -> float:
    """Seconds for an answer, by what others took."""
    patience = max(_LEAST_PATIENCE, _PATIENCE_FACTOR * self._longest)
    return min(patience, self._silence)

  def _lose(
    self, peer: int, connection: _wire.Connection, error: Exception
  ) -> None:
    """Goes on without a peer, until it can be reached again."""
    connection.close()
    with self._changed:
      self._ready.pop(peer, None)
      self._lost.add(peer)
    _log.warning('%s is lost: %s', members.name_member(peer), error)

  # --- The thread that looks for others.

  def _look(self) -> None:
    try:
      while not self._is_closing.is_set():
        self._look_once()
        self._is_closing.wait(_INTERVAL)
    except BaseException as error:  # The owner raises it.
      self._error = error

  def _look_once(self) -> None:
    """Tries to reach all who are not connected."""
    self._ask_strangers()
    for peer in filter(self._is_wanted, self._registry.list_members()):
      with self._changed:
        is_known = peer in self._ready
      if not is_known and not self._is_closing.is_set():
        self._try(peer)

  def _ask_strangers(self) -> None:
    """Asks those who are known by address alone; says once who refuses."""
    try:
      self._registry.ask_strangers()
    except _wire.RefusedError as error:
      if not self._is_refused:
        _log.warning('%s', error)
      self._is_refused = True

  def _try(self, peer: int) -> None:
    """Connects, if the peer is there, and asks it for others."""
    deadline = self._deadline or _LEAST_PATIENCE
    with contextlib.ExitStack() as stack:
      try:
        connection = self._registry.connect(peer)(self._size)
        stack.callback(connection.close)
        connection.request(
          _messages.Message(_Verb.HELLO, text=self._greet()), deadline=deadline
        )
        answer = connection.request(
          _messages.Message(_Verb.STATUS), deadline=deadline
        )
        status = json.loads(answer.text)
        if status.get('node') != peer:
          return  # Somebody else has its address now.
        self._registry.hear(status['members'])
      except _wire.WireError:
        return  # Not there yet, or no longer.
      except _wire.RefusedError as error:
        if peer not in self._lost:
          _log.warning(
            '%s does not want us: %s', members.name_member(peer), error
          )
        self._lost.add(peer)
        return
      stack.pop_all()
    with self._changed:
      self._ready[peer] = connection
      if peer in self._lost:
        self._lost.discard(peer)
        _log.warning('%s is back.', members.name_member(peer))
      self._changed.notify_all()
