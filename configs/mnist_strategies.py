"""MNIST: eight nodes without a server, against a single worker.

Jin et al. (2016) ask which strategy is best. Here each of them (all-reduce,
elastic averaging, pull, push, push-sum, pairs) trains LeNet-5 for as many
epochs as a single worker, in virtual time: a step takes N(1, 0.2^2), and a
message 0.1.

One run of one strategy:

  python -m launch.train --config=configs/mnist_strategies.py --workdir=/tmp/a \
    --config.task.data_dir=DATA --config.strategy.name=elastic

All strategies against the single worker, with three seeds. The rate of each is
the best one, on a part of the training set that is held out, among 0.3, 0.1,
0.03 and 0.01 times the config's rate (which `:compare` sets for this):

  python -m launch.compare --config=configs/mnist_strategies.py:compare \
    --config.task.data_dir=DATA --workdir=/tmp/c --bound=0.005 --jobs=2

DATA is a folder of tensorflow-datasets; leave it out to download. The
comparison takes 24 minutes on one core, or 12 on two:

  strategy  nodes   rate  x base   valid.    test  of seeds       difference
  single        1  0.015    0.03   98.70%  98.63%  98.40 to 98.92
  allreduce     8   0.05     0.1   98.30%  98.68%  98.58 to 98.77 +0.05% within
  elastic       8   0.15     0.3   98.40%  98.72%  98.68 to 98.78 +0.10% within
  pairs         8  0.015    0.03   98.35%  98.26%  97.99 to 98.40 -0.37% within
  pull          8   0.05     0.1   98.48%  98.71%  98.54 to 98.86 +0.08% within
  push          8   0.05     0.1   98.33%  98.56%  98.37 to 98.70 -0.07% within
  push_sum      8   0.15     0.3   98.28%  98.57%  98.15 to 98.87 -0.05% within
  Warning: 0.15, the best rate of elastic, is the highest that was tried.
  Warning: 0.15, the best rate of push_sum, is the highest that was tried.
"""

from configs import sizes
from jasgd import experiment

# The single worker's best rate lies in the middle of 0.3 to 0.01 times this.
_BASE_RATE = 0.5


def get_config(variant: str = '') -> experiment.TrainingConfig:
  """Pull-gossip; `:smoke` for a few steps, `:compare` for `launch.compare`.

  Both are joined by a comma.
  """
  names = [name for name in variant.split(',') if name]
  if unknown := {*names} - {'compare', 'smoke'}:
    raise ValueError(
      f'After the colon, give compare or smoke, got {min(unknown)!r}.'
    )
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='mnist', model='lenet', batch=32),
    optimizer=experiment.OptimizerConfig(rate=0.03, momentum=0.9),
    strategy=experiment.StrategyConfig(
      name='pull',
      rate=0.1,  # For elastic: 0.8 / 8.
    ),
    num_workers=8,
    network=experiment.NetworkConfig(latency=0.1),
    num_epochs=4.0,
  )
  if 'compare' in names:
    config.optimizer.rate = _BASE_RATE
  return sizes.apply_size(config, 'smoke' if 'smoke' in names else '')
