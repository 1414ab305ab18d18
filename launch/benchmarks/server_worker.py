"""jasgd's own server, doing the work of the suite `server`.

  python -m launch.benchmarks.server_worker WIRE WORK RANK RANK ...

The suite starts it. Rank 0 serves, the other ranks learn, as threads of this
process. The server is the real one, with its trace on the disk; learners speak
to it as real ones do, but compute nothing.
"""

from collections.abc import Callable
import dataclasses
import json
import os
import pathlib
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
from launch.benchmarks import processes
from launch.benchmarks import server_peers

# Seconds between attempts to connect to a server that is starting, and until
# a learner gives up.
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


def make_layout(num_parameters: int) -> engine.Layout:
  """Layout of the weights in a message."""
  weights = jax.ShapeDtypeStruct((num_parameters,), jnp.float32)
  return engine.make_layout((weights, {}))


def make_update() -> engine.Update:
  """Momentum SGD whose velocity begins as `FIRST_VELOCITY`."""
  momentum = optax.trace(server_peers.MOMENTUM)

  def init(params: Any) -> Any:
    return jax.tree.map(
      lambda leaf: jnp.full_like(leaf, server_peers.FIRST_VELOCITY),
      momentum.init(params),
    )

  return engine.make_update(
    optax.chain(
      optax.GradientTransformation(init, momentum.update),
      optax.scale(-server_peers.RATE),
    )
  )


class Meter:
  """Reads the server's numbers after the warm-up and at the end.

  Attributes:
    stopped: Set when the seconds of the work are over.
  """

  def __init__(self, work: server_peers.Work) -> None:
    self.stopped = threading.Event()
    self._work = work
    self._begin: dict[str, Any] = {}
    self._end: dict[str, Any] = {}
    self._early_memory = 0

  def look(self, server: runtime.Server) -> None:
    """Called after each step of the server's loop."""
    work, now = self._work, time.perf_counter()
    if not self._begin:
      if server.clock >= work.num_warm_up:
        self._begin = _read_numbers(server)
    elif not self._end:
      elapsed = now - self._begin['seconds']
      # Buffers that the first pushes need do not count as growth.
      if not self._early_memory and elapsed >= work.seconds / 4:
        self._early_memory = _measure_memory()
      is_late = work.seconds and elapsed >= work.seconds
      if is_late or server.clock >= work.num_updates:
        self._end = _read_numbers(server)
      if is_late:
        self.stopped.set()

  def make_report(self, server: runtime.Server) -> dict[str, Any]:
    """The measurements of the time between the two readings."""
    begin, end = self._begin, self._end
    num_updates = end['clock'] - begin['clock']
    seconds = end['seconds'] - begin['seconds']
    trace = server.get_trace()
    staleness = trace.staleness[trace.fate == protocols.Fate.APPLIED]
    staleness = staleness[begin['clock'] : end['clock']]
    return {
      'updates_per_second': num_updates / seconds,
      'mean_staleness': float(staleness.mean()),
      'max_staleness': int(staleness.max()),
      'cpu_per_update': (end['cpu'] - begin['cpu']) / num_updates,
      'seconds': seconds,
      'shares': {
        name: (value - begin['times'][name]) / seconds
        for name, value in end['times'].items()
      },
      'least_applied': min(end['applied']),
      'most_applied': max(end['applied']),
      'memory_growth': end['memory'] / self._early_memory,
      'num_refused': end['num_refused'],
    }


def _read_numbers(server: runtime.Server) -> dict[str, Any]:
  status = server.describe()
  return {
    'clock': status['clock'],
    'seconds': time.perf_counter(),
    'cpu': time.process_time(),
    'times': dict(status['times']),
    'applied': [each['num_applied'] for each in status['learners'].values()],
    'num_refused': sum(status['counts'].values())
    - status['counts'].get('accepted', 0),
    'memory': _measure_memory(),
  }


def _measure_memory() -> int:
  """Bytes of this process that are in memory."""
  text = pathlib.Path('/proc/self/statm').read_text()
  return int(text.split()[1]) * os.sysconf('SC_PAGE_SIZE')


def serve(
  work: server_peers.Work,
  wire: str,
  on_ready: Callable[[Any], None],
) -> dict[str, Any]:
  """Serves until the work is done.

  Args:
    work: The work.
    wire: 'memory', 'flight', or 'threads' for learners of this process.
    on_ready: Called with the listener of 'threads', for learners to connect.

  Returns:
    The measurements.
  """
  settings = runtime.ServerSettings(
    task=make_task(work.num_parameters),
    update=make_update(),
    protocol=protocols.asynchronous(),
    num_learners=work.num_learners,
    # A few more updates than are measured, because a server saves at its end.
    num_updates=work.num_updates + 2 * work.num_learners,
    eval_every=2 * work.num_updates,
    checkpoint_seconds=3600.0,
  )
  folder, meter = workdirs.Workdir(f'{work.folder}/run'), Meter(work)
  if wire == 'threads':
    server = runtime.serve_threads(
      settings, folder, on_ready=on_ready, on_step=meter.look
    )
  else:
    server = runtime.serve(
      settings,
      folder,
      runtime.BindAddress(wires=(wire,)),
      # A server that has an event waits for it at the end.
      stopped=meter.stopped if work.seconds else None,
      on_step=meter.look,
    )
  return meter.make_report(server)


def connect(work: server_peers.Work, wire: str) -> runtime.Connection:
  """Connects to a server that may still be starting."""
  folder = workdirs.Workdir(f'{work.folder}/run')
  connect_now = runtime.make_connect(folder, wire=wire)
  size = make_layout(work.num_parameters).size
  deadline = time.monotonic() + _DEADLINE
  while True:
    try:
      return connect_now(size)
    except runtime.WireError:
      if time.monotonic() > deadline:
        raise
      time.sleep(_INTERVAL)


def learn(
  work: server_peers.Work, connection: runtime.Connection, rank: int
) -> dict[str, float]:
  """Learns until the server has ended; returns a learner's report."""
  layout = make_layout(work.num_parameters)
  fingerprint = runtime.make_fingerprint(
    make_task(work.num_parameters), layout, 0
  )
  hello = json.dumps({'fingerprint': fingerprint, 'instance': str(rank)})
  answer = connection.request(
    runtime.Message(runtime.Verb.HELLO, text=hello),
    deadline=_DEADLINE,
  )
  message = runtime.Message(runtime.Verb.EXCHANGE, worker=answer.worker)

  def exchange(push: server_peers.Message, pull: server_peers.Message) -> bool:
    nonlocal answer
    (outgoing,) = layout.view(connection.outgoing)
    np.copyto(outgoing, push.values)
    answer = connection.request(
      dataclasses.replace(
        message,
        push=answer.push,
        version=answer.version,
        incarnation=answer.incarnation,
      ),
      has_payload=True,
      deadline=_DEADLINE,
    )
    if answer.payload is not None:
      (incoming,) = layout.view(answer.payload)
      np.copyto(pull.values, incoming)
      pull.clock = answer.version
    return answer.verb == runtime.Verb.SNAPSHOT

  report = server_peers.learn(work, exchange)
  connection.close()
  return report


def make_programs(num_parameters: int) -> dict[str, Callable[[], float]]:
  """The server's update, and an in-place triad: each returns its seconds.

  Args:
    num_parameters: The number of float32 of an array.

  Returns:
    Name -> function that runs the program once.
  """
  add = jax.jit(lambda a, b: a + 3.0 * b, donate_argnums=0)
  other = jnp.ones(num_parameters)
  layout = make_layout(num_parameters)
  server = engine.make_server(make_update(), layout)
  # A gradient at an address that XLA uses without copying it.
  buffer = np.zeros(layout.size + 64, np.uint8)
  offset = -buffer.ctypes.data % 64
  parts = layout.view(buffer[offset : offset + layout.size])
  states = {
    'triad': jnp.ones(num_parameters),
    'update': server.init(jnp.zeros(num_parameters), {}),
  }
  steps = {
    'triad': lambda state: add(state, other),
    'update': lambda state: server.apply(
      state, parts, 0, parts, None, 1, is_single=True
    ),
  }

  def run(name: str) -> float:
    begin = time.perf_counter()
    states[name] = jax.block_until_ready(steps[name](states[name]))
    return time.perf_counter() - begin

  return {name: lambda name=name: run(name) for name in steps}


def main(wire: str, line: str, *ranks: str) -> None:
  """Runs some ranks, and answers with the report of each."""
  work, answers = server_peers.read_work(line), processes.Answers()
  runtime.compute_in_place()
  threads: list[threading.Thread] = []

  def start_learners(make_connection: Callable[[], runtime.Connection]) -> None:
    def run(rank: int) -> None:
      answers.send(learn(work, make_connection(), rank))

    for rank in map(int, ranks):
      if rank:
        threads.append(threading.Thread(target=run, args=[rank]))
        threads[-1].start()

  if '0' in ranks:
    answers.send(
      serve(work, wire, lambda listener: start_learners(listener.connect))
    )
  else:
    start_learners(lambda: connect(work, wire))
  for thread in threads:
    thread.join()


if __name__ == '__main__':
  main(*sys.argv[1:])
