"""Every protocol, and servers with learners in threads."""

import contextlib
import os
import threading

import jax
import numpy as np
import optax
import pytest

from jasgd import engine
from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd.runtime import wires

PATIENCE = 60.0  # Seconds: never reached, unless something is broken.
NUM_LEARNERS = 4

# Constructors by name. A protocol that is listed here is tested.
PROTOCOLS = {
  'asynchronous': protocols.asynchronous,
  'backup': lambda: protocols.backup(1),
  'constant_delay': lambda: protocols.constant_delay(3),
  'downpour, at once': lambda: protocols.downpour(2, 2),
  'downpour, rarely': lambda: protocols.downpour(2, 3),
  'downpour, often': lambda: protocols.downpour(3, 1),
  'hardsync': protocols.hardsync,
  'ramp_up': lambda: protocols.ramp_up(protocols.softsync(2), 20),
  'ramp_up, waiting': lambda: protocols.ramp_up(protocols.hardsync(), 9),
  'rennala': lambda: protocols.rennala(3),
  'ringmaster': lambda: protocols.ringmaster(2),
  'softsync': lambda: protocols.softsync(2),
  'ssp': lambda: protocols.ssp(1),
}
every_protocol = pytest.mark.parametrize('name', PROTOCOLS)

OPTIMIZERS = {
  'momentum': optax.sgd(0.05, 0.9),
  'adam': optax.adam(1e-3),
}


def make_task(batch=4):
  """A task that takes almost no time to compute."""
  return tasks.make_task('logistic', batch=batch)


def make_settings(task=None, protocol=None, **options):
  """Settings of a server; three options make the update rule."""
  options = {
    'num_learners': NUM_LEARNERS,
    'num_updates': 30,
    'local_rate': 0.05,
    **options,
  }
  update = engine.make_update(
    options.pop('optimizer', OPTIMIZERS['momentum']),
    policy=options.pop('policy', 'inverse'),
    per_gradient=options.pop('per_gradient', None),
  )
  return runtime.ServerSettings(
    task=make_task() if task is None else task,
    update=update,
    protocol=protocols.asynchronous() if protocol is None else protocol,
    **options,
  )


def run_learners(server, listener, task, *, num_learners=None, **options):
  """Serves learners in threads until the run is over."""
  learners = [
    runtime.Learner(task, lambda size: listener.connect(), **options)
    for _ in range(num_learners or NUM_LEARNERS)
  ]
  with run_in_threads(*(learner.run for learner in learners)) as errors:
    serve(server, until=lambda: bool(errors))


def serve(server, until=lambda: False):
  """Serves until the run is over, or `until` is true."""
  for _ in range(int(PATIENCE / 0.1)):
    if server.is_over or until():
      return
    while server.step(0.0):
      if server.is_over or until():
        return
    server.step(0.1)
  raise AssertionError('The run does not end: ' + str(server.describe()))


@contextlib.contextmanager
def run_in_threads(*functions):
  """Runs functions in threads; raises their first error at the end."""
  errors = []

  def call(function):
    try:
      function()
    except BaseException as error:  # The caller raises it.
      errors.append(error)

  threads = [
    threading.Thread(target=call, args=(function,), daemon=True)
    for function in functions
  ]
  for thread in threads:
    thread.start()
  yield errors
  if errors:
    raise errors[0]
  for thread in threads:
    thread.join(PATIENCE)
    assert not thread.is_alive(), 'A learner hangs.'
  if errors:
    raise errors[0]


def train(task, protocol, workdir=None, learner=None, **options):
  """The server of a run that is over, and its trace."""
  settings = make_settings(task, protocol, **options)
  server = runtime.Server(settings, workdir)
  listener = wires.QueueListener(server.inbox, server.layout.size)
  run_learners(
    server,
    listener,
    settings.task,
    num_learners=settings.num_learners,
    wire_dtype=settings.wire_dtype,
    seed=settings.seed,
    **(learner or {}),
  )
  server.finish()
  trace = server.get_trace()
  listener.close()
  server.close()
  return server, trace


def make_replay(trace, task, **options):
  """The exact replay of a run; options as those of `make_settings`."""
  replay = engine.Replay(
    task,
    options.get('optimizer', OPTIMIZERS['momentum']),
    engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=options.get('get_rate'),
      num_updates=options.get('clock'),
    ),
    policy=options.get('policy', 'inverse'),
    per_gradient=options.get('per_gradient'),
    seed=options.get('seed', 0),
    mode='exact',
    local_rate=options.get('local_rate', 0.05),
    chunk=1000,
  )
  while not replay.is_done:
    replay.advance()
  return replay


def check_replay(server, trace, task, **options):
  """Replay has the bits of the server's whole state, and its digests."""
  replay = make_replay(trace, task, clock=server.clock, **options)
  assert replay.clock == server.clock
  state, replayed = server.state, replay.opt_states[engine.SERVER]
  assert jax.tree.structure(replayed) == jax.tree.structure(state)
  if int(state.aggregation.group_size):  # Replay ends with the last update.
    state, replayed = (
      (each.params, each.stats, each.aggregation.per_update_state)
      for each in (state, replayed)
    )
  for (path, leaf), other in zip(
    jax.tree.leaves_with_path(state), jax.tree.leaves(replayed), strict=True
  ):
    np.testing.assert_array_equal(
      np.asarray(leaf), np.asarray(other), err_msg=jax.tree_util.keystr(path)
    )
  digests = replay.plan.digests
  if replay.clock in digests:
    assert replay.get_digest() == digests[replay.clock]
  return replay


def damage_record(path, index, **fields):
  """Writes other values into a record of a trace file."""
  whole = traces.Trace.load(path)
  records = whole.records.copy()
  for name, value in fields.items():
    records[name][index] = value
  traces.Trace(records, whole.header).save(path)


def shorten_trace(path, num_records):
  """Cuts a trace file after a number of records."""
  offset = path.stat().st_size
  offset -= len(traces.Trace.load(path)) * traces.RECORD.itemsize
  os.truncate(path, offset + num_records * traces.RECORD.itemsize)
