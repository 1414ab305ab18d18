"""Sixteen gossiping nodes, four of them three times slower.

Pull-gossip of Jin et al. (2016): after each step a node averages with a random
one, and waits for nobody's step. The fast nodes keep their pace; the table says
how old the weights are that they average with.

  python -m launch.simulate --config=configs/simulate_gossip.py --workdir=/tmp/b

The same cluster with all-reduce, where all go at the pace of the slowest:

  ... --config.strategy.name=allreduce
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.NodeSimulationConfig:
  """A quarter of the nodes is slow; `:smoke` is the same in small."""
  config = experiment.NodeSimulationConfig(
    time=experiment.TimeConfig(slow_fraction=0.25, slow_factor=3.0),
    network=experiment.NetworkConfig(
      num_parameters=60_000, latency=1e-3, bandwidth=1.25e8
    ),
  )
  return sizes.apply_size(config, size)
