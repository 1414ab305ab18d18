"""`predict`: what the simulator says about a run, from its measured times."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _resampled
from jasgd.simulation import _simulate
from jasgd.simulation import _times

# Those that a protocol has decided on. The others tell of a run that was over,
# or of what no simulator knows: lost servers, bad numbers.
_DECIDED = (
  protocols.Fate.APPLIED,
  protocols.Fate.PENDING,
  protocols.Fate.DROPPED_LATE,
  protocols.Fate.DROPPED_STALE,
)
_KINDS = (
  traces.Kind.GRADIENT,
  traces.Kind.JOIN,
  traces.Kind.LEAVE,
  traces.Kind.FETCH,
)


class _Measured(NamedTuple):
  """The records of learners that stand, and what was measured of each."""

  records: np.ndarray
  is_gradient: np.ndarray
  # Whether it is the first gradient since its learner came, or since the server
  # was restarted: it took longer, to compile or to find the server again.
  is_first: np.ndarray
  # Seconds from the learner's start to the arrival; NaN: not known.
  duration: np.ndarray


def predict(trace: traces.Trace, seed: int = 0) -> traces.Trace:
  """Simulates a real run from the times that were measured in it.

  A learner's durations, from the start of a gradient to its arrival at the
  server, are drawn with replacement from those that were measured of this
  learner; so are the server's times per update, from the arrival of a gradient
  to the release of its learner. The first gradient of a learner, which has to
  compile, is not among them: it takes what it took. Who came late, left or came
  back does so at the same time. Protocol and overlap are those of the header,
  and as many gradients are handled as the protocol handled in the run. What a
  restart of the server made void is left out.

  So nothing of the order in which gradients came, nor of their staleness, is
  put in: `compare` says how well the two agree.

  Args:
    trace: Trace of a real or simulated run. The 'strategy' in its header is
      the config of its protocol, as of `Protocol.to_config`.
    seed: Of the draws.

  Returns:
    The trace of the simulation.

  Raises:
    ValueError: if the header names no protocol that can be simulated, or no
      times were measured.

  Examples:
    >>> import jasgd
    >>> from jasgd import protocols, simulation
    >>> protocol = protocols.softsync(2)
    >>> trace = jasgd.simulate(protocol, num_learners=4, num_gradients=100)
    >>> predicted = simulation.predict(trace)
    >>> predicted.num_updates, bool((predicted.learner == trace.learner).all())
    (50, True)
  """
  protocol = _read_protocol(trace)
  num_gradients = int(np.count_nonzero(np.isin(trace.fate, _DECIDED)))
  measured = _measure(trace)
  is_usable = measured.is_gradient & (measured.duration > 0)
  if not num_gradients or not np.any(is_usable):
    raise ValueError(
      'A prediction needs gradients whose times are known; the trace has '
      f'{num_gradients} gradients and {np.count_nonzero(is_usable)} times.'
    )
  num_steps = protocol.steps_per_push
  times, firsts = _collect_times(trace, measured, is_usable, num_steps)
  return _simulate.simulate(
    protocol,
    num_learners=len(times),
    num_gradients=num_gradients,
    compute=_resampled.resampled(times, firsts, num_steps),
    network=_network.Network(server_time=_measure_server(trace)),
    failures=_list_failures(
      trace, measured, [float(np.mean(each)) for each in times]
    ),
    overlap=bool(trace.header.get('overlap')),
    batch=int(trace.header.get('batch') or 1),
    seed=seed,
  )


def _read_protocol(trace: traces.Trace) -> protocols.Protocol:
  """The header's protocol, as a real server drives it."""
  protocol = protocols.from_config(trace.header.get('strategy', {}))
  if isinstance(protocol, protocols.constant_delay):
    # The delay is one of equal times; with those of a real run, it is this.
    return protocols.asynchronous()
  return protocol


def _measure(trace: traces.Trace) -> _Measured:
  """Finds the first gradients, and measures how long each one took."""
  records = np.asarray(trace.records)
  is_learners = np.isin(records['kind'], _KINDS)
  records = records[is_learners & ~trace.is_void]
  # Learner by learner, each in the order of its records.
  order = np.argsort(records['learner'], kind='stable')
  kinds, learner = records['kind'][order], records['learner'][order]
  is_gradient = kinds == traces.Kind.GRADIENT
  life = np.cumsum(kinds == traces.Kind.JOIN)
  life[1:] += np.cumsum(np.diff(learner) != 0)
  fetched = _find_fetches(records[order], life)[is_gradient]
  places = order[is_gradient]
  is_first = np.ones(len(places), bool)
  is_first[1:] = np.diff(life[is_gradient]) > 0
  is_first[1:] |= np.diff(records['incarnation'][places]) != 0
  released = np.roll(records['release_time'][places], 1)
  released[is_first] = np.nan
  # A learner that fetches on the way had started before what is recorded.
  start = np.fmin(records['start_time'][places], np.fmin(released, fetched))
  firsts, duration = np.zeros(len(records), bool), np.full(len(records), np.nan)
  firsts[places] = is_first
  duration[places] = records['arrive_time'][places] - start
  is_gradient = records['kind'] == traces.Kind.GRADIENT
  return _Measured(records, is_gradient, firsts, duration)


def _find_fetches(records: np.ndarray, life: np.ndarray) -> np.ndarray:
  """When weights were first fetched for what is in each record; NaN: never."""
  is_gradient = records['kind'] == traces.Kind.GRADIENT
  # Counted by the gradients before them, what is for one has its number.
  number = life + np.cumsum(is_gradient) - is_gradient
  times = np.full(int(number.max(initial=0)) + 1, np.nan)
  is_fetch = records['kind'] == traces.Kind.FETCH
  np.fmin.at(times, number[is_fetch], records['arrive_time'][is_fetch])
  return times[number]


def _collect_times(
  trace: traces.Trace,
  measured: _Measured,
  is_usable: np.ndarray,
  num_steps: int,
) -> tuple[list[np.ndarray], np.ndarray]:
  """Per learner: the times of its steps, and those of its first push."""
  duration = measured.duration / num_steps
  of_all = duration[is_usable]
  times, first = [], []
  for learner in range(traces.statistics.count_learners(trace)):
    is_own = is_usable & (measured.records['learner'] == learner)
    own = duration[is_own]
    later = duration[is_own & ~measured.is_first]
    # One with a single gradient has no other times; one without is not there.
    times.append(later if len(later) else own if len(own) else of_all)
    first.append(own[0] if len(own) else of_all[0])
  return times, np.tile(first, (num_steps, 1))


def _measure_server(trace: traces.Trace) -> _times.ComputeTime | float:
  """How long updates took: those whose last learner was released at once."""
  is_applied = trace.fate == protocols.Fate.APPLIED
  clock, wait = trace.apply_clock[is_applied], trace.wait_time[is_applied]
  wait = wait[np.diff(clock, append=-1) != 0]
  wait = wait[wait > 0]
  return _resampled.resampled([wait]) if len(wait) else 0.0


def _list_failures(
  trace: traces.Trace, measured: _Measured, means: Sequence[float]
) -> list[_failures.Failure]:
  """Who was away, from when to when, in seconds since the first start."""
  records, is_gradient = measured.records, measured.is_gradient
  origin = np.nanmin(records['arrive_time'] - measured.duration)
  end = np.nanmax(trace.arrive_time[np.isin(trace.fate, _DECIDED)]) - origin
  active = set(records['learner'][is_gradient].tolist())
  num_present = int(trace.header.get('num_present', len(means)))
  away = {
    learner: 0.0
    for learner in range(len(means))
    if learner >= num_present or learner not in active
  }
  failures = []
  is_fetch = records['kind'] == traces.Kind.FETCH
  for record in records[~(is_gradient | is_fetch) | measured.is_first]:
    learner, kind = int(record['learner']), record['kind']
    time = float(record['arrive_time'] - origin)
    if learner not in active:
      continue
    if kind == traces.Kind.LEAVE and time < end:
      away.setdefault(learner, max(0.0, time))
    elif kind == traces.Kind.JOIN and time <= 0:
      away.pop(learner, None)
    elif kind == traces.Kind.GRADIENT and learner in away:
      # It counts from when it computes as usual, and no longer compiles.
      since = away.pop(learner)
      until = max(time - means[learner], np.nextafter(since, np.inf))
      failures.append(_failures.Failure(since, learner, until))
  failures += [_failures.Failure(time, who) for who, time in away.items()]
  return failures
