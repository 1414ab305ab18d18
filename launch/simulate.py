"""Simulates the workers of a run in virtual time, without weights.

  python -m launch.simulate --config=configs/simulate_jain.py --workdir=/tmp/a
  python -m launch.simulate --config=configs/simulate_gossip.py --workdir=/tmp/b

The config is that of a training run: any file in `configs/` will do. Each field
is a flag:

  --config.strategy.name=softsync --config.strategy.n=4 --config.num_workers=30
  --config.network.latency=0.1 --config.network.server_time=0.05
  --config.time.slow_fraction=0.25 --config.time.slow_factor=3
  --config.failures.mean_time_between=100 --config.failures.mean_down_time=5

Prints a table, and writes into the workdir: `trace` (a folder with a file for
each node, if there is no server), `staleness.png` (without a server `ages.png`)
and `timeline.png` (when each worker computed, communicated and waited).
"""

import dataclasses
import pathlib

from absl import app
from absl import flags
from ml_collections import config_flags

import jasgd
from jasgd import reports
from jasgd import traces
from launch import entry

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The training run.')
_WORKDIR = flags.DEFINE_string(
  'workdir',
  None,
  'Folder of the results; it is made if it does not exist.',
  required=True,
)


def main() -> None:
  """Validates the config, simulates, and writes trace and pictures."""
  config = _CONFIG.value
  entry.check_config(config)
  workdir = pathlib.Path(_WORKDIR.value)
  _prepare_workdir(workdir)
  print(config.describe())
  try:
    trace = config.simulate()
  except (OSError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  header = {**trace.header, 'config': dataclasses.asdict(config)}
  header['jasgd'] = jasgd.__version__
  trace = dataclasses.replace(trace, header=header)
  # Before anything is drawn: an error there must not lose the trace.
  trace.save(workdir / 'trace')
  picture = _show(trace, workdir)
  print(f'Wrote trace, {picture} and timeline.png into {workdir}')


def _show(trace: traces.Trace, workdir: pathlib.Path) -> str:
  """Prints a summary and draws pictures; returns the name of the first one."""
  print(traces.summarize(trace))
  reports.plot_timeline(trace, workdir / 'timeline.png')
  if not trace.has_server:
    reports.plot_ages(trace, workdir / 'ages.png')
    return 'ages.png'
  reports.plot_staleness(trace, workdir / 'staleness.png')
  return 'staleness.png'


def _prepare_workdir(workdir: pathlib.Path) -> None:
  """Makes the workdir, or raises a usage error."""
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise app.UsageError(
      f'--workdir={workdir} cannot be made: {error.strerror}.'
    ) from None
  if (workdir / 'trace').is_dir():
    raise app.UsageError(
      f'--workdir={workdir} holds the trace of a real run of nodes: give '
      'another workdir.'
    )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main)
