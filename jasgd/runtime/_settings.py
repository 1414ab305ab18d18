"""What a server is told."""

from collections.abc import Callable
import dataclasses
import hashlib
import math
from typing import Any

from jasgd import engine
from jasgd import protocols
from jasgd import tasks

ON_LEARNER_LOST = ('continue', 'fail')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deadlines:
  """How long to wait, in seconds.

  Attributes:
    start: For all learners to come, before those who are there begin.
    silence: For any sign of life from the other side, WAITs included. A server
      says WAIT four times within it.
    step: For the gradient of a learner that others wait for. 0: ten times the
      longest that any learner has taken, or `first_step` before that is known.
    first_step: As `step`, while a learner may still be compiling.
    rejoin: For learners to come back after the server has.
    end: For learners' last messages, once the run is over; and for those who
      watch the nodes of a cluster.
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


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ServerSettings:
  """All that a server needs to know.

  Attributes:
    task: What is learned.
    update: What `engine.make_update` gave.
    protocol: When to update. It belongs to the server from now on.
    num_learners: How many are expected.
    seed: Of the first weights and of everything that learners draw.
    init: The first (params, stats); None: the task's own, from the seed.
    num_updates: When to end; None: never for that reason.
    num_epochs: When to end; None: never for that reason.
    get_rate: The schedule, as in `engine.replay`; None: there is none.
    local_rate: At which learners step on their own copies.
    wire_dtype: What float32 is rounded to in messages.
    overlap: Whether learners fetch while they compute.
    eval_every: Updates between lines of metrics, and evaluations.
    checkpoint_seconds: Between checkpoints.
    max_group: The most gradients to apply by one call.
    on_learner_lost: Whether to continue or to fail.
    deadlines: How long to wait.
    header: What else goes into the header of the trace.
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
        f'wants: {self.protocol.describe()}'
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
    """Of a gradient, or of the several that are pushed as one."""
    return self.task.batch * self.protocol.steps_per_push

  @property
  def max_samples(self) -> float:
    """Of applied gradients, when the run ends."""
    if self.num_epochs is None:
      return math.inf
    return math.ceil(self.num_epochs * self.task.num_samples)


def make_fingerprint(
  task: tasks.Task, layout: engine.Layout, seed: int, way: str = ''
) -> str:
  """A text by which a server knows that a learner learns the same.

  Args:
    task: What is learned.
    layout: Of its weights, as they travel.
    seed: Of its minibatches.
    way: What else must be the same.

  Returns:
    The same for the same; else, almost surely, another.
  """
  text = f'{task.name} {task.batch} {task.num_samples} {seed}{way}'
  digest = hashlib.sha256(f'{text} {layout.fingerprint}'.encode()).hexdigest()
  return digest[:16]
