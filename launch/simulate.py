"""Simulates learners and a server in virtual time, without any weights.

  python -m launch.simulate --config=configs/simulate_jain.py --workdir=/tmp/a

Each field of the config is a flag: --config.protocol.name=softsync
--config.protocol.arguments='(4,)' --config.network.latency=0.1.

Prints a table, and writes into the workdir: `trace`, `staleness.png` (its
distribution) and `timeline.png` (who computed, communicated and waited when).
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
  entry.check_config(config, experiment.SimulationConfig)
  workdir = pathlib.Path(_WORKDIR.value)
  workdir.mkdir(parents=True, exist_ok=True)
  print(config.protocol.make().describe())
  trace = config.simulate()
  print(traces.format_summary(traces.summarize(trace)))
  trace.save(workdir / 'trace')
  reports.plot_staleness(trace, workdir / 'staleness.png')
  reports.plot_timeline(trace, workdir / 'timeline.png')
  print(f'Wrote trace, staleness.png and timeline.png into {workdir}')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
