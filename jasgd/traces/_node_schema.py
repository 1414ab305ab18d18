"""What is written down of nodes that train without a server."""

import enum

import numpy as np

from jasgd import gossip


class NodeKind(enum.IntEnum):
  """What a record of a node tells of."""

  STEP = 0  # A gradient was computed and applied.
  MIX = 1  # Others' weights were mixed in.
  JOIN = 2  # A node came back; a MIX follows, unless it was alone.
  LEAVE = 3  # A node died.
  LOST = 4  # A message, or a question, that found a dead node.
  # Of real nodes only:
  RESTART = 5  # A node came back, and has what it had at an earlier version.
  END = 6  # A node ended in good order; without it, it died.


# Who is mixed with, if it is no node. The centre has records of its own, of the
# moves that it makes, for it is mixed too.
CENTRE = gossip.CENTRE
ALL = -3

NODE_RECORD = np.dtype(
  [
    ('kind', 'u1'),
    ('reserved', 'u1', (3,)),
    # A node, or CENTRE; in a LOST the sender. The centre's mixes are moves.
    ('node', '<i4'),
    # In a MIX the other node, CENTRE or ALL, which is the mean of all nodes
    # with a record of the same `peer_version`. In a LOST the receiver. Else -1.
    ('peer', '<i4'),
    # Records of a node with equal `mix` are one mix; -1 if it is none.
    ('mix', '<i4'),
    # The place of the record among those of all nodes; of real nodes, among
    # those in its file.
    ('order', '<i8'),
    # Steps that the node has made, with this one; of the centre, its moves.
    ('step', '<i8'),
    # How often its weights have changed, with this change; a RESTART is one
    # too, so that no number comes twice. In a LOST the version that was sent,
    # or -1 if it was a question.
    ('version', '<i8'),
    # In a STEP the version that the gradient was computed on; in a MIX the
    # version of the peer's weights, before that mix, or the number of the
    # all-reduce, which none of the same run has, not even one that was lost;
    # in a RESTART the own version that is there again. Else -1.
    # Where the centre moves, by the force of a node's mix, it is the version of
    # that node before its mix.
    ('peer_version', '<i8'),
    # In a MIX the steps that are in the peer's weights. Else, and for ALL, -1.
    ('peer_step', '<i8'),
    # What the own and the peer's weights are multiplied with.
    ('own_weight', '<f8'),
    ('peer_weight', '<f8'),
    # Of push-sum, else 0: what the node has after a STEP, MIX or RESTART, what
    # is lost with a LEAVE or LOST, and what a JOIN adds.
    ('mass', '<f8'),
    ('start_time', '<f8'),
    ('end_time', '<f8'),
  ]
)
