"""Bad messages, and some good ones, to test what a server refuses.

Each is given as the bytes of head and text, whether a payload of the right size
comes with it, and whether a server must accept it.
"""

import json
from typing import NamedTuple

import numpy as np

from jasgd.runtime import wires

_Verb = wires.Verb
_FAR = 10**7  # Larger than any clock, push or step of a run.
_FLOATS = ('seconds', 'loss', 'rate', 'share', 'mass', 'elastic_rate')


class Case(NamedTuple):
  """A message, and whether the server must accept it."""

  data: bytes
  is_good: bool
  has_payload: bool = False


class Maker:
  """Draws messages for a channel.

  Args:
    rng: A `random.Random`.
    fingerprint: Fingerprint of the server's run.
    payload_size: Bytes of a payload.
    welcome: Server's answer to a HELLO on this channel; None: no HELLO was
      answered.
  """

  def __init__(self, rng, fingerprint, payload_size, welcome=None):
    self._rng = rng
    self._fingerprint = fingerprint
    self._size = payload_size
    self._welcome = welcome
    self._kinds = [
      self._flip,
      self._truncate,
      self._extend,
      self._make_garbage,
      self._make_answer,
      self._make_size,
      self._make_metrics,
      self._make_visit,
      self._make_gradient if welcome else self._make_stranger,
      self._make_twice if welcome else self._make_hello,
    ]

  def draw(self):
    """Draws the next message."""
    return self._rng.choice(self._kinds)()

  def make_welcome(self):
    """A good HELLO."""
    return Case(self._encode(_Verb.HELLO, text=self._say()), True)

  def _say(self, **changes):
    said = {
      'fingerprint': self._fingerprint,
      'instance': self._rng.randbytes(8).hex(),
      'num_devices': 1,
      'pid': 0,
    }
    return json.dumps(said | changes)

  def _encode(self, verb, size=0, **fields):
    payload = np.zeros(size, np.uint8) if size else None
    return wires.encode_message(wires.Message(verb, payload=payload, **fields))

  def _draw_whole(self):
    """A well-formed message with random fields."""
    rng = self._rng
    return self._encode(
      rng.choice(list(_Verb)),
      fate=rng.randrange(8),
      flags=rng.randrange(16),
      worker=rng.randrange(-1, 4),
      incarnation=rng.randrange(3),
      push=rng.randrange(-1, 1000),
      step=rng.randrange(1000),
      version=rng.randrange(1000),
      read_version=rng.randrange(1000),
      **{name: rng.uniform(-1.0, 2.0) for name in _FLOATS},
      text=rng.choice(['', '{}', self._say(), 'x' * rng.randrange(100)]),
    )

  # --- Bytes that are no message.

  def _flip(self):
    data = bytearray(self._draw_whole())
    data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
    return Case(bytes(data), False)

  def _truncate(self):
    data = self._draw_whole()
    return Case(data[: self._rng.randrange(1, len(data))], False)

  def _extend(self):
    size = self._rng.choice([1, 3, 80, wires.MAX_TEXT])
    return Case(self._draw_whole() + self._rng.randbytes(size), False)

  def _make_garbage(self):
    return Case(self._rng.randbytes(self._rng.randrange(1, 300)), False)

  # --- Messages without a meaning.

  def _make_answer(self):
    verb = self._rng.choice([verb for verb in _Verb if verb >= 64])
    return Case(self._encode(verb), False)

  def _make_size(self):
    sizes = [1, self._size - 1, self._size + 1, 2 * self._size]
    verb = self._rng.choice([_Verb.EXCHANGE, _Verb.NOTICE, _Verb.PULL])
    return Case(self._encode(verb, self._rng.choice(sizes)), False)

  def _make_stranger(self):
    verb = self._rng.choice([_Verb.EXCHANGE, _Verb.NOTICE, _Verb.FETCH])
    return Case(self._encode(verb, worker=self._rng.randrange(-1, 3)), False)

  def _make_metrics(self):
    clock, is_good = self._rng.choice(
      [(0, True), (-1, True), (_FAR, False), (-2, False)]
    )
    return Case(self._encode(_Verb.METRICS, version=clock), is_good)

  def _make_visit(self):
    verb = self._rng.choice([_Verb.PULL, _Verb.STATUS])
    return Case(self._encode(verb, version=self._rng.randrange(_FAR)), True)

  # --- Messages that only some clients may send.

  def _make_hello(self):
    changes, fields = self._rng.choice(
      [
        ({'fingerprint': '0' * 16}, {}),
        ({'fingerprint': None}, {}),
        ({}, {'worker': 0}),  # This learner is connected already.
        ({}, {'worker': 1}),
        ({'num_devices': 3}, {}),
        ({'num_devices': 1 << 40}, {}),
        ({'num_devices': 'all'}, {}),
        ({'instance': 'x' * 65}, {}),
        ({'instance': 7}, {}),
        ({'pid': -1}, {}),
        ({'pid': True}, {}),
        ({}, {'push': -2}),
        ({}, {'push': 1 << 40}),
        ({}, {'push': 1, 'version': -1}),
        ({}, {'push': 1, 'seconds': float('nan')}),
      ]
    )
    text = self._say(**changes)
    if self._rng.random() < 0.1:
      text = self._rng.choice(['', '[]', 'null', '{}', '{' * 30000])
    return Case(self._encode(_Verb.HELLO, text=text, **fields), False)

  def _make_twice(self):
    return Case(self._encode(_Verb.HELLO, text=self._say()), False)

  def _make_gradient(self):
    """A gradient with one wrong field."""
    welcome, rng = self._welcome, self._rng
    right = {
      'worker': welcome.worker,
      'incarnation': welcome.incarnation,
      'push': welcome.push,
      'version': welcome.version,
    }
    wrong = rng.choice(
      [
        {'worker': 0},
        {'worker': 1},
        {'worker': -1},
        {'push': welcome.push + rng.randrange(1, _FAR)},
        {'push': welcome.push - rng.randrange(2, _FAR)},
        {'version': welcome.version + _FAR},
        {'version': -1},
        {'incarnation': welcome.incarnation + 1},
        {'seconds': float('nan')},
        {'seconds': -1.0},
        {'seconds': float('inf')},
      ]
    )
    if rng.random() < 0.3:
      return Case(self._encode(_Verb.NOTICE, **right | wrong), False)
    if rng.random() < 0.2:
      wrong = {'loss': rng.choice([float('nan'), float('inf')])}
    if rng.random() < 0.1:  # The gradient itself is missing.
      return Case(self._encode(_Verb.EXCHANGE, **right), False)
    data = self._encode(_Verb.EXCHANGE, self._size, **right | wrong)
    return Case(data, False, has_payload=True)
