"""The rules of the server, one by one, with scripted clients."""

import json
import logging
import math

import numpy as np
import pytest

from jasgd import protocols
from jasgd import runtime
from jasgd import traces
from tests.runtime import cases
from tests.runtime import scripted

Fate, Flag, Verb = protocols.Fate, scripted.Flag, scripted.Verb
Message = scripted.Message
join, get_counts = scripted.join, scripted.get_counts
list_kinds = scripted.list_kinds


# --- The start.


def test_learners_wait_for_each_other(open_bench):
  bench = open_bench(num_learners=3)
  first = bench.join()
  second = bench.join()
  assert first.last is None
  third = bench.join()
  for number, client in enumerate((first, second, third)):
    client.hear()
    assert client.last.verb == Verb.SNAPSHOT
    assert (client.last.worker, client.last.push) == (number, 0)
    assert json.loads(client.last.text)['learner'] == number


def test_the_start_has_a_deadline(open_bench):
  deadlines = runtime.Deadlines(start=50.0)
  bench = open_bench(num_learners=3, deadlines=deadlines)
  clients = join(bench, 2)
  bench.tick(49.0)
  assert [client.hear() for client in clients] == [[], []]
  assert clients[0].waits[-1] == (
    'Learners 0, 1 wait for 1 more of 3 learners to join'
  )
  bench.tick(2.0)
  for client in clients:
    assert [answer.verb for answer in client.hear()] == [Verb.SNAPSHOT]
  # A late learner joins a run that has begun.
  assert bench.join().last.verb == Verb.SNAPSHOT


def test_a_learner_that_joined_and_left_counts_as_joined(open_bench):
  bench = open_bench(num_learners=3)
  first, second = join(bench, 2)
  second.hang_up()
  bench.step()
  third = bench.join()
  assert [answer.verb for answer in first.hear()] == [Verb.SNAPSHOT]
  assert third.last.verb == Verb.SNAPSHOT


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'num_updates': 0}, 'num_updates must be .* at least 1, got 0'),
    ({'num_updates': -5}, 'num_updates must be .* at least 1, got -5'),
    ({'num_epochs': 0.0}, 'num_epochs must be finite and above 0, got 0.0'),
    ({'num_epochs': math.nan}, 'num_epochs must be .* got nan'),
    ({'num_updates': None}, 'a run must end'),
  ],
)
def test_bad_budgets_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    cases.make_settings(**options)


# --- Gradients.


def test_a_repeated_push_gets_the_first_answer(open_bench):
  bench = open_bench(num_learners=2)
  first, second = join(bench, 2)
  message = first.make_push()
  (answer,) = first.send(message)
  second.push()
  assert bench.server.clock == 2
  (again,) = first.send(message)
  assert (again.verb, again.fate, again.push) == (Verb.SNAPSHOT, 0, 1)
  assert (again.version, again.incarnation) == (answer.version, 0) == (1, 0)
  np.testing.assert_array_equal(again.payload, answer.payload)
  assert bench.server.clock == 2
  # A gradient at the first answer is accepted, even after the second answer.
  first.weights = answer
  (answer,) = first.push()
  assert answer.version == bench.server.clock == 3
  bench.check_leases()


def test_a_repeated_notice_gets_the_first_answer(open_bench):
  bench = open_bench(num_learners=1)
  (client,) = join(bench, 1)
  message = Message(Verb.NOTICE, worker=0, push=0, loss=math.nan)
  answers = client.send(message) + client.send(message)
  assert [answer.push for answer in answers] == [1, 1]
  assert bench.server.describe()['fates'] == {'not_finite': 1}


def test_a_gradient_after_the_end(open_bench):
  bench = open_bench(num_learners=2, num_updates=1)
  first, second = join(bench, 2)
  (answer,) = first.push()
  assert answer.verb == Verb.SNAPSHOT
  assert bench.server.end_reason == 'All 1 updates were made.'
  assert not bench.server.is_over
  for client in (first, second):
    (answer,) = client.push()
    assert (answer.verb, answer.text) == (Verb.END, bench.server.end_reason)
  assert bench.server.is_over
  trace = bench.server.get_trace()
  assert trace.fate.tolist() == [Fate.APPLIED, Fate.AFTER_END, Fate.AFTER_END]
  assert bench.join().last.verb == Verb.END  # A late client gets the END.


def test_the_end_does_not_wait_for_ever(open_bench):
  deadlines = runtime.Deadlines(end=7.0)
  bench = open_bench(num_learners=2, num_updates=1, deadlines=deadlines)
  first, _ = join(bench, 2)
  first.push()
  bench.tick(6.0)
  assert not bench.server.is_over
  bench.tick(2.0)
  assert bench.server.is_over


def test_a_budget_of_epochs(open_bench):
  bench = open_bench(num_learners=1, num_updates=None, num_epochs=0.01)
  (client,) = join(bench, 1)
  while bench.server.end_reason is None:
    client.push()
  assert bench.server.clock == 3  # Of 4 samples each: 10 of 1000 are reached.
  assert 'epochs' in bench.server.end_reason


# --- Late learners.


@pytest.mark.parametrize(
  'protocol', [protocols.hardsync, lambda: protocols.ssp(0)]
)
def test_a_late_learner_is_lost_and_comes_back(open_bench, protocol):
  deadlines = runtime.Deadlines(step=30.0, silence=20.0)
  bench = open_bench(protocol(), num_learners=2, deadlines=deadlines)
  first, late = join(bench, 2)
  for _ in range(2):  # After two pushes no learner counts as compiling.
    first.push()
    late.push()
    first.hear()
  clock = bench.server.clock
  first.push()
  held = late.make_push()
  assert first.last.fate == Fate.APPLIED
  for _ in range(5):
    bench.tick(5.5)
  assert first.hear() == []
  # There are several WAITs within the deadline `silence`.
  assert 3 <= len(first.waits) <= 5
  assert 'Learners 0 wait for 1 (computing for' in first.waits[-1]
  assert bench.server.describe()['waits'] in first.waits[-1]
  bench.tick(5.0)
  (answer,) = first.hear()
  assert answer.verb == Verb.SNAPSHOT
  assert answer.version == bench.server.clock == clock + 1
  assert late.hear() == [None]  # Its channel is closed.
  late.reconnect()
  (answer,) = late.hello(held)
  assert (answer.verb, answer.worker) == (Verb.SNAPSHOT, 1)
  assert bench.server.describe()['fates']['dropped_gone'] == 1
  first.push()
  late.push()
  trace = bench.server.get_trace()
  cases.check_replay(bench.server, trace, bench.task)
  bench.check_leases()


def test_deadlines_follow_observed_times(open_bench):
  bench = open_bench(protocols.hardsync(), num_learners=2)
  first, second = join(bench, 2)
  deadlines, sessions = bench.settings.deadlines, bench.server._sessions
  assert sessions.find_step_deadline(deadlines) == deadlines.first_step
  for seconds in (40.0, 2.0, 1.0):  # The first time includes compiling.
    bench.tick(seconds)
    first.push()
    second.push()
    first.hear()
  assert sessions.find_step_deadline(deadlines) == pytest.approx(20.0, rel=0.05)


def test_a_silent_learner_does_not_delay_softsync(open_bench):
  bench = open_bench(protocols.softsync(1), num_learners=2)
  first, _ = join(bench, 2)
  for _ in range(6):
    bench.tick(1000.0)
    assert first.push()[0].verb == Verb.SNAPSHOT
  assert bench.server.clock == 3
  assert bench.server.describe()['num_alive'] == 2


def test_a_new_learner_takes_the_number_of_a_lost_one(open_bench):
  bench = open_bench(num_learners=2)
  first, second = join(bench, 2)
  second.hang_up()
  assert list_kinds(bench, traces.Kind.LEAVE) == [1]
  third = bench.join()
  assert third.last.worker == 1
  assert third.last.verb == Verb.SNAPSHOT
  # The number of the lost learner is taken; it may join as a new learner.
  second.reconnect()
  assert second.hello(worker=1)[0].verb == Verb.REFUSED
  assert second.hello(worker=-1)[0].worker == 2
  first.push()
  assert bench.server.describe()['num_alive'] == 3


def test_a_learner_comes_back_before_its_channel_is_missed(open_bench):
  bench = open_bench(num_learners=2)
  first, second = join(bench, 2)
  again = bench.connect()
  again.instance = second.instance
  (answer,) = again.hello(worker=1)
  assert (answer.worker, answer.verb) == (1, Verb.SNAPSHOT)
  assert second.hear() == [None]
  again.push()
  first.push()
  assert bench.server.clock == 2
  bench.check_leases()


@pytest.mark.parametrize('is_polite', [False, True])
def test_a_lost_learner_may_fail_the_run(open_bench, is_polite):
  bench = open_bench(num_learners=2, on_learner_lost='fail')
  first, second = join(bench, 2)
  if is_polite:
    second.say(Verb.LEAVE)
    answer, end = second.hear()
    assert (answer.verb, end) == (Verb.ANSWER, None)
  else:
    second.hang_up()
  status = bench.server.describe()
  assert status['is_failed'] != is_polite
  if not is_polite:
    assert 'Learner 1 was lost' in status['end_reason']
    assert first.push()[0].verb == Verb.END


# --- Gradients that are not finite.


def test_divergence_ends_the_run(open_bench, caplog):
  caplog.set_level(logging.WARNING)
  bench = open_bench(num_learners=2)
  first, second = join(bench, 2)
  first.push()
  second.push()
  for push in range(1, 5):
    assert bench.server.end_reason is None
    answer = second.ask(
      Verb.NOTICE,
      worker=1,
      push=push,
      version=second.last.version,
      loss=math.inf,
    )
  assert answer.verb == Verb.END
  status = bench.server.describe()
  assert status['is_diverged']
  assert status['learners']['1']['num_not_finite'] == 4
  for word in ('learner 1', 'staleness was 0.5', 'rate', 'rule of thumb'):
    assert word in status['end_reason']
  assert 'Learner 1: the gradient of push 1' in caplog.text
  fates = bench.server.get_trace().fate.tolist()
  assert fates.count(Fate.NOT_FINITE) == 4


def test_a_finite_gradient_resets_the_count_of_others(open_bench):
  bench = open_bench(num_learners=1)
  (client,) = join(bench, 1)
  for _ in range(8):
    push, clock = client.last.push, client.last.version
    client.ask(Verb.NOTICE, worker=0, push=push, version=clock, loss=math.nan)
    client.push()
  assert bench.server.end_reason is None
  assert bench.server.clock == 8
  json.dumps(bench.server.describe(), allow_nan=False)


def test_a_replica_that_is_not_finite_starts_again(open_bench):
  task = cases.make_task()
  bench = open_bench(protocols.downpour(2, 3), task, num_learners=1)
  (client,) = join(bench, 1)
  answer = client.ask(Verb.NOTICE, worker=0, push=0, loss=math.nan)
  assert (answer.verb, answer.push) == (Verb.SNAPSHOT, 1)
  kinds = bench.server.get_trace().records['kind'].tolist()
  names = [traces.Kind(kind).name for kind in kinds]
  assert ' '.join(names) == 'JOIN FETCH PUSH LEAVE JOIN FETCH'


# --- Memory.


@pytest.mark.parametrize('is_overlapped', [False, True])
def test_buffers_are_kept(open_bench, is_overlapped):
  bench = open_bench(num_learners=3, num_updates=300, overlap=is_overlapped)
  clients = join(bench, 3)
  for round_number in range(100):
    for client in clients:
      flags = Flag.NONE
      message = client.make_push()
      if is_overlapped:
        client.ask(Verb.FETCH, worker=client.learner)
        message.flags = flags = Flag.KEEPS_WEIGHTS
      fetched = client.weights
      (answer,) = client.send(message)
      if flags:
        assert answer.verb == Verb.ANSWER
        client.weights = fetched
        client.weights.push = answer.push
    if round_number % 10 == 0:
      bench.check_leases()
  assert bench.server.clock == 300
  status = json.loads(json.dumps(bench.server.describe(), allow_nan=False))
  limit = 3 + 3 + (3 if is_overlapped else 0)
  assert status['num_buffers'] <= limit
  trace = bench.server.get_trace()
  staleness = trace.staleness[trace.fate == Fate.APPLIED]
  # The last of three learners is two updates late; with overlap, three.
  assert staleness[10:].mean() == (3 if is_overlapped else 2)
  cases.check_replay(bench.server, trace, bench.task)


def test_all_messages_are_counted(open_bench):
  bench = open_bench(num_learners=1)
  (client,) = join(bench, 1)
  client.push()
  client.say(Verb.STATUS)
  client.say(Verb.PULL)
  client.say(Verb.WAIT)
  client.send(Message(Verb.EXCHANGE, worker=0, push=9))
  client.say(Verb.LEAVE)
  counts = get_counts(bench)
  assert counts == {'accepted': 5, 'verb': 1, 'size': 1}
