"""Image sets of tensorflow-datasets, decoded once and then memory-mapped.

The first use of a split decodes all of its images and writes one .npy file of
records with the fields image and label. Later uses map that file and need
neither tensorflow-datasets nor the original set. The files are in the folder
$JASGD_CACHE, by default ~/.cache/jasgd, and may be deleted at any time.
"""

import os
import pathlib
from typing import Any
import uuid

import numpy as np

# Records per read: reading in blocks is twice as fast as one by one.
_BLOCK = 1000
# The folder of tensorflow-datasets if TFDS_DATA_DIR is not set.
_DEFAULT_FOLDER = '~/tensorflow_datasets'


class MissingDataError(FileNotFoundError):
  """A dataset is missing and could not be downloaded."""


def load_split(
  name: str, version: str, split: str, data_dir: str | None = None
) -> dict[str, np.ndarray]:
  """Loads all images and labels of a split.

  Args:
    name: Name of the set in tensorflow-datasets, such as `'mnist'`.
    version: Version of the set, such as `'3.0.1'`.
    split: Name of the split: `'train'` or `'test'`.
    data_dir: Folder of tensorflow-datasets. None: its default folder; the set
      is downloaded if it is missing.

  Returns:
    `'image'`, uint8, and `'label'`, int32, both memory-mapped.

  Raises:
    MissingDataError: if the set is missing and cannot be downloaded.
  """
  if data_dir is not None and not pathlib.Path(data_dir).is_dir():
    raise MissingDataError(_explain(name, version, data_dir, data_dir))
  path = find_cache() / f'{name}-{version}-{split}.npy'
  if not path.exists():
    _write_records(path, _read_records(name, version, split, data_dir))
  records = np.load(path, mmap_mode='r')
  return {'image': records['image'], 'label': records['label']}


def find_cache() -> pathlib.Path:
  """Folder of the decoded sets."""
  default = pathlib.Path.home() / '.cache' / 'jasgd'
  return pathlib.Path(os.environ.get('JASGD_CACHE') or default)


def open_source(
  name: str, version: str, split: str, data_dir: str | None = None
) -> Any:
  """Opens a split of tensorflow-datasets with random access.

  Args:
    name: Name of the set, as in `load_split`.
    version: Version of the set.
    split: Name of the split: `'train'` or `'test'`.
    data_dir: Folder of tensorflow-datasets, as in `load_split`.

  Returns:
    A sequence of examples, dicts with `'image'` and `'label'`.

  Raises:
    MissingDataError: if the set is missing and cannot be downloaded.
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
  except Exception as error:  # The network, the disk or the format may fail.
    where = data_dir or os.environ.get('TFDS_DATA_DIR', _DEFAULT_FOLDER)
    raise MissingDataError(_explain(name, version, where, data_dir)) from error


def _explain(name: str, version: str, where: str, data_dir: str | None) -> str:
  """Error message: the missing set, its folder, the command to download it."""
  folder = '' if data_dir is None else f', data_dir={data_dir!r}'
  return (
    f'The set {name} {version} cannot be read from {where}. To download it: '
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
  """Writes the file atomically: it exists as a whole or not at all."""
  path.parent.mkdir(parents=True, exist_ok=True)
  # Processes that write at the same time use different temporary files; the
  # last one to rename its file wins.
  temporary = path.with_suffix(f'.{uuid.uuid4().hex}.tmp')
  try:
    with open(temporary, 'wb') as file:
      np.save(file, records)
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)  # It exists only after an error.
