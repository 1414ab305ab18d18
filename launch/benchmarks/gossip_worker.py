"""A process of the suite `gossip`.

  python -m launch.benchmarks.gossip_worker ROLE JOB

The suite starts it, with variables that set the devices and threads of XLA. JOB
is JSON, the arguments of the role's function: `join_devices`, `join_nodes` or
`make_simulations`. Each line of stdin is JSON, the arguments of the function
that this returns; the answer is its result.
"""

from collections.abc import Callable
import functools
import json
import math
import sys
import time
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import runtime
from jasgd import simulation
from jasgd import tasks
from jasgd import traces
from jasgd import workdir as workdirs
from launch.benchmarks import measuring
from launch.benchmarks import processes
from launch.benchmarks import training_jax

Answer = dict[str, Any]

ALL_REDUCE, COPY = 'all-reduce', 'copy'
BARE_STEPS, BARE_LOOP, ONE_NODE = 'bare steps', 'bare loop', 'one node'
PLAIN = (BARE_STEPS, BARE_LOOP, ONE_NODE)
STRATEGIES: dict[str, gossip.PeerStrategy] = {
  'pull': gossip.Pull(),
  'push': gossip.Push(),
  'push-sum': gossip.PushSum(),
  'pairs': gossip.Pairs(),
  'elastic': gossip.Elastic(),
  'all-reduce': gossip.AllReduce(),
}

_BATCH = 16
_OPTIMIZER = optax.sgd(1e-3, momentum=0.9)
_TASKS: dict[str, Callable[[], tasks.Task]] = {
  'mnist': lambda: training_jax.make_task('lenet', _BATCH),
  'digits': lambda: tasks.make_task('digits', model='lenet', batch=_BATCH),
  'logistic': lambda: tasks.make_task('logistic', batch=_BATCH),
}

# Small sizes are mixed several times per round.
_BYTES_PER_ROUND = 16 << 20
_MAX_CALLS = 8
_NUM_COPIES = 5
# Rounds, or mixes, that are not counted: they connect, and touch fresh memory.
_NUM_WARM_UP = 2


# Devices: mixes under pmap and shard_map.


def make_rules(num_devices: int) -> dict[str, gossip.PeerStrategy]:
  """Mixes to time, of which only the first is an all-reduce.

  On a ring of two or three, equal weights would be an all-reduce, and so are
  pairs of two nodes, which are left out.
  """
  ring = gossip.topologies.with_constant_weights(
    gossip.topologies.ring(num_devices), 0.3
  )
  rules: dict[str, gossip.PeerStrategy] = {
    ALL_REDUCE: gossip.AllReduce(),
    'ring': gossip.Pull(peers=ring),
    'permutation': gossip.Pull(peers='permutation'),
    'independent': gossip.Pull(peers='independent'),
  }
  if num_devices > 2:
    rules['pairs'] = gossip.Pairs(peers='matching')
  return rules


def join_devices(
  num_devices: int, num_processes: int, process: int, coordinator: str
) -> Callable[[int, int], Answer]:
  """Joins the devices of all processes.

  Args:
    num_devices: Devices of all processes.
    num_processes: Number of processes.
    process: The number of this process.
    coordinator: The address at which processes meet.

  Returns:
    A function of the bytes of a device and the number of rounds, which times
    each rule under each runner, and a copy. It answers with `rows`.
  """
  if num_processes > 1:
    runtime.join_group(coordinator, num_processes, process, runtime.Deadlines())
  runners = ['pmap', 'shard_map'] if num_processes == 1 else ['shard_map']

  def measure(size: int, num_rounds: int) -> Answer:
    num_calls = _BYTES_PER_ROUND // (size * num_devices)
    num_calls = min(_MAX_CALLS, max(1, num_calls))
    source = np.ones(size // 4 * jax.local_device_count(), np.float32)
    copy = functools.partial(np.copyto, np.empty_like(source), source)
    programs = {('', COPY): functools.partial(_time_calls, copy, num_calls)}
    for runner in runners:
      for rule, mix in _make_mixes(runner, num_devices, size).items():
        programs[runner, rule] = functools.partial(_time_calls, mix, num_calls)
    seconds = measuring.run_in_turns(programs, num_rounds, _NUM_WARM_UP)
    rows = [(*name, found) for name, found in seconds.items()]
    return {'rows': rows}

  return measure


def _time_calls(call: Callable[[], None], num_calls: int) -> float:
  """Seconds per call."""
  begin = time.perf_counter()
  for _ in range(num_calls):
    call()
  return (time.perf_counter() - begin) / num_calls


def _make_mixes(
  runner: str, num_devices: int, size: int
) -> dict[str, Callable[[], None]]:
  """Mixes under all rules; all of them change the same, donated, values."""
  key = jax.random.key(0)
  mesh = jax.make_mesh(
    (num_devices,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  nodes, replicated = jax.P('nodes'), jax.P()

  def compile_mix(strategy: gossip.PeerStrategy) -> Callable[[Any, int], Any]:
    def mix(x: Any, step: Any) -> Any:
      # Only random peers are drawn with the key.
      return gossip.mix(x, 'nodes', strategy, step=step, key=key)

    if runner == 'pmap':
      return jax.pmap(mix, 'nodes', in_axes=(0, None), donate_argnums=0)
    specs = {'in_specs': (nodes, replicated), 'out_specs': nodes}
    mapped = jax.shard_map(mix, mesh=mesh, check_vma=False, **specs)
    return jax.jit(mapped, donate_argnums=0)

  if runner == 'pmap':
    make_ones = jax.pmap(lambda _: jnp.ones(size // 4))
    values = make_ones(np.zeros(num_devices))
  else:
    values = jax.make_array_from_callback(
      (num_devices, size // 4),
      jax.sharding.NamedSharding(mesh, nodes),
      lambda _: np.ones((1, size // 4), np.float32),
    )
  step = 0

  def call(program: Callable[[Any, int], Any]) -> None:
    nonlocal values, step
    step += 1
    values = jax.block_until_ready(program(values, step))

  return {
    rule: functools.partial(call, compile_mix(strategy))
    for rule, strategy in make_rules(num_devices).items()
  }


# Nodes: processes that pull from each other over a wire.


def join_nodes(
  node: int, num_nodes: int, folder: str
) -> Callable[[str, int, int], Answer]:
  """Makes this process a real node, whose gradients take no time.

  Args:
    node: The number of this node.
    num_nodes: Number of nodes.
    folder: Folder for the files of all runs.

  Returns:
    A function of a wire, the bytes of the weights and the number of steps,
    which does the node's part of a run. The seconds of its mixes are in the
    trace; it answers with `copy_seconds`: times of copies of as many bytes.
  """
  runtime.compute_in_place()

  def run(wire: str, size: int, num_steps: int) -> Answer:
    zeros = jnp.zeros(size // 4)
    task = tasks.Task(
      name='mixing',
      batch=1,
      num_samples=1,
      init=lambda key: (zeros, {}),
      loss=lambda params, stats, batch, key: (params[0], stats),
      metrics=lambda params, stats, batch: {'loss': params[0]},
      batches=lambda data, seed, learner, step: data,
      data=jnp.zeros(1),
    )
    settings = runtime.NodeSettings(
      task=task,
      optimizer=optax.sgd(0.0),
      strategy=gossip.Pull(),
      num_nodes=num_nodes,
      num_steps=num_steps,
      checkpoint_seconds=3600.0,
    )
    workdir = workdirs.Workdir(f'{folder}/{wire}-{size}')
    runtime.Peer(
      settings,
      workdir,
      runtime.Registry(workdir, wire=wire),
      runtime.BindAddress(wires=(wire,)),
      node=node,
      linger=0.0,
    ).run()
    source = np.ones(size // 4, np.float32)
    copy = functools.partial(np.copyto, np.empty_like(source), source)
    seconds = [_time_calls(copy, 1) for _ in range(1 + _NUM_COPIES)]
    return {'copy_seconds': seconds[1:]}  # The first touches fresh memory.

  return run


def read_pull_seconds(folder: str, wire: str, size: int) -> list[float]:
  """Seconds of the mixes of all nodes, each until its weights were mixed."""
  workdir = workdirs.Workdir(f'{folder}/{wire}-{size}')
  trace = traces.Trace.load(workdir.trace)
  mixes = trace.mixes[trace.mixes['group'] > _NUM_WARM_UP]
  return (mixes['end_time'] - mixes['start_time']).tolist()


# Simulated nodes, and plain steps.


def make_simulations() -> Callable[[str, int, int, str], Answer]:
  """Prepares simulations on one core.

  Returns:
    A function of a task, a number of nodes, the steps of all nodes together and
    a program, which runs the program once. It answers with `seconds` of CPU
    time, which is the elapsed time if nothing else runs. Compiled programs are
    kept.
  """
  processes.pin(1)
  make_task = functools.cache(lambda name: _TASKS[name]())

  @functools.cache
  def make_program(
    task: str, num_nodes: int, num_steps: int, program: str
  ) -> Callable[[], float]:
    if program in (BARE_STEPS, BARE_LOOP):
      return _make_bare(make_task(task), num_steps, program == BARE_LOOP)
    # A node that is alone never pulls.
    alone = gossip.Pull(period=num_steps + 1)
    strategy = STRATEGIES.get(program, alone)
    return functools.partial(
      _simulate, make_task(task), strategy, num_nodes, num_steps
    )

  def run(task: str, num_nodes: int, num_steps: int, program: str) -> Answer:
    num_nodes = num_nodes if program in STRATEGIES else 1
    call = make_program(task, num_nodes, num_steps, program)
    begin = time.process_time()
    loss = call()
    seconds = time.process_time() - begin
    if not math.isfinite(loss):
      raise FloatingPointError(f'The loss must stay finite, got {loss}.')
    return {'seconds': seconds}

  return run


def _make_bare(
  task: tasks.Task, num_steps: int, is_loop: bool
) -> Callable[[], float]:
  """Momentum SGD in plain jax and optax, without our engine."""
  weights = task.init(tasks.fold_key(0, 0, 0))
  examples, key = task.data['examples'], tasks.fold_key(0, 0, 0)
  indices = np.random.default_rng(0).integers(
    task.num_samples, size=(num_steps, _BATCH), dtype=np.int32
  )
  differentiate = jax.value_and_grad(task.loss, has_aux=True)

  def step(carry: Any, rows: Any, examples: Any) -> tuple[Any, Any]:
    params, stats, state = carry
    batch = jax.tree.map(lambda leaf: leaf[rows], examples)
    (loss, stats), grads = differentiate(params, stats, batch, key)
    updates, state = _OPTIMIZER.update(grads, state, params)
    return (optax.apply_updates(params, updates), stats, state), loss

  def loop(carry: Any, indices: Any, examples: Any) -> tuple[Any, Any]:
    return lax.scan(
      lambda carry, rows: step(carry, rows, examples), carry, indices
    )

  program = jax.jit(loop if is_loop else step, donate_argnums=0)

  def run() -> float:
    params, stats = jax.tree.map(jnp.copy, weights)
    carry, loss = (params, stats, _OPTIMIZER.init(params)), jnp.zeros(())
    for rows in [indices] if is_loop else indices:
      carry, loss = program(carry, rows, examples)
    jax.block_until_ready(carry)
    return float(loss.ravel()[-1])

  return run


def _simulate(
  task: tasks.Task,
  strategy: gossip.PeerStrategy,
  num_nodes: int,
  num_steps: int,
) -> float:
  """Simulates nodes, and replays the trace; returns the last loss."""
  trace = simulation.simulate(
    strategy,
    num_workers=num_nodes,
    num_gradients=num_steps,
    compute=simulation.normal(1.0, 0.2),
  )
  plan = engine.make_plan(trace, num_samples=task.num_samples, batch=_BATCH)
  weights = task.init(tasks.fold_key(0, 0, 0))
  replay = engine.Replay(
    task, _OPTIMIZER, plan, chunk=plan.num_updates, init=weights
  )
  losses = replay.advance()['loss']
  jax.block_until_ready(replay.carry)
  return float(losses[-1])


ROLES: dict[str, Callable[..., Callable[..., Answer]]] = {
  'devices': join_devices,
  'nodes': join_nodes,
  'simulations': make_simulations,
}


def main(role: str, job: str) -> None:
  """Answers each line, until there are no more."""
  answers = processes.Answers()
  answer = ROLES[role](**json.loads(job))
  for line in sys.stdin:
    answers.send(answer(*json.loads(line)))


if __name__ == '__main__':
  main(*sys.argv[1:])
