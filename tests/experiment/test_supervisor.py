"""The decisions of a supervisor, about processes that follow a script."""

import io
import logging
import signal
import types

import pytest

from jasgd import experiment
from jasgd import gossip
from jasgd import protocols
from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment.running import recipe as recipes
from jasgd.experiment.running import supervisor as supervisors
from jasgd.experiment.running import views

OWNER = recipes.SERVER  # Number of the server, or of the centre.
NUM_STEPS = 10  # Of each worker.
SILENCE, FIRST_STEP = 60.0, 300.0
LOOK = 1.0  # Seconds between two checks, in the time of a scene.
KILLED = -9


class Scene:
  """Processes of a run, its view, and a time that advances at every check.

  A worker makes a step between two checks, unless a test says otherwise. With a
  server, the view asks the server alone.

  Attributes:
    events: Actions on members, in order: (verb, member).
    at: Functions to be called at a check, by its number.
  """

  unit = workers = 'nodes'
  is_evaluation_due = views.NodesView.is_evaluation_due
  has_begun = views.NodesView.has_begun
  is_diverged = False
  metrics = {'train/loss': 0.5}  # noqa: RUF012 - never changed

  def __init__(self, folder, monkeypatch, *, owner='centre'):
    self.folder = workdirs.Workdir(folder)
    self.owner = None if owner is None else OWNER
    self.has_server = owner == 'server'
    self.owner_name = owner
    self.members = [0, 1, 2] + ([] if owner is None else [OWNER])
    self.events, self.at, self.statuses = [], {}, {}
    self.steps = dict.fromkeys(self.members, 0)
    self.silent, self.stepless, self.codes = set(), set(), {}
    self.now, self.num_looks = 1000.0, 0
    self.evaluation_seconds = self.end_seconds = 0.0
    self.timeouts, self.evaluations = {}, []
    self.reported = {}
    self.end_reason = ''
    self._recipe = types.SimpleNamespace(eval_every=1000)
    self._evaluated_at = -1
    self.supervisor = None
    for module in (supervisors, views):
      monkeypatch.setattr(module, 'time', self)

  # --- As the module `time`.

  def monotonic(self):
    return self.now

  def sleep(self, seconds):
    self.now += seconds

  # --- As a view.

  _list_nodes = views.NodesView._list_nodes

  @property
  def clock(self):
    return sum(step for member, step in self.steps.items() if member >= 0)

  def is_over(self, lost):
    if self.has_server:
      return bool(self.end_reason) or self.clock == 3 * NUM_STEPS
    alive = [node for node in range(3) if node not in lost]
    return bool(alive) and all(
      self.statuses.get(node, {}).get('is_done') for node in alive
    )

  def is_asked(self, member):
    return not self.has_server or member == OWNER

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
    self.statuses[member] = {
      'step': step,
      'has_begun': True,
      'is_done': step == NUM_STEPS,
    }
    return self.statuses[member]

  def forget(self, member):
    self.statuses.pop(member, None)

  def report_deaths(self, dead):
    self.reported |= dead

  def count_workers(self, lost):
    return 3 - len([member for member in lost if member >= 0])

  def evaluate(self, lost, *, is_last=False):
    del is_last
    self.now += self.evaluation_seconds
    self._evaluated_at = self.clock
    self.evaluations.append(sorted({*self.members} - lost))

  def interrupt(self):
    self.events.append(('interrupt', None))
    return not self.has_server or bool(self.end_reason)

  def finish(self, lost, *, is_owner):
    self.events.append(('finish', is_owner))

  def close(self):
    self.events.append(('close', None))

  # --- The run.

  def start(self, member):
    self.events.append(('start', member))
    self.codes[member] = None
    self.silent.discard(member)
    return Process(self, member)

  def kill(self, member):
    self.codes[member] = KILLED

  def press_ctrl_c(self):
    self.supervisor._stop_signal.set()

  def run(self, *, strategy=None, eval_every=1000, **options):
    usual = {'server': protocols.asynchronous(), 'centre': gossip.Elastic()}
    strategy = strategy or usual.get(self.owner_name, gossip.Pull())
    self._recipe.eval_every = eval_every
    deadlines = runtime.Deadlines(silence=SILENCE, first_step=FIRST_STEP)
    recipe = recipes.Recipe(
      task=types.SimpleNamespace(batch=1, num_samples=10),
      optimizer=None,
      strategy=strategy,
      num_workers=3,
      settings={},
      num_updates=3 * NUM_STEPS,
      deadlines=deadlines,
    )
    assert recipe.owner == self.owner
    self.supervisor = supervisors.Supervisor(
      self,
      {
        member: lambda member=member: self.start(member)
        for member in self.members
      },
      recipe,
      self.folder,
      stream=io.StringIO(),
      **options,
    )
    # It looks as soon as it has looked: time passes by looks.
    self.supervisor._stop_signal.wait = lambda _: (
      self.supervisor._stop_signal.is_set()
    )
    self.supervisor.run()
    return self.supervisor

  def list_events(self, kind):
    return [member for what, member in self.events if what == kind]


def _name(member):
  return 'owner' if member == OWNER else f'worker-{member}'


class Process:
  """A process, as a supervisor sees it."""

  def __init__(self, scene, member):
    self._scene, self._member = scene, member
    self.name = _name(member)
    self.pid = 100 + member

  @property
  def code(self):
    return self._scene.codes[self._member]

  def end(self, timeout):
    self._scene.events.append(('end', self._member))
    self._scene.timeouts[self._member] = timeout
    self._scene.now += self._scene.end_seconds
    if self.code is None:
      self._scene.codes[self._member] = 0 if timeout else KILLED
    return self.code

  def read_log(self):
    return f'Here was {self.name}.'


@pytest.fixture(params=['centre', 'server'])
def scene(request, tmp_path, monkeypatch):
  """Workers of a centre, or of a server."""
  return Scene(tmp_path, monkeypatch, owner=request.param)


@pytest.fixture
def elastic(tmp_path, monkeypatch):
  """Nodes and a centre."""
  return Scene(tmp_path, monkeypatch)


@pytest.fixture
def nodes(tmp_path, monkeypatch):
  """Nodes alone."""
  return Scene(tmp_path, monkeypatch, owner=None)


def test_a_run_ends_when_all_steps_are_made(scene):
  ended = scene.run()
  assert scene.clock == 3 * NUM_STEPS
  assert not ended.list_lost()
  assert not ended.is_interrupted
  assert scene.evaluations == [sorted(scene.members)]
  assert scene.list_events('start') == scene.members


def test_the_owner_ends_when_the_workers_have(scene):
  """The owner must not end first: a worker may be about to send a message."""
  scene.at[4] = scene.press_ctrl_c
  scene.at[6] = lambda: setattr(scene, 'end_reason', 'It was interrupted.')
  assert scene.run().is_interrupted
  assert scene.list_events('end') == [0, 1, 2, scene.owner]
  assert scene.events.index(('finish', True)) < scene.events.index(('end', 0))
  # A server needs a moment to end the run; nodes are just asked to end.
  assert (len(scene.list_events('interrupt')) > 1) == scene.has_server


def test_the_owner_has_time_to_end_however_long_workers_take(scene):
  scene.end_seconds = 25.0
  scene.run()
  assert scene.timeouts[0] == scene.timeouts[scene.owner] > 20
  assert scene.timeouts[2] < 10


@pytest.mark.parametrize('member', [1, None])
def test_a_process_that_dies_as_the_run_ends_is_lost(member, scene, caplog):
  """Its files are older than its last steps."""
  member = scene.owner if member is None else member
  evaluate = scene.evaluate

  def kill_and_evaluate(*arguments, **options):
    scene.kill(member)
    evaluate(*arguments, **options)

  scene.evaluate = kill_and_evaluate
  assert scene.run().list_lost() == [_name(member)]
  assert f'{_name(member)} was lost (exit code -9)' in caplog.text


def test_of_a_group_that_is_done_all_is_saved(nodes):
  nodes.evaluate = lambda lost, is_last: nodes.kill(1)
  assert not nodes.run(strategy=gossip.AllReduce()).list_lost()


def test_ctrl_c_ends_a_watch_alone(elastic):
  elastic.at[4] = elastic.press_ctrl_c
  assert elastic.run(is_owner=False).is_interrupted
  assert not elastic.list_events('finish')


def test_ctrl_c_before_all_have_come(scene):
  scene.stepless = {0, 1, 2}
  scene.at[1] = lambda: scene.silent.add(2)
  scene.at[3] = scene.press_ctrl_c
  scene.at[5] = lambda: setattr(scene, 'end_reason', 'It was interrupted.')
  assert scene.run().is_interrupted
  assert scene.list_events('end') == [0, 1, 2, scene.owner]


def test_the_others_go_on_without_one_that_died(scene, caplog):
  scene.at[5] = lambda: scene.kill(1)
  scene.at[20] = lambda: setattr(scene, 'end_reason', 'It is over.')
  ended = scene.run()
  assert ended.list_lost() == ['worker-1']
  assert scene.clock == 2 * NUM_STEPS + 4
  assert scene.evaluations == [sorted({*scene.members} - {1})]
  assert 'worker-1 was lost (exit code -9).\n' in caplog.text
  assert scene.reported == {1: 101}  # Others may wait for it.


def test_a_learner_may_end_well(tmp_path, monkeypatch, caplog):
  scene = Scene(tmp_path, monkeypatch, owner='server')
  scene.at[5] = lambda: scene.codes.update({1: 0})
  scene.at[20] = lambda: setattr(scene, 'end_reason', 'It is over.')
  assert not scene.run().list_lost()
  assert 'worker-1' not in caplog.text
  assert scene.reported == {1: 101}


def test_a_silent_node_is_lost_until_it_answers(elastic, caplog):
  caplog.set_level(logging.WARNING)
  elastic.stepless = {0}
  elastic.at[5] = lambda: elastic.silent.add(1)
  lost = []
  for look in (5 + int(SILENCE), 8 + int(SILENCE)):
    elastic.at[look] = lambda: lost.append(1 in elastic.supervisor.lost)
  elastic.at[80] = lambda: elastic.silent.clear() or elastic.stepless.clear()
  ended = elastic.run()
  assert lost == [False, True]
  assert not ended.list_lost()
  assert elastic.clock == 3 * NUM_STEPS
  assert 'worker-1 has said nothing for 60 s.' in caplog.text
  assert 'worker-1 is back.' in caplog.text


@pytest.mark.parametrize('strategy', [gossip.Pull(), gossip.AllReduce()])
def test_time_without_questions_is_no_silence(nodes, strategy):
  """One unanswered question after a long evaluation is no reason to act."""
  nodes.evaluation_seconds = 10 * SILENCE
  lost = []

  def come_back():
    lost.extend(nodes.supervisor.lost)
    nodes.silent.clear()

  nodes.at[5], nodes.at[7] = lambda: nodes.silent.add(1), come_back
  ended = nodes.run(eval_every=3, strategy=strategy)
  assert len(nodes.evaluations) > 5
  assert not lost
  assert not ended.list_lost()


def test_without_workers_there_is_no_run(scene):
  scene.at[5] = lambda: [scene.kill(worker) for worker in range(3)]
  problem = (
    'All nodes are gone. The last one said:\nHere was worker-2.\n.*goes on'
  )
  with pytest.raises(experiment.RunError, match=problem):
    scene.run()
  assert scene.list_events('end')[-1] == scene.owner


def test_nodes_that_begin_without_others_are_shown(nodes):
  """A watch does not wait for nodes that may never come."""
  nodes.at[1] = lambda: nodes.silent.add(2)
  num_evaluated = []

  def come():
    num_evaluated.append(len(nodes.evaluations))
    nodes.silent.discard(2)

  nodes.at[30] = come
  ended = nodes.run(eval_every=5, is_owner=False)
  assert num_evaluated[0] > 0
  assert (nodes.clock, ended.list_lost()) == (3 * NUM_STEPS, [])


# --- Server and centre.


def test_a_killed_owner_is_started_again(scene, caplog):
  scene.at[5] = lambda: scene.kill(scene.owner)
  assert not scene.run().list_lost()
  assert scene.list_events('start') == [*scene.members, scene.owner]
  assert f'{_name(scene.owner)} was lost at clock ' in caplog.text


def test_an_owner_that_ended_by_itself_is_not(scene):
  scene.at[5] = lambda: scene.codes.update({scene.owner: 1})
  name = _name(scene.owner)
  problem = f'exit code 1.*\nHere was {name}.\n.*goes on from the last check'
  with pytest.raises(experiment.RunError, match=problem):
    scene.run()
  assert scene.list_events('start') == scene.members


def test_a_silent_centre_is_killed_and_started_again(elastic):
  elastic.stepless = {0}
  elastic.at[5] = lambda: elastic.silent.add(OWNER)
  elastic.at[100] = elastic.stepless.clear
  assert not elastic.run().list_lost()
  assert elastic.list_events('start') == [*elastic.members, OWNER]
  # It ended before the new one started: two must not write to one file.
  first = elastic.events.index(('end', OWNER))
  assert elastic.events[first + 1] == ('start', OWNER)


def test_a_new_centre_has_time_to_start(elastic):
  elastic.stepless = {0}
  elastic.at[5] = lambda: elastic.kill(OWNER)
  elastic.at[6] = lambda: elastic.silent.add(OWNER)
  elastic.at[200] = lambda: elastic.silent.clear() or elastic.stepless.clear()
  assert 6 + SILENCE < 200 < FIRST_STEP
  elastic.run()
  assert elastic.list_events('start') == [*elastic.members, OWNER]


def test_a_watch_can_only_say_that_a_centre_is_silent(elastic, caplog):
  elastic.stepless = {0}
  elastic.at[5] = lambda: elastic.silent.add(OWNER)
  elastic.at[100] = elastic.stepless.clear
  assert elastic.run(is_owner=False).list_lost() == ['owner']
  assert 'owner has said nothing for 60 s.' in caplog.text
  assert elastic.list_events('start') == elastic.members


def test_an_owner_that_does_not_answer_is_not_started_for_ever(scene):
  scene.stepless = {0, 1, 2}
  for look in (5, 6, 7, 8):
    scene.at[look] = lambda: scene.kill(scene.owner)
  with pytest.raises(experiment.RunError, match='goes on from the last'):
    scene.run()
  assert scene.list_events('start') == scene.members + 3 * [scene.owner]


def test_an_owner_that_makes_progress_may_be_lost_again(scene):
  for look in range(3, 10, 2):
    scene.at[look] = lambda: scene.kill(scene.owner)
  assert not scene.run().list_lost()
  assert scene.list_events('start') == scene.members + 4 * [scene.owner]


# --- All-reduce.

LOST, ABORT = runtime.GROUP_LOST, -signal.SIGABRT


@pytest.mark.parametrize(
  ('codes', 'first'),
  [
    ((None, -9, None, None), 1),
    ((LOST, LOST, -9, LOST), 2),
    ((ABORT, None, ABORT, -11), 3),
    ((-9, ABORT, ABORT, ABORT), 0),
    # A process that was killed did not end because others had failed.
    ((1, 1, -9, 1), 2),
    ((LOST, ABORT, LOST, 1), 3),
    ((LOST, LOST, ABORT, None), 2),
  ],
)
def test_the_first_to_be_lost_is_the_one_to_blame(codes, first):
  processes = [
    types.SimpleNamespace(name=f'node-{node}', code=code, read_log=lambda: '')
    for node, code in enumerate(codes)
  ]
  found = supervisors.find_first_lost(processes)
  assert found.name == f'node-{first}'
  assert f'node-{first} was lost (exit code ' in supervisors.describe_loss(
    found
  )


@pytest.mark.parametrize(
  ('code', 'what'),
  [(-9, 'was lost .exit code -9.'), (0, 'was stopped .exit code 0, said Here')],
)
def test_how_a_group_ends(code, what, nodes):
  """All end at once if one was killed; in good order if one ended that way."""
  nodes.at[5] = lambda: nodes.codes.update({1: code})
  with pytest.raises(
    experiment.RunError,
    match=rf'worker-1 {what}.*same command goes on from the start',
  ):
    nodes.run(strategy=gossip.AllReduce())
  first = {}
  for what_, member in nodes.events:
    if what_ == 'end':
      first.setdefault(member, len(first))
  assert set(first) == {0, 1, 2}
  assert (nodes.codes[0] == 0) == (code == 0)


def test_a_watch_of_nodes_that_were_stopped_does_not_say_lost(nodes):
  """Node 1 was asked to end, and has ended; node 0 reports the request."""

  def stop():
    nodes.silent.update({0, 1, 2})
    nodes.statuses[0]['is_stopped'] = True

  nodes.at[6] = stop
  with pytest.raises(
    experiment.RunError, match=r'^The nodes were stopped at step 5, before'
  ):
    nodes.run(strategy=gossip.AllReduce(), is_owner=False)


def test_a_watch_of_nodes_that_are_gone_names_the_first(nodes):
  nodes.at[5] = lambda: nodes.silent.add(1)
  nodes.at[20] = lambda: nodes.silent.add(0)
  nodes.stepless = {2}
  with pytest.raises(
    experiment.RunError, match=r'for 60 s from worker-1, worker-0 .in the order'
  ):
    nodes.run(strategy=gossip.AllReduce(), is_owner=False)
