"""What a supervisor of nodes decides, with nodes that are told what to say."""

import io
import logging

import numpy as np
import pytest

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment import _node_supervisor
from jasgd.experiment import _node_watch
from jasgd.experiment import _supervisor

CENTRE = traces.CENTRE
NUM_STEPS = 10  # Of each node.
SILENCE, FIRST_STEP = 60.0, 300.0
LOOK = 1.0  # Seconds between two looks, of the scenes' own time.
KILLED = -9


class Scene:
  """Nodes, whoever looks at them, and a time that passes with every look.

  A node makes a step between two looks, unless a test says otherwise.

  Attributes:
    events: What was done to whom, in order: ('start' | 'stop' | 'end', member).
    at: Functions to be called at a look, by its number.
  """

  def __init__(self, folder, monkeypatch, *, num_nodes=3, centre=True):
    self.folder = workdirs.Workdir(folder)
    self.members = [*range(num_nodes)] + [CENTRE] * centre
    self.events, self.at = [], {}
    self.steps = dict.fromkeys(self.members, 0)
    self.silent, self.stepless = set(), set()
    self.codes = {}
    self.now = 1000.0
    self.num_looks = 0
    self.evaluation_seconds = self.end_seconds = 0.0
    self.timeouts = {}  # What each was given to end, in seconds.
    self.evaluations = []  # Who was evaluated each time.
    self.supervisor = None
    monkeypatch.setattr(_node_supervisor, 'time', self)

  # --- As the module `time`.

  def monotonic(self):
    return self.now

  def time(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds

  # --- As a watch.

  def look_around(self):
    self.num_looks += 1
    assert self.num_looks < 2000, 'It does not end.'
    self.now += LOOK
    self.at.get(self.num_looks, lambda: None)()
    for node, step in self.steps.items():
      if node >= 0 and self.is_there(node) and node not in self.stepless:
        self.steps[node] = min(NUM_STEPS, step + 1)

  def is_there(self, member):
    return member not in self.silent and self.codes.get(member) is None

  def ask(self, member):
    if not self.is_there(member):
      return None
    step = self.steps[member]
    status = {'step': step, 'has_begun': True, 'is_diverged': False}
    status |= {'is_done': step == NUM_STEPS, 'origin': 0.0, 'mass': 0.0}
    return status if member == CENTRE else {**status, 'loss': 0.5}

  def stop(self, member):
    self.events.append(('stop', member))

  def evaluate(self, members):
    self.now += self.evaluation_seconds
    self.evaluations.append(sorted(members))
    steps = {
      node: self.steps[node]
      for node in members
      if node >= 0 and self.is_there(node)
    }
    if not steps:
      return None
    return _node_watch.Evaluated(steps, np.zeros(1), {'test/loss': 0.25})

  def close(self):
    self.events.append(('close', None))

  # --- The run.

  def start(self, member):
    self.events.append(('start', member))
    self.codes[member] = None
    self.silent.discard(member)
    return Member(self, member)

  def kill(self, member):
    self.codes[member] = KILLED

  def press_ctrl_c(self):
    self.supervisor._stop_signal.set()

  def run(self, *, eval_every=1000, **options):
    starts = {
      member: lambda member=member: self.start(member)
      for member in self.members
    }
    with workdirs.MetricsWriter(self.folder, use_tensorboard=False) as writer:
      self.supervisor = _node_supervisor.NodeSupervisor(
        self,
        starts,
        self.folder,
        writer,
        num_steps=NUM_STEPS * (len(self.members) - (CENTRE in self.members)),
        eval_every=eval_every,
        steps_per_epoch=10.0,
        get_rate=lambda epoch: 1.0,
        deadlines=runtime.Deadlines(silence=SILENCE, first_step=FIRST_STEP),
        stream=io.StringIO(),
        **options,
      )
      # It looks as soon as it has looked: time passes by looks.
      self.supervisor._stop_signal.wait = lambda _: (
        self.supervisor._stop_signal.is_set()
      )
      return self.supervisor.run()

  def list_events(self, kind):
    return [member for what, member in self.events if what == kind]


class Member:
  """A process, as a supervisor sees it."""

  def __init__(self, scene, member):
    self._scene, self._member = scene, member
    self.name = runtime.name_member(member)

  @property
  def code(self):
    """Its exit code; None while it runs."""
    return self._scene.codes[self._member]

  def end(self, timeout):
    """Ends it."""
    self._scene.events.append(('end', self._member))
    self._scene.timeouts[self._member] = timeout
    self._scene.now += self._scene.end_seconds
    if self.code is None:
      self._scene.codes[self._member] = 0 if timeout else KILLED
    return self.code

  def read_log(self):
    """What it said last."""
    return f'Here was {self.name}.'


@pytest.fixture
def scene(tmp_path, monkeypatch):
  return Scene(tmp_path, monkeypatch)


def test_a_run_ends_when_all_are_done(scene):
  ended = scene.run()
  assert ended['clock'] == 3 * NUM_STEPS
  assert not ended['lost']
  assert not ended['is_interrupted']
  assert scene.evaluations == [sorted(scene.members)]
  assert scene.list_events('start') == scene.members


def test_the_centre_ends_when_the_nodes_have(scene):
  """One of them may have moved, and be about to tell the centre."""
  scene.at[4] = scene.press_ctrl_c
  ended = scene.run()
  assert ended['is_interrupted']
  assert scene.list_events('stop') == [0, 1, 2]
  assert scene.list_events('end') == [0, 1, 2, CENTRE]
  assert scene.events.index(('stop', 2)) < scene.events.index(('end', 0))


def test_the_centre_has_time_to_end_however_long_nodes_take(scene):
  scene.end_seconds = 25.0
  scene.run()
  assert scene.timeouts[0] == scene.timeouts[CENTRE] > 20
  assert scene.timeouts[2] < 10


@pytest.mark.parametrize('member', [1, CENTRE])
def test_who_dies_as_the_run_ends_is_lost(member, scene, caplog):
  """It has made its steps, but what it has saved is older."""
  evaluate = scene.evaluate

  def kill_and_evaluate(members):
    scene.kill(member)
    return evaluate(members)

  scene.evaluate = kill_and_evaluate
  assert scene.run()['lost'] == [member]
  assert f'{runtime.name_member(member)} was lost (exit code -9)' in caplog.text


def test_of_a_group_that_is_done_all_is_saved(tmp_path, monkeypatch):
  scene = Scene(tmp_path, monkeypatch, centre=False)
  scene.evaluate = lambda members: scene.kill(1)
  assert not scene.run(is_group=True)['lost']


def test_who_looks_stops_the_centre_when_no_node_answers(scene):
  """Nobody else can tell that nodes of others have ended."""
  left = []

  def sleep(seconds):
    scene.now += seconds
    assert scene.list_events('stop') == [0, 1, 2]
    left.append(scene.is_there(1))
    scene.silent = {0, 1, 2} if len(left) > 2 else {0}

  scene.sleep = sleep
  scene.run(is_owner=False)
  assert left == [True] * 3
  assert scene.list_events('stop') == [0, 1, 2, CENTRE]


def test_who_looks_does_not_wait_for_ever_to_stop_the_centre(scene):
  scene.run(is_owner=False)  # Nobody obeys.
  assert scene.list_events('stop') == [0, 1, 2, CENTRE]


def test_ctrl_c_ends_a_look_alone(scene):
  scene.at[4] = scene.press_ctrl_c
  assert scene.run(is_owner=False)['is_interrupted']
  assert not scene.list_events('stop')


def test_ctrl_c_before_all_have_come(scene):
  scene.at[1] = lambda: scene.silent.add(2)
  scene.at[3] = scene.press_ctrl_c
  ended = scene.run()
  assert ended['is_interrupted']
  assert scene.list_events('end') == [0, 1, 2, CENTRE]


def test_the_others_go_on_without_one_that_died(scene, caplog):
  scene.at[5] = lambda: scene.kill(1)
  ended = scene.run()
  assert ended['lost'] == [1]
  assert ended['clock'] == 2 * NUM_STEPS + 4
  assert scene.evaluations == [[CENTRE, 0, 2]]
  assert 'node 1 was lost (exit code -9).\n' in caplog.text


def test_who_is_silent_for_long_is_lost_until_it_answers(scene, caplog):
  caplog.set_level(logging.WARNING)
  scene.stepless = {0}
  scene.at[5] = lambda: scene.silent.add(1)
  lost = []
  scene.at[5 + int(SILENCE)] = lambda: lost.append(1 in scene.supervisor._lost)
  scene.at[8 + int(SILENCE)] = lambda: lost.append(1 in scene.supervisor._lost)
  scene.at[80] = lambda: scene.silent.clear() or scene.stepless.clear()
  ended = scene.run()
  assert lost == [False, True]
  assert not ended['lost']
  assert ended['clock'] == 3 * NUM_STEPS
  assert 'node 1 has said nothing for 60 s.' in caplog.text
  assert 'node 1 is back.' in caplog.text


@pytest.mark.parametrize('is_group', [False, True])
def test_time_in_which_nobody_asks_is_no_silence(scene, is_group):
  """One question that fails, after a long evaluation, means nothing."""
  scene.members = [0, 1, 2]
  scene.evaluation_seconds = 10 * SILENCE
  lost = []

  def fall_silent():
    scene.silent.add(1)

  def come_back():
    lost.extend(scene.supervisor._lost)
    scene.silent.clear()

  scene.at[5], scene.at[7] = fall_silent, come_back
  ended = scene.run(eval_every=3, is_group=is_group)
  assert len(scene.evaluations) > 5
  assert not lost
  assert not ended['lost']


def test_without_nodes_there_is_no_run(scene):
  scene.at[5] = lambda: [scene.kill(node) for node in range(3)]
  problem = (
    'All nodes are gone. The last one said:\nHere was node 2.\n.*goes on'
  )
  with pytest.raises(_supervisor.RunError, match=problem):
    scene.run()
  assert scene.list_events('end')[-1] == CENTRE


# --- The centre.


def test_a_killed_centre_is_started_again(scene):
  scene.at[5] = lambda: scene.kill(CENTRE)
  ended = scene.run()
  assert not ended['lost']
  assert scene.list_events('start') == [*scene.members, CENTRE]


def test_a_centre_that_ended_by_itself_is_not(scene):
  scene.at[5] = lambda: scene.codes.update({CENTRE: 1})
  problem = 'exit code 1.*\nHere was the centre.\n.*goes on from the last check'
  with pytest.raises(_supervisor.RunError, match=problem):
    scene.run()
  assert scene.list_events('start') == scene.members


def test_a_silent_centre_is_killed_and_started_again(scene):
  scene.stepless = {0}
  scene.at[5] = lambda: scene.silent.add(CENTRE)
  scene.at[100] = scene.stepless.clear
  ended = scene.run()
  assert not ended['lost']
  assert scene.list_events('start') == [*scene.members, CENTRE]
  # Before the other one came: two would write to one file.
  first = scene.events.index(('end', CENTRE))
  assert scene.events[first + 1] == ('start', CENTRE)


def test_a_new_centre_has_time_to_start(scene):
  scene.stepless = {0}
  scene.at[5] = lambda: scene.kill(CENTRE)
  scene.at[6] = lambda: scene.silent.add(CENTRE)
  scene.at[200] = lambda: scene.silent.clear() or scene.stepless.clear()
  assert 6 + SILENCE < 200 < FIRST_STEP
  scene.run()
  assert scene.list_events('start') == [*scene.members, CENTRE]


def test_who_looks_can_only_say_that_a_centre_is_silent(scene, caplog):
  scene.stepless = {0}
  scene.at[5] = lambda: scene.silent.add(CENTRE)
  scene.at[100] = scene.stepless.clear
  ended = scene.run(is_owner=False)
  assert ended['lost'] == [CENTRE]
  assert 'the centre has said nothing for 60 s.' in caplog.text
  assert scene.list_events('start') == scene.members


def test_a_centre_that_nobody_can_reach_is_not_started_for_ever(scene):
  scene.stepless = {0}
  for look in (5, 6, 7, 8):
    scene.at[look] = lambda: scene.kill(CENTRE)
  with pytest.raises(_supervisor.RunError, match='goes on from the last'):
    scene.run()
  assert scene.list_events('start') == scene.members + 3 * [CENTRE]


def test_a_centre_that_answers_may_be_lost_again(scene):
  for look in range(3, 10):
    scene.at[look] = (
      (lambda: scene.kill(CENTRE)) if look % 2 else (lambda: None)
    )
  assert not scene.run()['lost']
  assert scene.list_events('start') == scene.members + 4 * [CENTRE]


def test_nodes_that_begin_without_others_are_shown(tmp_path, monkeypatch):
  """Whoever looks at a cluster does not wait for those who may never come."""
  scene = Scene(tmp_path, monkeypatch, centre=False)
  scene.at[1] = lambda: scene.silent.add(2)
  num_evaluated = []

  def come():
    num_evaluated.append(len(scene.evaluations))
    scene.silent.discard(2)

  scene.at[30] = come
  ended = scene.run(eval_every=5, is_owner=False)
  assert num_evaluated[0] > 0
  assert (ended['clock'], ended['lost']) == (3 * NUM_STEPS, [])
