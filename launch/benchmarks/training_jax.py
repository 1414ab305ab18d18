"""Our side of the suite `training`: a worker.

  python -m launch.benchmarks.training_jax NUM_THREADS

The suite starts it, with the environment variables that hold XLA to that many
threads, which must be set before jax is imported.
"""

import functools
import sys
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd.tasks import _cifar10
from jasgd.tasks import _mnist
from launch.benchmarks import training

# Turns until the same stretch of a trace is replayed again.
NUM_TURNS = 8

OPTIMIZER = optax.sgd(training.RATE, training.MOMENTUM)


# All ways to train a model share its task, and so its compiled gradient.
@functools.lru_cache(maxsize=1)
def make_task(model: str, batch: int) -> tasks.Task:
  """The task of `tasks.make_task`, on random images: no data is needed.

  The models come from the private tables of these tasks.
  """
  jax.clear_caches()  # Frees the programs of the batch before.
  examples = training.make_examples(model)
  if model in _mnist.MODELS:
    module, chunk = _mnist.MODELS[model]
    return tasks.from_linen(module, examples, batch=batch, chunk=chunk)
  module, chunk = _cifar10.MODELS[model]
  mean, deviation = _cifar10.measure_pixels(examples['image'])
  return tasks.from_linen(
    module,
    examples,
    batch=batch,
    prepare=_cifar10.make_standardise(mean, deviation),
    chunk=chunk,
  )


class ReplayProgram:
  """Replays a trace with the fast engine: constant delays, or learners."""

  def __init__(self, task: tasks.Task, case: training.Case) -> None:
    """Simulates the trace, and skips its beginning."""
    if case.way == training.ASYNC:
      num_learners = training.NUM_ASYNC_LEARNERS
      protocol = protocols.asynchronous()
      compute = simulation.gamma(1.0, 10.0)
    else:
      num_learners = int(case.way) + 1
      protocol = protocols.constant_delay(int(case.way))
      compute = None
    # At the ends of a trace fewer old weights are needed than in its middle.
    margin = 2 * num_learners
    chunk = case.num_steps
    self._start = -(-margin // chunk) * chunk
    self._stop = self._start + NUM_TURNS * chunk
    trace = simulation.simulate(
      protocol,
      num_workers=num_learners,
      num_gradients=self._stop + margin,
      compute=compute,
      batch=case.batch,
    )
    self._replay = engine.Replay(
      task,
      OPTIMIZER,
      engine.make_plan(trace, num_samples=task.num_samples, batch=task.batch),
      seed=0,
      mode='fast',
      chunk=chunk,
    )
    self._replay.restore(self._start, self._replay.carry)
    self.num_params = count(self._replay.weights[0])

  def advance(self) -> float:
    """Replays one turn."""
    if self._replay.clock >= self._stop:
      self._replay.restore(self._start, self._replay.carry)
    history = self._replay.advance()
    jax.block_until_ready(self._replay.carry)
    return float(history['loss'][-1])


class PlainProgram:
  """SGD without any asynchrony: in one loop, or step by step."""

  def __init__(self, task: tasks.Task, case: training.Case) -> None:
    """Prepares the step."""
    # Copies, because the carry is donated.
    params, stats = jax.tree.map(jnp.copy, task.init(tasks.fold_key(0, 0, 0)))
    self._carry = (params, stats, OPTIMIZER.init(params), jnp.zeros(()))
    self._data = task.data
    self._num_calls = case.num_steps if case.way == training.STEPS else 1
    self._steps_per_call = case.num_steps // self._num_calls
    self._step = 0
    self.num_params = count(params)
    gradient = engine.make_gradient(task)

    def step(index: Any, carry: Any, data: Any) -> Any:
      params, stats, state, _ = carry
      result = gradient(params, stats, data, 0, 0, index)
      updates, state = OPTIMIZER.update(result.gradient, state, params)
      params = optax.apply_updates(params, updates)
      return params, result.stats, state, result.loss

    def advance(carry: Any, first: Any, data: Any) -> Any:
      if case.way == training.STEPS:
        return step(first, carry, data)
      return lax.fori_loop(
        first,
        first + case.num_steps,
        lambda index, carry: step(index, carry, data),
        carry,
      )

    self._advance = jax.jit(advance, donate_argnums=0)

  def advance(self) -> float:
    """Trains for one turn."""
    for _ in range(self._num_calls):
      self._carry = self._advance(self._carry, np.int32(self._step), self._data)
      self._step += self._steps_per_call
    return float(jax.block_until_ready(self._carry)[-1])


def count(params: Any) -> int:
  """The number of weights."""
  return sum(leaf.size for leaf in jax.tree.leaves(params))


def make_program(case: training.Case) -> training.Program:
  """Builds the program of a case."""
  task = make_task(case.model, case.batch)
  if case.way in (training.SCAN, training.STEPS):
    return PlainProgram(task, case)
  return ReplayProgram(task, case)


if __name__ == '__main__':
  training.serve(int(sys.argv[1]), make_program)
