"""Replays a run, and says whether it is what its trace says, bit for bit.

  python -m launch.replay --workdir=/tmp/a

Every gradient is computed again, on the weights that the trace says, and
applied in the order that the trace says, on one device. The weights must be
those of the run's last checkpoint, to the last bit; if not, the first clock
where they differ is printed, and the exit code is 1. Of nodes without a server
each is compared with its own checkpoint, and so is the centre of elastic
averaging.

On a CPU bits depend on the number of threads that XLA sees. The trace has the
number, and this program starts itself again with it if need be.
"""

import sys

from absl import app
from absl import flags

from jasgd import experiment
from launch import entry

_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'The folder of a run in local or cluster mode.',
  required=True,
)


def main() -> None:
  """Compares."""
  workdir = _WORKDIR.value
  try:
    nodes = experiment.read_nodes(workdir)
    if nodes is not None:
      entry.adopt(experiment.get_environment(nodes[1]))
      _print_nodes(experiment.verify_nodes(workdir))
      return
    _, trace = experiment.read_run(workdir)
    entry.adopt(experiment.get_environment(trace))
    found = experiment.verify(workdir)
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  if found.is_same:
    print(
      f'Bit-identical: the replay of {found.clock} updates gives the weights '
      f'of the checkpoint of clock {found.clock}.'
    )
    return
  if found.first_difference is None:
    print(
      f'Different: the state of clock {found.clock} is not that of the '
      f'checkpoint, but none of {found.num_digests} digests on the way '
      'differs: it is in numbers that these do not look at.'
    )
  else:
    print(
      'Different: the first weights that differ are those of clock '
      f'{found.first_difference}, of {found.clock}.'
    )
  sys.exit(1)


def _print_nodes(found: experiment.NodeVerification) -> None:
  """Says which nodes are what their traces say."""
  names = {
    member: 'the centre' if member < 0 else f'node {member}'
    for member in sorted(found.versions, reverse=True)
  }
  if found.is_same:
    print(
      'Bit-identical: the replay gives the weights of the checkpoints of '
      + ', '.join(
        f'{name} (version {found.versions[member]})'
        for member, name in sorted(names.items(), reverse=True)
      )
      + '.'
    )
    return
  different = ', '.join(names[member] for member in found.different)
  print(
    f'Different: {different}; the largest difference is {found.distance:.3g} '
    'of the norm of the weights.'
  )
  sys.exit(1)


if __name__ == '__main__':
  entry.run(main)
