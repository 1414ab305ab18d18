"""Checkpoints: weights, optimizer state, and how far the other files were.

A checkpoint is a folder `checkpoints/<clock>`: the arrays of `state` and of
`params`, each as orbax writes a list, and `manifest.json`, which has the names,
shapes and dtypes of these, the structure of `params`, the position, and size
and checksum (CRC-32) of every file. It is written under a name that ends in
`.part` and renamed when it is whole, and renamed again before it is removed. So
a kill leaves no half of one under the name of a checkpoint; what it leaves
under the other is removed by the next save.

Disks and people damage files nevertheless. Checksums are compared before orbax
sees a file, for it does not find every flipped byte. A run that goes on sets
damaged checkpoints aside, under a name that ends in `.broken`; these are never
removed.
"""

import errno
import json
import logging
import operator
import os
import pathlib
import shutil
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jasgd.workdir import _arrays
from jasgd.workdir import _files
from jasgd.workdir import _paths
from jasgd.workdir import _structure

_log = logging.getLogger(__name__)

_MANIFEST = 'manifest.json'
_SUFFIX = '.part'
_BROKEN = '.broken'
# Bytes of a file that are read at a time.
_BLOCK = 1 << 22
# Errors of files that are damaged, rather than not to be had at the moment.
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
  """Saves all that a run needs to go on; killed at any time, it harms nothing.

  Until the new checkpoint is whole and on the disk, those before it stay. What
  `position` speaks of must be on the disk before: flush those files first.

  Args:
    workdir: The folder of the run.
    clock: The clock of the state. It grows from one checkpoint to the next.
    state: A tree of arrays that jax can hold: weights, optimizer state, keys.
    position: How far the files that grow were (records, bytes), the samples so
      far, and such: a dict that JSON can say.
    params: The weights alone, for `load_params`.
    stats: What the model keeps besides, for `load_weights`.
    keep: How many checkpoints to keep, this one included.

  Returns:
    The folder of the checkpoint.

  Raises:
    ValueError: if there is a checkpoint of that clock or a later one; a leaf is
      no array, or one that jax would narrow (such as int64, unless
      jax_enable_x64 is on); position is no dict that JSON can say; or keep is
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
  clock = _check_count('clock', clock, minimum=0)
  keep = _check_count('keep', keep, minimum=1)
  _check_position(position)
  folder = _paths.Workdir(workdir).checkpoints
  saved = list_checkpoints(workdir)
  if saved and saved[-1] >= clock:
    raise ValueError(
      f'clock must be above that of the last checkpoint in {str(folder)!r}, '
      f'{saved[-1]}, got {clock}. To go back in time, remove the later ones.'
    )
  folder.mkdir(parents=True, exist_ok=True)
  _remove_parts(folder)
  part = folder / f'{clock}{_SUFFIX}'
  part.mkdir()
  _write(part, state, position, {'params': params, 'stats': stats})
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
  """Reads a checkpoint into a tree of the structure, shapes and dtypes of like.

  Args:
    workdir: The folder of the run.
    like: A tree like the state that was saved, of `jax.ShapeDtypeStruct`: what
      `jax.eval_shape(make_state)` gives. A sharding in a leaf is obeyed.
    clock: Which checkpoint; the last one if None.

  Returns:
    Its clock, the state (jax arrays that nothing else holds, so they may be
    donated), and the position; or None if clock is None and there is none.

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
  """The position in a checkpoint, without its arrays.

  Args:
    workdir: The folder of a run, which need not be there.
    clock: Which checkpoint; the last one if None.

  Returns:
    What was given to `save_checkpoint`; None if there is no checkpoint.

  Raises:
    WorkdirError: if it cannot be read.

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
  """The clocks of the checkpoints in a workdir, the last one last.

  Args:
    workdir: The folder of a run, which need not be there.

  Returns:
    Clocks, sorted.

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
  """Renames the checkpoints that cannot be read, so that others are used.

  Call it before a run goes on, by the process that holds the workdir. Each
  checkpoint is read whole, once. A broken one is never removed: `<clock>`
  becomes `<clock>.broken`, and a warning says why.

  Args:
    workdir: The folder of a run, which need not be there.

  Returns:
    The new names of those that were set aside.

  Raises:
    WorkdirError: if there are checkpoints, and none of them can be read. All
      keep their names then, so that no run begins anew by mistake.

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
      f'None of the checkpoints in {str(folder)!r} can be read; of the last: '
      f'{errors[clocks[-1]]} Put one from a backup there, or start the run '
      'anew in another folder.'
    )
  return [_set_aside(folder, clock, errors[clock]) for clock in errors]


def load_params(workdir: _files.Path, clock: int | None = None) -> Any:
  """The trained weights of a run, without its config or the code of its model.

  Args:
    workdir: The folder of the run.
    clock: Which checkpoint; the last one if None.

  Returns:
    The tree that was saved as `params`, of numpy arrays. Dicts, lists and
    tuples are what they were; nodes of other classes, such as NamedTuples, are
    dicts from the names of their fields.

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
  """The trained weights of a run, and what its model keeps besides.

  Args:
    workdir: The folder of the run.
    clock: Which checkpoint; the last one if None.

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
  weights = _structure.rebuild_tree(manifest['structure'], arrays)
  return weights['params'], weights['stats']


def _write(
  part: pathlib.Path, state: Any, position: dict[str, Any], weights: Any
) -> None:
  """Fills the folder of a checkpoint."""
  structure, params_leaves = _structure.describe_tree(weights)
  state_leaves = [
    (jax.tree_util.keystr(path), leaf)
    for path, leaf in jax.tree.leaves_with_path(state)
  ]
  manifest: dict[str, Any] = {'position': position, 'structure': structure}
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
  """The checksum of a manifest, but for the entry that holds it."""
  rest = {key: manifest[key] for key in manifest if key != 'checksum'}
  return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def _check(workdir: _files.Path, clock: int) -> None:
  """Raises a WorkdirError if a checkpoint cannot be read."""
  folder, manifest = _open(workdir, clock)
  for item in ('state', 'params'):
    _check_files(folder, manifest, item)
    if 'files' not in manifest:  # It is older than these checksums.
      _arrays.read_arrays(folder / item, manifest[item])


def _check_files(
  folder: pathlib.Path, manifest: dict[str, Any], item: str
) -> None:
  """Raises a WorkdirError if a file of an item is not what was written."""
  for name, expected in manifest.get('files', {}).items():
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
  """Renames a broken checkpoint, to a name that nothing has yet."""
  target = folder / f'{clock}{_BROKEN}'
  number = 1
  while target.exists():
    number += 1
    target = folder / f'{clock}{_BROKEN}-{number}'
  os.rename(folder / str(clock), target)
  _files.sync_folder(folder)
  _log.warning(
    'The checkpoint of clock %d cannot be read, and is set aside as %r: %s',
    clock,
    str(target),
    error,
  )
  return target


def _open(
  workdir: _files.Path, clock: int | None
) -> tuple[pathlib.Path, dict[str, Any]]:
  """The folder of a checkpoint and its manifest."""
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
  """A manifest, checked; those of earlier versions have no checksum."""
  try:
    manifest = _files.read_json(path)
  except OSError as error:
    if error.errno not in _DAMAGE:
      raise
    raise _files.WorkdirError(
      f'{str(path)!r} cannot be read: {error.strerror}.'
    ) from None
  is_whole = isinstance(manifest, dict) and all(
    key in manifest for key in ('state', 'params', 'structure', 'position')
  )
  if is_whole and ('checksum' in manifest) == ('files' in manifest):
    checksum = manifest.get('checksum')
    if checksum is None or checksum == _sum_manifest(manifest):
      return manifest
  raise _files.WorkdirError(
    f'{str(path)!r} is damaged: it is not what was written.'
  )


def _check_position(position: Any) -> None:
  if not isinstance(position, dict):
    raise ValueError(f'position must be a dict, got {position!r}.')
  _files.encode_json(position, 'position')


def _check_count(name: str, value: Any, minimum: int) -> int:
  """Gives `value` as an int; a ValueError if it is none, or too small."""
  try:
    count = operator.index(value)
  except TypeError:
    raise ValueError(f'{name} must be an integer, got {value!r}.') from None
  if count < minimum:
    raise ValueError(f'{name} must be at least {minimum}, got {count}.')
  return count


def _place(array: np.ndarray, like: Any) -> jax.Array:
  """A jax array of its own memory, where `like` says."""
  # device_put alone may share numpy's memory, which could not be donated.
  placed = jnp.array(array)
  sharding = getattr(like, 'sharding', None)
  return placed if sharding is None else jax.device_put(placed, sharding)


def _remove_parts(folder: pathlib.Path) -> None:
  for part in folder.glob(f'*{_SUFFIX}'):
    shutil.rmtree(part)
