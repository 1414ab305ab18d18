"""Watches over the processes of nodes: shows them, evaluates, ends them."""

from collections.abc import Callable
import logging
import signal
import threading
import time
from typing import Any, TextIO

import numpy as np

from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_train
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
    silence: Seconds after which a node that does not answer counts as lost;
      until it answers again.
    is_group: Whether nobody can go on without the others.
    stream: Where the progress goes; standard error if None.
  """

  def __init__(
    self,
    watch: _node_watch.NodeWatch,
    starts: dict[int, Callable[[], _supervisor.Member]],
    folder: workdirs.Workdir,
    writer: workdirs.MetricsWriter,
    *,
    num_steps: int,
    eval_every: int,
    steps_per_epoch: float,
    get_rate: Callable[[float], float],
    silence: float,
    is_group: bool = False,
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
    self._heard_at: dict[int, float] = {}
    self._silence = silence
    self._is_group = is_group
    self._num_restarts = 0
    self._last_metrics: dict[str, float] = {}
    self._evaluated_at = -1
    self._mean: Any = None
    self._stop_signal = threading.Event()

  def run(self) -> dict[str, Any]:
    """Runs until all nodes have made their steps, or Ctrl-C or SIGTERM.

    Returns:
      How it ended: `clock`, `mean`, `metrics`, `lost`, `is_interrupted`,
      `is_diverged`.

    Raises:
      RunError: if the run cannot go on.
    """
    with _signals.take_signals(self._stop_signal):
      try:
        self._members = {
          member: start() for member, start in self._starts.items()
        }
        while not self._have_begun() and not self._stop_signal.is_set():
          self._stop_signal.wait(_INTERVAL)
        with workdirs.Progress(
          self._num_steps,
          start=min(self._clock, self._num_steps),
          stream=self._stream,
          unit='steps',
        ) as line:
          self._look_on(line)
          self._evaluate()
          self._show(line)
        for member in self._alive:
          self._watch.stop(member)
        return {
          'clock': self._clock,
          'mean': self._mean,
          'metrics': self._last_metrics,
          'lost': sorted(self._lost),
          'is_interrupted': self._stop_signal.is_set(),
          'is_diverged': self._is_diverged,
        }
      finally:
        self._end_all()

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
    self._look()
    statuses = [self._status.get(node) for node in self._alive if node >= 0]
    return all(status and status['has_begun'] for status in statuses)

  def _look_on(self, line: workdirs.Progress) -> None:
    """Looks at the nodes until all are done."""
    while not self._stop_signal.wait(_INTERVAL):
      self._look()
      if self._clock // self._eval_every > max(
        0, self._evaluated_at // self._eval_every
      ):
        self._evaluate()
      self._show(line)
      if self._is_diverged or all(
        self._status[node]['is_done'] for node in self._alive if node >= 0
      ):
        return

  def _look(self) -> None:
    """Takes in how everybody stands."""
    for member, process in list(self._members.items()):
      heard_at = self._heard_at.setdefault(member, time.monotonic())
      status = None
      if process.code is None:
        status = self._watch.ask(member)
      if status is not None:
        self._status[member] = status
        self._heard_at[member] = time.monotonic()
        if member in self._lost:
          self._lost.discard(member)
          _log.warning('%s is back.', process.name)
      elif member in self._lost:
        continue
      elif process.code is not None:
        self._lose(member, process)
      elif (
        member in self._status and time.monotonic() - heard_at > self._silence
      ):
        if self._is_group:
          self._end_group(
            f'{process.name} has said nothing for {self._silence:g} s'
          )
        self._lost.add(member)
        _log.warning(
          '%s has said nothing for %g s.', process.name, self._silence
        )
    if not [node for node in self._alive if node >= 0]:
      raise _supervisor.RunError(
        'All nodes are gone. The last one said:\n'
        f'{self._members[self._nodes[-1]].read_log()}\n'
        'Once that is mended, the same command goes on from the last '
        'checkpoints.'
      )

  def _lose(self, member: int, process: _supervisor.Member) -> None:
    """A node that died is left behind; a centre is started again."""
    if self._is_group:
      dead = [each for each in self._members.values() if each.code is not None]
      # Those who were not killed have ended for want of the one who was.
      first = min(dead, key=lambda each: each.code != -signal.SIGKILL)
      said = (
        '' if first.code == -signal.SIGKILL else f', said {first.read_log()}'
      )
      self._end_group(f'{first.name} was lost (exit code {first.code}{said})')
    if member >= 0:
      self._lost.add(member)
      _log.warning(
        '%s was lost (exit code %s). %s',
        process.name,
        process.code,
        process.read_log(),
      )
      return
    self._num_restarts += 1
    # What ended by itself would do so again; what was killed would not.
    if self._num_restarts > _MAX_RESTARTS or (process.code or 0) >= 0:
      raise _supervisor.RunError(
        f'The centre ended with exit code {process.code}, and said:\n'
        f'{process.read_log()}'
      )
    _log.warning('The centre was lost: it is started again.')
    process.end(0.0)  # It has; what it was given is closed.
    self._members[member] = self._starts[member]()

  def _end_group(self, reason: str) -> None:
    """Ends an all-reduce, which cannot go on.

    Raises:
      RunError: always.
    """
    for process in self._members.values():
      process.end(0.0)  # They wait for somebody who does not come.
    raise _supervisor.RunError(
      f'{reason}, and an all-reduce cannot go on without it: all processes '
      f'were stopped, at step {self._clock // len(self._nodes)} of each. The '
      'same command goes on from the last checkpoint that all of them have. '
      'Gossip (strategy.name=pull) would have gone on without it.'
    )

  def _evaluate(self) -> None:
    """Evaluates the mean, and writes the metrics down."""
    clock = self._clock
    mean, metrics = self._watch.evaluate(self._alive)
    if mean is None or clock <= self._evaluated_at:
      return
    self._mean, self._evaluated_at = mean, clock
    trace = traces.NodeTrace.load(self._folder.trace, allow_truncated=True)
    now = trace.duration
    since = self._last_metrics.get('time', 0.0)
    losses = [
      self._status[node]['loss']
      for node in self._alive
      if node >= 0 and self._status[node]['loss'] is not None
    ]
    epoch = clock / self._steps_per_epoch
    self._last_metrics = {
      'epoch': epoch,
      'time': now,
      'train/rate': self._get_rate(epoch),
      **({'train/loss': float(np.mean(losses))} if losses else {}),
      **_node_train.Mixing(trace).measure(since, now),
      **metrics,
    }
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
    num_alive = sum(member >= 0 for member in self._alive)
    line.update(min(self._clock, self._num_steps), **shown, nodes=num_alive)

  def _end_all(self) -> None:
    """Ends every process that was started, the centre last."""
    self._watch.close()
    deadline = time.monotonic() + _END_TIMEOUT
    for member in sorted(self._members, reverse=True):
      self._members[member].end(max(1.0, deadline - time.monotonic()))
