"""Checkpoints: weights, optimizer state, and the position in growing files.

A checkpoint is a folder `checkpoints/<clock>` with the arrays of `state` and of
`params`, which orbax writes, and `manifest.json`. The manifest has the names,
shapes and dtypes of the arrays, the structure of `params`, the position, and
the size and CRC-32 checksum of every file.

A checkpoint is written under a name that ends in `.part`, and renamed when it
is complete. An old checkpoint is renamed to such a name before it is removed.
So a kill never leaves an incomplete folder under the name of a checkpoint; the
next save removes the `.part` folders.

Files may still be damaged later, by a disk or by hand. Checksums are compared
before orbax reads a file, since orbax does not detect every flipped byte. A run
that resumes renames damaged checkpoints to `<clock>.broken`; these are never
removed.
"""

import errno
import json
import logging
import os
import pathlib
import shutil
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jasgd import protocols
from jasgd.workdir import _arrays
from jasgd.workdir import _files
from jasgd.workdir import _paths

_log = logging.getLogger(__name__)

_MANIFEST = 'manifest.json'
# Version of the format: of these files, and of the positions in them.
_VERSION = 2
_SUFFIX = '.part'
_BROKEN = '.broken'
# Bytes of a file that are read at a time.
_BLOCK = 1 << 22
# Errors of damaged files; others, such as too many open files, are temporary.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


def save_checkpoint(
  workdir: _files.Path,
  clock: int,
  state: Any,
  *,
  position: dict[str, Any],
  params: Any,
  stats: Any = None,
  keep: int = 2,
) -> pathlib.Path:
  """Saves everything that a run needs to resume.

  The process may be killed at any time: earlier checkpoints are removed only
  when the new one is complete and on the disk. Files that `position` refers to
  must be on the disk before: sync them first.

  Args:
    workdir: Folder of the run.
    clock: Clock of the state, above that of the last checkpoint.
    state: Tree of arrays that jax can hold: weights, optimizer state, keys.
    position: Lengths of growing files (records, bytes), number of samples and
      the like: a JSON-serialisable dict.
    params: Weights alone, for `load_params`.
    stats: Further variables of the model, such as the statistics of batch
      normalisation, for `load_weights`.
    keep: Number of checkpoints to keep, this one included.

  Returns:
    The folder of the checkpoint.

  Raises:
    ValueError: if a checkpoint of that clock or a later one exists; a leaf is
      no array, or one that jax would narrow (such as int64, unless
      jax_enable_x64 is on); position is no JSON-serialisable dict; or keep is
      below 1.

  Examples:
    >>> import tempfile
    >>> import jax
    >>> import optax
    >>> from jasgd import workdir
    >>> params = {'w': jax.numpy.ones(2)}
    >>> state = (params, optax.adam(0.1).init(params))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = workdir.save_checkpoint(
    ...     folder, 10, state, position={'samples': 320}, params=params
    ...   )
    ...   like = jax.eval_shape(lambda: state)
    ...   clock, restored, position = workdir.restore_checkpoint(folder, like)
    >>> clock, position, restored[1][0].mu
    (10, {'samples': 320}, {'w': Array([0., 0.], dtype=float32)})
  """
  clock = protocols.check_count('clock', clock, 0)
  keep = protocols.check_count('keep', keep)
  _check_position(position)
  folder = _paths.Workdir(workdir).checkpoints
  saved = list_checkpoints(workdir)
  if saved and saved[-1] >= clock:
    raise ValueError(
      f'clock must be above that of the last checkpoint in {str(folder)!r}, '
      f'{saved[-1]}, got {clock}. To resume from an earlier clock, remove the '
      'later checkpoints.'
    )
  folder.mkdir(parents=True, exist_ok=True)
  _remove_parts(folder)
  part = folder / f'{clock}{_SUFFIX}'
  part.mkdir()
  _write(part, state, position, {'params': params, 'stats': stats})
  # The files are on the disk. The rename makes them a checkpoint, and must be
  # on the disk too before an older checkpoint is removed.
  final = folder / str(clock)
  os.rename(part, final)
  _files.sync_folder(folder)
  for old in [*saved, clock][:-keep]:
    os.rename(folder / str(old), folder / f'{old}{_SUFFIX}')
  _remove_parts(folder)
  return final


def restore_checkpoint(
  workdir: _files.Path, like: Any, clock: int | None = None
) -> tuple[int, Any, dict[str, Any]] | None:
  """Reads a checkpoint into a tree with the structure of `like`.

  Args:
    workdir: Folder of the run.
    like: Tree of `jax.ShapeDtypeStruct` with the structure, shapes and dtypes
      of the saved state: the result of `jax.eval_shape(make_state)`. If a leaf
      has a sharding, the array is placed accordingly.
    clock: Clock of the checkpoint; None for the last one.

  Returns:
    The clock, the state and the position; None if `clock` is None and there is
    no checkpoint. The arrays share no memory with others, and may be donated.

  Raises:
    WorkdirError: if a leaf is missing, is not in `like`, or has another shape
      or dtype; there is no checkpoint of that clock; or it cannot be read.

  Examples:
    >>> from jasgd import workdir
    >>> print(workdir.restore_checkpoint('not/there', like={}))
    None
  """
  if clock is None and not list_checkpoints(workdir):
    return None
  folder, manifest = _open(workdir, clock)
  _check_files(folder, manifest, 'state')
  leaves, treedef = jax.tree.flatten_with_path(like)
  like_leaves = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
  _arrays.check_alike(folder, manifest['state'], like_leaves)
  found = _arrays.read_arrays(folder / 'state', manifest['state'])
  names = [each['name'] for each in manifest['state']]
  arrays = dict(zip(names, found, strict=True))
  state = treedef.unflatten(
    [_place(arrays[name], leaf) for name, leaf in like_leaves.items()]
  )
  return int(folder.name), state, manifest['position']


def read_position(
  workdir: _files.Path, clock: int | None = None
) -> dict[str, Any] | None:
  """Reads the position of a checkpoint, without its arrays.

  Args:
    workdir: Folder of a run; it need not exist.
    clock: Clock of the checkpoint; None for the last one.

  Returns:
    The position that `save_checkpoint` was given; None if there is no
    checkpoint.

  Raises:
    WorkdirError: if the checkpoint cannot be read.

  Examples:
    >>> from jasgd import workdir
    >>> print(workdir.read_position('not/there'))
    None
  """
  if not list_checkpoints(workdir):
    return None
  _, manifest = _open(workdir, clock)
  return manifest['position']


def list_checkpoints(workdir: _files.Path) -> list[int]:
  """Clocks of the checkpoints in a workdir.

  Args:
    workdir: Folder of a run; it need not exist.

  Returns:
    The clocks, in ascending order.

  Examples:
    >>> from jasgd import workdir
    >>> workdir.list_checkpoints('not/there')
    []
  """
  folder = _paths.Workdir(workdir).checkpoints
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  return sorted(int(name) for name in names if name.isdecimal())


def set_aside_broken(workdir: _files.Path) -> list[pathlib.Path]:
  """Renames checkpoints that cannot be read, so that the others are used.

  The process that holds the workdir calls it before a run resumes. All files of
  all checkpoints are read. A damaged checkpoint is never removed: `<clock>`
  becomes `<clock>.broken`, and a warning gives the reason.

  Args:
    workdir: Folder of a run; it need not exist.

  Returns:
    The new paths of the damaged checkpoints.

  Raises:
    WorkdirError: if there are checkpoints and none of them can be read. All
      keep their names then, so that no run starts again by mistake.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   for clock in (10, 20):
    ...     path = workdir.save_checkpoint(
    ...       folder, clock, {}, position={}, params={}
    ...     )
    ...   (path / 'manifest.json').unlink()
    ...   names = [each.name for each in workdir.set_aside_broken(folder)]
    ...   names, workdir.list_checkpoints(folder)
    (['20.broken'], [10])
  """
  folder = _paths.Workdir(workdir).checkpoints
  clocks = list_checkpoints(workdir)
  errors = {}
  for clock in clocks:
    try:
      _check(workdir, clock)
    except _files.WorkdirError as error:
      errors[clock] = error
  if errors and len(errors) == len(clocks):
    raise _files.WorkdirError(
      f'None of the checkpoints in {str(folder)!r} can be read; the last one: '
      f'{errors[clocks[-1]]} Restore one from a backup, or start the run again '
      'in another folder.'
    )
  return [_set_aside(folder, clock, errors[clock]) for clock in errors]


def load_params(workdir: _files.Path, clock: int | None = None) -> Any:
  """Loads the trained weights of a run; needs neither its config nor its code.

  Args:
    workdir: Folder of the run.
    clock: Clock of the checkpoint; None for the last one.

  Returns:
    The tree that was saved as `params`, of numpy arrays. Dicts, lists and
    tuples are kept; nodes of other classes, such as NamedTuples, become dicts
    with the names of their fields.

  Raises:
    WorkdirError: if there is no such checkpoint, or it cannot be read.

  Examples:
    >>> import tempfile
    >>> import numpy as np
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = workdir.save_checkpoint(
    ...     folder, 10, {}, position={}, params={'w': np.float32([1, 2])}
    ...   )
    ...   print(workdir.load_params(folder))
    {'w': array([1., 2.], dtype=float32)}
  """
  params, _ = load_weights(workdir, clock)
  return params


def load_weights(
  workdir: _files.Path, clock: int | None = None
) -> tuple[Any, Any]:
  """Loads the trained weights of a run and the statistics of its model.

  Args:
    workdir: Folder of the run.
    clock: Clock of the checkpoint; None for the last one.

  Returns:
    The trees that were saved as `params` and `stats`, as in `load_params`.

  Raises:
    WorkdirError: if there is no such checkpoint, or it cannot be read.

  Examples:
    >>> import tempfile
    >>> from jasgd import workdir
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = workdir.save_checkpoint(
    ...     folder, 10, {}, position={}, params=[], stats={'mean': ()}
    ...   )
    ...   print(workdir.load_weights(folder))
    ([], {'mean': ()})
  """
  folder, manifest = _open(workdir, clock)
  _check_files(folder, manifest, 'params')
  arrays = _arrays.read_arrays(folder / 'params', manifest['params'])
  weights = _arrays.rebuild_tree(manifest['structure'], arrays)
  return weights['params'], weights['stats']


def _write(
  part: pathlib.Path, state: Any, position: dict[str, Any], weights: Any
) -> None:
  """Writes the files of a checkpoint; the manifest last."""
  structure, params_leaves = _arrays.describe_tree(weights)
  state_leaves = [
    (jax.tree_util.keystr(path), leaf)
    for path, leaf in jax.tree.leaves_with_path(state)
  ]
  manifest: dict[str, Any] = {
    'version': _VERSION,
    'position': position,
    'structure': structure,
  }
  arrays = {}
  for item, leaves in (('state', state_leaves), ('params', params_leaves)):
    arrays[item] = _arrays.to_host(leaves)
    manifest[item] = _arrays.describe_arrays(leaves, arrays[item])
  _arrays.check_not_narrowed(manifest['state'])
  for item in arrays:
    _arrays.write_arrays(part / item, arrays[item])
  manifest['files'] = {
    path.relative_to(part).as_posix(): _describe_file(path)
    for path in sorted(part.rglob('*'))
    if path.is_file()
  }
  manifest = json.loads(_files.encode_json(manifest, 'position'))
  manifest['checksum'] = _sum_manifest(manifest)
  _files.write_json(part / _MANIFEST, manifest)


def _describe_file(path: pathlib.Path) -> list[int]:
  """Size and checksum of a file."""
  size = checksum = 0
  with open(path, 'rb') as file:
    while block := file.read(_BLOCK):
      size += len(block)
      checksum = zlib.crc32(block, checksum)
  return [size, checksum]


def _sum_manifest(manifest: dict[str, Any]) -> int:
  """Checksum of a manifest, without the entry that holds the checksum."""
  entries = {key: manifest[key] for key in manifest if key != 'checksum'}
  return zlib.crc32(json.dumps(entries, sort_keys=True).encode())


def _check(workdir: _files.Path, clock: int) -> None:
  """Raises a WorkdirError if a checkpoint cannot be read."""
  folder, manifest = _open(workdir, clock)
  for item in ('state', 'params'):
    _check_files(folder, manifest, item)


def _check_files(
  folder: pathlib.Path, manifest: dict[str, Any], item: str
) -> None:
  """Raises a WorkdirError if a file of an item was changed or removed."""
  for name, expected in manifest['files'].items():
    if not name.startswith(f'{item}/'):
      continue
    path = folder / name
    try:
      found = _describe_file(path)
    except OSError as error:
      if error.errno not in _DAMAGE:
        raise
      raise _files.WorkdirError(
        f'{str(path)!r} cannot be read: {error.strerror}.'
      ) from None
    if found != expected:
      size, checksum = expected
      raise _files.WorkdirError(
        f'{str(path)!r} is damaged: it must have {size} bytes with checksum '
        f'{checksum:08x}, found {found[0]} with {found[1]:08x}.'
      )


def _set_aside(
  folder: pathlib.Path, clock: int, error: _files.WorkdirError
) -> pathlib.Path:
  """Renames a damaged checkpoint, to a name that does not exist yet."""
  target = folder / f'{clock}{_BROKEN}'
  number = 1
  while target.exists():
    number += 1
    target = folder / f'{clock}{_BROKEN}-{number}'
  os.rename(folder / str(clock), target)
  _files.sync_folder(folder)
  _log.warning(
    'The checkpoint of clock %d cannot be read, and was renamed to %r: %s',
    clock,
    str(target),
    error,
  )
  return target


def _open(
  workdir: _files.Path, clock: int | None
) -> tuple[pathlib.Path, dict[str, Any]]:
  """Finds the folder of a checkpoint, and reads its manifest."""
  folder = _paths.Workdir(workdir).checkpoints
  clocks = list_checkpoints(workdir)
  if not clocks:
    raise _files.WorkdirError(f'There is no checkpoint in {str(folder)!r}.')
  clock = clocks[-1] if clock is None else clock
  if clock not in clocks:
    raise _files.WorkdirError(
      f'There is no checkpoint of clock {clock} in {str(folder)!r}, only of '
      f'{", ".join(map(str, clocks))}.'
    )
  folder = folder / str(clock)
  return folder, _read_manifest(folder / _MANIFEST)


def _read_manifest(path: pathlib.Path) -> dict[str, Any]:
  """Reads a manifest; raises a WorkdirError if it is damaged."""
  try:
    manifest = _files.read_json(path)
  except OSError as error:
    if error.errno not in _DAMAGE:
      raise
    raise _files.WorkdirError(
      f'{str(path)!r} cannot be read: {error.strerror}.'
    ) from None
  is_dict = isinstance(manifest, dict)
  if not is_dict or manifest.get('checksum') != _sum_manifest(manifest):
    raise _files.WorkdirError(
      f'{str(path)!r} is damaged: its checksum does not fit its content.'
    )
  version = manifest.get('version', 1)
  if version != _VERSION:
    raise _files.WorkdirError(
      f'{str(path.parent)!r} is a checkpoint of version {version}, and this '
      f'jasgd reads version {_VERSION}.'
    )
  return manifest


def _check_position(position: Any) -> None:
  if not isinstance(position, dict):
    raise ValueError(f'position must be a dict, got {position!r}.')
  _files.encode_json(position, 'position')


def _place(array: np.ndarray, like: Any) -> jax.Array:
  """A jax array with its own memory, with the sharding of `like` if any."""
  # device_put may share numpy's memory, and such an array cannot be donated.
  placed = jnp.array(array)
  sharding = getattr(like, 'sharding', None)
  return placed if sharding is None else jax.device_put(placed, sharding)


def _remove_parts(folder: pathlib.Path) -> None:
  for part in folder.glob(f'*{_SUFFIX}'):
    shutil.rmtree(part)
