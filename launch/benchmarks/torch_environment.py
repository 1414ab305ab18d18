"""An environment of its own for PyTorch, which jasgd itself does not need."""

import pathlib
import subprocess
import sys

REQUIREMENTS = ('torch==2.13.0', 'numpy')

_CHECK_SECONDS = 120
_INSTALL_SECONDS = 1800


def find_torch(folder: pathlib.Path) -> str | None:
  """A Python that has the torch we compare with, installed if need be.

  Args:
    folder: Of the virtual environment; made if it is not there.

  Returns:
    The interpreter's path; None, after saying why, if there is none.
  """
  python = folder / 'bin' / 'python'
  if _has_torch(python):
    return str(python)
  print(
    f'Installing {" ".join(REQUIREMENTS)} into {folder.name}, once; this takes '
    'a while.',
    flush=True,
  )
  install = [python, '-m', 'pip', 'install', '--quiet', *REQUIREMENTS]
  for command in ([sys.executable, '-m', 'venv', folder], install):
    problem = _run(command, _INSTALL_SECONDS)
    if problem:
      print(f'There is no torch to compare with: {problem}', flush=True)
      return None
  return str(python)


def _has_torch(python: pathlib.Path) -> bool:
  """Whether an interpreter is there and has what is required."""
  version = REQUIREMENTS[0].partition('==')[2]
  check = (
    'import numpy, torch\n'
    f'raise SystemExit(torch.__version__.split("+")[0] != {version!r})'
  )
  return python.exists() and not _run([python, '-c', check], _CHECK_SECONDS)


def _run(command: list[str | pathlib.Path], timeout: float) -> str:
  """Runs a command; gives what went wrong, or nothing."""
  words = list(map(str, command))
  try:
    # Its own process is ended by `run`, also on Ctrl-C.
    done = subprocess.run(
      words, timeout=timeout, capture_output=True, text=True, check=False
    )
  except (OSError, subprocess.TimeoutExpired) as error:
    return str(error)
  if not done.returncode:
    return ''
  said = (done.stderr or done.stdout).strip()[-500:]
  return f'{" ".join(words)} gave {done.returncode}. {said}'
