"""MNIST: LeNet-5 with delayed gradients, a first look at Jain et al. (2018).

Momentum SGD at rate 10^-2.5, batch 64, gradients 8 updates late, 2 epochs. The
whole set-up of the paper is configs/a2_mnist_delay.py.

  python -m launch.train --config=configs/mnist_delay.py --workdir=/tmp/b \
    --config.task.data_dir=DATA

DATA is a folder of tensorflow-datasets; leave it out to download. About 25
seconds on one core. Test accuracy 0.91; at --config.optimizer.rate=0.01 the
network collapses to one class (0.1135), as in the paper's figure 2. To see both
rates at three delays:

  python -m launch.sweep --config=configs/mnist_delay.py --workdir=/tmp/s \
    --config.task.data_dir=DATA \
    --grid='optimizer.rate=0.00316,0.01;strategy.delay=0,1,8'
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The defaults; `:smoke` for a few updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='mnist', model='lenet', batch=64),
    optimizer=experiment.OptimizerConfig(rate=10**-2.5, momentum=0.9),
    strategy=experiment.StrategyConfig(name='constant_delay', delay=8),
    time=experiment.TimeConfig(name='constant', arguments=(1.0,)),
    num_epochs=2.0,
  )
  return sizes.apply_size(config, size)
