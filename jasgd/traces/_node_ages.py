"""How old weights are when they are mixed in."""

import numpy as np

from jasgd.traces import _node_schema
from jasgd.traces import _nodes


def measure_ages(trace: _nodes.NodeTrace) -> np.ndarray:
  """The age of everything that nodes have mixed in: see `summarize_nodes`.

  Args:
    trace: A trace.

  Returns:
    int64, an entry for each record of a mix of a node with a node or with the
    centre, in the order of time.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> records = np.zeros(3, traces.NODE_RECORD)
    >>> records['step'] = [1, 2, 0]
    >>> records[2]['kind'] = traces.NodeKind.MIX
    >>> records[2]['node'] = 1  # Mixes what node 0 was at the start.
    >>> print(traces.measure_ages(traces.NodeTrace(records)))
    [2]
  """
  records = trace.records
  kind, node = records['kind'], records['node'].astype(np.int64)
  is_move = (kind == _node_schema.NodeKind.MIX) & (node == _node_schema.CENTRE)
  is_progress = (kind == _node_schema.NodeKind.STEP) | is_move
  is_progress |= kind == _node_schema.NodeKind.RESTART
  is_mix = (kind == _node_schema.NodeKind.MIX) & (node >= 0)
  is_mix &= records['peer'] != _node_schema.ALL
  # (node, place) as one number: so the last progress of a peer is found by
  # searching, for all mixes at once.
  place, stride = np.arange(len(records)), len(records) + 1
  keys = node[is_progress] * stride + place[is_progress]
  order = np.argsort(keys)
  keys, steps = keys[order], records['step'][is_progress][order]
  peer = records['peer'][is_mix].astype(np.int64)
  found = np.searchsorted(keys, peer * stride + place[is_mix]) - 1
  has_progress = found >= 0
  has_progress[has_progress] &= (
    keys[found[has_progress]] >= (peer * stride)[has_progress]
  )
  now = np.zeros(len(peer), np.int64)
  now[has_progress] = steps[found[has_progress]]
  # A peer that went back to a checkpoint may have fewer than there are in it.
  return np.maximum(now - records['peer_step'][is_mix], 0)
