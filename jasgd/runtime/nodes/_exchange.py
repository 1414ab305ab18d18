"""The exchanges of a real node: a state machine's actions, over the wires.

`Exchanger` drives a `gossip.PeerNode` as the simulator does. The node's own
thread makes steps and carries out actions; the snapshot server's thread hands
over the messages of other nodes. A lock lets one thread at a time call the
machine.
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
from jasgd.runtime import _recorder
from jasgd.runtime.nodes import _connections
from jasgd.runtime.nodes import _weights
from jasgd.runtime.wires import _buffers
from jasgd.runtime.wires import _messages

_log = logging.getLogger(__name__)
_Outcome = gossip.Outcome


class Exchanger:
  """Carries out the actions of a node's state machine.

  Args:
    machine: The state machine.
    weights: The node's weights.
    peers: Connections to other nodes.
    recorder: Recorder of the node's trace.
    layout: Layout of weights in messages.
    patience: Seconds to wait for a centre that is being restarted.
    is_stopping: Function that tells whether the node must end.

  Attributes:
    num_full: Number of messages for which their receiver had no room.
    num_done: Number of messages whose receiver had made its steps, or ended.
  """

  def __init__(
    self,
    machine: gossip.PeerNode,
    weights: _weights.NodeWeights,
    peers: _connections.PeerConnections,
    recorder: _recorder.Recorder,
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
    self._recorder = recorder
    self._layout = layout
    self._patience = patience
    self._is_stopping = is_stopping
    # Whether it has waited for the centre since the centre's last answer.
    self._has_waited = False
    self._members: list[int] = list(machine.members)
    # Payloads by the handles that the machine knows. A message has a buffer of
    # its own; an answer stays in its connection's buffer until the next
    # question to the same peer.
    self._handles = itertools.count(1)
    self._answers: dict[int, np.ndarray] = {}
    self._waiting: dict[int, _buffers.Buffer] = {}
    self._pool = _buffers.BufferPool(layout.size)
    self._takes_messages = machine.takes_messages
    # Guards the machine, the pool and `_waiting`.
    self._lock = threading.Lock()

  # --- The node's thread.

  def make_step(self) -> None:
    """Makes a step and the exchange after it."""
    self._update_members()
    actions = self._weights.make_step(self._call(self._machine.on_step))
    self._carry_out(actions)

  def mix_waiting(self) -> None:
    """Mixes messages that have come since the last step of the run."""
    self._carry_out(self._call(self._machine.on_done)())

  def finish(self) -> None:
    """Mixes for the last time; the node takes no messages after this."""
    self._carry_out(self._call(self._machine.on_end)())

  def join(self) -> None:
    """Takes over the weights and the step of a node that has begun."""
    self._update_members()
    actions = self._call(self._machine.on_join)()
    start = self._recorder.get_time()
    while actions and isinstance(actions[0], gossip.Ask):
      start = self._recorder.get_time()
      reply = self._ask(actions[0].peer)
      actions = self._call(self._machine.on_join_reply)(reply)
    if not actions:
      return  # No peer could help: the node keeps its own weights.
    self._weights.step = min(self._machine.step, self._weights.num_steps)
    version, step = self._weights.version, self._weights.step
    self._recorder.write(traces.Kind.JOIN, {'version': version, 'step': step})
    self._carry_out(actions, start)
    self._weights.start_optimizer()

  def _update_members(self) -> None:
    """Gives the machine the nodes believed alive, if they have changed."""
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
    """Carries out actions, and those that the machine gives for replies."""
    start = self._recorder.get_time() if start is None else start
    while actions:
      replies: list[gossip.Reply] = []
      lost: list[dict[str, Any]] = []
      # Questions last: their answers stay in the buffers of connections, and a
      # mix or a message after them would make these answers invalid.
      for action in sorted(actions, key=_is_question):
        if isinstance(action, gossip.Ask):
          asked = self._recorder.get_time()
          reply = self._ask(action.peer)
          replies.append(reply)
          if reply.outcome != _Outcome.TAKEN and action.peer >= 0:
            lost.append(self._describe_refusal(action.peer, asked))
            # The time of a lost question is not part of the mix.
            start += self._recorder.get_time() - asked
        elif isinstance(action, gossip.Send):
          self._send(action)
        elif isinstance(action, gossip.MixWaiting):
          mix = self._call(self._machine.mix_waiting)()
          if mix is not None:
            self._mix(mix, self._recorder.get_time())
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
        self._recorder.write(traces.Kind.LOST, *lost)
      if not replies:
        return
      actions = self._call(self._machine.on_replies)(replies)

  def _ask(self, peer: int) -> gossip.Reply:
    """Asks a peer, or the centre, for its weights."""
    answer = self._peers.pull(peer)
    if answer is None and peer == gossip.CENTRE and not self._has_waited:
      # The centre may be restarting. The node waits for it once, not after
      # every step.
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
    return gossip.Reply(
      peer, _Outcome.TAKEN, answer.version, answer.step, handle
    )

  def _describe_refusal(self, peer: int, asked: float) -> dict[str, Any]:
    """The record of a question that was not answered."""
    return {
      'source': peer,
      'read_version': -1,
      'step': self._weights.step,
      'start_time': asked,
      'end_time': self._recorder.get_time(),
    }

  def _send(self, send: gossip.Send) -> None:
    """Sends the node's weights, and waits until they are taken."""
    weights = self._weights
    outcome = self._peers.push(
      send.peer,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        worker=self._machine.node,
        version=weights.version,
        step=weights.step,
        share=send.share,
        mass=send.mass,
      ),
      weights.pack,
    )
    self._call(self._machine.on_outcome)(send, outcome)
    if outcome == _Outcome.DONE:
      self.num_done += 1
    elif outcome == _Outcome.FULL:
      if not self.num_full:
        _log.warning(
          'Node %d has no room: messages come faster than it mixes them.',
          send.peer,
        )
      self.num_full += 1
    elif outcome == _Outcome.UNKNOWN:
      self._record_lost(send.peer, weights.version, {'mass': send.mass})

  def _mix(self, mix: gossip.Mix, start: float) -> None:
    """Takes a weighted mean with other nodes' weights."""
    sources = []
    for source, weight in mix.sources:
      if source.handle in self._answers:
        payload = self._answers[source.handle]
      else:
        payload = self._waiting[source.handle].array
      sources.append(
        _weights.Source(source[0], source.version, source.step, weight, payload)
      )
    self._weights.mix(sources, mix.own_weight, start)
    self._answers.clear()
    with self._lock:
      for source, _ in mix.sources:
        buffer = self._waiting.pop(source.handle, None)
        if buffer is not None:
          self._pool.give_back(buffer)

  def _attract(self, action: gossip.Attract, start: float) -> None:
    """Moves towards the centre, and sends it the elastic force."""
    reply = action.centre
    centre = _weights.Source(
      traces.SERVER,
      reply.version,
      reply.step,
      action.rate,
      self._answers[reply.handle],
    )
    read_version = self._weights.version
    force = self._weights.pull_centre(
      centre, start, keeps_gradient=action.keeps_gradient
    )
    self._answers.clear()
    outcome = self._peers.push(
      traces.SERVER,
      _messages.Message(
        _messages.Verb.EXCHANGE,
        worker=self._machine.node,
        version=read_version,
        step=self._weights.step,
        share=1.0,  # The centre adds the force as it is.
        elastic_rate=action.rate,
        read_version=reply.version,
      ),
      lambda buffer: self._layout.pack(force, buffer),
    )
    if outcome != _Outcome.TAKEN:
      self._record_lost(traces.SERVER, read_version, {})

  def _record_lost(self, peer: int, version: int, row: dict[str, Any]) -> None:
    """Records weights, or a force, that may not have been taken."""
    step = self._weights.step
    row |= {'source': peer, 'read_version': version, 'step': step}
    self._recorder.write(traces.Kind.LOST, row)

  # --- The snapshot server's thread.

  def receive(self, message: _messages.Message) -> int:
    """Hands weights of another node to the machine.

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
    assert message.payload is not None  # The snapshot server checks this.
    with self._lock:
      buffer = self._pool.take()
    # Copied before the machine knows of it: the node may mix it at once.
    np.copyto(buffer.array, message.payload)
    handle = next(self._handles)
    header = gossip.Message(
      message.worker,
      message.version,
      message.step,
      message.share,
      handle,
      message.mass,
    )
    with self._lock:
      outcome = self._machine.on_message(header)
      if outcome == _Outcome.TAKEN:
        self._waiting[handle] = buffer
      else:
        self._pool.give_back(buffer)
    return outcome

  def _call(self, method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method of the machine under the lock."""

    def call(*arguments: Any) -> Any:
      with self._lock:
        return method(*arguments)

    return call


def _is_question(action: Any) -> bool:
  return isinstance(action, gossip.Ask)


def _check_sender(
  message: _messages.Message, node: int, num_nodes: int
) -> None:
  """Raises a MessageError if no node can have sent this."""
  if message.worker == node or not 0 <= message.worker < num_nodes:
    raise _messages.MessageError(
      'worker',
      f'The sender must be another node than {node}, from 0 to '
      f'{num_nodes - 1}, got {message.worker}.',
    )
  if min(message.version, message.step) < 0:
    raise _messages.MessageError(
      'version',
      'Version and step must be at least 0, got '
      f'{message.version} and {message.step}.',
    )
  for name in ('share', 'mass'):
    if not 0 <= getattr(message, name) <= num_nodes:
      raise _messages.MessageError(
        name,
        f'The {name} must be from 0 to {num_nodes}, got '
        f'{getattr(message, name)}.',
      )
