"""A host and those who come to it, over the queue wire, without threads."""

import contextlib
import queue

import numpy as np
import pytest

from jasgd import engine
from jasgd import gossip
from jasgd.runtime import _host
from jasgd.runtime import _messages
from jasgd.runtime import _queue_wire

Message, Verb = _messages.Message, _messages.Verb
PATIENCE = 30.0  # Seconds: never reached, unless something is broken.
FINGERPRINT = 'of this run'
SIZE = 5
ADDRESS = '10.0.0.1:4000'


def make_weights(value):
  """(params, stats), all of one value."""
  return {'w': np.full(SIZE, value, np.float32)}, {}


LAYOUT = engine.make_layout(make_weights(0))


class Bench:
  """A host without a thread, and all that it told its owner."""

  def __init__(self, **options):
    self.taken, self.met = [], []
    self.fate = gossip.Outcome.TAKEN
    self.status = {'step': 3, 'members': {'1': [ADDRESS, 0.5]}}
    options = {'is_shared': False, 'take': self._take, **options}
    self.host = _host.Host(
      LAYOUT,
      FINGERPRINT,
      describe=lambda: self.status,
      meet=lambda *said: self.met.append(said),
      **options,
    )
    self.listener = _queue_wire.QueueListener(self.host.inbox, LAYOUT.size)

  def _take(self, message):
    self.taken.append((message.learner, message.payload.copy()))
    return self.fate

  def step(self):
    """Handles all that is there."""
    while self.host.answer(0):
      pass

  def publish(self, version):
    """Weights whose every number tells the version; all else does too."""
    self.host.publish(make_weights(version), version, 2 * version, version / 4)

  def list_free(self):
    """The buffers that nobody uses, each of them once."""
    free = [buffer.index for buffer in self.host._store._pool._free]
    assert len(set(free)) == len(free)
    return free

  def close(self):
    self.listener.close()
    self.host.close()


class Client:
  """Somebody at the other end of a channel, who waits for nothing."""

  def __init__(self, bench):
    self._bench = bench
    self.connection = bench.listener.connect()
    self.channel = self.connection._channel

  def ask(self, verb, **fields):
    """The one answer to a message."""
    self.channel.receive(Message(verb, **fields))
    self._bench.step()
    answer = self.channel.answers.get_nowait()
    with pytest.raises(queue.Empty):
      self.channel.answers.get_nowait()
    return answer

  def greet(self, fingerprint=FINGERPRINT, node=1, address=None, since=1.5):
    text = _host.make_greeting(fingerprint, node, address, since)
    return self.ask(Verb.HELLO, text=text)

  def push(self, value=1.0, learner=1):
    payload = self.connection.outgoing
    LAYOUT.pack(make_weights(value), payload)
    return self.ask(Verb.EXCHANGE, learner=learner, payload=payload)

  def pull(self):
    """Version, step, mass and all numbers of the weights."""
    return read(self.ask(Verb.PULL))

  def hang_up(self):
    self.connection.close()
    self._bench.step()


def read(answer):
  """Version, step, mass and all numbers of the weights in an answer."""
  assert answer.verb == Verb.SNAPSHOT
  params, _ = LAYOUT.unpack(answer.payload)
  return answer.clock, answer.step, answer.rate, params['w'].tolist()


def expect(version):
  """What `pull` says of a version that `Bench.publish` showed."""
  return version, 2 * version, version / 4, [float(version)] * SIZE


@contextlib.contextmanager
def open_bench(**options):
  with contextlib.closing(Bench(**options)) as bench:
    yield bench


def check_refused(bench, answer, *texts, count=1):
  """It was refused and counted, and the message says why."""
  assert answer.verb == Verb.REFUSED
  for text in texts:
    assert text in answer.text
  assert bench.host.num_refused == count
