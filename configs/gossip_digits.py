"""Digits: four processes train a small LeNet and gossip, without a server.

After each step a node pulls the weights of a random other one and averages with
them (Jin et al., 2016); it waits for nobody's step. Data comes with
scikit-learn.

  python -m launch.train --config=configs/gossip_digits.py --workdir=/tmp/a
  python -m launch.replay --workdir=/tmp/a

Behind a colon may stand other ways to average: `:elastic` (with a centre, which
is a process of its own), `:allreduce` (all wait for the slowest), `:push`,
`:push_sum`, `:pairs`; then `simulate`, in virtual time in this process, or
`devices`, on the devices of this process; and `smoke`. Several are joined:

  ... --config=configs/gossip_digits.py:elastic,simulate

Test accuracy 0.96 to 0.98 after 20 epochs, whichever way; no two runs of real
processes are the same, but each is the same as its replay. All strategies, with
8 nodes, against a single learner, each at its best rate, in about 2 minutes on
two cores:

  python -m launch.compare --config=configs/gossip_digits.py:simulate \
    --config.strategy.num_nodes=8 --config.strategy.rate=0.1 \
    --workdir=/tmp/c --bound=0.02 --jobs=2

The single learner has 98.6%, the worst strategy (pairs, and push) 1.6% less.
"""

from configs import sizes
from jasgd import experiment

_STRATEGIES = ('allreduce', 'elastic', 'pairs', 'pull', 'push', 'push_sum')
_MODES = ('simulate', 'local', 'devices')


def get_config(variant: str = '') -> experiment.NodeTrainingConfig:
  """Gossip in local processes, or what stands behind the colon."""
  names = [name for name in variant.split(',') if name]
  known = (*_STRATEGIES, *_MODES, 'smoke')
  if unknown := [name for name in names if name not in known]:
    raise ValueError(
      f'Behind the colon may stand {", ".join(known)}, got {unknown[0]!r}.'
    )
  strategies = [name for name in names if name in _STRATEGIES] or ['pull']
  modes = [name for name in names if name in _MODES] or ['local']
  if len(strategies) > 1 or len(modes) > 1:
    raise ValueError(
      'Behind the colon may stand one strategy and one place, got '
      f'{", ".join(names)}.'
    )
  strategy, mode = strategies[0], modes[0]
  config = experiment.NodeTrainingConfig(
    task=experiment.TaskConfig(name='digits', model='lenet', batch=32),
    optimizer=experiment.OptimizerConfig(rate=0.03, momentum=0.9),
    strategy=experiment.StrategyConfig(
      name=strategy,
      num_nodes=4,
      rate=0.2,  # Of elastic: 0.8 / 4.
      peers='matching' if strategy == 'pairs' else 'independent',
    ),
    runtime=experiment.RuntimeConfig(mode=mode),
    num_epochs=20.0,
  )
  return sizes.apply_size(config, 'smoke' if 'smoke' in names else '')
