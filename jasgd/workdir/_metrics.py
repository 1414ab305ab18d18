"""Metrics of a run by clock, as lines of JSON and for TensorBoard."""

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

_EVENTS_INTERVAL = 5  # Seconds between two writes of events for TensorBoard.

OnMetrics = Callable[[int, dict[str, float]], None]


class MetricsWriter:
  """Appends to the metrics of a run; they can be read at the same time.

  A run that was killed and resumed leaves the same file as one that was not:
  the writer opens the file at the position in the checkpoint, and cuts off the
  lines after it, which the run writes again. So metrics must not depend on the
  time of day. A file has one writer at a time.

  Args:
    workdir: Folder of the run; it exists.
    resume_at: Number of bytes to keep: the `position` in a checkpoint. 0 starts
      a new file.
    use_tensorboard: Whether to write event files too, with the clock as step.
      Without tensorboardX a warning is logged instead.
    on_metrics: Function `on_metrics(clock, metrics)` that is called after each
      line was written, for other loggers.

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
    # Unbuffered: after a failed write, `_buffer` holds exactly the bytes that
    # are not in the file yet.
    self._file = io.FileIO(self._path, 'ab')
    self._file.truncate(resume_at)
    self._events = (
      _open_events(paths.tensorboard, last_clock + 1)
      if use_tensorboard
      else None
    )

  @property
  def position(self) -> int:
    """Number of bytes written, which a checkpoint stores."""
    return self._num_written + len(self._buffer)

  def write(self, clock: int, metrics: Mapping[str, Any]) -> None:
    """Appends a line. Once this returns, a kill does not lose the line.

    Args:
      clock: Clock of the metrics.
      metrics: Numbers by name, such as 'train/loss', written in this order.

    Raises:
      ValueError: if a value is no number, a name is 'clock', or the writer is
        closed.
    """
    self._check_open()
    if 'clock' in metrics:
      raise ValueError("A metric must not be called 'clock'.")
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
    """Writes bytes that an earlier, failed `write` has left.

    If it fails (the disk is full), a further call continues where it stopped.
    Event files are not included: tensorboardX writes them in a thread.

    Args:
      sync: Whether to wait for the disk, so that a power cut loses no line. Do
        so before a checkpoint stores the position.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    self._write_buffer()
    if sync:
      self.sync()

  def sync(self) -> None:
    """Waits until the written lines are on the disk. Any thread may call it.

    Raises:
      ValueError: if the writer is closed.
    """
    self._check_open()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Flushes and closes the files. A second call does nothing."""
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
  """Reads the metrics of a run, as columns.

  It can be called during a run and after a crash: an incomplete last line is
  ignored. All lines of one clock become one row; if a name occurs in several of
  them, the last value counts.

  Args:
    workdir: Folder of the run.

  Returns:
    'clock', ascending integers, and for each name an array of floats of the
    same length, with NaN where a clock has no value.

  Raises:
    WorkdirError: if the file is missing, or a line is damaged.

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
    lines = path.read_bytes().split(b'\n')[:-1]  # No incomplete last line.
  except FileNotFoundError:
    raise _files.WorkdirError(f'There is no file {str(path)!r}.') from None
  rows: dict[int, dict[str, float]] = {}
  names: dict[str, None] = {}  # In the order of their first occurrence.
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
  """Finds the position in the metrics of a run that resumes from a clock.

  Args:
    workdir: Folder of the run.
    clock: Clock of the last line to keep. Later lines, and an incomplete line
      at the end, are to be cut off.

  Returns:
    The `resume_at` of a `MetricsWriter`; 0 if there are no metrics.
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
  """Clock and metrics of a line."""
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
  """Checks that `position` ends a line, and returns the clock of the line."""
  size = path.stat().st_size if path.exists() else None
  if size is None or size < position:
    found = 'is missing' if size is None else f'has only {size}'
    raise _files.WorkdirError(
      f'{str(path)!r} must have the {position} bytes that the checkpoint '
      f'stores, but it {found}.'
    )
  with open(path, 'rb') as file:
    lines = file.read(position).split(b'\n')
  if lines.pop():
    raise _files.WorkdirError(
      f'Byte {position} of {str(path)!r} must be the end of a line.'
    )
  return _parse_line(path, len(lines), lines[-1])[0]


def _open_events(
  folder: pathlib.Path, clock: int
) -> 'tensorboardX.SummaryWriter | None':
  """Opens event files from `clock` on; None without tensorboardX."""
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
    # Events of an earlier process from this clock on will be written again.
    purge_step=clock if num_files else None,
    # Otherwise two files of the same second would have the same name.
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
