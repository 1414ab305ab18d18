"""One process of the suite `gossip`: mixes, all-reduces and copies, timed.

  python -m launch.benchmarks.gossip_worker JOB

JOB is JSON: `num_devices`, `sizes` (bytes of a node), `runners`, `num_rounds`;
with several processes also `coordinator`, `num_processes` and `process`. The
last line that the first process prints is JSON: a list of rows.
"""

import json
import os
import sys
import time
from typing import Any


def _start(job: dict[str, Any]) -> None:
  """Makes the devices; before jax is imported."""
  count = job['num_devices'] // job.get('num_processes', 1)
  os.environ['XLA_FLAGS'] = f'--xla_force_host_platform_device_count={count}'
  import jax

  if 'coordinator' in job:
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      job['coordinator'], job['num_processes'], job['process']
    )


def _make_rules(num_devices: int) -> dict[str, Any]:
  """What is timed: the all-reduce first, for ratios."""
  from jasgd import gossip

  return {
    'all-reduce': gossip.AllReduce(),
    'ring': gossip.Pull(peers=gossip.ring(num_devices)),
    'permutation': gossip.Pull(peers='permutation'),
    'matching': gossip.Pairs(peers='matching'),
    'independent': gossip.Pull(peers='independent'),
  }


def _make_runner(runner: str, strategy: Any, num_devices: int) -> Any:
  """A compiled `(x, step) -> x` over all devices, x donated."""
  import jax

  from jasgd import gossip

  key = jax.random.key(0)
  has_key = isinstance(getattr(strategy, 'peers', None), str)

  def mix(x: Any, step: Any) -> Any:
    return gossip.mix(
      x, 'nodes', strategy, step=step, key=key if has_key else None
    )

  if runner == 'pmap':
    return jax.pmap(mix, axis_name='nodes', in_axes=(0, None), donate_argnums=0)
  mesh = jax.make_mesh(
    (num_devices,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  nodes, nobody = jax.P('nodes'), jax.P()
  return jax.jit(
    jax.shard_map(
      mix,
      mesh=mesh,
      in_specs=(nodes, nobody),
      out_specs=nodes,
      check_vma=False,
    ),
    donate_argnums=0,
  )


def _make_values(runner: str, num_devices: int, size: int) -> Any:
  """A row of float32 for each device, on that device."""
  import jax
  import numpy as np

  shape = (num_devices, size // 4)
  if runner == 'pmap':
    return jax.pmap(lambda _: jax.numpy.ones(size // 4))(
      np.zeros(jax.local_device_count())
    )
  mesh = jax.make_mesh(
    (num_devices,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )
  sharding = jax.sharding.NamedSharding(mesh, jax.P('nodes'))
  return jax.make_array_from_callback(
    shape,
    sharding,
    lambda _: np.ones((1, size // 4), np.float32),
  )


def _measure(job: dict[str, Any], size: int) -> list[dict[str, Any]]:
  """The best seconds of each rule and runner, and of a copy, in turns."""
  import jax
  import numpy as np

  count = job['num_devices']
  programs = {}
  for runner in job['runners']:
    for rule, strategy in _make_rules(count).items():
      programs[runner, rule] = [
        _make_runner(runner, strategy, count),
        _make_values(runner, count, size),
      ]
  best = dict.fromkeys(programs, float('inf'))
  source = np.ones(size // 4 * count, np.float32)
  target = np.empty_like(source)
  copy_seconds = float('inf')
  for turn in range(job['num_rounds'] + 2):  # The first ones compile.
    for name, program in programs.items():
      function, values = program
      begin = time.perf_counter()
      values = jax.block_until_ready(function(values, turn + 1))
      seconds = time.perf_counter() - begin
      program[1] = values
      if turn >= 2:
        best[name] = min(best[name], seconds)
    begin = time.perf_counter()
    np.copyto(target, source)
    copy_seconds = min(copy_seconds, time.perf_counter() - begin)
  return [
    {
      'runner': runner,
      'rule': rule,
      'size': size,
      'seconds': seconds,
      'copy_seconds': copy_seconds,
    }
    for (runner, rule), seconds in best.items()
  ]


def main() -> None:
  """Does the job."""
  job = json.loads(sys.argv[1])
  _start(job)
  rows = []
  for size in job['sizes']:
    rows += _measure(job, size)
  if not job.get('process'):
    print(json.dumps(rows), flush=True)


if __name__ == '__main__':
  main()
