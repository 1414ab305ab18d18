"""Watches over the processes of a run: shows it, evaluates, restarts, ends."""

from collections.abc import Callable
import logging
import threading
import time
from typing import Any, Protocol, TextIO

from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment import _observer
from jasgd.experiment import _signals

_log = logging.getLogger(__name__)

# Between two looks, in seconds.
_INTERVAL = 0.2
# How long processes may take to end once they were asked to, in seconds.
_END_TIMEOUT = 30.0
OnMetrics = Callable[[int, dict[str, Any]], None]


class Member(Protocol):
  """A process, or a thread: what a supervisor starts and ends."""

  name: str

  @property
  def code(self) -> int | None:
    """Its exit code; None while it runs."""

  def end(self, timeout: float) -> int:
    """Makes sure that it ends."""

  def read_log(self) -> str:
    """What it said last."""


class RunError(RuntimeError):
  """A run that cannot go on; the text says why, and what to do."""


class Supervisor:
  """Starts a server and learners, and watches until the run is over.

  Args:
    observer: To look at the server.
    start_server: Starts one; called again if it dies.
    start_learners: One function for each learner.
    num_updates: About how many there will be.
    stream: Where the progress goes; standard error if None.
    on_metrics: Called with the clock and the metrics of each evaluation.
    max_restarts: How often a server is started again that has made no update
      since.
  """

  def __init__(
    self,
    observer: _observer.Observer,
    start_server: Callable[[], Member],
    start_learners: list[Callable[[], Member]],
    *,
    num_updates: int,
    stream: TextIO | None = None,
    on_metrics: OnMetrics | None = None,
    max_restarts: int = 3,
  ) -> None:
    self._max_restarts = max_restarts
    self._observer = observer
    self._start_server = start_server
    self._start_learners = start_learners
    self._num_updates = num_updates
    self._stream = stream
    self._on_metrics = on_metrics
    self._server: Member
    self._learners: list[Member] = []
    self._reported: set[str] = set()
    self._told: set[str] = set()  # Of their deaths the server was told.
    self._test: dict[str, float] = {}
    self._status: dict[str, Any] = {}
    self._num_alive = 0
    self._num_restarts = 0
    self._restart_clock = -1
    self._stop_signal = threading.Event()

  def run(self) -> dict[str, Any]:
    """Runs until the end of the run, or until Ctrl-C or SIGTERM.

    Returns:
      The last status, with the last evaluation as `test`.

    Raises:
      RunError: if the run cannot go on.
    """
    with _signals.take_signals(self._stop_signal):
      try:
        self._server = self._start_server()
        self._learners = [start() for start in self._start_learners]
        self._wait_for_update()
        # The rate is that since now: a run that goes on has updates already.
        clock = min(self._status.get('clock', 0), self._num_updates)
        with workdirs.Progress(
          self._num_updates, start=clock, stream=self._stream
        ) as line:
          self._watch(line)
          if not self._stop_signal.is_set():
            self._evaluate()
          self._show(line)
        self._observer.leave()
      finally:
        self._end_all()
      self._report_lost()  # Whose loss ended it; no look has seen that.
    return {**self._status, 'test': self._test}

  # --- Watching.

  def _wait_for_update(self) -> None:
    """Looks at the run until its learners have compiled, or it is over."""
    while not self._status.get('clock'):
      if self._look() or self._stop_signal.wait(_INTERVAL):
        return

  def _watch(self, line: workdirs.Progress) -> None:
    """Looks at the run until it is over."""
    has_asked = False
    while not self._status.get('end_reason'):
      if self._stop_signal.is_set() and not has_asked:
        has_asked = self._ask_to_stop()
      if self._look():
        break
      if self._status.get('evaluation_clock', -1) >= 0:
        self._evaluate()
      self._show(line)
      time.sleep(_INTERVAL)

  def _look(self) -> bool:
    """Takes the status in; whether the run is over."""
    self._report_lost()
    # Before the status: a run may begin and end between two looks.
    are_gone = bool(self._learners) and all(
      learner.code is not None for learner in self._learners
    )
    if self._server.code is not None:
      self._restart_server()
    try:
      self._status = self._observer.get_status()
    except runtime.WireError:  # It starts, or dies: its exit code will tell.
      return False
    is_over = self._status['end_reason'] is not None
    if not is_over:
      self._report_deaths()
    if are_gone and not is_over and not self._status['num_alive']:
      raise RunError(
        'All learners are gone. The last one said:\n'
        f'{self._learners[-1].read_log()}\n'
        'Once that is mended, the same command goes on from the last '
        'checkpoint, or from the start if there is none.'
      )
    return is_over

  def _report_lost(self) -> None:
    """Says which learners have died."""
    for learner in self._learners:
      if learner.code and learner.name not in self._reported:
        self._reported.add(learner.name)
        _log.warning(
          '%s was lost (exit code %d). %s',
          learner.name,
          learner.code,
          learner.read_log(),
        )

  def _report_deaths(self) -> None:
    """Tells the server which learners are dead: it may be waiting for them."""
    for learner in self._learners:
      pid = getattr(learner, 'pid', None)  # Threads have none.
      if learner.code is None or pid is None or learner.name in self._told:
        continue
      try:
        self._observer.report_death(pid=pid)
      except runtime.WireError:
        return  # It has died: the next one will be told.
      self._told.add(learner.name)

  def _restart_server(self) -> None:
    """Starts a server that has died again."""
    code = self._server.code
    clock = self._status.get('clock', 0)
    if clock > self._restart_clock:
      self._num_restarts, self._restart_clock = 0, clock
    self._num_restarts += 1
    # What ended by itself would do so again; what was killed would not.
    if self._num_restarts > self._max_restarts or (code or 0) >= 0:
      raise RunError(
        f'The server ended with exit code {code}, and said:\n'
        f'{self._server.read_log()}'
      )
    _log.warning(
      'The server was lost at clock %d (exit code %d): it is started again.',
      clock,
      code,
    )
    self._observer.close()
    self._told.clear()
    self._server.end(0.0)  # It has; what it was given is closed.
    self._server = self._start_server()

  def _ask_to_stop(self) -> bool:
    try:
      self._observer.stop('It was interrupted.')
    except runtime.WireError:
      return False
    return True

  def _evaluate(self) -> None:
    """Evaluates the weights that are to be evaluated."""
    try:
      clock, test = self._observer.evaluate()
    except runtime.WireError:
      return  # The server has died; there will be other weights.
    if test:
      self._test = test
    if self._on_metrics is not None:
      self._on_metrics(clock, {**self._status['metrics'], **test})

  def _show(self, line: workdirs.Progress) -> None:
    """The progress line."""
    metrics = self._status.get('metrics')
    if not metrics:
      return
    values = {'loss': metrics['train/loss']}
    if 'test/accuracy' in self._test:
      values['acc'] = self._test['test/accuracy']
    if self._status['end_reason'] is None:  # Then they leave, as they should.
      self._num_alive = self._status['num_alive']
    elif not self._num_alive:  # It was over before anybody looked.
      self._num_alive = len(self._status['learners'])
    line.update(
      self._status['clock'],
      staleness=metrics['server/staleness_mean'],
      max_staleness=metrics['server/staleness_max'],
      **values,
      learners=self._num_alive,
    )

  def _end_all(self) -> None:
    """Ends every process that was started, the server last."""
    self._observer.close()
    deadline = time.monotonic() + _END_TIMEOUT
    members = list(self._learners)
    if hasattr(self, '_server'):
      members.append(self._server)
    for member in members:
      member.end(max(1.0, deadline - time.monotonic()))
