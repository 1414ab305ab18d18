"""How long a gradient takes: time models of workers.

The k-th duration of worker w is entry (k, w) of a table that is drawn from a
counter-based generator. It depends on nothing but the seed, k, w and the number
of workers: neither on the strategy, nor on the progress of the run.

The random bits are those of numpy's Philox, which are the same on every
machine. The durations that numpy's `Generator` draws from them are the same on
every machine too, but a release of numpy may change a distribution. Hence the
header of a trace names the release.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jasgd import protocols

_List = Sequence[float] | np.ndarray

# Entries that are drawn at once; part of the table's definition.
_BLOCK = 1 << 14
# In seconds: time always advances, and stays finite.
_SHORTEST, _LONGEST = 1e-12, 1e12

# Streams of random numbers: each is for the times of one kind of owner.
WORKERS, SERVER, FAILURES = range(3)


def make_generator(seed: int, stream: int, block: int) -> np.random.Generator:
  """A generator that is a function of these three numbers."""
  key = np.array([seed, stream], np.uint64)
  return np.random.Generator(
    np.random.Philox(key=key, counter=[0, 0, 0, block])
  )


def check_seed(seed: Any) -> None:
  """Raises a ValueError unless `seed` is a whole number of 64 bits."""
  if protocols.check_count('seed', seed, 0) >= 2**64:
    raise ValueError(f'seed must be below 2**64, got {seed}.')


def get_rows_per_block(num_workers: int) -> int:
  """Number of steps of all workers that are drawn at once."""
  return max(1, _BLOCK // num_workers)


class ComputeTime(NamedTuple):
  """A table of durations, drawn block by block.

  Durations are in seconds, and clipped to the range from 1e-12 to 1e12, so that
  time always advances, and stays finite.

  Attributes:
    name: Name and arguments, for headers and errors.
    draw: `(generator, first_step, shape) -> durations`; shape is (steps,
      workers).
    is_constant: Whether all entries are the same.
  """

  name: str
  draw: Callable[[np.random.Generator, int, tuple[int, int]], np.ndarray]
  is_constant: bool = False

  def table(
    self,
    seed: int,
    first_step: int,
    num_steps: int,
    num_workers: int,
    stream: int = WORKERS,
  ) -> np.ndarray:
    """Rows `first_step` to `first_step + num_steps` of the table."""
    rows_per_block = get_rows_per_block(num_workers)
    first = first_step // rows_per_block
    last = -(-(first_step + num_steps) // rows_per_block)
    blocks = []
    for block in range(first, last):
      generator = make_generator(seed, stream, block)
      start = block * rows_per_block
      times = self.draw(generator, start, (rows_per_block, num_workers))
      blocks.append(np.clip(times, _SHORTEST, _LONGEST))
    rows = np.concatenate(blocks) if blocks else np.empty((0, num_workers))
    start = first_step - first * rows_per_block
    return rows[start : start + num_steps]


def constant(mean: float = 1.0) -> ComputeTime:
  """Every gradient takes the same time.

  Examples:
    >>> from jasgd import simulation
    >>> print(simulation.constant(2.0).table(0, 0, 1, 3))
    [[2. 2. 2.]]
  """
  check_positive('mean', mean)
  return ComputeTime(
    f'constant({mean})',
    lambda generator, first, shape: np.full(shape, float(mean)),
    is_constant=True,
  )


def normal(mean: float = 1.0, std: float = 0.2) -> ComputeTime:
  """Normal, truncated above 0 (Jain et al.: N(1, sigma^2)).

  Draws that are not above 0 are drawn again.
  """
  check_positive('mean', mean)
  check_not_negative('std', std)

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    del first
    times = generator.normal(mean, std, shape)
    while np.any(is_bad := times <= 0):
      times[is_bad] = generator.normal(mean, std, np.count_nonzero(is_bad))
    return times

  return ComputeTime(f'normal({mean}, {std})', draw)


def lognormal(mean: float = 1.0, sigma: float = 0.5) -> ComputeTime:
  """Log-normal with the given mean; sigma is that of the logarithm."""
  check_positive('mean', mean)
  check_not_negative('sigma', sigma)
  location = np.log(mean) - sigma**2 / 2
  return ComputeTime(
    f'lognormal({mean}, {sigma})',
    lambda generator, first, shape: generator.lognormal(location, sigma, shape),
  )


def exponential(mean: float = 1.0) -> ComputeTime:
  """Exponential: the queueing model of Mitliagkas et al."""
  check_positive('mean', mean)
  return ComputeTime(
    f'exponential({mean})',
    lambda generator, first, shape: generator.exponential(mean, shape),
  )


def gamma(mean: float = 1.0, shape: float = 10.0) -> ComputeTime:
  """Gamma with the given mean; a larger `shape` varies less."""
  check_positive('mean', mean)
  check_positive('shape', shape)
  return ComputeTime(
    f'gamma({mean}, {shape})',
    lambda generator, first, size: generator.gamma(shape, mean / shape, size),
  )


def pareto(minimum: float = 1.0, exponent: float = 2.5) -> ComputeTime:
  """Heavy-tailed: P(time > t) = (minimum / t)^exponent."""
  check_positive('minimum', minimum)
  check_positive('exponent', exponent)
  return ComputeTime(
    f'pareto({minimum}, {exponent})',
    lambda generator, first, shape: (
      minimum * (1 + generator.pareto(exponent, shape))
    ),
  )


def recorded(times: Sequence[float] | np.ndarray) -> ComputeTime:
  """Recorded durations, which start again from the first after the last.

  Args:
    times: Durations that all workers have, or a table with a row for each step
      and a column for each worker.

  Returns:
    A time model.

  Raises:
    ValueError: if there are none, or one is not finite and above 0.
  """
  recording = np.asarray(times, float)
  if recording.size == 0 or recording.ndim > 2:
    raise ValueError(
      'recorded times must be a list, or a table with a column per worker, got '
      f'shape {recording.shape}.'
    )
  if not np.all(np.isfinite(recording)) or np.any(recording <= 0):
    raise ValueError('recorded times must be finite and above 0.')

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    del generator
    rows = (first + np.arange(shape[0])) % len(recording)
    chosen = recording[rows]
    if chosen.ndim == 2 and chosen.shape[1] != shape[1]:
      raise ValueError(
        f'recorded times have {chosen.shape[1]} columns, but there are '
        f'{shape[1]} workers: give a column for each.'
      )
    return np.broadcast_to(chosen.reshape(shape[0], -1), shape).copy()

  return ComputeTime('recorded', draw)


def with_speeds(time: ComputeTime, speeds: Sequence[float]) -> ComputeTime:
  """Divides the durations of each worker by a speed of its own."""
  divisors = np.asarray(speeds, float)
  if divisors.ndim != 1 or not np.all((divisors > 0) & (divisors < np.inf)):
    raise ValueError(
      f'speeds must be a list of finite numbers above 0, got {speeds}.'
    )

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    if shape[1] != len(divisors):
      raise ValueError(
        f'There are {len(divisors)} speeds, but {shape[1]} workers: give a '
        'speed for each.'
      )
    return time.draw(generator, first, shape) / divisors

  return ComputeTime(f'with_speeds({time.name}, {list(speeds)})', draw)


def with_slow_minority(
  time: ComputeTime, fraction: float, factor: float
) -> ComputeTime:
  """The last `fraction` of the workers is `factor` times slower."""
  if not 0 <= protocols.check_number('fraction', fraction) <= 1:
    raise ValueError(f'fraction must be in [0, 1], got {fraction}.')
  check_positive('factor', factor)

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    times = time.draw(generator, first, shape)
    num_slow = round(fraction * shape[1])
    times[:, shape[1] - num_slow :] *= factor
    return times

  return ComputeTime(
    f'with_slow_minority({time.name}, {fraction}, {factor})', draw
  )


def with_slow_spells(
  time: ComputeTime, period: int, length: int, factor: float
) -> ComputeTime:
  """In each `period` of steps a worker is slow for `length` of them.

  The spells of the workers are spread evenly over the period.
  """
  protocols.check_count('period', period, 1)
  if protocols.check_count('length', length, 0) > period:
    raise ValueError(f'length must be from 0 to period={period}, got {length}.')
  check_positive('factor', factor)

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    times = time.draw(generator, first, shape)
    steps = first + np.arange(shape[0])[:, None]
    offsets = np.arange(shape[1])[None] * period // shape[1]
    times[(steps + offsets) % period < length] *= factor
    return times

  return ComputeTime(
    f'with_slow_spells({time.name}, {period}, {length}, {factor})', draw
  )


def check_positive(name: str, value: float) -> None:
  """Raises a ValueError unless `value` is finite and above 0."""
  if not 0 < protocols.check_number(name, value) < np.inf:
    raise ValueError(f'{name} must be finite and above 0, got {value}.')


def check_not_negative(name: str, value: float) -> None:
  """Raises a ValueError unless `value` is finite and at least 0."""
  if not 0 <= protocols.check_number(name, value) < np.inf:
    raise ValueError(f'{name} must be finite and at least 0, got {value}.')


def resampled(
  times: Sequence[_List],
  firsts: Sequence[_List] | np.ndarray = (),
  num_steps: int = 1,
) -> ComputeTime:
  """Draws the durations of each worker from a list of its own, with repetition.

  Args:
    times: Lists of durations, one for each worker, of any lengths.
    firsts: Rows with an entry for each worker: the durations of the first
      steps, which are not drawn, since a worker may compile in them.
    num_steps: Number of consecutive steps of a worker that take the same drawn
      duration: the steps of a push, if pushes were measured.

  Returns:
    A time model for as many workers as there are lists.

  Raises:
    ValueError: if a list is empty, a duration is not finite and above 0, a row
      of `firsts` lacks entries, or `num_steps` is below 1.

  Examples:
    >>> from jasgd import simulation
    >>> time = simulation.resampled([[1.0], [2.0, 2.0, 2.0]], [[5.0, 6.0]])
    >>> print(time.table(seed=0, first_step=0, num_steps=3, num_workers=2))
    [[5. 6.]
     [1. 2.]
     [1. 2.]]
  """
  protocols.check_count('num_steps', num_steps, 1)
  lists = [np.asarray(each, float) for each in times]
  if not lists or any(each.ndim != 1 or not each.size for each in lists):
    raise ValueError(
      'resampled times must be a list of durations for each worker, none of '
      f'them empty, got shapes {[each.shape for each in lists]}.'
    )
  rows = np.asarray(firsts, float) if len(firsts) else np.zeros((0, len(lists)))
  if rows.ndim != 2 or rows.shape[1] != len(lists):
    raise ValueError(
      f'firsts must be rows of {len(lists)} entries, one per worker, got '
      f'shape {rows.shape}.'
    )
  pool = np.concatenate(lists)
  for values in (pool, rows):
    if not np.all(np.isfinite(values) & (values > 0)):
      raise ValueError('resampled times must be finite and above 0.')
  counts = np.array([each.size for each in lists])
  offsets = np.cumsum(counts) - counts

  def draw(
    generator: np.random.Generator, first: int, shape: tuple[int, int]
  ) -> np.ndarray:
    if shape[1] != len(lists):
      raise ValueError(
        f'resampled times are of {len(lists)} workers, but there are '
        f'{shape[1]}: give a list for each.'
      )
    drawn = pool[offsets + (generator.random(shape) * counts).astype(int)]
    if num_steps > 1:
      steps = first + np.arange(shape[0])
      drawn = drawn[(steps - steps % num_steps - first).clip(0)]
    given = rows[first : first + shape[0]]
    drawn[: len(given)] = given
    return drawn

  return ComputeTime('resampled', draw)


# --- Durations one by one, for the event loops.

# Bytes of the table that are kept. If a worker is so slow that its block was
# dropped, the block is drawn again, which costs time but no memory.
_KEPT_BYTES = 1 << 26


class Durations:
  """Durations one by one: each worker reads its column of a table."""

  def __init__(self, compute: ComputeTime, seed: int, num_workers: int) -> None:
    """Starts every worker at step 0."""
    self._compute = compute
    self._seed = seed
    self._num_workers = num_workers
    self._num_rows = get_rows_per_block(num_workers)
    block_bytes = 8 * self._num_rows * num_workers
    self._num_kept = max(2, _KEPT_BYTES // block_bytes)
    self._blocks: collections.OrderedDict[int, np.ndarray] = (
      collections.OrderedDict()
    )
    self._next_block = [0] * num_workers
    # The rest of each worker's block, in reverse: the next duration is last.
    self._left: list[list[float]] = [[]] * num_workers

  def take(self, worker: int) -> float:
    """The worker's next duration."""
    left = self._left[worker]
    if not left:
      left = self._left[worker] = self._take_column(worker)
    return left.pop()

  def _take_column(self, worker: int) -> list[float]:
    """The worker's durations in its next block, from the last to the first."""
    index = self._next_block[worker]
    self._next_block[worker] = index + 1
    block = self._blocks.get(index)
    if block is None:
      block = self._compute.table(
        self._seed, index * self._num_rows, self._num_rows, self._num_workers
      )
      self._blocks[index] = block
      if len(self._blocks) > self._num_kept:
        self._blocks.popitem(last=False)
    return block[::-1, worker].tolist()
