"""What there is to measure of real nodes, beside what they have learned."""

from collections.abc import Collection, Mapping
import math
import time
from typing import Any

import numpy as np

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_train

_Kind = traces.NodeKind

# What nodes count -> the metric, which is their sum.
_COUNTS = {'num_full': 'gossip/refused_full', 'num_done': 'gossip/refused_done'}


class NodeMeter:
  """Measures nodes now and then: what is new since the last time.

  Args:
    folder: Of the run; if the nodes have others, their traces are not seen.
  """

  def __init__(self, folder: workdirs.Workdir) -> None:
    self._folder = folder
    self._tail = traces.NodeTail(folder.trace)
    # Of what was read: the last step of each, and all that was lost.
    self._kept = np.zeros(0, traces.NODE_RECORD)
    self._mixes: dict[str, float] = {'time': 0.0}

  def measure(
    self, statuses: Mapping[int, dict[str, Any]], lost: Collection[int]
  ) -> dict[str, float]:
    """Time, loss, the mixes since the last time, and what was refused.

    Args:
      statuses: What nodes said last, by number, and the centre.
      lost: Who of them is gone.

    Returns:
      Metrics.
    """
    nodes = {node: each for node, each in statuses.items() if node >= 0}
    metrics = self._measure_mixes(nodes, lost)
    losses = [
      status['loss']
      for node, status in nodes.items()
      if node not in lost and status['loss'] is not None
    ]
    if losses:
      metrics['train/loss'] = float(np.mean(losses))
    for name, metric in _COUNTS.items():
      counts = [status[name] for status in nodes.values() if name in status]
      if counts:
        metrics[metric] = float(sum(counts))
    return metrics

  def _measure_mixes(
    self, nodes: Mapping[int, dict[str, Any]], lost: Collection[int]
  ) -> dict[str, float]:
    """What the traces say, as far as they can be seen."""
    if not self._folder.trace.exists():
      origin = next(iter(nodes.values()))['origin']
      return {'time': time.time() - origin}
    new = self._tail.read()
    records = np.concatenate([self._kept, new])
    now = float(new['end_time'].max(initial=self._mixes['time']))
    mixing = _node_train.Mixing(traces.NodeTrace(records))
    # Where nothing was mixed since, what was said last still holds.
    self._mixes |= {'time': now, **mixing.measure(-math.inf, now)}
    self._kept = _keep(records)
    metrics = dict(self._mixes)
    if 'gossip/mass_lost' in metrics:  # One that was killed writes nothing.
      metrics['gossip/mass_lost'] += sum(
        status['mass'] for node, status in nodes.items() if node in lost
      )
    return metrics


def _keep(records: np.ndarray) -> np.ndarray:
  """What later ones are measured by: no mix of a node is among it."""
  kind, is_centre = records['kind'], records['node'] == traces.CENTRE
  is_progress = np.isin(kind, (_Kind.STEP, _Kind.RESTART))
  is_progress |= is_centre & (kind == _Kind.MIX)
  progress = records[is_progress][::-1]
  _, last = np.unique(progress['node'], return_index=True)
  is_lost = np.isin(kind, (_Kind.LEAVE, _Kind.LOST))
  return np.concatenate([records[is_lost], progress[last]])
