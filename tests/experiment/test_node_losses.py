"""What is said of an all-reduce that cannot go on."""

import dataclasses
import io
import signal

import pytest

from jasgd import experiment
from jasgd import runtime
from jasgd import workdir as workdirs
from jasgd.experiment import _node_cluster
from jasgd.experiment import _node_losses
from jasgd.experiment import _node_supervisor
from tests.experiment import test_real_allreduce as allreduce

LOST, ABORT = runtime.GROUP_LOST, -signal.SIGABRT
DEADLINES = runtime.Deadlines(silence=0.3, first_step=0.3)


@dataclasses.dataclass
class Member:
  """A process, as far as it is looked at."""

  name: str
  code: int | None = None
  said: str = 'nothing'
  ends: list[float] = dataclasses.field(default_factory=list)

  def end(self, timeout):
    self.ends.append(timeout)
    return self.code or 0

  def read_log(self):
    return self.said


def make_members(*codes):
  return {node: Member(f'node-{node}', code) for node, code in enumerate(codes)}


@pytest.mark.parametrize(
  ('codes', 'first'),
  [
    ((None, -9, None, None), 1),
    ((LOST, LOST, -9, LOST), 2),
    ((ABORT, None, ABORT, -11), 3),
    ((-9, ABORT, ABORT, ABORT), 0),
    # One that was killed has not ended for want of those who failed.
    ((1, 1, -9, 1), 2),
    ((LOST, ABORT, LOST, 1), 3),
    ((LOST, LOST, ABORT, None), 2),
  ],
)
def test_the_first_to_be_lost_is_the_one_to_blame(codes, first):
  members = make_members(*codes)
  found = _node_losses.find_first_lost(members.values())
  assert found.name == f'node-{first}'
  assert f'node-{first} was lost (exit code ' in _node_losses.describe_loss(
    found
  )


class Watch:
  """Answers what nodes would."""

  def __init__(self, *statuses):
    self._statuses = {
      node: iter(statuses) for node, statuses in enumerate(statuses)
    }

  def look_around(self):
    pass

  def ask(self, member):
    return next(self._statuses[member], None)

  def evaluate(self, members):
    return None

  def close(self):
    pass


def make_supervisor(folder, members, watch, *, is_owner):
  return _node_supervisor.NodeSupervisor(
    watch,
    {node: lambda member=member: member for node, member in members.items()},
    workdirs.Workdir(folder),
    None,
    num_steps=200,
    eval_every=1000,
    steps_per_epoch=10,
    get_rate=lambda epoch: 1.0,
    deadlines=DEADLINES,
    is_group=True,
    is_owner=is_owner,
    stream=io.StringIO(),
  )


def make_status(step, **flags):
  status = {'step': step, 'has_begun': True, 'loss': 1.0, 'mass': 0.0}
  return status | {'is_done': False, 'is_diverged': False} | flags


def test_a_watch_of_nodes_that_were_stopped_does_not_say_lost(tmp_path):
  """Node 1 was told to end, and is gone first; node 0 tells of it."""
  statuses = [make_status(20), make_status(30, is_stopped=True)]
  watch = Watch(statuses, statuses[:1])
  supervisor = make_supervisor(
    tmp_path, make_members(None, None), watch, is_owner=False
  )
  with pytest.raises(
    experiment.RunError, match=r'^The nodes were stopped at step 30, before'
  ):
    supervisor.run()


def test_a_watch_of_nodes_that_are_gone_says_who_was_first(tmp_path):
  statuses = [make_status(20), make_status(30)]
  watch = Watch(statuses, statuses[:1])
  supervisor = make_supervisor(
    tmp_path, make_members(None, None), watch, is_owner=False
  )
  with pytest.raises(
    experiment.RunError, match=r'for 0\.3 s from node-1(, node-0)? .who was'
  ):
    supervisor.run()


@pytest.mark.parametrize(
  ('code', 'what'),
  [(-9, 'was lost .exit code -9.'), (0, 'was stopped .exit code 0, said bye')],
)
def test_how_a_group_ends(code, what, tmp_path):
  """At once if one was killed; in good order if one has ended so."""
  members = make_members(None, code)
  members[1].said = 'bye'
  supervisor = make_supervisor(
    tmp_path, members, Watch([make_status(20)] * 9, []), is_owner=True
  )
  with pytest.raises(
    experiment.RunError,
    match=rf'node-1 {what}.*same command goes on from the start',
  ):
    supervisor.run()
  assert (members[0].ends[0] > 0) == (code == 0)


def test_what_an_exit_code_of_a_member_means():
  config = allreduce.make_config()
  assert _node_cluster._explain(config, 75) == '; why is said above'
  assert _node_cluster._explain(config, -9) == ', as it was killed'
  assert 'jax has ended it' in _node_cluster._explain(config, ABORT)
  config.strategy.name = 'pull'
  assert _node_cluster._explain(config, ABORT) == ', as it was killed'
