"""Simulated nodes of the suite `gossip`, and plain steps: a worker.

  python -m launch.benchmarks.gossip_nodes

A line on its stdin is `TASK NUM_NODES NUM_STEPS PROGRAM`, where the program is
a strategy or one of `PLAIN`, and the steps are those of all nodes together. The
program is run once, and the answer is JSON: `seconds` of CPU time. What was
compiled is kept until another task is asked for.

The parent sets the variables that hold XLA to one thread, before jax is
imported. So CPU time is time on the wall if nothing else runs, and hardly
changes if something does.
"""

from collections.abc import Callable
import functools
import math
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from jasgd import tasks
from launch.benchmarks import gossip_answers
from launch.benchmarks import serving
from launch.benchmarks import training_jax

BATCH = 16
# A loop in Python over a compiled step; the same step in one compiled loop; and
# our engine with a node that is alone.
BARE_STEPS, BARE_LOOP, ONE_NODE = 'bare steps', 'bare loop', 'one node'
PLAIN = (BARE_STEPS, BARE_LOOP, ONE_NODE)
STRATEGIES: dict[str, gossip.Strategy] = {
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(),
  'elastic': gossip.Elastic(),
  'all-reduce': gossip.AllReduce(),
}
_OPTIMIZER = optax.sgd(1e-3, momentum=0.9)


# LeNet-5 on random images of the size of MNIST's, a small LeNet on the digits,
# and, to see if it runs, what is compiled in no time.
_TASKS: dict[str, Callable[[], tasks.Task]] = {
  'mnist': lambda: training_jax.make_task('lenet', BATCH),
  'digits': lambda: tasks.make_task('digits', model='lenet', batch=BATCH),
  'tiny': lambda: tasks.make_task('logistic', batch=BATCH),
}
TASKS = tuple(_TASKS)


class BareProgram:
  """Momentum SGD as anybody would write it, without our engine."""

  def __init__(self, task: tasks.Task, num_steps: int, is_loop: bool) -> None:
    """Prepares the step, or the loop over all of them."""
    self._weights = task.init(tasks.fold_key(0, 0, 0))
    self._examples = task.data['examples']
    self._rows = np.random.default_rng(0).integers(
      task.num_samples, size=(num_steps, BATCH), dtype=np.int32
    )
    self._is_loop = is_loop
    differentiate = jax.value_and_grad(task.loss, has_aux=True)
    key = tasks.fold_key(0, 0, 0)

    def step(carry: Any, rows: Any, examples: Any) -> tuple[Any, Any]:
      params, stats, state = carry
      batch = jax.tree.map(lambda leaf: leaf[rows], examples)
      (loss, stats), grads = differentiate(params, stats, batch, key)
      updates, state = _OPTIMIZER.update(grads, state, params)
      return (optax.apply_updates(params, updates), stats, state), loss

    def loop(carry: Any, rows: Any, examples: Any) -> tuple[Any, Any]:
      carry, losses = lax.scan(
        lambda carry, rows: step(carry, rows, examples), carry, rows
      )
      return carry, losses[-1]

    self._run = jax.jit(loop if is_loop else step, donate_argnums=0)

  def run(self) -> float:
    """Trains from the first weights; gives the last loss."""
    params, stats = jax.tree.map(jnp.copy, self._weights)
    carry, loss = (params, stats, _OPTIMIZER.init(params)), None
    for rows in [self._rows] if self._is_loop else self._rows:
      carry, loss = self._run(carry, rows, self._examples)
    jax.block_until_ready(carry)
    assert loss is not None  # There is at least one step.
    return float(loss)


class NodesProgram:
  """A simulation of nodes, and the replay of its trace."""

  def __init__(
    self,
    task: tasks.Task,
    strategy: gossip.Strategy,
    num_nodes: int,
    num_steps: int,
  ) -> None:
    """Prepares the weights, which all nodes start from."""
    self._task = task
    self._strategy = strategy
    self._num_nodes = num_nodes
    self._num_steps = num_steps
    self._weights = task.init(tasks.fold_key(0, 0, 0))

  def run(self) -> float:
    """All of it: who does what when, what to compute, computing it."""
    trace = simulation.simulate_nodes(
      self._strategy,
      num_nodes=self._num_nodes,
      num_steps=self._num_steps // self._num_nodes,
      compute=simulation.normal(1.0, 0.2),
    )
    plan = engine.make_plan(
      trace, num_samples=self._task.num_samples, batch=BATCH
    )
    replay = engine.Replay(
      self._task,
      _OPTIMIZER,
      plan,
      chunk=plan.num_updates,
      init=self._weights,
    )
    losses = replay.advance()['loss']
    jax.block_until_ready(replay.carry)
    return float(losses[-1])


@functools.lru_cache(maxsize=1)
def _make_task(name: str) -> tasks.Task:
  """A task; what was compiled for another one is forgotten."""
  jax.clear_caches()
  _make_program.cache_clear()
  return _TASKS[name]()


@functools.cache
def _make_program(
  task: str, num_nodes: int, num_steps: int, program: str
) -> BareProgram | NodesProgram:
  """A program, the same each time."""
  made = _make_task(task)
  if program in STRATEGIES:
    return NodesProgram(made, STRATEGIES[program], num_nodes, num_steps)
  if program == ONE_NODE:
    alone = gossip.Pull(period=num_steps + 1)
    return NodesProgram(made, alone, 1, num_steps)
  return BareProgram(made, num_steps, is_loop=program == BARE_LOOP)


def answer(line: str) -> dict[str, float]:
  """Runs what a line asks for.

  Args:
    line: As above.

  Returns:
    The seconds of CPU time that it took.

  Raises:
    ValueError: if the line cannot be read.
    FloatingPointError: if the loss was not finite.
  """
  task, num_nodes, num_steps, *words = line.split()
  program = ' '.join(words)
  if task not in _TASKS or program not in (*PLAIN, *STRATEGIES):
    raise ValueError(
      f'A line is "task nodes steps program", with a task of '
      f'{", ".join(_TASKS)}, got {line!r}.'
    )
  count = int(num_nodes) if program in STRATEGIES else 1
  chosen = _make_program(task, count, int(num_steps), program)
  begin = time.process_time()
  loss = chosen.run()
  seconds = time.process_time() - begin
  if not math.isfinite(loss):
    raise FloatingPointError(f'The loss must stay finite, got {loss}.')
  return {'seconds': seconds}


def main() -> None:
  """Answers each line, until there are no more."""
  parent = gossip_answers.Parent()
  serving.pin(1)
  while line := parent.take():
    parent.answer(answer(line))


if __name__ == '__main__':
  main()
