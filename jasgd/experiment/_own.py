"""`jasgd.train`: a user's own model, trained by real learners."""

from collections.abc import Callable
from concurrent import futures
import contextlib
import dataclasses
import functools
import hashlib
import math
import os
import pathlib
import re
import tempfile
import threading
import traceback
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import optax

from jasgd import engine
from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd import transforms
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


def train(
  make_task: Callable[..., tasks.Task],
  optimizer: optax.GradientTransformation,
  protocol: protocols.Protocol | None = None,
  *,
  num_learners: int = 4,
  workdir: str | os.PathLike[str] | None = None,
  arguments: dict[str, Any] | None = None,
  num_updates: int | None = None,
  num_epochs: float | None = None,
  policy: transforms.policies.PolicyLike = 'constant',
  per_gradient: optax.GradientTransformation | None = None,
  get_rate: Callable[[float], float] | None = None,
  local_rate: float | None = None,
  seed: int = 0,
  processes: bool = True,
  overlap: bool = False,
  wire_dtype: str = 'float32',
  eval_every: int = 100,
  checkpoint_seconds: float = 30.0,
  min_seconds: tuple[float, ...] = (),
  on_learner_lost: str = 'continue',
  deadlines: runtime.Deadlines | None = None,
  stream: TextIO | None = None,
) -> Trained:
  """Trains with a parameter server and learners of this machine.

  The server is a thread of this process; learners are processes of their own,
  or threads. On a CPU learners see as many threads as this process, so that an
  exact replay here has the same bits; set NPROC=1 in the environment, before
  jax is imported, to give each process one.

  Args:
    make_task: Makes the task. Of it only the name travels to other processes,
      which import it: it must be a function of a module, or of the script that
      runs (behind `if __name__ == '__main__':` that script calls `train`).
    optimizer: Any optax optimizer; it stays in this process.
    protocol: When the server updates; None: asynchronous.
    num_learners: How many.
    workdir: Where trace, metrics and checkpoints go. A run that is there goes
      on from its last checkpoint. None: nowhere.
    arguments: What `make_task` takes, as JSON can say it.
    num_updates: When to end.
    num_epochs: When to end, in passes over the training set; 10 if neither is
      given.
    policy: What staleness leaves of a gradient, as in
      `jasgd.scale_by_staleness`.
    per_gradient: Run on each gradient before the policy.
    get_rate: A schedule, from epochs to a factor on the optimizer's updates.
    local_rate: The rate at which learners step on their own; to be given with
      protocols in which they do (downpour).
    seed: Of everything that is random.
    processes: Whether learners are processes; else threads, for notebooks.
    overlap: Whether learners fetch while they compute.
    wire_dtype: 'bfloat16' halves the bytes of messages.
    eval_every: Updates between evaluations.
    checkpoint_seconds: Between checkpoints.
    min_seconds: The least seconds per gradient of each learner, to stand for
      slower ones.
    on_learner_lost: 'continue', or 'fail'.
    deadlines: How long to wait for what.
    stream: Where the progress goes; standard error if None.

  Returns:
    The weights, and what happened.

  Raises:
    ValueError: if an argument makes no sense.
    RunError: if the run cannot go on.

  Examples:
    >>> import io, jasgd, optax
    >>> from jasgd import tasks
    >>> result = jasgd.train(
    ...   tasks.make_task,
    ...   optax.sgd(0.05),
    ...   arguments={'name': 'quadratic', 'batch': 1},
    ...   num_learners=2,
    ...   num_updates=20,
    ...   policy='inverse',
    ...   processes=False,
    ...   stream=io.StringIO(),
    ... )
    >>> result.clock, result.trace.num_updates
    (20, 20)
  """
  arguments = arguments or {}
  if num_updates is None and num_epochs is None:
    num_epochs = 10.0
  protocol = protocols.asynchronous() if protocol is None else protocol
  steps = max(protocol.steps_per_push, protocol.steps_per_fetch)
  if local_rate is None and steps > 1:
    raise ValueError(
      f'With {protocol!r} learners step on their own copies of the weights: '
      'say at which local_rate.'
    )
  name = runtime.name_function(make_task) if processes else repr(make_task)
  task = make_task(**arguments)
  if not isinstance(task, tasks.Task):
    raise ValueError(f'make_task must give a Task, got {task!r:.80}.')
  described = {
    'make_task': name,
    'arguments': arguments,
    'protocol': repr(protocol),
    'num_learners': num_learners,
    'num_updates': num_updates,
    'num_epochs': num_epochs,
    'wire_dtype': wire_dtype,
    'overlap': overlap,
    'local_rate': local_rate,
    'seed': seed,
  }
  update = engine.make_update(
    optimizer, policy=policy, per_gradient=per_gradient
  )
  described['update'] = _digest_update(update, task, get_rate)
  settings = runtime.ServerSettings(
    task=task,
    update=update,
    protocol=protocol,
    num_learners=num_learners,
    seed=seed,
    num_updates=num_updates,
    num_epochs=num_epochs,
    get_rate=get_rate,
    local_rate=0.0 if local_rate is None else local_rate,
    wire_dtype=wire_dtype,
    overlap=overlap,
    eval_every=eval_every,
    checkpoint_seconds=checkpoint_seconds,
    on_learner_lost=on_learner_lost,
    deadlines=runtime.Deadlines() if deadlines is None else deadlines,
    header=workdirs.describe_run(described, seed),
  )
  options = {
    'seed': seed,
    'wire_dtype': wire_dtype,
    'min_seconds': min_seconds,
  }
  with contextlib.ExitStack() as stack:
    if workdir is None and processes:
      workdir = stack.enter_context(tempfile.TemporaryDirectory())
    folder = None
    if workdir is not None:
      folder = workdirs.open_workdir(workdir, described)
      stack.enter_context(workdirs.hold_workdir(folder, 'launcher'))
    run = _Run(settings, folder, stream)
    if folder is not None and folder.result.exists():
      return run.read_result(folder)
    if processes:
      assert folder is not None
      job = {'make_task': name, 'arguments': arguments, **options}
      return run.with_processes(folder, job)
    return run.with_threads(options)


def _digest_update(
  update: engine.Update,
  task: tasks.Task,
  get_rate: Callable[[float], float] | None,
) -> str:
  """A text that is another for another optimizer, policy or schedule.

  A run goes on with what it began with, and functions cannot be compared; what
  they compute can.
  """
  params, stats = jax.eval_shape(task.init, jax.random.key(0))
  state = jax.eval_shape(update.init, params, stats)
  gradient = engine.Gradient(params, stats, jnp.zeros(()))
  program = jax.make_jaxpr(
    lambda *given: update.apply(*given, 1.0, 2, is_single=False)
  )(state, gradient, 1, params)
  # Without the addresses of functions in it.
  text = re.sub(r'0x[0-9a-f]+', '', str(program))
  if get_rate is not None:
    text += str([get_rate(epoch / 4) for epoch in range(400)])
  return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Run:
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
