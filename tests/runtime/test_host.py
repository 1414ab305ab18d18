"""What a node shows of itself, and what it refuses, over the queue wire."""

import json
import os
import queue
import threading

import numpy as np
import pytest

from jasgd import gossip
from jasgd.runtime import _messages
from jasgd.runtime import _wire
from tests.runtime import host_cases


@pytest.fixture
def bench():
  with host_cases.open_bench() as bench:
    yield bench


# --- What others send.


def test_a_stranger_may_not_send(bench):
  host_cases.check_refused(
    bench, host_cases.Client(bench).push(), 'Say HELLO before EXCHANGE'
  )
  assert bench.taken == []


@pytest.mark.parametrize('fate', [gossip.Outcome.TAKEN, gossip.Outcome.FULL])
def test_a_friend_hears_what_became_of_it(bench, fate):
  bench.fate = fate
  client = host_cases.Client(bench)
  client.greet()
  answer = client.push(7.0, learner=4)
  assert (answer.verb, answer.fate) == (host_cases.Verb.ANSWER, fate)
  ((learner, payload),) = bench.taken
  assert learner == 4
  np.testing.assert_array_equal(
    host_cases.LAYOUT.unpack(payload)[0]['w'], [7.0] * host_cases.SIZE
  )


def test_a_payload_is_needed(bench):
  client = host_cases.Client(bench)
  client.greet()
  answer = client.ask(host_cases.Verb.EXCHANGE, learner=1)
  host_cases.check_refused(bench, answer, 'EXCHANGE must have a payload')
  assert bench.taken == []


def test_what_the_owner_refuses_is_counted():
  def take(message):
    raise _messages.MessageError('weight', f'No {message.learner}.')

  with host_cases.open_bench(take=take) as bench:
    client = host_cases.Client(bench)
    client.greet()
    host_cases.check_refused(bench, client.push(learner=8), 'No 8.')
    host_cases.check_refused(bench, client.push(learner=9), 'No 9.', count=2)


def test_what_the_wire_refuses_is_counted(bench, caplog):
  channel = host_cases.Client(bench).channel
  for count in range(1, 4):
    error = _messages.MessageError('garbage', f'It is no message {count}.')
    bench.host.inbox.put(_wire.Event(channel, error=error))
    bench.step()
    assert bench.host.num_refused == count
  # Nobody can fill the logs.
  assert [record.message for record in caplog.records] == [
    f'Refused (garbage), from {channel.name}: It is no message 1.'
  ]
  with pytest.raises(queue.Empty):  # It has been refused already.
    channel.answers.get_nowait()


@pytest.mark.parametrize(
  'verb',
  sorted(
    set(host_cases.Verb)
    - {host_cases.Verb.HELLO, host_cases.Verb.EXCHANGE, host_cases.Verb.PULL}
    - {host_cases.Verb.STATUS, host_cases.Verb.STOP, host_cases.Verb.LEAVE}
    - {host_cases.Verb.LOST}
  ),
)
def test_other_verbs_are_refused(bench, verb):
  bench.publish(1)
  host_cases.check_refused(bench, host_cases.Client(bench).ask(verb), verb.name)
  assert not bench.host.stopped.is_set()


def test_a_node_that_died_counts_as_one_that_has_come(bench):
  client = host_cases.Client(bench)
  answer = client.ask(host_cases.Verb.LOST, learner=2)
  assert answer.verb == host_cases.Verb.ANSWER
  assert [node for node, *_ in bench.met] == [2]
  answer = client.ask(host_cases.Verb.LOST, learner=-2)
  host_cases.check_refused(bench, answer, 'number from 0 on, got -2')
  assert len(bench.met) == 1


# --- What it shows.


def test_there_may_be_no_weights_yet(bench):
  client = host_cases.Client(bench)
  host_cases.check_refused(
    bench, client.ask(host_cases.Verb.PULL), 'no weights yet'
  )
  assert bench.host.num_sent == 0
  bench.publish(0)
  assert client.pull() == host_cases.expect(0)


def test_a_pull_has_what_was_published_last(bench):
  client = host_cases.Client(bench)  # Whoever looks need not say who it is.
  for version in (1, 2, 5):
    bench.publish(version)
    assert client.pull() == client.pull() == host_cases.expect(version)
  assert bench.host.num_sent == 6
  assert bench.host.num_refused == 0


def test_weights_are_copied(bench):
  weights = host_cases.make_weights(3)
  bench.host.publish(weights, 3, 6, 0.75)
  weights[0]['w'][:] = -1
  assert host_cases.Client(bench).pull() == host_cases.expect(3)


def test_who_has_weights_keeps_them(bench):
  bench.publish(1)
  clients = [host_cases.Client(bench) for _ in range(3)]
  answers = []
  for version, client in enumerate(clients, 1):
    answers.append(client.ask(host_cases.Verb.PULL))
    for _ in range(5):
      bench.publish(version + 1)
  for version, answer in enumerate(answers, 1):
    assert host_cases.read(answer) == host_cases.expect(version)
    with pytest.raises(ValueError, match='read-only'):
      answer.payload[0] = 1
  assert clients[0].pull() == host_cases.expect(4)


@pytest.mark.parametrize('how', ['hang up', 'leave', 'both', 'neither'])
def test_buffers_come_back(bench, how):
  """Three at once: the newest, one on lease, and the one that is written."""
  client = host_cases.Client(bench)
  for version in range(100):
    bench.publish(version)
    assert client.pull() == host_cases.expect(version)
    bench.publish(version)
    bench.publish(version)
    if how in ('leave', 'both'):
      assert client.ask(host_cases.Verb.LEAVE).verb == host_cases.Verb.ANSWER
    if how in ('hang up', 'both'):
      client.hang_up()
      client = host_cases.Client(bench)
    bench.list_free()
  assert len(bench.host._store) == 3
  # All but the newest, and what is still on lease.
  assert len(bench.list_free()) == (1 if how == 'neither' else 2)
  assert bool(bench.host._leases) == (how == 'neither')


def test_a_crowd_comes_and_goes(bench):
  num_clients = 10
  for version in range(20):
    clients = [host_cases.Client(bench) for _ in range(num_clients)]
    for number, client in enumerate(clients):
      client.greet()
      bench.publish(100 * version + number)
      client.pull()
    for client in clients:
      client.hang_up()
  # What each of them has is another one; the newest is the last one's.
  assert len(bench.host._store) == num_clients
  assert len(bench.list_free()) == num_clients - 1
  assert not bench.host._leases
  assert not bench.host._friends


def test_descriptors_are_given_back():
  with host_cases.open_bench(is_shared=True) as bench:
    clients = [host_cases.Client(bench) for _ in range(3)]
    for version, client in enumerate(clients):
      bench.publish(version)
      client.pull()
    buffers = bench.host._store._pool._buffers
    assert len({buffer.fd for buffer in buffers}) == 3
    for buffer in buffers:
      assert os.fstat(buffer.fd).st_size == host_cases.LAYOUT.size
  assert [buffer.fd for buffer in buffers] == [-1] * 3


def test_nobody_sees_a_version_with_other_weights(bench):
  """One thread publishes, one answers, and this one looks."""
  num_versions = 2_000
  bench.publish(0)

  def publish():
    for version in range(1, num_versions + 1):
      bench.publish(version)

  threads = [
    threading.Thread(target=bench.host.run),
    threading.Thread(target=publish),
  ]
  for thread in threads:
    thread.start()
  versions = [0]
  connection = bench.listener.connect()
  try:
    while versions[-1] < num_versions:
      answer = connection.request(
        host_cases.Message(host_cases.Verb.PULL), deadline=host_cases.PATIENCE
      )
      first = host_cases.read(answer)
      assert first == host_cases.expect(answer.clock)
      versions.append(answer.clock)
      assert (
        host_cases.read(answer) == first
      )  # Whatever was published meanwhile.
  finally:
    bench.host.stop()
    for thread in threads:
      thread.join(host_cases.PATIENCE)
  assert not any(thread.is_alive() for thread in threads)
  assert versions == sorted(versions)
  assert bench.host.num_sent == len(versions) - 1
  assert len(bench.host._store) <= 3


# --- Others.


def test_status_is_what_the_owner_says(bench):
  client = host_cases.Client(bench)
  for step in (3, 4):
    bench.status['step'] = step
    answer = client.ask(host_cases.Verb.STATUS)
    assert answer.verb == host_cases.Verb.ANSWER
    assert json.loads(answer.text) == bench.status
    assert json.loads(answer.text)['step'] == step


def test_status_of_very_many_nodes_can_be_sent(bench):
  bench.status['members'] = {
    str(node): [f'node-{node}.cluster:40000', 1.7e9 + node / 7]
    for node in range(2_000)
  }
  assert len(json.dumps(bench.status)) > _messages.MAX_TEXT
  answer = host_cases.Client(bench).ask(host_cases.Verb.STATUS)
  _messages.encode_message(answer)
  assert json.loads(answer.text) == {**bench.status, 'members': {}}


def test_stop_is_for_the_owner_to_see(bench):
  client = host_cases.Client(bench)
  bench.publish(1)
  assert not bench.host.stopped.is_set()
  assert client.ask(host_cases.Verb.STOP).verb == host_cases.Verb.ANSWER
  assert bench.host.stopped.is_set()
  # It answers until its owner has ended.
  assert client.ask(host_cases.Verb.STOP).verb == host_cases.Verb.ANSWER
  assert client.pull() == host_cases.expect(1)


def test_who_leaves_is_a_stranger_again(bench):
  client, other = host_cases.Client(bench), host_cases.Client(bench)
  client.greet()
  other.greet(node=2)
  assert client.ask(host_cases.Verb.LEAVE).verb == host_cases.Verb.ANSWER
  host_cases.check_refused(bench, client.push(), 'HELLO')
  assert other.push().verb == host_cases.Verb.ANSWER
  assert client.greet().verb == host_cases.Verb.ANSWER
  assert client.push().verb == host_cases.Verb.ANSWER


def test_what_has_come_is_answered_before_it_ends(bench):
  """Or its sender would not know what became of it."""
  clients = [host_cases.Client(bench) for _ in range(3)]
  for client in clients:
    client.channel.receive(host_cases.Message(host_cases.Verb.STATUS))
  bench.host.stop()
  bench.host.run()
  for client in clients:
    assert client.channel.answers.get_nowait().verb == host_cases.Verb.ANSWER


def test_what_ends_it_is_for_the_owner(bench):
  """So that the process ends, and does not live on where nobody reaches it."""
  bench.host.check()

  def fail(message):
    raise OSError('No space left')

  bench.host._take = fail
  client = host_cases.Client(bench)
  client.greet()
  client.channel.receive(
    host_cases.Message(
      host_cases.Verb.EXCHANGE, learner=1, payload=client.connection.outgoing
    )
  )
  thread = threading.Thread(target=bench.host.run)
  thread.start()
  thread.join(host_cases.PATIENCE)
  assert not thread.is_alive()
  assert bench.host.stopped.is_set()
  with pytest.raises(OSError, match='No space left'):
    bench.host.check()


def test_nothing_to_answer(bench):
  assert not bench.host.answer(0)
  bench.host.stop()
  bench.host.run()  # Ends at once.
