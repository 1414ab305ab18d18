"""The config of a training run with a server, and what it stands for."""

import dataclasses
import math
from typing import Any

import numpy as np

from jasgd import engine
from jasgd import protocols
from jasgd import simulation
from jasgd import traces
from jasgd.experiment import _base
from jasgd.experiment import _parts


@dataclasses.dataclass(kw_only=True)
class TrainingConfig(_base.RunConfig):
  """A training run: what is learned, how, by whom, and for how long."""

  protocol: _parts.ProtocolConfig = dataclasses.field(
    default_factory=_parts.ProtocolConfig
  )
  # Updates at the most; 0: as many as the epochs take.
  num_updates: int = 0

  def count_learners(self) -> int:
    """How many learners there are."""
    return self.protocol.count_learners()

  def make_server(self) -> engine.Update:
    """The server's work on gradients, compiled."""
    return engine.make_update(
      self.optimizer.make_optimizer(), **self.make_update_options()
    )

  def make_update_options(self) -> dict[str, Any]:
    """The policy and the per-gradient transformation of the server."""
    return {
      'policy': self.optimizer.make_policy(),
      'per_gradient': self.optimizer.make_per_gradient(),
    }

  def simulate(self) -> traces.Trace:
    """The trace, which ends with the update that reaches the budget."""
    task = self.make_task()
    protocol = self.protocol.make()
    num_samples = math.ceil(self.num_epochs * task.num_samples)
    per_push = task.batch * protocol.steps_per_push
    num_gradients = -(-num_samples // per_push)
    if self.num_updates:
      per_update = count_gradients_per_update(
        protocol, self.protocol.count_learners()
      )
      num_gradients = min(num_gradients, self.num_updates * per_update)
    while True:
      trace = simulation.simulate(**self._simulation(num_gradients))
      end = self._find_end(trace, num_samples)
      if end is not None:
        return trace[:end]
      num_arrived = trace.num_gradients
      if num_arrived < num_gradients:
        raise ValueError(
          f'All learners were gone after {num_arrived} gradients, before the '
          f'{self.num_epochs} epochs were over.'
        )
      # Some were dropped, or are still to be applied.
      num_gradients += num_gradients // 2 + 2 * trace.header['num_learners']

  def make_plan(self, trace: traces.Trace) -> engine.Plan:
    """What the trace wants to be computed, with the rate of each update."""
    task = self.make_task()
    return engine.make_plan(
      trace,
      num_samples=task.num_samples,
      batch=task.batch,
      get_rate=self.make_schedule(),
    )

  def _find_end(self, trace: traces.Trace, num_samples: int) -> int | None:
    """The number of records up to the update that reaches the budget."""
    records = trace.records
    is_applied = (records['kind'] == traces.Kind.GRADIENT) & (
      records['fate'] == protocols.Fate.APPLIED
    )
    is_enough = is_applied & (records['samples'] >= num_samples)
    if self.num_updates:
      is_enough |= is_applied & (records['apply_clock'] >= self.num_updates - 1)
    if not np.any(is_enough):
      return None
    clock = records['apply_clock'][np.argmax(is_enough)]
    # The whole update, and what made it: somebody's leaving, maybe.
    is_later = records['arrive_clock'] > clock
    return int(np.argmax(is_later)) if np.any(is_later) else len(records)

  def _simulation(self, num_gradients: int) -> dict[str, Any]:
    """What `jasgd.simulate` is to be called with."""
    num_learners = self.protocol.count_learners()
    return {
      'protocol': self.protocol.make(),
      'num_learners': num_learners,
      'num_gradients': num_gradients,
      'compute': self.time.make(),
      'network': self._make_network(),
      'failures': self.failures.make(num_learners, self.seed),
      'overlap': self.runtime.overlap,
      'batch': self.task.batch,
      'seed': self.seed,
    }

  def _make_way(self) -> protocols.Protocol:
    return self.protocol.make()

  def _check_way(self) -> None:
    if self.runtime.is_real:
      self.protocol.make().check(self.count_learners())
    else:
      simulation.check_setup(**self._simulation(1))

  def _check_task(self) -> None:
    """Raises a ValueError if a constant delay has no room in memory."""
    if self.protocol.name == 'constant_delay':
      engine.check_memory(self.protocol.delay + 2, self.shape_weights())

  def _count_gradients_per_update(self) -> int:
    return count_gradients_per_update(
      self.protocol.make(), self.count_learners()
    )

  def _list_rules(self) -> dict[str, bool]:
    return super()._list_rules() | {
      f'num_updates must be at least 0, got {self.num_updates}.': (
        self.num_updates >= 0
      ),
      "runtime.mode 'devices' is for nodes without a server.": (
        self.runtime.mode != 'devices'
      ),
      'A constant_delay wants equal times: set time.name=constant and '
      f'time.arguments=(1.0,), got time.name={self.time.name!r}.': (
        self.protocol.name != 'constant_delay'
        or self.time.name == 'constant'
        or self.runtime.is_real
      ),
    }


def count_gradients_per_update(
  protocol: protocols.Protocol, num_learners: int
) -> int:
  """How many gradients an update takes while all learners are there."""
  if isinstance(protocol, protocols.ramp_up):
    protocol = protocol.protocol
  if isinstance(protocol, protocols.hardsync):  # And backup.
    return num_learners - protocol.num_backups
  if isinstance(protocol, protocols.softsync):
    return max(1, num_learners // protocol.n)
  if isinstance(protocol, protocols.rennala):
    return protocol.s
  return protocol.steps_per_push
