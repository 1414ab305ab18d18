"""What became of gradients, as a table."""

from collections.abc import Sequence

from jasgd import traces
from jasgd.reports import _formats
from jasgd.reports import _runs
from jasgd.reports import _tables

_number = _formats.format_number
_share = _formats.format_share

# Why a gradient is in no update, as people say it.
_REASONS = {
  traces.Fate.APPLIED: 'applied',
  traces.Fate.PENDING: 'pending: its update was not made yet',
  traces.Fate.DROPPED_LATE: 'dropped: came after its update',
  traces.Fate.DROPPED_STALE: 'dropped: too stale',
  traces.Fate.LOST_HISTORY: 'dropped: of weights lost with a server',
  traces.Fate.DROPPED_GONE: 'dropped: its learner was gone',
  traces.Fate.AFTER_END: 'dropped: the run was over',
  traces.Fate.NOT_FINITE: 'dropped: not finite',
}


def make_fates(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> _tables.Table | None:
  """What became of the gradients; None if there is no server."""
  columns = [_list_fates(run.summary) for run in runs]
  return _tables.join('Fates of gradients', 'fate', columns, labels)


def _list_fates(summary: traces.Summary | None) -> dict[str, str]:
  """How many gradients had which fate, without those that none had."""
  if summary is None or not summary.num_gradients:
    return {}
  fates = {
    _REASONS[fate]: f'{_number(count)} ({_share(summary.shares[fate])})'
    for fate, count in summary.fates.items()
    if count or fate == traces.Fate.APPLIED
  }
  fates['all'] = _number(summary.num_gradients)
  if summary.num_void:
    fates['lost with a server, not in the above'] = _number(summary.num_void)
  return fates
