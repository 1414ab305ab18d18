"""Measures the speed of jasgd, as ratios within one run.

  python -m launch.benchmark --suite=faults --rounds=100   random kills
  python -m launch.benchmark --suite=gossip   a mix against an all-reduce
  python -m launch.benchmark --suite=prediction   simulated against real runs
  python -m launch.benchmark --suite=server   updates per second against peers
  python -m launch.benchmark --suite=simulator   gradients simulated per second
  python -m launch.benchmark --suite=stragglers --workdir=W   half of nodes slow
  python -m launch.benchmark --suite=training   the engine against PyTorch

Absolute times depend on the machine and its load. Ratios are taken between
programs that run in turns, and can be compared.
"""

from collections.abc import Callable
import tempfile

from absl import flags

from launch import entry
from launch.benchmarks import faults
from launch.benchmarks import gossip
from launch.benchmarks import prediction
from launch.benchmarks import server
from launch.benchmarks import simulator
from launch.benchmarks import stragglers
from launch.benchmarks import training

_SUITES: dict[str, Callable[..., None]] = {
  'faults': faults.run,
  'gossip': gossip.run,
  'prediction': prediction.run,
  'server': server.run,
  'simulator': simulator.run,
  'stragglers': stragglers.run,
  'training': training.run,
}

_SUITE = flags.DEFINE_enum(
  'suite', None, sorted(_SUITES), 'Suite of measurements.', required=True
)
_QUICK = flags.DEFINE_bool(
  'quick',
  False,
  'Small sizes only, for half a minute: a check that the suite runs.',
)
_ROUNDS = flags.DEFINE_integer(
  'rounds', 20, 'faults: number of runs with a fault.', lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'prediction, stragglers: folder of the runs.'
)
_SEED = flags.DEFINE_integer('seed', 0, 'faults: seed of the faults.')


def main() -> None:
  """Runs a suite."""
  if _SUITE.value == 'faults':
    faults.run(_QUICK.value, _ROUNDS.value, _SEED.value)
  elif _SUITE.value in ('prediction', 'stragglers'):
    workdir = _WORKDIR.value or tempfile.mkdtemp(prefix=f'{_SUITE.value}-')
    _SUITES[_SUITE.value](_QUICK.value, workdir)
  else:
    _SUITES[_SUITE.value](quick=_QUICK.value)


if __name__ == '__main__':
  entry.run(main)
