"""Own strategies that write every call of their objects to a file.

A config names them as 'tests.experiment.recorded:NAME'. Each object has a file
of its own in the folder that an environment variable names. A call is written
before it returns, so that SIGKILL loses no call that had an effect outside.
"""

import functools
import itertools
import json
import os
import pathlib
import threading

from jasgd import gossip
from jasgd import protocols
from tests.experiment import own_strategies

VARIABLE = 'JASGD_TEST_CALLS'
_NODE_METHODS = (
  *('on_alive', 'on_step', 'on_replies', 'on_outcome', 'on_message'),
  *('mix_waiting', 'on_done', 'on_end', 'on_join', 'on_join_reply'),
  *('on_restart', 'on_regroup', 'restore', 'save'),
)
_PROTOCOL_METHODS = (
  *('start', 'on_join', 'on_push', 'on_leave', 'restore', 'save'),
)
_TUPLES = {
  kind.__name__: kind
  for kind in (
    *(gossip.Ask, gossip.Send, gossip.MixWaiting, gossip.Mix, gossip.Attract),
    *(gossip.JoinMean, gossip.Message, gossip.Reply, protocols.Decision),
  )
}
_numbers = itertools.count()


def encode(value):
  """A JSON-serialisable form of an argument or of a result."""
  if isinstance(value, gossip.Outcome):
    return {'Outcome': int(value)}
  if isinstance(value, protocols.Fate):
    return {'Fate': int(value)}
  if type(value) in _TUPLES.values():
    return {type(value).__name__: [encode(each) for each in value]}
  if isinstance(value, list | tuple | range):
    return [encode(each) for each in value]
  if isinstance(value, dict):
    return {'dict': {key: encode(each) for key, each in value.items()}}
  return value


def decode(value):
  """Inverse of `encode`; a tuple without a name comes back as a list."""
  if isinstance(value, list):
    return [decode(each) for each in value]
  if not isinstance(value, dict):
    return value
  ((name, content),) = value.items()
  if name == 'Outcome':
    return gossip.Outcome(content)
  if name == 'Fate':
    return protocols.Fate(content)
  if name == 'dict':
    return {key: decode(each) for key, each in content.items()}
  return _TUPLES[name](*map(decode, content))


class _File:
  """The file of one object."""

  def __init__(self, owner):
    self.lock = threading.RLock()  # Calls of the object come from two threads.
    self.depth = 0
    about = [getattr(owner, 'node', -1), getattr(owner, 'seed', 0)]
    path = pathlib.Path(os.environ[VARIABLE])
    path /= f'{about[0]}-{os.getpid()}-{next(_numbers)}.jsonl'
    self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    self.write(about)

  def write(self, value):
    # Without a buffer: the kernel has the line, even if this process is killed.
    os.write(self._fd, f'{json.dumps(value)}\n'.encode())


def _record(kind, methods):
  """A subclass that writes the outer calls of these methods."""

  def wrap(name):
    plain = getattr(kind, name)

    @functools.wraps(plain)
    def call(self, *arguments):
      file = self.__dict__.get('_file')
      if file is None:
        file = self.__dict__['_file'] = _File(self)
      with file.lock:
        encoded = encode(arguments)  # Before the call, which may change them.
        file.depth += 1
        try:
          result = plain(self, *arguments)
        finally:
          file.depth -= 1
        if not file.depth:
          said = None if name == 'restore' else encode(result)
          file.write([name, encoded, said])
      return result

    return call

  # A node that defines `on_message` takes messages.
  own = [
    name
    for name in methods
    if name != 'on_message' or kind.on_message is not gossip.PeerNode.on_message
  ]
  return type(kind.__name__, (kind,), {name: wrap(name) for name in own})


def _record_peer(kind):
  body = {
    'name': kind.name,
    'node_class': _record(kind.node_class, _NODE_METHODS),
    '__module__': __name__,
  }
  return type(kind.__name__, (kind,), body)


def _record_protocol(kind):
  found = _record(kind, _PROTOCOL_METHODS)
  found.__module__ = __name__
  # Saved states are those of the plain protocol, which repeats the calls.
  found.identify = lambda self: kind(**self.arguments()).identify()
  return found


Pull = _record_peer(gossip.Pull)
Push = _record_peer(gossip.Push)
PushSum = _record_peer(gossip.PushSum)
Elastic = _record_peer(gossip.Elastic)
AllReduce = _record_peer(gossip.AllReduce)
Neighbour = _record_peer(own_strategies.Neighbour)

Asynchronous = _record_protocol(protocols.asynchronous)
Backup = _record_protocol(protocols.backup)
Hardsync = _record_protocol(protocols.hardsync)
Rennala = _record_protocol(protocols.rennala)
Ringmaster = _record_protocol(protocols.ringmaster)
Softsync = _record_protocol(protocols.softsync)
Ssp = _record_protocol(protocols.ssp)
Every = _record_protocol(own_strategies.Every)


def make_plain(name, arguments):
  """The strategy that a recorded one of this name is a subclass of."""
  return globals()[name].__base__(**arguments)


def read_calls(folder):
  """The calls of each object.

  Yields:
    Number of the node, seed, and [method, arguments, result] of each call.
  """
  for path in sorted(pathlib.Path(folder).iterdir()):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    yield *lines[0], lines[1:]


def repeat(machine, calls):
  """Feeds calls to an object; each must have the same result."""
  for index, (method, arguments, result) in enumerate(calls):
    again = getattr(machine, method)(*map(decode, arguments))
    found = None if method == 'restore' else encode(again)
    # Compared as JSON, as they were written: floats with equal bits have equal
    # texts.
    assert json.loads(json.dumps(found)) == result, (index, method, arguments)
