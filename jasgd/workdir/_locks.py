"""One at a time: a lock that goes with the process, however that ends."""

from collections.abc import Iterator
import contextlib
import fcntl
import os
import time

from jasgd.workdir import _files
from jasgd.workdir import _paths

# Between two tries, in seconds.
_INTERVAL = 0.1


@contextlib.contextmanager
def hold_workdir(
  workdir: _files.Path, role: str, *, patience: float = 0.0
) -> Iterator[None]:
  """Lets one process at a time do something in a workdir.

  Args:
    workdir: The folder of a run; it is made if it is not there.
    role: What is done, in a word; others may do other things meanwhile.
    patience: Seconds to wait for whoever does it now, and may be ending.

  Raises:
    WorkdirError: if somebody else does it.

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
  deadline = time.monotonic() + patience
  with open(root / f'{role}.lock', 'a+') as file:
    while True:
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
      except BlockingIOError:
        if time.monotonic() >= deadline:
          file.seek(0)
          raise _files.WorkdirError(
            f'The workdir {os.fspath(workdir)!r} is in use: there is a {role} '
            f'already (process {file.read().strip() or "?"}). End it first, or '
            'give another workdir.'
          ) from None
      time.sleep(_INTERVAL)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    yield
