"""A replay under way: chunk by chunk, to be saved and resumed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import tasks
from jasgd.engine import _loop
from jasgd.engine import _memory
from jasgd.engine import _plan
from jasgd.engine import _update
from jasgd.engine import exact
from jasgd.engine import fast

MODES = ('exact', 'fast')


class Replay:
  """A replay under way, chunk by chunk, which can be saved and resumed.

  Attributes:
    plan: What is to be computed.
    clock: Updates made.
    is_diverged: Whether a loss was not finite.
  """

  def __init__(
    self,
    task: tasks.Task,
    server: _update.Update,
    plan: _plan.Plan,
    *,
    seed: int,
    mode: str,
    local_rate: float | None,
    chunk: int,
    init: tuple[Any, Any] | None = None,
    num_parallel: int = 1,
    num_slots: int | None = None,
    wire_dtype: str | None = None,
  ) -> None:
    """Starts at clock 0.

    Args:
      task: What is learned.
      server: What `make_update` gave.
      plan: What is to be computed.
      seed: Of all that is random.
      mode: One of `MODES`.
      local_rate: Of learners that step on their own copies.
      chunk: Updates per `advance`. In 'exact' mode more, if the server made
        several by one call: the weights in between never were.
      init: The first (params, stats); None: those of the seed.
      num_parallel: As in `replay`.
      num_slots: Runs with equal ones share a compilation.
      wire_dtype: What float32 was rounded to in messages, in 'exact' mode;
        None: what the trace says.
    """
    _check(plan, mode, local_rate, num_parallel, task)
    self._task = task
    self.plan = plan
    self.clock = 0
    self.is_diverged = False
    self._is_exact = mode == 'exact'
    self._chunk = chunk
    params, stats = init or task.init(jax.random.key(seed, impl='threefry2x32'))
    params, stats = jax.tree.map(jnp.asarray, (params, stats))
    _memory.check_memory(plan.num_slots + 3 * plan.num_copies, (params, stats))
    rate = 0.0 if local_rate is None else local_rate
    self._engine: exact.ExactEngine | fast.FastEngine
    if mode == 'exact':
      self._engine = exact.ExactEngine(
        task,
        server,
        plan,
        params=params,
        stats=stats,
        seed=seed,
        local_rate=rate,
        wire_dtype=wire_dtype or plan.wire_dtype,
      )
    else:
      self._engine = fast.FastEngine(
        task,
        plan,
        _make_loop(task, server, plan, num_parallel),
        fast.init_carry(server, plan, params, stats, num_slots),
        seed=seed,
        local_rate=rate,
        num_events=_count_events(plan, chunk),
        num_parallel=num_parallel,
      )

  @property
  def state(self) -> _update.ServerState:
    """The server's state after the updates made so far."""
    return self._engine.state

  @property
  def carry(self) -> Any:
    """All that is needed, with `clock`, to go on: a tree of arrays."""
    return self._engine.carry

  @property
  def is_done(self) -> bool:
    """Whether all updates were made, or there is no use in making more."""
    return self.clock >= self.plan.num_updates or self.is_diverged

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    self.clock = clock
    self._engine.carry = carry

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the updates of one chunk.

    Returns:
      The history of these updates, as in `Replayed`. Of a run that diverges it
      ends with the first loss that is not finite.
    """
    start = self.clock
    # Chunks end at multiples, so that a resumed run has the same ones.
    stop = min((start // self._chunk + 1) * self._chunk, self.plan.num_updates)
    if self._is_exact:
      stop = self.plan.find_call_end(stop)
    outputs = self._engine.advance(start, stop)
    history = _summarize(self.plan, start, stop, jax.device_get(outputs))
    history['epoch'] = history['epoch'] / self._task.num_samples
    self.clock = stop
    is_bad = ~np.isfinite(history['loss'])
    if np.any(is_bad):
      self.is_diverged = True
      end = int(np.argmax(is_bad)) + 1
      history = {name: column[:end] for name, column in history.items()}
    elif not _is_finite(self.state.params):  # Nobody computed a loss on them.
      self.is_diverged = True
    return history

  def get_digest(self) -> int:
    """What a server says of such weights, in its trace: see `read_digests`.

    Raises:
      ValueError: if the mode is not 'exact'.
    """
    if not isinstance(self._engine, exact.ExactEngine):
      raise ValueError("Only mode='exact' gives the bits of a server.")
    return self._engine.get_digest()

  def evaluate(self) -> dict[str, Any]:
    """The task's metrics on its test data, now; a row of `evaluations`."""
    last = self.plan.ends[self.clock] - 1
    row = {
      'clock': self.clock,
      'epoch': self.plan.samples[last] / self._task.num_samples,
      'time': self.plan.time[last],
    }
    if self._task.test_data is not None:
      metrics = tasks.evaluate(self._task, self.state.params, self.state.stats)
      row |= {name: float(value) for name, value in metrics.items()}
    return row


def _make_loop(
  task: tasks.Task,
  server: _update.Update,
  plan: _plan.Plan,
  num_parallel: int,
) -> _loop.Loop:
  """The compiled loop for plans like this one."""
  return _loop.make_loop(
    task,
    server,
    is_single=plan.is_single,
    has_copies=plan.has_copies,
    has_local_steps=bool(np.any(plan.num_steps > 1)),
    num_parallel=num_parallel,
  )


def _check(
  plan: _plan.Plan,
  mode: str,
  local_rate: float | None,
  num_parallel: int,
  task: tasks.Task,
) -> None:
  """Raises a ValueError for what cannot be."""
  if mode not in MODES:
    raise ValueError(f'mode must be one of {", ".join(MODES)}, got {mode!r}.')
  if num_parallel < 1:
    raise ValueError(f'num_parallel must be at least 1, got {num_parallel}.')
  has_local_steps = plan.has_copies or bool(np.any(plan.num_steps > 1))
  if has_local_steps and local_rate is None:
    raise ValueError(
      'In this trace learners step on their own copies of the weights: say at '
      'which local_rate.'
    )
  if has_local_steps and task.is_streamed and mode == 'fast':
    raise ValueError(
      f'The task {task.name!r} is streamed, and learners step on their own: '
      "that needs mode='exact'."
    )
  if plan.has_copies and num_parallel > 1:
    raise ValueError(
      'Where learners step on their own copies, num_parallel must be 1, got '
      f'{num_parallel}.'
    )


def _count_events(plan: _plan.Plan, chunk: int) -> int:
  """The most events in a chunk of updates."""
  starts = np.arange(0, plan.num_updates, chunk)
  stops = np.minimum(starts + chunk, plan.num_updates)
  return int((plan.ends[stops] - plan.ends[starts]).max())


def _summarize(
  plan: _plan.Plan, start: int, stop: int, outputs: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """The history of some updates from what their events gave."""
  first, last = plan.ends[start], plan.ends[stop]
  is_push = plan.is_push[first:last]
  starts = plan.ends[start:stop] - first
  sizes = np.add.reduceat(is_push.astype(int), starts)
  ends = plan.ends[start + 1 : stop + 1] - 1

  def average(values: np.ndarray) -> np.ndarray:
    pushed = np.where(is_push, values, 0).astype(float)
    return np.add.reduceat(pushed, starts) / sizes

  return {
    'clock': np.arange(start + 1, stop + 1),
    'epoch': plan.samples[ends],
    'time': plan.time[ends],
    'loss': average(outputs['loss']),
    'staleness': average(plan.staleness[first:last]),
    'factor': average(outputs['factor']),
    'gap': average(outputs['gap']),
  }


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
  """Whether all numbers in a tree are finite."""
  leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(leaves))
