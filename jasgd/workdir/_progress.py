"""One line of progress: clock, rate, time left, staleness, losses."""

from collections.abc import Callable, Iterator
import contextlib
import shutil
import sys
import time
from typing import TextIO

_TERMINAL_INTERVAL = 0.2  # Seconds.
_LOG_INTERVAL = 5.0


class Progress:
  """Shows the clock, the rate, the time left, the staleness and the losses.

  Nodes without a server have steps instead of a clock, and ages instead of a
  staleness. On a terminal the line is rewritten in place; elsewhere, as in the
  log of a cluster, a new line is printed every few seconds:

      clock 2500/10000 25%  410/s  ETA 18s  staleness 3.2 (max 9)  loss 0.41
      steps 2500/10000 25%  410/s  ETA 18s  age 1.3 (max 4)  loss 0.41

  The rate is the mean since the start, without the time in `paused`
  (compilation, evaluation, checkpoints).

  Args:
    total: Clock at which the run ends.
    start: Clock at which the run starts or resumes.
    stream: Stream to write to; standard error if None.
    interval: Seconds between two lines; if None, 0.2 on a terminal and 5
      elsewhere.
    now: Function that returns the time in seconds.
    unit: Name of the counted unit, 'clock' or 'steps'.

  Raises:
    ValueError: if not 0 <= start <= total.

  Examples:
    >>> import sys
    >>> from jasgd import workdir
    >>> times = iter([0.0, 2.0, 4.0])
    >>> with workdir.Progress(
    ...   100, stream=sys.stdout, now=lambda: next(times)
    ... ) as progress:
    ...   progress.update(50, staleness=3.2, max_staleness=9, loss=0.41)
    clock 50/100 50%  25/s  ETA 2s  staleness 3.2 (max 9)  loss 0.41
    clock 50/100 50%  12.5/s  took 4s  staleness 3.2 (max 9)  loss 0.41
  """

  def __init__(
    self,
    total: int,
    *,
    start: int = 0,
    stream: TextIO | None = None,
    interval: float | None = None,
    now: Callable[[], float] = time.monotonic,
    unit: str = 'clock',
  ) -> None:
    if not 0 <= start <= total:
      raise ValueError(
        f'start must be between 0 and total, got {start} and {total}.'
      )
    self._total = total
    self._start = start
    self._clock = start
    self._stream = sys.stderr if stream is None else stream
    self._is_terminal = self._stream.isatty()
    if interval is None:
      interval = _TERMINAL_INTERVAL if self._is_terminal else _LOG_INTERVAL
    self._interval = interval
    self._now = now
    self._unit = unit
    self._begin = now()
    self._paused_time = 0.0
    self._paused_since: float | None = None
    self._last_shown = -float('inf')
    self._num_shown = 0  # Characters on the terminal's line.
    self._tail = ''
    self._is_closed = False

  def update(
    self,
    clock: int,
    *,
    staleness: float | None = None,
    max_staleness: float | None = None,
    age: float | None = None,
    max_age: float | None = None,
    **values: float,
  ) -> None:
    """Stores the state of the run; shows it if the last line is old enough.

    Args:
      clock: Clock of the server, or number of steps of all nodes.
      staleness: Mean staleness since the last update.
      max_staleness: Largest staleness since the last update.
      age: Mean age of the weights that nodes mixed since the last update.
      max_age: Largest age since the last update.
      **values: Further numbers, shown by name: loss, acc.
    """
    self._clock = clock
    parts = []
    for name, mean, largest in (
      ('staleness', staleness, max_staleness),
      ('age', age, max_age),
    ):
      if mean is not None:
        parts.append(f'{name} {mean:.1f}')
        if largest is not None:
          parts[-1] += f' (max {largest:.0f})'
    parts += [f'{name} {value:.3g}' for name, value in values.items()]
    self._tail = ''.join(f'  {part}' for part in parts)
    time = self._now()
    if time - self._last_shown >= self._interval:
      self._last_shown = time
      self._show(self._format(time, is_last=False))

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Excludes the time inside the block from the rate."""
    if self._paused_since is not None:  # The outer block excludes it.
      yield
      return
    self._paused_since = self._now()
    try:
      yield
    finally:
      self._paused_time += self._now() - self._paused_since
      self._paused_since = None

  def close(self) -> None:
    """Shows a last line with the total time. A second call does nothing."""
    if self._is_closed:
      return
    self._is_closed = True
    self._show(self._format(self._now(), is_last=True))
    if self._is_terminal:
      self._stream.write('\n')
      self._stream.flush()

  def __enter__(self) -> 'Progress':
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _format(self, time: float, is_last: bool) -> str:
    paused_time = self._paused_time
    if self._paused_since is not None:
      paused_time += time - self._paused_since
    active_time = time - self._begin - paused_time
    done = self._clock - self._start
    rate = done / active_time if done > 0 and active_time > 0 else None
    percent = 100 * self._clock // self._total if self._total else 100
    if is_last:
      when = f'took {format_duration(time - self._begin)}'
    elif rate is None:
      when = 'ETA ?'
    else:
      left = max(self._total - self._clock, 0)
      when = f'ETA {format_duration(left / rate)}'
    return (
      f'{self._unit} {self._clock}/{self._total} {percent}%  '
      f'{_format_rate(rate)}  {when}{self._tail}'
    )

  def _show(self, line: str) -> None:
    if self._is_terminal:
      # A line that wraps could not be rewritten.
      line = line[: shutil.get_terminal_size().columns - 1]
      padding = ' ' * (self._num_shown - len(line))
      self._stream.write(f'\r{line}{padding}')
      self._num_shown = len(line)
    else:
      self._stream.write(f'{line}\n')
    self._stream.flush()


def format_duration(seconds: float) -> str:
  """Formats a duration: 18s, 3m20s, 2h05m, 1d03h."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  minutes, seconds = divmod(seconds, 60)
  if minutes < 60:
    return f'{minutes}m{seconds:02d}s'
  hours, minutes = divmod(minutes, 60)
  if hours < 24:
    return f'{hours}h{minutes:02d}m'
  days, hours = divmod(hours, 24)
  return f'{days}d{hours:02d}h'


def _format_rate(rate: float | None) -> str:
  if rate is None:
    return '?/s'
  return f'{rate:.0f}/s' if rate >= 100 else f'{rate:.3g}/s'
