"""A1: Zhang et al. (2016), n-softsync on CIFAR-10, staleness-aware.

30 learners with batches of 4 train a network of 3 convolutions (about 90 k
parameters) for 140 epochs: rate 0.001, divided by 10 after epochs 120 and 130,
momentum 0.9, every gradient divided by its staleness.

  python -m launch.train --config=configs/a1_cifar10.py --workdir=/tmp/a1 \
    --config.task.data_dir=DATA --config.strategy.n=30

The paper's test error is about 18% for every n; with
--config.optimizer.policy=constant, 90% at n = 15 and 30. The baseline is
--config.strategy.name=hardsync. An epoch takes about a minute on one core, and
all epochs 2.5 hours. Our test accuracy at n = 15 after 1, 2 and 3 epochs: .446,
.489, .511, at a mean staleness of 14.5 (at most 28).
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The paper's set-up; `:smoke` for a few updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='cifar10', model='a1', batch=4),
    optimizer=experiment.OptimizerConfig(
      rate=0.001, momentum=0.9, policy='inverse'
    ),
    schedule=experiment.ScheduleConfig(
      name='steps', epochs=(120.0, 130.0), factor=0.1
    ),
    strategy=experiment.StrategyConfig(name='softsync', n=15),
    num_workers=30,
    num_epochs=140.0,
  )
  return sizes.apply_size(config, size)
