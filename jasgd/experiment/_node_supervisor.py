"""Watches over the processes of nodes: shows them, evaluates, ends them."""

from collections.abc import Callable, Mapping
import logging
import sys
import threading
import time
from typing import Any, TextIO

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_losses
from jasgd.experiment import _node_metrics
from jasgd.experiment import _node_watch
from jasgd.experiment import _signals
from jasgd.experiment import _supervisor

_log = logging.getLogger(__name__)

# Between two looks, in seconds.
_INTERVAL = 0.2
# How long processes may take to end once they were asked to, in seconds.
_END_TIMEOUT = 30.0
# How often a centre is started again that nobody could reach since.
_MAX_RESTARTS = 3
_HOW_TO_GO_ON = (
  'Once that is mended, the same command goes on from the last checkpoints, or '
  'from the start if there are none.'
)


class NodeSupervisor:
  """Starts nodes, and a centre if there is one, and watches to the end.

  Args:
    watch: To look at them.
    starts: Functions that start each of them, by number.
    folder: Of the run.
    writer: Where metrics go.
    num_steps: Of all nodes together.
    eval_every: Steps of all nodes between evaluations.
    steps_per_epoch: Of all nodes.
    get_rate: The rate at some epochs.
    deadlines: A node that says nothing for `silence`, or never comes within
      `first_step`, counts as lost until it answers.
    is_group: Whether nobody can go on without the others.
    is_owner: Whether the processes are to end with this one.
    stream: Where the progress goes; standard error if None.
  """

  def __init__(
    self,
    watch: _node_watch.NodeWatch,
    starts: Mapping[int, Callable[[], _supervisor.Member]],
    folder: workdirs.Workdir,
    writer: workdirs.MetricsWriter,
    *,
    num_steps: int,
    eval_every: int,
    steps_per_epoch: float,
    get_rate: Callable[[float], float],
    deadlines: runtime.Deadlines,
    is_group: bool = False,
    is_owner: bool = True,
    stream: TextIO | None = None,
  ) -> None:
    self._watch = watch
    self._starts = starts
    self._folder = folder
    self._writer = writer
    self._num_steps = num_steps
    self._eval_every = eval_every
    self._steps_per_epoch = steps_per_epoch
    self._get_rate = get_rate
    self._stream = stream
    self._members: dict[int, _supervisor.Member] = {}
    self._status: dict[int, dict[str, Any]] = {}
    self._lost: set[int] = set()
    # (member, dead node) that the member was told of.
    self._reported: set[tuple[int, int]] = set()
    # Of those who are silent: since when, as far as anybody asked them.
    self._silent_since: dict[int, float] = {}
    self._deadlines = deadlines
    self._is_group = is_group
    self._is_owner = is_owner
    self._num_restarts = 0
    self._meter = _node_metrics.NodeMeter(folder)
    self._last_metrics: dict[str, float] = {}
    self._evaluated_at = -1
    self._unwritten_at: int | None = None
    self._mean: Any = None
    self._stop_signal = threading.Event()

  def run(self) -> dict[str, Any]:
    """Runs until all nodes have made their steps, or Ctrl-C or SIGTERM.

    Returns:
      How it ended: `clock`, `mean`, `metrics`, `unwritten_at` (the clock of
      these, if they are yet to be written down), `lost`, `is_interrupted`,
      `is_diverged`.

    Raises:
      RunError: if the run cannot go on.
    """
    with _signals.take_signals(self._stop_signal):
      try:
        self._members = {
          member: start() for member, start in self._starts.items()
        }
        if self._is_owner:
          print(
            f'{len(self._members)} processes start, and compile first; what '
            f'they say is in {str(self._folder.logs)!r}.',
            file=self._stream or sys.stderr,
            flush=True,
          )
        while not self._have_begun() and not self._stop_signal.is_set():
          self._stop_signal.wait(_INTERVAL)
        with workdirs.Progress(
          self._num_steps,
          start=min(self._clock, self._num_steps),
          stream=self._stream,
          unit='steps',
        ) as line:
          self._look_on(line)
          self._evaluate(is_last=True)
          self._show(line)
        if self._is_owner or not self._stop_signal.is_set():
          self._stop_all()
      finally:
        self._end_all()
    self._note_bad_ends()
    return {
      'clock': self._clock,
      'mean': self._mean,
      'metrics': self._last_metrics,
      'unwritten_at': self._unwritten_at,
      'lost': sorted(self._lost),
      'is_interrupted': self._stop_signal.is_set(),
      'is_diverged': self._is_diverged,
    }

  @property
  def _nodes(self) -> list[int]:
    return [member for member in self._members if member >= 0]

  @property
  def _alive(self) -> list[int]:
    return [member for member in self._members if member not in self._lost]

  @property
  def _clock(self) -> int:
    """Steps of all nodes; those of one that is lost count as well."""
    return sum(
      status['step'] for node, status in self._status.items() if node >= 0
    )

  @property
  def _is_diverged(self) -> bool:
    return any(status['is_diverged'] for status in self._status.values())

  # --- Watching.

  def _have_begun(self) -> bool:
    """Whether there are steps: the first nodes may not wait for all others."""
    self._look()
    return any(
      status['has_begun'] for node, status in self._status.items() if node >= 0
    )

  @property
  def _are_done(self) -> bool:
    """Whether all nodes have made their steps, but for those who are lost."""
    statuses = [self._status.get(node) for node in self._alive if node >= 0]
    return all(status and status['is_done'] for status in statuses)

  def _look_on(self, line: workdirs.Progress) -> None:
    """Looks at the nodes until all are done."""
    while not self._stop_signal.wait(_INTERVAL):
      self._look()
      if self._is_diverged or self._are_done:
        return
      if self._clock // self._eval_every > max(
        0, self._evaluated_at // self._eval_every
      ):
        self._evaluate()
      self._show(line)

  def _look(self) -> None:
    """Takes in how everybody stands."""
    self._watch.look_around()
    if not self._status and not self._is_owner:
      self._silent_since.clear()  # Others may take their time to start them.
    for member, process in list(self._members.items()):
      asked_at = time.monotonic()
      status = self._watch.ask(member) if process.code is None else None
      if status is not None:
        self._hear(member, status)
      elif member in self._lost:
        continue
      elif process.code is not None:
        self._lose(member, process)
      else:
        self._mind_silence(member, process, asked_at)
    if not [node for node in self._alive if node >= 0]:
      said = self._members[self._nodes[-1]].read_log() or 'nothing.'
      raise _supervisor.RunError(
        f'All nodes are gone. The last one said:\n{said}\n{_HOW_TO_GO_ON}'
      )

  def _hear(self, member: int, status: dict[str, Any]) -> None:
    """Takes in how somebody stands who answers."""
    self._status[member] = status
    self._silent_since.pop(member, None)
    if not status['has_begun'] and self._is_owner and not self._is_group:
      self._report_deaths(member)
    if member == traces.CENTRE:
      self._num_restarts = 0
    if member in self._lost:
      self._lost.discard(member)
      _log.warning('%s is back.', self._members[member].name)

  def _report_deaths(self, member: int) -> None:
    """Tells a member that waits for all nodes which of them are dead."""
    for dead in self._lost:
      is_news = dead >= 0 and (member, dead) not in self._reported
      if is_news and self._watch.report_death(member, dead):
        self._reported.add((member, dead))

  def _mind_silence(
    self, member: int, process: _supervisor.Member, asked_at: float
  ) -> None:
    """Gives somebody up who has not answered for too long.

    That counts from the first question without an answer: while nodes are
    evaluated, nobody asks them.
    """
    deadlines = self._deadlines
    is_known = member in self._status
    patience = deadlines.silence if is_known else deadlines.first_step
    since = self._silent_since.setdefault(member, asked_at)
    if time.monotonic() - since <= patience:
      return
    reason = f'{process.name} has said nothing for {patience:g} s'
    if self._is_group and self._is_owner:
      self._end_group(reason)
    if self._is_group:
      self._leave_group(patience)
    if member == traces.CENTRE and self._is_owner:
      self._restart_centre(process, reason)
      return
    self._lost.add(member)
    _log.warning('%s.', reason)

  def _lose(self, member: int, process: _supervisor.Member) -> None:
    """A node that died is left behind; a centre is started again."""
    if self._is_group:
      first = _node_losses.find_first_lost(self._members.values())
      # If it has ended in good order, so do the others.
      patience = 0.0 if first.code else _END_TIMEOUT
      self._end_group(_node_losses.describe_loss(first), patience)
    if member >= 0:
      self._lost.add(member)
      _log.warning('%s.', _node_losses.describe_loss(process))
      return
    code = process.code
    self._restart_centre(process, f'The centre was lost (exit code {code})')

  def _restart_centre(self, process: _supervisor.Member, reason: str) -> None:
    """Starts a centre again that is dead, or silent.

    Raises:
      RunError: if that is no use.
    """
    self._num_restarts += 1
    # What ended by itself would do so again; what was killed would not.
    has_ended = process.code is not None and process.code >= 0
    if self._num_restarts > _MAX_RESTARTS or has_ended:
      raise _supervisor.RunError(
        f'{reason}. The last that it said:\n'
        f'{process.read_log() or "nothing."}\n{_HOW_TO_GO_ON}'
      )
    _log.warning('%s: it is started again.', reason)
    process.end(0.0)  # If it has, what it was given is closed.
    self._members[traces.CENTRE] = self._starts[traces.CENTRE]()
    for known in (self._status, self._silent_since):  # Of the one before.
      known.pop(traces.CENTRE, None)

  def _end_group(self, reason: str, patience: float = 0.0) -> None:
    """Ends an all-reduce, which cannot go on: a RunError."""
    _node_losses.end_group(
      self._members,
      self._folder,
      reason,
      step=self._clock // len(self._nodes),
      patience=patience,
    )

  def _leave_group(self, patience: float) -> None:
    """Gives up on an all-reduce of others' processes: a RunError."""
    now = time.monotonic()
    _node_losses.leave_group(
      {member: process.name for member, process in self._members.items()},
      self._status,
      {member: now - since for member, since in self._silent_since.items()},
      patience,
    )

  def _evaluate(self, *, is_last: bool = False) -> None:
    """Evaluates the mean, and writes the metrics down, but for the last."""
    # Before that takes its time.
    measured = {}
    if self._clock:
      measured = self._meter.measure(self._status, self._lost)
    found = self._watch.evaluate(self._alive)
    if found is None:
      return
    # As many as are in the weights; those of one that is lost count as well.
    clock = sum(
      found.steps.get(node, status['step'])
      for node, status in self._status.items()
      if node >= 0
    )
    if clock <= self._evaluated_at:
      return
    self._mean, self._evaluated_at = found.mean, clock
    epoch = clock / self._steps_per_epoch
    self._last_metrics = {
      'epoch': epoch,
      'train/rate': self._get_rate(epoch),
      **measured,
      **found.metrics,
    }
    if is_last:  # More may be known of it when all have ended.
      self._unwritten_at = clock
      return
    self._writer.write(clock, self._last_metrics)
    self._writer.flush()

  def _show(self, line: workdirs.Progress) -> None:
    names = {
      'age': 'gossip/age_mean',
      'max_age': 'gossip/age_max',
      'loss': 'train/loss',
      'acc': 'test/accuracy',
    }
    shown = {
      name: self._last_metrics[metric]
      for name, metric in names.items()
      if metric in self._last_metrics
    }
    num_alive = sum(
      member >= 0 and member in self._status for member in self._alive
    )
    line.update(min(self._clock, self._num_steps), **shown, nodes=num_alive)

  def _stop_all(self) -> None:
    """Asks everybody to end: the centre last.

    A node may have moved towards the centre, and not yet sent what that is to
    move by. Processes of ours are known to have ended: see `_end_all`.
    """
    nodes = [member for member in self._alive if member >= 0]
    for node in nodes:
      self._watch.stop(node)
    if self._is_owner or traces.CENTRE not in self._alive:
      return
    deadline = time.monotonic() + _END_TIMEOUT
    while (
      any(self._watch.ask(node) is not None for node in nodes)
      and time.monotonic() < deadline
    ):
      time.sleep(_INTERVAL)
    self._watch.stop(traces.CENTRE)

  def _end_all(self) -> None:
    """Ends every process that was started, the centre last."""
    self._watch.close()
    deadline = time.monotonic() + _END_TIMEOUT
    for node in self._nodes:
      self._members[node].end(max(1.0, deadline - time.monotonic()))
    if traces.CENTRE in self._members:  # However long the nodes have taken.
      self._members[traces.CENTRE].end(_END_TIMEOUT)

  def _note_bad_ends(self) -> None:
    """Counts those as lost who have not ended well: what they saved is old."""
    if self._is_group and self._are_done:
      return  # They save before they say so, and part as jax lets them.
    for member, process in self._members.items():
      if process.code and member not in self._lost:
        self._lost.add(member)
        _log.warning('%s.', _node_losses.describe_loss(process))
