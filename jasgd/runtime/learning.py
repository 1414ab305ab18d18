"""A learner in a process of its own: what its parent tells it to do."""

import logging
import threading
from typing import Any

from jasgd import workdir as workdirs
from jasgd.runtime import _flight_security
from jasgd.runtime import addresses
from jasgd.runtime import learner as learners
from jasgd.runtime import processes

_log = logging.getLogger(__name__)


def learn(
  make_task: str,
  arguments: dict[str, Any],
  *,
  stopped: threading.Event,
  workdir: str = '',
  server: str = '',
  wire: str = 'auto',
  tls: dict[str, str] | None = None,
  **options: Any,
) -> str:
  """Makes a task, connects, and learns until the run is over.

  Args:
    make_task: The name of a function that makes the task.
    arguments: What it takes.
    stopped: Set, it ends the learner.
    workdir: Where the server's address and token are.
    server: Its address, if there is no workdir.
    wire: As in `addresses.make_connect`.
    tls: The paths of `Tls`, for mutual TLS.
    **options: Of `Learner`.

  Returns:
    Why it ended.
  """
  task = processes.find_function(make_task)(**arguments)
  connect = addresses.make_connect(
    workdirs.Workdir(workdir) if workdir else None,
    server=server,
    wire=wire,
    tls=None if tls is None else _flight_security.Tls(**tls),
  )
  if 'min_seconds' in options:
    options['min_seconds'] = tuple(options['min_seconds'])
  learner = learners.Learner(task, connect, stopped=stopped, **options)
  reason = learner.run()
  _log.info('%s', reason)
  return reason
