"""Trains from a config, and leaves all files of the run in a folder.

  python -m launch.train --config=configs/digits_server.py --workdir=/tmp/a
  python -m launch.train --config=configs/gossip_digits.py --workdir=/tmp/b

Each field of the config is a flag. A strategy is a protocol with a server, or a
peer strategy without one; --config.strategy.name=module:name is your own:

  ... --config.strategy.name=softsync --config.strategy.n=2
  ... --config.strategy.name=pull --config.num_workers=8
  ... --config.num_epochs=5 --config.optimizer.rate=0.1

`:smoke` behind the name of a config is the same run for a few updates.

config.runtime.mode names the place of the run: `simulate`, virtual time in this
process; `local`, processes of this machine; `devices`, the devices of this
process (for nodes); `cluster`, many hosts, with one command for each process.

A server and its learners in a cluster; a learner that cannot see the folder W
is given the address of the server, and the text of its file W/token:

  C='--config=configs/digits_async.py --config.runtime.mode=cluster'
  python -m launch.train $C --role=server --workdir=W --config.server.host=H
  python -m launch.train $C --role=learner --workdir=W
  JASGD_TOKEN=... python -m launch.train $C --role=learner --server=H:PORT

Nodes in a cluster, each on its own host H; any may be the first. `watch`
evaluates their mean, and ends them when they have made their steps:

  C='--config=configs/gossip_digits.py --config.runtime.mode=cluster'
  python -m launch.train $C --role=node --listen=H --workdir=W       4 times
  python -m launch.train $C --role=centre --listen=H --workdir=W     of :elastic
  python -m launch.train $C --role=watch --workdir=W

Without a common folder, each node has a folder of its own, a number, and the
address of any other node; copied together (rsync -a), the folders are one run:

  export JASGD_TOKEN=...
  python -m launch.train $C --role=node --node=0 --listen=H0:7000 --workdir=W
  python -m launch.train $C --role=node --node=1 --listen=H1 --peers=H0:7000 ...
  python -m launch.train $C --role=watch --peers=H0:7000 --workdir=W

The nodes of an all-reduce are one group: each is given --node, and with --peers
the same HOST:PORT, where node 0 waits for the others.

Killed at any time and started again, a run goes on from its last checkpoint.
Ctrl-C and SIGTERM save first (in virtual time and on devices: at the next
evaluation; a second signal ends the program at once).

The workdir gets `config.json`, `provenance.json`, `trace` (without a server a
folder, with a file for each node), `metrics.jsonl`, `tensorboard/`,
`checkpoints/`, `launcher.lock`, `report.html` with its pictures in `report/`,
and at the end `result.json`; a real run also `logs/`, `token`, `nodes/`, more
locks, and while it runs `server.json`. The clock counts the updates of the
server, or the steps of all nodes. `jasgd.load_params(workdir)` gives the
weights, or the mean of the nodes' weights. `python -m launch.replay
--workdir=W` checks that a replay of a real run gives the same weights.
"""

import signal
import sys
import threading

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from jasgd import reports
from jasgd import runtime
from jasgd import workdir as workdirs
from launch import entry

_ROLES = ('server', 'learner', 'node', 'centre', 'watch')
# Flags that only some roles have.
_NODE_FLAGS = ('node', 'peers', 'listen')

_CONFIG = config_flags.DEFINE_config_file('config', None, 'The training run.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; it is made if it does not exist.'
)
_ROLE = flags.DEFINE_enum(
  'role', None, _ROLES, 'Role of this process in a cluster.'
)
_SERVER = flags.DEFINE_string(
  'server',
  '',
  'HOST:PORT of the server, for a learner that cannot see the workdir. The '
  "token, in the server's file W/token, goes into the variable JASGD_TOKEN.",
)
_NODE = flags.DEFINE_integer(
  'node', None, 'Number of a node; by default the lowest that is free in W.'
)
_PEERS = flags.DEFINE_list(
  'peers',
  [],
  'HOST:PORT of any node, for a node or a watch that cannot see the workdir of '
  'the others. They share a token in the variable JASGD_TOKEN. In an '
  'all-reduce: the address where all nodes meet.',
)
_LISTEN = flags.DEFINE_string(
  'listen',
  '',
  'HOST or HOST:PORT of this machine, at which others find a node or the '
  'centre; by default config.server.host and any port.',
)


def main() -> None:
  """Validates the config, trains, and writes a report."""
  config, workdir = _CONFIG.value, _WORKDIR.value or ''
  entry.check_config(config)
  _check_role(config)
  if _ROLE.value == 'learner':
    _learn(config)
    return
  print(config.describe(), flush=True)
  try:
    result = _run(config, workdir)
  except (FileNotFoundError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  except experiment.RunError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:  # A second Ctrl-C, in virtual time.
    clocks = workdirs.list_checkpoints(workdir)
    start = f'from clock {clocks[-1]}' if clocks else 'from the start'
    print(f'\nStopped. The same command goes on {start}.')
    sys.exit(130)
  if isinstance(result, experiment.Result):
    _print_result(result)
    _report(workdir)
    if result.is_interrupted or result.is_failed:
      print(f'The same command goes on from clock {result.clock}.')
    if result.is_failed:
      sys.exit(1)


def _check_role(config: experiment.TrainingConfig) -> None:
  """Raises a usage error if the flags do not fit together."""
  mode, role = config.runtime.mode, _ROLE.value
  roles = experiment.list_roles(config)
  is_good = role in roles if mode == 'cluster' else role is None
  if not is_good:
    raise app.UsageError(
      'Only processes of a cluster have roles: give --role='
      f'{" or --role=".join(roles)} with config.runtime.mode=cluster and this '
      f'config, got --role={role} with {mode!r}.'
    )
  given = [name for name in _NODE_FLAGS if flags.FLAGS[name].present]
  if given and (not config.strategy.is_peer or role is None):
    raise app.UsageError(
      f'--{given[0]} is for --role=node, centre or watch, got --role={role}.'
    )
  if not _WORKDIR.value and not (role == 'learner' and _SERVER.value):
    raise app.UsageError(
      '--workdir must be given; a learner may give --server instead.'
    )


def _run(
  config: experiment.TrainingConfig, workdir: str
) -> experiment.Result | str | None:
  """Trains in the place that the config names."""
  if _ROLE.value:
    return experiment.run_role(
      config,
      workdir,
      _ROLE.value,
      node=_NODE.value,
      peers=tuple(_PEERS.value),
      listen=_LISTEN.value,
    )
  if not config.runtime.is_real:
    entry.take_signals()
  return experiment.train_and_evaluate(config, workdir)


def _learn(config: experiment.TrainingConfig) -> None:
  """Learns for a server elsewhere, until the run ends or a signal comes."""
  # The environment of a learner that a launcher starts: bits depend on it.
  num_threads = str(config.processes.num_threads)
  entry.adopt({'NPROC': num_threads, **runtime.CHILD_VARIABLES})
  runtime.compute_in_place()
  stopped = threading.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stopped.set())
  workdir = None if _SERVER.value else _WORKDIR.value
  try:
    print(
      experiment.run_role(
        config, workdir, 'learner', server=_SERVER.value, stopped=stopped
      )
    )
  except (runtime.WireError, runtime.RefusedError) as error:
    print(error, file=sys.stderr)
    sys.exit(1)
  except (FileNotFoundError, ValueError) as error:
    raise app.UsageError(str(error)) from None


def _print_result(result: experiment.Result) -> None:
  """Prints the outcome of the run."""
  for name, value in {'clock': result.clock, **result.metrics}.items():
    is_number = isinstance(value, float)
    print(f'{name:24} {f"{value:.6g}" if is_number else value}')
  print(result.end_reason)
  if result.lost:
    print(f'Lost on the way: {", ".join(result.lost)}.')
  advice = _advise(result.metrics) if result.is_diverged else ''
  if advice:
    print(advice)


def _advise(metrics: dict[str, float]) -> str:
  """Advice for a run that diverged; '' if its end reason contains some."""
  if 'train/rate' in metrics:
    rate = metrics['train/rate']
    return f'The loss diverged: a rate of {rate:g} is too large.'
  if 'server/rate' not in metrics:
    return ''
  return (
    'The loss diverged: at a mean staleness of '
    f'{metrics["server/staleness_mean"]:.1f} a rate of '
    f'{metrics["server/rate"]:g} is too large. A rule of thumb: divide the '
    'rate by the staleness, or set optimizer.policy=inverse.'
  )


def _report(workdir: str) -> None:
  """Writes the report, if the trace is in this folder."""
  if _ROLE.value == 'watch' and not workdirs.Workdir(workdir).trace.exists():
    print(
      'The traces are in the folders of the nodes: copy them together, and see '
      'launch.report.'
    )
    return
  print(f'Wrote {reports.write_report([workdir])}')


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main, has_begun=False)
