"""Metrics of a server, and the snapshots that visitors are to evaluate."""

from collections.abc import Callable
import json
import math

from jasgd.runtime import _recorder
from jasgd.runtime import _settings
from jasgd.runtime import _snapshots
from jasgd.runtime.server import _weights
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _wire

_MAX_NAME = 200  # Characters, of a metric.


class Evaluations:
  """Writes metrics every `eval_every` updates, and keeps those weights.

  The server itself never evaluates: a visitor pulls the kept weights, and
  reports what came of them.

  Args:
    settings: Settings of the run.
    weights: Weights of the server.
    store: Snapshots of the server.
    recorder: Recorder of trace and metrics.
    count_learners: Number of learners that are connected.

  Attributes:
    next: Snapshot that is to be evaluated next, with a lease; None: there is
      none, or it was taken.
  """

  def __init__(
    self,
    settings: _settings.ServerSettings,
    weights: _weights.ServerWeights,
    store: _snapshots.SnapshotStore,
    recorder: _recorder.ServerRecorder,
    count_learners: Callable[[], int],
  ) -> None:
    self.next: _snapshots.Snapshot | None = None
    self._every = settings.eval_every
    self._weights = weights
    self._store = store
    self._recorder = recorder
    self._count_learners = count_learners

  @property
  def next_clock(self) -> int:
    """Clock of the weights that are to be evaluated next; -1: none."""
    return -1 if self.next is None else self.next.version

  def write_if_due(self) -> None:
    """Writes a line every `eval_every` updates, after a publication."""
    # A call with several updates may step over the exact clock.
    last = max(self._recorder.last_metrics, 0)
    if self._weights.clock // self._every > last // self._every:
      self.write()

  def write(self) -> None:
    """Writes a line of metrics, and keeps the newest weights."""
    recorder, weights = self._recorder, self._weights
    if recorder.last_metrics == weights.clock:
      return
    summary = recorder.summarize()
    if summary:
      rate = weights.rate
      recorder.write_metrics(
        weights.clock,
        {
          'epoch': weights.epoch,
          'time': recorder.get_time(),
          **summary,
          'server/rate': 1.0 if rate is None else rate,
          'server/learners': self._count_learners(),
          'server/dropped': recorder.count_dropped(),
        },
      )
    recorder.begin_metrics(weights.clock)
    if self.next is not None:
      self._store.end_lease(self.next)
    self.next = self._store.lease_newest()

  def take(self, message: _messages.Message) -> _snapshots.Snapshot | None:
    """The next snapshot, with its lease, if a PULL asks for it."""
    if not message.flags & _messages.Flag.AT_CLOCK:
      return None
    snapshot, self.next = self.next, None
    return snapshot

  def report(self, channel: _wire.Channel, message: _messages.Message) -> None:
    """Handles a REPORT: writes the metrics of an evaluation."""
    clock = self._weights.clock
    if not 0 <= message.version <= clock:
      raise _messages.MessageError(
        'clock', f'The clock is {clock}, got {message.version}.'
      )
    metrics = _read_metrics(message.text)
    self._recorder.write_metrics(message.version, metrics)
    channel.send(_messages.Message(_messages.Verb.ANSWER))


def _read_metrics(text: str) -> dict[str, float]:
  """Reads the metrics of a REPORT: finite numbers by name."""
  metrics: dict[str, float] = {}
  try:
    for name, value in json.loads(text).items():
      metrics[name] = float(value)
      if not (
        math.isfinite(metrics[name])
        and name.isprintable()
        and name != 'clock'
        and 0 < len(name) <= _MAX_NAME
      ):
        raise ValueError(name)
  except (
    AttributeError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
  ):
    raise _messages.MessageError(
      'report',
      "A REPORT must be a JSON object of finite numbers, none called 'clock'.",
    ) from None
  return metrics
