"""The config of a training run of nodes without a server."""

import dataclasses
import math
from typing import Any

import jax
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.experiment import _base
from jasgd.experiment import _parts


@dataclasses.dataclass(kw_only=True)
class NodeTrainingConfig(_base.RunConfig):
  """A training run of nodes that step on their own, and average."""

  strategy: _parts.StrategyConfig = dataclasses.field(
    default_factory=_parts.StrategyConfig
  )

  def describe(self) -> str:
    """Who waits for what, and where, in words."""
    if self.runtime.mode != 'devices':
      return super().describe()
    num_nodes = self.strategy.num_nodes
    runner = self.runtime.choose_runner(num_nodes)
    where = 'one device' if runner == 'vmap' else 'a device each'
    return (
      f'{super().describe()} On devices all {num_nodes} nodes step together: '
      f'on {where} ({runner}), of {jax.local_device_count()} here.'
    )

  def count_learners(self) -> int:
    """How many nodes there are."""
    return self.strategy.num_nodes

  def count_steps(self) -> int:
    """How many steps each node makes."""
    num_nodes = protocols.check_count('num_nodes', self.strategy.num_nodes, 1)
    per_step = self.task.batch * num_nodes
    num_samples = self.num_epochs * self.make_task().num_samples
    return math.ceil(num_samples / per_step)

  def make_strategy(self) -> gossip.PeerStrategy:
    """How the nodes average."""
    return self.strategy.make(self.seed)

  def make_optimizer(self) -> optax.GradientTransformation:
    """What each node does with its gradients, at rate 1."""
    return self.optimizer.make_optimizer()

  def simulate(self) -> traces.NodeTrace:
    """The trace of the whole run in virtual time."""
    trace = simulation.simulate_nodes(**self._simulation())
    # What is mixed in is rounded as in a real run.
    header = {**trace.header, 'wire_dtype': self.runtime.wire_dtype}
    return dataclasses.replace(trace, header=header)

  def make_plan(self, trace: traces.NodeTrace) -> engine.Plan:
    """What the trace wants to be computed, with the rate of each step."""
    task = self.make_task()
    return engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=self.make_schedule(),
    )

  def choose_devices(self) -> dict[str, Any]:
    """How nodes are run on devices, for `make_device_program`."""
    num_nodes, dtype = self.strategy.num_nodes, self.runtime.wire_dtype
    return {
      'num_nodes': num_nodes,
      'runner': self.runtime.choose_runner(num_nodes),
      # What is not to be rounded is sent as it is.
      'dtype': None if dtype == 'float32' else dtype,
    }

  def choose_eval_every(self) -> int:
    """Steps of all nodes between evaluations: an epoch, if nobody says."""
    if self.runtime.eval_every:
      return self.runtime.eval_every
    num_steps = self.count_steps() * self.strategy.num_nodes
    return max(1, round(num_steps / max(1.0, self.num_epochs)))

  def _make_way(self) -> gossip.PeerStrategy:
    return self.make_strategy()

  def _check_way(self) -> None:
    arguments = self._simulation()
    if self.runtime.is_real:  # Its times and failures are its own.
      arguments |= {'compute': simulation.constant(), 'failures': ()}
    simulation.check_nodes(**arguments)
    if self.runtime.mode == 'devices':
      engine.check_devices(arguments['strategy'], **self.choose_devices())

  def _check_task(self) -> None:
    task = self.make_task()
    if task.is_streamed:
      raise ValueError(
        f'The task {task.name!r} is streamed, and nodes need its data: set '
        "task.augment='none'."
      )

  def _count_gradients_per_update(self) -> int:
    """Of all nodes if their gradients are averaged; else each has its own."""
    is_mean = self.strategy.name == 'allreduce' and self.strategy.period == 1
    return self.strategy.num_nodes if is_mean else 1

  def _simulation(self) -> dict[str, Any]:
    """What `simulate_nodes` is to be called with."""
    return {
      'strategy': self.make_strategy(),
      'num_nodes': self.strategy.num_nodes,
      'num_steps': self.count_steps(),
      'compute': self.time.make(),
      'network': self._make_network(),
      'failures': self.failures.make(self.strategy.num_nodes, self.seed),
      'seed': self.seed,
    }

  def _list_rules(self) -> dict[str, bool]:
    optimizer, name = self.optimizer, self.strategy.name
    runtime = self.runtime
    return super()._list_rules() | {
      'Nodes step on their own gradients, which are not stale: '
      f'optimizer.policy must be constant, got {optimizer.policy!r}.': (
        optimizer.policy == 'constant'
      ),
      'Nodes step on their own gradients, which are not stale: '
      f'optimizer.correction must be none, got {optimizer.correction!r}.': (
        optimizer.correction == 'none'
      ),
      'A gradient of a node is an update: use optimizer.clip_update, got '
      f'optimizer.clip_gradient={optimizer.clip_gradient}.': (
        not optimizer.clip_gradient
      ),
      'Nodes do not pull while they push: runtime.overlap must be False.': (
        not runtime.overlap
      ),
      'Processes that wait for nobody make no pairs: strategy.name=pairs is '
      f'for runtime.mode simulate or devices, got {runtime.mode!r}.': (
        name != 'pairs' or not runtime.is_real
      ),
      'An all-reduce sends what it sums as it is, but on devices: '
      f'runtime.wire_dtype must be float32, got {runtime.wire_dtype!r}.': (
        name != 'allreduce'
        or runtime.wire_dtype == 'float32'
        or runtime.mode == 'devices'
      ),
    }
