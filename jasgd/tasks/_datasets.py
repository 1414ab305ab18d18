"""Image sets of tensorflow-datasets, decoded once and then mapped from disk.

The first use of a split reads all of its records, decodes the images, and
writes one .npy file of records with the fields image and label. Later uses map
that file and need neither tensorflow-datasets nor the set itself. The files are
in the folder $JASGD_CACHE, or ~/.cache/jasgd, and may be deleted at any time.
"""

import os
import pathlib
from typing import Any
import uuid

import numpy as np

# Records per read: reading in blocks is twice as fast as one by one.
_BLOCK = 1000
# Of tensorflow-datasets, unless TFDS_DATA_DIR says otherwise.
_DEFAULT_FOLDER = '~/tensorflow_datasets'


class MissingDataError(FileNotFoundError):
  """A set is not where it was looked for, and could not be fetched."""


def load_split(
  name: str, version: str, split: str, data_dir: str | None = None
) -> dict[str, np.ndarray]:
  """All images and labels of a split.

  Args:
    name: Of the set in tensorflow-datasets, such as `'mnist'`.
    version: Of the set, such as `'3.0.1'`.
    split: `'train'` or `'test'`.
    data_dir: The folder of tensorflow-datasets that has the set. None: its
      default folder, and a download if the set is not there.

  Returns:
    `'image'`, uint8, and `'label'`, int32; mapped from a file.

  Raises:
    MissingDataError: if the set is not there, or cannot be fetched.
  """
  if data_dir is not None and not pathlib.Path(data_dir).is_dir():
    raise MissingDataError(_explain(name, version, data_dir, data_dir))
  path = find_cache() / f'{name}-{version}-{split}.npy'
  if not path.exists():
    _write_records(path, _read_records(name, version, split, data_dir))
  records = np.load(path, mmap_mode='r')
  return {'image': records['image'], 'label': records['label']}


def find_cache() -> pathlib.Path:
  """The folder of decoded sets."""
  default = pathlib.Path.home() / '.cache' / 'jasgd'
  return pathlib.Path(os.environ.get('JASGD_CACHE') or default)


def open_source(
  name: str, version: str, split: str, data_dir: str | None = None
) -> Any:
  """A split with random access, as tensorflow-datasets gives it.

  Args:
    name: As in `load_split`, and so are the others.
    version: Of the set.
    split: `'train'` or `'test'`.
    data_dir: The folder of tensorflow-datasets.

  Returns:
    A sequence of examples, dicts with `'image'` and `'label'`.

  Raises:
    MissingDataError: if the set is not there, or cannot be fetched.
  """
  import tensorflow_datasets as tfds

  if data_dir is not None:
    folder = pathlib.Path(data_dir) / name / version
    if not (folder / 'dataset_info.json').exists():
      raise MissingDataError(_explain(name, version, str(folder), data_dir))
  try:
    return tfds.data_source(
      f'{name}:{version}',
      split=split,
      data_dir=data_dir,
      download=data_dir is None,
    )
  except Exception as error:  # Of many kinds: network, disk, file format.
    where = data_dir or os.environ.get('TFDS_DATA_DIR', _DEFAULT_FOLDER)
    raise MissingDataError(_explain(name, version, where, data_dir)) from error


def _explain(name: str, version: str, where: str, data_dir: str | None) -> str:
  """What is missing, where, and the command that fetches it."""
  folder = '' if data_dir is None else f', data_dir={data_dir!r}'
  return (
    f'The set {name} {version} cannot be read from {where}. To fetch it: '
    'python -c "import tensorflow_datasets as tfds; '
    f"tfds.data_source('{name}:{version}'{folder})\""
  )


def _read_records(
  name: str, version: str, split: str, data_dir: str | None
) -> np.ndarray:
  """Decodes a whole split."""
  source = open_source(name, version, split, data_dir)
  shape = np.shape(source[0]['image'])
  kind = np.dtype([('image', np.uint8, shape), ('label', np.int32)])
  records = np.empty(len(source), kind)
  for start in range(0, len(source), _BLOCK):
    indices = range(start, min(start + _BLOCK, len(source)))
    for index, example in zip(
      indices, source.__getitems__(indices), strict=True
    ):
      records[index] = (example['image'], example['label'])
  return records


def _write_records(path: pathlib.Path, records: np.ndarray) -> None:
  """Writes a file that is there as a whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  # Whoever writes at the same time has a file of their own; the last one stays.
  temporary = path.with_suffix(f'.{uuid.uuid4().hex}.tmp')
  try:
    with open(temporary, 'wb') as file:
      np.save(file, records)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)  # Gone already, if all went well.
