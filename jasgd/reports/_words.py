"""What was run and how it ended, in words."""

from collections.abc import Iterator

from jasgd import traces
from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _runs

_number = _formats.format_number


def tell_run(run: _runs.Run) -> str:
  """A short paragraph."""
  return ' '.join(
    [
      *_tell_strategy(run),
      *_tell_end(run),
      *_tell_results(run),
      *_tell_gradients(run.summary),
      *_tell_members(run),
      *_tell_scope(run),
      *_tell_nodes(run),
      *run.problems,
    ]
  )


def say_end(run: _runs.Run) -> str:
  """How it ended, for a cell of a table; nothing without metrics."""
  if run.diverged_at is not None:
    return f'diverged by {run.unit} {_number(run.diverged_at)}'
  if run.is_unfinished:
    return f'unfinished: {_say_clock(run)}'
  if run.last_rows or run.is_real:
    return f'at {run.unit} {_number(run.clock)}'
  return ''


def tell_prediction(run: _runs.Run) -> str:
  """How well a real run agrees with its prediction; '' of other runs."""
  if run.prediction is None:
    problem = run.prediction_problem
    return f'There is no prediction: {problem}' if problem else ''
  variation = run.prediction.comparison.total_variation
  measured = run.summary.staleness.mean if run.summary else None
  return (
    'From the measured times of each learner and of the server, which say '
    'nothing of the order in which gradients came, the simulator predicts a '
    f'mean staleness of {_number(run.prediction.mean_staleness)}; '
    f'{_number(measured)} was measured. The total variation of the two '
    f'distributions is {_number(variation)} (0: they are the same; 1: they '
    'have nothing in common).'
  )


def _tell_strategy(run: _runs.Run) -> Iterator[str]:
  header = run.trace.header if run.trace is not None else {}
  text = header.get('protocol') or header.get('strategy')
  if run.summary:
    yield f'{_count(run.summary.num_learners, "learner")} and a server.'
  elif run.node_summary:
    yield f'{_count(run.node_summary.num_nodes, "node")} without a server.'
  if text and isinstance(text, str):
    yield f'{text[0].upper()}{text[1:].rstrip(".")}.'


def _say_clock(run: _runs.Run) -> str:
  """How far it has come, of how far it was to, if that is known."""
  clock, planned = run.clock, run.planned_clock
  of = '' if planned == clock else f' of {_number(planned)}'
  return f'{run.unit} {_number(clock)}{of}'


def _tell_end(run: _runs.Run) -> Iterator[str]:
  if run.diverged_at is not None:
    yield (
      f'The run diverged: by {run.unit} {_number(run.diverged_at)} a loss was '
      'not finite.'
    )
  elif run.is_unfinished:
    why = ' (it was interrupted, or goes on)' if run.is_real else ''
    yield f'The run is not finished{why}: it is at {_say_clock(run)}.'
  if run.end_reason:
    yield f'It ended: {run.end_reason}'


def _tell_results(run: _runs.Run) -> Iterator[str]:
  epoch = run.find_last('epoch')
  if epoch is not None:
    # A number of updates, if there is one, is what counts.
    asked = None if run.asks_updates else run.config.get('num_epochs')
    of = f' of {_number(asked)}' if isinstance(asked, (int, float)) else ''
    noun = 'step' if run.is_of_nodes else 'update'
    yield (
      f'It came to epoch {_number(epoch.value)}{of}, with '
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


def _tell_gradients(summary: traces.Summary | None) -> Iterator[str]:
  if summary is None:
    return
  if not summary.num_gradients:
    yield 'The trace has no gradients yet.'
    return
  yield (
    'By its trace, the server received '
    f'{_count(summary.num_gradients, "gradient")} in '
    f'{_number(summary.duration)} s and made '
    f'{_count(summary.num_updates, "update")} of them: '
    f'{_number(summary.speedup)} times the work of one learner.'
  )
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


def _tell_members(run: _runs.Run) -> Iterator[str]:
  """Who was lost, learners and servers; nothing if nobody was."""
  if run.summary is None or not isinstance(run.trace, traces.Trace):
    return
  changes = _members.find_changes(run.trace)
  if len(changes.left):
    yield (
      f'Before the end, {_count(len(changes.left), "learner")} left or '
      f'{"was" if len(changes.left) == 1 else "were"} lost.'
    )
  if len(changes.came):
    yield f'{_count(len(changes.came), "learner")} came later, or again.'
  if run.summary.num_restarts:
    yield (
      f'The server was restarted {_count(run.summary.num_restarts, "time")}, '
      f'which lost {_count(run.summary.num_void, "gradient")}.'
    )


def _tell_scope(run: _runs.Run) -> Iterator[str]:
  """A simulated trace is there before the weights have come to its end."""
  if run.summary and run.clock is not None and run.clock < run.summary.clock:
    yield (
      'What is said of gradients, staleness and learners is of the whole '
      f'trace, to clock {_number(run.summary.clock)}.'
    )


def _tell_nodes(run: _runs.Run) -> Iterator[str]:
  summary = run.node_summary
  if summary is None:
    return
  yield (
    f'They made {_count(summary.num_steps, "step")} and '
    f'{_count(summary.num_mixes, "mix", "mixes")} in '
    f'{_number(run.active_duration)} s.'
  )
  if len(summary.age.values):
    yield (
      f'What is mixed in is {_number(summary.age.mean)} steps old on average, '
      f'{_number(summary.age.max)} at most.'
    )
  lost_mass = summary.lost_mass
  if lost_mass:
    fate = 'was lost' if lost_mass > 0 else 'was gained by restarts'
    number = _number(abs(lost_mass))
    yield f'Of a mass of {summary.num_nodes}, {number} {fate}.'
  if summary.num_deaths:
    yield (
      f'Nodes died {_count(summary.num_deaths, "time")} and returned '
      f'{_count(summary.num_returns, "time")}.'
    )


def _count(number: int, noun: str, plural: str | None = None) -> str:
  return f'{number:,} {noun if number == 1 else plural or noun + "s"}'
