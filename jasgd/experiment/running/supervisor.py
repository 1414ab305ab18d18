"""Starts, watches, restarts and ends the processes of a run."""

from collections.abc import Callable, Iterable, Mapping
import contextlib
import logging
import pathlib
import signal
import sys
import threading
import time
import traceback
from typing import NoReturn, Protocol, TextIO

from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment.running import measuring
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import result as results
from jasgd.experiment.running import signals
from jasgd.experiment.running import views

_log = logging.getLogger(__name__)

# Seconds between two checks of the run.
_INTERVAL = 0.2
# Seconds for processes to end after they were asked to.
_END_TIMEOUT = 30.0
# Largest number of restarts of a server or centre without progress.
_MAX_RESTARTS = 3
_HOW_TO_GO_ON = (
  'Once the cause is removed, the same command goes on from the last '
  'checkpoint, or from the start if there is none.'
)


class Process(Protocol):
  """A member of a run: `runtime.Child`, `Thread` or `Remote`."""

  name: str

  @property
  def code(self) -> int | None:
    """The exit code; None while it runs."""

  def end(self, timeout: float) -> int:
    """Ends the member; returns its exit code."""

  def read_log(self) -> str:
    """The last line of the member's log, or the error of a thread."""


Starts = Mapping[int, Callable[[], Process]]


class Supervisor:
  """Starts the members of a run, and watches them until the run is over.

  A worker that dies is lost, and the others go on. A server or a centre that
  was killed is started again. An all-reduce cannot go on without a node: all
  its processes are ended.

  Args:
    view: View of the run.
    starts: Functions that start each member, by number.
    recipe: Recipe of the run.
    folder: Folder of the run.
    is_owner: Whether the members end with this process. Otherwise they are
      processes of other launchers, which are only looked at.
    stream: Stream of the progress line; standard error if None.

  Attributes:
    lost: Numbers of the members that are lost.
    is_interrupted: Whether Ctrl-C or SIGTERM has ended the run.
  """

  def __init__(
    self,
    view: views.View,
    starts: Starts,
    recipe: recipes.Recipe,
    folder: workdirs.Workdir,
    *,
    is_owner: bool = True,
    stream: TextIO | None = None,
  ) -> None:
    self._view = view
    self._starts = starts
    self._owner = recipe.owner
    self._has_server = not recipe.is_peer
    self._is_group = recipe.is_collective
    self._num_updates = recipe.count_updates()
    self._deadlines = recipe.deadlines
    self._folder = folder
    self._is_owner = is_owner
    self._stream = stream
    self._processes: dict[int, Process] = {}
    self.lost: set[int] = set()
    self._warned: set[int] = set()  # Members whose exit code was logged.
    # Time of the first question without an answer, by member.
    self._silent_since: dict[int, float] = {}
    self._num_restarts = 0
    self._restart_clock = -1
    self._stop_signal = threading.Event()

  @property
  def is_interrupted(self) -> bool:
    """Whether Ctrl-C or SIGTERM has ended the run."""
    return self._stop_signal.is_set()

  def list_lost(self) -> list[str]:
    """The names of the lost members."""
    lost = [self._processes[member] for member in sorted(self.lost)]
    # A learner that has ended well was not lost: the run is over.
    return [each.name for each in lost if each.code or not self._has_server]

  def run(self) -> None:
    """Runs until the run is over, or until Ctrl-C or SIGTERM.

    Raises:
      RunError: if the run cannot go on.
    """
    view = self._view
    with signals.take_signals(self._stop_signal):
      try:
        for member, start in self._starts.items():
          self._processes[member] = start()
        if self._is_owner and self._processes:
          print(
            f'{len(self._processes)} processes start and compile; their logs '
            f'are in {str(self._folder.logs)!r}.',
            file=self._stream or sys.stderr,
            flush=True,
          )
        self._wait_for_begin()
        # The rate counts from here: a resumed run has earlier updates.
        with workdirs.Progress(
          self._num_updates,
          start=min(view.clock, self._num_updates),
          stream=self._stream,
          unit=view.unit,
        ) as line:
          self._watch(line)
          view.evaluate(self.lost, is_last=True)
          self._show(line)
        if self._is_owner or not self.is_interrupted:
          view.finish(self.lost, is_owner=self._is_owner)
      finally:
        self._end_all()
      self._note_bad_ends()

  # --- Watching.

  def _wait_for_begin(self) -> None:
    """Looks until workers have compiled, or the run is over or stopped."""
    while True:
      self._look()
      is_over = self._view.has_begun or self._view.is_over(self.lost)
      if is_over or self._stop_signal.wait(_INTERVAL):
        return

  def _watch(self, line: workdirs.Progress) -> None:
    """Looks until the run is over."""
    view = self._view
    while not view.is_over(self.lost):
      if self.is_interrupted and view.interrupt():
        return
      # An interrupted server needs a moment to end. The event is set, so that
      # waiting for it would not wait.
      if self.is_interrupted:
        time.sleep(_INTERVAL)
      elif self._stop_signal.wait(_INTERVAL):
        continue
      self._look()
      if view.is_evaluation_due() and not view.is_over(self.lost):
        view.evaluate(self.lost)
      self._show(line)

  def _look(self) -> None:
    """Updates the state of every member, and reacts to losses."""
    view = self._view
    view.look_around()
    if not view.statuses and not self._is_owner:
      self._silent_since.clear()  # Other launchers may start much later.
    # Server or centre last: if the run ends between two questions, the workers
    # must not seem to have ended before the run.
    for member, process in sorted(
      self._processes.items(), key=lambda item: item[0] == self._owner
    ):
      asked_at = time.monotonic()
      code = process.code
      is_asked = view.is_asked(member)
      if is_asked and code is None and view.ask(member) is not None:
        self._note_answer(member)
      elif member in self.lost:
        continue
      elif code is not None:
        self._lose(member, process)
      elif is_asked and not (self._has_server and member == self._owner):
        self._check_silence(member, process, asked_at)
    if not view.is_over(self.lost):
      view.report_deaths(
        {
          member: getattr(self._processes[member], 'pid', None)
          for member in sorted(self.lost)
          if self._is_owner
        }
      )
      self._check_workers()

  def _note_answer(self, member: int) -> None:
    """Updates the counters of silence and restarts after an answer."""
    self._silent_since.pop(member, None)
    if member == self._owner and self._view.clock > self._restart_clock:
      self._num_restarts = 0
    if member in self.lost:
      self.lost.discard(member)
      _log.warning('%s is back.', self._processes[member].name)

  def _check_workers(self) -> None:
    """Raises a RunError if no worker is left that could go on."""
    workers = [member for member in self._processes if member >= 0]
    if not workers or not self.lost.issuperset(workers):
      return
    if self._has_server and self._view.count_workers(self.lost):
      return  # There are learners from elsewhere.
    said = self._processes[workers[-1]].read_log() or 'nothing.'
    raise results.RunError(
      f'All {self._view.workers} are gone. The last one said:\n{said}\n'
      f'{_HOW_TO_GO_ON}'
    )

  def _check_silence(
    self, member: int, process: Process, asked_at: float
  ) -> None:
    """Handles a member that has not answered for too long.

    The time counts from the first question without an answer: while weights are
    evaluated, no question is asked.
    """
    deadlines = self._deadlines
    is_known = member in self._view.statuses
    patience = deadlines.silence if is_known else deadlines.first_step
    since = self._silent_since.setdefault(member, asked_at)
    if time.monotonic() - since <= patience:
      return
    reason = f'{process.name} has said nothing for {patience:g} s'
    if self._is_group and self._is_owner:
      self._end_group(reason)
    if self._is_group:
      self._leave_group(patience)
    if member == self._owner and self._is_owner:
      self._restart(member, process, reason)
      return
    self.lost.add(member)
    _log.warning('%s.', reason)

  def _lose(self, member: int, process: Process) -> None:
    """Handles the end of a process."""
    if self._is_group:
      first = find_first_lost(self._processes.values())
      # If the first process ended in good order, the others need time for it.
      patience = 0.0 if first.code else _END_TIMEOUT
      self._end_group(describe_loss(first), patience)
    if member != self._owner:
      self._check_thread(process)
      self.lost.add(member)
      self._warn(member)
      return
    if self._view.is_over(self.lost) and not process.code:
      return
    clock = self._view.clock
    reason = f'{process.name} was lost at clock {clock}'
    self._restart(member, process, f'{reason} (exit code {process.code})')

  def _check_thread(self, process: Process) -> None:
    """Ends the run if a learner that is a thread has failed before it began.

    A server is told of a dead learner by its process id, and threads have none:
    it would wait for the learner until the deadline for all workers to arrive.

    Raises:
      RunError: if the learner has failed.
    """
    is_thread = self._has_server and isinstance(process, Thread)
    if is_thread and process.code and not self._view.has_begun:
      self._view.interrupt()  # Otherwise the others would wait for an answer.
      raise results.RunError(
        f'{process.name} failed before the run began. The error:\n'
        f'{process.read_log()}\n{_HOW_TO_GO_ON}'
      )

  def _warn(self, member: int) -> None:
    """Logs the end of a process once; a learner may end well."""
    process = self._processes[member]
    is_ended_well = self._has_server and not process.code
    if member not in self._warned and not is_ended_well:
      self._warned.add(member)
      _log.warning('%s.', describe_loss(process))

  def _restart(self, member: int, process: Process, reason: str) -> None:
    """Starts a server or centre again if it is dead or silent.

    Raises:
      RunError: if it would fail again.
    """
    self._num_restarts += 1
    self._restart_clock = self._view.clock
    # A process that ended by itself would do so again; a killed one would not.
    has_ended = process.code is not None and process.code >= 0
    if self._num_restarts > _MAX_RESTARTS or has_ended:
      raise results.RunError(
        f'{reason}. The end of its log:\n'
        f'{process.read_log() or "(empty)"}\n{_HOW_TO_GO_ON}'
      )
    _log.warning('%s: it is started again.', reason)
    # Before the new process starts: two must not write to one file.
    process.end(0.0)
    self._view.forget(member)
    self._silent_since.pop(member, None)
    self._processes[member] = self._starts[member]()

  def _show(self, line: workdirs.Progress) -> None:
    """Updates the progress line."""
    view = self._view
    line.update(
      min(view.clock, self._num_updates),
      **measuring.choose_shown(view.metrics),
      **{view.workers: view.count_workers(self.lost)},
    )

  # --- Ending.

  def _end_all(self) -> None:
    """Ends every process that was started: server or centre last."""
    self._view.close()
    deadline = time.monotonic() + _END_TIMEOUT
    for member, process in self._processes.items():
      if member != self._owner:
        process.end(max(1.0, deadline - time.monotonic()))
    # The owner gets the full time, however much of it the workers have used.
    if self._owner in self._processes:
      self._processes[self._owner].end(_END_TIMEOUT)

  def _note_bad_ends(self) -> None:
    """Counts members that ended badly as lost: their files are out of date."""
    if self._is_group and self._view.is_over(self.lost):
      return  # All nodes have saved; jax may end them with any exit code.
    for member, process in self._processes.items():
      if process.code:
        self.lost.add(member)
        self._warn(member)

  def _end_group(self, reason: str, patience: float = 0.0) -> NoReturn:
    """Ends the processes of an all-reduce, which cannot go on.

    Args:
      reason: Reason, without a full stop.
      patience: Seconds that the processes get to end in good order.

    Raises:
      RunError: always.
    """
    deadline = time.monotonic() + patience
    for process in self._processes.values():
      process.end(max(0.0, deadline - time.monotonic()))
    common = set.intersection(
      *(list_saved_steps(self._folder, node) for node in self._processes)
    )
    start = 'the start'
    if common:
      start = f'step {max(common)}, the last that all of them have saved'
    step = self._view.clock // len(self._processes)
    raise results.RunError(
      f'{reason}, and an all-reduce cannot go on without it: all processes '
      f'were stopped, at step {step} of each. The same command goes on from '
      f'{start}. Gossip (strategy.name=pull) would have gone on without it.'
    )

  def _leave_group(self, patience: float) -> NoReturn:
    """Gives up looking at an all-reduce of other launchers' processes.

    Args:
      patience: Seconds of silence.

    Raises:
      RunError: always.
    """
    how = (
      'if they are started again, they go on from the last checkpoint that all '
      'of them have, or from the start.'
    )
    statuses = self._view.statuses.values()
    if any(status.get('is_stopped') for status in statuses):
      raise results.RunError(
        f'The nodes were stopped at step {max(s["step"] for s in statuses)}, '
        f'before they had made all of their steps: {how}'
      )
    now = time.monotonic()
    silent = sorted(
      (since, self._processes[node].name)
      for node, since in self._silent_since.items()
      if now - since > patience / 2  # If one is lost, the others end.
    )
    raise results.RunError(
      f'Nothing was heard for {patience:g} s from '
      f'{", ".join(name for _, name in silent)} (in the order in which they '
      'became silent), and an all-reduce cannot go on without all of its '
      f'nodes. Each node has logged why it ends; {how}'
    )


def find_first_lost(processes: Iterable[Process]) -> Process:
  """The process of a group that ended first, as far as exit codes tell.

  The others end because they miss it.

  Args:
    processes: All processes of the group; at least one has ended.

  Returns:
    The process.
  """

  def rank(process: Process) -> int:
    code = process.code or 0
    if code == runtime.GROUP_LOST:
      return 3
    if code == -signal.SIGABRT:  # jax ends processes that have lost the first.
      return 2
    return 1 if code >= 0 else 0

  return min((each for each in processes if each.code is not None), key=rank)


def describe_loss(process: Process) -> str:
  """How a process ended, in a few words."""
  code = process.code or 0
  if code < 0:  # It had no time to log the reason.
    return f'{process.name} was lost (exit code {code})'
  how = 'was lost' if code else 'was stopped'
  return f'{process.name} {how} (exit code {code}, said {process.read_log()})'


def list_saved_steps(folder: workdirs.Workdir, node: int) -> set[int]:
  """The steps of a node's checkpoints, except those that cannot be read."""
  own = runtime.find_folder(folder, node)
  steps = set()
  for clock in workdirs.list_checkpoints(own):
    with contextlib.suppress(workdirs.WorkdirError):
      position = workdirs.read_position(own, clock)
      if position is not None:
        steps.add(position['step'])
  return steps


class Thread:
  """A member of a run that is a thread of this process.

  Args:
    name: Name of the member.
    function: Work of the thread; its argument is set when it is to end.
  """

  log: pathlib.Path | None = None

  def __init__(
    self, name: str, function: Callable[[threading.Event], object]
  ) -> None:
    self.name = name
    self._function = function
    self._stopped = threading.Event()
    self._error = ''
    self._thread = threading.Thread(target=self._run, name=f'jasgd-{name}')
    self._thread.daemon = True  # It does not delay the end of the program.
    self._thread.start()

  def _run(self) -> None:
    try:
      self._function(self._stopped)
    except (OSError, ValueError) as error:  # Errors that a user can correct.
      self._error = f'{type(error).__name__}: {error}'
    except Exception:
      self._error = traceback.format_exc()

  @property
  def code(self) -> int | None:
    """The exit code that a process would have."""
    return None if self._thread.is_alive() else int(bool(self._error))

  def end(self, timeout: float) -> int:
    """Asks the thread to end, and waits."""
    self._stopped.set()
    self._thread.join(timeout)
    return int(self._thread.is_alive() or bool(self._error))

  def read_log(self) -> str:
    """The error that ended the thread, if any."""
    return self._error


class Remote:
  """A member of a run that another launcher has started.

  Args:
    name: Name of the member.
  """

  code = None

  def __init__(self, name: str) -> None:
    self.name = name

  def end(self, timeout: float) -> int:
    """Does nothing: the member ends by itself, or when the view asks it to."""
    del timeout
    return 0

  def read_log(self) -> str:
    """An empty text: only the other launcher has the log."""
    return ''
