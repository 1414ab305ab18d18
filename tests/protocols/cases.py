"""A user's own protocol, in a module outside jasgd."""

from jasgd import protocols


class Every(protocols.Protocol):
  """Updates at every `number`-th gradient; no learner waits."""

  name = 'every'
  holds_learners = False

  def __init__(self, number):
    super().__init__()
    self.number = protocols.check_count('number', number, 1)

  def arguments(self):
    return {'number': self.number}

  def initial_state(self):
    return {'count': 0}

  def save_state(self):
    return {'count': self.count}

  def restore_state(self, state):
    self.count = state['count']

  def handle_push(self, learner, read_clock):
    del read_clock
    self.count = (self.count + 1) % self.number
    fate = protocols.Fate.APPLIED
    return protocols.Decision(fate, self.count == 0, (learner,))


class Noted(Every):
  """A protocol with an argument of any type."""

  def __init__(self, note):
    super().__init__(1)
    self.note = note

  def arguments(self):
    return {'note': self.note}


NOT_A_CLASS = Every(2)
