"""`predict` and `compare`: a run and a simulation with its measured times."""

from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import numpy as np

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.simulation import _failures
from jasgd.simulation import _network
from jasgd.simulation import _simulate
from jasgd.simulation import _times

# Fates that a protocol decides on. The others come from the end of a run, or
# from events that no simulator knows: lost servers, infinite numbers.
_DECIDED = (
  protocols.Fate.APPLIED,
  protocols.Fate.PENDING,
  protocols.Fate.DROPPED_LATE,
  protocols.Fate.DROPPED_STALE,
)
_KINDS = (
  traces.Kind.PUSH,
  traces.Kind.JOIN,
  traces.Kind.LEAVE,
  traces.Kind.FETCH,
)


class _Measured(NamedTuple):
  """The valid records of learners, and the duration of each gradient."""

  records: np.ndarray
  is_gradient: np.ndarray
  # Whether it is the first gradient since its learner came, or since the server
  # was restarted. It took longer, to compile or to find the server again.
  is_first: np.ndarray
  # Seconds from the learner's start to the arrival; NaN: not known.
  duration: np.ndarray


def predict(trace: traces.Trace, seed: int = 0) -> traces.Trace:
  """Simulates a real run from the times that were measured in it.

  **With a server**: a learner's durations, from the start of a gradient to its
  arrival at the server, are drawn with replacement from those that were
  measured of this learner; so are the server's times per update, from the
  arrival of a gradient to the release of its learner. The first gradient of a
  learner, which has to compile, is not drawn: it keeps its time. Learners
  that came late, left or came back do so at the same time. As many gradients
  are handled as the protocol handled in the run. Records that a restart
  of the server made void are left out.

  **Without a server**: a node's durations, from one record to the end of its
  next step, are drawn likewise; the latency is half of the median time that a
  mix took, and the time to detect a death the median of questions that were not
  answered. Nodes die and come back when they did, from checkpoints as often as
  the header says.

  The order of events, staleness and age are not taken from the trace; they
  follow from the simulation. `compare` measures how well the two agree.

  Args:
    trace: Trace of a real or simulated run. The 'strategy' in its header is
      the config of its strategy, as of `to_config`.
    seed: Seed of the draws.

  Returns:
    The trace of the simulation.

  Raises:
    ValueError: if the header names no strategy that can be simulated, or no
      times were measured.

  Examples:
    >>> import jasgd
    >>> from jasgd import protocols, simulation
    >>> protocol = protocols.softsync(2)
    >>> trace = jasgd.simulate(protocol, num_workers=4, num_gradients=100)
    >>> predicted = simulation.predict(trace)
    >>> predicted.num_updates, bool((predicted.worker == trace.worker).all())
    (50, True)
  """
  strategy: Any = gossip.make_strategy(trace.header.get('strategy', {}))
  if not strategy.has_server:
    return _predict_peers(trace, strategy, seed)
  # The times of a real run are never exactly equal.
  return _predict_server(trace, strategy.without_equal_times(), seed)


# --- With a server.


def _predict_server(
  trace: traces.Trace, protocol: protocols.Protocol, seed: int
) -> traces.Trace:
  """`predict` for learners that push to a server."""
  num_gradients = int(np.count_nonzero(np.isin(trace.fate, _DECIDED)))
  measured = _measure(trace)
  is_usable = measured.is_gradient & (measured.duration > 0)
  if not num_gradients or not np.any(is_usable):
    raise ValueError(
      'A prediction needs gradients whose times are known; the trace has '
      f'{num_gradients} gradients and {np.count_nonzero(is_usable)} times. '
      'Predict a longer run.'
    )
  num_steps = protocol.steps_per_push
  times, firsts = _collect_times(trace, measured, is_usable, num_steps)
  return _simulate.simulate(
    protocol,
    num_workers=len(times),
    num_gradients=num_gradients,
    compute=_times.resampled(times, firsts, num_steps),
    network=_network.Network(server_time=_measure_server(trace)),
    failures=_list_failures(
      trace, measured, [float(np.mean(each)) for each in times]
    ),
    overlap=bool(trace.header.get('overlap')),
    batch=int(trace.header.get('batch') or 1),
    seed=seed,
  )


def _measure(trace: traces.Trace) -> _Measured:
  """Finds the first gradients, and measures how long each one took."""
  records = np.asarray(trace.records)
  is_learners = np.isin(records['kind'], _KINDS)
  records = records[is_learners & ~trace.is_void]
  # Learner by learner, each in the order of its records.
  order = np.argsort(records['worker'], kind='stable')
  kinds, learner = records['kind'][order], records['worker'][order]
  is_gradient = kinds == traces.Kind.PUSH
  life = np.cumsum(kinds == traces.Kind.JOIN)
  life[1:] += np.cumsum(np.diff(learner) != 0)
  fetched = _find_fetches(records[order], life)[is_gradient]
  places = order[is_gradient]
  is_first = np.ones(len(places), bool)
  is_first[1:] = np.diff(life[is_gradient]) > 0
  is_first[1:] |= np.diff(records['incarnation'][places]) != 0
  released = np.roll(records['release_time'][places], 1)
  released[is_first] = np.nan
  # A learner that fetches before it pushes had started with its first fetch.
  start = np.fmin(records['start_time'][places], np.fmin(released, fetched))
  firsts, duration = np.zeros(len(records), bool), np.full(len(records), np.nan)
  firsts[places] = is_first
  duration[places] = records['end_time'][places] - start
  is_gradient = records['kind'] == traces.Kind.PUSH
  return _Measured(records, is_gradient, firsts, duration)


def _find_fetches(records: np.ndarray, life: np.ndarray) -> np.ndarray:
  """When weights were first fetched for each gradient; NaN: never."""
  is_gradient = records['kind'] == traces.Kind.PUSH
  # A fetch belongs to the next gradient: it has as many gradients before it.
  number = life + np.cumsum(is_gradient) - is_gradient
  times = np.full(int(number.max(initial=0)) + 1, np.nan)
  is_fetch = records['kind'] == traces.Kind.FETCH
  np.fmin.at(times, number[is_fetch], records['end_time'][is_fetch])
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
  for learner in range(trace.num_workers):
    is_own = is_usable & (measured.records['worker'] == learner)
    own = duration[is_own]
    later = duration[is_own & ~measured.is_first]
    # A learner with one gradient has only that time; one with none is absent.
    times.append(later if len(later) else own if len(own) else of_all)
    first.append(own[0] if len(own) else of_all[0])
  return times, np.tile(first, (num_steps, 1))


def _measure_server(trace: traces.Trace) -> _times.ComputeTime | float:
  """Durations of the updates whose last learner was released at once."""
  pushes = trace.of_kind(traces.Kind.PUSH)
  last = pushes[pushes['updates'] > 0]
  wait = last['release_time'] - last['end_time']
  wait = wait[wait > 0]
  return _times.resampled([wait]) if len(wait) else 0.0


def _list_failures(
  trace: traces.Trace, measured: _Measured, means: Sequence[float]
) -> list[_failures.Failure]:
  """Absences of learners, in seconds since the first start."""
  records, is_gradient = measured.records, measured.is_gradient
  origin = np.nanmin(records['end_time'] - measured.duration)
  end = np.nanmax(trace.end_time[np.isin(trace.fate, _DECIDED)]) - origin
  active = set(records['worker'][is_gradient].tolist())
  num_present = int(trace.header.get('num_present', len(means)))
  away = {
    learner: 0.0
    for learner in range(len(means))
    if learner >= num_present or learner not in active
  }
  failures = []
  is_fetch = records['kind'] == traces.Kind.FETCH
  for record in records[~(is_gradient | is_fetch) | measured.is_first]:
    learner, kind = int(record['worker']), record['kind']
    time = float(record['end_time'] - origin)
    if learner not in active:
      continue
    if kind == traces.Kind.LEAVE and time < end:
      away.setdefault(learner, max(0.0, time))
    elif kind == traces.Kind.JOIN and time <= 0:
      away.pop(learner, None)
    elif kind == traces.Kind.PUSH and learner in away:
      # It is back when its first gradient, if nothing had to be compiled, would
      # have begun.
      since = away.pop(learner)
      until = max(time - means[learner], np.nextafter(since, np.inf))
      failures.append(_failures.Failure(since, learner, until))
  failures += [_failures.Failure(time, who) for who, time in away.items()]
  return failures


# --- Without a server.

_RETURNS = (traces.Kind.RESTART, traces.Kind.JOIN)


def _predict_peers(
  trace: traces.Trace, strategy: gossip.PeerStrategy, seed: int
) -> traces.Trace:
  """`predict` for nodes."""
  if not len(trace.steps):
    raise ValueError('A prediction needs steps; the trace has none.')
  num_nodes = trace.num_workers
  times, firsts = [], []
  origin = float(np.min(trace.steps['start_time']))
  of_all = trace.steps['end_time'] - trace.steps['start_time']
  of_all = of_all[of_all > 0]
  for node in range(num_nodes):
    own = trace.of_replica(node)
    own = own[own['kind'] != traces.Kind.LOST]
    is_step = own['kind'] == traces.Kind.STEP
    # Since the previous record: time between two records belongs to the step.
    gaps = own['end_time'] - np.append(origin, own['end_time'][:-1])
    is_first = np.append(True, np.isin(own['kind'][:-1], _RETURNS))[: len(own)]
    later = gaps[is_step & ~is_first & (gaps > 0)]
    first = gaps[is_step & is_first & (gaps > 0)]
    times.append(later if len(later) else of_all)
    firsts.append(first[0] if len(first) else times[-1].mean())
  waits = traces.statistics.keep_first_of_mix(trace.mixes)
  latency = _measure_latency(waits, num_nodes)
  questions = trace.of_kind(traces.Kind.LOST)
  questions = questions[questions['read_version'] < 0]
  seconds = questions['end_time'] - questions['start_time']
  detection = float(np.median(seconds)) if len(seconds) else 0.0
  return _simulate.simulate(
    strategy,
    num_workers=num_nodes,
    num_gradients=int(trace.steps['step'].max()) * num_nodes,
    compute=_times.resampled(times, [firsts]),
    network=_network.Network(latency=latency),
    failures=_list_deaths(trace, origin),
    batch=int(trace.header.get('batch') or 1),
    detection_seconds=max(0.0, detection - 2 * latency),
    checkpoint_seconds=float(trace.header.get('checkpoint_seconds', np.inf)),
    seed=seed,
  )


def _list_deaths(trace: traces.Trace, origin: float) -> list[_failures.Failure]:
  """Deaths of nodes, each until the node came back, if it did."""
  records, is_death, is_return = traces.statistics.find_deaths(trace)
  times = records['end_time'] - origin
  failures = []
  up_since: dict[int, float] = {}  # It cannot die again before it is back.
  for index in np.flatnonzero(is_death & (times > 0)).tolist():
    node = int(records['replica'][index])
    since, until = max(float(times[index]), up_since.get(node, 0.0)), np.inf
    if np.any(is_return[index + 1 : index + 2]):
      until = max(float(times[index + 1]), np.nextafter(since, np.inf))
    failures.append(_failures.Failure(since, node, until))
    up_since[node] = until
  return failures


def _measure_latency(waits: np.ndarray, num_nodes: int) -> float:
  """The latency that explains how long mixes, or means, typically took."""
  if not len(waits):
    return 0.0
  is_mean = waits['kind'] == traces.Kind.MEAN
  if not np.any(is_mean):
    seconds = waits['end_time'] - waits['start_time']
    return float(np.median(seconds)) / 2
  # A mean begins when its last member comes, and has 2 (n - 1) messages.
  waits = waits[is_mean]
  _, group = np.unique(waits['group'], return_inverse=True)
  begun = np.full(group.max() + 1, -np.inf)
  done = np.full(group.max() + 1, np.inf)
  np.maximum.at(begun, group, waits['start_time'])
  np.minimum.at(done, group, waits['end_time'])
  seconds = float(np.median(np.maximum(done - begun, 0)))
  return seconds / max(1, 2 * (num_nodes - 1))


# --- Comparison.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
  """A run and its prediction: arrays over workers, and numbers for all of them.

  A difference is relative to the prediction: 0.1 is 10% above the prediction.
  """

  measured_staleness: np.ndarray  # Means of applied gradients; NaN: none.
  predicted_staleness: np.ndarray
  staleness_difference: np.ndarray
  measured_share: np.ndarray  # Of all applied gradients.
  predicted_share: np.ndarray
  share_difference: np.ndarray
  # Between the two distributions of staleness (with a server) or age (without),
  # from 0 (the same) to 1.
  total_variation: float
  measured: dict[str, float]  # Numbers of `measure_exchanges`.
  predicted: dict[str, float]  # Means over the predictions.


def measure_exchanges(trace: traces.Trace) -> dict[str, float]:
  """The numbers by which a run and its prediction are compared.

  Args:
    trace: A trace.

  Returns:
    `gradients_per_second`; with a server `updates_per_gradient` and
    `staleness`, without `mixes_per_step`, `age` (means) and `lost_mass`.

  Examples:
    >>> import jasgd
    >>> from jasgd import protocols, simulation
    >>> trace = jasgd.simulate(
    ...     protocols.softsync(2), num_workers=4, num_gradients=100)
    >>> simulation.measure_exchanges(trace)['updates_per_gradient']
    0.5
  """
  summary = traces.summarize(trace)
  divide, count = traces.statistics.divide, summary.num_gradients
  numbers = {'gradients_per_second': summary.gradients_per_second}
  if trace.has_server:
    return numbers | {
      'updates_per_gradient': divide(summary.num_updates, count),
      'staleness': summary.staleness.mean,
    }
  return numbers | {
    'mixes_per_step': divide(summary.num_mixes, count),
    'age': summary.age.mean,
    'lost_mass': summary.lost_mass,
  }


def compare(trace: traces.Trace, *predicted: traces.Trace) -> Comparison:
  """Compares a run with its predictions.

  The total variation of the shares p(tau) and q(tau) of gradients with
  staleness tau is 1/2 sum |p(tau) - q(tau)|.

  Args:
    trace: The run.
    *predicted: Results of `predict`. Those of several seeds are averaged, which
      reduces the effect of randomness.

  Returns:
    A comparison, with an entry for each learner of any of the traces.

  Raises:
    ValueError: if there is no prediction.
    TraceError: if the records contradict each other.

  Examples:
    >>> import jasgd
    >>> from jasgd import protocols, simulation
    >>> trace, other = (
    ...     jasgd.simulate(protocol, num_workers=2, num_gradients=100)
    ...     for protocol in (protocols.asynchronous(), protocols.hardsync()))
    >>> simulation.compare(trace, trace).total_variation
    0.0
    >>> simulation.compare(trace, other).total_variation
    0.99
  """
  if not predicted:
    raise ValueError('A trace is compared with one or more predictions.')
  num_workers = max(each.num_workers for each in (trace, *predicted))
  staleness, share, histogram = _count([trace], num_workers)
  others = _count(predicted, num_workers)
  return Comparison(
    measured_staleness=staleness,
    predicted_staleness=others[0],
    staleness_difference=_relate(staleness, others[0]),
    measured_share=share,
    predicted_share=others[1],
    share_difference=_relate(share, others[1]),
    total_variation=_measure_variation(histogram, others[2]),
    measured=measure_exchanges(trace),
    predicted=_average([measure_exchanges(each) for each in predicted]),
  )


def _average(rows: Sequence[dict[str, float]]) -> dict[str, float]:
  """The mean of each number."""
  return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def _count(
  together: Sequence[traces.Trace], num_workers: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Mean staleness and share of each learner, and the histogram of all."""
  applied = [trace.fate == protocols.Fate.APPLIED for trace in together]
  worker, staleness = (
    np.concatenate(
      [
        getattr(trace, name)[is_applied]
        for trace, is_applied in zip(together, applied, strict=True)
      ]
    )
    for name in ('worker', 'staleness')
  )
  counts = np.bincount(worker, minlength=num_workers)
  totals = np.bincount(worker, weights=staleness, minlength=num_workers)
  mean = np.full(num_workers, np.nan)
  np.divide(totals, counts, out=mean, where=counts > 0)
  if not together[0].has_server:
    staleness = np.concatenate(
      [traces.statistics.measure_ages(trace) for trace in together]
    )
  summary = traces.statistics.describe(staleness)
  return mean, counts / max(1, len(worker)), summary.histogram


def _relate(measured: np.ndarray, predicted: np.ndarray) -> np.ndarray:
  """The relative difference; 0 if both are 0, infinite if only one is 0."""
  difference = measured - predicted
  relative = np.where(difference == 0, 0.0, np.copysign(np.inf, difference))
  np.divide(difference, predicted, out=relative, where=predicted != 0)
  return relative


def _measure_variation(first: np.ndarray, second: np.ndarray) -> float:
  """The total variation of two histograms; NaN if one is empty."""
  if not len(first) or not len(second):
    return float('nan')
  shares = np.zeros((2, max(len(first), len(second))))
  shares[0, : len(first)] = first / first.sum()
  shares[1, : len(second)] = second / second.sum()
  return float(np.abs(shares[0] - shares[1]).sum() / 2)
