"""Who came and went, and when the server was started again."""

from typing import NamedTuple

import numpy as np

from jasgd import protocols
from jasgd import traces

_MAX_NAMED = 8  # As many as there is room for in a cell.
# After one of these the run went on.
_DECIDED = (
  protocols.Fate.APPLIED,
  protocols.Fate.DROPPED_LATE,
  protocols.Fate.DROPPED_STALE,
)


class Changes(NamedTuple):
  """Records of what changed while a run went on."""

  came: np.ndarray  # Joins after the first gradient was begun.
  left: np.ndarray  # Leaves before the end: learners that were lost, too.


def find_changes(trace: traces.Trace) -> Changes:
  """Who came and who went, of what stands."""
  records = np.asarray(trace.records)[~trace.is_void]
  kinds = records['kind']
  came = records[kinds == traces.Kind.JOIN]
  origin = find_origin(trace)
  is_going = (kinds == traces.Kind.END) | (
    (kinds == traces.Kind.GRADIENT) & np.isin(records['fate'], _DECIDED)
  )
  # The last sign, in each incarnation, that it went on until then. When a run
  # is over or interrupted, learners leave too, and that is no loss.
  last = {
    int(records['incarnation'][index]): index
    for index in np.flatnonzero(is_going).tolist()
  }
  left = [
    index
    for index in np.flatnonzero(kinds == traces.Kind.LEAVE).tolist()
    if index < last.get(int(records['incarnation'][index]), -1)
  ]
  return Changes(came[came['arrive_time'] > origin], records[left])


def find_origin(trace: traces.Trace) -> float:
  """When the first gradient was begun; 0 if that is not known."""
  origin = np.fmin.reduce(trace.start_time, initial=np.inf)
  return float(origin) if np.isfinite(origin) else 0.0


def list_changes(trace: traces.Trace) -> dict[str, str]:
  """Rows of a table on who came and went; none if nobody did."""
  changes = find_changes(trace)
  rows = {
    'learners that left or were lost': changes.left,
    'learners that came later, or again': changes.came,
  }
  cells = {name: _say(rows[name]) for name in rows if len(rows[name])}
  last = int(trace.records['incarnation'].max(initial=0))
  if last:
    cells['incarnations of the server'] = f'{last + 1:,}'
  return cells


def _say(records: np.ndarray) -> str:
  """How many, and who when."""
  named = ', '.join(
    f'{record["learner"]} at clock {record["arrive_clock"]:,}'
    for record in records[:_MAX_NAMED]
  )
  rest = ', ...' if len(records) > _MAX_NAMED else ''
  return f'{len(records):,} (learner {named}{rest})'


class Span(NamedTuple):
  """A learner was there from one time to another, in the server's seconds."""

  learner: int
  start: float
  end: float


def list_spans(trace: traces.Trace) -> list[Span]:
  """When each learner was there."""
  records = np.asarray(trace.records)[~trace.is_void]
  num_learners = traces.statistics.count_learners(trace)
  num_present = int(trace.header.get('num_present', num_learners))
  origin = find_origin(trace)
  since = dict.fromkeys(range(min(num_present, num_learners)), origin)
  spans = []
  is_member = np.isin(records['kind'], (traces.Kind.JOIN, traces.Kind.LEAVE))
  for record in records[is_member]:
    learner, time = int(record['learner']), float(record['arrive_time'])
    if record['kind'] == traces.Kind.JOIN:
      since.setdefault(learner, time)
    elif learner in since:
      spans.append(Span(learner, since.pop(learner), time))
  end = np.fmax.reduce(records['arrive_time'], initial=origin)
  spans += [Span(learner, start, end) for learner, start in since.items()]
  return sorted(spans)
