"""Who died, who came back, and what was lost with them."""

from typing import NamedTuple

import numpy as np

from jasgd.traces import _node_schema
from jasgd.traces import _nodes

# Of sums of masses, relative.
_ROUNDING = 1e-9


class Deaths(NamedTuple):
  """What `count_deaths` tells."""

  num_deaths: int
  num_returns: int
  lost_mass: float  # Of push-sum, with nodes and messages.


def find_downtimes(trace: _nodes.NodeTrace) -> tuple[np.ndarray, np.ndarray]:
  """When nobody was there: a run that was ended, and went on later.

  Args:
    trace: A trace.

  Returns:
    For each return of a real node, when that was, and how many seconds nobody
    had written anything before it: hardly any, while others go on.
  """
  records = trace.records[np.argsort(trace.records['end_time'], kind='stable')]
  is_return = records['kind'] == _node_schema.NodeKind.RESTART
  times = records['end_time']
  return times[is_return], np.diff(times, prepend=times[:1])[is_return]


def count_deaths(trace: _nodes.NodeTrace) -> Deaths:
  """Counts the deaths of nodes, and the mass that was lost.

  A real node cannot record its own death: a node whose records stop, or go on
  with a RESTART or JOIN, and do not END before, has died. Lost mass is what
  nodes began with, 1 each but for joiners, minus what they ended with: messages
  that a node had received and not mixed when it died are in no record.

  Args:
    trace: A trace, up to its end.

  Returns:
    The counts.
  """
  records = trace.records
  kind = records['kind']
  # A message that was lost may be in the file of its receiver.
  is_own = (records['node'] >= 0) & (kind != _node_schema.NodeKind.LOST)
  records = records[is_own]
  records = records[np.argsort(records['node'], kind='stable')]
  kind, node, mass = (records[name] for name in ('kind', 'node', 'mass'))
  is_first = np.diff(node, prepend=-1) != 0
  is_last = np.diff(node, append=-1) != 0
  is_restart = kind == _node_schema.NodeKind.RESTART
  is_join = kind == _node_schema.NodeKind.JOIN
  # One that had nothing to go on from has both, one after the other.
  is_restarted = np.append(np.zeros(min(1, len(kind)), bool), is_restart[:-1])
  is_return = (is_restart | is_join & ~is_restarted) & ~is_first
  is_end = is_last | np.append(is_return[1:], np.zeros(min(1, len(kind)), bool))
  is_death = is_end & (kind != _node_schema.NodeKind.END)
  is_joiner = is_first & is_join
  initial = float(np.count_nonzero(is_first & ~is_joiner) if mass.any() else 0)
  lost = initial - mass[is_last & (kind == _node_schema.NodeKind.END)].sum()
  if abs(lost) < _ROUNDING * initial:
    lost = 0.0
  return Deaths(
    num_deaths=int(np.count_nonzero(is_death)),
    num_returns=int(np.count_nonzero(is_return)),
    lost_mass=float(lost),
  )
