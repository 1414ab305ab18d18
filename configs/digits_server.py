"""Digits: a real server and four learner processes train a small LeNet.

The default first run: the data comes with scikit-learn. A learner pushes each
gradient, and the server applies it at once, divided by its staleness (Zhang et
al., 2016), which is 3 on average.

  python -m launch.train --config=configs/digits_server.py --workdir=/tmp/a
  python -m launch.replay --workdir=/tmp/a

About 20 seconds on two cores. Test accuracy 0.97 to 0.99 after 20 epochs. The
order of real gradients is random: no two runs are the same, but each is the
same as its replay.
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
    runtime=experiment.RuntimeConfig(mode='local'),
    num_epochs=20.0,
  )
  return sizes.apply_size(config, size)
