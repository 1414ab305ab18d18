"""Gossip: nodes that pull, push or average in pairs."""

import heapq

from jasgd import gossip
from jasgd.simulation import _node_loop
from jasgd.simulation import _node_records

# A peer, and the weight it has in the mix or the share that it is sent.
_Peers = list[tuple[int, float]]


class GossipLoop(_node_loop.NodeLoop):
  """Peers that are drawn at random, or given by a topology."""

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    assert isinstance(setup.strategy, gossip.Gossip)
    self._peers = setup.strategy.peers
    self._weight = 0.5  # Of a random peer.
    if isinstance(setup.strategy, gossip.Pull):
      self._weight = setup.strategy.beta
    self._peer_rows: list[list[int]] = []  # Of random peers, as needed.
    self._tables: dict[int, list[_Peers]] = {}  # Of a topology's rounds.
    self._num_draws = [0] * setup.num_nodes

  def _draw_peers(self, node: int) -> _Peers:
    """Whom a node's next mix is with, without the node itself."""
    row = self._num_draws[node]
    self._num_draws[node] = row + 1
    if isinstance(self._peers, str):
      while row >= len(self._peer_rows):
        self._draw_rows(self._peers)
      peer = self._peer_rows[row][node]
      return [] if peer == node else [(peer, self._weight)]
    row %= self._peers.num_rounds
    if row not in self._tables:
      self._tables[row] = _list_peers(self._peers, row)
    return self._tables[row][node]

  def _draw_rows(self, peers: str) -> None:
    """Draws some more rows of random peers."""
    num_nodes = self._setup.num_nodes
    rows = gossip.draw_peers(
      peers,
      num_nodes,
      max(1, 4096 // num_nodes),
      seed=self._setup.seed,
      first_round=len(self._peer_rows),
    )
    self._peer_rows.extend(rows.tolist())


class PullLoop(GossipLoop):
  """A node asks its peers, and waits for the answers.

  The answers share the node's link. A dead peer refuses: its weight goes to the
  node itself.
  """

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    self._handlers |= {
      _node_loop.READ: self._read_peers,
      _node_loop.MIXED: self._finish_mix,
    }

  def _begin_mix(self, node: int, time: float) -> None:
    peers = self._draw_peers(node)
    if not peers:
      self._begin_step(node, time)
      return
    data = (self._life[node], peers)
    event = (time + self._latency, node, _node_loop.READ, data)
    heapq.heappush(self._heap, event)

  def _read_peers(
    self, node: int, time: float, data: tuple[int, _Peers]
  ) -> None:
    """A question has arrived at the peers."""
    life, peers = data
    answers = [
      _node_records.Snapshot(
        peer, self._version[peer], self._step[peer], weight
      )
      for peer, weight in peers
      if self._is_in[peer]
    ]
    arrival = time + self._latency + len(answers) * self._transfer
    refusals = []
    if len(answers) < len(peers):
      refusals = [peer for peer, _ in peers if not self._is_in[peer]]
    event = (arrival, node, _node_loop.MIXED, (life, answers, refusals))
    heapq.heappush(self._heap, event)

  def _finish_mix(
    self,
    node: int,
    time: float,
    data: tuple[int, list[_node_records.Snapshot], list[int]],
  ) -> None:
    """The answers are there."""
    life, answers, refusals = data
    if life != self._life[node]:
      for answer in answers:
        self._note_lost(answer, node, time)
      return
    if refusals:
      # If that was all, nothing else tells how long the node has waited.
      start = time if answers else self._begun[node]
      self._note_refusals(node, time, start, refusals)
    if answers:
      self._mix_answers(node, time, answers)
    self._begin_step(node, time)

  def _mix_answers(
    self, node: int, time: float, answers: list[_node_records.Snapshot]
  ) -> None:
    own_weight = max(0.0, 1 - sum(answer.weight for answer in answers))
    self._mix(node, time, self._begun[node], answers, own_weight)

  def _note_refusals(
    self, node: int, time: float, start: float, peers: list[int]
  ) -> None:
    """Writes down questions that nobody answered; the first says how long."""
    question = _node_records.Snapshot(node, -1, self._step[node], 0.0)
    for peer in peers:
      self._note_lost(question, peer, time, start=start)
      start = time


class PairsLoop(PullLoop):
  """A node and its peer both take the mean, at the time of the answer.

  If the peer has died by then, nothing is averaged.
  """

  def _mix_answers(
    self, node: int, time: float, answers: list[_node_records.Snapshot]
  ) -> None:
    ((peer, _, _, weight),) = answers
    if not self._is_in[peer]:
      self._note_refusals(node, time, self._begun[node], [peer])
      return
    # At once: each is averaged with what the other was before.
    own, other = (
      _node_records.Snapshot(
        each, self._version[each], self._step[each], weight
      )
      for each in (node, peer)
    )
    self._mix(node, time, self._begun[node], [other], 1 - weight)
    self._mix(peer, time, time, [own], 1 - weight)


class PushLoop(GossipLoop):
  """A node sends its weights, and mixes what has come; nobody waits.

  A message carries a share, which is its weight in the receiver's mix: a half
  with random peers, or what the topology says. The node's own weight is the
  share that it has kept; so it is A3's rule, with all weights halved. Messages
  queue on the sender's link, and are lost if the receiver is dead. A node that
  has made its steps, and so keeps all it has, mixes what comes at once.
  """

  def __init__(self, setup: _node_loop.Setup) -> None:
    """Starts all nodes at time 0."""
    super().__init__(setup)
    self._inbox: list[list[_node_records.Snapshot]] = [
      [] for _ in range(setup.num_nodes)
    ]
    self._link_free = [0.0] * setup.num_nodes
    self._handlers[_node_loop.DELIVERED] = self._deliver

  def _begin_mix(self, node: int, time: float) -> None:
    peers = self._draw_peers(node)
    self._send(node, time, peers)
    kept = max(0.0, 1 - sum(share for _, share in peers))
    self._mix_inbox(node, time, kept)
    self._begin_step(node, time)

  def _rest(self, node: int, time: float) -> None:
    self._mix_inbox(node, time, 1.0)

  def _leave(self, node: int, time: float) -> None:
    for message in self._inbox[node]:
      self._note_lost(message, node, time, self._get_mass(message))
    self._inbox[node] = []

  def _send(self, node: int, time: float, peers: _Peers) -> None:
    """Sends a node's weights to its peers, one after another."""
    version, step = self._version[node], self._step[node]
    for peer, share in peers:
      sent = max(time, self._link_free[node]) + self._transfer
      self._link_free[node] = sent
      message = _node_records.Snapshot(node, version, step, share)
      event = (sent + self._latency, peer, _node_loop.DELIVERED, message)
      heapq.heappush(self._heap, event)

  def _deliver(
    self, node: int, time: float, message: _node_records.Snapshot
  ) -> None:
    """A message arrives in a node's inbox."""
    if not self._is_in[node]:
      self._note_lost(message, node, time, self._get_mass(message))
      return
    self._inbox[node].append(message)
    if self._step[node] == self._num_steps:
      self._mix_inbox(node, time, 1.0)

  def _mix_inbox(self, node: int, time: float, own: float) -> None:
    """Takes the weighted mean of the own weights and of all that has come."""
    inbox, self._inbox[node] = self._inbox[node], []
    if not inbox:
      return
    total = own + sum(message.weight for message in inbox)
    if not total:  # All of them have given their mass away: nothing changes.
      own = total = 1.0
    others = [
      _node_records.Snapshot(peer, version, step, weight / total)
      for peer, version, step, weight in inbox
    ]
    self._mix(node, time, time, others, own / total)

  def _get_mass(self, message: _node_records.Snapshot) -> float:
    """The mass that is lost with a message."""
    del message
    return 0.0


class PushSumLoop(PushLoop):
  """Shares are shares of a node's mass, which is its own weight in a mix.

  A node that has made its steps takes no mass of those who have not: it would
  keep it, and they would have none left that their steps count by.
  """

  _initial_mass = 1.0

  def _send(self, node: int, time: float, peers: _Peers) -> None:
    mass = self._mass[node]
    is_last = self._step[node] == self._num_steps
    parts = [
      (peer, share * mass)
      for peer, share in peers
      if is_last or self._step[peer] < self._num_steps
    ]
    self._mass[node] = max(0.0, mass - sum(part for _, part in parts))
    super()._send(node, time, parts)

  def _mix_inbox(self, node: int, time: float, own: float) -> None:
    own = self._mass[node]
    self._mass[node] += sum(message.weight for message in self._inbox[node])
    super()._mix_inbox(node, time, own)

  def _get_mass(self, message: _node_records.Snapshot) -> float:
    return message.weight


def _list_peers(topology: gossip.Topology, row: int) -> list[_Peers]:
  """The peers of all nodes in one round, with their weights."""
  # From the edges: a table of a large star would not fit in memory.
  edges = slice(*topology.starts[row : row + 2].tolist())
  lists: list[_Peers] = [[] for _ in range(topology.num_nodes)]
  for node, peer, weight in zip(
    topology.nodes[edges].tolist(),
    topology.peers[edges].tolist(),
    topology.weights[edges].tolist(),
    strict=True,
  ):
    lists[node].append((peer, weight))
  return lists
