"""`jasgd.train`: a user's own model, trained by real learners."""

from collections.abc import Callable
import contextlib
import hashlib
import os
import re
import tempfile
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import optax

from jasgd import engine
from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import transforms
from jasgd import workdir as workdirs
from jasgd.experiment import _own_run


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
) -> _own_run.Trained:
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
    run = _own_run.OwnRun(settings, folder, stream)
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
