"""Where the files of a run are, and whose run it is."""

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
  """The folder of a run. It can be given wherever a path can.

  Args:
    root: The folder.

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
    """What was asked for: a file of JSON."""
    return self.root / 'config.json'

  @property
  def provenance(self) -> pathlib.Path:
    """What ran, and on what: a file of JSON, equal to the trace's header."""
    return self.root / 'provenance.json'

  @property
  def trace(self) -> pathlib.Path:
    """What happened, in which order: a file of `jasgd.traces`."""
    return self.root / 'trace'

  @property
  def metrics(self) -> pathlib.Path:
    """Losses and such by clock: a line of JSON each."""
    return self.root / 'metrics.jsonl'

  @property
  def tensorboard(self) -> pathlib.Path:
    """The same for TensorBoard, with the time of day: a folder."""
    return self.root / 'tensorboard'

  @property
  def checkpoints(self) -> pathlib.Path:
    """A folder, with a folder for each clock that was saved."""
    return self.root / 'checkpoints'

  @property
  def result(self) -> pathlib.Path:
    """How the run ended; there only once it has."""
    return self.root / 'result.json'

  @property
  def server(self) -> pathlib.Path:
    """Where the server is: a file of JSON, there while it runs."""
    return self.root / 'server.json'

  @property
  def token(self) -> pathlib.Path:
    """What learners must know; for the owner's eyes alone."""
    return self.root / 'token'

  @property
  def logs(self) -> pathlib.Path:
    """What the processes of a real run had to say: a folder."""
    return self.root / 'logs'

  @property
  def report(self) -> pathlib.Path:
    """What people look at: a page of HTML."""
    return self.root / 'report.html'


def open_workdir(path: _files.Path, config: dict[str, Any]) -> Workdir:
  """Makes the folder of a run, or finds it again.

  The config is written there once, and from then on the folder is for that
  config alone: a run goes on with what it began with. The order of the fields
  is no matter, and a tuple is equal to a list.

  Args:
    path: The folder. It and those above it are made if they are not there.
    config: A dict that JSON can say.

  Returns:
    The paths in it.

  Raises:
    WorkdirError: if the folder holds a run with another config, is a file, or
      cannot be written to.
    ValueError: if the config is not a dict that JSON can say.

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
  # As it will be read again: keys are strings, tuples are lists.
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
      f'The workdir {name} must be writable, and is not. Give another workdir.'
    )
  _check_same_config(name, _files.read_json(workdir.config), config)
  return workdir


def _check_same_config(
  name: str, found: dict[str, Any], given: dict[str, Any]
) -> None:
  """Refuses to go on with the run of another config."""
  differences = list(_find_differences(found, given))
  if differences:
    raise _files.WorkdirError(
      f'The workdir {name} holds a run with another config: '
      f'{"; ".join(differences)}. Give another workdir, or the same config.'
    )


def _find_differences(
  found: Any, given: Any, path: tuple[str, ...] = ()
) -> Iterator[str]:
  """One sentence for each field that differs, with its full path."""
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
