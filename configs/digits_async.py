"""Digits: four asynchronous learners train a small LeNet, staleness-aware.

The default first run: data comes with scikit-learn. Times per gradient are
N(1, 0.2^2), so that the mean staleness is 3; every gradient is divided
by its staleness (Zhang et al., 2016).

  python -m launch.train --config=configs/digits_async.py --workdir=/tmp/a

About 15 seconds on one core. Test accuracy 0.983 after 20 epochs; without the
division (--config.optimizer.policy=constant) 0.456.
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The defaults; `:smoke` for a few updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='digits', model='lenet', batch=32),
    optimizer=experiment.OptimizerConfig(
      rate=0.03, momentum=0.9, policy='inverse'
    ),
    strategy=experiment.StrategyConfig(name='asynchronous'),
    num_workers=4,
    num_epochs=20.0,
  )
  return sizes.apply_size(config, size)
