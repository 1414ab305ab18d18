"""Replay in one compiled loop per chunk, for simulation and sweeps.

The loop runs over the events of a plan. What varies from run to run (rates,
seed, who read what) is an argument of the compiled program, so that many runs
share one compilation. The versions of the weights that are still needed are the
rows of one buffer, read and written in place.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import tasks
from jasgd.engine import _local
from jasgd.engine import _loop
from jasgd.engine import _plan
from jasgd.engine import _rows
from jasgd.engine import _update


class FastEngine:
  """Executes a plan, a chunk of updates at a time.

  Attributes:
    carry: What is known after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    plan: _plan.Plan,
    loop: _loop.Loop,
    carry: _loop.Carry,
    *,
    seed: int,
    local_rate: float,
    num_events: int,
    num_parallel: int = 1,
  ) -> None:
    """Starts from a carry; chunks have at most `num_events` events."""
    self._task = task
    self._plan = plan
    self._loop = loop
    self.carry = carry
    self._seed = seed
    self._local_rate = local_rate
    self._num_events = num_events
    self._num_parallel = num_parallel
    self._clock = np.cumsum(plan.is_update) - plan.is_update  # At each event.

  @property
  def state(self) -> _update.ServerState:
    """The server's state after the updates made so far."""
    return self.carry.state

  def advance(self, start: int, stop: int) -> dict[str, Any]:
    """Makes the updates `start` to `stop`.

    Args:
      start: How many were made before.
      stop: How many will have been made.

    Returns:
      For each event in between: `loss`, `gap` and `factor`, on the device.
    """
    first, last = self._plan.ends[[start, stop]].tolist()
    windows, num_windows = self._list_windows(first, last)
    self.carry, outputs = self._loop(
      self.carry,
      self._load_events(first, last),
      windows,
      num_windows,
      self._load_data(first, last),
      self._seed,
      self._local_rate,
    )
    return {name: column[: last - first] for name, column in outputs.items()}

  def _load_events(self, first: int, last: int) -> _loop.Events:
    """Some events, as columns that are always of one length."""
    columns = []
    for name in _loop.Events._fields:
      column = getattr(self._plan, name)[first:last]
      padded = np.zeros(self._num_events, column.dtype)
      padded[: last - first] = column
      columns.append(jnp.asarray(padded))
    return _loop.Events(*columns)

  def _load_data(self, first: int, last: int) -> Any:
    """What gradients are computed of; streamed, the minibatches themselves."""
    if not self._task.is_streamed:
      return self._task.data
    rows = [
      self._task.batches(None, self._seed, int(learner), int(step))
      for learner, step in zip(
        self._plan.learner[first:last],
        self._plan.step[first:last],
        strict=True,
      )
    ]
    rows += rows[:1] * (self._num_events - len(rows))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

  def _list_windows(self, first: int, last: int) -> tuple[_loop.Windows, int]:
    """Splits events into runs that read nothing that is made within the run."""
    size = self._num_events
    if self._num_parallel == 1:
      every = jnp.zeros(0, jnp.int32)
      return _loop.Windows(every, every), last - first
    starts, sizes = [], []
    begin = first
    while begin < last:
      end = min(begin + self._num_parallel, last)
      is_late = self._plan.read_clock[begin:end] > self._clock[begin]
      if np.any(is_late):
        end = begin + int(np.argmax(is_late))
      starts.append(begin - first)
      sizes.append(end - begin)
      begin = end
    columns = np.zeros((2, size), np.int32)
    columns[0, : len(starts)], columns[1, : len(sizes)] = starts, sizes
    return _loop.Windows(*map(jnp.asarray, columns)), len(starts)


def init_carry(
  server: _update.Update,
  plan: _plan.Plan,
  params: Any,
  stats: Any,
  num_slots: int | None = None,
) -> _loop.Carry:
  """Where replay starts: every slot and copy holds the first weights.

  Args:
    server: What `make_update` gave.
    plan: What is to be replayed.
    params: The first weights.
    stats: The first statistics.
    num_slots: At least as many as the plan has, to share a compilation.

  Returns:
    The carry.
  """
  return _loop.Carry(
    state=server.init(params, stats),
    slots=_rows.repeat_row((params, stats), num_slots or plan.num_slots),
    copies=_rows.repeat_row(_local.start_copy(params, stats), plan.num_copies),
  )
