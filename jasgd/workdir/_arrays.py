"""Trees of arrays as files: arrays by orbax, descriptions as JSON.

A tree can be rebuilt without the classes that it was made of.
"""

import os
import pathlib
from typing import Any

import jax
import numpy as np

from jasgd.workdir import _files

_SUFFIX = '.bytes'  # Suffix of files that are written without orbax.


def to_host(leaves: list[tuple[str, Any]]) -> list[np.ndarray]:
  """Converts named leaves to numpy arrays; a ValueError names a bad leaf."""
  return [_to_host(name, leaf) for name, leaf in leaves]


def describe_arrays(
  leaves: list[tuple[str, Any]], arrays: list[np.ndarray]
) -> list[dict[str, Any]]:
  """Names, shapes and dtypes, as JSON-serialisable dicts."""
  return [
    {'name': name, 'shape': list(array.shape), 'dtype': str(array.dtype)}
    for (name, _), array in zip(leaves, arrays, strict=True)
  ]


def write_arrays(folder: pathlib.Path, arrays: list[np.ndarray]) -> None:
  """Writes arrays to a new folder."""
  # Orbax refuses empty arrays and empty lists.
  arrays = [array for array in arrays if array.size]
  if not arrays:
    return
  if jax.process_count() > 1:
    # In a group of processes, orbax lets only the first one write numpy arrays.
    # Here each process writes its own files.
    _write_bytes(folder, arrays)
  else:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
      checkpointer.save(folder.absolute(), args=ocp.args.StandardSave(arrays))


def read_arrays(
  folder: pathlib.Path, descriptions: list[dict[str, Any]]
) -> list[np.ndarray]:
  """Reads arrays that `write_arrays` wrote.

  Args:
    folder: Folder of the arrays.
    descriptions: Result of `describe_arrays`.

  Returns:
    The arrays.

  Raises:
    WorkdirError: if the files cannot be read, or do not fit the descriptions.
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
  except Exception as error:  # Orbax and tensorstore raise many classes.
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
  """Writes each array to its own file, as raw bytes."""
  folder.mkdir()
  for index, array in enumerate(arrays):
    with open(folder / f'{index}{_SUFFIX}', 'wb') as file:
      file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
      file.flush()
      os.fsync(file.fileno())


def _read_bytes(
  folder: pathlib.Path, arrays: list[np.ndarray]
) -> list[np.ndarray]:
  """Reads the files of `_write_bytes`, with the shapes of `arrays`."""
  return [
    np.fromfile(folder / f'{index}{_SUFFIX}', np.uint8)
    .view(array.dtype)
    .reshape(array.shape)
    for index, array in enumerate(arrays)
  ]


def check_not_narrowed(descriptions: list[dict[str, Any]]) -> None:
  """Raises a ValueError for a dtype that jax would change when restoring."""
  for each in descriptions:
    dtype = np.dtype(each['dtype'])
    narrowed = jax.eval_shape(lambda leaf: leaf, np.zeros((), dtype)).dtype
    if narrowed != dtype:
      raise ValueError(
        f'{each["name"] or "The tree"} is {dtype}, which jax narrows to '
        f'{narrowed}: convert it to that, or put it into position.'
      )


def check_alike(
  folder: pathlib.Path, descriptions: list[dict[str, Any]], like: dict[str, Any]
) -> None:
  """Checks that saved arrays have the expected names, shapes and dtypes.

  Args:
    folder: Folder of the arrays, for the error message.
    descriptions: Result of `describe_arrays`.
    like: Expected arrays by name: objects with a shape and a dtype.

  Raises:
    WorkdirError: if an array is missing or unexpected, or has another shape or
      dtype. The message names the first, and their number.
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
  """Converts a leaf to a numpy array; Python numbers get jax's dtypes."""
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
      'its jax.random.key_data instead.'
    )
  return np.asarray(leaf)


# --- Trees as JSON.


def describe_tree(tree: Any) -> tuple[Any, list[tuple[str, Any]]]:
  """Splits a tree into a description of its structure and its leaves.

  The description is JSON: null for None, a number for a leaf (its index), and
  `{'dict': [[key, description], ...]}`, `{'list': [...]}`, `{'tuple': [...]}`.
  A node of any other class (a NamedTuple, a flax struct) is described as a dict
  with the names of its fields, since a reader may not have its class.

  Args:
    tree: Tree of arrays.

  Returns:
    The description, and the leaves with their names in the order of
    `jax.tree.leaves`.

  Raises:
    ValueError: if a key of a dict is neither a string nor a number.
  """
  leaves = []
  return _describe(tree, (), leaves), leaves


def rebuild_tree(description: Any, leaves: list[Any]) -> Any:
  """Builds the tree of a description from its leaves."""
  if description is None:
    return None
  if isinstance(description, int):
    return leaves[description]
  ((kind, children),) = description.items()
  if kind == 'dict':
    return {key: rebuild_tree(child, leaves) for key, child in children}
  items = [rebuild_tree(child, leaves) for child in children]
  return tuple(items) if kind == 'tuple' else items


def _describe(node: Any, path: tuple[Any, ...], leaves: list[Any]) -> Any:
  """Describes a node, and appends its leaves to `leaves`."""
  if node is None:
    return None
  children = jax.tree.leaves_with_path(
    node, is_leaf=lambda child: child is not node
  )
  if len(children) == 1 and children[0][1] is node:
    leaves.append((jax.tree_util.keystr(path), node))
    return len(leaves) - 1
  descriptions = [
    _describe(child, (*path, *keys), leaves) for keys, child in children
  ]
  if type(node) is list:
    return {'list': descriptions}
  if type(node) is tuple:
    return {'tuple': descriptions}
  if isinstance(node, dict):
    names = [_check_key(keys[0].key, path) for keys, _ in children]
  else:
    names = [jax.tree_util.keystr(keys, simple=True) for keys, _ in children]
  return {'dict': list(map(list, zip(names, descriptions, strict=True)))}


def _check_key(key: Any, path: tuple[Any, ...]) -> Any:
  """Returns a key that JSON keeps; raises a ValueError for others."""
  if not isinstance(key, (str, int, float)):
    raise ValueError(
      'A key of a dict must be a string or a number, got '
      f'{key!r} at {jax.tree_util.keystr(path) or "the top"}.'
    )
  return key
