"""Strict JSON, in files that appear whole or not at all."""

import json
import math
import os
import pathlib
import secrets
from typing import Any

import numpy as np

Path = str | os.PathLike[str]


class WorkdirError(ValueError):
  """The files of a run are not there, are damaged, or are of another run."""


def write_json(path: Path, value: Any) -> None:
  """Writes a file of strict JSON, whole or not at all.

  It is written under another name, brought to the disk, and renamed: a reader,
  or one who comes after a crash, finds the old file or the new one. numpy's
  numbers and arrays become plain ones, tuples become lists, and numbers that
  JSON has no word for become 'inf', '-inf' and 'nan'.

  Args:
    path: Where the file will be. Its folder exists.
    value: What to write.

  Raises:
    ValueError: if JSON cannot say it.

  Examples:
    >>> import pathlib, tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   path = pathlib.Path(folder, 'a.json')
    ...   workdir.write_json(path, {'rate': 0.1, 'limit': float('inf')})
    ...   print(path.read_text(), end='')
    {
      "rate": 0.1,
      "limit": "inf"
    }
  """
  path = pathlib.Path(path)
  text = encode_json(value, path.name, indent=2) + '\n'
  part = path.with_name(f'{path.name}.{secrets.token_hex(4)}.part')
  try:
    with open(part, 'x', encoding='utf-8') as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())  # Or a power cut could leave the name alone.
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def read_json(path: Path) -> Any:
  """What a file of JSON says; a WorkdirError if there is none, or it is not."""
  try:
    return json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise WorkdirError(f'There is no file {os.fspath(path)!r}.') from None
  except ValueError as error:  # Of the text, or of its bytes.
    raise WorkdirError(
      f'{os.fspath(path)!r} is not a file of JSON: {error}.'
    ) from None


def encode_json(value: Any, name: str, indent: int | None = None) -> str:
  """Strict JSON; `name` is what an error calls the value."""
  try:
    return json.dumps(to_plain(value), allow_nan=False, indent=indent)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{name} must be writable as JSON: {error}.') from None


def to_plain(value: Any) -> Any:
  """What JSON does not know of, as what it does."""
  if isinstance(value, (np.generic, np.ndarray)):
    value = value.tolist()
  if isinstance(value, dict):
    return {key: to_plain(entry) for key, entry in value.items()}
  if isinstance(value, (list, tuple)):
    return [to_plain(entry) for entry in value]
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value


def sync_folder(folder: Path) -> None:
  """Brings the names in a folder to the disk: a rename outlives a power cut."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
