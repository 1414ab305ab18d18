"""Weights as one flat buffer, to be sent, published and kept."""

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

# jax copies a buffer with a smaller alignment, and uses others in place.
_ALIGNMENT = 64

# Numbers that a digest reads, far from each other: it must cost nothing.
_DIGEST_SIZE = 256

WIRE_DTYPES = ('float32', 'bfloat16')

# Views of a buffer: one array for each dtype.
BufferViews = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """Where a leaf is: its part, its place in it, its shape and dtype."""

  name: str
  shape: tuple[int, ...]
  dtype: Any
  part: int
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class _Part:
  """All leaves of one dtype: their place in the buffer, in bytes."""

  dtype: Any
  start: int
  stop: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a tree of arrays lies in one buffer: the leaves of each dtype in a row.

  A gradient with its statistics lies just as the weights with theirs. A buffer
  is packed on the host, and split inside of compiled functions, where the split
  costs nothing. Equal layouts are equal keys.

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
    """The parts of a buffer, as arrays that share its memory."""
    return tuple(
      [buffer[part.start : part.stop].view(part.dtype) for part in self.parts]
    )

  def pack(self, tree: Any, buffer: np.ndarray) -> None:
    """Copies the leaves of a tree into a buffer; waits for them."""
    leaves = self.treedef.flatten_up_to(tree)
    if not _is_cpu():  # All copies at once, not one by one.
      leaves = jax.device_get(leaves)
    parts = self.view(buffer)
    for leaf, array in zip(self.leaves, leaves, strict=True):
      target = parts[leaf.part][leaf.start : leaf.stop]
      target[...] = np.asarray(array).reshape(-1)

  def split(self, parts: BufferViews) -> Any:
    """The tree in some parts; for use inside of compiled functions."""
    leaves = []
    for leaf in self.leaves:
      flat = lax.slice_in_dim(parts[leaf.part], leaf.start, leaf.stop)
      leaves.append(jnp.reshape(flat, leaf.shape).astype(leaf.dtype))
    return self.treedef.unflatten(leaves)

  def unpack(self, buffer: np.ndarray) -> Any:
    """The tree in a buffer, as numpy arrays of its own."""
    parts = self.view(buffer)
    return self.treedef.unflatten(
      [
        parts[leaf.part][leaf.start : leaf.stop]
        .reshape(leaf.shape)
        .astype(leaf.dtype)
        for leaf in self.leaves
      ]
    )

  def digest(self, buffer: np.ndarray) -> int:
    """A checksum from 1 to 65535, to tell one buffer from another.

    It reads some of the numbers only: where weights differ at all, most do.
    """
    checksum = 0
    for part in self.view(buffer):  # Bytes between the parts have no meaning.
      stride = max(1, len(part) // _DIGEST_SIZE)
      chosen = np.ascontiguousarray(part[::stride])
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
  """The layout of a tree of arrays.

  Args:
    tree: Arrays, or what `jax.eval_shape` gives.
    wire_dtype: The dtype that float32 is rounded to, to save bytes.

  Returns:
    The layout.

  Raises:
    ValueError: if the dtype is none of `WIRE_DTYPES`.
  """
  if wire_dtype not in WIRE_DTYPES:
    raise ValueError(
      f'wire_dtype must be one of {", ".join(WIRE_DTYPES)}, got {wire_dtype!r}.'
    )
  paths, treedef = jax.tree.flatten_with_path(tree)
  dtypes: list[Any] = []  # Of the parts, in the order in which they come up.
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


@functools.cache
def _is_cpu() -> bool:
  return jax.default_backend() == 'cpu'
