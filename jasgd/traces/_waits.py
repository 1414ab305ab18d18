"""How long learners wait at the server."""

import numpy as np

from jasgd import protocols
from jasgd.traces import _schema
from jasgd.traces import _trace


def find_wait_ends(trace: _trace.Trace) -> np.ndarray:
  """When the learner of each gradient was done with waiting at the server.

  That is when it was released. One that never was has waited until it left (or,
  after a restart of the server, until it was given other weights), or else to
  the end of the trace. One that was gone already has not waited.

  Args:
    trace: A trace.

  Returns:
    An entry for each gradient, in seconds; NaN where no time is known.

  Examples:
    >>> from jasgd import traces
    >>> trace = traces.Trace(
    ...   traces.make_records(
    ...     kind=[0, 0, 2, 0],
    ...     learner=[0, 1, 0, 1],
    ...     arrive_time=[1, 2, 5, 7],
    ...     release_time=[float('nan'), 2, 5, 9],
    ...   )
    ... )
    >>> traces.find_wait_ends(trace)
    array([5., 2., 9.])
  """
  ends = np.array(trace.release_time)
  is_gone = trace.fate == protocols.Fate.DROPPED_GONE
  ends[is_gone] = trace.arrive_time[is_gone]
  held = np.flatnonzero(np.isnan(ends) & ~np.isnan(trace.arrive_time))
  if not len(held):
    return ends
  last = np.fmax.reduce(np.fmax(trace.arrive_time, trace.release_time))
  records = np.asarray(trace.records)
  is_servers = np.isin(records['kind'], _schema.SERVER_KINDS)
  records = records[~(trace.is_void | is_servers)]
  is_gradient = records['kind'] == _schema.Kind.GRADIENT
  times = np.where(is_gradient, records['start_time'], records['arrive_time'])
  # The next record of the same learner; of the last ones, none.
  order = np.argsort(records['learner'], kind='stable')
  next_time = np.full(len(records), np.nan)
  is_same = np.diff(records['learner'][order]) == 0
  next_time[order[:-1][is_same]] = times[order[1:][is_same]]
  next_time = next_time[is_gradient][held]
  ends[held] = np.fmax(np.fmin(next_time, last), trace.arrive_time[held])
  return ends
