"""What a node, or the centre, writes down of itself."""

import pathlib
import time
from typing import Any

import numpy as np

from jasgd import traces


class NodeBook:
  """Appends a node's records to its file, ahead of what they tell of.

  Args:
    path: The file; one that is there is continued.
    header: Of a new file.
    node: Its number, or `traces.CENTRE`.
    origin: The time of day at which the run began: times count from there.

  Attributes:
    origin: The same; an earlier one may be told later.
    last_version: The largest version that was written.
    last_mass: The mass in the last record of the node itself.
    num_mixes: The number of the next mix.
    num_means: The number of the next all-reduce, as far as this node knows.
  """

  def __init__(
    self, path: pathlib.Path, header: dict[str, Any], node: int, origin: float
  ) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that goes on has the header that it began with.
    self._writer = traces.NodeTraceWriter(
      path, None if path.exists() else header
    )
    self._node = node
    self.origin = origin
    self.last_version = 0
    self.last_mass = 0.0
    self.num_mixes = 0
    self.num_means = 0
    if num_records := self._writer.num_records:
      size = num_records * traces.NODE_RECORD.itemsize
      records = np.memmap(
        path, traces.NODE_RECORD, 'r', path.stat().st_size - size, num_records
      )
      self.last_version = int(records['version'].max(initial=0))
      is_own = records['kind'] != traces.NodeKind.LOST
      if np.any(is_own):
        self.last_mass = float(records['mass'][is_own][-1])
      self.num_mixes = int(records['mix'].max(initial=-1)) + 1
      means = records['peer_version'][records['peer'] == traces.ALL]
      self.num_means = int(means.max(initial=-1)) + 1

  def get_time(self) -> float:
    """Seconds since the run began."""
    return time.time() - self.origin

  def write(self, kind: traces.NodeKind, rows: list[dict[str, Any]]) -> None:
    """Adds records, which outlive this process from now on.

    Args:
      kind: Of all of them.
      rows: Fields of `traces.NODE_RECORD` of each; a time that is not given is
        now, and other fields are what they are where they mean nothing.
    """
    records = np.zeros(len(rows), traces.NODE_RECORD)
    records['kind'], records['node'] = kind, self._node
    for name in ('peer', 'mix', 'peer_version', 'peer_step'):
      records[name] = -1
    records['own_weight'] = 1.0
    records['start_time'] = records['end_time'] = self.get_time()
    records['order'] = self._writer.num_records + np.arange(len(rows))
    for record, row in zip(records, rows, strict=True):
      for name, value in row.items():
        record[name] = value
    self.last_version = max(
      self.last_version, int(records['version'].max(initial=0))
    )
    self._writer.append(records)
    self._writer.flush()

  def flush(self) -> None:
    """Hands records to the operating system: they outlive this process."""
    self._writer.flush()

  def sync(self) -> None:
    """Waits for the disk. Any thread may call it."""
    self._writer.sync()

  def close(self) -> None:
    """Closes the file. Twice is no error."""
    self._writer.close()
