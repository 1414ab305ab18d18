"""How a node mixes with others, over the wire: pull, push, sums, a centre."""

import abc
from collections.abc import Callable
import logging
import threading
from typing import Any

import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd.runtime import _buffers
from jasgd.runtime import _choices
from jasgd.runtime import _host
from jasgd.runtime import _messages
from jasgd.runtime import _node_books
from jasgd.runtime import _node_weights
from jasgd.runtime import _peers

_log = logging.getLogger(__name__)
_Other = _node_weights.Other

# What others have sent and was not mixed in yet: so many times their number.
_MAX_WAITING = 4


class Mixing(abc.ABC):
  """What a node does after its steps.

  Args:
    weights: The node's.
    peers: The others.
    book: The node's trace.
    layout: Of the weights, as they travel.
    node: Its number.

  Attributes:
    num_full: Messages that their receiver had no room for.
    num_done: Messages whose receiver had made its steps, or ended.
  """

  def __init__(
    self,
    weights: _node_weights.NodeWeights,
    peers: _peers.Peers,
    book: _node_books.NodeBook,
    layout: engine.Layout,
    node: int,
  ) -> None:
    self._weights = weights
    self._peers = peers
    self._book = book
    self._layout = layout
    self._node = node
    self.num_full = 0
    self.num_done = 0

  @abc.abstractmethod
  def mix(self, round_index: int) -> None:
    """Mixes, as it is due."""

  def rest(self) -> None:  # noqa: B027 - there may be nothing left to do
    """What is left to do for a node that has made its steps."""

  def end(self) -> None:  # noqa: B027 - likewise
    """Mixes what has come, for the last time: nothing is taken after this."""

  def take(self, message: _messages.Message) -> int:
    """Takes in what somebody sent, in the host's thread."""
    del message
    raise _messages.MessageError('verb', 'This node takes no weights.')


class PullMixing(Mixing):
  """Asks peers for their weights, and takes the weighted mean."""

  def __init__(self, strategy: gossip.Pull, seed: int, **parts: Any) -> None:
    super().__init__(**parts)
    self._strategy = strategy
    self._seed = seed

  def mix(self, round_index: int) -> None:
    start = self._book.get_time()
    chosen = _choices.choose_peers(
      self._strategy,
      self._node,
      self._peers.alive,
      round_index,
      self._seed,
      self._strategy.beta,
    )
    others, lost = [], []
    for peer, weight in chosen:
      asked = self._book.get_time()
      answer = self._peers.pull(peer)
      if answer is None:
        now = self._book.get_time()
        lost.append(
          {
            'peer': peer,
            'version': -1,
            'step': self._weights.step,
            'start_time': asked,
            'end_time': now,
          }
        )
        start += now - asked  # That was no part of the mix.
      else:
        assert answer.payload is not None
        others.append(
          _Other(peer, answer.clock, answer.step, weight, answer.payload)
        )
    if lost:
      self._book.write(traces.NodeKind.LOST, lost)
    if others:
      own_weight = 1 - sum(other.weight for other in others)
      self._weights.mix(others, own_weight, start)


class PushMixing(Mixing):
  """Sends the own weights to peers, and mixes in what has come.

  A message carries its weight in the receiver's mix. Without masses that is the
  share that the sender gives away, with them the mass that goes along.
  """

  def __init__(
    self, strategy: gossip.Gossip, num_nodes: int, seed: int, **parts: Any
  ) -> None:
    super().__init__(**parts)
    self._strategy = strategy
    self._seed = seed
    self._num_nodes = num_nodes
    self._has_mass = isinstance(strategy, gossip.PushSum)
    self._pool = _buffers.BufferPool(self._layout.size)
    self._waiting: list[tuple[_Other, _buffers.Buffer]] = []
    self._is_done = self._has_ended = False
    self._lock = threading.Lock()  # Of the four above.

  def mix(self, round_index: int) -> None:
    kept, mass = 1.0, self._weights.mass
    for peer, share in _choices.choose_peers(
      self._strategy, self._node, self._peers.alive, round_index, self._seed
    ):
      # Of what it had before it sent anything, whatever the order of peers.
      if self._send(peer, share * mass if self._has_mass else share):
        kept -= share
    self._mix_waiting(max(0.0, kept))

  def rest(self) -> None:
    with self._lock:
      self._is_done = True
    self._mix_waiting(1.0)

  def end(self) -> None:
    with self._lock:
      self._has_ended = True
    self._mix_waiting(1.0)

  def take(self, message: _messages.Message) -> int:
    _check_sender(message, self._node, self._num_nodes)
    assert message.payload is not None  # The host sees to that.
    with self._lock:
      # It would keep all mass, and the steps of the slower count by theirs.
      is_slower = message.step < self._weights.step
      if self._is_done and self._has_mass and is_slower:
        return _host.DONE
      if len(self._waiting) >= _MAX_WAITING * self._num_nodes:
        return _host.FULL
      buffer = self._pool.take()
    np.copyto(buffer.array, message.payload)
    other = _Other(
      message.learner, message.clock, message.step, message.rate, buffer.array
    )
    with self._lock:
      if self._has_ended:  # What is mixed and saved does not have it.
        self._pool.give_back(buffer)
        return _host.DONE
      self._waiting.append((other, buffer))
    return _host.TAKEN

  def _send(self, peer: int, part: float) -> bool:
    """Sends weights, with a share or a mass; whether that is gone."""
    weights = self._weights
    fate = self._peers.push(
      peer,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        learner=self._node,
        clock=weights.version,
        step=weights.step,
        rate=part,
      ),
      weights.pack,
    )
    if fate == _host.UNTAKEN:
      return False
    if fate == _host.DONE:
      self.num_done += 1
      return False
    if fate == _host.FULL:  # It has more than it can mix: not now.
      if not self.num_full:
        _log.warning(
          'Node %d has no room: it was sent more than it has mixed.', peer
        )
      self.num_full += 1
      return False
    if self._has_mass:
      weights.mass = max(0.0, weights.mass - part)
    if fate is None:  # Nobody knows whether it came.
      self._book.write(
        traces.NodeKind.LOST,
        [
          {
            'peer': peer,
            'version': weights.version,
            'step': weights.step,
            'mass': part if self._has_mass else 0.0,
          }
        ],
      )
    return True

  def _mix_waiting(self, own: float) -> None:
    """Takes the weighted mean of the own weights and of all that has come."""
    with self._lock:
      waiting, self._waiting = self._waiting, []
    if not waiting:
      return
    weights, start = self._weights, self._book.get_time()
    if self._has_mass:
      own = weights.mass
      weights.mass += sum(other.weight for other, _ in waiting)
    total = own + sum(other.weight for other, _ in waiting)
    if not total:  # All of them have given their mass away: nothing changes.
      own = total = 1.0
    others = [
      other._replace(weight=other.weight / total) for other, _ in waiting
    ]
    weights.mix(others, own / total, start)
    with self._lock:
      for _, buffer in waiting:
        self._pool.give_back(buffer)


class ElasticMixing(Mixing):
  """Pulls the centre, moves towards it, and sends it what it is to move by."""

  def __init__(
    self,
    strategy: gossip.Elastic,
    patience: float,
    is_stopping: Callable[[], bool],
    **parts: Any,
  ) -> None:
    super().__init__(**parts)
    self._strategy = strategy
    self._patience = patience
    self._is_stopping = is_stopping
    self._has_waited = False  # Since the centre was there.

  def mix(self, round_index: int) -> None:
    del round_index
    start = self._book.get_time()
    answer = self._ask()
    if answer is None:
      return  # It is asked again after the next steps.
    assert answer.payload is not None
    centre = _Other(
      traces.CENTRE,
      answer.clock,
      answer.step,
      self._strategy.rate,
      answer.payload,
    )
    read_version = self._weights.version
    force = self._weights.pull_centre(
      centre, start, is_before=self._strategy.order == 'easgd'
    )
    fate = self._peers.push(
      traces.CENTRE,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        learner=self._node,
        clock=read_version,
        step=self._weights.step,
        rate=self._strategy.rate,
      ),
      lambda buffer: self._layout.pack(force, buffer),
    )
    if fate != _host.TAKEN:
      self._book.write(
        traces.NodeKind.LOST,
        [
          {
            'peer': traces.CENTRE,
            'version': read_version,
            'step': self._weights.step,
          }
        ],
      )

  def _ask(self) -> _messages.Message | None:
    """The centre's weights; waits, once, for one that is being restarted."""
    answer = self._peers.pull(traces.CENTRE)
    if answer is None and not self._has_waited:
      self._has_waited = True
      if self._peers.wait_for(1, self._patience, self._is_stopping):
        answer = self._peers.pull(traces.CENTRE)
    if answer is not None:
      self._has_waited = False
    return answer


def _check_sender(
  message: _messages.Message, node: int, num_nodes: int
) -> None:
  """Raises a MessageError if nobody can have sent this."""
  if message.learner == node or not 0 <= message.learner < num_nodes:
    raise _messages.MessageError(
      'learner',
      f'The sender must be another node than {node}, from 0 to '
      f'{num_nodes - 1}, got {message.learner}.',
    )
  if min(message.clock, message.step) < 0:
    raise _messages.MessageError(
      'clock',
      'Version and step must be at least 0, got '
      f'{message.clock} and {message.step}.',
    )
  if not 0 <= message.rate <= num_nodes:
    raise _messages.MessageError(
      'weight',
      f'The weight must be from 0 to {num_nodes}, got {message.rate}.',
    )
