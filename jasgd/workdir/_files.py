"""Files of strict JSON, written atomically."""

import json
import math
import os
import pathlib
import secrets
from typing import Any

import numpy as np

Path = str | os.PathLike[str]


class WorkdirError(ValueError):
  """Files of a run are missing, are damaged, or belong to another run."""


def write_json(path: Path, value: Any) -> None:
  """Writes a file of strict JSON atomically.

  The file is written under another name, synced to the disk, and renamed: at
  any time, even after a crash, a reader finds the old file or the new one.
  Numbers and arrays of numpy become Python's, tuples become lists, and floats
  that are not finite become the strings 'inf', '-inf' and 'nan'.

  Args:
    path: Path of the file; its folder exists.
    value: Value to write.

  Raises:
    ValueError: if JSON cannot hold the value.

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
      os.fsync(file.fileno())  # Else a power cut could leave an empty file.
    os.replace(part, path)
  except BaseException:
    part.unlink(missing_ok=True)
    raise
  sync_folder(path.parent)


def read_json(path: Path) -> Any:
  """Reads a file of JSON; a WorkdirError if it is missing or no JSON."""
  try:
    return json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise WorkdirError(f'There is no file {os.fspath(path)!r}.') from None
  except ValueError as error:  # Raised by json or by the decoder of UTF-8.
    raise WorkdirError(
      f'{os.fspath(path)!r} is not a file of JSON: {error}.'
    ) from None


def encode_json(value: Any, name: str, indent: int | None = None) -> str:
  """Encodes a value as strict JSON; error messages call it `name`."""
  try:
    return json.dumps(to_plain(value), allow_nan=False, indent=indent)
  except (TypeError, ValueError) as error:
    raise ValueError(f'{name} must be writable as JSON: {error}.') from None


def to_plain(value: Any) -> Any:
  """Converts numpy's values, tuples and infinite floats for JSON."""
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
  """Syncs a folder to the disk, so that a rename survives a power cut."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
