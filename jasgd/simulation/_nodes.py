"""`simulate_nodes`: peers that step and mix, in virtual time."""

import collections
import heapq
from typing import Any

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _network
from jasgd.simulation import _times

# What an event is about; at equal times and node they come in this order.
_DELIVERED, _STEPPED, _READ, _MIXED = range(4)


def simulate_nodes(
  strategy: gossip.Strategy,
  *,
  num_nodes: int,
  num_steps: int,
  compute: _times.ComputeTime | None = None,
  network: _network.Network | None = None,
  seed: int = 0,
) -> traces.NodeTrace:
  """Runs nodes without a server in virtual time, and records what happens.

  Args:
    strategy: How they mix: one of `jasgd.gossip`, such as `Pull()`.
    num_nodes: Number of nodes.
    num_steps: Steps that each node makes.
    compute: How long a gradient takes. By default 1.
    network: How long messages take; the weights have `bytes_per_push` bytes.
    seed: Of times and peers.

  Returns:
    The trace.

  Raises:
    ValueError: before any work, if an argument makes no sense.

  Examples:
    >>> from jasgd import gossip, simulation
    >>> trace = simulation.simulate_nodes(
    ...     gossip.AllReduce(), num_nodes=4, num_steps=3)
    >>> print(len(trace.steps), len(trace.mixes), trace.duration)
    12 12 3.0
  """
  protocols.check_count('num_nodes', num_nodes, 1)
  protocols.check_count('num_steps', num_steps, 1)
  protocols.check_count('seed', seed, 0)
  network = network or _network.Network()
  network.check()
  if isinstance(strategy, gossip.Gossip):
    strategy.check(num_nodes)
  loop = _NodeLoop(
    strategy, num_nodes, num_steps, compute or _times.constant(), network, seed
  )
  return traces.NodeTrace(
    loop.run(),
    {
      'strategy': strategy.describe(),
      'num_nodes': num_nodes,
      'num_steps': num_steps,
      'seed': seed,
      'bytes_per_message': network.bytes_per_push,
    },
  )


class _NodeLoop:
  """A simulation under way."""

  def __init__(
    self,
    strategy: gossip.Strategy,
    num_nodes: int,
    num_steps: int,
    compute: _times.ComputeTime,
    network: _network.Network,
    seed: int,
  ) -> None:
    """Starts all nodes at time 0."""
    self._strategy = strategy
    self._num_nodes = num_nodes
    self._num_steps = num_steps
    self._durations = compute.table(seed, 0, num_steps, num_nodes).tolist()
    self._network = network
    self._seed = seed
    self._peers: list[list[int]] = []  # Rows of random peers, as needed.
    # Of a topology: round -> peers and weights of all nodes.
    self._tables: dict[int, tuple[list[list[int]], list[list[float]]]] = {}
    self._step = [0] * num_nodes
    self._version = [0] * num_nodes
    self._read_version = [0] * num_nodes
    self._num_mixes = [0] * num_nodes
    self._num_draws = [0] * num_nodes
    self._mass = [1.0] * num_nodes
    self._inbox: list[list[tuple[int, int, float]]] = [
      [] for _ in range(num_nodes)
    ]
    self._begun = [0.0] * num_nodes  # When a node began what it is at.
    # Node -> (peer, its version, weight) of all that it has asked.
    self._read: dict[int, list[tuple[int, int, float]]] = {}
    self._in_transit: dict[
      tuple[float, int], collections.deque[tuple[int, int, float]]
    ] = {}
    self._centre_version = 0
    self._at_barrier: list[int] = []
    self._records: list[tuple[Any, ...]] = []
    self._heap: list[tuple[float, int, int]] = []
    for node in range(num_nodes):
      self._begin_step(node, 0.0)

  def run(self) -> np.ndarray:
    """Handles events until every node has made its steps."""
    handlers = {
      _DELIVERED: self._deliver,
      _STEPPED: self._finish_step,
      _READ: self._read_peer,
      _MIXED: self._finish_mix,
    }
    while self._heap:
      time, node, kind = heapq.heappop(self._heap)
      handlers[kind](node, time)
    records = np.zeros(len(self._records), traces.NODE_RECORD)
    names = [name for name in records.dtype.names or () if name != 'reserved']
    for name, column in zip(
      names, zip(*self._records, strict=True), strict=False
    ):
      records[name] = column
    return records

  # --- Steps.

  def _begin_step(self, node: int, time: float) -> None:
    step = self._step[node]
    if step == self._num_steps:
      return
    self._read_version[node] = self._version[node]
    self._begun[node] = time
    self._schedule(time + self._durations[step][node], node, _STEPPED)

  def _finish_step(self, node: int, time: float) -> None:
    self._step[node] += 1
    self._version[node] += 1
    self._note(
      node, time, traces.NodeKind.STEP, -1, -1, self._read_version[node], 1, 0
    )
    if self._step[node] % self._strategy.period:
      self._begin_step(node, time)
    else:
      self._begin_mix(node, time)

  # --- Mixes.

  def _begin_mix(self, node: int, time: float) -> None:
    """A node has stepped often enough to mix."""
    self._begun[node] = time
    strategy, message = self._strategy, self._message_time()
    if isinstance(strategy, gossip.AllReduce):
      self._at_barrier.append(node)
      if len(self._at_barrier) == self._num_nodes:
        end = time + self._all_reduce_time()
        waiting, self._at_barrier = sorted(self._at_barrier), []
        for other in waiting:
          self._schedule(end, other, _MIXED)
      return
    if isinstance(strategy, gossip.Elastic):
      self._schedule(time + message, node, _READ)
      return
    peers = self._draw_peers(node)
    if isinstance(strategy, (gossip.Push, gossip.PushSum)):
      self._push(node, time, [peer for peer, _ in peers])
      self._mix_inbox(node, time, is_self_draw=not peers)
      self._begin_step(node, time)
    elif not peers:
      self._begin_step(node, time)
    else:
      self._read[node] = [(peer, -1, weight) for peer, weight in peers]
      self._schedule(time + self._network.latency, node, _READ)

  def _read_peer(self, node: int, time: float) -> None:
    """A request has arrived, at a peer or at the centre."""
    strategy = self._strategy
    if isinstance(strategy, gossip.Elastic):
      self._read[node] = [(traces.CENTRE, self._centre_version, strategy.rate)]
      self._centre_version += 1
    else:
      self._read[node] = [
        (peer, self._version[peer], weight)
        for peer, _, weight in self._read[node]
      ]
    # Several answers share the node's own link.
    transfer = self._message_time() - self._network.latency
    arrival = time + self._network.latency + len(self._read[node]) * transfer
    self._schedule(arrival, node, _MIXED)

  def _finish_mix(self, node: int, time: float) -> None:
    """What was asked for is there: a node's weights change."""
    strategy = self._strategy
    if isinstance(strategy, gossip.AllReduce):
      share = 1 / self._num_nodes
      self._mix(node, time, [(traces.ALL, self._num_mixes[node], share)], share)
      self._begin_step(node, time)
      return
    others = self._read.pop(node)
    if isinstance(strategy, gossip.Pairs):
      # At once: each is averaged with what the other was before.
      ((peer, _, weight),) = others
      own_version, peer_version = self._version[node], self._version[peer]
      self._mix(node, time, [(peer, peer_version, weight)], 1 - weight)
      begun, self._begun[peer] = self._begun[peer], time
      self._mix(peer, time, [(node, own_version, weight)], 1 - weight)
      self._begun[peer] = begun  # It goes on with its gradient.
    else:
      own_weight = 1 - sum(weight for _, _, weight in others)
      self._mix(node, time, others, own_weight)
    self._begin_step(node, time)

  def _push(self, node: int, time: float, peers: list[int]) -> None:
    """Sends a node's weights, and with push-sum equal parts of its mass."""
    mass = 1.0
    if isinstance(self._strategy, gossip.PushSum):
      mass = self._mass[node] = self._mass[node] / (1 + len(peers))
    arrival = time + self._message_time()
    for peer in peers:
      line = self._in_transit.setdefault((arrival, peer), collections.deque())
      line.append((node, self._version[node], mass))
      self._schedule(arrival, peer, _DELIVERED)

  def _deliver(self, node: int, time: float) -> None:
    """A message arrives in a node's inbox."""
    line = self._in_transit[time, node]
    self._inbox[node].append(line.popleft())
    if not line:
      del self._in_transit[time, node]

  def _mix_inbox(self, node: int, time: float, *, is_self_draw: bool) -> None:
    """Mixes all that has come: by mass, or with A3's weights."""
    inbox, self._inbox[node] = self._inbox[node], []
    if not inbox:
      return
    has_masses = isinstance(self._strategy, gossip.PushSum)
    own = self._mass[node] if has_masses else 1.0 + is_self_draw
    total = own + sum(mass for _, _, mass in inbox)
    if has_masses:
      self._mass[node] = total
    others = [(peer, version, mass / total) for peer, version, mass in inbox]
    self._mix(node, time, others, own / total)

  # --- Small things.

  def _mix(
    self,
    node: int,
    time: float,
    others: list[tuple[int, int, float]],
    own_weight: float,
  ) -> None:
    """Changes a node's weights; `others` are (peer, its version, weight)."""
    self._version[node] += 1
    mix = self._num_mixes[node]
    self._num_mixes[node] += 1
    for peer, version, weight in others:
      self._note(
        node, time, traces.NodeKind.MIX, peer, mix, version, own_weight, weight
      )

  def _note(
    self,
    node: int,
    time: float,
    kind: traces.NodeKind,
    peer: int,
    mix: int,
    peer_version: int,
    own_weight: float,
    peer_weight: float,
  ) -> None:
    self._records.append(
      (
        kind,
        node,
        peer,
        mix,
        len(self._records),
        self._step[node],
        self._version[node],
        peer_version,
        own_weight,
        peer_weight,
        self._begun[node],
        time,
      )
    )

  def _schedule(self, time: float, node: int, kind: int) -> None:
    heapq.heappush(self._heap, (time, node, kind))

  def _draw_peers(self, node: int) -> list[tuple[int, float]]:
    """(peer, weight) of a node's next mix, without the node itself."""
    assert isinstance(self._strategy, gossip.Gossip)
    peers, row = self._strategy.peers, self._num_draws[node]
    self._num_draws[node] += 1
    if isinstance(peers, str):
      while row >= len(self._peers):
        self._peers.extend(
          gossip.draw_peers(
            peers,
            self._num_nodes,
            max(1, 4096 // self._num_nodes),
            seed=self._seed,
            first_round=len(self._peers),
          ).tolist()
        )
      peer = self._peers[row][node]
      return [] if peer == node else [(peer, 0.5)]
    row %= peers.num_rounds
    if row not in self._tables:
      indices, weights = peers.peer_table(row)
      self._tables[row] = (indices.tolist(), weights.tolist())
    indices, weights = self._tables[row]
    return [
      (peer, weight)
      for peer, weight in zip(indices[node], weights[node], strict=True)
      if peer != node
    ]

  def _message_time(self) -> float:
    """Seconds that a message with weights takes."""
    network = self._network
    return network.latency + network.link_time(network.bytes_per_push)

  def _all_reduce_time(self) -> float:
    """The ring formula: 2 (n - 1) messages of 1/n of the weights each."""
    network, n = self._network, self._num_nodes
    piece = network.link_time(network.bytes_per_push / n)
    return 2 * (n - 1) * (network.latency + piece)
