"""Locks of workdirs, which end with the process that holds them."""

from collections.abc import Iterator
import contextlib
import fcntl
import math
import os
import time
from typing import TextIO

from jasgd.workdir import _files
from jasgd.workdir import _paths

# Seconds between two attempts.
_INTERVAL = 0.1


@contextlib.contextmanager
def hold_workdir(
  workdir: _files.Path, role: str, *, patience: float = 0.0
) -> Iterator[None]:
  """Makes this process the only one with a role in a workdir.

  Args:
    workdir: Folder of a run; it is created if it is missing.
    role: Name of the role, such as 'server'. Roles do not exclude each other.
    patience: Seconds to wait for a process that has the role and may be ending.

  Raises:
    WorkdirError: if another process has the role.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   with workdir.hold_workdir(folder, 'server'):
    ...     try:
    ...       with workdir.hold_workdir(folder, 'server'):
    ...         pass
    ...     except workdir.WorkdirError as error:
    ...       print(str(error).partition(': ')[2].partition(' (')[0])
    there is a server already
  """
  root = _paths.Workdir(workdir).root
  root.mkdir(parents=True, exist_ok=True)
  path = root / f'{role}.lock'
  with lock_file(path, patience=patience) as is_held:
    if not is_held:
      raise _files.WorkdirError(
        f'The workdir {os.fspath(workdir)!r} is in use: there is a {role} '
        f'already (process {path.read_text() or "?"}). End it first, or give '
        'another workdir.'
      )
    path.write_text(str(os.getpid()))
    yield


def is_held(workdir: _files.Path, role: str) -> bool:
  """Whether a process has a role in a workdir.

  Args:
    workdir: Folder of a run.
    role: Name of the role, as in `hold_workdir`.

  Returns:
    Whether `hold_workdir` would have to wait.
  """
  path = _paths.Workdir(workdir).root / f'{role}.lock'
  if not path.exists():
    return False
  with lock_file(path, patience=0.0) as is_free:
    return not is_free


@contextlib.contextmanager
def lock_file(
  path: _files.Path, *, patience: float = math.inf
) -> Iterator[bool]:
  """Holds a lock, which the end of the process releases in any case.

  Args:
    path: Path of the lock's file; it is created, and not removed.
    patience: Seconds to wait for another process that holds the lock.

  Yields:
    Whether the lock is held.

  Examples:
    >>> import pathlib, tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, 'lock')
    ...   with workdir.lock_file(path) as first:
    ...     with workdir.lock_file(path, patience=0.0) as second:
    ...       print(first, second)
    True False
  """
  deadline = time.monotonic() + patience
  with open(path, 'a') as file:
    while not (is_held := _try_lock(file)) and time.monotonic() < deadline:
      time.sleep(_INTERVAL)
    yield is_held


def _try_lock(file: TextIO) -> bool:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  return True
