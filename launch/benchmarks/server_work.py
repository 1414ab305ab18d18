"""The work of the suite `server`, the same for all who serve weights.

Each round a learner sends a gradient that is in its private memory, and the
clock of the weights that it has. The server updates,

  v <- v / 2 + g,    w <- w - RATE v,    clock <- clock + 1,

and answers with all weights and their clock; the learner gets them into a
private array and checks them. Every g is 1/2 and v begins as 1, so that v stays
1 and each weight is -RATE x clock, without rounding: weights that are torn, old
or lost are seen. Nothing is computed besides, so that only the serving counts.

The learners share a budget of updates, and go on until the server's clock says
that it is used up: all of them are busy from the first to the last update. What
is still on its way then is answered, and not applied.

All processes of all sides import this, so that it needs nothing but numpy.
"""

import json
import pathlib
import signal
import statistics
import time
from typing import Any, NamedTuple

import numpy as np

RATE = 2.0**-10
MOMENTUM = 0.5
GRADIENT = 0.5
FIRST_VELOCITY = 1.0

# Up to here every -RATE x clock is a float32.
MAX_UPDATES = 2**24

# Bytes in front of the values: values stay aligned.
_HEADER = 64


class Work(NamedTuple):
  """How much of it; made by the parent, and told to every process."""

  num_parameters: int
  num_learners: int
  num_rounds: int  # Per learner, on average; without those that warm up.
  folder: str  # Takes the reports of the processes.
  timeout: float  # Seconds that a process may live.

  @property
  def num_warm_up(self) -> int:
    """Updates before the first that counts."""
    return self.num_learners * max(3, self.num_rounds // 10)

  @property
  def num_updates(self) -> int:
    """The budget, with those that warm up."""
    return self.num_warm_up + self.num_learners * self.num_rounds


def check_work(work: Work) -> None:
  """Raises a ValueError unless the work can be done and checked."""
  for name in ('num_parameters', 'num_learners', 'num_rounds'):
    if getattr(work, name) < 1:
      raise ValueError(f'{name} must be at least 1, got {getattr(work, name)}.')
  if work.num_updates > MAX_UPDATES:
    raise ValueError(
      f'There must be at most {MAX_UPDATES} updates, for weights to be exact, '
      f'got {work.num_updates}.'
    )


def start_process(line: str) -> Work:
  """What a process is to do, and an end to it whatever happens.

  Args:
    line: JSON, from the parent.

  Returns:
    The work.
  """
  work = Work(**json.loads(line))
  # Without a handler the signal ends a process wherever it waits, in C too.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, work.timeout)
  return work


def write_report(work: Work, name: str, report: dict[str, Any]) -> None:
  """Leaves what a process has to say for its parent."""
  path = pathlib.Path(work.folder) / f'{name}.json'
  path.write_text(json.dumps(report))


class Message:
  """A clock and all values, in one kept buffer that is sent as it is."""

  def __init__(self, num_parameters: int) -> None:
    """Makes one with zeros everywhere."""
    self.buffer = np.zeros(_HEADER + 4 * num_parameters, np.uint8)
    self.values = self.buffer[_HEADER:].view(np.float32)
    self._header = self.buffer[:8].view(np.int64)

  @property
  def clock(self) -> int:
    """The clock of the weights, or of those that a gradient is from."""
    return int(self._header[0])

  @clock.setter
  def clock(self, clock: int) -> None:
    self._header[0] = clock


class Log:
  """Counts updates; measures those after the warm-up."""

  def __init__(self, work: Work) -> None:
    """Begins at clock 0."""
    self.clock = 0
    self._work = work
    self._staleness: list[int] = []
    self._begin = self._end = (0.0, 0.0)

  @property
  def is_over(self) -> bool:
    """Whether the budget is used up."""
    return self.clock >= self._work.num_updates

  def add(self, read_clock: int) -> None:
    """Notes that an update was just done, with a gradient of `read_clock`."""
    self._staleness.append(self.clock - read_clock)
    self.clock += 1
    # From update to update, so that there are as many as are counted.
    if self.clock == self._work.num_warm_up:
      self._begin = time.perf_counter(), time.process_time()
    elif self.is_over:
      self._end = time.perf_counter(), time.process_time()

  def make_report(self) -> dict[str, float]:
    """What was measured."""
    staleness = self._staleness[self._work.num_warm_up :]
    seconds, cpu = (
      end - begin for begin, end in zip(self._begin, self._end, strict=True)
    )
    return {
      'updates_per_second': len(staleness) / seconds,
      'mean_staleness': statistics.fmean(staleness),
      'max_staleness': max(staleness),
      'cpu_per_update': cpu / len(staleness),
      'seconds': seconds,
    }


class Server:
  """The server's state and update, in numpy."""

  def __init__(self, work: Work) -> None:
    """Begins with weights of zero."""
    self.log = Log(work)
    self.answer = Message(work.num_parameters)
    self._velocity = np.full(work.num_parameters, FIRST_VELOCITY, np.float32)
    self._step = np.zeros_like(self._velocity)

  def update(self, push: Message) -> None:
    """Applies a gradient; afterwards `answer` is what its learner gets."""
    if self.log.is_over:
      return
    velocity, weights = self._velocity, self.answer.values
    velocity *= MOMENTUM
    velocity += push.values
    np.multiply(velocity, RATE, out=self._step)
    weights -= self._step
    self.log.add(push.clock)
    self.answer.clock = self.log.clock


class Checker:
  """A learner's look at the weights that it got."""

  def __init__(self, work: Work) -> None:
    """Nothing was wrong so far."""
    self._is_right = np.zeros(work.num_parameters, bool)
    self._num_rounds = 0
    self._num_errors = 0

  def check(self, weights: np.ndarray, clock: int) -> None:
    """Counts weights of which any is not that of the clock."""
    np.equal(weights, np.float32(-RATE * clock), out=self._is_right)
    self._num_rounds += 1
    self._num_errors += not np.all(self._is_right)

  def make_report(self) -> dict[str, int]:
    """How often it was asked, and how often something was wrong."""
    return {'num_rounds': self._num_rounds, 'num_errors': self._num_errors}


def make_gradient(work: Work) -> np.ndarray:
  """A learner's private gradient."""
  return np.full(work.num_parameters, GRADIENT, np.float32)
