"""What is said of an all-reduce that cannot go on, as one of it is lost."""

from collections.abc import Iterable, Mapping
import contextlib
import signal
import time
from typing import Any

from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment import _supervisor


def find_first_lost(
  members: Iterable[_supervisor.Member],
) -> _supervisor.Member:
  """Who of a group has died by itself; others end for want of it.

  Args:
    members: All of it, of whom somebody has died.

  Returns:
    The first one, as far as the exit codes tell.
  """
  dead = [each for each in members if each.code is not None]
  return min(dead, key=_rank)


def _rank(member: _supervisor.Member) -> int:
  """How likely it is that somebody died for want of another one."""
  code = member.code or 0
  if code == runtime.GROUP_LOST:
    return 3
  if code == -signal.SIGABRT:  # As jax ends those who have lost the first one.
    return 2
  return 1 if code >= 0 else 0


def describe_loss(member: _supervisor.Member) -> str:
  """How one of a group was lost, in a few words."""
  code = member.code or 0
  if code < 0:  # It had no time to say why.
    return f'{member.name} was lost (exit code {code})'
  how = 'was lost' if code else 'was stopped'
  return f'{member.name} {how} (exit code {code}, said {member.read_log()})'


def end_group(
  members: Mapping[int, _supervisor.Member],
  folder: workdirs.Workdir,
  reason: str,
  *,
  step: int,
  patience: float = 0.0,
) -> None:
  """Ends the processes of an all-reduce.

  Args:
    members: The processes of its nodes.
    folder: Of the run.
    reason: Why it cannot go on.
    step: Where it was.
    patience: Seconds for them to end by themselves.

  Raises:
    RunError: always.
  """
  deadline = time.monotonic() + patience
  for process in members.values():
    process.end(max(0.0, deadline - time.monotonic()))
  common = set.intersection(*(list_saved(folder, node) for node in members))
  start = 'the start'
  if common:
    start = f'step {max(common)}, the last that all of them have saved'
  raise _supervisor.RunError(
    f'{reason}, and an all-reduce cannot go on without it: all processes '
    f'were stopped, at step {step} of each. The same command goes on from '
    f'{start}. '
    'Gossip (strategy.name=pull) would have gone on without it.'
  )


def list_saved(folder: workdirs.Workdir, node: int) -> set[int]:
  """The steps of a node's checkpoints, but for those that cannot be read."""
  own = runtime.find_folder(folder, node)
  steps = set()
  for clock in workdirs.list_checkpoints(own):
    with contextlib.suppress(workdirs.WorkdirError):
      position = workdirs.read_position(own, clock)
      if position is not None:
        steps.add(position['step'])
  return steps


def leave_group(
  names: Mapping[int, str],
  statuses: Mapping[int, Mapping[str, Any]],
  silences: Mapping[int, float],
  patience: float,
) -> None:
  """Gives up on an all-reduce whose processes are not this one's.

  Args:
    names: Of its nodes.
    statuses: What each said last.
    silences: Since when it has said nothing, in seconds.
    patience: How long one of them has.

  Raises:
    RunError: always.
  """
  goes_on = (
    'started again, they go on from the last checkpoint that all of them '
    'have, or from the start.'
  )
  if any(status.get('is_stopped') for status in statuses.values()):
    raise _supervisor.RunError(
      'The nodes were stopped at step '
      f'{max(status["step"] for status in statuses.values())}, before they had '
      f'made all of theirs: {goes_on}'
    )
  silent = sorted(
    (-seconds, names[node])
    for node, seconds in silences.items()
    if seconds > patience / 2  # If one is lost, the others end.
  )
  raise _supervisor.RunError(
    f'Nothing was heard for {patience:g} s from '
    f'{", ".join(name for _, name in silent)} (who was silent first is '
    'first), and an all-reduce cannot go on without all of its nodes. Each '
    f'has said why it ends; {goes_on}'
  )
