"""How long a gradient takes: the time models of a learner.

The k-th duration of learner l is entry (k, l) of a table that is drawn from a
counter-based generator, so it depends on nothing but the seed, k, l and the
number of learners: not on the protocol, nor on how far a run has come.

The bits are those of numpy's Philox, which are the same on every machine. What
numpy's `Generator` makes of them is the same on every machine too, but a
release of numpy may change a distribution; so a trace's header says which
numpy it was.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jasgd import protocols

# Entries that are drawn at once; part of the table's definition.
_BLOCK = 1 << 14
# In seconds: time always advances, and stays finite.
_SHORTEST, _LONGEST = 1e-12, 1e12

# Whose times a stream of random numbers is for.
LEARNERS, SERVER, FAILURES = range(3)


def make_generator(seed: int, stream: int, block: int) -> np.random.Generator:
  """A generator that depends on nothing but these three numbers."""
  key = np.array([seed, stream], np.uint64)
  return np.random.Generator(
    np.random.Philox(key=key, counter=[0, 0, 0, block])
  )


def check_seed(seed: Any) -> None:
  """Raises a ValueError unless `seed` fits the key that is made of it."""
  if protocols.check_count('seed', seed, 0) >= 2**64:
    raise ValueError(f'seed must be below 2**64, got {seed}.')


def get_rows_per_block(num_learners: int) -> int:
  """How many steps of all learners are drawn at once."""
  return max(1, _BLOCK // num_learners)


class ComputeTime(NamedTuple):
  """A table of durations, drawn block by block.

  Durations are in seconds; shorter ones than 1e-12 and longer ones than 1e12
  are taken for these, so that time always advances, and stays finite.

  Attributes:
    name: How it was made, for headers and errors.
    draw: `(generator, first_step, shape) -> durations`; shape is (steps,
      learners).
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
    num_learners: int,
    stream: int = LEARNERS,
  ) -> np.ndarray:
    """Rows `first_step` to `first_step + num_steps` of the table."""
    rows_per_block = get_rows_per_block(num_learners)
    first = first_step // rows_per_block
    last = -(-(first_step + num_steps) // rows_per_block)
    blocks = []
    for block in range(first, last):
      generator = make_generator(seed, stream, block)
      start = block * rows_per_block
      times = self.draw(generator, start, (rows_per_block, num_learners))
      blocks.append(np.clip(times, _SHORTEST, _LONGEST))
    rows = np.concatenate(blocks) if blocks else np.empty((0, num_learners))
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
  """A recorded list, of one learner or (as rows) of all; used over and over."""
  recording = np.asarray(times, float)
  if recording.size == 0 or recording.ndim > 2:
    raise ValueError(
      'recorded times must be a list or a table with a column per learner, got '
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
        f'{shape[1]} learners.'
      )
    return np.broadcast_to(chosen.reshape(shape[0], -1), shape).copy()

  return ComputeTime('recorded', draw)


def with_speeds(time: ComputeTime, speeds: Sequence[float]) -> ComputeTime:
  """Divides each learner's durations by its own speed."""
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
        f'There are {len(divisors)} speeds, but {shape[1]} learners.'
      )
    return time.draw(generator, first, shape) / divisors

  return ComputeTime(f'with_speeds({time.name}, {list(speeds)})', draw)


def with_slow_minority(
  time: ComputeTime, fraction: float, factor: float
) -> ComputeTime:
  """The last `fraction` of the learners is `factor` times slower."""
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
  """In each `period` of steps a learner is slow for `length` of them.

  Learners take their spells one after another, spread over the period.
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
