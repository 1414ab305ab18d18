"""Sixteen asynchronous learners, as in figure 1 of Jain et al. (2018).

Times per gradient are N(1, 0.2^2), 10,000 gradients. The paper's histogram of
staleness is centred at 15 = N - 1 with a standard deviation of about 3.5.

  python -m launch.simulate --config=configs/simulate_jain.py --workdir=/tmp/a
"""

from configs import sizes
from jasgd import experiment


def get_config(size: str = '') -> experiment.SimulationConfig:
  """The defaults are those of the figure; `:smoke` is the same in small."""
  return sizes.apply_size(experiment.SimulationConfig(), size)
