"""A run of a real server and real learners replays to the same bits."""

import collections
import functools
import os
import subprocess
import sys
import threading

from flax import linen
import jax
import numpy as np
import optax
import pytest

from jasgd import protocols
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd import transforms
from jasgd import workdir
from jasgd.runtime import wires
from tests import marks
from tests.runtime import cases
from tests.runtime import scripted

pytestmark = pytest.mark.usefixtures('quick_compiler')


def _list_names():
  """Names of all protocols in `jasgd.protocols`."""
  return {
    name
    for name in protocols.__all__
    if isinstance(getattr(protocols, name), type)
    and issubclass(getattr(protocols, name), protocols.Protocol)
    and name != 'Protocol'
  }


def test_every_protocol_is_listed():
  assert {make().name for make in cases.PROTOCOLS.values()} == _list_names()


@pytest.mark.parametrize(
  ('name', 'optimizer'),
  [
    *((name, 'momentum') for name in cases.PROTOCOLS),
    *(
      pytest.param(name, 'adam', marks=pytest.mark.slow)
      for name in ('downpour, rarely', 'hardsync')
    ),
  ],
)
def test_every_protocol(name, optimizer):
  task = cases.make_task()
  options = {'optimizer': cases.OPTIMIZERS[optimizer]}
  server, trace = cases.train(task, cases.PROTOCOLS[name](), **options)
  assert trace.is_ended
  assert server.clock == traces.statistics.get_clock(trace) == 30
  assert len(set(trace.worker.tolist())) > 1
  cases.check_replay(server, trace, task, **options)


class _Network(linen.Module):
  """A network with batch normalisation and dropout."""

  @linen.compact
  def __call__(self, inputs, train):
    hidden = linen.Dense(8)(inputs)
    hidden = linen.BatchNorm(use_running_average=not train, momentum=0.9)(
      hidden
    )
    hidden = linen.Dropout(0.3, deterministic=not train)(linen.relu(hidden))
    return linen.Dense(3)(hidden)


def _make_examples():
  random = np.random.default_rng(0)
  return {
    'image': random.standard_normal((60, 5)).astype(np.float32),
    'label': random.integers(0, 3, 60),
  }


@functools.cache
def _make_network_task():
  return tasks.from_linen(_Network(), _make_examples(), batch=6)


@functools.cache
def _make_streamed_task():
  examples = _make_examples()
  source = [
    {'image': image, 'label': label}
    for image, label in zip(*examples.values(), strict=True)
  ]
  return tasks.stream(_make_network_task(), source)


def _decay(epoch):
  return 0.5 ** (10 * epoch)


# Name -> task, protocol and options.
VARIANTS = {
  'statistics, softsync': (_make_network_task, 'softsync', {}),
  'streamed': (_make_streamed_task, 'asynchronous', {}),
  'streamed, downpour': (_make_streamed_task, 'downpour, rarely', {}),
  'delay compensation': (
    cases.make_task,
    'asynchronous',
    {'per_gradient': transforms.delay_compensation(0.5)},
  ),
  'delay compensation, softsync': (
    cases.make_task,
    'softsync',
    {'per_gradient': transforms.delay_compensation(0.5, adaptive=True)},
  ),
  'gap aware': (
    cases.make_task,
    'asynchronous',
    {'per_gradient': transforms.gap_aware(0.05), 'policy': 'constant'},
  ),
  'clipped': (
    cases.make_task,
    'softsync',
    {
      'optimizer': optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.01))
    },
  ),
  'bfloat16, downpour': (
    cases.make_task,
    'downpour, often',
    {'wire_dtype': 'bfloat16'},
  ),
  'overlap': (cases.make_task, 'asynchronous', {'overlap': True}),
  'overlap, softsync, another seed': (
    _make_network_task,
    'softsync',
    {'overlap': True, 'seed': 7},
  ),
  'overlap, ssp, bfloat16': (
    cases.make_task,
    'ssp',
    {'overlap': True, 'wire_dtype': 'bfloat16'},
  ),
  'schedule, local': (
    cases.make_task,
    'downpour, rarely',
    {'get_rate': _decay},
  ),
  'schedule, at once': (
    cases.make_task,
    'downpour, at once',
    {'get_rate': _decay},
  ),
}


@pytest.mark.parametrize(
  'name',
  marks.slow_but(
    VARIANTS,
    'statistics, softsync',
    'streamed',
    'delay compensation, softsync',
    'gap aware',
    'clipped',
    'bfloat16, downpour',
    'overlap',
    'schedule, local',
  ),
)
def test_every_variant(name):
  make_task, protocol, options = VARIANTS[name]
  task = make_task()
  server, trace = cases.train(task, cases.PROTOCOLS[protocol](), **options)
  cases.check_replay(server, trace, task, **options)


def test_a_wire_dtype_changes_bits_and_replay_is_told_by_the_trace():
  task = cases.make_task()
  server, trace = cases.train(
    task, protocols.asynchronous(), wire_dtype='bfloat16'
  )
  assert trace.header['wire_dtype'] == 'bfloat16'
  header = {**trace.header, 'wire_dtype': 'float32'}
  other = cases.make_replay(traces.Trace(trace.records, header), task)
  assert not np.array_equal(other.weights[0], server.state.params)


@pytest.mark.parametrize(
  ('name', 'optimizer'),
  marks.slow_but(
    [
      *(('asynchronous', 'momentum'), ('asynchronous', 'adam')),
      ('ringmaster', 'momentum'),
    ],
    ('asynchronous', 'momentum'),
    ('ringmaster', 'momentum'),
  ),
)
def test_updates_by_one_call(name, optimizer):
  task = _make_network_task()
  options = {'optimizer': cases.OPTIMIZERS[optimizer]}
  bench = scripted.Bench(
    cases.PROTOCOLS[name](),
    task,
    num_learners=5,
    num_updates=24,
    max_group=16,
    eval_every=10,
    **options,
  )
  clients = [bench.join() for _ in range(5)]
  while bench.server.end_reason is None:
    # All clients that can push do so before the server handles a message.
    for client in clients:
      if client.weights is not None:
        client.push(is_handled=False)
    bench.step()
    for client in clients:
      client.hear()
  trace = bench.server.get_trace()
  groups = trace.of_kind(traces.Kind.PUSH)['group']
  sizes = np.unique(groups[groups > 0], return_counts=True)[1]
  assert len(sizes) > 3
  assert max(sizes) == (2 if name == 'ringmaster' else 4)
  assert bench.server.clock == 24
  replay = cases.check_replay(bench.server, trace, task, **options)
  ends = [replay.plan.find_call_end(clock) for clock in range(25)]
  assert len(set(ends)) == 25 - sum(sizes - 1)
  # No snapshot has the weights in between, but the metrics are complete.
  assert bench.server.describe()['evaluation_clock'] >= 20
  bench.close()


def test_a_learner_leaves_in_the_middle():
  task = _make_network_task()
  settings = cases.make_settings(
    task, protocols.hardsync(), num_updates=20, num_learners=3
  )
  server = runtime.Server(settings)
  listener = wires.QueueListener(server.inbox, server.layout.size)
  stopped = threading.Event()
  learners = [
    runtime.Learner(task, lambda size: listener.connect(), stopped=event)
    for event in (threading.Event(), threading.Event(), stopped)
  ]
  with cases.run_in_threads(*(learner.run for learner in learners)):
    cases.serve(server, until=lambda: server.clock >= 5)
    stopped.set()
    cases.serve(server)
  trace = server.get_trace()
  leaves = trace.of_kind(traces.Kind.LEAVE)
  assert 5 <= leaves['version'][0] < 20
  cases.check_replay(server, trace, task)
  listener.close()
  server.close()


# --- Restarts.


class _Door:
  """Connects learners to the server that is open now."""

  def __init__(self):
    self.listener = None

  def connect(self, size):
    del size
    if self.listener is None:
      raise runtime.WireError('There is no server now.')
    return self.listener.connect()


@pytest.mark.parametrize(
  ('name', 'optimizer'),
  marks.slow_but(
    # The other protocols are restarted by `test_server_machine`.
    [
      *((name, 'momentum') for name in ('asynchronous', 'ssp', 'hardsync')),
      *((name, 'momentum') for name in ('downpour, rarely', 'downpour, often')),
      ('softsync', 'adam'),
    ],
    ('downpour, rarely', 'momentum'),
    ('hardsync', 'momentum'),
  ),
)
def test_a_server_comes_back(tmp_path, name, optimizer):
  """It is killed twice, with gradients in flight."""
  task = _make_network_task()
  door = _Door()
  options = {'optimizer': cases.OPTIMIZERS[optimizer]}
  learners = [runtime.Learner(task, door.connect) for _ in range(4)]
  with cases.run_in_threads(*(each.run for each in learners)) as errors:
    for number in range(3):
      settings = cases.make_settings(
        task,
        cases.PROTOCOLS[name](),
        num_updates=30,
        checkpoint_seconds=0.0,
        **options,
      )
      server = runtime.Server(settings, workdir.Workdir(tmp_path))
      assert server.incarnation == number
      door.listener = wires.QueueListener(server.inbox, server.layout.size)
      goal = (8, 19, 30)[number]
      cases.serve(
        server,
        until=lambda server=server, goal=goal: (
          bool(errors) or (server.end_reason is None and server.clock >= goal)
        ),
      )
      listener, door.listener = door.listener, None
      if number == 2:
        server.finish()
      listener.close()
      server.close()
  trace = server.get_trace()
  assert trace.is_ended
  assert traces.statistics.get_clock(trace) == server.clock == 30
  assert np.any(trace.is_void)
  replay = cases.check_replay(server, trace, task, **options)
  saved = workdir.load_params(tmp_path)
  for leaf, other in zip(
    jax.tree.leaves(saved), jax.tree.leaves(replay.weights[0]), strict=True
  ):
    np.testing.assert_array_equal(leaf, other)


def test_gradients_in_flight_when_a_server_dies(tmp_path):
  """A gradient at weights that still exist counts; any other is lost."""
  bench = scripted.Bench(
    protocols.asynchronous(),
    _make_network_task(),
    workdir.Workdir(tmp_path),
    num_learners=3,
    num_updates=9,
    checkpoint_seconds=10.0,
  )
  slow, fast, other = (bench.join() for _ in range(3))
  for client in (slow, fast, other):
    client.hear()
  slow_push = slow.make_push()
  fast.push()
  other.push()
  bench.tick(11.0)  # A checkpoint of clock 2.
  fast.push()
  late_push = fast.make_push()  # A gradient at clock 3, which is lost.
  answered = other.make_push()
  other.send(answered)  # The resumed server does not know that it was answered.
  bench.crash()
  assert bench.server.clock == 4
  bench.open(protocols.asynchronous())
  assert (bench.server.clock, bench.server.incarnation) == (2, 1)
  for client, held in ((slow, slow_push), (fast, late_push), (other, answered)):
    client.reconnect()
    (answer,) = client.hello(held)
    if client is fast:
      assert answer.verb == scripted.Verb.SNAPSHOT
      assert (answer.incarnation, answer.version) == (1, bench.server.clock)
      assert answer.push == 1
    else:
      assert answer.flags == scripted.Flag.RESEND
      (answer,) = client.send(held)
      assert answer.verb == scripted.Verb.SNAPSHOT
  assert bench.server.clock == 4
  while bench.server.end_reason is None:
    for client in (slow, fast, other):
      if client.weights is not None:
        client.push()
  trace = bench.server.get_trace()
  fates = collections.Counter(trace.fate.tolist())
  assert fates[protocols.Fate.LOST_HISTORY] == 1
  assert fates[protocols.Fate.APPLIED] == 9
  applied = trace.fate == protocols.Fate.APPLIED
  steps = zip(trace.worker[applied], trace.step[applied], strict=True)
  assert len(set(steps)) == 9  # No step was counted twice.
  cases.check_replay(bench.server, trace, bench.task)
  bench.close()


# --- Several devices.

_TWO_DEVICES = """
import jax, numpy as np
from jasgd import engine
from tests import quickly
from tests.runtime import cases, test_server_replay
assert jax.local_device_count() == 2
task = test_server_replay._make_network_task()
with quickly.compile_quickly():
  for name in ('asynchronous', 'downpour, rarely'):
    server, trace = cases.train(
      task, cases.PROTOCOLS[name](), num_learners=2, num_updates=8
    )
    assert engine.count_devices(trace) == 2
    cases.check_replay(server, trace, task)
params, stats = task.init(jax.random.key(0))
results = [
  engine.make_gradient(task, number)(
    params, stats, engine.place_data(task.data, number), 0, 1, 2)
  for number in (1, 2)
]
for one, two in zip(*map(jax.tree.leaves, results), strict=True):
  np.testing.assert_allclose(one, two, atol=1e-5)
"""


def test_a_learner_with_two_devices():
  flags = '--xla_force_host_platform_device_count=2'
  result = subprocess.run(
    [sys.executable, '-c', _TWO_DEVICES],
    env={**os.environ, 'XLA_FLAGS': flags, 'NPROC': '1'},
    capture_output=True,
    text=True,
    timeout=3 * cases.PATIENCE,
    check=False,
  )
  assert result.returncode == 0, result.stderr[-3000:]


def test_replay_says_how_many_devices_it_needs():
  task = cases.make_task()
  _, trace = cases.train(task, protocols.asynchronous(), num_learners=2)
  records = np.array(trace.records)
  records['num_devices'][records['kind'] == traces.Kind.JOIN] = 2
  with pytest.raises(ValueError, match='device_count=2'):
    cases.make_replay(traces.Trace(records, trace.header), task)


def test_overlapped_gradients_in_flight_come_after_the_end():
  task = cases.make_task()
  _, trace = cases.train(task, protocols.asynchronous(), overlap=True)
  assert np.any(trace.fate == protocols.Fate.AFTER_END)
