"""A run whose server is a thread of this process: what `jasgd.train` does."""

from collections.abc import Callable
from concurrent import futures
import dataclasses
import functools
import math
import os
import pathlib
import threading
import traceback
from typing import Any, TextIO

import jax

from jasgd import engine
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _observer
from jasgd.experiment import _supervisor
from jasgd.experiment import _training

# Seconds for a server to compile.
_START_TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Trained:
  """What training gives.

  Attributes:
    params: The weights after the last update.
    stats: What is not trained, after the last update.
    clock: Updates made.
    metrics: The last ones: `train/loss`, `server/staleness_mean`,
      `test/accuracy`, ...
    trace: What happened, for `jasgd.replay` and `jasgd.traces.summarize`.
    end_reason: Why it ended, in words.
    is_diverged: Whether the loss was not finite.
    is_interrupted: Whether it was stopped, and can go on.
  """

  params: Any
  stats: Any
  clock: int
  metrics: dict[str, float]
  trace: traces.Trace
  end_reason: str
  is_diverged: bool
  is_interrupted: bool


class OwnRun:
  """A run whose server is a thread of this process."""

  def __init__(
    self,
    settings: runtime.ServerSettings,
    folder: workdirs.Workdir | None,
    stream: TextIO | None,
  ) -> None:
    self._settings = settings
    self._folder = folder
    self._stream = stream
    self._server: runtime.Server | None = None
    weights = jax.eval_shape(settings.task.init, jax.random.key(0))
    self._layout = engine.make_layout(weights, settings.wire_dtype)

  def with_processes(
    self, folder: workdirs.Workdir, job: dict[str, Any]
  ) -> Trained:
    """Learners are processes of their own."""
    job = {**job, 'workdir': os.fspath(folder)}
    threads = self._settings.header['num_threads']
    folder.server.unlink(missing_ok=True)

    def serve(stopped: threading.Event) -> None:
      self._server = runtime.serve(
        self._settings, folder, runtime.Place(), stopped=stopped
      )

    return self._supervise(
      runtime.make_connect(folder),
      functools.partial(_Thread, 'server', serve),
      [
        functools.partial(
          runtime.Child,
          f'learner-{number}',
          'jasgd.runtime:learn',
          job,
          num_threads=threads,
          log=folder.logs / f'learner-{number}.log',
        )
        for number in range(self._settings.num_learners)
      ],
    )

  def with_threads(self, options: dict[str, Any]) -> Trained:
    """Learners are threads of this process."""
    ready: futures.Future[Any] = futures.Future()

    def serve(stopped: threading.Event) -> None:
      self._server = runtime.serve_threads(
        self._settings, self._folder, stopped=stopped, on_ready=ready.set_result
      )

    def connect(payload_size: int) -> runtime.Connection:
      del payload_size  # It is this process's own.
      try:
        return ready.result(timeout=_START_TIMEOUT).connect()
      except TimeoutError:
        raise runtime.WireError('The server has not started.') from None

    def learn(stopped: threading.Event) -> None:
      runtime.Learner(
        self._settings.task, connect, stopped=stopped, **options
      ).run()

    return self._supervise(
      connect,
      functools.partial(_Thread, 'server', serve),
      [
        functools.partial(_Thread, f'learner-{number}', learn)
        for number in range(self._settings.num_learners)
      ],
    )

  def read_result(self, folder: workdirs.Workdir) -> Trained:
    """What a run gave that is over already."""
    settings = self._settings
    weights = settings.task.init(jax.random.key(settings.seed))
    found = runtime.restore_server(
      folder, settings.update.init(*weights), self._layout.size
    )
    assert found is not None  # A run that is over has saved.
    state, _, _ = found
    return Trained(
      params=state.params,
      stats=state.stats,
      trace=traces.Trace.load(folder.trace),
      **workdirs.read_json(folder.result),
    )

  def _supervise(
    self,
    connect: Callable[[int], runtime.Connection],
    start_server: Callable[[], '_Thread'],
    start_learners: list[Callable[[], Any]],
  ) -> Trained:
    settings = self._settings
    observer = _observer.Observer(settings.task, self._layout, connect)
    status = _supervisor.Supervisor(
      observer,
      start_server,
      start_learners,
      num_updates=self._count_updates(),
      stream=self._stream,
      max_restarts=0,  # The server's end is that of its protocol object.
    ).run()
    server = self._server
    if server is None:
      raise _supervisor.RunError('The server has ended without a result.')
    result: dict[str, Any] = {
      'clock': server.clock,
      'metrics': {**status['metrics'], **status['test']},
      'end_reason': server.end_reason or '',
      'is_diverged': status['is_diverged'],
      'is_interrupted': status['is_interrupted'],
    }
    if self._folder is not None and not status['is_interrupted']:
      workdirs.write_json(self._folder.result, result)
    return Trained(
      params=server.state.params,
      stats=server.state.stats,
      trace=server.get_trace(),
      **result,
    )

  def _count_updates(self) -> int:
    """About how many updates there will be, for the progress."""
    settings = self._settings
    if settings.num_updates is not None:
      return settings.num_updates
    per_update = _training.count_gradients_per_update(
      settings.protocol, settings.num_learners
    )
    per_update *= settings.task.batch
    return max(1, math.ceil(settings.max_samples / per_update))


class _Thread:
  """A thread with what a supervisor wants of a process."""

  log: pathlib.Path | None = None

  def __init__(
    self, name: str, function: Callable[[threading.Event], None]
  ) -> None:
    self.name = name
    self._function = function
    self._stopped = threading.Event()
    self._error = ''
    self._thread = threading.Thread(target=self._run, name=f'jasgd-{name}')
    self._thread.daemon = True  # An exit of the program is not held up.
    self._thread.start()

  def _run(self) -> None:
    try:
      self._function(self._stopped)
    except (OSError, ValueError) as error:  # Of the world, or of the user.
      self._error = f'{type(error).__name__}: {error}'
    except Exception:
      self._error = traceback.format_exc()

  @property
  def code(self) -> int | None:
    """As if it were a process."""
    return None if self._thread.is_alive() else int(bool(self._error))

  def end(self, timeout: float) -> int:
    """Asks it to end, and waits."""
    self._stopped.set()
    self._thread.join(timeout)
    return int(self._thread.is_alive() or bool(self._error))

  def read_log(self) -> str:
    """What went wrong, if something did."""
    return self._error
