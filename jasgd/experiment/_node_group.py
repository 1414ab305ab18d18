"""All-reduce in several processes: where they meet, and where they go on."""

import socket
from typing import Any

import numpy as np

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_training


def make_jobs(
  config: _node_training.NodeTrainingConfig,
  folder: workdirs.Workdir,
  job: dict[str, Any],
) -> dict[int, dict[str, Any]]:
  """What each process is told, beside what all are.

  Args:
    config: Of the run.
    folder: Of the run.
    job: What all are told.

  Returns:
    The arguments of `run_group_node`, by node.
  """
  num_nodes = config.strategy.num_nodes
  task = config.make_task()
  per_epoch = task.num_samples / (task.batch * num_nodes)
  clocks = find_common_checkpoints(folder, num_nodes)
  shared = {
    **job,
    'coordinator': f'127.0.0.1:{_find_port()}',
    'first_number': _find_number(folder),
    'save_every': max(1, round(per_epoch)),
  }
  return {
    node: {**shared, 'resume_at': clocks.get(node)} for node in range(num_nodes)
  }


def find_common_checkpoints(
  folder: workdirs.Workdir, num_nodes: int
) -> dict[int, int]:
  """The last checkpoints of all nodes that are of the same step.

  Args:
    folder: Of the run.
    num_nodes: How many nodes there are.

  Returns:
    Their clocks, by node; {} if there are none.
  """
  found: list[dict[int, int]] = []
  for node in range(num_nodes):
    own = runtime.find_folder(folder, node)
    steps = {}
    for clock in workdirs.list_checkpoints(own):
      position = workdirs.read_position(own, clock)
      assert position is not None  # It is in the list.
      steps[position['step']] = clock
    found.append(steps)
  common = set(found[0]).intersection(*found[1:])
  if not common:
    return {}
  return {node: steps[max(common)] for node, steps in enumerate(found)}


def _find_number(folder: workdirs.Workdir) -> int:
  """The number of the next all-reduce: none is used twice."""
  if not (folder.trace / 'node-0').exists():
    return 0
  mixes = traces.NodeTrace.load(folder.trace, allow_truncated=True).mixes
  numbers = mixes['peer_version'][mixes['peer'] == traces.ALL]
  return int(np.max(numbers, initial=-1)) + 1


def _find_port() -> int:
  """A port that is free now."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]
