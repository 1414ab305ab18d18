"""The event loop of nodes: peer strategies, driven through virtual time.

Each node has the state machine that a real process would have (`PeerNode`). The
loop makes steps, carries out the machines' actions, delivers messages, and
makes nodes die, return and go back to checkpoints.
"""

from collections.abc import Callable, Iterable, Sequence
import heapq
from typing import Any, NamedTuple

import numpy as np

from jasgd import gossip
from jasgd import traces
from jasgd.simulation import _barrier
from jasgd.simulation import _centre
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _rows
from jasgd.simulation import _times

# Kinds of events, in the order in which they are handled at equal times and
# nodes.
(
  BACK,  # A node, or an all-reduce, is up again, without weights yet.
  GONE,  # A node dies.
  JOIN_ASKED,  # A joiner's question has arrived.
  JOIN_REPLIED,  # The answer to a joiner has arrived.
  DELIVERED,  # A message is at its receiver.
  STEPPED,  # A gradient is computed.
  ASKED,  # A node's questions have arrived, at peers or at the centre.
  REPLIED,  # The answers to a node have arrived.
) = range(8)
# `_centre` and `_barrier` define the kinds 8 to 10.
NOTICED = 11  # A node notices that the receiver of its message is dead.

# Looked up once, not for every exchange.
_pack = _rows.pack
_TAKEN = gossip.Outcome.TAKEN
_Ask, _JoinMean, _Send, _Mix, _MixWaiting, _Reply = (
  gossip.Ask,
  gossip.JoinMean,
  gossip.Send,
  gossip.Mix,
  gossip.MixWaiting,
  gossip.Reply,
)


class Setup(NamedTuple):
  """The arguments of `simulate`, checked."""

  strategy: Any  # A `gossip.PeerStrategy`.
  num_nodes: int
  num_steps: int
  compute: _times.ComputeTime
  network: _network.Network
  failures: Sequence[_failures.Failure]
  seed: int
  detection_seconds: float
  checkpoint_seconds: float
  restart_seconds: float


class _Checkpoint(NamedTuple):
  """State to which a node goes back when it restarts."""

  version: int
  step: int
  machine: dict[str, Any]  # Result of its `save`.


class PeerLoop:
  """A simulation under way.

  An event is (time, node, kind, data). If a node's death makes the event void,
  data begins with the node's life: the number of its deaths by then.
  """

  def __init__(self, setup: Setup) -> None:
    """Starts all nodes at time 0."""
    num_nodes, network = setup.num_nodes, setup.network
    self._setup = setup
    self._num_steps = setup.num_steps
    self._checkpoint_seconds = setup.checkpoint_seconds
    self._latency = network.latency
    # Peers have links of their own: that of a server does not matter.
    self._transfer = network.bytes_per_push / network.bandwidth
    self._is_instant = not self._latency and not self._transfer
    self._durations = setup.compute.table(
      setup.seed, 0, setup.num_steps, num_nodes
    ).tolist()
    make_node = setup.strategy.make_node
    self._machines = [
      make_node(node, num_nodes, setup.seed) for node in range(num_nodes)
    ]
    self._has_failures = bool(setup.failures)
    self._has_mass = setup.strategy.has_mass
    self._is_collective = setup.strategy.is_collective
    self._step = [0] * num_nodes
    self._version = [0] * num_nodes
    self._read_version = [0] * num_nodes
    self._num_mixes = [0] * num_nodes
    self._recorded_mass = [machine.mass for machine in self._machines]
    self._begun = [0.0] * num_nodes  # Start of its current step or exchange.
    self._link_free = [0.0] * num_nodes  # Time at which its link is idle.
    self._life = [0] * num_nodes
    self._members = _failures.Members(self._machines)
    self._is_up = self._members.is_up
    self._is_resting = [False] * num_nodes  # Whether it has made all its steps.
    self._until = [0.0] * num_nodes  # Time of its return, if it is down; 0: up.
    self._saved = [
      _Checkpoint(0, 0, machine.save()) for machine in self._machines
    ]
    self._saved_at = [0.0] * num_nodes
    self._rows = bytearray()  # Packed rows: results of `_rows.pack`.
    self._centre: _centre.Centre | None = None
    if setup.strategy.has_centre:
      protocol = setup.strategy.make_centre()
      protocol.start(num_nodes)
      self._centre = _centre.Centre(
        protocol, network, setup.seed, self._schedule, self._rows
      )
    self._barrier = _barrier.Barrier(num_nodes, network, self._schedule)
    self._heap: list[tuple[float, int, int, Any]] = [
      (time, node, GONE, until) for time, node, until in setup.failures
    ]
    heapq.heapify(self._heap)
    self._handlers: dict[int, Callable[..., None]] = {
      BACK: self._return,
      GONE: self._die,
      JOIN_ASKED: self._answer_joiner,
      JOIN_REPLIED: self._finish_join,
      DELIVERED: self._deliver,
      STEPPED: self._finish_step,
      ASKED: self._answer,
      REPLIED: self._finish_asking,
      _barrier.AVERAGED: self._finish_mean,
      NOTICED: self._notice,
    }
    if self._centre is not None:
      self._handlers[_centre.AT_CENTRE] = self._centre.receive
      self._handlers[_centre.MOVED] = self._centre.finish_move

  @property
  def num_missing(self) -> int:
    """Number of steps that were not made because their nodes died for good.

    Steps that a joiner skips, since it takes over a peer's step, do not count.
    """
    return sum(self._num_steps - step for step in self._step)

  def run(self) -> np.ndarray:
    """Handles events until no node has a step left that it can make."""
    self._begin_all(0.0)
    heap, pop, handlers = self._heap, heapq.heappop, self._handlers
    while heap:
      time, node, kind, data = pop(heap)
      if kind <= GONE and self._is_over():
        break
      handlers[kind](node, time, data)
    self._end(_rows.get_last_time(self._rows))
    return _rows.make_records(self._rows)

  def _begin_all(self, time: float) -> None:
    """All nodes begin a step; those of an all-reduce agree on a number."""
    if self._is_collective:
      for machine in self._machines:
        machine.on_regroup(self._barrier.next_number)
    for node in range(self._setup.num_nodes):
      self._begin_step(node, time)

  def _end(self, time: float) -> None:
    """Ends each node that is up, and records its end."""
    for node, machine in enumerate(self._machines):
      if self._is_up[node]:
        self._is_resting[node] = True
        self._carry_out(node, time, machine.on_end())
        mass = machine.held_mass
        self._note(traces.Kind.END, node, mass, time, time)

  def _is_over(self) -> bool:
    """Whether only failures are left, and no node comes back to work."""
    is_settled = [
      step == self._num_steps or until == np.inf
      for step, until in zip(self._step, self._until, strict=True)
    ]
    # An all-reduce never goes on without a member that is gone for good.
    is_stuck = self._is_collective and np.inf in self._until
    return (is_stuck or all(is_settled)) and all(
      kind <= GONE for _, _, kind, _ in self._heap
    )

  # --- Steps.

  def _begin_step(self, node: int, time: float) -> None:
    step = self._step[node]
    if step == self._num_steps:
      self._is_resting[node] = True
      self._carry_out(node, time, self._machines[node].on_done())
      return
    self._read_version[node] = self._version[node]
    self._begun[node] = time
    end = time + self._durations[step][node]
    heapq.heappush(self._heap, (end, node, STEPPED, self._life[node]))

  def _finish_step(self, node: int, time: float, life: int) -> None:
    if life != self._life[node]:
      return  # It died: the gradient is lost.
    step = self._step[node] = self._step[node] + 1
    version = self._version[node] = self._version[node] + 1
    machine = self._machines[node]
    # Before the record is made: it has the mass that is left after sending.
    actions = machine.on_step(step)
    mass = machine.mass
    if self._has_mass:
      self._recorded_mass[node] = mass
    self._rows += _pack(
      1,  # Kind.STEP, as a plain number, which is packed faster.
      node,
      0,
      0,
      step,
      version,
      self._read_version[node],
      0,
      0.0,
      0.0,
      mass,
      self._begun[node],
      time,
    )
    if not actions:
      self._finish_exchange(node, time)
      return
    self._begun[node] = time
    self._carry_out(node, time, actions)

  # --- Actions.

  def _carry_out(self, node: int, time: float, actions: gossip.Actions) -> None:
    """Carries out a machine's actions; the node steps on, unless it waits."""
    questions = None
    is_waiting = self._is_resting[node]
    for action in actions:
      if isinstance(action, _Ask):
        if questions is None:
          questions = [action.peer]
        else:
          questions.append(action.peer)
      elif isinstance(action, _Mix):
        self._mix(node, time, self._begun[node], action)
      elif isinstance(action, _JoinMean):
        self._barrier.arrive(node, time, action.number)
        is_waiting = True
      elif isinstance(action, _Send):
        self._send(node, time, action)
      elif isinstance(action, _MixWaiting):
        mix = self._machines[node].mix_waiting()
        if mix is not None:
          self._mix(node, time, time, mix)
      elif isinstance(action, gossip.Average):
        self._average_pair(node, time, action)
      else:
        assert isinstance(action, gossip.Attract), action
        self._attract(node, time, action)
        is_waiting = True  # It has begun its next step.
    if questions is not None:
      data = (self._life[node], questions)
      heapq.heappush(self._heap, (time + self._latency, node, ASKED, data))
    elif not is_waiting:
      self._finish_exchange(node, time)

  def _finish_exchange(self, node: int, time: float) -> None:
    """Saves a checkpoint if one is due, and goes on."""
    if time - self._saved_at[node] >= self._checkpoint_seconds:
      self._save(node, time)
    self._begin_step(node, time)

  def _answer(
    self, node: int, time: float, data: tuple[int, list[int]]
  ) -> None:
    """Answers the questions of a node, which have arrived."""
    life, peers = data
    if peers == [gossip.CENTRE]:
      assert self._centre is not None
      self._centre.ask(node, time, life, REPLIED)
      return
    replies, num_refused = [], 0
    for peer in peers:
      if self._is_up[peer]:
        version, step = self._version[peer], self._step[peer]
        replies.append(_Reply(peer, _TAKEN, version, step))
      else:
        replies.append(_Reply(peer, gossip.Outcome.UNREACHABLE))
        num_refused += 1
    arrival = time + self._latency
    arrival += (len(replies) - num_refused) * self._transfer
    if num_refused:
      arrival += self._setup.detection_seconds
    heapq.heappush(self._heap, (arrival, node, REPLIED, (life, replies)))

  def _finish_asking(
    self, node: int, time: float, data: tuple[int, list[gossip.Reply]]
  ) -> None:
    """Gives a node the replies to its questions, also those of dead peers."""
    life, replies = data
    if life != self._life[node]:
      for reply in replies:
        if reply.outcome == _TAKEN:
          self._rows += _rows.pack_lost(reply.peer, node, reply, time, time)
      return
    if self._has_failures:
      refusals = [reply.peer for reply in replies if reply.outcome]
      # Without an answer there is no mix to record the waiting time.
      has_answers = len(refusals) < len(replies)
      start = time if has_answers else self._begun[node]
      self._note_refusals(node, time, start, refusals)
    self._carry_out(node, time, self._machines[node].on_replies(replies))

  def _note_refusals(
    self, node: int, time: float, start: float, peers: Iterable[int]
  ) -> None:
    """Records questions to dead peers; the first has the waiting time."""
    for peer in peers:
      question = _Reply(node, _TAKEN, -1, self._step[node])
      self._rows += _rows.pack_lost(node, peer, question, start, time)
      self._members.find_dead(node, peer)
      start = time

  def _average_pair(
    self, node: int, time: float, action: gossip.Average
  ) -> None:
    """A node and its peer take their mean, unless the peer has died."""
    peer, weight = action.peer.peer, action.weight
    if not self._is_up[peer]:
      self._note_refusals(node, time, self._begun[node], [peer])
      return
    # Both versions are read first: each mixes the other's old weights.
    own = _Reply(node, _TAKEN, self._version[node], self._step[node])
    other = _Reply(peer, _TAKEN, self._version[peer], self._step[peer])
    begun = self._begun[node]
    self._mix(node, time, begun, _Mix(1 - weight, ((other, weight),)))
    self._mix(peer, time, time, _Mix(1 - weight, ((own, weight),)))

  def _attract(self, node: int, time: float, action: gossip.Attract) -> None:
    """A node moves towards the centre, sends the force, and steps on."""
    assert self._centre is not None
    before, rate, centre = self._version[node], action.rate, action.centre
    mix = _Mix(1 - rate, ((centre, rate),))
    self._mix(node, time, self._begun[node], mix)
    force = _centre.Force(before, self._step[node], rate, centre.version)
    self._centre.send_force(node, time, force)
    self._finish_exchange(node, time)
    if action.keeps_gradient:
      self._read_version[node] = before

  # --- Messages.

  def _send(self, node: int, time: float, send: gossip.Send) -> None:
    """Sends a node's weights over its link, one message after another."""
    version, step = self._version[node], self._step[node]
    message = gossip.Message(node, version, step, send.share, mass=send.mass)
    if self._is_instant:
      self._deliver(send.peer, time, (self._life[node], send, message, True))
      return
    sent = max(time, self._link_free[node]) + self._transfer
    self._link_free[node] = sent
    data = (self._life[node], send, message, self._is_up[send.peer])
    event = (sent + self._latency, send.peer, DELIVERED, data)
    heapq.heappush(self._heap, event)

  def _deliver(
    self,
    node: int,
    time: float,
    data: tuple[int, gossip.Send, gossip.Message, bool],
  ) -> None:
    """A message arrives at a node, which may have died."""
    life, send, message, was_up = data
    sender = message.sender
    if self._is_up[node]:
      outcome = self._machines[node].on_message(message)
    elif was_up and not self._is_instant:
      outcome = gossip.Outcome.UNKNOWN
    else:  # The sender could not connect: nothing was sent.
      outcome = gossip.Outcome.UNREACHABLE
    is_sender_alive = life == self._life[sender]
    # A message that was refused goes back to its sender, if that is alive.
    if outcome is not _TAKEN and (
      outcome is gossip.Outcome.UNKNOWN or not is_sender_alive
    ):
      self._rows += _rows.pack_lost(
        sender, node, message, time, time, message.mass
      )
    if is_sender_alive:
      if self._is_up[node]:
        self._machines[sender].on_outcome(send, outcome)
      elif self._setup.detection_seconds:
        noticed = time + self._setup.detection_seconds
        self._schedule(noticed, sender, NOTICED, (life, send, message, outcome))
      else:
        self._notice(sender, time, (life, send, message, outcome))
    if self._is_resting[node] and self._is_up[node]:
      self._carry_out(node, time, self._machines[node].on_done())

  def _notice(
    self,
    sender: int,
    time: float,
    data: tuple[int, gossip.Send, gossip.Message, gossip.Outcome],
  ) -> None:
    """A sender notices that the receiver was dead when its message arrived."""
    life, send, message, outcome = data
    if life == self._life[sender]:
      self._members.find_dead(sender, send.peer)
      self._machines[sender].on_outcome(send, outcome)
    # The sender, to which the message would have come back, has died, too.
    elif outcome is not gossip.Outcome.UNKNOWN:
      self._rows += _rows.pack_lost(
        sender, send.peer, message, time, time, message.mass
      )

  def _finish_mean(self, _: int, time: float, attempt: int) -> None:
    """All nodes have the mean, unless one of them died meanwhile."""
    number = self._barrier.finish(attempt)
    if number is None:
      return
    nodes = range(self._setup.num_nodes)
    share = 1 / len(nodes)
    for node in nodes:
      version = self._version[node] = self._version[node] + 1
      self._rows += _pack(
        5,  # Kind.MEAN
        node,
        0,
        number + 1,
        self._step[node],
        version,
        0,
        0,
        share,
        share,
        0.0,
        self._begun[node],
        time,
      )
    # All save after the same mean, so that they can return to it together.
    is_due = time - self._saved_at[0] >= self._checkpoint_seconds
    for node in nodes:
      version, step = self._version[node], self._step[node]
      reply = _Reply(node, _TAKEN, version, step)
      self._machines[node].on_replies([reply])
      if is_due:
        self._save(node, time)
      self._begin_step(node, time)

  # --- Deaths and returns.

  def _die(self, node: int, time: float, until: float) -> None:
    """A node dies, and its weights and its mass with it."""
    self._life[node] += 1
    self._until[node] = until
    self._barrier.fail(node)
    if self._centre is not None:
      self._centre.leave(node)
    if until < np.inf:
      up = until + self._setup.restart_seconds
      self._schedule(up, node, BACK, self._life[node])
    if not self._is_up[node]:
      return  # It had no weights yet: no other node knew that it was back.
    self._is_up[node] = self._is_resting[node] = False
    mass = self._machines[node].held_mass
    self._note(traces.Kind.LEAVE, node, mass, time, time)

  def _return(self, node: int, time: float, life: int) -> None:
    """A node is up again: it loads its checkpoint, or asks for weights."""
    if life != self._life[node]:
      return
    self._until[node] = 0.0
    self._begun[node] = time
    if self._is_collective:
      if not any(self._until):  # Otherwise it waits for the others.
        self._restart_all(time)
      return
    machine = self._resume_machine(node)
    if self._saved[node].version:
      self._restart(node, time)
      self._begin_step(node, time)
    else:
      self._ask_to_join(node, time, machine.on_join())

  def _restart_all(self, time: float) -> None:
    """All nodes of an all-reduce go back to the last mean that all have saved.

    Whatever they have computed since is void.
    """
    self._barrier.restart()
    for node in range(self._setup.num_nodes):
      self._life[node] += 1
      self._begun[node] = time
      self._resume_machine(node)
      self._restart(node, time)
    self._begin_all(time)

  def _restart(self, node: int, time: float) -> None:
    """Gives a node its saved weights again, as a new version."""
    machine, saved = self._machines[node], self._saved[node]
    self._step[node] = saved.step
    self._version[node] += 1
    self._rows += _pack(
      *(traces.Kind.RESTART, node, 0, 0, saved.step),
      *(self._version[node], saved.version, 0, 0.0, 0.0),
      *(machine.mass, self._begun[node], time),
    )
    self._enter(node)

  def _resume_machine(self, node: int) -> gossip.PeerNode:
    """The machine of a new process, which knows the nodes that are up.

    It goes on from the node's checkpoint; without one, from the start.
    """
    setup, saved = self._setup, self._saved[node]
    machine = setup.strategy.make_node(node, setup.num_nodes, setup.seed)
    self._machines[node] = machine
    machine.restore(saved.machine)
    machine.on_restart(saved.step, self._recorded_mass[node])
    if not self._is_collective:  # All nodes of an all-reduce take part.
      self._members.introduce(node)
    return machine

  def _ask_to_join(
    self, node: int, time: float, actions: gossip.Actions
  ) -> None:
    """A joiner asks for weights; if no node can help, it starts anew."""
    if not actions:
      self._restart(node, time)
      self._begin_step(node, time)
      return
    (question,) = actions
    assert isinstance(question, gossip.Ask)
    data = (self._life[node], question.peer)
    self._schedule(time + self._latency, node, JOIN_ASKED, data)

  def _answer_joiner(
    self, node: int, time: float, data: tuple[int, int]
  ) -> None:
    """The question of a joiner has arrived."""
    life, peer = data
    if life != self._life[node]:
      return
    if peer == gossip.CENTRE:
      assert self._centre is not None
      self._centre.ask(node, time, life, JOIN_REPLIED)
      return
    reply = _Reply(peer, gossip.Outcome.UNREACHABLE)
    arrival = time + self._latency
    if self._is_up[peer]:
      reply = _Reply(peer, _TAKEN, self._version[peer], self._step[peer])
      arrival += self._transfer
    else:
      arrival += self._setup.detection_seconds
    self._schedule(arrival, node, JOIN_REPLIED, (life, [reply]))

  def _finish_join(
    self, node: int, time: float, data: tuple[int, list[gossip.Reply]]
  ) -> None:
    """A joiner has an answer, if it is still alive, or asks the next peer."""
    life, (reply,) = data
    if life != self._life[node]:
      if reply.outcome == _TAKEN:
        self._rows += _rows.pack_lost(reply.peer, node, reply, time, time)
      return
    machine = self._machines[node]
    if reply.outcome != _TAKEN:
      self._members.find_dead(node, reply.peer)
    actions = machine.on_join_reply(reply)
    if not actions or isinstance(actions[0], _Ask):
      self._ask_to_join(node, time, actions)
      return
    self._enter(node)
    self._recorded_mass[node] = machine.mass
    self._step[node] = min(machine.step, self._num_steps)
    self._note(traces.Kind.JOIN, node, 0.0, self._begun[node], time)
    self._carry_out(node, time, actions)

  def _enter(self, node: int) -> None:
    """A node is up and has weights."""
    self._is_resting[node] = False
    self._members.enter(node)

  def _save(self, node: int, time: float) -> None:
    """Saves a checkpoint."""
    self._saved_at[node] = time
    machine = self._machines[node].save()
    version, step = self._version[node], self._step[node]
    self._saved[node] = _Checkpoint(version, step, machine)

  # --- Records.

  def _mix(self, node: int, time: float, start: float, mix: gossip.Mix) -> None:
    """Changes a node's weights by a mix with any number of others."""
    version = self._version[node] = self._version[node] + 1
    number = self._num_mixes[node] = self._num_mixes[node] + 1
    mass = 0.0
    if self._has_mass:
      mass = self._recorded_mass[node] = self._machines[node].mass
    step, own_weight = self._step[node], mix.own_weight
    for source, weight in mix.sources:
      self._rows += _pack(
        3,  # Kind.MIX
        node,
        source[0],  # The peer, or the sender.
        number,
        step,
        version,
        source.version,
        source.step,
        own_weight,
        weight,
        mass,
        start,
        time,
      )

  def _note(
    self,
    kind: traces.Kind,
    node: int,
    mass: float,
    start: float,
    end: float,
  ) -> None:
    """Records a JOIN, LEAVE or END of a node."""
    step, version = self._step[node], self._version[node]
    self._rows += _pack(
      kind, node, 0, 0, step, version, 0, 0, 0.0, 0.0, mass, start, end
    )

  def _schedule(self, time: float, node: int, kind: int, data: Any) -> None:
    heapq.heappush(self._heap, (time, node, kind, data))
