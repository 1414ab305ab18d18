"""Buffers that are kept and used again.

Fresh memory for a large array costs more than the copy into it, as the kernel
has to clear each page. So buffers are kept. With `is_shared` a buffer is a
memfd, which other processes can map. It has no name, and the kernel frees it
when the last process that has mapped it ends.
"""

import fcntl
import mmap
import os

import numpy as np

ALIGNMENT = 64  # Bytes; jax copies arrays that are not aligned to it.
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE = 2, 4, 16


class Buffer:
  """A flat, aligned array of bytes.

  Attributes:
    index: Number in the pool.
    array: The bytes.
    fd: File descriptor of the memfd; -1: not shared.
  """

  def __init__(self, index: int, size: int, *, is_shared: bool = False) -> None:
    """Makes a buffer of `size` bytes."""
    self.index = index
    self.fd = -1
    if is_shared:
      self.fd, self.array = make_shared(size, is_sealed=True)
    else:
      self.array = make_aligned(size)

  def close(self) -> None:
    """Closes the file descriptor; arrays keep their mappings."""
    if self.fd >= 0:
      os.close(self.fd)
      self.fd = -1


class BufferPool:
  """Buffers of one size: as many as were ever needed at once.

  It is not thread-safe.

  Args:
    size: Bytes of each buffer.
    is_shared: Whether other processes can map them, for reading.
  """

  def __init__(self, size: int, *, is_shared: bool = False) -> None:
    self.size = size
    self._is_shared = is_shared
    self._buffers: list[Buffer] = []
    self._free: list[Buffer] = []

  def __len__(self) -> int:
    return len(self._buffers)

  def take(self) -> Buffer:
    """A free buffer; its contents are arbitrary."""
    if not self._free:
      buffer = Buffer(len(self._buffers), self.size, is_shared=self._is_shared)
      self._buffers.append(buffer)
      return buffer
    return self._free.pop()  # The last one used may still be in the cache.

  def give_back(self, buffer: Buffer) -> None:
    """Makes a buffer free again."""
    self._free.append(buffer)

  def close(self) -> None:
    """Closes all file descriptors."""
    for buffer in self._buffers:
      buffer.close()


def make_aligned(size: int) -> np.ndarray:
  """An array of `size` bytes that begins at a multiple of `ALIGNMENT`."""
  raw = np.empty(size + ALIGNMENT, np.uint8)
  offset = -raw.ctypes.data % ALIGNMENT
  return raw[offset : offset + size]


def make_shared(size: int, *, is_sealed: bool) -> tuple[int, np.ndarray]:
  """A memfd and its bytes; if sealed, other processes can only read.

  No process can change its size, so that no reader is killed by SIGBUS.
  """
  fd = os.memfd_create('jasgd', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  try:
    os.ftruncate(fd, max(size, 1))
    array = map_shared(fd, size, is_writable=True)
    seals = _SEAL_SHRINK | _SEAL_GROW
    if is_sealed:  # Only after the mapping: `array` stays writable.
      seals |= _SEAL_FUTURE_WRITE
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
  except OSError:  # No memory, or no more file descriptors.
    os.close(fd)
    raise
  return fd, array


def map_shared(fd: int, size: int, *, is_writable: bool) -> np.ndarray:
  """The bytes behind a memfd, as an array."""
  access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
  mapped = mmap.mmap(fd, max(size, 1), mmap.MAP_SHARED, access)
  return np.frombuffer(mapped, np.uint8, size)
