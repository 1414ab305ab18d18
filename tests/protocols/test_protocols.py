"""Protocols one by one, and all of them under random events."""

import json

import hypothesis
from hypothesis import strategies as st
import pytest

from jasgd import protocols
from jasgd.protocols import Fate

# Every protocol; a new one is tested by being listed.
PROTOCOLS = {
  'hardsync': protocols.hardsync,
  'backup': lambda: protocols.backup(2),
  'softsync, 1': lambda: protocols.softsync(1),
  'softsync, 3': lambda: protocols.softsync(3),
  'asynchronous': protocols.asynchronous,
  'constant_delay': lambda: protocols.constant_delay(4),
  'downpour': lambda: protocols.downpour(2, 4),
  'ssp, 0': lambda: protocols.ssp(0),
  'ssp, 2': lambda: protocols.ssp(2),
  'rennala': lambda: protocols.rennala(3),
  'ringmaster': lambda: protocols.ringmaster(2),
  'ramp_up, hardsync': lambda: protocols.ramp_up(protocols.hardsync(), 6),
  'ramp_up, ssp': lambda: protocols.ramp_up(protocols.ssp(1), 6),
}
REPRS = {
  'hardsync': 'hardsync()',
  'backup': 'backup(num_backups=2)',
  'softsync, 1': 'softsync(n=1)',
  'softsync, 3': 'softsync(n=3)',
  'asynchronous': 'asynchronous()',
  'constant_delay': 'constant_delay(delay=4)',
  'downpour': 'downpour(n_push=2, n_fetch=4)',
  'ssp, 0': 'ssp(s=0)',
  'ssp, 2': 'ssp(s=2)',
  'rennala': 'rennala(s=3)',
  'ringmaster': 'ringmaster(r=2)',
  'ramp_up, hardsync': 'ramp_up(protocol=hardsync(), num_updates=6)',
  'ramp_up, ssp': 'ramp_up(protocol=ssp(s=1), num_updates=6)',
}
NUM_LEARNERS = 5
every_protocol = pytest.mark.parametrize(
  'make', [pytest.param(make, id=name) for name, make in PROTOCOLS.items()]
)


class World:
  """Drives a protocol: learners that compute, wait, leave and come back."""

  def __init__(self, protocol):
    self.protocol = protocol
    protocol.init(NUM_LEARNERS)
    # The learners that `init` released: all that are admitted at the start.
    inner = getattr(protocol, 'protocol', protocol)
    self.read_clock = dict.fromkeys(inner.alive, 0)  # Of learners that compute.
    self.step = dict.fromkeys(range(NUM_LEARNERS), 0)
    self.fates = []
    self.num_pushed = 0

  def follow(self, decision):
    for learner in decision.released:
      assert learner in self.protocol.alive
      assert learner not in self.read_clock, 'It computes already.'
      self.read_clock[learner] = self.protocol.clock

  def push(self, learner):
    before = self.protocol.clock
    read_clock = self.read_clock.pop(learner)
    assert 0 <= read_clock <= before
    decision = self.protocol.on_push(learner, self.step[learner], read_clock)
    assert self.protocol.clock == before + decision.updates
    self.step[learner] += 1
    self.num_pushed += 1
    assert decision.fate is not None
    self.fates.append(decision.fate)
    self.follow(decision)

  def leave(self, learner):
    self.read_clock.pop(learner, None)
    self.follow(self.protocol.on_leave(learner))

  def join(self, learner):
    self.follow(self.protocol.on_join(learner))

  def act(self, number):
    """Turns a number into one of the events that are possible now."""
    kind, number = number % 8, number // 8
    alive = sorted(self.protocol.alive)
    gone = sorted(set(range(NUM_LEARNERS)) - set(alive))
    if kind == 0 and alive:
      self.leave(alive[number % len(alive)])
    elif kind == 1 and gone:
      self.join(gone[number % len(gone)])
    elif self.read_clock:
      computing = sorted(self.read_clock)
      self.push(computing[number % len(computing)])
    # As long as a learner is alive, one of them computes.
    assert self.read_clock or not self.protocol.alive, 'A deadlock.'


@every_protocol
@hypothesis.given(st.lists(st.integers(0, 10_000), max_size=80))
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_no_deadlock_under_random_joins_and_leaves(make, numbers):
  world = World(make())
  for number in numbers:
    world.act(number)
  assert len(world.fates) == world.num_pushed


@every_protocol
@hypothesis.given(st.lists(st.integers(0, 10_000), max_size=50))
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
def test_a_restored_protocol_continues_as_the_saved_one(make, numbers):
  plain, saved = World(make()), World(make())
  for number in numbers:
    plain.act(number)
    state = json.loads(json.dumps(saved.protocol.save()))
    saved.protocol = make()
    saved.protocol.restore(state)
    saved.act(number)
    assert saved.protocol.save() == plain.protocol.save()
  assert saved.fates == plain.fates
  assert saved.read_clock == plain.read_clock


@every_protocol
def test_describe_names_waiting_learners(make):
  assert 'wait' in make().describe()


def test_hardsync_waits_for_all():
  world = World(protocols.hardsync())
  for clock in range(3):
    for learner in (3, 1, 0, 4):
      world.push(learner)
      assert world.protocol.clock == clock
      assert learner not in world.read_clock
    world.push(2)
    assert world.protocol.clock == clock + 1
    assert world.read_clock == dict.fromkeys(range(5), clock + 1)


def test_hardsync_continues_when_a_learner_is_lost():
  world = World(protocols.hardsync())
  for learner in (0, 1, 2, 3):
    world.push(learner)
  world.leave(4)
  assert world.protocol.clock == 1
  assert set(world.read_clock) == {0, 1, 2, 3}


def test_backup_drops_exactly_the_late_ones():
  world = World(protocols.backup(2))
  for learner in (0, 1, 2):
    world.push(learner)
  assert world.protocol.clock == 1
  world.push(3)  # Computed at clock 0: late, and released at once.
  assert world.fates == [Fate.APPLIED] * 3 + [Fate.DROPPED_LATE]
  assert world.read_clock[3] == 1
  for learner in (3, 0, 1):
    world.push(learner)
  assert world.protocol.clock == 2


def test_softsync_takes_any_gradients():
  world = World(protocols.softsync(2))  # c = 5 // 2 = 2.
  world.push(0)
  world.push(0)
  assert world.protocol.clock == 1
  world.leave(4)
  world.leave(3)  # c = 3 // 2 = 1.
  world.push(1)
  assert world.protocol.clock == 2


def test_softsync_updates_when_the_quorum_shrinks():
  world = World(protocols.softsync(1))  # c = 5.
  for _ in range(4):
    world.push(0)
  world.leave(4)
  assert world.protocol.clock == 1


def test_ssp_holds_fast_learners():
  world = World(protocols.ssp(2))
  for _ in range(3):
    world.push(0)
  assert 0 not in world.read_clock  # 3 steps ahead of the others.
  for learner in (1, 2, 3):
    world.push(learner)
  assert 0 not in world.read_clock
  world.push(4)
  assert 0 in world.read_clock


def test_a_joiner_of_ssp_starts_at_the_slowest():
  world = World(protocols.ssp(1))
  world.leave(4)
  for _ in range(3):
    for learner in range(4):
      world.push(learner)
  world.join(4)  # As if it had made 3 steps.
  for _ in range(2):
    world.push(0)
    assert (0 in world.read_clock) == (world.step[0] == 4)
  for learner in range(1, 4):
    world.push(learner)
  assert 0 not in world.read_clock  # It waits for the joiner's fourth step.
  world.push(4)
  assert 0 in world.read_clock


def test_rennala_takes_gradients_of_the_current_clock_only():
  world = World(protocols.rennala(2))
  world.push(0)
  world.push(1)
  assert world.protocol.clock == 1
  world.push(2)  # Computed at clock 0.
  world.push(0)  # At clock 0 too: it was released before the update.
  assert world.fates[2:] == [Fate.DROPPED_STALE] * 2
  world.push(0)
  world.push(2)
  assert world.protocol.clock == 2


def test_ringmaster_drops_a_staleness_above_r_and_applies_r():
  world = World(protocols.ringmaster(2))
  for _ in range(2):
    world.push(0)
  world.push(1)  # Staleness 2.
  assert world.fates[-1] == Fate.APPLIED
  assert world.protocol.clock == 3
  world.push(2)  # Staleness 3.
  assert world.fates[-1] == Fate.DROPPED_STALE
  assert world.protocol.clock == 3
  world.push(2)  # The clock that it read was the current one.
  assert world.fates[-1] == Fate.APPLIED
  assert world.protocol.clock == 4


def test_ramp_up_admits_learners_one_by_one():
  world = World(protocols.ramp_up(protocols.asynchronous(), 10))
  seen = []
  for _ in range(10):
    seen.append(len(world.read_clock))
    world.push(0)
  assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize(
  ('build', 'message'),
  [
    (lambda: protocols.softsync(0), 'n must be .* at least 1, got 0'),
    (lambda: protocols.softsync(2.5), r'n must be a whole .* got 2\.5'),
    (lambda: protocols.backup(0), 'num_backups must be .* at least 1, got 0'),
    (lambda: protocols.ssp(-1), 's must be .* at least 0, got -1'),
    (lambda: protocols.downpour(0, 3), 'n_push must be .* at least 1, got 0'),
    (lambda: protocols.downpour(2, 0), 'n_fetch must be .* at least 1, got 0'),
    (lambda: protocols.softsync(9).init(5), 'n must be at most num_learners=5'),
    (lambda: protocols.backup(5).init(5), 'below num_learners=5, got 5'),
    (lambda: protocols.constant_delay(3).init(5), 'needs exactly 4 learners'),
    (lambda: protocols.hardsync().init(0), 'num_learners must be at least 1'),
    (
      lambda: protocols.asynchronous().on_push(3, 0, 0),
      'Learner 3 pushed step 0 without having joined',
    ),
    (
      lambda: protocols.ramp_up(protocols.asynchronous, 3),
      'ramp_up takes a protocol .* got <class',
    ),
    (
      lambda: protocols.ramp_up(
        protocols.ramp_up(protocols.hardsync(), 3), num_updates=4
      ),
      r'than a ramp_up.* got ramp_up\(protocol=hardsync\(\), num_upd',
    ),
  ],
)
def test_refused_arguments(build, message):
  with pytest.raises(ValueError, match=message):
    build()


def test_a_returning_learner_keeps_its_turn_in_a_ramp_up():
  """The turns are at clock 0, 2, 4, 6 and 8."""
  world = World(protocols.ramp_up(protocols.asynchronous(), 10))
  for _ in range(4):
    world.leave(1)
    world.join(1)
  for _ in range(2):
    assert set(world.read_clock) == {0}
    world.push(0)
  assert set(world.read_clock) == {0, 1}
  world.leave(1)
  world.join(1)  # Its turn has come: it is admitted at once.
  assert set(world.read_clock) == {0, 1}


@pytest.mark.parametrize('name', PROTOCOLS)
def test_repr_is_the_call_that_builds_the_protocol(name):
  assert repr(PROTOCOLS[name]()) == REPRS[name]


@pytest.mark.parametrize('name', PROTOCOLS)
def test_only_states_of_an_equal_protocol_are_restored(name):
  protocol = PROTOCOLS[name]()
  protocol.init(NUM_LEARNERS)
  state = protocol.save()
  for other_name, make in PROTOCOLS.items():
    if other_name == name:
      make().restore(state)
    else:
      with pytest.raises(ValueError, match=r'no state of|The state is of'):
        make().restore(state)
  for key in state:
    rest = {other: state[other] for other in state if other != key}
    message = rf'no state of {name.split(",")[0]}.*: it has no {key}\.'
    with pytest.raises(ValueError, match=message):
      protocol.restore(rest)
  assert protocol.save() == state


def test_other_arguments_are_another_protocol():
  protocol = protocols.softsync(2)
  protocol.init(NUM_LEARNERS)
  message = r"'n': 2}}, and cannot be restored into .*'softsync', .*'n': 3}}"
  with pytest.raises(ValueError, match=message):
    protocols.softsync(3).restore(protocol.save())


class _Other(protocols.asynchronous):
  """A protocol that inherits its name, and thereby its `repr`."""

  def __init__(self, sizes=(1, 2)):
    super().__init__()
    self.sizes = sizes

  def arguments(self):
    return {'sizes': self.sizes}

  def __repr__(self):
    return 'asynchronous()'


def test_protocols_of_equal_repr_are_told_apart():
  protocol = _Other()
  protocol.init(NUM_LEARNERS)
  state = json.loads(json.dumps(protocol.save()))
  _Other().restore(state)
  for other in (protocols.asynchronous(), _Other(sizes=(1, 3))):
    assert repr(other) == repr(protocol)
    with pytest.raises(ValueError, match='cannot be restored into'):
      other.restore(state)


def test_arguments_that_json_cannot_hold_are_told_apart_by_repr():
  class Local(_Other):
    def __repr__(self):
      return f'Local({sorted(self.sizes)})'

  protocol = Local(sizes={1, 2})
  assert protocol.identify() == 'Local([1, 2])'
  protocol.init(NUM_LEARNERS)
  Local(sizes={2, 1}).restore(protocol.save())
  with pytest.raises(ValueError, match=r'cannot be restored into Local\(\[3'):
    Local(sizes={3}).restore(protocol.save())


@every_protocol
def test_a_read_clock_is_from_0_to_the_clock(make):
  for read_clock in (-1, 1):
    protocol = make()
    protocol.init(NUM_LEARNERS)
    before = protocol.save()
    message = f'read_clock={read_clock}; it must be from 0 to the clock, 0'
    with pytest.raises(ValueError, match=message):
      protocol.on_push(0, 0, read_clock)
    assert protocol.save() == before


@pytest.mark.parametrize(
  ('make', 'learner'),
  [
    (protocols.hardsync, 0),
    (lambda: protocols.backup(1), 0),
    (lambda: protocols.ssp(0), 0),
    (lambda: protocols.ramp_up(protocols.asynchronous(), 10), 4),
  ],
)
def test_a_held_learner_does_not_push(make, learner):
  world = World(make())
  world.push(0)
  before = world.protocol.save()
  with pytest.raises(ValueError, match=f'Learner {learner} .* is held back'):
    world.protocol.on_push(learner, 1, 0)
  assert world.protocol.save() == before


@every_protocol
def test_a_ramp_up_has_the_attributes_of_its_protocol(make):
  inside = make()
  if isinstance(inside, protocols.ramp_up):
    return
  outside = protocols.ramp_up(inside, 5)
  for name in (
    *('steps_per_push', 'steps_per_fetch'),
    *('needs_current_clock', 'needs_equal_times'),
  ):
    assert getattr(outside, name) == getattr(inside, name)
