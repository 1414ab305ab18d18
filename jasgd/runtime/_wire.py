"""What every wire offers: one interface, for servers and for their clients.

A client has one request under way at a time, and blocks until it is answered.
The server gets requests as events in its inbox, and answers through the channel
of the client, now or later. Wires know nothing of learners and clocks.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jasgd.runtime import _buffers
from jasgd.runtime import _messages


class WireError(ConnectionError):
  """The other side is gone, or was silent for too long."""


class UntakenError(WireError):
  """The other side has hung up, and nothing was done about the request."""


class RefusedError(ValueError):
  """The server refused a request; the text says why."""


class Channel(abc.ABC):
  """A client's connection, as the server sees it. It can be a key.

  Attributes:
    name: For people: the wire and who is at its other end.
    pid: The client's process, if it is on this host and known; else 0.
  """

  name: str
  pid: int = 0

  @abc.abstractmethod
  def send(
    self,
    message: _messages.Message,
    snapshot: _buffers.Buffer | None = None,
  ) -> None:
    """Answers. Never blocks; to a client that is gone it does nothing.

    Called by the owner's thread only.

    Args:
      message: The answer. Its payload is `snapshot`, whatever is set there.
      snapshot: Weights, which the server leaves as they are for as long as this
        client may use them: it is on lease.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Hangs up, after what was sent. Twice is no error; no event follows."""


class Event(NamedTuple):
  """What comes in: a message on a channel.

  Of a message that was no good there is only the `error`: it has been refused
  already, and is to be counted. If there is neither, the client is gone, and
  nothing more comes on this channel.
  """

  channel: Channel
  message: _messages.Message | None = None
  error: _messages.MessageError | None = None


class Listener(abc.ABC):
  """Where clients can come: puts their requests into an inbox.

  A message with a payload of another size than the listener was told is
  refused before the payload is read.

  Attributes:
    address: Where it can be found: text that `connect` understands.
  """

  address: str

  @abc.abstractmethod
  def close(self) -> None:
    """Hangs up on everybody, and ends all its threads. Twice is no error."""


class Connection(abc.ABC):
  """A client's side. It belongs to one thread at a time."""

  @property
  @abc.abstractmethod
  def outgoing(self) -> np.ndarray:
    """Bytes, aligned, to write a payload into before it is sent.

    It is the client's until it sends a request, and again once that is
    answered.
    """

  @abc.abstractmethod
  def _send(
    self, message: _messages.Message, has_payload: bool, deadline: float
  ) -> None:
    """Sends a request.

    Raises:
      WireError: if the server is gone.
    """

  @abc.abstractmethod
  def _receive(self, deadline: float) -> _messages.Message:
    """The next thing that the server says, WAIT or an answer.

    Raises:
      WireError: if it is gone, silent, or talks nonsense.
    """

  def request(
    self,
    message: _messages.Message,
    *,
    has_payload: bool = False,
    deadline: float,
    on_wait: Callable[[str], None] | None = None,
  ) -> _messages.Message:
    """Asks, and blocks until there is an answer other than WAIT.

    Args:
      message: What to ask.
      has_payload: Whether what is in `outgoing` goes with it.
      deadline: Seconds after which a server that says nothing at all, not even
        WAIT, counts as gone.
      on_wait: Called with the text of each WAIT.

    Returns:
      The answer. Its payload, read-only and aligned, stays as it is until an
      answer to the second next request brings another: weights can be used
      while newer ones are fetched.

    Raises:
      WireError: if the server is gone, silent, or talks nonsense. The
        connection is closed then.
      UntakenError: the same, if it is known that the request did not come
        to be handled, by a server that answers whatever it handles.
      RefusedError: if the answer is REFUSED.
    """
    try:
      self._send(message, has_payload, deadline)
      answer = self._receive(deadline)
      while answer.verb == _messages.Verb.WAIT:
        if on_wait is not None:
          on_wait(answer.text)
        answer = self._receive(deadline)
    except BaseException:
      # The answer may still come: no later request must take it for its own.
      self.close()
      raise
    if answer.verb == _messages.Verb.REFUSED:
      raise RefusedError(answer.text)
    return answer

  @abc.abstractmethod
  def close(self) -> None:
    """Hangs up. Twice is no error."""
