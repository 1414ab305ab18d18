"""A2: Jain et al. (2018), LeNet-5 on MNIST, 30 epochs, constant delay.

SGD with momentum 0.9. One cell of the paper's figure 2 (300 of them):

  python -m launch.train --config=configs/a2_mnist_delay.py --workdir=/tmp/a2 \
    --config.task.data_dir=DATA --config.strategy.delay=8

The whole figure. The sweep can be resumed, and shared by several processes:

  python -m launch.sweep --config=configs/a2_mnist_delay.py --workdir=/tmp/f2 \
    --config.task.data_dir=DATA --grid='optimizer.rate=1e-5,3.2e-5,1e-4,\
3.16e-4,1e-3,3.162e-3,1e-2,3.1623e-2,1e-1,3.16228e-1;\
task.batch=64,128,256,512,1024;strategy.delay=0,1,2,4,6,8'

The paper's test accuracy at batch 64: rate 1e-2 gives .991 at delay 0 and .113
(collapsed) at delay 8; rate 3.16e-3 gives .990 and .988. Ours for the last of
these, in 4 minutes on a busy core: .988 after 29 epochs, and a collapse in the
30th epoch (.1135). So at that delay the rate is at the edge of stability.
"""

from configs import mnist_delay
from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The paper's set-up; `:smoke` for a few updates."""
  config = mnist_delay.get_config()
  config.num_epochs = 30.0
  return sizes.apply_size(config, size)
