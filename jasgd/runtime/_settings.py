"""Settings of a server and of nodes, and the fingerprint of a run."""

from collections.abc import Callable
import dataclasses
import hashlib
import json
import math
import time
from typing import Any

import jax

from jasgd import engine
from jasgd import gossip
from jasgd import protocols
from jasgd import tasks

ON_LEARNER_LOST = ('continue', 'fail')
# An adaptive deadline is the longest recent time, multiplied by the factor.
# Each shorter time multiplies the longest one by the decay.
_ADAPTIVE_FACTOR, _DECAY = 10.0, 0.98


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
  """Deadlines, in seconds.

  Attributes:
    start: Wait for all workers to join; then those present begin.
    silence: Wait for any sign of life from the other side, WAITs included. A
      server sends four WAITs within it.
    step: Wait for the gradient of a learner that others wait for; of nodes, for
      the answer of a peer. 0: adaptive, ten times the longest recent time; for
      learners, `first_step` until a time was measured.
    first_step: Wait as in `step`, while a worker may still be compiling.
    rejoin: Wait for learners to come back after the server's restart, or for
      the centre after its own.
    end: Wait for the last messages of clients, once the run is over.
  """

  start: float = 120.0
  silence: float = 60.0
  step: float = 0.0
  first_step: float = 300.0
  rejoin: float = 60.0
  end: float = 20.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      minimum = 0 if field.name == 'step' else 1e-3
      if not minimum <= value < math.inf:
        raise ValueError(
          f'The deadline {field.name} must be finite and at least {minimum} '
          f'seconds, got {value}.'
        )

  def find_step(self, longest: float, minimum: float) -> float:
    """Seconds to wait for a gradient, or for an answer.

    Args:
      longest: Longest recent time, from `update_longest`.
      minimum: Least seconds of an adaptive deadline.

    Returns:
      The deadline `step`, or the adaptive one.
    """
    return self.step or max(_ADAPTIVE_FACTOR * longest, minimum)


def update_longest(longest: float, seconds: float) -> float:
  """The longest recent time: each new time makes earlier ones count less."""
  return max(seconds, _DECAY * longest)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServerSettings:
  """Settings of a server.

  Attributes:
    task: Task to learn.
    update: Update rule, from `engine.make_update`.
    protocol: Protocol; no other server may use the same object.
    num_learners: Number of learners that are expected.
    seed: Seed of the first weights and of every random draw of learners.
    init: First (params, stats); None: the task's own, from the seed.
    num_updates: Updates after which the run ends; None: no limit.
    num_epochs: Epochs after which the run ends; None: no limit.
    get_rate: Schedule, as in `engine.replay`; None: there is none.
    local_rate: Rate of learners' steps on their own replicas.
    wire_dtype: Dtype that float32 is rounded to in messages.
    overlap: Whether learners fetch while they compute.
    eval_every: Updates between lines of metrics, and between evaluations.
    checkpoint_seconds: Seconds between checkpoints.
    max_group: Gradients that one call may apply, at most.
    on_learner_lost: Reaction to a lost learner: 'continue', or 'fail' to end
      the run.
    deadlines: Deadlines.
    header: Further entries of the trace's header.
  """

  task: tasks.Task
  update: engine.Update
  protocol: protocols.Protocol
  num_learners: int
  seed: int = 0
  init: tuple[Any, Any] | None = None
  num_updates: int | None = None
  num_epochs: float | None = None
  get_rate: Callable[[float], float] | None = None
  local_rate: float = 1.0
  wire_dtype: str = 'float32'
  overlap: bool = False
  eval_every: int = 100
  checkpoint_seconds: float = 30.0
  max_group: int = 1
  on_learner_lost: str = 'continue'
  deadlines: Deadlines = Deadlines()
  header: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    self.protocol.check(self.num_learners)
    if self.num_updates is None and self.num_epochs is None:
      raise ValueError('Give num_updates or num_epochs: a run must end.')
    if self.num_updates is not None:
      protocols.check_count('num_updates', self.num_updates, 1)
    if self.num_epochs is not None and not 0 < self.num_epochs < math.inf:
      raise ValueError(
        f'num_epochs must be finite and above 0, got {self.num_epochs}.'
      )
    for name in ('eval_every', 'max_group'):
      protocols.check_count(name, getattr(self, name), 1)
    if self.on_learner_lost not in ON_LEARNER_LOST:
      raise ValueError(
        f'on_learner_lost must be one of {", ".join(ON_LEARNER_LOST)}, got '
        f'{self.on_learner_lost!r}.'
      )
    if self.overlap and self.protocol.needs_current_clock:
      raise ValueError(
        'With overlap a learner fetches before its push is applied, so none of '
        'its gradients would be of the current clock, which this protocol '
        f'requires: {self.protocol.describe()}'
      )
    if self.overlap and self.has_fetches:
      raise ValueError(
        'With overlap a learner fetches for each push; this protocol fetches '
        f'apart from pushes: {self.protocol.describe()}'
      )

  @property
  def has_fetches(self) -> bool:
    """Whether learners fetch apart from their pushes."""
    return self.protocol.steps_per_fetch != self.protocol.steps_per_push

  @property
  def samples_per_push(self) -> int:
    """Samples of a push: of one gradient, or of a sum of several."""
    return self.task.batch * self.protocol.steps_per_push

  @property
  def max_samples(self) -> float:
    """Samples of applied gradients after which the run ends."""
    if self.num_epochs is None:
      return math.inf
    return math.ceil(self.num_epochs * self.task.num_samples)

  def make_header(self, message_size: int) -> dict[str, Any]:
    """Header of the trace, with all data that replay and reports need.

    Args:
      message_size: Bytes of weights, or of a gradient, in a message.

    Returns:
      The header.
    """
    return {
      **self.header,
      'is_recorded': True,
      'strategy': self.protocol.to_config(),
      'description': self.protocol.describe(),
      'num_workers': self.num_learners,
      'num_present': 0,  # At the beginning: each join has a record.
      'overlap': self.overlap,
      'batch': self.task.batch,
      'steps_per_push': self.protocol.steps_per_push,
      'steps_per_fetch': self.protocol.steps_per_fetch,
      'bytes_per_push': message_size,
      'bytes_per_pull': message_size,
      'wire_dtype': self.wire_dtype,
    }

  def describe_run(self, learner: int, num_computed: int) -> dict[str, Any]:
    """Settings that the first answer to a learner carries.

    Args:
      learner: Number of the learner.
      num_computed: Minibatches that it has computed.

    Returns:
      The settings, JSON-serialisable.
    """
    return {
      'learner': learner,
      'seed': self.seed,
      'steps_per_push': self.protocol.steps_per_push,
      'steps_per_fetch': self.protocol.steps_per_fetch,
      'num_computed': num_computed,
      'local_rate': self.local_rate,
      'overlap': self.overlap,
      'silence': self.deadlines.silence,
    }


def make_fingerprint(
  task: tasks.Task, layout: engine.Layout, seed: int, more: str = ''
) -> str:
  """Makes the fingerprint by which processes of one run recognise each other.

  Args:
    task: Task to learn.
    layout: Layout of its weights in messages.
    seed: Seed of the run.
    more: Text of all other settings that must be equal.

  Returns:
    A 16-digit hash: equal for equal arguments.
  """
  text = f'{task.name} {task.batch} {task.num_samples} {seed}{more}'
  digest = hashlib.sha256(f'{text} {layout.fingerprint}'.encode()).hexdigest()
  return digest[:16]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class NodeSettings:
  """Settings of a node, or of the centre.

  Attributes:
    task: Task to learn.
    optimizer: Optimizer of each node: an optax transformation.
    strategy: Peer strategy.
    num_nodes: Number of nodes that are expected.
    num_steps: Steps that each node makes.
    seed: Seed of the first weights and of every random draw of nodes.
    init: First (params, stats); None: the task's own, from the seed.
    get_rate: Schedule, as in `engine.replay`; None: there is none.
    wire_dtype: Dtype that float32 is rounded to in messages.
    checkpoint_seconds: Seconds between checkpoints.
    min_seconds: Least seconds of a step, by the node's number; the last entry
      is for all further nodes. (): no limit.
    deadlines: Deadlines.
    origin: Unix time at which the run began.
    header: Further entries of the traces' headers.
  """

  task: tasks.Task
  optimizer: Any
  strategy: gossip.PeerStrategy
  num_nodes: int
  num_steps: int
  seed: int = 0
  init: tuple[Any, Any] | None = None
  get_rate: Callable[[float], float] | None = None
  wire_dtype: str = 'float32'
  checkpoint_seconds: float = 30.0
  min_seconds: tuple[float, ...] = ()
  deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
  origin: float = 0.0
  header: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    if self.strategy.refusal_of_processes:
      raise ValueError(self.strategy.refusal_of_processes)
    if self.task.is_streamed:
      raise ValueError(
        f'The task {self.task.name!r} is streamed; nodes need data in memory.'
      )

  @property
  def fingerprint_text(self) -> str:
    """Strategy, optimizer and schedule, as text: equal for all nodes."""
    config = self.header.get('config', {})
    chosen = {name: config.get(name) for name in ('optimizer', 'schedule')}
    chosen['strategy'] = self.strategy.identify()
    return f' {self.num_nodes} {json.dumps(chosen, sort_keys=True)}'

  @property
  def averages(self) -> str:
    """Whether nodes average 'gradients' or 'weights'."""
    return 'gradients' if self.strategy.averages_gradients else 'weights'

  def make_weights(self) -> tuple[Any, Any]:
    """First (params, stats)."""
    if self.init is not None:
      return self.init
    return self.task.init(jax.random.key(self.seed, impl='threefry2x32'))

  def make_layout(self) -> engine.Layout:
    """Layout of weights in messages."""
    shapes = jax.eval_shape(
      self.task.init, jax.random.key(self.seed, impl='threefry2x32')
    )
    return engine.make_layout(shapes, self.wire_dtype)

  def sleep_until_min_seconds(self, node: int, begin: float) -> None:
    """Sleeps until a step has taken its least time.

    Args:
      node: Number of the node.
      begin: `time.perf_counter()` at the beginning of the step.
    """
    if self.min_seconds:
      least = self.min_seconds[min(node, len(self.min_seconds) - 1)]
      time.sleep(max(0.0, least - (time.perf_counter() - begin)))

  def find_rate(self, step: int) -> float | None:
    """Factor of the schedule for a node's step.

    A node does not know how far the others are; it assumes that they have made
    as many steps as itself.

    Args:
      step: Number of steps that the node has made.

    Returns:
      The factor; None if there is no schedule.
    """
    if self.get_rate is None:
      return None
    epochs = engine.count_epochs(
      step,
      num_nodes=self.num_nodes,
      batch=self.task.batch,
      num_samples=self.task.num_samples,
    )
    return self.get_rate(epochs)
