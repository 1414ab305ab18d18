"""Traces for tests: random bytes, possible runs, files of nodes."""

from hypothesis import strategies
import numpy as np

from jasgd import traces

Kind = traces.Kind
HEADER = {
  'strategy': {'name': 'softsync', 'arguments': [2, None, 0.5]},
  'seed': 0,
  'device_kind': 'cpu £',
  'bandwidth': float('inf'),
  'num_workers': 3,
}


def make_any_records(data):
  """Records of any content, NaN with a payload and unknown kinds too."""
  num_bytes = len(data) // traces.RECORD.itemsize * traces.RECORD.itemsize
  return np.frombuffer(data[:num_bytes], traces.RECORD)


any_records = strategies.binary(max_size=700).map(make_any_records)
seeds = strategies.integers(0, 2**32 - 1)


def make_trace(seed):
  """A server's run of random length: joins, restarts, drops, unknown times."""
  rng = np.random.default_rng(seed)
  size = int(rng.integers(0, 60))
  num_workers = int(rng.integers(1, 6))
  fetches = rng.choice([0, 0.02])
  kind = rng.choice(
    [Kind.PUSH, Kind.JOIN, Kind.LEAVE, Kind.RESTART, Kind.FETCH],
    size,
    p=[0.85, 0.05, 0.05, 0.05 - fetches, fetches],
  )
  fate = rng.choice(len(traces.Fate), size, p=[0.44, *[0.08] * 7])
  is_applied = (kind == Kind.PUSH) & (fate == traces.Fate.APPLIED)
  is_member = (kind == Kind.JOIN) | (kind == Kind.LEAVE)
  read_version = rng.integers(0, 10, size)
  times = np.cumsum(rng.random((4, size)), axis=0)
  times[:, rng.random(size) < rng.choice([0, 0.1])] = np.nan
  records = traces.make_records(
    kind=kind,
    fate=fate,
    updates=(is_applied | is_member) & (rng.random(size) < 0.6),
    incarnation=np.sort(rng.integers(0, 3, size)),
    worker=rng.integers(0, num_workers, size),
    samples=rng.integers(0, 9, size),
    step=rng.integers(0, 100, size),
    read_version=read_version,
    clock=read_version + rng.integers(0, 5, size),
    start_time=times[0],
    compute_time=times[1] - times[0],
    end_time=times[2],
    release_time=times[3],
  )
  for index in np.flatnonzero(kind == Kind.RESTART):
    records['stands'][index] = rng.integers(-1, index)
  header = {
    'num_workers': num_workers + int(rng.integers(0, 2)),
    'bytes_per_push': 12,
    'bytes_per_pull': 10,
    'in_flight': [[0, 7, 3, 1.5]] * int(rng.integers(0, 3)),
  }
  return traces.Trace(records, header)


# --- Rows of nodes, as dicts of fields.


def step(version, time=0.0, **fields):
  """A step of a node that does nothing else: version and step are equal."""
  fields = {'read_version': version - 1, 'step': version, **fields}
  return {'kind': Kind.STEP, 'version': version, 'end_time': time, **fields}


def mix(version, time, source, source_version, group=1, **fields):
  """A mix with one source; rows of equal groups are one mix."""
  return {
    'kind': Kind.MIX,
    'version': version,
    'end_time': time,
    'source': source,
    'source_version': source_version,
    'group': group,
    **fields,
  }


def mean(version, time, group, **fields):
  """A node's part in a mean."""
  fields = {'kind': Kind.MEAN, 'group': group, **fields}
  return {'version': version, 'end_time': time, **fields}


def restart(version, read_version, time, **fields):
  """A node goes on from an earlier version, under a new number."""
  fields = {'kind': Kind.RESTART, 'read_version': read_version, **fields}
  return {'version': version, 'updates': 1, 'end_time': time, **fields}


_MOVES = (Kind.STEP, Kind.MIX, Kind.MOVE, Kind.MEAN)


def make_rows(rows):
  """Records from dicts of fields; by default a node is its own worker."""
  records = np.zeros(len(rows), traces.RECORD)
  for record, row in zip(records, rows, strict=True):
    replica = row.get('replica', 0)
    worker = row.get('source', 0) if replica < 0 else replica
    updates = row['kind'] in _MOVES
    for name, value in {'worker': worker, 'updates': updates, **row}.items():
      record[name] = value
  return records


def write_files(folder, files, **header):
  """Writes a file for each owner, as real nodes do."""
  folder.mkdir(exist_ok=True, parents=True)
  header = {'num_workers': 3, 'seed': 0, 'config': {'a': 1}, **header}
  for replica, rows in files.items():
    rows = [{'replica': replica, **row} for row in rows]
    path = folder / traces.get_file_name(replica)
    with traces.TraceWriter(path, header) as writer:
      writer.append(make_rows(rows))
