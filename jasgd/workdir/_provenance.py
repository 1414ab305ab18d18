"""Provenance of a run: config, versions, devices, command, commit."""

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from typing import Any

import jax

from jasgd.workdir import _files

_PACKAGES = ('jasgd', 'jax', 'jaxlib', 'optax', 'numpy', 'flax')
_SECRET = re.compile(r'(^|[._-])(token|password|secret)$', re.IGNORECASE)
_HIDDEN = '...'
_GIT_TIMEOUT = 10.0  # Seconds.


def describe_run(config: dict[str, Any], seed: int) -> dict[str, Any]:
  """Describes a run, for the header of its trace and provenance.json.

  The description contains no name of a host or a user: the home folder is
  written as '~', and the values of fields and flags whose names end in token,
  password or secret are left out.

  Args:
    config: Config of the run, a JSON-serialisable dict.
    seed: Seed of the run.

  Returns:
    A JSON-serialisable dict: `config`, `seed`, `versions` (None for a package
    that is not installed), `platform`, `device_kind`, `num_devices`,
    `num_threads` (the environment's NPROC, or the number of cores), `command`
    and `git_revision` (None if the running script is not in a git checkout;
    with a final '+' if a file differs from the commit).

  Raises:
    ValueError: if NPROC is set and is not a whole number above 0, or the config
      is no JSON-serialisable dict.

  Examples:
    >>> from jasgd import workdir
    >>> run = workdir.describe_run({'optimizer': {'rate': 0.1}}, seed=0)
    >>> run['config'], run['seed']
    ({'optimizer': {'rate': 0.1}}, 0)
  """
  if not isinstance(config, dict):
    raise ValueError(f'config must be a dict, got {config!r}.')
  _files.encode_json(config, 'config')
  devices = jax.devices()
  return {
    'config': _hide(_files.to_plain(config)),
    'seed': int(seed),
    'versions': {
      'python': platform.python_version(),
      **{name: _find_version(name) for name in _PACKAGES},
    },
    'platform': devices[0].platform,
    'device_kind': devices[0].device_kind,
    'num_devices': len(devices),
    'num_threads': _count_threads(),
    'command': _hide_command(sys.argv),
    'git_revision': _find_revision(_find_script_folder()),
  }


def _find_version(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


def _count_threads() -> int:
  """Number of threads that XLA uses; bits of results on a CPU depend on it."""
  text = os.environ.get('NPROC')
  if text is None:
    return os.cpu_count() or 1
  if not text.isdecimal() or int(text) < 1:
    raise ValueError(f'NPROC must be a whole number above 0, got {text!r}.')
  return int(text)


def _find_script_folder() -> str | None:
  """Folder of the running script; None in an interactive session."""
  path = getattr(sys.modules.get('__main__'), '__file__', None)
  return os.path.dirname(os.path.abspath(path)) if path else None


def _find_revision(folder: str | None) -> str | None:
  """Commit of a folder's checkout, with a final '+' if files differ from it."""
  if folder is None:
    return None
  revision = _run_git(folder, 'rev-parse', 'HEAD')
  if revision is None:
    return None
  changes = _run_git(folder, 'status', '--porcelain', '--untracked-files=no')
  return f'{revision}+' if changes else revision


def _run_git(folder: str, *arguments: str) -> str | None:
  """Output of git; None if it fails, is not installed, or takes too long."""
  try:
    result = subprocess.run(
      ['git', *arguments],
      cwd=folder,
      check=True,
      capture_output=True,
      text=True,
      timeout=_GIT_TIMEOUT,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return result.stdout.strip()


def _hide(value: Any, name: str = '') -> Any:
  """Removes secrets and the home folder from a value of a config."""
  if _SECRET.search(name) and value:
    return _HIDDEN
  if isinstance(value, dict):
    return {key: _hide(entry, str(key)) for key, entry in value.items()}
  if isinstance(value, list):
    return [_hide(entry) for entry in value]
  return _hide_home(value) if isinstance(value, str) else value


def _hide_command(arguments: list[str]) -> list[str]:
  """Removes secrets and the home folder from a command line."""
  hidden = []
  is_secret = False  # Whether this argument is the value of a secret flag.
  for argument in arguments:
    name, equals, _ = argument.partition('=')
    is_flag = name.startswith('-')
    if is_secret and not is_flag:
      hidden.append(_HIDDEN)
      is_secret = False
      continue
    is_secret = is_flag and bool(_SECRET.search(name))
    if is_secret and equals:
      hidden.append(f'{name}={_HIDDEN}')
      is_secret = False
    else:
      hidden.append(_hide_home(argument))
  return hidden


def _hide_home(text: str) -> str:
  home = os.path.expanduser('~').rstrip('/')
  if not home.startswith('/'):  # There is no home folder, or it is the root.
    return text
  return re.sub(rf'(?<![\w/.-]){re.escape(home)}(?![\w.-])', '~', text)
