"""Sixteen asynchronous learners, as in figure 1 of Jain et al. (2018).

Times per gradient are N(1, 0.2^2), 10,000 gradients. The paper's histogram of
staleness is centred at 15 = N - 1 with a standard deviation of about 3.5.

  python -m launch.simulate --config=configs/simulate_jain.py --workdir=/tmp/a
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The settings of the figure; `:smoke` for a few updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='quadratic', batch=1),
    strategy=experiment.StrategyConfig(name='asynchronous'),
    num_workers=16,
    num_updates=10_000,
    num_epochs=1000.0,
  )
  return sizes.apply_size(config, size)
