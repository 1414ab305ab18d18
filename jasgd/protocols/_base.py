"""Base class of every protocol: events, hooks, saved state."""

import enum
from typing import Any, ClassVar, NamedTuple, NoReturn

from jasgd.protocols import _configurable


class Fate(enum.IntEnum):
  """Outcome of a gradient. Trace files store these numbers."""

  APPLIED = 0
  PENDING = 1  # Taken for an update that is not made yet.
  DROPPED_LATE = 2  # Arrived after its update was made without it.
  DROPPED_STALE = 3  # Computed on weights that are too old.
  LOST_HISTORY = 4  # Computed on weights that a server's crash destroyed.
  DROPPED_GONE = 5  # Arrived after its learner had left.
  AFTER_END = 6  # Arrived after the end of the run.
  NOT_FINITE = 7  # Held NaN or infinity; the learner reported it, unsent.

  @property
  def is_dropped(self) -> bool:
    """Whether no update will ever use the gradient."""
    return self > Fate.PENDING


class Decision(NamedTuple):
  """The server's reaction to an event."""

  fate: Fate | None  # Fate of the pushed gradient; None for other events.
  updates: bool  # Whether the server updates the weights now.
  released: tuple[int, ...]  # Learners that may start a step, in this order.


class Protocol(_configurable.Configurable):
  """Rule for when the server updates and which learners wait.

  A protocol is a deterministic state machine without weights, threads or wall
  clock. Its driver (the simulator or a real server) reports one event at a
  time, `on_join`, `on_push` or `on_leave`, and gets a `Decision` back. An event
  takes O(log N) for N learners. The state can be saved as JSON at any time.

  The fate of a gradient that the protocol takes is `APPLIED` at once, even if
  its update has to wait for further gradients.

  **How to write your own protocol.** Subclass `Protocol` and override
  `handle_push`; override the other hooks where the protocol needs them:

  =================  =========================================================
  hook               content
  =================  =========================================================
  `handle_push`      the rule: fate of a gradient, update or not, releases
  `handle_leave`     the rule when a learner leaves: update or not, releases
  `handle_join`      bookkeeping when a learner joins
  `describe`         the rule in words, for reports
  `check`            an error for numbers of learners that cannot work
  `arguments`        the constructor's arguments, if it has any
  `initial_state`    the subclass's own state at the start of a run, if any
  `save_state`       the subclass's own state, for checkpoints
  `restore_state`    the inverse of `save_state`
  =================  =========================================================

  Set the class attributes below where the defaults do not fit. The base class
  owns `clock` and `alive`: hooks read them and never change them. Define the
  class at the top level of a module, so that a config can name it.

  Class attributes:
    name: Name of the protocol in `repr` and in reports.
    has_server: True. (A `jasgd.gossip.PeerStrategy` has False.)
    num_learners: The only number of learners that the protocol works with;
      None if there is no such number.
    steps_per_push: Steps that a learner computes between two pushes.
    steps_per_fetch: Steps that a learner computes between two fetches.
    holds_learners: Whether a learner may have to wait after its push. False
      promises that every push releases its learner at once; the simulator then
      uses a faster loop.
    updates_each: Whether each gradient that is taken makes its own update.
    needs_current_clock: Whether only gradients of the current clock are taken.
    needs_equal_times: Whether the protocol describes learners that all take
      the same, constant time; the simulator refuses other times. They push in
      rotation, so that weights of as many versions are in use as there are
      learners.

  Attributes:
    clock: Number of updates made.
    alive: Learners that have joined and not left.

  Examples:
    A protocol that updates at every second gradient, from any learner:

    >>> import jasgd
    >>> from jasgd import protocols
    >>> class EverySecond(protocols.Protocol):
    ...   name = 'every_second'
    ...   holds_learners = False  # Each push releases its learner.
    ...
    ...   def describe(self):
    ...     return 'every_second: two gradients per update; no learner waits.'
    ...
    ...   def initial_state(self):
    ...     return {'count': 0}
    ...
    ...   def save_state(self):
    ...     return {'count': self.count}
    ...
    ...   def restore_state(self, state):
    ...     self.count = state['count']
    ...
    ...   def handle_push(self, learner, read_clock):
    ...     self.count = (self.count + 1) % 2
    ...     return protocols.Decision(
    ...       fate=protocols.Fate.APPLIED,
    ...       updates=self.count == 0,
    ...       released=(learner,),
    ...     )
    >>> trace = jasgd.simulate(EverySecond(), num_workers=4, num_gradients=8)
    >>> trace.num_updates
    4
    >>> print(trace.staleness)
    [0 0 1 1 2 1 2 1]
  """

  has_server: ClassVar[bool] = True
  num_learners: int | None = None
  steps_per_push: int = 1
  steps_per_fetch: int = 1
  holds_learners: bool = True
  updates_each: bool = False
  needs_current_clock: bool = False
  needs_equal_times: bool = False

  def __init__(self) -> None:
    self.clock = 0
    self.alive: set[int] = set()

  # --- Hooks, for subclasses to override.

  def describe(self) -> str:
    """The rule in words: when the server updates and which learners wait."""
    return repr(self)

  def check(self, num_learners: int) -> None:
    """Raises a ValueError if this number of learners cannot work.

    Called before a run starts. An override should call `super().check` first.

    Args:
      num_learners: Number of learners that the run expects.
    """
    if num_learners < 1:
      raise ValueError(f'num_learners must be at least 1, got {num_learners}.')

  def initial_state(self) -> dict[str, Any]:
    """The subclass's own state before the first event.

    Called by `start`, which passes the result to `restore_state`.

    Returns:
      A dict with the same keys as `save_state`.
    """
    return {}

  def save_state(self) -> dict[str, Any]:
    """The subclass's own state, without `clock` and `alive`.

    Called by `save`, between events.

    Returns:
      A JSON-serialisable dict. The keys 'protocol', 'clock' and 'alive' are
      taken by the base class.
    """
    return {}

  def restore_state(self, state: dict[str, Any]) -> None:
    """Sets the subclass's own state. The inverse of `save_state`.

    Called by `start` and `restore`, after `clock` and `alive` have been set.

    Args:
      state: Result of `initial_state` or `save_state`, possibly after a round
        trip through JSON: tuples have become lists.
    """

  def handle_push(self, learner: int, read_clock: int) -> Decision:
    """Decides about a gradient.

    Called by `on_push`, before `clock` advances: the staleness of the gradient
    is `self.clock - read_clock`. The base class advances `clock` afterwards if
    the decision says so.

    Args:
      learner: Number of the learner that pushed; it is in `alive`.
      read_clock: Clock of the weights that the gradient was computed on.

    Returns:
      The decision. Its fate is `APPLIED`, `DROPPED_LATE` or `DROPPED_STALE`. A
      learner that is not among those released waits until a later decision
      releases it.
    """
    raise NotImplementedError(
      f'{type(self).__name__} must override handle_push(learner, read_clock).'
    )

  def handle_join(self, learner: int) -> None:
    """Adds a learner to the subclass's own state.

    Called by `on_join`, when the learner is in `alive` already.

    Args:
      learner: Number of the learner that joined.
    """

  def handle_leave(self, learner: int) -> Decision:
    """Removes a learner from the subclass's own state, and decides.

    Called by `on_leave`, when the learner is no longer in `alive`. A leave may
    make an update due, since fewer gradients may suffice for it, and may
    release learners that waited for this one. The base class advances `clock`
    afterwards if the decision says so.

    Args:
      learner: Number of the learner that left.

    Returns:
      The decision. Its fate is None.
    """
    del learner
    return Decision(None, False, ())

  # --- Methods that drivers call.

  def count_per_update(self) -> int | None:
    """Number of gradients of every update while `alive` stays as it is.

    Returns:
      The number, if every gradient is taken, no matter which learners push. The
      simulator then does not call the protocol for each gradient. None if it
      must call the protocol.
    """
    return None

  def without_equal_times(self) -> 'Protocol':
    """The protocol for learners of unequal speeds; by default itself."""
    return self

  def without_ramp_up(self) -> 'Protocol':
    """The protocol once all learners are admitted: itself, for most."""
    return self

  @property
  def inside(self) -> set[int]:
    """Learners of `alive` that have been allowed to take part."""
    return self.alive

  def init(self, num_learners: int) -> None:
    """Starts a run in which the learners 0 to num_learners - 1 have joined."""
    self.start(num_learners)
    for learner in range(num_learners):
      self.on_join(learner)

  def start(self, num_learners: int) -> None:
    """Starts a run that expects `num_learners`; none of them has joined yet."""
    self.check(num_learners)
    self.restore(self._make_initial())

  def on_push(self, learner: int, step: int, read_clock: int) -> Decision:
    """Handles the arrival of a gradient.

    Args:
      learner: Number of the learner that pushed.
      step: Number of the learner's step, for error messages.
      read_clock: Clock of the weights that the gradient was computed on.

    Returns:
      The decision. `clock` has advanced if it makes an update.

    Raises:
      ValueError: if the learner has not joined or should be waiting, or the
        clock does not exist yet. The state is unchanged then.
    """
    if learner not in self.alive:
      raise ValueError(
        f'Learner {learner} pushed step {step} without having joined: call '
        'on_join first.'
      )
    if not 0 <= read_clock <= self.clock:
      raise ValueError(
        f'Learner {learner} pushed step {step} of read_clock={read_clock}; it '
        f'must be from 0 to the clock, {self.clock}.'
      )
    decision = self.handle_push(learner, read_clock)
    if decision.updates:
      self.clock += 1
    return decision

  def on_join(self, learner: int) -> Decision:
    """Handles a learner that joins; it is released once it may start."""
    if learner in self.alive:
      raise ValueError(f'Learner {learner} has joined already.')
    self.alive.add(learner)
    self.handle_join(learner)
    return Decision(None, False, (learner,))

  def on_leave(self, learner: int) -> Decision:
    """Handles a learner that finished or was lost: no learner waits for it."""
    if learner not in self.alive:
      raise ValueError(f'Learner {learner} left without having joined.')
    # Before the hook: it counts quorums over the learners that remain.
    self.alive.remove(learner)
    decision = self.handle_leave(learner)
    if decision.updates:
      self.clock += 1
    return decision

  def save(self) -> dict[str, Any]:
    """The whole state, as a JSON-serialisable dict."""
    return {
      'protocol': self.identify(),
      'clock': self.clock,
      'alive': sorted(self.alive),
      **self.save_state(),
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Continues from a state that `save` of an equal protocol returned."""
    missing = sorted(self._make_initial().keys() - state.keys())
    if missing:
      raise ValueError(
        f'This is no state of {self!r}: it has no {", ".join(missing)}.'
      )
    identity = self.identify()
    if state['protocol'] != identity:
      raise ValueError(
        f'The state is of {state["protocol"]}, and cannot be restored into '
        f'{identity}.'
      )
    self.clock = state['clock']
    self.alive = set(state['alive'])
    self.restore_state(state)

  def __repr__(self) -> str:
    arguments = ', '.join(
      f'{name}={value!r}' for name, value in self.arguments().items()
    )
    return f'{self.name or type(self).__name__}({arguments})'

  def _make_initial(self) -> dict[str, Any]:
    """The result of `save` before the first event."""
    return {
      'protocol': self.identify(),
      'clock': 0,
      'alive': [],
      **self.initial_state(),
    }


def refuse_held(learner: int) -> NoReturn:
  """Raises the ValueError for a push of a learner that should be waiting."""
  raise ValueError(
    f'Learner {learner} pushed, but is held back: it must wait until it is '
    'released.'
  )
