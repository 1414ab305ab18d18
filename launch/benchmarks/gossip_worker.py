"""One process of the suite `gossip`: mixes, all-reduces and copies, timed.

  python -m launch.benchmarks.gossip_worker JOB

JOB is JSON: `num_devices`, `runners`, `cases` ([bytes of a node, number of
rounds] each) and `process`; with several processes also `coordinator` and
`num_processes`. The parent sets the variables that make the devices. For each
line on its stdin the first process does the next case, with all others, and
answers with JSON: `rows`, each with `runner`, `rule`, `size` and the `seconds`
of each round.
"""

from collections.abc import Callable
import json
import sys
import time
from typing import Any

import jax
import numpy as np

from jasgd import gossip
from jasgd import runtime
from launch.benchmarks import gossip_answers

ALL_REDUCE = 'all-reduce'
COPY = 'copy'  # A rule without a runner: what all devices hold, in memory.

# So small sizes are mixed several times per round.
_BYTES_PER_TURN = 16 << 20
_MAX_CALLS = 8
_NUM_WARM_UP = 2  # Rounds: calls of a program are slow at first.


def make_rules(num_devices: int) -> dict[str, gossip.PeerStrategy]:
  """What is timed: the all-reduce first, for ratios; and no other one.

  On a ring of two or three equal weights would be an all-reduce, and so are
  pairs of two nodes, which are left out.
  """
  ring = gossip.with_constant_weights(gossip.ring(num_devices), 0.3)
  rules: dict[str, gossip.PeerStrategy] = {
    ALL_REDUCE: gossip.AllReduce(),
    'ring': gossip.Pull(peers=ring),
    'permutation': gossip.Pull(peers='permutation'),
    'independent': gossip.Pull(peers='independent'),
  }
  if num_devices > 2:
    rules['pairs'] = gossip.Pairs(peers='matching')
  return rules


def _make_mesh(num_devices: int) -> jax.sharding.Mesh:
  return jax.make_mesh(
    (num_devices,), ('nodes',), axis_types=(jax.sharding.AxisType.Auto,)
  )


def _make_runner(
  runner: str, strategy: gossip.PeerStrategy, num_devices: int
) -> Callable[[Any, int], Any]:
  """A compiled `(x, step) -> x` over all devices, x donated."""
  key = jax.random.key(0)
  has_key = isinstance(getattr(strategy, 'peers', None), str)

  def mix(x: Any, step: Any) -> Any:
    return gossip.mix(
      x, 'nodes', strategy, step=step, key=key if has_key else None
    )

  if runner == 'pmap':
    return jax.pmap(mix, axis_name='nodes', in_axes=(0, None), donate_argnums=0)
  nodes, nobody = jax.P('nodes'), jax.P()
  return jax.jit(
    jax.shard_map(
      mix,
      mesh=_make_mesh(num_devices),
      in_specs=(nodes, nobody),
      out_specs=nodes,
      check_vma=False,
    ),
    donate_argnums=0,
  )


def _make_values(runner: str, num_devices: int, size: int) -> Any:
  """A row of float32 for each device, on that device."""
  if runner == 'pmap':
    return jax.pmap(lambda _: jax.numpy.ones(size // 4))(
      np.zeros(jax.local_device_count())
    )
  sharding = jax.sharding.NamedSharding(_make_mesh(num_devices), jax.P('nodes'))
  return jax.make_array_from_callback(
    (num_devices, size // 4),
    sharding,
    lambda _: np.ones((1, size // 4), np.float32),
  )


class _Copy:
  """Copies as many bytes as this process's devices hold."""

  def __init__(self, size: int) -> None:
    self._source = np.ones(size // 4 * jax.local_device_count(), np.float32)
    self._target = np.empty_like(self._source)

  def __call__(self) -> None:
    np.copyto(self._target, self._source)


class _Mixes:
  """All rules of a runner, which hand the same values on to each other."""

  def __init__(self, runner: str, num_devices: int, size: int) -> None:
    self._values = _make_values(runner, num_devices, size)
    self._programs = {
      rule: _make_runner(runner, strategy, num_devices)
      for rule, strategy in make_rules(num_devices).items()
    }
    self._step = 0

  def call(self, rule: str) -> None:
    """One mix, to its end."""
    self._step += 1
    self._values = jax.block_until_ready(
      self._programs[rule](self._values, self._step)
    )


def measure(
  num_devices: int, runners: list[str], size: int, num_rounds: int
) -> list[dict[str, Any]]:
  """Times each rule under each runner, and a copy, in turns.

  Args:
    num_devices: Of all processes together.
    runners: 'pmap', 'shard_map'.
    size: Bytes that each device holds.
    num_rounds: Turns for each.

  Returns:
    A row for each.
  """
  calls: dict[tuple[str, str], Callable[[], None]] = {('', COPY): _Copy(size)}
  for runner in runners:
    mixes = _Mixes(runner, num_devices, size)
    for rule in make_rules(num_devices):
      calls[runner, rule] = lambda mixes=mixes, rule=rule: mixes.call(rule)
  num_calls = min(_MAX_CALLS, max(1, _BYTES_PER_TURN // (size * num_devices)))
  seconds: dict[tuple[str, str], list[float]] = {name: [] for name in calls}
  for turn in range(_NUM_WARM_UP + num_rounds):
    for name, call in calls.items():
      begin = time.perf_counter()
      for _ in range(num_calls):
        call()
      if turn >= _NUM_WARM_UP:
        seconds[name].append((time.perf_counter() - begin) / num_calls)
  return [
    {'runner': runner, 'rule': rule, 'size': size, 'seconds': found}
    for (runner, rule), found in seconds.items()
  ]


def main() -> None:
  """Does the job."""
  job = json.loads(sys.argv[1])
  process, parent = job['process'], gossip_answers.Parent()
  if 'coordinator' in job:
    runtime.join_group(
      job['coordinator'], job['num_processes'], process, runtime.Deadlines()
    )
  for size, num_rounds in job['cases']:
    if not process and not parent.take():
      return  # The parent does not want to know any more.
    rows = measure(job['num_devices'], job['runners'], size, num_rounds)
    if not process:
      parent.answer({'rows': rows})


if __name__ == '__main__':
  main()
