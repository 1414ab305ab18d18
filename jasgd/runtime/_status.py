"""How a run stands, in words and numbers."""

from typing import Any

from jasgd import protocols
from jasgd.runtime import _core
from jasgd.runtime import _watch


def describe(
  core: _core.Core, watch: _watch.Watch, checkpoint_clock: int
) -> dict[str, Any]:
  """How a run stands, as JSON can say it.

  Args:
    core: The run.
    watch: Who waits for whom.
    checkpoint_clock: Of the last checkpoint; -1: there is none.

  Returns:
    What STATUS answers.
  """
  settings, weights = core.settings, core.weights
  max_samples = settings.max_samples
  return {
    'clock': weights.clock,
    'incarnation': core.incarnation,
    'samples': weights.samples,
    'max_samples': None if max_samples == float('inf') else max_samples,
    'num_updates': settings.num_updates,
    'epoch': weights.epoch,
    'time': core.get_time(),
    'metrics': core.recorder.summarize(),
    'evaluation_clock': (
      -1 if core.to_evaluate is None else core.to_evaluate.clock
    ),
    'learners': {
      str(book.learner): {
        'state': str(book.state),
        'step': book.next_step,
        'num_applied': book.num_applied,
        'num_not_finite': book.num_not_finite,
      }
      for book in core.register
    },
    'num_alive': core.count_alive(),
    'waits': watch.describe_waits(),
    'counts': dict(core.counts),
    'fates': {
      protocols.Fate(fate).name.lower(): count
      for fate, count in core.recorder.fates.items()
    },
    'times': core.times,
    'num_buffers': len(core.store),
    'checkpoint_clock': checkpoint_clock,
    'end_reason': core.end_reason,
    'is_interrupted': core.is_interrupted,
    'is_failed': core.is_failed,
    'is_diverged': core.is_diverged,
  }
