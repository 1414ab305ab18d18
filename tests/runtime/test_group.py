"""The nodes of an all-reduce, each in a thread: what they decide together."""

import logging
import threading

import jax
import numpy as np
import pytest

import jasgd
from jasgd import engine
from jasgd import gossip
from jasgd import runtime
from jasgd import simulation
from jasgd import traces
from jasgd.engine import _mean
from jasgd.runtime.nodes import _group
from tests import trees
from tests.runtime import peer_cases

NUM_NODES = peer_cases.NUM_NODES
NUM_STEPS = 12
# Before the first vote they agree on a number and on a step, and exchange
# addresses; every step has a mean.
BEFORE_VOTE = 3
Kind = traces.Kind


class _KilledError(Exception):
  """The error that kills a node."""


class Meeting:
  """A meeting of threads, which stands for a collective of processes."""

  def __init__(self):
    self._said = {}
    self._dead = set()
    self._condition = threading.Condition()

  def join(self, node, number, said):
    """The values of all nodes, in order; an error if one of them is lost."""
    with self._condition:
      row = self._said.setdefault(number, {})
      row[node] = said
      self._condition.notify_all()
      self._condition.wait_for(
        lambda: len(row) == NUM_NODES or self._dead - set(row),
        peer_cases.PATIENCE,
      )
    if len(row) < NUM_NODES:
      raise jax.errors.JaxRuntimeError('Gloo: connection closed by peer')
    return [row[node] for node in range(NUM_NODES)]

  def lose(self, node):
    """Ends all waits: a node is lost."""
    with self._condition:
      self._dead.add(node)
      self._condition.notify_all()


class Group(peer_cases.Group):
  """Nodes of an all-reduce.

  Args:
    folder: Folder of the run.
    deaths: Number of meetings after which a node is killed, by node.
    absences: Number of meetings after which a node is killed before the next
      one, by node: the others do not meet without it.
    stops: Number of meetings after which a node is told to end, by node.
    strategy: Strategy of the nodes; None: `gossip.AllReduce()`.
  """

  def __init__(
    self, folder, *, deaths=None, absences=None, stops=None, strategy=None
  ):
    super().__init__(
      folder,
      strategy or gossip.AllReduce(),
      num_steps=NUM_STEPS,
      min_seconds=(),
      checkpoint_seconds=0.0,
      deadlines=runtime.Deadlines(end=peer_cases.PATIENCE),
    )
    self.killed = []
    self._deaths = deaths or {}
    self._absences = absences or {}
    self._told = stops or {}
    self._meeting = Meeting()

  def make(self, node, stopped):
    numbers = iter(range(1 << 30))
    deaths, told = self._deaths.get(node), self._told.get(node)

    def meet(said):
      number = next(numbers)
      if number == told:
        stopped.set()
      if number in (deaths, self._absences.get(node)):
        raise _KilledError
      # A node that is killed after a meeting has not recorded the result.
      result = self._meeting.join(node, number, said)
      if deaths is not None and number == deaths - 1:
        raise _KilledError
      return result

    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(_group, 'make_mesh', lambda num_nodes: None)
      patch.setattr(
        _group,
        'make_all_gather',
        lambda mesh: lambda numbers: np.array(meet(numbers)),
      )
      patch.setattr(
        engine,
        'make_group_average',
        lambda mesh: lambda tree: _mean.average(meet(tree)),
      )
      return runtime.GroupNode(
        self.settings,
        self.run,
        runtime.Registry(self.run),
        runtime.BindAddress(wires=self.wires),
        node=node,
        linger=0.0,
        stopped=stopped,
      )

  def work(self, member, node):
    try:
      member.run()
    except _KilledError:
      self.killed.append(node)
    except Exception as error:
      self.errors.append((node, error))
    self._meeting.lose(node)


VOTE_SECONDS = _group._VOTE_SECONDS


@pytest.fixture(autouse=True)
def _short(monkeypatch):
  """Makes votes come after 1, 2, 4, ... steps, on a busy machine, too."""
  monkeypatch.setattr(_group, '_VOTE_SECONDS', 1e6)
  monkeypatch.setattr(_group, '_STOPPED_LINGER', 0.0)
  monkeypatch.setattr(_group, '_BLIND_PATIENCE', 0.0)


def run_group(folder, **options):
  """Runs all nodes to the end."""
  group = Group(folder, **options)
  try:
    for node in range(NUM_NODES):
      group.start(node)
    group.join()
  finally:
    group.close()
  return group


def list_numbers(trace, node):
  """The numbers of a node's means."""
  mixes = trace.mixes
  return (mixes['group'][mixes['replica'] == node] - 1).tolist()


def count_kind(trace, node, kind):
  return np.count_nonzero(trace.of_replica(node)['kind'] == kind)


def test_local_sgd_in_threads_replays(tmp_path):
  group = run_group(tmp_path, strategy=gossip.AllReduce(period=3))
  assert not group.errors
  for peer in group.peers.values():
    assert peer.describe()['is_done']
    assert not peer.describe()['is_stopped']
  group.check_replay()


# --- Losses.


def test_a_group_that_is_lost_in_its_first_step_replays(tmp_path):
  """The killed node has recorded no step; the others go back to step 0."""
  for _ in range(2):
    group = run_group(tmp_path, deaths={1: BEFORE_VOTE + 1})
    assert group.killed == [1]
  assert not count_kind(group.load_trace(), 1, Kind.STEP)
  group = run_group(tmp_path)
  assert not group.errors
  trace = group.load_trace()
  restarts = [count_kind(trace, node, Kind.RESTART) for node in range(3)]
  assert restarts == [2, 0, 2]
  group.check_replay()


def test_a_loss_between_restarts_replays(tmp_path):
  """One of the resumed nodes is killed before it records its restart."""
  run_group(tmp_path, deaths={1: BEFORE_VOTE + 8})
  group = run_group(tmp_path, deaths={1: 1})
  trace = group.load_trace()
  restarts = {count_kind(trace, node, Kind.RESTART) for node in range(3)}
  assert restarts == {0}
  group = run_group(tmp_path, deaths={1: 2})
  trace = group.load_trace()
  restarts = [count_kind(trace, node, Kind.RESTART) for node in range(3)]
  assert restarts == [1, 0, 1]
  group = run_group(tmp_path)
  assert not group.errors
  group.check_replay()


def test_no_mean_has_the_number_of_one_that_was_lost(tmp_path):
  """A node is killed when it gets a mean, which the others record."""
  # Three steps with their means, and votes after the first and the third.
  num_met = BEFORE_VOTE + 1 + 1 + 1 + 2
  group = run_group(tmp_path, deaths={1: num_met})
  trace = group.load_trace()
  assert [list_numbers(trace, node) for node in range(3)] == [
    [0, 1, 2],
    [0, 1],
    [0, 1, 2],
  ]
  group = run_group(tmp_path)
  assert not group.errors
  trace = group.load_trace()
  for node in range(NUM_NODES):
    numbers = list_numbers(trace, node)
    assert len(set(numbers)) == len(numbers)
    assert (2 in numbers) == (node != 1)
    assert numbers[-1] == 2 + NUM_STEPS - 1  # They go on from step 1.
  replayed = group.check_replay()
  # Replay is the same if no versions are asked for.
  whole = jasgd.replay(
    group.settings.task,
    group.settings.optimizer,
    trace,
    seed=group.settings.seed,
    mode='exact',
  )
  trees.assert_same_bits(whole.replicas, replayed.replicas)


@pytest.mark.parametrize('num_met', range(BEFORE_VOTE + 4))
def test_a_node_that_loses_another_one_names_it(num_met, tmp_path):
  """This holds at any time, even before the nodes know their addresses."""
  group = run_group(tmp_path, deaths={1: num_met})
  assert group.killed == [1]
  errors = dict(group.errors)
  assert sorted(errors) == [0, 2]
  for error in errors.values():
    assert isinstance(error, _group.GroupError)
    assert 'cannot go on without it. If all nodes' in str(error)
  # Node 0 waits for the end of all others, so it may name all of them.
  who = 'another process' if num_met < BEFORE_VOTE else 'node 1'
  assert f' {who} was lost' in str(errors[2])


def test_of_several_lost_nodes_none_is_named_first():
  assert _group._join_names([]) == 'another process'
  assert _group._join_names([2]) == 'node 2'
  assert _group._join_names([1, 2]).startswith('one of node 1, node 2 (')


def test_other_errors_are_not_translated():
  lost = _group.LostProcesses(1, 2, None, 0, 0.0, lambda: 0)
  with pytest.raises(ValueError, match='a bug'), lost.detect_lost_peers():
    raise ValueError('This is a bug.')


# --- The simulator.


def _list_rows(trace, node):
  """Fields of a node's records, without times and deaths.

  A real node cannot record its own death.
  """
  own = trace.of_replica(node)
  names = ('kind', 'step', 'version', 'read_version', 'group', 'incarnation')
  names += ('own_weight', 'weight', 'updates')
  return own[own['kind'] != Kind.LEAVE][list(names)].tolist()


def _list_calls(calls):
  """Calls of each node's machines, except `save`, which changes nothing."""
  machines = {}
  for _, machine, method, arguments, result in calls:
    if method != 'save':
      own = machines.setdefault((machine.node, id(machine)), [])
      own.append((method, arguments, result))
  return sorted(machines.items(), key=lambda item: item[0][0])


@pytest.mark.parametrize('is_lost', [False, True])
@pytest.mark.parametrize('period', [1, 2])
def test_simulated_and_real_nodes_make_the_same_calls(
  period, is_lost, tmp_path
):
  """Node 1 dies before the mean after step 4; all go back to step 3."""
  real_calls, simulated_calls = [], []
  strategy = gossip.AllReduce(period=period)
  # Votes and checkpoints are at the steps 0, 1 and 3.
  absence = BEFORE_VOTE + (6 if period == 1 else 4)
  recorded = peer_cases.record_calls(strategy, real_calls)
  if is_lost:
    group = run_group(tmp_path, absences={1: absence}, strategy=recorded)
    assert group.killed == [1]
  group = run_group(tmp_path, strategy=recorded)
  assert not group.errors
  group.check_replay()
  # A mean takes 2 (n - 1) latencies, a quarter of a step.
  saved_at = 3 + 0.25 * (3 // period)
  trace = simulation.simulate(
    peer_cases.record_calls(strategy, simulated_calls),
    num_workers=NUM_NODES,
    num_gradients=NUM_STEPS * NUM_NODES,
    network=simulation.Network(latency=1 / 16),
    seed=group.settings.seed,
    failures=[simulation.Failure(saved_at + 1.125, 1, 9.0)] * is_lost,
    checkpoint_seconds=saved_at,
  )
  for node in range(NUM_NODES):
    assert _list_rows(trace, node) == _list_rows(group.load_trace(), node)
  assert (Kind.RESTART in trace.records['kind']) == is_lost
  found, expected = map(_list_calls, (real_calls, simulated_calls))
  assert [calls for _, calls in found] == [calls for _, calls in expected]
  methods = {method for _, calls in found for method, *_ in calls}
  assert {'on_regroup', 'on_replies', 'on_done', 'on_end'} <= methods
  assert ({'restore', 'on_restart'} <= methods) == is_lost


# --- Stops.


def test_a_group_that_is_stopped_is_not_done(caplog, tmp_path):
  """If one node is told to end, all end at the same step, and resume there."""
  caplog.set_level(logging.INFO)
  # The node is told in its second step, and all vote after the third.
  group = run_group(tmp_path, stops={1: BEFORE_VOTE + 4})
  assert not group.errors
  for peer in group.peers.values():
    status = peer.describe()
    assert (status['is_done'], status['is_stopped']) == (False, True)
    assert status['step'] == 3
  assert 'Stopped at step 3, with all others: node 1 was told' in caplog.text
  group = run_group(tmp_path)
  assert not group.errors
  trace = group.load_trace()
  assert len(trace.steps) == NUM_STEPS * NUM_NODES  # No step was made twice.
  assert all(peer.describe()['is_done'] for peer in group.peers.values())
  group.check_replay()


# --- Votes.


class Voters:
  """Votes of nodes with given step times, at a time that the test sets."""

  def __init__(self, seconds):
    self._seconds = seconds
    self._times = [100.0 * node for node in range(len(seconds))]
    self._told = []
    self._is_listening = True
    self._votes = [
      _group.Votes(self._all_gather, lambda node=node: self._times[node])
      for node in range(len(seconds))
    ]

  def _all_gather(self, numbers):
    """The numbers of all nodes, from their own functions."""
    if not self._is_listening:
      return np.array(self._told)
    self._told.append(numbers)
    raise InterruptedError

  def vote(self, **own):
    """Lets all vote and make their steps; gives the number of steps."""
    options = {'is_stopping': False, 'is_diverged': False, 'is_due': False}
    self._told, self._is_listening = [], True
    for votes in self._votes:
      with pytest.raises(InterruptedError):
        votes.vote(**options, **own)
    self._is_listening = False
    verdicts = [votes.vote(**options, **own) for votes in self._votes]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    for node, seconds in enumerate(self._seconds):
      self._times[node] += verdicts[0].num_steps * seconds
    return verdicts[0].num_steps

  def slow_down(self, seconds):
    """Makes steps take longer from now on."""
    self._seconds = seconds


@pytest.fixture
def usual_votes(monkeypatch):
  """Votes as often as in real runs."""
  monkeypatch.setattr(_group, '_VOTE_SECONDS', VOTE_SECONDS)


@pytest.mark.usefixtures('usual_votes')
def test_votes_are_as_often_as_steps_are_long():
  short = Voters((1e-3, 2e-4))
  intervals = [short.vote() for _ in range(12)]
  assert intervals[:5] == [1, 2, 4, 8, 16]
  assert intervals[-1] == _group._MAX_STEPS
  # Some steps are long: those that compile, or all after a certain time.
  short.slow_down((1e-3, 0.1))
  short.vote()
  assert [short.vote() for _ in range(3)] == [5, 5, 5]
  short.slow_down((20.0, 0.1))
  short.vote()
  assert [short.vote() for _ in range(3)] == [1, 1, 1]
  short.slow_down((0.0, 0.0))
  assert [short.vote() for _ in range(4)] == [1, 2, 4, 8]


@pytest.mark.usefixtures('usual_votes')
@pytest.mark.parametrize('seconds', [0.0, 1e-6, 0.01, 0.3, 40.0, 1e5])
def test_the_time_between_votes_is_bounded(seconds):
  voters = Voters((seconds, seconds / 2))
  for _ in range(30):
    num_steps = voters.vote()
    assert 1 <= num_steps <= _group._MAX_STEPS
    assert num_steps * seconds <= max(seconds, VOTE_SECONDS)


def make_votes(rows):
  """Votes with given numbers of the other nodes."""
  return _group.Votes(lambda numbers: np.array([numbers, *rows(numbers)]))


def test_agreements():
  assert make_votes(lambda own: [[3], [5]]).agree_on_number(4) == 5
  pad = [-1] * 6
  votes = make_votes(lambda own: [[10, 20, *pad], [20, 40, *pad]])
  assert votes.agree_on_step({10: 1, 20: 2, 40: 3}) == 20
  assert votes.agree_on_step([40]) is None
  assert votes.agree_on_step([]) is None
  votes = make_votes(lambda own: [own[::-1]])
  found = votes.exchange_addresses('h:1')
  assert found[0] == 'h:1'
  verdict = make_votes(lambda own: [[1, 0, 0, 5], [0, 0, 1, 9]]).vote(
    is_stopping=False, is_diverged=True, is_due=False
  )
  assert verdict == ([1], True, True, 1)
