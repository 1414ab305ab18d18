"""Real learners against the simulator: one of four is three times slower.

Learners compute by sleeping, so that it does not matter how many cores there
are. The times of each learner and of the server are measured, and nothing else
of the run goes into the prediction.
"""

import io

import numpy as np
import pytest

from jasgd import experiment
from jasgd import simulation
from jasgd import traces

NUM_LEARNERS = 4
NUM_GRADIENTS = 400
# Not quite equal: with equal times, learners would keep one random order for
# the whole run, however long it is.
MIN_SECONDS = (0.028, 0.03, 0.033, 0.09)
# A prediction of one seed is random, too: those of these seeds are averaged.
SEEDS = range(16)


def _run(workdir, strategy, per_update, overlap=False):
  """The trace of a run in real processes, the server's one of them."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='quadratic', batch=4),
    optimizer=experiment.OptimizerConfig(rate=0.01),
    strategy=experiment.StrategyConfig(**strategy),
    num_workers=NUM_LEARNERS,
    runtime=experiment.RuntimeConfig(
      mode='local', overlap=overlap, eval_every=NUM_GRADIENTS
    ),
    processes=experiment.ProcessConfig(min_seconds=MIN_SECONDS),
    num_updates=NUM_GRADIENTS // per_update,
    num_epochs=1e6,
  )
  experiment.train_and_evaluate(config, workdir, stream=io.StringIO())
  trace = traces.Trace.load(workdir / 'trace')
  summary = traces.summarize(trace)
  assert summary.fates[traces.Fate.APPLIED] == NUM_GRADIENTS
  assert summary.num_workers == NUM_LEARNERS
  return trace, summary


@pytest.mark.slow
def test_a_real_run_is_as_predicted(processes, tmp_path):
  del processes
  trace, summary = _run(tmp_path, {'name': 'asynchronous'}, per_update=1)
  expected = NUM_LEARNERS - 1
  assert summary.staleness.mean == pytest.approx(expected, rel=0.15)
  comparison = simulation.compare(
    trace, *(simulation.predict(trace, seed) for seed in SEEDS)
  )
  # One learner is slow, so that the staleness is not trivial.
  assert comparison.measured_share[3] < 0.5 * comparison.measured_share[0]
  assert comparison.total_variation < 0.15, comparison
  for differences in (
    comparison.staleness_difference,
    comparison.share_difference,
  ):
    assert np.all(np.abs(differences) < 0.15), comparison


@pytest.mark.slow
def test_with_overlap_the_own_push_is_one_more_update(processes, tmp_path):
  """The mean is lambda / c: a learner pulls before its push is applied."""
  del processes
  strategy = {'name': 'softsync', 'n': 2}
  _, summary = _run(tmp_path, strategy, per_update=2, overlap=True)
  expected = NUM_LEARNERS / 2
  assert summary.staleness.mean == pytest.approx(expected, rel=0.15)
