"""Whom a node mixes with, of those who are alive."""

import numpy as np

from jasgd import gossip

# A peer, and the weight it has in the mix or the share that it is sent.
Choice = list[tuple[int, float]]


def choose_peers(
  strategy: gossip.Gossip,
  node: int,
  alive: list[int],
  round_index: int,
  seed: int,
  weight: float = 0.5,
) -> Choice:
  """Whom a node's mix is with: those who are alive, without itself.

  Args:
    strategy: Says how peers are drawn.
    node: Who asks.
    alive: The others that can be reached.
    round_index: The number of the mix.
    seed: Of the run.
    weight: Of a random peer.

  Returns:
    Peers and their weights.
  """
  if not isinstance(strategy.peers, str):
    return [
      (peer, weight)
      for peer, weight in _list_edges(strategy.peers, node, round_index)
      if weight > 0 and peer in alive
    ]
  members = sorted([node, *alive])
  drawn = gossip.draw_peers(
    strategy.peers, len(members), seed=seed, first_round=round_index
  )
  peer = members[drawn[0, members.index(node)]]
  return [] if peer == node else [(peer, weight)]


def _list_edges(
  topology: gossip.Topology, node: int, round_index: int
) -> Choice:
  """A node's peers in a round, and their weights."""
  index = round_index % topology.num_rounds
  start, stop = topology.starts[index : index + 2]
  # Edges are in order of their nodes.
  ends = np.searchsorted(topology.nodes[start:stop], [node, node + 1])
  first, last = start + ends
  peers, weights = topology.peers[first:last], topology.weights[first:last]
  return list(zip(peers.tolist(), weights.tolist(), strict=True))
