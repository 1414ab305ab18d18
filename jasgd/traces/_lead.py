"""By how many steps the fastest learner leads the slowest, all along."""

import collections

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema


def count_lead(learner: np.ndarray, num_learners: int) -> np.ndarray:
  """The lead after each gradient, if nobody comes or goes."""
  num_gradients = len(learner)
  if not num_gradients:
    return np.zeros(0, np.int64)
  totals = np.bincount(learner, minlength=num_learners)
  order = np.argsort(learner, kind='stable')
  first = np.cumsum(totals) - totals
  rank = np.empty(num_gradients, np.int64)
  rank[order] = np.arange(num_gradients) - np.repeat(first, totals)
  fastest = np.maximum.accumulate(rank + 1)
  # The slowest completes its k-th step when the last learner to do so does.
  position = np.flatnonzero(rank < totals.min())
  completed = np.zeros(totals.min(), np.int64)
  np.maximum.at(completed, rank[position], position)
  slowest = np.cumsum(np.bincount(completed, minlength=num_gradients))
  return fastest - slowest


def follow_lead(records: np.ndarray, num_learners: int) -> np.ndarray:
  """The lead after each gradient, among those who are there.

  Args:
    records: Those that stand: gradients, joins, leaves, and others.
    num_learners: Their number; whoever has no record is there all along.

  Returns:
    An entry for each gradient.
  """
  kinds = records['kind']
  is_told = kinds <= _schema.Kind.LEAVE  # Gradients, joins and leaves.
  told = records[is_told]
  _, first = np.unique(told['learner'], return_index=True)
  late = told[first][told['kind'][first] == _schema.Kind.JOIN]['learner']
  race = _Race(set(range(num_learners)) - set(late.tolist()))
  leads = []
  for kind, fate, learner in zip(
    told['kind'].tolist(),
    told['fate'].tolist(),
    told['learner'].tolist(),
    strict=True,
  ):
    if kind == _schema.Kind.JOIN:
      race.enter(learner)
    elif kind == _schema.Kind.LEAVE:
      race.leave(learner)
    else:
      if fate != protocols.Fate.DROPPED_GONE:  # Of one that is gone.
        race.step(learner)
      leads.append(race.fastest - race.slowest)
  return np.array(leads, np.int64)


class _Race:
  """Who has made how many steps; both ends are kept up to date.

  They move by one at a time, and the upper one no further down than it came
  up, so that an event costs O(1) on average.
  """

  def __init__(self, runners: set[int]) -> None:
    self.slowest = self.fastest = 0
    self._steps = dict.fromkeys(runners, 0)
    self._num_with = collections.Counter({0: len(runners)})

  def enter(self, learner: int) -> None:
    """A learner comes: it neither leads nor lags."""
    if learner not in self._steps:
      self._steps[learner] = self.slowest
      self._num_with[self.slowest] += 1
      self._move_ends()

  def leave(self, learner: int) -> None:
    """A learner goes."""
    if learner in self._steps:
      self._num_with[self._steps.pop(learner)] -= 1
      self._move_ends()

  def step(self, learner: int) -> None:
    """A learner has made a step."""
    self.enter(learner)
    steps = self._steps[learner]
    self._steps[learner] = steps + 1
    self._num_with[steps] -= 1
    self._num_with[steps + 1] += 1
    self.fastest = max(self.fastest, steps + 1)
    self._move_ends()

  def _move_ends(self) -> None:
    if not self._steps:  # Whoever comes next goes on from the slowest.
      self.fastest = self.slowest
      return
    while not self._num_with[self.slowest]:
      del self._num_with[self.slowest]
      self.slowest += 1
    while not self._num_with[self.fastest]:
      self.fastest -= 1
