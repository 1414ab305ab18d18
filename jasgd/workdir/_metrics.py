"""Losses and such by clock, as lines of JSON and for TensorBoard."""

from collections.abc import Callable, Mapping
import io
import json
import logging
import os
import pathlib
from typing import Any, TYPE_CHECKING

import numpy as np

from jasgd.workdir import _files
from jasgd.workdir import _paths

if TYPE_CHECKING:
  import tensorboardX

_EVENTS_INTERVAL = 5  # Seconds after which TensorBoard sees an event.

OnMetrics = Callable[[int, dict[str, float]], None]


class MetricsWriter:
  """Appends to the metrics of a run, which can be read all the while.

  A run that is killed and goes on leaves the same file as one that was not: it
  opens the file at the position in its checkpoint, and what is behind that,
  which it will compute again, is cut off. So give it nothing that depends on
  the time of day. A file has one writer at a time.

  Args:
    workdir: The folder of the run, which exists.
    resume_at: The bytes to keep: the `position` that a checkpoint recorded. 0
      begins anew.
    use_tensorboard: Whether to write event files too, with the clock as step.
      It needs tensorboardX; without it, the log says so.
    on_metrics: Called with the clock and the metrics of each line, after it was
      written: for other loggers.

  Raises:
    WorkdirError: if the file is missing or shorter than `resume_at`, or the
      position is not the end of a line.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   with workdir.MetricsWriter(folder, use_tensorboard=False) as writer:
    ...     writer.write(10, {'train/loss': 0.5})
    ...     writer.position
    ...   workdir.read_metrics(folder)['train/loss']
    33
    array([0.5])
  """

  def __init__(
    self,
    workdir: _files.Path,
    *,
    resume_at: int = 0,
    use_tensorboard: bool = True,
    on_metrics: OnMetrics | None = None,
  ) -> None:
    paths = _paths.Workdir(workdir)
    self._path = paths.metrics
    last_clock = _check_position(self._path, resume_at) if resume_at else -1
    self._on_metrics = on_metrics
    self._buffer = bytearray()
    self._num_written = resume_at
    # Unbuffered: after a failed write, our own buffer has just what is missing.
    self._file = io.FileIO(self._path, 'ab')
    self._file.truncate(resume_at)
    self._events = (
      _open_events(paths.tensorboard, last_clock + 1)
      if use_tensorboard
      else None
    )

  @property
  def position(self) -> int:
    """The bytes so far: what a checkpoint records."""
    return self._num_written + len(self._buffer)

  def write(self, clock: int, metrics: Mapping[str, Any]) -> None:
    """Appends a line; it outlives this process from then on.

    Args:
      clock: The server's clock.
      metrics: Numbers by name, such as 'train/loss', written in this order.

    Raises:
      ValueError: if a value is no number, a name is 'clock', or the writer is
        closed.
    """
    self._check_open()
    if 'clock' in metrics:
      raise ValueError("The name 'clock' is taken: it is that of the clock.")
    values = {name: _to_float(name, value) for name, value in metrics.items()}
    line = {'clock': int(clock), **values}
    self._buffer += _files.encode_json(line, 'metrics').encode() + b'\n'
    self._write_buffer()
    if self._events is not None:
      for name, value in values.items():
        self._events.add_scalar(name, value, int(clock))
    if self._on_metrics is not None:
      self._on_metrics(int(clock), values)

  def flush(self, sync: bool = False) -> None:
    """Hands what an earlier `write` could not to the operating system.

    If it fails (the disk is full), calling it again goes on where it stopped.
    Event files are not waited for: tensorboardX writes them on its own.

    Args:
      sync: Whether to wait for the disk, so that the lines outlive the machine:
        do so before a checkpoint records the position.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    self._write_buffer()
    if sync:
      self.sync()

  def sync(self) -> None:
    """Waits for the disk, for what was written. Any thread may call it.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Flushes, and closes the files. Doing so twice is no error."""
    if self._file.closed:
      return
    try:
      self.flush()
    finally:
      self._file.close()
      if self._events is not None:
        self._events.close()

  def __enter__(self) -> 'MetricsWriter':
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()

  def _write_buffer(self) -> None:
    while self._buffer:
      num_written = self._file.write(self._buffer) or 0
      del self._buffer[:num_written]
      self._num_written += num_written

  def _check_open(self) -> None:
    if self._file.closed:
      raise ValueError(f'The writer of {str(self._path)!r} is closed.')


def read_metrics(workdir: _files.Path) -> dict[str, np.ndarray]:
  """The metrics of a run, as columns.

  It can be called while the run goes on, and after a crash: part of a line at
  the end is left out. Lines of one clock are one row: those of a real server,
  and of whoever evaluates its weights later. Of a name that several of them
  have, the last counts.

  Args:
    workdir: The folder of the run.

  Returns:
    'clock', of integers that grow, and for each name an array as long, of
    floats: NaN where a clock does not have it.

  Raises:
    WorkdirError: if there is no such file, or a line of it is damaged.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   with workdir.MetricsWriter(folder, use_tensorboard=False) as writer:
    ...     writer.write(10, {'train/loss': 0.5})
    ...     writer.write(20, {'train/loss': 0.25})
    ...     writer.write(10, {'test/loss': 0.75})
    ...   metrics = workdir.read_metrics(folder)
    >>> metrics['clock'], metrics['train/loss'], metrics['test/loss']
    (array([10, 20]), array([0.5 , 0.25]), array([0.75,  nan]))
  """
  path = _paths.Workdir(workdir).metrics
  try:
    lines = path.read_bytes().split(b'\n')[:-1]  # Behind the last: a part.
  except FileNotFoundError:
    raise _files.WorkdirError(f'There is no file {str(path)!r}.') from None
  rows: dict[int, dict[str, float]] = {}
  names: dict[str, None] = {}  # In the order in which they came.
  for number, line in enumerate(lines, 1):
    clock, values = _parse_line(path, number, line)
    rows.setdefault(clock, {}).update(values)
    names.update(dict.fromkeys(values))
  clocks = sorted(rows)
  nan = float('nan')
  return {
    'clock': np.array(clocks, np.int64),
    **{
      name: np.array([rows[clock].get(name, nan) for clock in clocks])
      for name in names
    },
  }


def find_metrics_position(workdir: _files.Path, clock: int) -> int:
  """Where a run that goes on from a clock goes on in its metrics.

  Args:
    workdir: The folder of the run.
    clock: Lines beyond it, and part of a line at the end, are to be cut off.

  Returns:
    What `MetricsWriter` takes as `resume_at`; 0 if there are no metrics.
  """
  path = _paths.Workdir(workdir).metrics
  if not path.exists():
    return 0
  position = 0
  for number, line in enumerate(path.read_bytes().split(b'\n')[:-1], 1):
    if _parse_line(path, number, line)[0] > clock:
      break
    position += len(line) + 1
  return position


def _parse_line(
  path: pathlib.Path, number: int, line: bytes
) -> tuple[int, dict[str, float]]:
  """The clock of a line and its numbers."""
  try:
    values = json.loads(line)
    clock = values.pop('clock')
    if not isinstance(clock, int):
      raise TypeError(f'the clock is {clock!r}')
    return clock, {name: float(value) for name, value in values.items()}
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise _files.WorkdirError(
      f'Line {number} of {str(path)!r} is damaged: {error!r}.'
    ) from None


def _check_position(path: pathlib.Path, position: int) -> int:
  """Checks that `position` ends a line of the file; gives the line's clock."""
  size = path.stat().st_size if path.exists() else None
  if size is None or size < position:
    found = 'is missing' if size is None else f'has only {size}'
    raise _files.WorkdirError(
      f'{str(path)!r} must have the {position} bytes that the checkpoint '
      f'recorded, but it {found}.'
    )
  with open(path, 'rb') as file:
    lines = file.read(position).split(b'\n')
  if lines.pop():
    raise _files.WorkdirError(
      f'Byte {position} of {str(path)!r} must be the end of a line, and is not.'
    )
  return _parse_line(path, len(lines), lines[-1])[0]


def _open_events(
  folder: pathlib.Path, clock: int
) -> 'tensorboardX.SummaryWriter | None':
  """Event files from `clock` on; None if tensorboardX is not installed."""
  try:
    import tensorboardX
  except ImportError:
    logging.getLogger(__name__).warning(
      'There will be no event files for TensorBoard: tensorboardX is not '
      'installed.'
    )
    return None
  num_files = len(list(folder.iterdir())) if folder.is_dir() else 0
  return tensorboardX.SummaryWriter(
    str(folder),
    # What an earlier process wrote at these clocks will be written again.
    purge_step=clock if num_files else None,
    # Files of the same second would have the same name.
    filename_suffix=f'.{num_files}',
    flush_secs=_EVENTS_INTERVAL,
  )


def _to_float(name: str, value: Any) -> float:
  try:
    return float(value)
  except (TypeError, ValueError):
    raise ValueError(
      f'The metric {name!r} must be a number, got {value!r}.'
    ) from None
