"""MNIST: eight nodes without a server, against a single learner.

Jin et al. (2016) ask which way to average is best. Here all of them train
LeNet-5 (all-reduce, elastic averaging, pull, push, push-sum, pairs) for as many
epochs as a single learner does, in virtual time: a step takes N(1, 0.2^2), and
a message 0.1.

One run of one strategy:

  python -m launch.train --config=configs/mnist_strategies.py --workdir=/tmp/a \
    --config.task.data_dir=DATA --config.strategy.name=elastic

All of them, each at the rate that is best for it on a part of the training set
that is held out, with three seeds, against the single learner:

  python -m launch.compare --config=configs/mnist_strategies.py \
    --config.task.data_dir=DATA --workdir=/tmp/c --bound=0.005 --jobs=2

DATA is a folder of tensorflow-datasets; leave it out to download. It takes 20
minutes of one core, hence about 10 on two:

  strategy   nodes   rate  validation    test  of seeds        difference
  single         1   0.01      98.57%  98.56%  98.28 to 98.94
  allreduce      8   0.03      98.22%  98.50%  98.30 to 98.66   -0.07% within
  elastic        8    0.1      98.42%  98.81%  98.61 to 98.95   +0.25% within
  pairs          8    0.1      98.43%  98.55%  98.08 to 98.80   -0.01% within
  pull           8    0.1      98.57%  98.57%  98.34 to 98.70   +0.00% within
  push           8   0.03      98.13%  98.44%  98.16 to 98.59   -0.13% within
  push_sum       8    0.1      98.42%  98.73%  98.46 to 99.02   +0.17% within
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.NodeTrainingConfig:
  """Pull-gossip; `:smoke` for a few seconds."""
  config = experiment.NodeTrainingConfig(
    task=experiment.TaskConfig(name='mnist', model='lenet', batch=32),
    optimizer=experiment.OptimizerConfig(rate=0.03, momentum=0.9),
    strategy=experiment.StrategyConfig(
      name='pull',
      num_nodes=8,
      rate=0.1,  # Of elastic: 0.8 / 8.
    ),
    network=experiment.NetworkConfig(latency=0.1),
    num_epochs=4.0,
  )
  return sizes.apply_size(config, size)
