"""A run in words: its settings and its end."""

from collections.abc import Iterator

from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _runs

_number = _formats.format_number
_count = _formats.count


def tell_run(run: _runs.Run) -> str:
  """A short paragraph on a run."""
  return ' '.join(
    [
      *_tell_strategy(run),
      *_tell_end(run),
      *_tell_metrics(run),
      *_tell_work(run),
      *_tell_age(run),
      *_tell_losses(run),
      *_tell_scope(run),
      *run.problems,
    ]
  )


def say_end(run: _runs.Run) -> str:
  """How a run ended, for a cell of a table; '' without metrics."""
  if run.diverged_at is not None:
    return f'diverged by {run.unit} {_number(run.diverged_at)}'
  if run.is_unfinished:
    return f'unfinished: {_say_clock(run)}'
  if run.last_rows or run.is_real:
    return f'at {run.unit} {_number(run.clock)}'
  return ''


def _tell_strategy(run: _runs.Run) -> Iterator[str]:
  if run.trace is None or run.summary is None:
    return
  server = 'and a server' if run.has_server else 'without a server'
  yield f'{_count(run.summary.num_workers, run.worker)} {server}.'
  text = run.trace.header.get('description')
  if text and isinstance(text, str):
    text = _formats.format_value(text, 500)
    yield f'{text[0].upper()}{text[1:].rstrip(".")}.'


def _say_clock(run: _runs.Run) -> str:
  """Clock of a run, and the clock at which it is to end, if that is known."""
  clock, planned = run.clock, run.planned_clock
  of = '' if planned in (clock, None) else f' of {_number(planned)}'
  return f'{run.unit} {_number(clock)}{of}'


def _tell_end(run: _runs.Run) -> Iterator[str]:
  if run.diverged_at is not None:
    yield (
      f'The run diverged: by {run.unit} {_number(run.diverged_at)} a loss was '
      'not finite.'
    )
  elif run.is_unfinished:
    why = ' (it was interrupted, or still goes on)' if run.is_real else ''
    yield f'The run is not finished{why}: it is at {_say_clock(run)}.'
  if run.end_reason:
    yield f'It ended: {run.end_reason}'


def _tell_metrics(run: _runs.Run) -> Iterator[str]:
  epoch = run.find_last('epoch')
  if epoch is not None:
    # A number of updates, if the config has one, counts before epochs.
    asked = None if run.asks_updates else run.config.get('num_epochs')
    of = f' of {_number(asked)}' if isinstance(asked, (int, float)) else ''
    noun = 'update' if run.has_server else 'step'
    yield (
      f'It reached epoch {_number(epoch.value)}{of}, with '
      f'{_count(epoch.clock, noun)}.'
    )
  for name in ('test/accuracy', 'test/loss', 'train/loss'):
    last, best = run.find_last(name), run.find_best(name)
    if last is not None and best is not None:
      words = name.replace('/', ' ')
      yield (
        f'The {words} is {_number(last.value)} at the end, and at best '
        f'{_number(best.value)}, at {run.unit} {_number(best.clock)}.'
      )
      break


def _tell_work(run: _runs.Run) -> Iterator[str]:
  """Gradients, and the updates or mixes that were made."""
  summary = run.summary
  if summary is None:
    return
  if not summary.num_gradients:
    yield 'The trace has no gradients yet.'
    return
  seconds = f'{_number(run.active_duration)} s'
  speedup = f'{_number(summary.speedup)} times the work of one {run.worker}'
  if run.has_server:
    yield (
      'According to the trace, the server received '
      f'{_count(summary.num_gradients, "gradient")} in {seconds} and made '
      f'{_count(summary.num_updates, "update")} from them: {speedup}.'
    )
  else:
    yield (
      'According to the trace, nodes made '
      f'{_count(summary.num_gradients, "step")} and '
      f'{_count(summary.num_mixes, "mix", "mixes")} in {seconds}: {speedup}.'
    )


def _tell_age(run: _runs.Run) -> Iterator[str]:
  """Staleness and fates of gradients, and the age of mixes."""
  summary = run.summary
  if summary is None or not summary.num_gradients:
    return
  if summary.age.count:
    yield (
      f'The age of mixed weights is {_number(summary.age.mean)} steps on '
      f'average and {_number(summary.age.max)} at most.'
    )
  if not run.has_server:
    return
  if summary.staleness.count:
    yield (
      f'Staleness is {_number(summary.staleness.mean)} on average and '
      f'{_number(summary.staleness.max)} at most.'
    )
  dropped = sum(
    share for fate, share in summary.shares.items() if fate.is_dropped
  )
  if dropped:
    yield f'Of the gradients, {_formats.format_share(dropped)} were dropped.'
  else:
    yield 'No gradient was dropped.'


def _tell_losses(run: _runs.Run) -> Iterator[str]:
  """Workers, servers and masses that were lost; nothing if none was."""
  if run.trace is None or run.summary is None:
    return
  summary, changes = run.summary, _members.find_changes(run.trace)
  if len(changes.left):
    yield (
      f'Before the end, {_count(len(changes.left), run.worker)} left or '
      f'{"was" if len(changes.left) == 1 else "were"} lost.'
    )
  if len(changes.came):
    yield f'{_count(len(changes.came), run.worker)} joined late or came back.'
  if run.has_server and summary.num_restarts:
    yield (
      f'The server was restarted {_count(summary.num_restarts, "time")}, '
      f'which lost {_count(summary.num_void, "gradient")}.'
    )
  if summary.lost_mass:
    fate = 'was lost' if summary.lost_mass > 0 else 'was gained by restarts'
    number = _number(abs(summary.lost_mass))
    yield f'Of a total mass of {summary.num_workers}, {number} {fate}.'
  if summary.num_missing:
    missing = _count(summary.num_missing, 'more gradient')
    yield f'{missing} were asked for, but their {run.worker}s were gone.'


def _tell_scope(run: _runs.Run) -> Iterator[str]:
  """Tells that a simulated trace is longer than the training so far."""
  if run.summary and run.clock is not None and run.clock < run.summary.clock:
    yield (
      f'The numbers on gradients, their age and {run.worker}s cover the whole '
      f'trace, to {run.unit} {_number(run.summary.clock)}.'
    )
