"""Lists of arrays as files, by orbax; what they are is kept beside them."""

import os
import pathlib
from typing import Any

import jax
import numpy as np

from jasgd.workdir import _files

_SUFFIX = '.bytes'  # Of files that orbax did not write.


def to_host(leaves: list[tuple[str, Any]]) -> list[np.ndarray]:
  """The leaves as numpy arrays; a ValueError that names one that cannot be."""
  return [_to_host(name, leaf) for name, leaf in leaves]


def describe_arrays(
  leaves: list[tuple[str, Any]], arrays: list[np.ndarray]
) -> list[dict[str, Any]]:
  """Names, shapes and dtypes, as JSON."""
  return [
    {'name': name, 'shape': list(array.shape), 'dtype': str(array.dtype)}
    for (name, _), array in zip(leaves, arrays, strict=True)
  ]


def write_arrays(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
  """Writes arrays to a new folder."""
  # Orbax refuses arrays of no elements, and a list of no arrays.
  arrays = [array for array in arrays if array.size]
  if not arrays:
    return
  if jax.process_count() > 1:
    # Orbax takes the processes of a group for one writer, and numpy arrays for
    # the first one's to write; but each of ours has files of its own.
    _write_bytes(folder, arrays)
  else:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
      checkpointer.save(folder.absolute(), args=ocp.args.StandardSave(arrays))


def read_arrays(
  folder: pathlib.Path, descriptions: list[dict[str, Any]]
) -> list[np.ndarray]:
  """Reads what `write_arrays` wrote, on whichever devices it was made.

  Args:
    folder: The folder that was written.
    descriptions: What `describe_arrays` said.

  Returns:
    The arrays.

  Raises:
    WorkdirError: if the files are not what the descriptions say.
  """
  arrays = [
    np.zeros(each['shape'], np.dtype(each['dtype'])) for each in descriptions
  ]
  positions = [index for index, array in enumerate(arrays) if array.size]
  if not positions:
    return arrays
  try:
    if (folder / f'0{_SUFFIX}').exists():
      found = _read_bytes(folder, [arrays[index] for index in positions])
    else:
      import orbax.checkpoint as ocp

      with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(folder.absolute())
  except Exception as error:  # Orbax and tensorstore have many classes of it.
    raise _files.WorkdirError(
      f'The arrays in {str(folder)!r} cannot be read: {error}'
    ) from error
  if len(found) != len(positions):
    raise _files.WorkdirError(
      f'{str(folder)!r} must hold {len(positions)} arrays, found {len(found)}.'
    )
  for index, array in zip(positions, found, strict=True):
    arrays[index] = np.asarray(array)
  return arrays


def _write_bytes(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
  """Writes the bytes of each array to a file of its own."""
  folder.mkdir()
  for index, array in enumerate(arrays):
    with open(folder / f'{index}{_SUFFIX}', 'wb') as file:
      file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
      file.flush()
      os.fsync(file.fileno())


def _read_bytes(
  folder: pathlib.Path, arrays: list[np.ndarray]
) -> list[np.ndarray]:
  """Reads what `_write_bytes` wrote, of arrays that are like these."""
  return [
    np.fromfile(folder / f'{index}{_SUFFIX}', np.uint8)
    .view(array.dtype)
    .reshape(array.shape)
    for index, array in enumerate(arrays)
  ]


def check_not_narrowed(descriptions: list[dict[str, Any]]) -> None:
  """Refuses what could be saved, but not be restored as it is."""
  for each in descriptions:
    dtype = np.dtype(each['dtype'])
    narrowed = jax.eval_shape(lambda leaf: leaf, np.zeros((), dtype)).dtype
    if narrowed != dtype:
      raise ValueError(
        f'{each["name"] or "The tree"} is {dtype}, which jax narrows to '
        f'{narrowed}: give it as that, or put it into position.'
      )


def check_alike(
  folder: pathlib.Path, descriptions: list[dict[str, Any]], like: dict[str, Any]
) -> None:
  """Refuses arrays that are not those that are wanted.

  Args:
    folder: Where they are, for the error.
    descriptions: What `describe_arrays` said of them.
    like: What is wanted: names to anything with a shape and a dtype.

  Raises:
    WorkdirError: if an array is missing, is too many, or has another shape or
      dtype. It names the first, and how many there are.
  """
  wanted = {
    name: _format_array(leaf.shape, leaf.dtype) for name, leaf in like.items()
  }
  found = {
    each['name']: _format_array(each['shape'], each['dtype'])
    for each in descriptions
  }
  differing = [
    name
    for name in dict.fromkeys([*wanted, *found])
    if wanted.get(name) != found.get(name)
  ]
  if differing:
    name = differing[0]
    raise _files.WorkdirError(
      f'{str(folder)!r} does not fit: {name or "the tree"} must be '
      f'{wanted.get(name, "nothing")}, found {found.get(name, "nothing")}. '
      f'Leaves that differ: {len(differing)}.'
    )


def _format_array(shape: Any, dtype: Any) -> str:
  return f'{dtype}[{",".join(map(str, shape))}]'


def _to_host(name: str, leaf: Any) -> np.ndarray:
  """One leaf as an array of the dtype that jax has it in."""
  if isinstance(leaf, (bool, int, float, complex)):
    leaf = jax.numpy.asarray(leaf)
  dtype = getattr(leaf, 'dtype', None)
  if dtype is None or dtype == np.dtype(object):
    raise ValueError(
      f'{name or "The tree"} must be an array, got {type(leaf).__name__}.'
    )
  if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
    raise ValueError(
      f'{name or "The tree"} must be an array of numbers, got {dtype}. Save '
      'jax.random.key_data of it.'
    )
  return np.asarray(leaf)
