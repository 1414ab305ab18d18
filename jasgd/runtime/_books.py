"""What the server knows of each learner."""

from collections.abc import Iterator
import dataclasses
import enum
from typing import Any

from jasgd.runtime import _snapshots
from jasgd.runtime import _wire

# Of the longest time, with each gradient that took less.
_FADING = 0.98


class State(enum.StrEnum):
  """What a learner is doing, as far as the server knows."""

  COMPUTING = 'computing'
  WAITING = 'waiting'  # It pushed, or came, and is held back.
  ABSENT = 'absent'  # It was there before the server's restart.
  GONE = 'gone'


@dataclasses.dataclass(slots=True, eq=False)
class Book:
  """A learner.

  Attributes:
    learner: Its number.
    instance: A random text that its process made up, to be known again by.
    num_devices: Over how many devices it spreads a minibatch.
    channel: Where to answer; None if it is not connected.
    state: What it does.
    was_waiting: Of one that is absent: whether it was held back.
    next_step: The number of the push that comes next.
    num_computed: Minibatches, of learners that fetch apart from pushes.
    num_gathered: Those of them since the last push.
    welcome: What else to say with the next answer.
    fate: Of its last push.
    keeps_weights: Whether the answer to its last push needs no weights.
    start_time: When it was given what it computes on, or began to wait.
    leases: The snapshots that it may use, by version, oldest first.
    num_applied: Its gradients that were applied.
    num_not_finite: Its gradients that were not numbers.
    is_warm: Whether it has sent anything: its first gradient is compiled.
    longest: The longest time that it took for a gradient of late, in seconds;
      0 if it has not been seen at work.
  """

  learner: int
  instance: str = ''
  num_devices: int = 1
  channel: _wire.Channel | None = None
  state: State = State.GONE
  was_waiting: bool = False
  next_step: int = 0
  num_computed: int = 0
  num_gathered: int = 0
  welcome: str = ''
  fate: int = 0
  keeps_weights: bool = False
  start_time: float = 0.0
  leases: dict[tuple[int, int], _snapshots.Snapshot] = dataclasses.field(
    default_factory=dict
  )
  num_applied: int = 0
  num_not_finite: int = 0
  is_warm: bool = False
  longest: float = 0.0

  @property
  def lost_clock(self) -> int:
    """Of the weights that it has and gave no gradient for; -1: of none."""
    if self.state == State.WAITING or self.was_waiting or not self.leases:
      return -1
    _, clock = next(iter(self.leases))
    return clock

  def is_of(self, instance: str) -> bool:
    """Whether it is that of a process."""
    return bool(instance) and self.instance == instance

  def note_seconds(self, seconds: float) -> None:
    """It took so long for a gradient."""
    if self.is_warm:  # What was long ago counts less and less.
      self.longest = max(seconds, _FADING * self.longest)
    self.is_warm = True

  def save(self, snapshots: list[tuple[int, int]]) -> dict[str, Any]:
    """What a checkpoint holds of it; leases by their place in `snapshots`."""
    is_waiting = self.state == State.WAITING or self.was_waiting
    return {
      'learner': self.learner,
      'instance': self.instance,
      'num_devices': self.num_devices,
      'is_here': self.state != State.GONE,
      'is_waiting': is_waiting,
      'next_step': self.next_step,
      'num_computed': self.num_computed,
      'num_gathered': self.num_gathered,
      'fate': int(self.fate),
      'keeps_weights': self.keeps_weights,
      'leases': [snapshots.index(version) for version in self.leases],
      'num_applied': self.num_applied,
      'num_not_finite': self.num_not_finite,
      'longest': self.longest,
    }

  @classmethod
  def restore(
    cls, state: dict[str, Any], snapshots: list[_snapshots.Snapshot]
  ) -> 'Book':
    """The inverse of `save`; whoever was here is absent now."""
    leases = [snapshots[index] for index in state['leases']]
    return cls(
      learner=state['learner'],
      instance=state['instance'],
      num_devices=state['num_devices'],
      state=State.ABSENT if state['is_here'] else State.GONE,
      was_waiting=state['is_waiting'],
      next_step=state['next_step'],
      num_computed=state['num_computed'],
      num_gathered=state['num_gathered'],
      fate=state['fate'],
      keeps_weights=state['keeps_weights'],
      leases={snapshot.version: snapshot for snapshot in leases},
      num_applied=state['num_applied'],
      num_not_finite=state['num_not_finite'],
      is_warm=state['longest'] > 0,
      longest=state['longest'],
    )


class Register:
  """All learners, by number and by channel."""

  def __init__(self) -> None:
    self.books: dict[int, Book] = {}
    self._by_channel: dict[_wire.Channel, Book] = {}

  def __iter__(self) -> Iterator[Book]:
    return iter(self.books.values())

  def find(self, channel: _wire.Channel) -> Book | None:
    """Who speaks on a channel."""
    return self._by_channel.get(channel)

  def add(self, book: Book) -> None:
    """Takes in a book that was saved."""
    self.books[book.learner] = book

  def find_instance(self, instance: str) -> Book | None:
    """The book of a process; it may never have heard of its number."""
    for book in self.books.values():
      if book.is_of(instance):
        return book
    return None

  def choose(self, instance: str) -> Book:
    """The book for somebody who comes: its own, or the first that is free."""
    book = self.find_instance(instance)
    if book is not None:
      return book
    for book in self.books.values():
      if book.state == State.GONE:
        return book
    book = Book(len(self.books))
    self.books[book.learner] = book
    return book

  def attach(self, book: Book, channel: _wire.Channel, instance: str) -> None:
    """A learner speaks on this channel from now on."""
    self.detach(book)
    book.channel, book.instance = channel, instance
    self._by_channel[channel] = book

  def detach(self, book: Book) -> None:
    """A learner has no channel any more."""
    if book.channel is not None:
      del self._by_channel[book.channel]
      book.channel = None

  def list(self, *states: State) -> list[Book]:
    """Those in one of some states, by number."""
    return [book for book in self.books.values() if book.state in states]
