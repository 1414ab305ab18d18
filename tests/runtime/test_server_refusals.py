"""Messages that the server refuses and counts."""

import json
import math

import numpy as np
import pytest

from jasgd import protocols
from jasgd import traces
from jasgd.runtime import wires
from tests.runtime import cases
from tests.runtime import scripted

Fate, Flag, Verb = protocols.Fate, scripted.Flag, scripted.Verb
Message = scripted.Message
join, get_counts = scripted.join, scripted.get_counts
list_kinds = scripted.list_kinds


def refuse_stranger(bench):
  client = bench.connect()
  return client, Message(Verb.EXCHANGE)


def refuse_learner(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(worker=7)


def refuse_held(bench):
  client = bench.join()
  client.learner, client.weights = 0, None
  return client, Message(Verb.FETCH, worker=0)


def refuse_push(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(push=1)


def refuse_clock(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(incarnation=3)


def refuse_future(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(version=5)


def refuse_size(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(payload=None)


def refuse_other_size(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(payload=np.zeros(64, np.uint8))


def refuse_loss(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(loss=math.nan)


def refuse_seconds(bench):
  (client,) = join(bench, 1)
  return client, client.make_push(seconds=-1.0)


def refuse_notice(bench):
  (client,) = join(bench, 1)
  return client, Message(Verb.NOTICE, worker=0, version=-4)


def refuse_fetch(bench):
  (client,) = join(bench, 1)
  return client, Message(Verb.FETCH, worker=0, step=2)


def make_hello(bench, **said):
  said = {'fingerprint': bench.server.fingerprint, **said}
  return Message(Verb.HELLO, text=json.dumps(said))


def refuse_fingerprint(bench):
  return bench.connect(), make_hello(bench, fingerprint='other')


def refuse_hello(text):
  def refuse(bench):
    return bench.connect(), Message(Verb.HELLO, text=text)

  return refuse


def refuse_said(**said):
  return lambda bench: (bench.connect(), make_hello(bench, **said))


def refuse_held_push(bench):
  message = make_hello(bench)
  message.push = 1 << 40
  return bench.connect(), message


def refuse_taken(bench):
  join(bench, 1)
  message = make_hello(bench, instance='another')
  message.worker = 0
  return bench.connect(), message


def refuse_twice(bench):
  (client,) = join(bench, 1)
  return client, make_hello(bench)


def refuse_verb(bench):
  return bench.connect(), Message(Verb.SNAPSHOT)


def refuse_pid(bench):
  return bench.connect(), Message(Verb.LOST, text='-4')


def refuse_metrics(version):
  def refuse(bench):
    return bench.connect(), Message(Verb.METRICS, version=version)

  return refuse


# Fault -> reason, protocol, number of learners, and the sending client.
REFUSALS = {
  'stranger': ('stranger', refuse_stranger),
  'learner': ('worker', refuse_learner),
  'held': ('held', refuse_held),
  'push': ('push', refuse_push),
  'incarnation': ('clock', refuse_clock),
  'future': ('future', refuse_future),
  'no payload': ('size', refuse_size),
  'another payload': ('size', refuse_other_size),
  'loss': ('number', refuse_loss),
  'seconds': ('number', refuse_seconds),
  'notice': ('clock', refuse_notice),
  'fetch': ('step', refuse_fetch),
  'fingerprint': ('fingerprint', refuse_fingerprint),
  'no JSON': ('hello', refuse_hello('{')),
  'a list': ('hello', refuse_hello('[1]')),
  'deep JSON': ('hello', refuse_hello('[' * 60_000)),
  'instance': ('hello', refuse_said(instance='\ud800')),
  'many devices': ('hello', refuse_said(num_devices=3)),
  'no devices': ('hello', refuse_said(num_devices=True)),
  'a push too far': ('hello', refuse_held_push),
  'taken': ('taken', refuse_taken),
  'twice': ('twice', refuse_twice),
  'verb': ('verb', refuse_verb),
  'pid': ('pid', refuse_pid),
  'metrics of the future': ('clock', refuse_metrics(9)),
  'metrics of the past': ('clock', refuse_metrics(-2)),
}


@pytest.mark.parametrize('name', REFUSALS)
def test_refusals(open_bench, name):
  reason, refuse = REFUSALS[name]
  protocol = None
  if name == 'fetch':
    protocol = protocols.downpour(2, 3)
  num_learners = 2 if name == 'held' else 1
  bench = open_bench(protocol, num_learners=num_learners, num_updates=3)
  client, message = refuse(bench)
  accepted = get_counts(bench).get('accepted', 0)
  (answer,) = client.send(message)
  assert answer.verb == Verb.REFUSED
  assert len(answer.text) > 10
  assert get_counts(bench) == {
    reason: 1,
    **({'accepted': accepted} if accepted else {}),
  }
  bench.check_leases()
  # The run has not changed.
  if protocol is None:
    clients = [client] if client.weights is not None else join(bench, 1)
    for _ in range(3):
      clients[0].push()
    trace = bench.server.get_trace()
    assert trace.is_ended
    assert traces.statistics.get_clock(trace) == 3
    cases.check_replay(bench.server, trace, bench.task)


def test_refusals_of_wires_are_counted(open_bench):

  bench = open_bench()
  client = bench.connect()
  error = wires.MessageError('garbage', 'It is no message.')
  bench.server.inbox.put(wires.Event(client.channel, error=error))
  bench.step()
  assert get_counts(bench) == {'garbage': 1}
