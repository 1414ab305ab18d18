"""Measures how fast jasgd is, as ratios within one run.

  python -m launch.benchmark --suite=delay    a delayed step against a plain one
  python -m launch.benchmark --suite=import   `import jasgd` against optax
  python -m launch.benchmark --suite=simulator   gradients simulated per second
  python -m launch.benchmark --suite=training   the engine against PyTorch

Absolute times depend on the machine and on who else uses it; the ratios are
taken between programs that run in turns, and can be compared.
"""

from absl import flags

from launch import entry
from launch.benchmarks import delay
from launch.benchmarks import imports
from launch.benchmarks import simulator
from launch.benchmarks import training

_SUITES = {
  'delay': delay.run,
  'import': imports.run,
  'simulator': simulator.run,
  'training': training.run,
}

_SUITE = flags.DEFINE_enum(
  'suite', None, sorted(_SUITES), 'What to measure.', required=True
)
_QUICK = flags.DEFINE_bool(
  'quick', False, 'Only the small sizes, in half a minute: to see if it runs.'
)


def main() -> None:
  """Runs a suite."""
  _SUITES[_SUITE.value](quick=_QUICK.value)


if __name__ == '__main__':
  entry.run(main)
