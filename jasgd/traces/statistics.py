"""Statistics of a trace. Each function is pure and vectorised.

Records that a restart made void are left out, as in the columns. Arrays over
workers have an entry for each of `trace.num_workers`. 0 divided by 0 is NaN.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from jasgd import protocols
from jasgd.traces import _lead
from jasgd.traces import _schema
from jasgd.traces import _trace

PERCENTILES = (50, 95, 99)
_ROUNDING = 1e-9  # Largest relative rounding error of a sum of masses.
_Kind = _schema.Kind


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Distribution:
  """A distribution of whole numbers; its measures are NaN if it is empty."""

  count: int
  mean: float
  std: float
  min: float
  max: float
  percentiles: dict[int, float]  # Keys are `PERCENTILES`.
  values: np.ndarray  # The numbers that occur, ascending.
  counts: np.ndarray  # How often each of them occurs.

  @property
  def histogram(self) -> np.ndarray:
    """Entry i: how often i occurs, for numbers of at least 0."""
    if not self.count:
      return np.zeros(0, np.int64)
    histogram = np.zeros(int(self.max) + 1, np.int64)
    histogram[self.values] = self.counts
    return histogram


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class WorkerTimes:
  """Where the time of each worker went, in seconds: arrays over workers."""

  busy: np.ndarray  # Computing.
  waiting: np.ndarray  # Held back by the server, or waiting for a mix.
  communication: np.ndarray  # From weights to a push's arrival, minus `busy`.
  idle: np.ndarray  # The run's duration, minus `busy`.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
  """What each worker sent and received: arrays over workers.

  Messages hold weights or gradients; those of an all-reduce count by size.
  Bytes are None if the header does not have the size of a message.
  """

  num_sent: np.ndarray
  num_received: np.ndarray
  sent: np.ndarray | None  # Bytes.
  received: np.ndarray | None  # Bytes.


class NodeRecords(NamedTuple):
  """The records that nodes made, node by node: arrays of one length.

  A record in `is_return` follows directly on one in `is_death`.
  """

  records: np.ndarray
  is_death: np.ndarray  # The node's last record before its death.
  is_return: np.ndarray  # The node's first record after its death.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Deaths:
  """How many nodes died and came back, and the mass that was lost."""

  num_deaths: int
  num_returns: int
  lost_mass: float  # Push-sum's, with nodes and with messages.


def count_fates(trace: _trace.Trace) -> dict[protocols.Fate, int]:
  """Counts the gradients with each fate.

  Args:
    trace: A trace.

  Returns:
    A number for every `Fate`, 0 included.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(fate=[0, 0, 2]))
    >>> traces.statistics.count_fates(trace)[traces.Fate.DROPPED_LATE]
    1
  """
  counts = np.bincount(trace.fate, minlength=len(protocols.Fate))
  return {fate: int(counts[fate]) for fate in protocols.Fate}


def get_clock(trace: _trace.Trace) -> int:
  """The server's clock at the end, or the steps of all nodes.

  Args:
    trace: A trace.

  Returns:
    The version of the server's replica after the last record; 0 if there is
    none. Without a server, the number of steps.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(clock=[0, 1]))
    >>> traces.statistics.get_clock(trace)
    2
  """
  if not trace.has_server:
    return trace.num_gradients
  own = trace.of_replica(_schema.SERVER)
  return int(own['version'][-1]) if len(own) else 0


def describe(numbers: np.ndarray) -> Distribution:
  """Mean, spread, percentiles and counts of whole numbers.

  Args:
    numbers: Whole numbers, such as `trace.staleness` or a part of it.

  Returns:
    The distribution.

  Examples:
    >>> import numpy as np
    >>> from jasgd import traces
    >>> summary = traces.statistics.describe(np.array([0, 1, 1, 3]))
    >>> summary.mean, summary.percentiles[50]
    (1.25, 1.0)
    >>> summary.histogram
    array([1, 2, 0, 1])
  """
  numbers = np.ascontiguousarray(numbers, np.int64)
  if not len(numbers):
    nan, none = float('nan'), np.zeros(0, np.int64)
    percentiles = dict.fromkeys(PERCENTILES, nan)
    return Distribution(
      count=0,
      mean=nan,
      std=nan,
      min=nan,
      max=nan,
      percentiles=percentiles,
      values=none,
      counts=none,
    )
  values, counts = _count_values(numbers)
  percentiles = np.percentile(numbers, PERCENTILES).tolist()
  return Distribution(
    count=len(numbers),
    mean=float(numbers.mean()),
    std=float(numbers.std()),
    min=float(values[0]),
    max=float(values[-1]),
    percentiles=dict(zip(PERCENTILES, percentiles, strict=True)),
    values=values,
    counts=counts,
  )


def _count_values(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """`np.unique` with counts, without sorting where the range is small."""
  smallest, largest = int(numbers.min()), int(numbers.max())
  if largest - smallest > 4 * len(numbers) + 1024:
    return np.unique(numbers, return_counts=True)
  counts = np.bincount(numbers - smallest)
  values = np.flatnonzero(counts)
  return values + smallest, counts[values]


def measure_times(trace: _trace.Trace) -> WorkerTimes:
  """Measures how long each worker computed, waited and communicated.

  From its snapshot to its release, a learner is computing, or waiting at the
  server (until `find_wait_ends`), or else communicating, with the queues on the
  way. A node is computing in its steps, and waiting for mixes, means and
  answers that never came. Times that are not known (NaN) count as 0. `idle` is
  all time without computing: also before a worker came and after it went.

  Args:
    trace: A trace.

  Returns:
    Seconds per worker.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(compute_time=2, end_time=3, release_time=7)
    ... )
    >>> times = traces.statistics.measure_times(trace)
    >>> print(*times.busy, *times.communication, *times.waiting, *times.idle)
    2.0 1.0 4.0 5.0
  """
  num_workers = trace.num_workers
  if not trace.has_server:
    questions = trace.of_kind(_Kind.LOST)
    questions = questions[questions['read_version'] < 0]
    mixes = keep_first_of_mix(trace.mixes)
    busy = _add_durations(trace.steps, num_workers)
    waiting = _add_durations(mixes, num_workers)
    waiting += _add_durations(questions, num_workers)
    communication = np.zeros(num_workers)
  else:
    compute_time = trace.compute_time
    seconds = trace.end_time - trace.start_time - compute_time
    seconds = np.maximum(seconds, 0)  # Rounding may make it negative.
    busy = _sum_by_worker(trace, compute_time)
    waiting = _sum_by_worker(trace, find_wait_ends(trace) - trace.end_time)
    communication = _sum_by_worker(trace, seconds)
  return WorkerTimes(
    busy=busy,
    waiting=waiting,
    communication=communication,
    idle=np.maximum(trace.duration - busy, 0),
  )


def find_wait_ends(trace: _trace.Trace) -> np.ndarray:
  """When the learner of each gradient stopped waiting at the server.

  That is when it was released. A learner that never was waited until it left
  (or, after a restart of the server, until it was given other weights), or else
  to the end of the trace. One that was gone already did not wait.

  Args:
    trace: A trace of a server.

  Returns:
    An entry for each gradient, in seconds; NaN where no time is known.

  Examples:
    >>> from jasgd import traces
    >>> push, leave = traces.Kind.PUSH, traces.Kind.LEAVE
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     kind=[push, push, leave, push],
    ...     worker=[0, 1, 0, 1],
    ...     clock=[0, 1, 2, 2],
    ...     end_time=[1, 2, 5, 7],
    ...     release_time=[float('nan'), 2, 5, 9],
    ...   )
    ... )
    >>> traces.statistics.find_wait_ends(trace)
    array([5., 2., 9.])
  """
  ends = np.array(trace.release_time)
  is_gone = trace.fate == protocols.Fate.DROPPED_GONE
  ends[is_gone] = trace.end_time[is_gone]
  held = np.flatnonzero(np.isnan(ends) & ~np.isnan(trace.end_time))
  if not len(held):
    return ends
  last = np.fmax.reduce(np.fmax(trace.end_time, trace.release_time))
  records = trace.of_kind(_Kind.PUSH, _Kind.FETCH, _Kind.JOIN, _Kind.LEAVE)
  is_push = records['kind'] == _Kind.PUSH
  times = np.where(is_push, records['start_time'], records['end_time'])
  # The next record of the same learner; its last record has none.
  order = np.argsort(records['worker'], kind='stable')
  next_time = np.full(len(records), np.nan)
  is_same = np.diff(records['worker'][order]) == 0
  next_time[order[:-1][is_same]] = times[order[1:][is_same]]
  next_time = next_time[is_push][held]
  ends[held] = np.fmax(np.fmin(next_time, last), trace.end_time[held])
  return ends


def count_traffic(trace: _trace.Trace) -> Traffic:
  """What each worker sent and received.

  With a server, each gradient is a push. Each recorded fetch is a pull. If none
  are recorded, a learner pulls for every gradient, including those in flight
  and those that were lost with a learner (its LEAVE records this). The header
  has the sizes, `bytes_per_push` and `bytes_per_pull`. Between nodes, every mix
  is a message of `bytes_per_push` bytes. A mean is `messages_per_mean` messages
  for each node, if the header has that number; otherwise it is 2 (n - 1) pieces
  of 1/n of a message.

  Args:
    trace: A trace.

  Returns:
    Messages and bytes per worker.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(worker=[0, 1, 0]), {'bytes_per_push': 10}
    ... )
    >>> traces.statistics.count_traffic(trace).sent
    array([20, 10])
  """
  push, pull = map(trace.header.get, ('bytes_per_push', 'bytes_per_pull'))
  if trace.has_server:
    num_sent, num_received = _count_exchanges(trace)
  else:
    num_sent, num_received = _count_messages(trace)
    pull = push
  return Traffic(
    num_sent=num_sent,
    num_received=num_received,
    sent=None if push is None else num_sent * push,
    received=None if pull is None else num_received * pull,
  )


def _count_exchanges(trace: _trace.Trace) -> tuple[np.ndarray, np.ndarray]:
  """Pushes and pulls of each learner."""
  num_workers = trace.num_workers
  num_pushes = np.bincount(trace.worker, minlength=num_workers)
  fetches = trace.of_kind(_Kind.FETCH)['worker']
  if len(fetches):
    return num_pushes, np.bincount(fetches, minlength=num_workers)
  leaves = trace.of_kind(_Kind.LEAVE)
  lost = leaves['worker'][leaves['read_version'] >= 0]
  unseen = np.concatenate([trace.in_flight['worker'], lost])
  return num_pushes, num_pushes + np.bincount(unseen, minlength=num_workers)


def _count_messages(trace: _trace.Trace) -> tuple[np.ndarray, np.ndarray]:
  """Messages that each node sent and received."""
  num_nodes = trace.num_workers
  lost = trace.of_kind(_Kind.LOST)
  lost = lost[lost['read_version'] >= 0]
  means = trace.of_kind(_Kind.MEAN)
  mixes = trace.of_kind(_Kind.MIX, _Kind.MOVE)
  per_mean = trace.header.get('messages_per_mean')
  pieces = np.bincount(
    means['replica'],
    2 * (1 - means['weight'])
    if per_mean is None
    else np.full(len(means), per_mean),
    num_nodes,
  )
  sent = np.concatenate([mixes['source'], lost['replica']])
  received = mixes['replica']
  return (
    pieces + np.bincount(sent[sent >= 0], minlength=num_nodes),
    pieces + np.bincount(received[received >= 0], minlength=num_nodes),
  )


def measure_lead(trace: _trace.Trace) -> np.ndarray:
  """Lead of the fastest worker over the slowest, in steps, after each gradient.

  Only workers that are present count. Steps are counted from 0 in this trace;
  those of a worker that joins, from the number that the slowest has then.

  Args:
    trace: A trace.

  Returns:
    An entry for each gradient: the lead once that one had arrived.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(traces.make_records(worker=[0, 0, 1, 1]))
    >>> traces.statistics.measure_lead(trace)
    array([1, 2, 1, 0])
  """
  members = trace.of_kind(_Kind.JOIN, _Kind.LEAVE)
  if len(members) or np.any(trace.fate == protocols.Fate.DROPPED_GONE):
    records = trace.of_kind(*_schema.GRADIENTS, _Kind.JOIN, _Kind.LEAVE)
    return _lead.follow_lead(records, trace.num_workers)
  worker = np.ascontiguousarray(trace.worker)
  return _lead.count_lead(worker, trace.num_workers)


def measure_speedup(trace: _trace.Trace) -> float:
  """How much faster gradients came than from one worker alone.

  speed-up = applied gradients per second * seconds per gradient of the fastest
  worker, alone: one that neither waits nor communicates. The fastest worker is
  the one with the shortest computing time on average.

  Args:
    trace: A trace.

  Returns:
    The speed-up in gradients. It ignores that staleness slows convergence.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     worker=[0, 1, 0],
    ...     clock=[0, 1, 2],
    ...     compute_time=[2, 5, 4],
    ...     end_time=[2, 5, 6],
    ...   )
    ... )
    >>> traces.statistics.measure_speedup(trace)  # Worker 0 alone: 3 s each.
    1.5
  """
  num_applied = int(np.count_nonzero(trace.fate == protocols.Fate.APPLIED))
  seconds = trace.compute_time
  if not trace.has_server:
    seconds = trace.end_time - trace.start_time
  is_known = ~np.isnan(seconds)
  counts = np.bincount(trace.worker[is_known])
  totals = np.bincount(trace.worker[is_known], weights=seconds[is_known])
  has_any = np.flatnonzero(counts)
  if not len(has_any):
    return float('nan')
  fastest = float(np.min(totals[has_any] / counts[has_any]))
  return divide(num_applied * fastest, trace.duration)


def divide(numerator: float, denominator: float) -> float:
  """A quotient that is NaN if the denominator is 0.

  Args:
    numerator: Any number.
    denominator: Any number.

  Returns:
    The quotient, or NaN.

  Examples:
    >>> from jasgd import traces
    >>> traces.statistics.divide(1, 4), traces.statistics.divide(1, 0)
    (0.25, nan)
  """
  return numerator / denominator if denominator else float('nan')


# --- Mixes of nodes.


def keep_first_of_mix(records: np.ndarray) -> np.ndarray:
  """One record of each mix or mean of a node, in the order of the records.

  Args:
    records: Records of any kinds.

  Returns:
    Those of kind MIX and MEAN, without further sources of the same mix.

  Examples:
    >>> from jasgd import traces
    >>> records = traces.make_records(
    ...   kind=traces.Kind.MIX, group=[5, 5, 6], source=[2, 3, 2]
    ... )
    >>> first = traces.statistics.keep_first_of_mix(records)
    >>> print(first[['group', 'source']])
    [(5, 2) (6, 2)]
  """
  kinds = records['kind']
  mixes = records[(kinds == _Kind.MIX) | (kinds == _Kind.MEAN)]
  keys = np.stack([mixes['replica'], mixes['group']], axis=-1)
  _, first = np.unique(keys, axis=0, return_index=True)
  return mixes[np.sort(first)]


def measure_ages(trace: _trace.Trace) -> np.ndarray:
  """The age of the weights that nodes mixed in: see `traces.summarize`.

  Args:
    trace: A trace.

  Returns:
    int64, an entry for each MIX, in the order of the records.

  Examples:
    >>> from jasgd import traces
    >>> step, mix = traces.Kind.STEP, traces.Kind.MIX
    >>> records = traces.make_records(  # Worker 1 mixes the start of worker 0.
    ...   kind=[step, step, mix], worker=[0, 0, 1], step=[1, 2, 0]
    ... )
    >>> print(traces.statistics.measure_ages(traces.Trace(records)))
    [2]
  """
  records = trace.records
  kind, replica = records['kind'], records['replica'].astype(np.int64)
  is_progress = (kind == _Kind.STEP) | (kind == _Kind.MOVE)
  is_progress |= kind == _Kind.RESTART
  is_mix = kind == _Kind.MIX
  # (replica, place) as one number: so one search finds the last progress of the
  # source of every mix.
  place, stride = np.arange(len(records)), len(records) + 1
  keys = replica[is_progress] * stride + place[is_progress]
  order = np.argsort(keys)
  keys, steps = keys[order], records['step'][is_progress][order]
  source = records['source'][is_mix].astype(np.int64)
  found = np.searchsorted(keys, source * stride + place[is_mix]) - 1
  has_progress = found >= 0
  has_progress[has_progress] &= (
    keys[found[has_progress]] >= (source * stride)[has_progress]
  )
  now = np.zeros(len(source), np.int64)
  now[has_progress] = steps[found[has_progress]]
  # A peer that went back to a checkpoint may have made fewer steps than are in
  # the weights that were mixed in.
  return np.maximum(now - records['source_step'][is_mix], 0)


def measure_lags(trace: _trace.Trace) -> np.ndarray:
  """Own steps minus those of the other node, of each mix with a node.

  Args:
    trace: A trace.

  Returns:
    int64, an entry for each MIX whose source is a node.
  """
  mixes = trace.of_kind(_Kind.MIX)
  mixes = mixes[mixes['source'] >= 0]
  return mixes['step'] - mixes['source_step']


def find_deaths(trace: _trace.Trace) -> NodeRecords:
  """Finds the deaths of nodes, and their returns.

  A simulated node records its own death, as a LEAVE. A real node cannot. It
  has died without having ended:

  - if its records go on with a RESTART or JOIN;
  - or if they stop, and others went on for longer than it ever took from one
    record to the next, or all others have ended since then.

  Otherwise it may be at work still. (The RESTART of a simulated all-reduce is
  no return, but of the node that died: all nodes go back to a checkpoint then.)

  Args:
    trace: A trace of nodes.

  Returns:
    The records of nodes, with deaths and returns.

  Examples:
    >>> from jasgd import traces
    >>> records = traces.make_records(  # Node 1 stops at 2.
    ...   kind=traces.Kind.STEP,
    ...   worker=[0, 1, 0, 1, 0],
    ...   end_time=[1, 1, 2, 2, 9],
    ... )
    >>> trace = traces.Trace(records, {'is_recorded': True})
    >>> found = traces.statistics.find_deaths(trace)
    >>> print(found.records['replica'], found.is_death)
    [0 0 0 1 1] [False False False False  True]
  """
  records = np.asarray(trace.records)
  # A LOST may be in the file of its receiver.
  is_own = (records['replica'] >= 0) & (records['kind'] != _Kind.LOST)
  records = records[is_own]
  records = records[np.argsort(records['replica'], kind='stable')]
  kind, node = records['kind'], records['replica']
  follows = np.diff(node, prepend=-1) == 0  # A record of the same node.
  is_restart = kind == _Kind.RESTART
  # A node without a checkpoint may have both, one after the other.
  is_join = (kind == _Kind.JOIN) & ~(follows & _shift(is_restart))
  is_back = follows & (is_restart | is_join)
  is_death = kind == _Kind.LEAVE
  if trace.is_recorded:
    is_silent = _find_silent(records, follows)
    is_death |= (is_silent | _shift(is_back, -1)) & (kind != _Kind.END)
  return NodeRecords(records, is_death, is_back & _shift(is_death))


def _find_silent(records: np.ndarray, follows: np.ndarray) -> np.ndarray:
  """Whether a record is its node's last, and the node was silent too long."""
  node, times = records['replica'], records['end_time']
  num_nodes = int(node.max(initial=-1)) + 1
  longest = np.full(num_nodes, np.nan)
  gaps = np.diff(times, prepend=times[:1])
  np.fmax.at(longest, node[follows], gaps[follows])
  # For a node with one record, only the duration of this record is known.
  first, seconds = node[~follows], (times - records['start_time'])[~follows]
  longest[first] = np.where(np.isnan(longest[first]), seconds, longest[first])
  is_last = ~_shift(follows, -1)
  # Nodes that have not ended, and whether this node is the only one.
  is_open = is_last & (records['kind'] != _Kind.END)
  is_alone = is_open & (np.count_nonzero(is_open) == 1)
  silence = np.fmax.reduce(times, initial=-np.inf) - times
  return is_last & (silence > np.where(is_alone, 0.0, longest[node]))


def _shift(flags: np.ndarray, places: int = 1) -> np.ndarray:
  """The flag of the record before, or after for -1; False if there is none."""
  shifted = np.zeros_like(flags)
  if places > 0:
    shifted[1:] = flags[:-1]
  else:
    shifted[:-1] = flags[1:]
  return shifted


def count_deaths(trace: _trace.Trace) -> Deaths:
  """Counts the deaths of nodes, see `find_deaths`, and the mass that was lost.

  Lost mass is the first mass of all nodes (1 each, joiners 0) minus the last
  mass of those that did not die. So it includes messages that a node had
  received and not mixed when it died, which are in no record, and messages on
  their way at the end of the trace.

  Args:
    trace: A trace of nodes.

  Returns:
    The counts.
  """
  records, is_death, is_return = find_deaths(trace)
  kind, node, mass = (records[name] for name in ('kind', 'replica', 'mass'))
  is_first = np.diff(node, prepend=-1) != 0
  is_last = ~_shift(~is_first, -1)
  is_member = is_first & (kind != _Kind.JOIN)
  initial = float(np.count_nonzero(is_member) if mass.any() else 0)
  lost = initial - mass[is_last & ~is_death].sum()
  if abs(lost) < _ROUNDING * initial:
    lost = 0.0
  return Deaths(
    num_deaths=int(np.count_nonzero(is_death)),
    num_returns=int(np.count_nonzero(is_return)),
    lost_mass=float(lost),
  )


def find_downtimes(trace: _trace.Trace) -> tuple[np.ndarray, np.ndarray]:
  """Finds the times in which no node of a real run was at work.

  Args:
    trace: A trace of nodes.

  Returns:
    For each RESTART, its time, and the seconds before it without a record of
    any node. They are close to 0 if other nodes were at work.
  """
  records = trace.records[np.argsort(trace.records['end_time'], kind='stable')]
  is_return = records['kind'] == _Kind.RESTART
  times = records['end_time']
  return times[is_return], np.diff(times, prepend=times[:1])[is_return]


def _add_durations(records: np.ndarray, num_workers: int) -> np.ndarray:
  """The seconds that the records of each replica took."""
  seconds = records['end_time'] - records['start_time']
  # numpy returns integers if there are no records.
  return np.bincount(records['replica'], seconds, num_workers).astype(float)


def _sum_by_worker(trace: _trace.Trace, values: np.ndarray) -> np.ndarray:
  """Sums over the gradients of each worker; values that are NaN count as 0."""
  known = np.where(np.isnan(values), 0.0, values)
  return np.bincount(
    trace.worker, weights=known, minlength=trace.num_workers
  ).astype(float)  # numpy returns integers if there are no gradients.
