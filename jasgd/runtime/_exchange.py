"""The exchanges of a real node: a state machine's actions, over the wires.

`Exchanger` drives a `gossip.PeerNode` as the simulator does. The node's own
thread makes steps and carries out actions; the host's thread hands over what
other nodes send. A lock lets one of them call the machine at a time.
"""

from collections.abc import Callable
import itertools
import logging
import threading
from typing import Any

import numpy as np

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd.runtime import _buffers
from jasgd.runtime import _messages
from jasgd.runtime import _node_books
from jasgd.runtime import _node_weights
from jasgd.runtime import _peers

_log = logging.getLogger(__name__)
_Outcome = gossip.Outcome


class Exchanger:
  """Carries out the actions of a node's state machine.

  Args:
    machine: The state machine.
    weights: The node's weights.
    peers: Connections to other nodes.
    book: Recorder of the node's trace.
    layout: Layout of weights in messages.
    patience: Seconds to wait for a centre that is being restarted.
    is_stopping: Whether the node is to end.

  Attributes:
    num_full: Messages that their receiver had no room for.
    num_done: Messages whose receiver had made its steps, or ended.
  """

  def __init__(
    self,
    machine: gossip.PeerNode,
    weights: _node_weights.NodeWeights,
    peers: _peers.Peers,
    book: _node_books.NodeBook,
    layout: engine.Layout,
    *,
    patience: float = 0.0,
    is_stopping: Callable[[], bool] = lambda: False,
  ) -> None:
    self.num_full = 0
    self.num_done = 0
    self._machine = machine
    self._weights = weights
    self._peers = peers
    self._book = book
    self._layout = layout
    self._patience = patience
    self._is_stopping = is_stopping
    self._has_waited = False  # Since the centre was there.
    self._members: list[int] = list(machine.members)
    # Payloads by the handles that the machine knows. Those of messages are in
    # buffers of their own; an answer stays in its connection's buffer until the
    # next question to the same peer.
    self._handles = itertools.count(1)
    self._answers: dict[int, np.ndarray] = {}
    self._waiting: dict[int, _buffers.Buffer] = {}
    self._pool = _buffers.BufferPool(layout.size)
    self._takes_messages = (
      type(machine).on_message is not gossip.PeerNode.on_message
    )
    self._lock = threading.Lock()  # Of the machine, the pool and what waits.

  # --- The node's thread.

  def make_step(self) -> None:
    """Makes a step and the exchange after it."""
    self._update_members()
    actions = self._weights.make_step(self._call(self._machine.on_step))
    self._carry_out(actions)

  def rest(self) -> None:
    """Mixes what has come, after the last step."""
    self._carry_out(self._call(self._machine.on_done)())

  def end(self) -> None:
    """Mixes for the last time; nothing is taken after this."""
    self._carry_out(self._call(self._machine.on_end)())

  def join(self) -> None:
    """Takes over the weights and the step of a node that has begun."""
    self._update_members()
    actions = self._call(self._machine.on_join)()
    while actions:
      (question,) = actions
      start = self._book.get_time()
      reply = self._ask(question.peer)
      if reply.version <= 0 and reply.step <= 0:
        # A peer that has nothing is no help.
        reply = gossip.Reply(reply.peer, _Outcome.UNREACHABLE)
      actions = self._call(self._machine.on_join_reply)(reply)
      if reply.outcome == _Outcome.TAKEN:
        self._weights.step = min(self._machine.step, self._weights.num_steps)
        version, step = self._weights.version, self._weights.step
        self._book.write(
          traces.NodeKind.JOIN, [{'version': version, 'step': step}]
        )
        self._carry_out(actions, start)
        return

  def _update_members(self) -> None:
    """Tells the machine who is believed alive, if that has changed."""
    machine = self._machine
    if machine.strategy.has_centre:
      return
    members = sorted([machine.node, *self._peers.alive])
    if members != self._members:
      self._members = members
      self._call(machine.on_alive)(members)

  def _carry_out(
    self, actions: gossip.Actions, start: float | None = None
  ) -> None:
    """Carries out actions, and those with which replies are answered."""
    start = self._book.get_time() if start is None else start
    while actions:
      replies: list[gossip.Reply] = []
      lost: list[dict[str, Any]] = []
      for action in actions:
        if isinstance(action, gossip.Ask):
          asked = self._book.get_time()
          reply = self._ask(action.peer)
          replies.append(reply)
          if reply.outcome != _Outcome.TAKEN and action.peer >= 0:
            lost.append(self._describe_refusal(action.peer, asked))
            start += self._book.get_time() - asked  # That was no part of a mix.
        elif isinstance(action, gossip.Send):
          self._send(action)
        elif isinstance(action, gossip.MixWaiting):
          mix = self._call(self._machine.mix_waiting)()
          if mix is not None:
            self._mix(mix, self._book.get_time())
        elif isinstance(action, gossip.Mix):
          self._mix(action, start)
        elif isinstance(action, gossip.Attract):
          self._attract(action, start)
        else:
          raise ValueError(
            f'Real processes cannot carry out {action!r}: they ask, send, mix '
            'and attract.'
          )
      if lost:
        self._book.write(traces.NodeKind.LOST, lost)
      if not replies:
        return
      actions = self._call(self._machine.on_replies)(replies)

  def _ask(self, peer: int) -> gossip.Reply:
    """Asks a peer, or the centre, for its weights."""
    answer = self._peers.pull(peer)
    if answer is None and peer == gossip.CENTRE and not self._has_waited:
      # It may be restarting. It is waited for once, not after every step.
      self._has_waited = True
      if self._peers.wait_for(1, self._patience, self._is_stopping):
        answer = self._peers.pull(peer)
    if answer is None:
      return gossip.Reply(peer, _Outcome.UNREACHABLE)
    if peer == gossip.CENTRE:
      self._has_waited = False
    assert answer.payload is not None
    handle = next(self._handles)
    self._answers[handle] = answer.payload
    return gossip.Reply(peer, _Outcome.TAKEN, answer.clock, answer.step, handle)

  def _describe_refusal(self, peer: int, asked: float) -> dict[str, Any]:
    """The record of a question that was not answered."""
    return {
      'peer': peer,
      'version': -1,
      'step': self._weights.step,
      'start_time': asked,
      'end_time': self._book.get_time(),
    }

  def _send(self, send: gossip.Send) -> None:
    """Sends the node's weights, and waits until they are taken."""
    weights = self._weights
    outcome = self._peers.push(
      send.peer,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        learner=self._machine.node,
        clock=weights.version,
        step=weights.step,
        rate=send.share,
      ),
      weights.pack,
    )
    self._call(self._machine.on_outcome)(send, outcome)
    if outcome == _Outcome.DONE:
      self.num_done += 1
    elif outcome == _Outcome.FULL:
      if not self.num_full:
        _log.warning(
          'Node %d has no room: it was sent more than it has mixed.', send.peer
        )
      self.num_full += 1
    elif outcome == _Outcome.UNKNOWN:
      has_mass = self._machine.strategy.has_mass
      row = {'mass': send.share if has_mass else 0.0}
      self._note_lost(send.peer, weights.version, row)

  def _mix(self, mix: gossip.Mix, start: float) -> None:
    """Takes a weighted mean with other nodes' weights."""
    others = []
    for source, weight in mix.sources:
      if source.handle in self._answers:
        payload = self._answers[source.handle]
      else:
        payload = self._waiting[source.handle].array
      others.append(
        _node_weights.Other(
          source[0], source.version, source.step, weight, payload
        )
      )
    self._weights.mix(others, mix.own_weight, start)
    self._answers.clear()
    with self._lock:
      for source, _ in mix.sources:
        buffer = self._waiting.pop(source.handle, None)
        if buffer is not None:
          self._pool.give_back(buffer)

  def _attract(self, action: gossip.Attract, start: float) -> None:
    """Moves towards the centre, and sends it the force."""
    reply = action.centre
    centre = _node_weights.Other(
      traces.CENTRE,
      reply.version,
      reply.step,
      action.rate,
      self._answers[reply.handle],
    )
    read_version = self._weights.version
    force = self._weights.pull_centre(
      centre, start, is_before=action.keeps_gradient
    )
    self._answers.clear()
    outcome = self._peers.push(
      traces.CENTRE,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        learner=self._machine.node,
        clock=read_version,
        step=self._weights.step,
        rate=action.rate,
      ),
      lambda buffer: self._layout.pack(force, buffer),
    )
    if outcome != _Outcome.TAKEN:
      self._note_lost(traces.CENTRE, read_version, {})

  def _note_lost(self, peer: int, version: int, row: dict[str, Any]) -> None:
    """Records weights, or a force, that may not have been taken."""
    row |= {'peer': peer, 'version': version, 'step': self._weights.step}
    self._book.write(traces.NodeKind.LOST, [row])

  # --- The host's thread.

  def take(self, message: _messages.Message) -> int:
    """Hands over what another node has sent.

    Args:
      message: The message; its payload is copied.

    Returns:
      An `Outcome`.

    Raises:
      MessageError: if no node can have sent this.
    """
    if not self._takes_messages:
      raise _messages.MessageError('verb', 'This node takes no weights.')
    _check_sender(message, self._machine.node, self._machine.num_nodes)
    assert message.payload is not None  # The host sees to that.
    with self._lock:
      buffer = self._pool.take()
    # Copied before the machine knows of it: it may be mixed right after.
    np.copyto(buffer.array, message.payload)
    handle = next(self._handles)
    header = gossip.Message(
      message.learner, message.clock, message.step, message.rate, handle
    )
    with self._lock:
      outcome = self._machine.on_message(header)
      if outcome == _Outcome.TAKEN:
        self._waiting[handle] = buffer
      else:
        self._pool.give_back(buffer)
    return outcome

  def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the machine that is called under the lock."""

    def call(*arguments: Any) -> Any:
      with self._lock:
        return method(*arguments)

    return call


def _check_sender(
  message: _messages.Message, node: int, num_nodes: int
) -> None:
  """Raises a MessageError if no node can have sent this."""
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
