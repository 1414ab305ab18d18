"""Fakes of what a node has and of the others, for the ways to mix."""

import numpy as np

from jasgd import engine
from jasgd import traces
from jasgd.runtime import _host
from jasgd.runtime import _messages
from jasgd.runtime import _mixing

Message, Verb = _messages.Message, _messages.Verb
Kind = traces.NodeKind
SIZE = 3
SEED = 5


def make_weights(value):
  """(params, stats), all of one value."""
  return np.full(SIZE, value, np.float32), {}


LAYOUT = engine.make_layout(make_weights(0))


def make_payload(value):
  payload = np.zeros(LAYOUT.size, np.uint8)
  LAYOUT.pack(make_weights(value), payload)
  return payload


def read_payload(payload):
  """The one value of all numbers in it."""
  (value,) = set(LAYOUT.unpack(payload)[0].tolist())
  return value


class Book:
  """A trace that is only a list."""

  def __init__(self):
    self.records = []
    self.time = 10.0

  def get_time(self):
    self.time += 1
    return self.time

  def write(self, kind, rows):
    self.records += [(kind, row) for row in rows]


class Weights:
  """A node whose weights are one number."""

  def __init__(self, value=0.0, mass=0.0):
    self.value, self.mass = value, mass
    self.version, self.step = 7, 5
    self.mixes = []  # What was mixed, without the payload.
    self.pulls = []

  def mix(self, others, own_weight, start):
    self.value *= own_weight
    for other in others:
      self.value += other.weight * read_payload(other.payload)
    self.mixes.append(
      ([other[:-1] for other in others], own_weight, start, self.mass)
    )
    self.version += 1

  def pull_centre(self, centre, start, *, is_before):
    self.pulls.append((centre[:-1], start, is_before))
    force = centre.weight * (self.value - read_payload(centre.payload))
    self.value -= force
    self.version += 1
    return make_weights(force)

  def pack(self, buffer):
    LAYOUT.pack(make_weights(self.value), buffer)


class Peers:
  """Others who answer as they are told."""

  def __init__(self, alive=(), answers=None, fates=None):
    self.alive = sorted(alive)
    self.answers = answers or {}  # Of a peer, to a pull: by and by.
    self.fates = fates or {}
    self.pushes = []
    self.waits = []
    self.comes_back = False

  def pull(self, peer):
    answers = self.answers.get(peer, ())
    return answers.pop(0) if answers else None

  def push(self, peer, message, write):
    payload = np.zeros(LAYOUT.size, np.uint8)
    write(payload)
    assert message.verb == Verb.EXCHANGE
    self.pushes.append((peer, message, read_payload(payload)))
    return self.fates.get(peer, _host.TAKEN)

  def wait_for(self, count, timeout, is_stopping):
    self.waits.append((count, timeout, is_stopping))
    return self.comes_back


def answer(version, step, value):
  return Message(
    Verb.SNAPSHOT, clock=version, step=step, payload=make_payload(value)
  )


def make_push(learner, weight, value=0.0, **fields):
  fields = {'clock': 4, 'step': 2, 'rate': weight, **fields}
  return Message(
    Verb.EXCHANGE, learner=learner, payload=make_payload(value), **fields
  )


def make_parts(peers, *, node=0, value=0.0, mass=0.0):
  return {
    'weights': Weights(value, mass),
    'peers': peers,
    'book': Book(),
    'layout': LAYOUT,
    'node': node,
  }


def make_pull(strategy, peers, **options):
  parts = make_parts(peers, **options)
  mixing = _mixing.PullMixing(strategy, SEED, **parts)
  return mixing, parts['weights'], parts['book']


def make_pusher(strategy, peers, num_nodes=4, **options):
  parts = make_parts(peers, **options)
  mixing = _mixing.PushMixing(strategy, num_nodes, SEED, **parts)
  return mixing, parts['weights'], parts['book']
