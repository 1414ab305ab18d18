"""A user's own protocol, peer strategy, task and time model."""

import dataclasses

from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks


class Every(protocols.Protocol):
  """Updates after every few gradients, from any learner."""

  name = 'every'
  holds_learners = False

  def __init__(self, count=2, s=5):
    super().__init__()
    self.count, self.s, self.num_taken = count, s, 0

  def arguments(self):
    """The constructor's arguments."""
    return {'count': self.count, 's': self.s}

  def initial_state(self):
    """No gradient was taken."""
    return {'num_taken': 0}

  def save_state(self):
    """The gradients taken since the last update."""
    return {'num_taken': self.num_taken}

  def restore_state(self, state):
    """Takes the state back."""
    self.num_taken = state['num_taken']

  def handle_push(self, learner, read_clock):
    """Takes every gradient."""
    del read_clock
    self.num_taken = (self.num_taken + 1) % self.count
    is_due = not self.num_taken
    return protocols.Decision(protocols.Fate.APPLIED, is_due, (learner,))


class Late(protocols.constant_delay):
  """A constant delay under another name."""

  name = 'late'


class NeighbourNode(gossip.PeerNode):
  """Asks the next node."""

  def exchange(self, step):
    """Asks the next node."""
    del step
    return [gossip.Ask((self.node + 1) % self.num_nodes)]

  def on_replies(self, replies):
    """Mixes a little of the answer in."""
    if replies[0].outcome is not gossip.Outcome.TAKEN:
      return ()
    return [gossip.Mix(0.9, ((replies[0], 0.1),))]


@dataclasses.dataclass(frozen=True)
class Neighbour(gossip.PeerStrategy):
  """Every node mixes with the next one."""

  node_class = NeighbourNode
  weight: float = 0.1


def make_task(batch, dimension=3):
  """A task."""
  return tasks.make_task('quadratic', batch=batch, dimension=dimension)


def take_two_seconds():
  """A time model."""
  return simulation.constant(2.0)


def make_nothing(batch):
  """Not a task."""
  return batch
