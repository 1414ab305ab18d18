"""Simulates learners and a server, or nodes, in virtual time without weights.

  python -m launch.simulate --config=configs/simulate_jain.py --workdir=/tmp/a
  python -m launch.simulate --config=configs/simulate_gossip.py --workdir=/tmp/b

Each field of the config is a flag:

  --config.protocol.name=softsync --config.protocol.n=4
  --config.network.latency=0.1 --config.network.server_time=0.05
  --config.time.slow_fraction=0.25 --config.time.slow_factor=3
  --config.failures.mean_time_between=100 --config.failures.mean_down_time=5

Prints a table, and writes into the workdir: `trace` (of nodes: a folder with a
file per node), `staleness.png` (of nodes: `ages.png`) and `timeline.png` (who
computed, communicated and waited when).
"""

import dataclasses
import pathlib

from absl import app
from absl import flags
from ml_collections import config_flags

import jasgd
from jasgd import experiment
from jasgd import reports
from jasgd import traces
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to simulate.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where to write; made if it is not there.', required=True
)


def main() -> None:
  """Validates the config, simulates, and writes what there is to see."""
  config = _CONFIG.value
  entry.check_config(
    config, experiment.SimulationConfig, experiment.NodeSimulationConfig
  )
  workdir = pathlib.Path(_WORKDIR.value)
  _prepare_workdir(workdir, isinstance(config, experiment.NodeSimulationConfig))
  print(config.describe())
  trace = config.simulate()
  header = {**trace.header, 'jasgd': jasgd.__version__}
  trace = dataclasses.replace(trace, header=header)
  # First of all: whatever happens to the rest, the work is not lost.
  trace.save(workdir / 'trace')
  if isinstance(trace, traces.NodeTrace):
    print(traces.summarize_nodes(trace))
    reports.plot_ages(trace, workdir / 'ages.png')
    reports.plot_node_timeline(trace, workdir / 'timeline.png')
    pictures = 'ages.png'
  else:
    print(traces.summarize(trace))
    reports.plot_staleness(trace, workdir / 'staleness.png')
    reports.plot_timeline(trace, workdir / 'timeline.png')
    pictures = 'staleness.png'
  print(f'Wrote trace, {pictures} and timeline.png into {workdir}')


def _prepare_workdir(workdir: pathlib.Path, is_folder: bool) -> None:
  """Makes the workdir, or says in a usage error why it cannot be used."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise app.UsageError(
      f'--workdir={workdir} cannot be made: {error.strerror}.'
    ) from None
  path = workdir / 'trace'
  if path.exists() and path.is_dir() != is_folder:
    found, wanted = ('nodes', 'a server')[:: -1 if is_folder else 1]
    raise app.UsageError(
      f'--workdir={workdir} holds a trace of {found}, and this one would be of '
      f'{wanted}: give another workdir.'
    )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
