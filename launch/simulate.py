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

import pathlib

from absl import flags
from ml_collections import config_flags

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
  workdir.mkdir(parents=True, exist_ok=True)
  print(config.describe())
  trace = config.simulate()
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
  trace.save(workdir / 'trace')
  print(f'Wrote trace, {pictures} and timeline.png into {workdir}')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
