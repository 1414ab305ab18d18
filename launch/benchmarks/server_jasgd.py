"""Our own server, doing the work of the suite `server`.

  python -m launch.benchmarks.server_jasgd server memory WORK
  python -m launch.benchmarks.server_jasgd learner memory 1 WORK

The parent starts them. The server is the real one, with its trace on the disk;
learners speak to it as real ones do, but compute nothing.
"""

import dataclasses
import json
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import workdir as workdirs
from launch.benchmarks import server_work

# Seconds between looks for a server that is starting.
_INTERVAL = 0.05
_DEADLINE = 60.0


def make_task(num_parameters: int) -> tasks.Task:
  """Weights without a model."""
  zeros = jnp.zeros(num_parameters)
  return tasks.Task(
    name='serving',
    batch=1,
    num_samples=1,
    init=lambda key: (zeros, {}),
    loss=lambda params, stats, batch, key: (jnp.sum(params), stats),
    metrics=lambda params, stats, batch: {'loss': jnp.sum(params)},
    batches=lambda data, seed, learner, step: data,
    data=jnp.zeros(1),
  )


def make_optimizer() -> optax.GradientTransformation:
  """Momentum SGD whose velocity begins as `FIRST_VELOCITY`."""
  momentum = optax.trace(server_work.MOMENTUM)

  def init(params: Any) -> Any:
    return jax.tree.map(
      lambda leaf: jnp.full_like(leaf, server_work.FIRST_VELOCITY),
      momentum.init(params),
    )

  return optax.chain(
    optax.GradientTransformation(init, momentum.update),
    optax.scale(-server_work.RATE),
  )


def make_settings(work: server_work.Work) -> runtime.ServerSettings:
  """What the server is told."""
  return runtime.ServerSettings(
    task=make_task(work.num_parameters),
    update=engine.make_update(make_optimizer()),
    protocol=protocols.asynchronous(),
    num_learners=work.num_learners,
    # A few more than are measured: at its end a server saves.
    num_updates=work.num_updates + 2 * work.num_learners,
    eval_every=2 * work.num_updates,
    checkpoint_seconds=3600.0,
  )


class _Meter:
  """Looks at the clock before and after each step."""

  def __init__(self, server: runtime.Server, work: server_work.Work) -> None:
    self._server = server
    self._work = work
    self.begin: dict[str, float] = {}
    self.end: dict[str, float] = {}

  def look(self) -> None:
    """Notes when the warm-up and the work were over."""
    clock = self._server.clock
    if not self.begin and clock >= self._work.num_warm_up:
      self.begin = self._read()
    if not self.end and clock >= self._work.num_updates:
      self.end = self._read()

  def _read(self) -> dict[str, float]:
    return {
      'clock': self._server.clock,
      'seconds': time.perf_counter(),
      'cpu': time.process_time(),
      **self._server.describe()['times'],
    }


def serve(work: server_work.Work, wire: str) -> dict[str, float]:
  """Runs the server until the work is done; gives what was measured."""
  folder = workdirs.Workdir(f'{work.folder}/run')
  place = runtime.Place(wires=() if wire == 'threads' else (wire,))
  meter: _Meter | None = None

  def watch(server: runtime.Server) -> None:
    nonlocal meter
    if meter is None:
      meter = _Meter(server, work)
    meter.look()

  threads = []
  if wire == 'threads':
    server = runtime.serve_threads(
      make_settings(work),
      folder,
      on_ready=lambda listener: threads.extend(
        _start_thread(work, listener, number)
        for number in range(1, 1 + work.num_learners)
      ),
      on_step=watch,
    )
  else:
    server = runtime.serve(make_settings(work), folder, place, on_step=watch)
  for thread in threads:
    thread.join(_DEADLINE)
  assert meter is not None
  return _report(server, meter, work)


def _start_thread(
  work: server_work.Work, listener: Any, number: int
) -> threading.Thread:
  """A learner in the server's own process."""
  thread = threading.Thread(
    target=learn, args=(work, listener.connect(), number), daemon=True
  )
  thread.start()
  return thread


def _report(
  server: runtime.Server, meter: _Meter, work: server_work.Work
) -> dict[str, float]:
  """What was measured after the warm-up."""
  spent = {name: meter.end[name] - meter.begin[name] for name in meter.begin}
  num_updates = spent.pop('clock')
  seconds, cpu = spent.pop('seconds'), spent.pop('cpu')
  trace = server.get_trace()
  staleness = trace.staleness[trace.fate == protocols.Fate.APPLIED]
  staleness = staleness[work.num_warm_up : work.num_updates]
  return {
    'updates_per_second': num_updates / seconds,
    'mean_staleness': float(staleness.mean()),
    'max_staleness': int(staleness.max()),
    'cpu_per_update': cpu / num_updates,
    'seconds': seconds,
    **{f'time_{name}': each / seconds for name, each in spent.items()},
  }


def connect(work: server_work.Work, wire: str) -> runtime.Connection:
  """A connection to a server that may still be starting."""
  folder = workdirs.Workdir(f'{work.folder}/run')
  size = engine.make_layout(
    (jax.ShapeDtypeStruct((work.num_parameters,), jnp.float32), {})
  ).size
  connect_now = runtime.make_connect(folder, wire=wire)
  deadline = time.monotonic() + _DEADLINE
  while True:
    try:
      return connect_now(size)
    except runtime.WireError:
      if time.monotonic() > deadline:
        raise
      time.sleep(_INTERVAL)


def learn(
  work: server_work.Work, connection: runtime.Connection, number: int
) -> None:
  """Pushes until it is over, checks every answer, and reports."""
  weights = (jax.ShapeDtypeStruct((work.num_parameters,), jnp.float32), {})
  layout = engine.make_layout(weights)
  fingerprint = runtime.make_fingerprint(
    make_task(work.num_parameters), layout, 0
  )
  gradient = server_work.make_gradient(work)
  private = np.empty_like(gradient)
  checker = server_work.Checker(work)
  answer = connection.request(
    runtime.Message(
      runtime.Verb.HELLO,
      step=-1,
      text=json.dumps({'fingerprint': fingerprint, 'instance': str(number)}),
    ),
    deadline=_DEADLINE,
  )
  message = runtime.Message(runtime.Verb.EXCHANGE, learner=answer.learner)
  while answer.verb == runtime.Verb.SNAPSHOT:
    (outgoing,) = layout.view(connection.outgoing)
    np.copyto(outgoing, gradient)
    answer = connection.request(
      dataclasses.replace(
        message,
        step=answer.step,
        clock=answer.clock,
        incarnation=answer.incarnation,
      ),
      has_payload=True,
      deadline=_DEADLINE,
    )
    if answer.payload is not None:
      (incoming,) = layout.view(answer.payload)
      np.copyto(private, incoming)
      checker.check(private, answer.clock)
  connection.close()
  server_work.write_report(work, f'learner-{number}', checker.make_report())


def main(role: str, wire: str, *words: str) -> None:
  """Does what the parent asks for."""
  work = server_work.start_process(words[-1])
  runtime.compute_in_place()
  if role == 'server':
    server_work.write_report(work, 'server', serve(work, wire))
  else:
    learn(work, connect(work, wire), int(words[0]))


if __name__ == '__main__':
  main(*sys.argv[1:])
