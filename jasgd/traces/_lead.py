"""Lead of the fastest worker over the slowest, in steps."""

import collections

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema


def count_lead(worker: np.ndarray, num_workers: int) -> np.ndarray:
  """The lead after each gradient, if no worker comes or goes."""
  num_gradients = len(worker)
  if not num_gradients:
    return np.zeros(0, np.int64)
  totals = np.bincount(worker, minlength=num_workers)
  order = np.argsort(worker, kind='stable')
  first = np.cumsum(totals) - totals
  rank = np.empty(num_gradients, np.int64)
  rank[order] = np.arange(num_gradients) - np.repeat(first, totals)
  fastest = np.maximum.accumulate(rank + 1)
  # The slowest completes its k-th step when the last worker to do so does.
  position = np.flatnonzero(rank < totals.min())
  completed = np.zeros(totals.min(), np.int64)
  np.maximum.at(completed, rank[position], position)
  slowest = np.cumsum(np.bincount(completed, minlength=num_gradients))
  return fastest - slowest


def follow_lead(records: np.ndarray, num_workers: int) -> np.ndarray:
  """The lead after each gradient, among the workers that are present.

  Args:
    records: Gradients, joins and leaves that are not void.
    num_workers: Number of workers. Those without a JOIN are present from the
      start.

  Returns:
    An entry for each gradient.
  """
  _, first = np.unique(records['worker'], return_index=True)
  is_late = records['kind'][first] == _schema.Kind.JOIN
  late = records['worker'][first][is_late]
  race = _Race(set(range(num_workers)) - set(late.tolist()))
  leads = []
  for kind, fate, worker in zip(
    records['kind'].tolist(),
    records['fate'].tolist(),
    records['worker'].tolist(),
    strict=True,
  ):
    if kind == _schema.Kind.JOIN:
      race.enter(worker)
    elif kind == _schema.Kind.LEAVE:
      race.leave(worker)
    else:
      if fate != protocols.Fate.DROPPED_GONE:  # Its worker has left the race.
        race.step(worker)
      leads.append(race.fastest - race.slowest)
  return np.array(leads, np.int64)


class _Race:
  """How many steps each worker has made, and the largest and smallest number.

  Both numbers move by one at a time, and the largest one moves down no further
  than it has moved up. So an event costs O(1) on average.
  """

  def __init__(self, runners: set[int]) -> None:
    self.slowest = self.fastest = 0
    self._steps = dict.fromkeys(runners, 0)
    self._num_with = collections.Counter({0: len(runners)})

  def enter(self, worker: int) -> None:
    """Adds a worker, with as many steps as the slowest."""
    if worker not in self._steps:
      self._steps[worker] = self.slowest
      self._num_with[self.slowest] += 1
      self._move_ends()

  def leave(self, worker: int) -> None:
    """Removes a worker."""
    if worker in self._steps:
      self._num_with[self._steps.pop(worker)] -= 1
      self._move_ends()

  def step(self, worker: int) -> None:
    """Counts a step of a worker."""
    self.enter(worker)
    steps = self._steps[worker]
    self._steps[worker] = steps + 1
    self._num_with[steps] -= 1
    self._num_with[steps + 1] += 1
    self.fastest = max(self.fastest, steps + 1)
    self._move_ends()

  def _move_ends(self) -> None:
    if not self._steps:  # The next worker starts from the slowest.
      self.fastest = self.slowest
      return
    while not self._num_with[self.slowest]:
      del self._num_with[self.slowest]
      self.slowest += 1
    while not self._num_with[self.fastest]:
      self.fastest -= 1
