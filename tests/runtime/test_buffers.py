"""Buffers: aligned, kept, and shared without write access for others."""

import fcntl
import gc
import mmap
import os

import numpy as np
import pytest

from jasgd.runtime import wires

SIZES = [1, 63, 64, 4096, 240_001]
every_size = pytest.mark.parametrize('size', SIZES)


def _count_fds():
  gc.collect()
  return len(os.listdir('/proc/self/fd'))


@every_size
@pytest.mark.parametrize('is_shared', [False, True])
def test_a_buffer_is_aligned_and_writable(size, is_shared):
  buffer = wires.Buffer(3, size, is_shared=is_shared)
  assert buffer.index == 3
  assert buffer.array.shape == (size,)
  assert buffer.array.dtype == np.uint8
  assert buffer.array.ctypes.data % wires.ALIGNMENT == 0
  buffer.array[:] = 7
  assert (buffer.array == 7).all()
  assert (buffer.fd >= 0) == is_shared
  buffer.close()
  buffer.close()
  assert buffer.fd == -1
  assert (buffer.array == 7).all()  # The memory lives as long as it is used.


def test_unshared_buffers_are_aligned_at_any_address():
  arrays = [wires.make_aligned(size) for size in range(1, 300)]
  assert all(array.ctypes.data % wires.ALIGNMENT == 0 for array in arrays)
  assert [array.nbytes for array in arrays] == list(range(1, 300))


@every_size
@pytest.mark.parametrize('is_sealed', [False, True])
def test_both_sides_see_the_same_bytes(size, is_sealed):
  fd, array = wires.make_shared(size, is_sealed=is_sealed)
  other = wires.map_shared(fd, size, is_writable=not is_sealed)
  os.close(fd)
  array[:] = np.arange(size) % 251
  np.testing.assert_array_equal(other, np.arange(size) % 251)
  assert other.flags.writeable != is_sealed
  if not is_sealed:
    other[-1] = 255
    assert array[-1] == 255


def test_a_sealed_buffer_cannot_be_written_by_others():
  fd, array = wires.make_shared(8192, is_sealed=True)
  again = os.open(f'/proc/self/fd/{fd}', os.O_RDWR)
  for descriptor in (fd, again):
    with pytest.raises(PermissionError):
      wires.map_shared(descriptor, 8192, is_writable=True)
    with pytest.raises(PermissionError):
      os.pwrite(descriptor, b'harm', 0)
  os.close(again)
  array[:] = 8  # The process that made it can write.
  readable = wires.map_shared(fd, 8192, is_writable=False)
  assert (readable == 8).all()
  with pytest.raises(ValueError, match='read-only'):
    readable[0] = 1
  with pytest.raises(ValueError, match='WRITEABLE'):
    readable.flags.writeable = True
  os.close(fd)


@pytest.mark.parametrize('is_sealed', [False, True])
def test_the_size_of_shared_memory_cannot_change(is_sealed):
  fd, array = wires.make_shared(8192, is_sealed=is_sealed)
  for size in (0, 4096, 16384):
    with pytest.raises(PermissionError):
      os.ftruncate(fd, size)
  assert os.fstat(fd).st_size == array.nbytes == 8192
  os.close(fd)


def test_a_mapping_beyond_the_end_is_refused():
  fd, _ = wires.make_shared(4096, is_sealed=True)
  with pytest.raises(ValueError, match='length'):
    wires.map_shared(fd, 4097, is_writable=False)
  os.close(fd)


def test_shared_memory_has_no_name_and_is_not_inherited():
  before = set(os.listdir('/dev/shm'))
  fd, array = wires.make_shared(4096, is_sealed=False)
  array[:] = 1
  assert set(os.listdir('/dev/shm')) == before
  assert 'memfd:' in os.readlink(f'/proc/self/fd/{fd}')
  assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
  os.close(fd)


def test_a_buffer_that_can_not_be_made_leaves_nothing(monkeypatch):
  def fail(*args, **kwargs):
    raise OSError('no more')

  before = _count_fds()
  monkeypatch.setattr(mmap, 'mmap', fail)
  with pytest.raises(OSError, match='no more'):
    wires.make_shared(4096, is_sealed=True)
  assert _count_fds() == before


@pytest.mark.parametrize('is_shared', [False, True])
def test_pool_keeps_and_reuses(is_shared):
  before = _count_fds()
  pool = wires.BufferPool(100, is_shared=is_shared)
  assert len(pool) == 0
  first, second = pool.take(), pool.take()
  assert (first.index, second.index) == (0, 1)
  assert first.array.nbytes == second.array.nbytes == pool.size == 100
  assert not np.shares_memory(first.array, second.array)
  pool.give_back(first)
  pool.give_back(second)
  assert pool.take() is second  # The one used last.
  assert pool.take() is first
  assert pool.take().index == 2
  assert len(pool) == 3
  pool.close()
  del pool, first, second
  assert _count_fds() == before
