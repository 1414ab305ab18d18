"""Those who only look: status, weights to evaluate, and what came of it."""

import json
import math
from typing import Any

from jasgd.runtime import _core
from jasgd.runtime import _messages
from jasgd.runtime import _snapshots
from jasgd.runtime import _wire

_Verb = _messages.Verb
_MAX_NAME = 200  # Characters, of a metric.


class Visitors:
  """Serves those who do not learn. They have the weights that they pulled."""

  def __init__(self, core: _core.Core) -> None:
    self._core = core
    self._pulled: dict[_wire.Channel, _snapshots.Snapshot | None] = {}

  def __len__(self) -> int:
    """How many there are."""
    return len(self._pulled)

  def say(self, channel: _wire.Channel, status: dict[str, Any]) -> None:
    """How the run stands."""
    self._pulled.setdefault(channel, None)
    text = json.dumps(status)
    if len(text) > _messages.MAX_TEXT:  # There are very many learners.
      text = json.dumps({**status, 'learners': {}})
    channel.send(_messages.Message(_Verb.ANSWER, text=text))

  def pull(self, channel: _wire.Channel, message: _messages.Message) -> None:
    """The newest weights, or those to be evaluated next."""
    core = self._core
    self.forget(channel)
    snapshot = None
    if message.flags & _messages.Flag.AT_CLOCK:
      snapshot = core.take_evaluation()
    if snapshot is None:
      snapshot = core.store.lease(core.newest)
    self._pulled[channel] = snapshot
    channel.send(
      _messages.Message(
        _Verb.SNAPSHOT,
        incarnation=snapshot.incarnation,
        clock=snapshot.clock,
        rate=snapshot.rate,
      ),
      snapshot.buffer,
    )

  def report(self, channel: _wire.Channel, message: _messages.Message) -> None:
    """Metrics of an evaluation, to be written beside ours.

    Raises:
      MessageError: if they are none, or of no clock that was.
    """
    clock = self._core.weights.clock
    if not 0 <= message.clock <= clock:
      raise _messages.MessageError(
        'clock', f'The clock is {clock}, got {message.clock}.'
      )
    metrics = _read_metrics(message.text)
    self._core.recorder.write_metrics(message.clock, metrics)
    channel.send(_messages.Message(_Verb.ANSWER))

  def forget(self, channel: _wire.Channel) -> None:
    """Somebody does not look any more."""
    snapshot = self._pulled.pop(channel, None)
    if snapshot is not None:
      self._core.store.end_lease(snapshot)


def _read_metrics(text: str) -> dict[str, float]:
  """Numbers by name."""
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
