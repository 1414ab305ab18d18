"""The files of real nodes as one trace: an order that keeps cause and effect.

Clocks of two hosts cannot be compared, so times alone give no order. What does
is that weights must exist before they are read.
"""

import collections
from collections.abc import Mapping
import heapq

import numpy as np

from jasgd.traces import _node_schema
from jasgd.traces import _schema

_NAMES = ('kind', 'peer', 'mix', 'version', 'peer_version', 'end_time')
_CHANGES = (
  _node_schema.NodeKind.STEP,
  _node_schema.NodeKind.MIX,
  _node_schema.NodeKind.RESTART,
)

_Version = tuple[int, int]  # A node, and how often its weights had changed.


def merge_records(
  parts: Mapping[int, np.ndarray], num_needed: Mapping[int, int]
) -> np.ndarray:
  """Puts the records of nodes in an order in which all of them can be replayed.

  Every record comes after those before it in its file, and after the versions
  that it reads have come to be: of a node that is mixed in, its version; of a
  force that the centre takes in, that of the mix which it is from. The records
  of one all-reduce follow each other. Among what can be next, the record that
  ended first is.

  Args:
    parts: The records in each file, by node, and `CENTRE`.
    num_needed: How many records of each file must be there. Others, which were
      written while the files were being read, are left out if what they read
      is not there.

  Returns:
    The records, in order.

  Raises:
    TraceError: if a version is read that was never written.
  """
  merge = _Merge(parts)
  merge.run()
  merge.check(num_needed)
  nodes = list(parts)
  starts = np.cumsum([0, *(len(part) for part in parts.values())])
  offsets = dict(zip(nodes, starts.tolist(), strict=False))
  places = [offsets[node] + index for node, index in merge.order]
  records = np.concatenate(list(parts.values()))
  return records[np.array(places, int)]


class _Merge:
  """A merge under way.

  Attributes:
    order: (node, index) of records, as they come out.
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
    # Those who are at an all-reduce, and those who wait for a node's version.
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
            f'Record {self._next[node]} of {_name(node)} reads version '
            f'{version} of {_name(peer)}, which was never written: '
            + (
              f'its file ends at version {last}.'
              if peer in self._size
              else 'it has no file.'
            )
          )
    raise _schema.TraceError(
      f'Record {self._next[stuck[0]]} of {_name(stuck[0])} waits for records '
      'that wait for it: these files are not of one run.'
    )

  def _look(self, node: int) -> None:
    """The next record of a node is ready, or waits for another node."""
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
    # The centre takes in a force that came about with the version after.
    later = node == _node_schema.CENTRE
    columns = self._columns[node]
    return [
      (columns['peer'][index], columns['peer_version'][index] + later)
      for index in range(self._next[node], self._find_end(node))
      if columns['kind'][index] == _node_schema.NodeKind.MIX
      and columns['peer'][index] != _node_schema.ALL
    ]

  def _find_end(self, node: int) -> int:
    """Where what happened at once, such as a mix with several others, ends."""
    columns, index = self._columns[node], self._next[node]
    kinds, mixes = columns['kind'], columns['mix']
    end = index + 1
    if kinds[index] == _node_schema.NodeKind.MIX:
      while (
        end < self._size[node]
        and kinds[end] == kinds[index]
        and mixes[end] == mixes[index]
      ):
        end += 1
    return end

  def _take(self, node: int) -> None:
    """Takes the next record of a node, or those of a mix."""
    index, end = self._next[node], self._find_end(node)
    kind = self._columns[node]['kind'][index]
    if kind in _CHANGES:
      version = self._columns[node]['version'][index]
      is_next = version == self._version[node] + 1
      # A restart may leave out numbers that had not been written down.
      is_later = version > self._version[node]
      if not (is_next or (is_later and kind == _node_schema.NodeKind.RESTART)):
        raise _schema.TraceError(
          f'Record {index} of {_name(node)} has version {version} after '
          f'version {self._version[node]}.'
        )
      self._version[node] = version
    self.order += [(node, place) for place in range(index, end)]
    self._next[node] = end

  def _wake(self, node: int) -> None:
    """Looks at those again who wait for what a node has now."""
    waiting = self._waiting.pop(node, ())
    still = [each for each in waiting if each[0] > self._version[node]]
    if still:
      self._waiting[node] = still
    for version, waiter in waiting:
      if version <= self._version[node]:
        self._look(waiter)


def _number_rounds(columns: Mapping[str, list]) -> dict[int, int]:
  """The number of each all-reduce, by the index of its record.

  It alone tells one from others: nodes that go on from a checkpoint go on with
  a number that none of them has used. What else a record has does not: a node
  that was lost before its first one writes no RESTART, though others do.
  """
  is_mean = [
    kind == _node_schema.NodeKind.MIX and peer == _node_schema.ALL
    for kind, peer in zip(columns['kind'], columns['peer'], strict=True)
  ]
  numbers = enumerate(columns['peer_version'])
  return {index: number for index, number in numbers if is_mean[index]}


def _name(node: int) -> str:
  return 'the centre' if node == _node_schema.CENTRE else f'node {node}'
