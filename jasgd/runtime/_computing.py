"""A learner's computing: gradients of a task, at weights in a message."""

import time
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import tasks
from jasgd.runtime import _messages


class Computing:
  """Computes gradients, and takes no less time than it is told to.

  Args:
    task: What is learned.
    seed: Of the run.
    wire_dtype: What float32 is rounded to in messages.
    num_devices: Over how many devices a minibatch is spread.
    min_seconds: Of a gradient, by the learner's number; see `Learner`.

  Attributes:
    layout: Of weights and gradients in messages.
    functions: The compiled functions.
    learner: The learner's number.
    local_rate: At which it steps on its own copy.
  """

  def __init__(
    self,
    task: tasks.Task,
    *,
    seed: int,
    wire_dtype: str,
    num_devices: int,
    min_seconds: tuple[float, ...],
  ) -> None:
    self._task = task
    self._seed = seed
    self._min_seconds = min_seconds
    weights = jax.eval_shape(
      task.init, jax.random.key(seed, impl='threefry2x32')
    )
    self.layout = engine.make_layout(weights, wire_dtype)
    self.functions = engine.make_learner(task, self.layout, num_devices)
    self._data = engine.place_data(task.data, num_devices)
    self.learner = -1
    self.local_rate = 1.0

  def warm_up(self) -> None:
    """Compiles, so that a learner's first gradient takes no longer."""
    buffer = np.zeros(self.layout.size, np.uint8)
    data = self._data
    if self._task.is_streamed:
      data = self._task.batches(None, self._seed, 0, 0)
    parts = self.layout.view(buffer)
    push = self.functions.compute(parts, data, self._seed, 0, 0)
    jax.block_until_ready(push)

  def view(self, weights: _messages.Message) -> engine.BufferViews:
    """The weights in a message."""
    assert weights.payload is not None  # The server has sent weights.
    return self.layout.view(weights.payload)

  def compute(
    self, weights: _messages.Message, step: int, num_steps: int
  ) -> tuple[engine.Push, float]:
    """What a learner pushes, and how long that took.

    Args:
      weights: Where to start.
      step: The first minibatch.
      num_steps: How many there are in a push; several are steps on a copy.

    Returns:
      The push and the seconds.
    """
    begin = time.perf_counter()
    parts = self.view(weights)
    if num_steps == 1:
      push = self.functions.compute(parts, *self._locate(step))
    else:
      copy = self.functions.start_copy(parts)
      copy = self.step(copy, step, num_steps, weights.rate)
      push, _ = self.functions.push_copy(copy)
    jax.block_until_ready(push)
    return push, self.rest(begin, num_steps)

  def step(
    self, copy: engine.LocalReplica, first: int, num_steps: int, rate: float
  ) -> engine.LocalReplica:
    """Some steps on a copy of the weights."""
    rate = self.local_rate * rate
    for step in range(first, first + num_steps):
      copy = self.functions.step_copy(copy, *self._locate(step), rate)
    return copy

  def rest(self, begin: float, num_steps: int) -> float:
    """Waits until the least time has passed; gives the time that did."""
    seconds = time.perf_counter() - begin
    if self._min_seconds:
      index = min(self.learner, len(self._min_seconds) - 1)
      time.sleep(max(0.0, num_steps * self._min_seconds[index] - seconds))
      seconds = time.perf_counter() - begin
    return seconds

  def _locate(self, step: int) -> tuple[Any, int, int, int]:
    """(data, seed, learner, step) of a minibatch."""
    data = self._data
    if self._task.is_streamed:
      data = self._task.batches(None, self._seed, self.learner, step)
    return data, self._seed, self.learner, step
