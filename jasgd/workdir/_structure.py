"""Trees as JSON: rebuilt without the classes that they were made of."""

from typing import Any

import jax


def describe_tree(tree: Any) -> tuple[Any, list[tuple[str, Any]]]:
  """Takes a tree apart into a description and its leaves.

  The description is JSON: null for None, a number for a leaf (its index), and
  `{'dict': [[key, description], ...]}`, `{'list': [...]}`, `{'tuple': [...]}`.
  A node of any other class (a NamedTuple, a flax struct) is described as a dict
  from the names of its fields, for its class may not be there to read it.

  Args:
    tree: A tree of arrays.

  Returns:
    The description; and the leaves with their names, in the order of
    `jax.tree.leaves`.

  Raises:
    ValueError: if a key of a dict is neither a string nor a number.
  """
  leaves = []
  return _describe(tree, (), leaves), leaves


def rebuild_tree(description: Any, leaves: list[Any]) -> Any:
  """The tree that a description says, of these leaves."""
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
  """Describes a node, and adds the leaves under it."""
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
  """A key of a dict that JSON gives back as it was."""
  if not isinstance(key, (str, int, float)):
    raise ValueError(
      'A key of a dict must be a string or a number, got '
      f'{key!r} at {jax.tree_util.keystr(path) or "the top"}.'
    )
  return key
