"""Digits: how much delay does an optimizer tolerate?

The smallest experiment there is, on data that comes with scikit-learn. As in
Jain et al. (2018) every gradient is d updates late. Momentum SGD, batch 32, 20
epochs, a network with one hidden layer of 64. The picture of the README:

  python -m launch.sweep --config=configs/digits_delay.py --workdir=/tmp/s \
    --grid='optimizer.name,optimizer.rate,optimizer.policy,optimizer.policy_on=\
sgd:0.03:constant:gradient,sgd:0.03:inverse:gradient,\
adam:0.003:constant:gradient,adam:0.003:inverse:update;\
strategy.delay=0,1,2,4,8,16,32,64'

About half a minute on one core.
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """The defaults; `:smoke` for a few updates."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='digits', model='mlp', batch=32),
    optimizer=experiment.OptimizerConfig(rate=0.03, momentum=0.9),
    strategy=experiment.StrategyConfig(name='constant_delay', delay=8),
    time=experiment.TimeConfig(name='constant', arguments=(1.0,)),
    num_epochs=20.0,
  )
  return sizes.apply_size(config, size)
