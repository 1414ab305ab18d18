"""Environments of their own for those we compare with: jasgd needs none."""

import pathlib
import subprocess
import sys

from launch.benchmarks import workers

# What an environment has; first who it is for, with the version.
TORCH = ('torch==2.13.0', 'numpy')
MPI = ('mpi4py==4.1.2', 'numpy')

_CHECK_SECONDS = 120
_INSTALL_SECONDS = 1800


def find_python(
  requirements: tuple[str, ...], root: pathlib.Path = workers.ROOT
) -> str | None:
  """A Python that has what we compare with, installed if need be.

  Args:
    requirements: Such as `TORCH`.
    root: Where the virtual environment is, or is made: `.venv-torch`.

  Returns:
    The interpreter's path; None, after saying why, if there is none.
  """
  if has_packages(requirements, root):
    return str(_get_python(requirements, root))
  package, _ = _split(requirements)
  python = _get_python(requirements, root)
  folder = python.parent.parent
  print(
    f'Installing {" ".join(requirements)} into {folder.name}, once; this takes '
    'a while.',
    flush=True,
  )
  install = [python, '-m', 'pip', 'install', '--quiet', *requirements]
  for command in ([sys.executable, '-m', 'venv', folder], install):
    problem = _run(command, _INSTALL_SECONDS)
    if problem:
      print(f'There is no {package} to compare with: {problem}', flush=True)
      return None
  return str(python)


def has_packages(
  requirements: tuple[str, ...], root: pathlib.Path = workers.ROOT
) -> bool:
  """Whether an environment is there and has what is required."""
  python = _get_python(requirements, root)
  package, version = _split(requirements)
  check = (
    f'from importlib import metadata\nimport numpy, {package}\n'
    f'version = metadata.version({package!r}).split("+")[0]\n'
    f'raise SystemExit(version != {version!r})'
  )
  return python.exists() and not _run([python, '-c', check], _CHECK_SECONDS)


def _split(requirements: tuple[str, ...]) -> tuple[str, str]:
  """The name and the version of who an environment is for."""
  package, _, version = requirements[0].partition('==')
  return package, version


def _get_python(
  requirements: tuple[str, ...], root: pathlib.Path
) -> pathlib.Path:
  """Where an environment's interpreter is, if it is."""
  package, _ = _split(requirements)
  return root / f'.venv-{package}' / 'bin' / 'python'


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
