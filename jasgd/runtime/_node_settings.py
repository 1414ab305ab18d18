"""What a node, or the centre, is told."""

from collections.abc import Callable
import dataclasses
import json
import time
from typing import Any

import jax

from jasgd import engine
from jasgd import gossip
from jasgd import tasks
from jasgd.runtime import _settings


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeSettings:
  """All that a node needs to know.

  Attributes:
    task: What is learned.
    optimizer: Of each node: an optax transformation.
    strategy: How nodes average; not in pairs.
    num_nodes: How many are expected.
    num_steps: That each of them makes.
    seed: Of the first weights and of everything that nodes draw.
    init: The first (params, stats); None: the task's own, from the seed.
    get_rate: The schedule, as in `engine.replay`; None: there is none.
    wire_dtype: What float32 is rounded to in messages.
    checkpoint_seconds: Between checkpoints.
    min_seconds: The least of a step, by the node's number; the last one stands
      for all that follow. (): no matter.
    deadlines: How long to wait; `step` is for an answer of a peer.
    origin: The time of day at which the run began.
    header: What else goes into the header of the traces.
  """

  task: tasks.Task
  optimizer: Any
  strategy: gossip.PeerStrategy
  num_nodes: int
  num_steps: int
  seed: int = 0
  init: tuple[Any, Any] | None = None
  get_rate: Callable[[float], float] | None = None
  wire_dtype: str = 'float32'
  checkpoint_seconds: float = 30.0
  min_seconds: tuple[float, ...] = ()
  deadlines: _settings.Deadlines = dataclasses.field(
    default_factory=_settings.Deadlines
  )
  origin: float = 0.0
  header: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if self.strategy.refusal_of_processes:
      raise ValueError(self.strategy.refusal_of_processes)
    if self.task.is_streamed:
      raise ValueError(
        f'The task {self.task.name!r} is streamed; nodes need its data.'
      )

  @property
  def way(self) -> str:
    """How the nodes train, as text: the same for all who train together."""
    config = self.header.get('config', {})
    chosen = {name: config.get(name) for name in ('optimizer', 'schedule')}
    strategy = self.strategy.describe()
    return f' {strategy} {self.num_nodes} {json.dumps(chosen, sort_keys=True)}'

  @property
  def averages(self) -> str:
    """What is averaged: 'gradients', or 'weights'."""
    return 'gradients' if self.strategy.averages_gradients else 'weights'

  def make_weights(self) -> tuple[Any, Any]:
    """The first (params, stats)."""
    if self.init is not None:
      return self.init
    return self.task.init(jax.random.key(self.seed, impl='threefry2x32'))

  def make_layout(self) -> engine.Layout:
    """How weights lie in a message."""
    shapes = jax.eval_shape(
      self.task.init, jax.random.key(self.seed, impl='threefry2x32')
    )
    return engine.make_layout(shapes, self.wire_dtype)

  def rest(self, node: int, begin: float) -> None:
    """Waits until the least time of a step has passed.

    Args:
      node: Whose step it is.
      begin: When it began, by `time.perf_counter`.
    """
    if self.min_seconds:
      least = self.min_seconds[min(node, len(self.min_seconds) - 1)]
      time.sleep(max(0.0, least - (time.perf_counter() - begin)))

  def find_rate(self, step: int) -> float | None:
    """The factor of a node's step.

    A node does not know how far the others are; it takes them to be where it
    is itself.

    Args:
      step: The steps that it has made.

    Returns:
      The factor; None if there is no schedule.
    """
    if self.get_rate is None:
      return None
    epochs = engine.count_epochs(
      step,
      num_nodes=self.num_nodes,
      batch=self.task.batch,
      num_samples=self.task.num_samples,
    )
    return self.get_rate(epochs)
