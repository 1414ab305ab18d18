"""Sixteen gossiping nodes, four of them three times slower.

Pull-gossip of Jin et al. (2016): after each step a node averages with a random
other one, and does not wait for its step. The fast nodes keep their pace; the
table shows the ages of the weights that they average with.

  python -m launch.simulate --config=configs/simulate_gossip.py --workdir=/tmp/b

The same cluster with all-reduce, at the pace of the slowest node:

  ... --config.strategy.name=allreduce
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.TrainingConfig:
  """A quarter of the nodes is slow; `:smoke` for a few steps."""
  config = experiment.TrainingConfig(
    task=experiment.TaskConfig(name='quadratic', batch=1),
    strategy=experiment.StrategyConfig(name='pull'),
    num_workers=16,
    time=experiment.TimeConfig(slow_fraction=0.25, slow_factor=3.0),
    network=experiment.NetworkConfig(
      num_parameters=60_000, latency=1e-3, bandwidth=1.25e8
    ),
    num_updates=8_000,
    num_epochs=1000.0,
  )
  return sizes.apply_size(config, size)
