"""Looks at a server from outside: status, evaluation, and a request to stop."""

import json
import math
from typing import Any

from jasgd import engine
from jasgd import runtime
from jasgd import tasks


class Observer:
  """One who looks, and comes back if the server was away.

  Args:
    task: What is learned.
    layout: Of its weights, as they travel.
    connect: Gives a connection.
    deadline: Seconds within which it answers.
  """

  def __init__(
    self,
    task: tasks.Task,
    layout: engine.Layout,
    connect: Any,
    deadline: float = 60.0,
  ) -> None:
    self._task = task
    self._layout = layout
    self._connect = connect
    self._deadline = deadline
    self._connection: runtime.Connection | None = None

  def ask(self, message: runtime.Message) -> runtime.Message:
    """Sends a request; connects first if need be.

    Raises:
      WireError: if there is no server now.
    """
    if self._connection is None:
      self._connection = self._connect(self._layout.size)
    try:
      return self._connection.request(message, deadline=self._deadline)
    except runtime.WireError:
      self.close()
      raise

  def get_status(self) -> dict[str, Any]:
    """How the run stands: what `Server.describe` says."""
    return json.loads(self.ask(runtime.Message(runtime.Verb.STATUS)).text)

  def evaluate(self) -> tuple[int, dict[str, float]]:
    """Pulls the weights to be evaluated next, evaluates, and reports.

    Returns:
      Their clock, and the metrics on the test data that are finite; {} if
      there is none.
    """
    answer = self.ask(
      runtime.Message(runtime.Verb.PULL, flags=runtime.Flag.AT_CLOCK)
    )
    if self._task.test_data is None:
      return answer.clock, {}
    assert answer.payload is not None
    params, stats = self._layout.unpack(answer.payload)
    metrics = {
      f'test/{name}': float(value)
      for name, value in tasks.evaluate(self._task, params, stats).items()
    }
    # Of a run that diverges there may be none.
    finite = {
      name: value for name, value in metrics.items() if math.isfinite(value)
    }
    self.ask(
      runtime.Message(
        runtime.Verb.REPORT, clock=answer.clock, text=json.dumps(finite)
      )
    )
    return answer.clock, finite

  def stop(self, reason: str) -> None:
    """Asks the server to end the run in good order."""
    self.ask(runtime.Message(runtime.Verb.STOP, text=reason))

  def report_death(self, *, pid: int = 0, node: int = -1) -> None:
    """Tells the server, or a node, that a process is dead.

    Args:
      pid: Process of a learner.
      node: Number of a node.
    """
    text = str(pid) if pid else ''
    self.ask(runtime.Message(runtime.Verb.LOST, learner=node, text=text))

  def leave(self) -> None:
    """Says good-bye, so that the server need not wait."""
    if self._connection is not None:
      try:
        self.ask(runtime.Message(runtime.Verb.LEAVE))
      except runtime.WireError:
        return  # It is gone already.
      self.close()

  def close(self) -> None:
    """Hangs up. Twice is no error."""
    if self._connection is not None:
      self._connection.close()
      self._connection = None
