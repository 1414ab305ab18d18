"""Paths of the files of a run, and the config that a workdir belongs to."""

from collections.abc import Iterator
import dataclasses
import json
import os
import pathlib
from typing import Any

from jasgd.workdir import _files

_MISSING = object()


@dataclasses.dataclass(frozen=True, init=False)
class Workdir:
  """Paths of the files of a run. It is accepted wherever a path is.

  Args:
    root: Folder of the run.

  Examples:
    >>> from jasgd import workdir
    >>> workdir.Workdir('runs/7').metrics.as_posix()
    'runs/7/metrics.jsonl'
  """

  root: pathlib.Path

  def __init__(self, root: _files.Path) -> None:
    object.__setattr__(self, 'root', pathlib.Path(root))

  def __fspath__(self) -> str:
    return os.fspath(self.root)

  @property
  def config(self) -> pathlib.Path:
    """File of JSON: the run's config."""
    return self.root / 'config.json'

  @property
  def provenance(self) -> pathlib.Path:
    """File of JSON: versions, devices, command; equal to the trace's header."""
    return self.root / 'provenance.json'

  @property
  def trace(self) -> pathlib.Path:
    """File of `jasgd.traces`: the records of the run."""
    return self.root / 'trace'

  @property
  def metrics(self) -> pathlib.Path:
    """File of JSON lines: the metrics by clock."""
    return self.root / 'metrics.jsonl'

  @property
  def tensorboard(self) -> pathlib.Path:
    """Folder of event files: the metrics for TensorBoard."""
    return self.root / 'tensorboard'

  @property
  def checkpoints(self) -> pathlib.Path:
    """Folder of checkpoints, a folder per clock."""
    return self.root / 'checkpoints'

  @property
  def result(self) -> pathlib.Path:
    """File of JSON: the result; it exists once the run has ended."""
    return self.root / 'result.json'

  @property
  def server(self) -> pathlib.Path:
    """File of JSON: the server's address; it exists while the server runs."""
    return self.root / 'server.json'

  @property
  def token(self) -> pathlib.Path:
    """File of the secret token of learners, readable by its owner only."""
    return self.root / 'token'

  @property
  def logs(self) -> pathlib.Path:
    """Folder of the logs of a real run's processes."""
    return self.root / 'logs'

  @property
  def report(self) -> pathlib.Path:
    """File of HTML: the report."""
    return self.root / 'report.html'


def open_workdir(path: _files.Path, config: dict[str, Any]) -> Workdir:
  """Creates the folder of a run, or opens it to resume the run.

  The config is written once, and the folder belongs to that config from then
  on: a run resumes with the config that it started with. The order of fields
  does not matter, and a tuple equals a list.

  Args:
    path: Path of the folder; it and its parents are created if missing.
    config: Config of the run, a JSON-serialisable dict.

  Returns:
    The paths in the folder.

  Raises:
    WorkdirError: if the folder holds a run with another config, or one of
      another version of jasgd, is a file, or cannot be written to.
    ValueError: if the config is no JSON-serialisable dict.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = workdir.open_workdir(folder, {'optimizer': {'rate': 0.1}})
    ...   try:
    ...     workdir.open_workdir(folder, {'optimizer': {'rate': 0.2}})
    ...   except workdir.WorkdirError as error:
    ...     print(str(error).partition(': ')[2].partition('. ')[0])
    optimizer.rate is 0.1 there and 0.2 here
  """
  if not isinstance(config, dict):
    raise ValueError(f'config must be a dict, got {config!r}.')
  # As it will be read from the file: keys are strings, tuples are lists.
  config = json.loads(_files.encode_json(config, 'config'))
  workdir = Workdir(path)
  name = repr(os.fspath(workdir))
  try:
    workdir.root.mkdir(parents=True, exist_ok=True)
    if not workdir.config.exists():
      _files.write_json(workdir.config, config)
  except (FileExistsError, NotADirectoryError):
    raise _files.WorkdirError(
      f'The workdir {name} must be a folder, but it, or one above it, is a '
      'file. Give another workdir.'
    ) from None
  except OSError as error:
    raise _files.WorkdirError(
      f'The workdir {name} must be writable: {error}. Give another workdir.'
    ) from None
  if not os.access(workdir.root, os.W_OK | os.X_OK):
    raise _files.WorkdirError(
      f'The workdir {name} must be writable, but it is not. Give another '
      'workdir.'
    )
  _check_same_config(name, _files.read_json(workdir.config), config)
  return workdir


def _check_same_config(name: str, found: Any, given: dict[str, Any]) -> None:
  """Raises a WorkdirError if the folder's config differs from the given one."""
  names = found.keys() if isinstance(found, dict) else ()
  unknown = sorted({*names} - {*given})
  missing = sorted({*given} - {*names})
  if unknown or missing:
    clauses = [f'has {", ".join(unknown)}'] if unknown else []
    clauses += [f'lacks {", ".join(missing)}'] if missing else []
    raise _files.WorkdirError(
      f'The workdir {name} holds a run of another kind, or of another version '
      f'of jasgd: its config {" and ".join(clauses)}. Give another workdir, or '
      'use the program that wrote it.'
    )
  differences = list(_find_differences(found, given))
  if differences:
    raise _files.WorkdirError(
      f'The workdir {name} holds a run with another config: '
      f'{"; ".join(differences)}. Give another workdir, or the same config.'
    )


def _find_differences(
  found: Any, given: Any, path: tuple[str, ...] = ()
) -> Iterator[str]:
  """Yields a clause for each field that differs, with its full path."""
  if isinstance(found, dict) and isinstance(given, dict):
    for key in sorted({*found, *given}):
      yield from _find_differences(
        found.get(key, _MISSING), given.get(key, _MISSING), (*path, key)
      )
  elif found != given:
    texts = [
      'missing' if value is _MISSING else repr(value)
      for value in (found, given)
    ]
    yield f'{".".join(path)} is {texts[0]} there and {texts[1]} here'
