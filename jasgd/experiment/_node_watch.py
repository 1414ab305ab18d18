"""Looks at nodes from outside: how they stand, and what their mean is worth."""

from collections.abc import Iterable, Mapping
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd.experiment import _observer

# Seconds within which a node answers somebody who only looks: it does so while
# it computes.
_DEADLINE = 5.0


class Evaluated(NamedTuple):
  """What the nodes' weights are worth."""

  steps: dict[int, int]  # In the weights of each node that answered.
  mean: tuple[Any, Any]  # The mean of their (params, stats).
  metrics: dict[str, float]  # Those that are finite.


class _Pulled(NamedTuple):
  """The weights of a node."""

  step: int
  mass: float
  weights: tuple[Any, Any]


class NodeWatch:
  """One who looks at all nodes, and at the centre.

  Args:
    settings: The nodes'.
    members: Whom to look at: numbers of nodes, and `traces.CENTRE`.
    registry: Where they are.
  """

  def __init__(
    self,
    settings: runtime.NodeSettings,
    members: Iterable[int],
    registry: runtime.Registry,
  ) -> None:
    self._task = settings.task
    self._layout = settings.make_layout()
    self._has_mass = settings.strategy.has_mass
    self._registry = registry
    self._observers = {
      member: _observer.Observer(
        self._task, self._layout, registry.connect(member), _DEADLINE
      )
      for member in members
    }

  def ask(self, member: int) -> dict[str, Any] | None:
    """How a node stands; None if it is not there."""
    try:
      status = self._observers[member].get_status()
    except runtime.WireError:
      return None
    self._registry.hear(status['members'])
    return status

  def look_around(self) -> None:
    """Asks those of whom only the address is known who they are."""
    self._registry.ask_strangers()

  def report_death(self, member: int, dead: int) -> bool:
    """Tells a member that a node is dead; whether it has heard."""
    try:
      self._observers[member].report_death(node=dead)
    except (runtime.WireError, runtime.RefusedError):
      return False
    return True

  def stop(self, member: int) -> None:
    """Asks a node to end in good order; one that is gone has."""
    try:
      self._observers[member].stop('It was stopped.')
    except runtime.WireError:
      return

  def evaluate(self, members: list[int]) -> Evaluated | None:
    """Evaluates the mean of the nodes' weights; they keep theirs.

    Of push-sum it is weighted by the nodes' masses.

    Args:
      members: The nodes that are alive, and the centre.

    Returns:
      What there is to say of it; None if nobody answers.
    """
    pulled = {
      member: found
      for member in members
      if (found := self._pull(member)) is not None
    }
    centre = pulled.pop(traces.CENTRE, None)
    if not pulled:
      return None
    masses = [found.mass for found in pulled.values()] if self._has_mass else []
    mean, metrics = describe_nodes(
      self._task,
      [found.weights for found in pulled.values()],
      masses,
      None if centre is None else centre.weights,
    )
    steps = {member: found.step for member, found in pulled.items()}
    return Evaluated(steps, mean, metrics)

  def close(self) -> None:
    """Hangs up. Twice is no error."""
    for observer in self._observers.values():
      observer.close()

  def _pull(self, member: int) -> _Pulled | None:
    """A copy of what a node has; None if it is not there."""
    try:
      answer = self._observers[member].ask(runtime.Message(runtime.Verb.PULL))
    except (runtime.WireError, runtime.RefusedError):
      return None
    assert answer.payload is not None
    weights = self._layout.unpack(answer.payload)
    return _Pulled(answer.step, answer.rate, weights)


@np.errstate(invalid='ignore', over='ignore')  # Of a run that diverges.
def describe_nodes(
  task: tasks.Task,
  nodes: list[tuple[Any, Any]],
  masses: list[float],
  centre: tuple[Any, Any] | None,
) -> tuple[tuple[Any, Any], dict[str, float]]:
  """The mean of nodes, and what there is to say of it.

  Args:
    task: What is learned.
    nodes: (params, stats) of each.
    masses: By which the mean is weighted; []: all alike.
    centre: (params, stats) of the centre, if there is one: it is evaluated too,
      and so is every node by itself, for `local`.

  Returns:
    The mean, and metrics: those that are finite.
  """
  equal = np.full(len(nodes), 1 / len(nodes))
  plain = mean = jax.tree.map(lambda *rows: _average(rows, equal), *nodes)
  if any(masses):
    shares = np.array(masses) / sum(masses)
    mean = jax.tree.map(lambda *rows: _average(rows, shares), *nodes)
  groups: dict[str, Mapping[str, Any]] = {}
  if task.test_data is not None:
    groups['test'] = tasks.evaluate(task, *mean)
    if centre is not None:
      groups['centre'] = tasks.evaluate(task, *centre)
      groups['local'] = tasks.evaluate_all(task, nodes)
  metrics = {'gossip/consensus_error': _measure_distance(nodes, plain)} | {
    f'{group}/{name}': float(value)
    for group, values in groups.items()
    for name, value in values.items()
  }
  # Of a run that diverges there may be none.
  return mean, {
    name: value for name, value in metrics.items() if math.isfinite(value)
  }


def _average(leaves: tuple[Any, ...], shares: np.ndarray) -> np.ndarray:
  """The weighted mean in the leaves' own dtype, rounded once."""
  if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
    return np.asarray(leaves[0])  # Nobody mixes these.
  rows = np.stack([np.asarray(leaf, np.float64) for leaf in leaves])
  mean = np.tensordot(shares, rows, axes=1)
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
