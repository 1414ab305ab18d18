"""Trains from a config, and leaves everything in a folder.

  python -m launch.train --config=configs/digits_async.py --workdir=/tmp/a
  python -m launch.train --config=configs/mnist_delay.py --workdir=/tmp/b \
    --config.task.data_dir=DATA --config.protocol.delay=32
  python -m launch.train --config=configs/mnist_delay.py:smoke --workdir=/tmp/c
  python -m launch.train --config=configs/gossip_digits.py --workdir=/tmp/d

config.runtime.mode says where: `simulate`, in virtual time in this process;
`local`, one server and its learners, or nodes without a server, as processes of
this machine; `devices`, nodes on the devices of this process; `cluster`, on
many machines, with one command each. A server and its learners:

  C='--config=configs/digits_async.py --config.runtime.mode=cluster'
  python -m launch.train $C --role=server --workdir=W --config.server.host=H
  python -m launch.train $C --role=learner --workdir=W     where W can be seen
  JASGD_TOKEN=... python -m launch.train $C --role=learner --server=H:PORT

Nodes without a server, each on its own host H; any may be the first. `watch`
evaluates their mean, and ends them when they are done:

  C='--config=configs/gossip_digits.py --config.runtime.mode=cluster'
  python -m launch.train $C --role=node --listen=H --workdir=W       4 times
  python -m launch.train $C --role=centre --listen=H --workdir=W     of :elastic
  python -m launch.train $C --role=watch --workdir=W

Where W cannot be seen by all, each has a folder of its own, a number, and the
address of any other; copied together (rsync -a), the folders are one run:

  export JASGD_TOKEN=...
  python -m launch.train $C --role=node --node=0 --listen=H0:7000 --workdir=W
  python -m launch.train $C --role=node --node=1 --listen=H1 --peers=H0:7000 ...
  python -m launch.train $C --role=watch --peers=H0:7000 --workdir=W

An all-reduce is one group: every node is given --node, and with --peers the
same HOST:PORT, where node 0 waits for the others.

Each field of the config is a flag, --config.FIELD=VALUE; `:smoke` behind a
config's name is the same for a few steps. Killed at any time and started
again, a run goes on from its last checkpoint; Ctrl-C and SIGTERM save first (in
virtual time and on devices: at the next evaluation, and twice they do not).

The workdir gets `config.json`, `provenance.json`, `trace` (of nodes a folder,
with a file for each), `metrics.jsonl`, `tensorboard/`, `checkpoints/`,
`report.html` with its pictures in `report/`, and once it is over `result.json`;
of a real run also `logs/`, `token`, `nodes/`, locks, and while it runs
`server.json`. Of nodes, the clock counts the steps of all. The weights, of
nodes their mean: `jasgd.load_params(workdir)`. Is the run what its trace says?
`python -m launch.replay --workdir=W`.
"""

import signal
import sys
import threading
from typing import Any

from absl import app
from absl import flags
from ml_collections import config_flags

from jasgd import experiment
from jasgd import reports
from jasgd import runtime
from jasgd import workdir as workdirs
from launch import entry

_SERVER_ROLES = ('server', 'learner')
_NODE_ROLES = (*experiment.MEMBER_ROLES, 'watch')

_CONFIG = config_flags.DEFINE_config_file('config', None, 'What to train.')
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Where to write; made if it is not there.'
)
_ROLE = flags.DEFINE_enum(
  'role',
  None,
  [*_SERVER_ROLES, *_NODE_ROLES],
  'In a cluster: what this process is.',
)
_SERVER = flags.DEFINE_string(
  'server',
  '',
  'For a learner that does not see the workdir: HOST:PORT of the server. Its '
  "token, the server's file W/token, goes into the environment's JASGD_TOKEN.",
)
_NODE = flags.DEFINE_integer(
  'node', None, 'Number of a node; without it, the lowest that is free in W.'
)
_PEERS = flags.DEFINE_list(
  'peers',
  [],
  'For a node, or a watch, that does not see the workdir of the others: '
  'HOST:PORT of any of them. They share a token: the environment has it as '
  'JASGD_TOKEN. Of an all-reduce: where all nodes meet.',
)
_LISTEN = flags.DEFINE_string(
  'listen',
  '',
  'Where a node, or the centre, is found by others: HOST or HOST:PORT of this '
  'machine. Without it, config.server.host and any port.',
)


def main() -> None:
  """Validates the config, trains, and writes a report."""
  config, workdir = _CONFIG.value, _WORKDIR.value or ''
  entry.check_config(
    config, experiment.TrainingConfig, experiment.NodeTrainingConfig
  )
  _check_role(config)
  role = _ROLE.value
  if role == 'learner':
    _learn(config)
    return
  print(config.describe(), flush=True)
  try:
    if role in experiment.MEMBER_ROLES:
      _take_part(config, workdir, role)
      return
    result = _run(config, workdir)
  except ValueError as error:
    raise app.UsageError(str(error)) from None
  except experiment.RunError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
  except KeyboardInterrupt:
    clocks = workdirs.list_checkpoints(workdir)
    start = f'from clock {clocks[-1]}' if clocks else 'from the start'
    print(f'\nStopped. The same command goes on {start}.')
    sys.exit(130)
  _print_result(result)
  if role == 'watch' and not workdirs.Workdir(workdir).trace.exists():
    print(
      'The traces are in the folders of the nodes: copy them together, and see '
      'launch.report.'
    )
  else:
    print(f'Wrote {reports.write_report([workdir])}')
  if result.get('is_interrupted'):
    print(f'The same command goes on from clock {result["clock"]}.')
  if result.get('is_failed'):
    sys.exit(1)


def _check_role(config: experiment.RunConfig) -> None:
  """Raises a usage error if the flags do not fit together."""
  mode, role = config.runtime.mode, _ROLE.value
  has_server = isinstance(config, experiment.TrainingConfig)
  roles = _SERVER_ROLES if has_server else _NODE_ROLES
  is_good = role in roles if mode == 'cluster' else role is None
  if not is_good:
    raise app.UsageError(
      'A cluster has roles, and nothing else has: give --role='
      f'{" or --role=".join(roles)} with config.runtime.mode=cluster and this '
      f'config, got --role={role} with {mode!r}.'
    )
  given = [flag.name for flag in (_NODE, _PEERS, _LISTEN) if flag.present]
  if given and role not in _NODE_ROLES:
    raise app.UsageError(
      f'--{given[0]} is for --role={" or ".join(_NODE_ROLES)}, got '
      f'--role={role}.'
    )
  if not _WORKDIR.value and not (_ROLE.value == 'learner' and _SERVER.value):
    raise app.UsageError(
      '--workdir must be given; a learner may give --server instead.'
    )


def _run(
  config: experiment.TrainingConfig | experiment.NodeTrainingConfig,
  workdir: str,
) -> dict[str, Any]:
  """Trains, where the config says."""
  if not config.runtime.is_real:
    entry.take_signals()
  if _ROLE.value == 'server':
    assert isinstance(config, experiment.TrainingConfig)
    return experiment.run_server(config, workdir, num_learners=0)
  if _ROLE.value == 'watch':
    assert isinstance(config, experiment.NodeTrainingConfig)
    return experiment.watch_nodes(config, workdir, peers=tuple(_PEERS.value))
  return experiment.train_and_evaluate(config, workdir)


def _take_part(
  config: experiment.NodeTrainingConfig, workdir: str, role: str
) -> None:
  """Is a node, or the centre, until that ends or a signal comes."""
  experiment.run_member(
    config,
    workdir,
    role,
    node=_NODE.value,
    peers=tuple(_PEERS.value),
    listen=_LISTEN.value,
  )


def _learn(config: experiment.TrainingConfig) -> None:
  """Learns for a server elsewhere, until that ends or a signal comes."""
  # As a learner that the server's launcher starts: bits depend on it.
  num_threads = str(config.processes.num_threads)
  entry.adopt({'NPROC': num_threads, **runtime.CHILD_VARIABLES})
  runtime.compute_in_place()
  stopped = threading.Event()
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: stopped.set())
  try:
    workdir = None if _SERVER.value else _WORKDIR.value
    print(
      experiment.run_learner(config, workdir, _SERVER.value, stopped=stopped)
    )
  except (runtime.WireError, runtime.RefusedError) as error:
    print(error, file=sys.stderr)
    sys.exit(1)
  except ValueError as error:
    raise app.UsageError(str(error)) from None


def _print_result(result: dict[str, Any]) -> None:
  """Prints how the run ended."""
  for name, value in result.items():
    is_number = isinstance(value, float)
    print(f'{name:24} {f"{value:.6g}" if is_number else value}')
  if result.get('lost_nodes'):
    names = ', '.join(map(str, result['lost_nodes']))
    print(
      f'Lost on the way: {names}. Steps that were left to these are not made.'
    )
  if result['is_diverged'] and 'end_reason' not in result:
    clock = result['clock']
    print(f'The loss was not finite before clock {clock}: {_advise(result)}')


def _advise(result: dict[str, Any]) -> str:
  """What to do about a run that diverged."""
  if 'server/rate' not in result:  # Of nodes.
    return f'a rate of {result["train/rate"]:g} is too large.'
  return (
    f'at a staleness of {result["server/staleness_mean"]:.1f} a rate of '
    f'{result["server/rate"]:g} is too large. A rule of thumb: divide the rate '
    'by the staleness, or set optimizer.policy=inverse.'
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  entry.run(main, has_begun=False)
