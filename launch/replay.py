"""Replays a real run, and compares it with its checkpoints, bit for bit.

  python -m launch.train --config=configs/digits_server.py --workdir=/tmp/a
  python -m launch.replay --workdir=/tmp/a

Every gradient is computed again, on the weights that the trace names, and
applied in the order of the trace. The weights must be those of the last
checkpoint, to the last bit; otherwise the exit code is 1, and the first clock
at which they differ is printed. Without a server, each node is compared with
its own checkpoint, and so is the centre of elastic averaging.

On a CPU, bits depend on the number of threads that XLA sees. The trace has the
number, and this program starts itself again with it if necessary.
"""

import sys

from absl import app
from absl import flags

from jasgd import experiment
from launch import entry

_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder of a run in local or cluster mode.',
  required=True,
)


def main() -> None:
  """Replays, compares, and prints the comparison."""
  workdir = _WORKDIR.value
  try:
    config, trace = experiment.read_run(workdir)
    entry.adopt(experiment.get_environment(trace))
    found = experiment.verify(workdir)
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  owner = 'the centre' if config.strategy.is_peer else 'the server'
  names = {
    replica: owner if replica < 0 else f'node {replica}'
    for replica in sorted(found.versions)
  }
  if found.is_same:
    print(
      'Bit-identical: the replay gives the weights of the checkpoints of '
      + ', '.join(
        f'{name} (version {found.versions[replica]})'
        for replica, name in names.items()
      )
      + '.'
    )
    return
  different = ', '.join(names[replica] for replica in found.different)
  print(
    f'Different: {different}; the largest difference is {found.distance:.3g} '
    'of the norm of the weights.'
  )
  if found.first_difference is not None:
    print(
      'The first weights that differ are those of clock '
      f'{found.first_difference}, of {found.clock}.'
    )
  elif found.num_digests:
    print(
      f'None of {found.num_digests} digests in the trace differs: the '
      'difference is in numbers that they do not cover.'
    )
  sys.exit(1)


if __name__ == '__main__':
  entry.run(main)
