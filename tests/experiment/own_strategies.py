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
    """Starts with no gradient taken."""
    return {'num_taken': 0}

  def save_state(self):
    """The gradients taken since the last update."""
    return {'num_taken': self.num_taken}

  def restore_state(self, state):
    """Restores the state."""
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
  """Asks the next living node, and sends to the one before."""

  def __init__(self, *arguments):
    super().__init__(*arguments)
    self.waiting = []

  def exchange(self, step):
    """A question, a message, and a mix of the messages that have come."""
    place, num_alive = self.members.index(self.node), len(self.members)
    actions = [gossip.MixWaiting()]
    if num_alive > 1:
      ask = gossip.Ask(self.members[(place + 1) % num_alive])
      share = self.strategy.weight
      send = gossip.Send(self.members[place - 1], share, step)
      actions = [ask, send, *actions]
    return actions

  def on_replies(self, replies):
    """Mixes a small part of the answer into the own weights."""
    if replies[0].outcome is not gossip.Outcome.TAKEN:
      return ()
    weight = self.strategy.weight
    return [gossip.Mix(1 - weight, ((replies[0], weight),))]

  def on_message(self, message):
    """Takes a message if the node has steps to make."""
    if self.is_done:
      return gossip.Outcome.DONE
    self.waiting.append(message)
    return gossip.Outcome.TAKEN

  def mix_waiting(self):
    """The mean by shares, with the own share 1."""
    if not self.waiting:
      return None
    waiting, self.waiting = self.waiting, []
    total = 1 + sum(message.share for message in waiting)
    sources = tuple((message, message.share / total) for message in waiting)
    return gossip.Mix(1 / total, sources)


@dataclasses.dataclass(frozen=True)
class Neighbour(gossip.PeerStrategy):
  """Every node mixes with the next one, and with the one before."""

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
