"""Traces for tests: any bytes, and runs that could have been."""

from hypothesis import strategies
import numpy as np

from jasgd import traces

HEADER = {
  'config': {'protocol': 'softsync', 'arguments': [2, None, 0.5]},
  'seed': 0,
  'device_kind': 'cpu £',
  'bandwidth': float('inf'),
  'num_learners': 3,
}


def make_any_records(data):
  """Records of any content, NaN with a payload and unknown kinds too."""
  num_bytes = len(data) // traces.RECORD.itemsize * traces.RECORD.itemsize
  return np.frombuffer(data[:num_bytes], traces.RECORD)


any_records = strategies.binary(max_size=400).map(make_any_records)
seeds = strategies.integers(0, 2**32 - 1)


def make_trace(seed):
  """A run of random length: joins, restarts, drops, times not known."""
  rng = np.random.default_rng(seed)
  size = int(rng.integers(0, 60))
  num_learners = int(rng.integers(1, 6))
  read_clock = rng.integers(0, 10, size)
  arrive_clock = read_clock + rng.integers(0, 5, size)
  fate = rng.choice(len(traces.Fate), size, p=[0.44, *[0.08] * 7])
  is_applied = fate == traces.Fate.APPLIED
  apply_clock = np.where(
    is_applied, arrive_clock + rng.integers(0, 3, size), -1
  )
  fetches = rng.choice([0, 0.02])
  times = np.cumsum(rng.random((4, size)), axis=0)
  times[:, rng.random(size) < rng.choice([0, 0.1])] = np.nan
  records = traces.make_records(
    kind=rng.choice(
      len(traces.Kind), size, p=[0.85, 0.05, 0.05, 0.05 - fetches, fetches, 0]
    ),
    fate=fate,
    incarnation=np.sort(rng.integers(0, 3, size)),
    learner=rng.integers(0, num_learners, size),
    step=rng.integers(0, 100, size),
    read_clock=read_clock,
    arrive_clock=arrive_clock,
    apply_clock=apply_clock,
    start_time=times[0],
    compute_time=times[1] - times[0],
    arrive_time=times[2],
    release_time=times[3],
  )
  for index in np.flatnonzero(records['kind'] == traces.Kind.RESTART):
    records['step'][index] = rng.integers(-1, index)
  header = {
    'num_learners': num_learners + int(rng.integers(0, 2)),
    'bytes_per_push': 12,
    'bytes_per_pull': 10,
    'in_flight': [[0, 7, 3, 1.5]] * int(rng.integers(0, 3)),
  }
  return traces.Trace(records, header)
