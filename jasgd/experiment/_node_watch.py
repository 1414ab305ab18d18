"""Looks at nodes from outside: how they stand, and what their mean is worth."""

from collections.abc import Mapping
import math
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd.experiment import _observer

# Seconds within which a node answers somebody who only looks: it does so while
# it computes.
_DEADLINE = 5.0


class NodeWatch:
  """One who looks at all nodes, and at the centre.

  Args:
    task: What is learned.
    layout: Of its weights, as they travel.
    connects: Ways to connect, by number, with `traces.CENTRE`.
  """

  def __init__(
    self,
    task: tasks.Task,
    layout: engine.Layout,
    connects: Mapping[int, Any],
  ) -> None:
    self._task = task
    self._layout = layout
    self._observers = {
      member: _observer.Observer(task, layout, connect, _DEADLINE)
      for member, connect in connects.items()
    }

  def ask(self, member: int) -> dict[str, Any] | None:
    """How a node stands; None if it is not there."""
    try:
      return self._observers[member].get_status()
    except runtime.WireError:
      return None

  def stop(self, member: int) -> None:
    """Asks a node to end in good order; one that is gone has."""
    try:
      self._observers[member].stop('It was stopped.')
    except runtime.WireError:
      return

  def evaluate(
    self, members: list[int]
  ) -> tuple[tuple[Any, Any] | None, dict[str, float]]:
    """The mean of the nodes' weights, and what there is to say of it.

    Args:
      members: The nodes that are alive, and the centre.

    Returns:
      The mean (params, stats), None if nobody answers, and metrics.
    """
    pulled = {member: self._pull(member) for member in members}
    nodes = [
      weights
      for member, weights in pulled.items()
      if weights is not None and member >= 0
    ]
    if not nodes:
      return None, {}
    mean = jax.tree.map(_average, *nodes)
    metrics = {
      'gossip/consensus_error': _measure_distance(nodes, mean),
      **self._test('test', mean),
    }
    centre = pulled.get(traces.CENTRE)
    if centre is not None:
      metrics |= self._test('centre', centre)
    return mean, {
      name: value for name, value in metrics.items() if math.isfinite(value)
    }

  def close(self) -> None:
    """Hangs up. Twice is no error."""
    for observer in self._observers.values():
      observer.close()

  def _pull(self, member: int) -> Any:
    """A copy of a node's (params, stats); None if it is not there."""
    try:
      answer = self._observers[member].ask(runtime.Message(runtime.Verb.PULL))
    except (runtime.WireError, runtime.RefusedError):
      return None
    assert answer.payload is not None
    return self._layout.unpack(answer.payload)

  def _test(self, group: str, weights: tuple[Any, Any]) -> dict[str, float]:
    if self._task.test_data is None:
      return {}
    return {
      f'{group}/{name}': float(value)
      for name, value in tasks.evaluate(self._task, *weights).items()
    }


def _average(*leaves: np.ndarray) -> np.ndarray:
  """The mean in the leaves' own dtype, rounded once."""
  mean = np.mean([np.asarray(leaf, np.float64) for leaf in leaves], axis=0)
  return np.asarray(mean).astype(leaves[0].dtype)


def _measure_distance(nodes: list[Any], mean: Any) -> float:
  """The root of the mean squared distance of the nodes from their mean."""
  total = 0.0
  for params, _ in nodes:
    for own, middle in zip(
      jax.tree.leaves(params), jax.tree.leaves(mean[0]), strict=True
    ):
      difference = np.asarray(own, np.float64) - np.asarray(middle, np.float64)
      total += float(np.sum(difference**2))
  return math.sqrt(total / len(nodes))
