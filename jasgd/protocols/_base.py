"""What every protocol has in common: who is there, and the clock."""

import enum
import numbers
import operator
from typing import Any, NamedTuple, NoReturn


class Fate(enum.IntEnum):
  """What became of a gradient. The numbers are those in a trace's file."""

  APPLIED = 0
  PENDING = 1  # In the sum of an update that was not made (yet).
  DROPPED_LATE = 2  # Came after its update was made without it.
  DROPPED_STALE = 3  # Was computed on weights that are too old.
  LOST_HISTORY = 4  # Was computed on weights that were lost with a server.
  DROPPED_GONE = 5  # Arrived when its learner was gone.
  AFTER_END = 6  # Arrived when the run was over.
  NOT_FINITE = 7  # Was not a number; its learner said so, and did not send it.

  @property
  def is_dropped(self) -> bool:
    """Whether it is in no update and never will be."""
    return self > Fate.PENDING


class Decision(NamedTuple):
  """What the server does after an event."""

  fate: Fate | None  # Of the gradient that came; None if none came.
  updates: bool  # Whether the server updates the weights now.
  released: tuple[int, ...]  # Learners that go on, in this order.


class Protocol:
  """When the server updates, and who waits: a state machine without weights.

  A protocol is driven by events, one at a time: `on_push`, `on_join`,
  `on_leave`. It answers each with a `Decision`. The simulator and a real server
  drive the same object. It is deterministic, takes O(log N) per event, and its
  state can be saved as JSON at any time.

  A gradient counts for the update that comes next, so its fate is `APPLIED`
  when the protocol takes it, even if the update waits for others.

  Attributes:
    clock: Number of updates made.
    alive: The learners that have joined and not left.
  """

  # How it is called in `jasgd.protocols`.
  name: str = ''
  # Steps that a learner computes before it pushes, and before it pulls again.
  steps_per_push: int = 1
  steps_per_fetch: int = 1
  # Whether a learner may have to wait after its push.
  holds_learners: bool = True
  # Whether each gradient that counts is an update of its own.
  updates_each: bool = False
  # Whether only gradients of the current clock count, and whether it stands for
  # learners that all take the same, constant time.
  needs_current_clock: bool = False
  needs_equal_times: bool = False

  def __init__(self) -> None:
    self.clock = 0
    self.alive: set[int] = set()

  # --- What a subclass says.

  def describe(self) -> str:
    """Who waits for what, in words."""
    raise NotImplementedError

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this many learners could never make an update."""
    if num_learners < 1:
      raise ValueError(f'num_learners must be at least 1, got {num_learners}.')

  def _arguments(self) -> dict[str, Any]:
    """What it was built with, by name."""
    return {}

  def _push(self, learner: int, read_clock: int) -> Decision:
    """Handles a gradient; the base class counts the update, if there is one."""
    raise NotImplementedError

  def _change(self) -> Decision:
    """Handles that `alive` has changed: a quorum may be met now."""
    return Decision(None, False, ())

  def _join(self, learner: int) -> None:
    """Keeps the books of a learner that has joined."""

  def _leave(self, learner: int) -> None:
    """Closes the books of a learner that has left."""

  def _save(self) -> dict[str, Any]:
    """The subclass's own state, as JSON can hold it."""
    return {}

  def _restore(self, state: dict[str, Any]) -> None:
    """The inverse of `_save`."""

  # --- What its users call.

  @property
  def inside(self) -> set[int]:
    """Those of `alive` that may compute, as far as nobody holds them back."""
    return self.alive

  def init(self, num_learners: int) -> None:
    """Starts anew, with the learners 0 to num_learners - 1."""
    self.start(num_learners)
    for learner in range(num_learners):
      self.on_join(learner)

  def start(self, num_learners: int) -> None:
    """Starts anew; so many learners are expected, and nobody has joined."""
    self.check(num_learners)
    self.restore(self._start())

  def on_push(self, learner: int, step: int, read_clock: int) -> Decision:
    """A gradient came, the learner's `step`-th, computed at `read_clock`."""
    if learner not in self.alive:
      raise ValueError(
        f'Learner {learner} pushed step {step} and is not there: join first.'
      )
    if not 0 <= read_clock <= self.clock:
      raise ValueError(
        f'Learner {learner} pushed step {step} of read_clock={read_clock}; it '
        f'must be from 0 to the clock, {self.clock}.'
      )
    decision = self._push(learner, read_clock)
    if decision.updates:
      self.clock += 1
    return decision

  def on_join(self, learner: int) -> Decision:
    """A learner came; it is among those released once it may start."""
    if learner in self.alive:
      raise ValueError(f'Learner {learner} has joined already.')
    self.alive.add(learner)
    self._join(learner)
    return Decision(None, False, (learner,))

  def on_leave(self, learner: int) -> Decision:
    """A learner finished or was lost; the others must not wait for it."""
    if learner not in self.alive:
      raise ValueError(f'Learner {learner} left and was not there.')
    self.alive.remove(learner)
    self._leave(learner)
    decision = self._change()
    if decision.updates:
      self.clock += 1
    return decision

  def save(self) -> dict[str, Any]:
    """The whole state, as JSON can hold it."""
    return {
      'protocol': repr(self),
      'clock': self.clock,
      'alive': sorted(self.alive),
      **self._save(),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Goes on from a state that `save` of an equal protocol gave."""
    missing = sorted(self.save().keys() - state.keys())
    if missing:
      raise ValueError(
        f'This is no state of {self!r}: it has no {", ".join(missing)}.'
      )
    if state['protocol'] != repr(self):
      raise ValueError(
        f'The state is of {state["protocol"]}, and cannot be restored into '
        f'{self!r}.'
      )
    self.clock = state['clock']
    self.alive = set(state['alive'])
    self._restore(state)

  def __repr__(self) -> str:
    arguments = ', '.join(
      f'{name}={value!r}' for name, value in self._arguments().items()
    )
    return f'{self.name or type(self).__name__}({arguments})'

  def _fresh(self) -> dict[str, Any]:
    """What `_save` gives before anything has happened."""
    return {}

  def _start(self) -> dict[str, Any]:
    """What `save` gives before anything has happened."""
    return {'protocol': repr(self), 'clock': 0, 'alive': [], **self._fresh()}


def refuse_held(learner: int) -> NoReturn:
  """Raises the ValueError for a push of a learner that should be waiting."""
  raise ValueError(
    f'Learner {learner} pushed, but is held back: it must wait until it is '
    'released.'
  )


def check_count(name: str, value: Any, minimum: int) -> int:
  """A whole number >= `minimum` as an int, or a ValueError that says so."""
  try:
    # A bool has an index too, but whoever gives one means something else.
    count = None if isinstance(value, bool) else operator.index(value)
  except TypeError:
    count = None
  if count is None or count < minimum:
    raise ValueError(
      f'{name} must be a whole number of at least {minimum}, got {value!r}.'
    )
  return count


def check_number(name: str, value: Any) -> float:
  """A real number as a float, or a ValueError that says so."""
  if isinstance(value, bool) or not isinstance(value, numbers.Real):
    raise ValueError(f'{name} must be a number, got {value!r}.')
  return float(value)
