"""Weights as one flat buffer, for messages, snapshots and slots."""

import dataclasses
import functools
import hashlib
import math
from typing import Any
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

# Bytes. jax copies a buffer with a smaller alignment, and uses others in place.
_ALIGNMENT = 64

# Count of numbers that a digest reads from each part, evenly spaced: few, since
# a server computes a digest at every update.
_DIGEST_SIZE = 256

WIRE_DTYPES = ('float32', 'bfloat16')

# Views of a buffer: one array for each dtype.
BufferViews = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """Place of a leaf, counted in numbers of its part; shape and dtype."""

  name: str
  shape: tuple[int, ...]
  dtype: Any
  part: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class _Part:
  """Place of all leaves of one stored dtype in the buffer, in bytes."""

  dtype: Any
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """Layout of a tree of arrays in one buffer, one part for each dtype.

  Weights with statistics and a gradient with statistics have the same layout. A
  buffer is packed on the host, and split inside compiled functions, where the
  split costs nothing. Equal layouts are equal keys of a cache.

  Attributes:
    size: Size of a buffer, in bytes.

  Examples:
    >>> import jax.numpy as jnp, numpy as np
    >>> from jasgd import engine
    >>> tree = {'a': jnp.ones(3), 'b': jnp.zeros((2, 2))}
    >>> layout = engine.make_layout(tree)
    >>> buffer = np.empty(layout.size, np.uint8)
    >>> layout.pack(tree, buffer)
    >>> layout.split(layout.view(buffer))['b'].shape
    (2, 2)
  """

  treedef: Any
  leaves: tuple[_Leaf, ...]
  parts: tuple[_Part, ...]
  size: int

  def view(self, buffer: np.ndarray) -> BufferViews:
    """Views of the parts of a buffer: arrays that share its memory."""
    return tuple(
      [buffer[part.start : part.stop].view(part.dtype) for part in self.parts]
    )

  def pack(self, tree: Any, buffer: np.ndarray) -> None:
    """Copies the leaves of a tree into a buffer, once they are computed."""
    leaves = self.treedef.flatten_up_to(tree)
    if not _is_cpu():
      # Starts all copies from the device at once. On a CPU, `np.asarray` below
      # reads the leaves in place.
      leaves = jax.device_get(leaves)
    views = self.view(buffer)
    for leaf, array in zip(self.leaves, leaves, strict=True):
      target = views[leaf.part][leaf.start : leaf.stop]
      target[...] = np.asarray(array).reshape(-1)

  def split(self, views: BufferViews) -> Any:
    """The tree in the views of a buffer; for use inside compiled functions."""
    leaves = []
    for leaf in self.leaves:
      flat = lax.slice_in_dim(views[leaf.part], leaf.start, leaf.stop)
      leaves.append(jnp.reshape(flat, leaf.shape).astype(leaf.dtype))
    return self.treedef.unflatten(leaves)

  def unpack(self, buffer: np.ndarray) -> Any:
    """The tree in a buffer, as numpy arrays that share no memory with it."""
    views = self.view(buffer)
    return self.treedef.unflatten(
      [
        views[leaf.part][leaf.start : leaf.stop]
        .reshape(leaf.shape)
        .astype(leaf.dtype)
        for leaf in self.leaves
      ]
    )

  def digest(self, buffer: np.ndarray) -> int:
    """A checksum from 1 to 65535, to tell one buffer from another.

    It reads only some of the numbers: after a wrong update most weights differ.
    """
    checksum = 0
    # Part by part: the bytes between two parts are never written.
    for view in self.view(buffer):
      stride = max(1, len(view) // _DIGEST_SIZE)
      chosen = np.ascontiguousarray(view[::stride])
      checksum = zlib.crc32(chosen.view(np.uint8).data, checksum)
    return checksum % 0xFFFF + 1

  @functools.cached_property
  def fingerprint(self) -> str:
    """A 16-digit hash: equal for equal layouts."""
    texts = [
      f'{leaf.name} {leaf.shape} {leaf.dtype} {self.parts[leaf.part].dtype}'
      for leaf in self.leaves
    ]
    return hashlib.sha256('\n'.join(texts).encode()).hexdigest()[:16]


def make_layout(tree: Any, wire_dtype: str = 'float32') -> Layout:
  """Makes the layout of a tree of arrays.

  Args:
    tree: Tree of arrays, or a result of `jax.eval_shape`.
    wire_dtype: Dtype that float32 is rounded to, to save bytes.

  Returns:
    The layout.

  Raises:
    ValueError: if the dtype is not in `WIRE_DTYPES`.
  """
  if wire_dtype not in WIRE_DTYPES:
    raise ValueError(
      f'wire_dtype must be one of {", ".join(WIRE_DTYPES)}, got {wire_dtype!r}.'
    )
  paths, treedef = jax.tree.flatten_with_path(tree)
  # Dtype and size of each part, in the order of their first leaves.
  dtypes: list[Any] = []
  sizes: list[int] = []
  leaves = []
  for path, array in paths:
    dtype = stored = np.dtype(array.dtype)
    if dtype == np.float32:
      stored = np.dtype(wire_dtype)
    if stored not in dtypes:
      dtypes.append(stored)
      sizes.append(0)
    part = dtypes.index(stored)
    name, shape = jax.tree_util.keystr(path), tuple(array.shape)
    start = sizes[part]
    sizes[part] += math.prod(shape)
    leaves.append(_Leaf(name, shape, dtype, part, start, sizes[part]))
  parts = []
  start = 0
  for dtype, size in zip(dtypes, sizes, strict=True):
    stop = start + size * dtype.itemsize
    parts.append(_Part(dtype, start, stop))
    start = -(-stop // _ALIGNMENT) * _ALIGNMENT
  return Layout(treedef, tuple(leaves), tuple(parts), start)


def pack_buffer(layout: Layout, tree: Any) -> np.ndarray:
  """Packs a tree into a new buffer."""
  buffer = np.empty(layout.size, np.uint8)
  layout.pack(tree, buffer)
  return buffer


@functools.cache
def _is_cpu() -> bool:
  return jax.default_backend() == 'cpu'
