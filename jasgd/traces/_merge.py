"""The files of several owners as one trace, in an order of cause and effect.

Clocks of two hosts cannot be compared, so times alone give no order. The order
follows from this: weights must exist before they are read.
"""

import collections
from collections.abc import Mapping
import heapq

import numpy as np

from jasgd.traces import _schema

_NAMES = (
  *('kind', 'updates', 'source', 'group', 'version', 'source_version'),
  'end_time',
)

_Version = tuple[int, int]  # (replica, version)


def merge_records(
  parts: Mapping[int, np.ndarray], num_needed: Mapping[int, int]
) -> np.ndarray:
  """Puts the records of several files in an order that replay can execute.

  Every record comes after those before it in its file, and after the versions
  that it reads were made: for a mix, that version of its source; for a move of
  the centre, the node's mix that made the force. The records of one all-reduce
  follow each other. Among the records that can be next, the one that ended
  first is next.

  Args:
    parts: From a replica to the records in its owner's file.
    num_needed: Number of records of each file that must be merged. Later ones,
      which were written while the files were being read, are left out if what
      they read is not there.

  Returns:
    The records, in order.

  Raises:
    TraceError: if a version is read that was never written.
  """
  merge = _Merge(parts)
  merge.run()
  merge.check(num_needed)
  starts = np.cumsum([0, *(len(part) for part in parts.values())])
  offsets = dict(zip(parts, starts.tolist(), strict=False))
  places = [offsets[owner] + index for owner, index in merge.order]
  records = np.concatenate(list(parts.values()))
  return records[np.array(places, int)]


class _Merge:
  """A merge under way.

  Attributes:
    order: (replica, index in its file) of the records merged so far.
  """

  def __init__(self, parts: Mapping[int, np.ndarray]) -> None:
    """Looks at the first record of every file."""
    self.order: list[tuple[int, int]] = []
    self._columns = {
      node: {name: part[name].tolist() for name in _NAMES}
      for node, part in parts.items()
    }
    self._size = {node: len(part) for node, part in parts.items()}
    self._next = dict.fromkeys(parts, 0)
    self._version = dict.fromkeys(parts, 0)
    self._rounds = {
      node: _number_rounds(columns) for node, columns in self._columns.items()
    }
    self._num_members = collections.Counter(
      number for rounds in self._rounds.values() for number in rounds.values()
    )
    # From an all-reduce to the nodes that have come to it, and from a node to
    # the (version, node) that wait for it.
    self._gathered: dict[int, list[int]] = {}
    self._waiting: dict[int, list[tuple[int, int]]] = {}
    self._ready: list[tuple[float, int, list[int]]] = []
    for node in parts:
      self._look(node)

  def run(self) -> None:
    """Takes all records that can be taken."""
    while self._ready:
      _, _, members = heapq.heappop(self._ready)
      for node in members:
        self._take(node)
      for node in members:
        self._wake(node)
        self._look(node)

  def check(self, num_needed: Mapping[int, int]) -> None:
    """Raises a TraceError if a record that is needed has not been taken."""
    stuck = [node for node in num_needed if self._next[node] < num_needed[node]]
    if not stuck:
      return
    for node in stuck:
      for peer, version in self._list_reads(node):
        last = max(self._columns.get(peer, {}).get('version', ()), default=0)
        if version > last:
          raise _schema.TraceError(
            f'Record {self._next[node]} of {describe_replica(node)} reads '
            f'version {version} of {describe_replica(peer)}, which was never '
            'written: '
            + (
              f'its file ends at version {last}.'
              if peer in self._size
              else 'it has no file.'
            )
          )
    raise _schema.TraceError(
      f'Record {self._next[stuck[0]]} of {describe_replica(stuck[0])} waits '
      'for records that wait for it: these files are not of one run.'
    )

  def _look(self, node: int) -> None:
    """Adds a node's next record to those that are ready, or to a queue."""
    index = self._next[node]
    if index == self._size[node]:
      return
    for peer, version in self._list_reads(node):
      if self._version.get(peer, -1) < version:
        self._waiting.setdefault(peer, []).append((version, node))
        return
    members = [node]
    if index in self._rounds[node]:
      number = self._rounds[node][index]
      members = self._gathered.setdefault(number, [])
      members.append(node)
      if len(members) < self._num_members[number]:
        return
      members.sort()
    time = max(
      self._columns[member]['end_time'][self._next[member]]
      for member in members
    )
    heapq.heappush(self._ready, (time, members[0], members))

  def _list_reads(self, node: int) -> list[_Version]:
    """The versions of others that a node's next record, or mix, reads."""
    columns = self._columns[node]
    reads = []
    for index in range(self._next[node], self._find_end(node)):
      kind = columns['kind'][index]
      if kind == _schema.Kind.MIX:
        reads.append(
          (columns['source'][index], columns['source_version'][index])
        )
      elif kind == _schema.Kind.MOVE:
        # The node's mix made the force along with the version after.
        version = columns['source_version'][index] + 1
        reads.append((columns['source'][index], version))
    return reads

  def _find_end(self, node: int) -> int:
    """Index after a node's next record, or after all records of one mix."""
    columns, index = self._columns[node], self._next[node]
    kinds, groups = columns['kind'], columns['group']
    end = index + 1
    if kinds[index] == _schema.Kind.MIX and groups[index]:
      while (
        end < self._size[node]
        and kinds[end] == kinds[index]
        and groups[end] == groups[index]
      ):
        end += 1
    return end

  def _take(self, node: int) -> None:
    """Takes the next record of a node, or those of a mix."""
    index, end = self._next[node], self._find_end(node)
    if self._columns[node]['updates'][index]:
      kind = self._columns[node]['kind'][index]
      version = self._columns[node]['version'][index]
      is_next = version == self._version[node] + 1
      # A restart may skip numbers whose records were lost with the machine.
      is_later = version > self._version[node]
      if not (is_next or (is_later and kind == _schema.Kind.RESTART)):
        raise _schema.TraceError(
          f'Record {index} of {describe_replica(node)} has version {version} '
          f'after version {self._version[node]}.'
        )
      self._version[node] = version
    self.order += [(node, place) for place in range(index, end)]
    self._next[node] = end

  def _wake(self, node: int) -> None:
    """Looks again at the nodes that wait for a version that exists now."""
    waiting = self._waiting.pop(node, ())
    still = [each for each in waiting if each[0] > self._version[node]]
    if still:
      self._waiting[node] = still
    for version, waiter in waiting:
      if version <= self._version[node]:
        self._look(waiter)


def _number_rounds(columns: Mapping[str, list]) -> dict[int, int]:
  """The number of each all-reduce, by the index of its record.

  The number alone tells one from others: nodes that go on from a checkpoint
  continue with a number that none of them has used. Counting RESTARTs would not
  do: a node that was lost before its first mean writes none, while others do.
  """
  return {
    index: columns['group'][index]
    for index, kind in enumerate(columns['kind'])
    if kind == _schema.Kind.MEAN
  }


def describe_replica(replica: int) -> str:
  """Name of a replica in messages."""
  return 'the centre' if replica == _schema.SERVER else f'node {replica}'
