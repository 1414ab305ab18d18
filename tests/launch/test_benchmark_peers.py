"""The suite `server`: its work, its peers, its rounds."""

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from launch.benchmarks import environments
from launch.benchmarks import peer_unix
from launch.benchmarks import server
from launch.benchmarks import server_crowd
from launch.benchmarks import server_peers
from launch.benchmarks import server_rounds
from launch.benchmarks import server_work
from launch.benchmarks import workers

RESULT = {
  'updates_per_second': 100.0,
  'mean_staleness': 1.0,
  'max_staleness': 2,
  'cpu_per_update': 0.001,
  'seconds': 1.0,
  'num_errors': 0,
}


def _make_work(num_parameters=5, num_learners=2, num_rounds=10):
  return server_work.Work(num_parameters, num_learners, num_rounds, '', 60.0)


def _make_push(work, clock):
  push = server_work.Message(work.num_parameters)
  push.values[:] = server_work.make_gradient(work)
  push.clock = clock
  return push


def _list_peers():
  """All of them; those that have to be installed take long to start."""
  for name, peer in server_peers.PEERS.items():
    marks = [pytest.mark.slow] if peer.requirements else []
    yield pytest.param(name, marks=marks)


@pytest.mark.parametrize('num_learners', [1, 2, 4])
@pytest.mark.parametrize('name', [*_list_peers()])
def test_peers_serve_exact_weights(name, num_learners):
  if not server_peers.has_peer(name):
    pytest.skip(f'{name} or what it needs is not installed.')
  result = server_peers.run_peer(name, 1000, num_learners, 20, timeout=120)
  assert result.keys() == RESULT.keys()
  assert result['num_errors'] == 0
  assert result['updates_per_second'] == pytest.approx(
    num_learners * 20 / result['seconds']
  )
  assert result['cpu_per_update'] > 0
  # A learner's staleness adds up to the updates that are not its own.
  work = _make_work(1000, num_learners, 20)
  most = num_learners * work.num_updates / (num_learners * 20) - 1
  assert 0 <= result['mean_staleness'] <= most
  assert result['mean_staleness'] <= result['max_staleness']
  if num_learners == 1:
    assert result['max_staleness'] == 0


@pytest.mark.parametrize(
  ('num_rounds', 'num_warm_up'), [(1, 6), (39, 6), (40, 8), (200, 40)]
)
def test_budget(num_rounds, num_warm_up):
  work = _make_work(num_rounds=num_rounds)
  assert work.num_warm_up == num_warm_up
  assert work.num_updates == num_warm_up + 2 * num_rounds


@pytest.mark.parametrize(
  ('change', 'problem'),
  [
    ({'num_parameters': 0}, 'num_parameters must be at least 1, got 0'),
    ({'num_learners': -1}, 'num_learners must be at least 1, got -1'),
    ({'num_rounds': 0}, 'num_rounds must be at least 1, got 0'),
    ({'num_rounds': 2**23}, 'at most 16777216 updates, .* got 18454936'),
  ],
)
def test_impossible_work_is_refused(change, problem):
  with pytest.raises(ValueError, match=problem):
    server_work.check_work(_make_work()._replace(**change))


def test_weights_are_exact_up_to_the_last_update():
  clocks = np.array([1, 3, 1025, server_work.MAX_UPDATES - 1])
  exact = -server_work.RATE * clocks
  assert exact.dtype == np.float64
  np.testing.assert_array_equal(exact.astype(np.float32), exact)


def test_the_server_updates_until_the_budget_is_used_up():
  work = _make_work()
  server = server_work.Server(work)
  for clock in range(work.num_updates + 2):
    server.update(_make_push(work, max(0, clock - 3)))
    reached = min(clock + 1, work.num_updates)
    assert server.answer.clock == server.log.clock == reached
    np.testing.assert_array_equal(
      server.answer.values, np.full(5, -reached / 1024, np.float32)
    )
  assert server.log.is_over
  assert server.log.make_report()['mean_staleness'] == 3


def test_the_log_leaves_the_warm_up_out(monkeypatch):
  work = _make_work()
  wall, cpu = 0.0, 0.0
  clock = types.SimpleNamespace(
    perf_counter=lambda: wall, process_time=lambda: cpu
  )
  monkeypatch.setattr(server_work, 'time', clock)
  log = server_work.Log(work)
  for number in range(work.num_updates):
    is_warm = number >= work.num_warm_up
    wall += 0.5 if is_warm else 100.0
    cpu += 0.25 if is_warm else 100.0
    # Staleness goes 0, 1, 0, 1, ... once it is warm, and is 5 before.
    log.add(number - (number % 2 if is_warm else 5))
  assert log.make_report() == {
    'updates_per_second': 2.0,
    'mean_staleness': 0.5,
    'max_staleness': 1,
    'cpu_per_update': 0.25,
    'seconds': 10.0,
  }


@pytest.mark.parametrize('position', [0, 2, 4])
def test_a_single_wrong_weight_is_seen(position):
  checker = server_work.Checker(_make_work())
  weights = np.full(5, -7 / 1024, np.float32)
  checker.check(weights, 7)
  assert checker.make_report() == {'num_rounds': 1, 'num_errors': 0}
  weights[position] = -8 / 1024
  checker.check(weights, 7)
  assert checker.make_report() == {'num_rounds': 2, 'num_errors': 1}


def test_a_learner_over_sockets_counts_wrong_answers():
  work = _make_work(num_learners=1, num_rounds=1)
  pushes = []

  def serve(end):
    push = server_work.Message(5)
    for clock in range(1, work.num_updates + 1):
      peer_unix.receive(end, push)
      pushes.append((push.clock, push.values.tolist()))
      answer = _make_push(work, clock)
      answer.values[:] = -clock / 1024
      # One answer is torn, and one is old.
      answer.values[3] += clock == 2
      answer.values[:] += (clock == 3) / 1024
      end.sendall(answer.buffer)

  with contextlib.ExitStack() as stack:
    ends = [stack.enter_context(end) for end in peer_unix.make_pair()]
    for end in ends:
      end.settimeout(60)
    thread = threading.Thread(target=serve, args=ends[:1])
    thread.start()
    report = peer_unix.learn(ends[1], work).make_report()
    thread.join(60)
  assert report == {'num_rounds': work.num_updates, 'num_errors': 2}
  assert pushes == [(clock, [0.5] * 5) for clock in range(work.num_updates)]


def test_an_end_that_leaves_is_an_error():
  first, second = socket.socketpair()
  with first:
    with second:
      second.sendall(b'12345')
    with pytest.raises(EOFError, match='left with 79 bytes to come'):
      peer_unix.receive(first, server_work.Message(5))


def test_no_process_outlives_its_time():
  line = json.dumps(_make_work()._replace(timeout=0.1)._asdict())
  program = (
    'import signal, sys\n'
    'from launch.benchmarks import server_work\n'
    'server_work.start_process(sys.argv[1])\n'
    'signal.pause()'
  )
  done = subprocess.run(
    [sys.executable, '-c', program, line],
    cwd=workers.ROOT,
    timeout=60,
    check=False,
  )
  assert done.returncode == -signal.SIGALRM


def _add_peer(monkeypatch, *programs):
  """A peer `fake` of these programs; gives the processes that were started."""
  commands = [
    server_peers.Command([sys.executable, '-c', program])
    for program in programs
  ]
  prepare = lambda *_: contextlib.nullcontext(commands)
  peer = server_peers.Peer(prepare)
  monkeypatch.setitem(server_peers.PEERS, 'fake', peer)
  held = []
  start = server_peers._start

  def start_and_hold(*args):
    held.append(start(*args))
    return held[-1]

  monkeypatch.setattr(server_peers, '_start', start_and_hold)
  return held


WAIT = 'import signal\nsignal.pause()'


@pytest.mark.parametrize(
  ('programs', 'timeout', 'problem'),
  [
    ((WAIT, 'exit("no such luck")'), 60, r'fake gave \[1\]. no such luck'),
    ((WAIT, WAIT), 0.2, 'fake did not end in time'),
    (('', ''), 60, 'must report on 26 updates by 2 learners, got 0 by 0'),
  ],
)
def test_peers_that_fail_are_named_and_ended(
  programs, timeout, problem, monkeypatch
):
  held = _add_peer(monkeypatch, *programs)
  with pytest.raises(workers.WorkerError, match=problem):
    server_peers.run_peer('fake', 5, 2, 10, timeout)
  assert len(held) == len(programs)
  assert None not in [process.returncode for process in held]


def test_groups_end_even_if_they_do_not_listen(monkeypatch):
  monkeypatch.setattr(server_peers, '_PATIENCE', 0.2)
  program = (
    'import os, signal\n'
    'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
    'child = os.fork()\n'
    'if child: print(child, flush=True)\n'
    'signal.pause()'
  )
  with subprocess.Popen(
    [sys.executable, '-c', program],
    stdout=subprocess.PIPE,
    start_new_session=True,
  ) as process:
    child = int(process.stdout.readline())
    assert os.getpgid(child) == process.pid
    server_peers.end_groups([process])
    assert process.returncode == -signal.SIGKILL
    # The child held the other end of the pipe, and is gone too.
    assert process.stdout.read() == b''


def test_no_mpirun_is_said_in_a_line(monkeypatch, capsys):
  monkeypatch.setenv('PATH', '')
  assert server_peers.find_python.__wrapped__('mpi') is None
  assert not server_peers.has_peer('mpi')
  assert capsys.readouterr().out == (
    'There is no mpi to compare with: mpirun is not on this machine.\n'
  )


def test_a_peer_that_is_not_there_is_an_error(monkeypatch):
  monkeypatch.setattr(server_peers, 'find_python', lambda name: None)
  assert server_peers.list_peers() == []
  with pytest.raises(workers.WorkerError, match='torch cannot run here'):
    server_peers.run_peer('torch', 5, 2, 10)


@pytest.mark.parametrize('requirements', [environments.TORCH, environments.MPI])
def test_what_is_not_installed_is_not_there(requirements, tmp_path):
  assert not environments.has_packages(requirements, tmp_path)
  # An interpreter is there, and has neither.
  package = requirements[0].partition('==')[0]
  python = tmp_path / f'.venv-{package}' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text('#!/bin/sh\nexit 1\n')
  python.chmod(0o755)
  assert not environments.has_packages(requirements, tmp_path)


def test_an_environment_needs_the_right_version(tmp_path):
  python = tmp_path / '.venv-numpy' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  python.chmod(0o755)
  right, wrong = f'numpy=={np.__version__}', 'numpy==0.0.1'
  assert environments.has_packages((right,), tmp_path)
  assert environments.find_python((right,), tmp_path) == str(python)
  assert not environments.has_packages((wrong,), tmp_path)


def test_peers_import_neither_jax_nor_each_other():
  program = (
    'import sys\n'
    'from launch.benchmarks import peer_mpi, peer_torch, peer_unix\n'
    'print({"jax", "jasgd", "torch", "mpi4py", "absl"} & {*sys.modules})'
  )
  done = subprocess.run(
    [sys.executable, '-c', program],
    cwd=workers.ROOT,
    capture_output=True,
    text=True,
    timeout=120,
    check=True,
  )
  assert done.stdout.strip() == 'set()'


def test_cases_take_turns_and_give_medians():
  order = []
  numbers = {'a': iter([5, 1, 3, 2, 9]), 'b': itertools.count(10)}

  def make_case(name):
    def case():
      order.append(name)
      return {'x': next(numbers[name]), 'y': 7}

    return case

  cases = {name: make_case(name) for name in numbers}
  medians = server_rounds.measure(cases, num_rounds=5)
  rounds = [tuple(order[i : i + 2]) for i in range(0, 10, 2)]
  assert len(order) == 10
  assert {*rounds} == {('a', 'b'), ('b', 'a')}
  same = server_rounds.Spread(7, 7, 7)
  assert medians == {
    'a': {'x': server_rounds.Spread(3, 1, 9), 'y': same},
    'b': {'x': server_rounds.Spread(12, 10, 14), 'y': same},
  }
  assert [*medians] == ['a', 'b']


def test_a_case_that_fails_once_is_left_out(capsys):
  calls = []

  def fail():
    calls.append('bad')
    if len(calls) == 2:
      raise workers.WorkerError('torch gave [1].')
    return RESULT

  medians = server_rounds.measure({'bad': fail, 'good': lambda: RESULT}, 4)
  assert len(calls) == 2
  assert [*medians] == ['good']
  assert capsys.readouterr().out == 'bad is left out: torch gave [1].\n'


def test_other_errors_are_not_swallowed():
  with pytest.raises(ZeroDivisionError):
    server_rounds.measure({'bad': lambda: {'x': 1 / 0}})


def test_measuring_nothing_is_refused():
  with pytest.raises(ValueError, match='num_rounds must be at least 1, got 0'):
    server_rounds.measure({}, num_rounds=0)


def test_short_cases_get_longer_and_stay_so():
  asked = []

  def run(num_rounds):
    asked.append(num_rounds)
    return {'seconds': num_rounds / 1000}

  case = server_rounds.make_long(run, 200, min_seconds=0.5)
  assert case() == case() == {'seconds': 0.75}
  assert asked == [200, 750, 750]
  asked.clear()
  assert server_rounds.make_long(run, 600, min_seconds=0.5)() is not None
  assert asked == [600]


@pytest.mark.parametrize('num_parameters', server_rounds.NUM_ROUNDS)
def test_every_size_makes_a_case(num_parameters, monkeypatch):
  asked = []

  def run(*args):
    asked.append(args)
    return RESULT

  monkeypatch.setattr(server_peers, 'run_peer', run)
  assert server_peers.make_case('unix', num_parameters, 4)() == RESULT
  num_rounds = server_rounds.NUM_ROUNDS[num_parameters]
  assert asked == [('unix', num_parameters, 4, num_rounds)]


def test_table(capsys):
  speeds = {'mpi': 50.0, 'unix': 25.0, 'ours': 100.0}
  cases = {
    name: lambda speed=speed: {**RESULT, 'updates_per_second': speed}
    for name, speed in speeds.items()
  }
  medians = server_rounds.measure(cases, 2)
  wrong = server_rounds.Spread(0, 0, 3)
  medians['ours']['num_errors'] = wrong
  server_rounds.print_table(1_000_000, 2, medians)
  _, title, header, *rows = capsys.readouterr().out.splitlines()
  assert title == '1,000,000 parameters, 2 learners'
  words = header.split()
  assert words[3:9] == ['x', 'mpi', 'x', 'torch', 'x', 'unix']
  # A median of errors would hide a round that had some.
  expected = {
    'mpi': ['1.00', '-', '2.00', '0'],
    'unix': ['0.50', '-', '1.00', '0'],
    'ours': ['2.00', '-', '4.00', '3'],
  }
  for row, (name, cells) in zip(rows, expected.items(), strict=True):
    got = row.split()
    assert got[0] == name
    assert float(got[1]) == speeds[name]
    assert [*got[4:7], got[-1]] == cells
    assert got[7:10] == ['1.00', '2', '1.000']


@pytest.mark.parametrize('name', server_peers.OURS)
def test_ours_serve_exact_weights(name):
  found = server_peers.run_peer(name, 1000, 2, 30, timeout=120.0)
  assert found['num_errors'] == 0
  assert found['updates_per_second'] > 0
  assert 0 <= found['mean_staleness'] <= found['max_staleness']
  shares = [value for key, value in found.items() if key.startswith('time_')]
  assert 0.5 < sum(shares) < 2.0  # Copies of a stream come on top.


def test_what_must_not_be_is_found():
  good = server_rounds.Spread(0, 0, 0)
  medians = {name: {'num_errors': good} for name in server_peers.OURS}
  assert not server.find_problems(medians)
  medians['our memory'] = {'num_errors': server_rounds.Spread(0, 0, 2)}
  del medians['our flight']
  assert server.find_problems(medians) == [
    'our flight did not run.',
    'our memory gave wrong weights, 2 times.',
  ]
  crowd = {
    'least': 5, 'most': 10, 'memory_growth': 1.0, 'num_refused': 0,
    'num_errors': 0,
  }  # fmt: skip
  assert not server_crowd.find_problems('memory', crowd)
  for change in (
    {'least': 4}, {'memory_growth': 1.2}, {'num_refused': 1}, {'num_errors': 1},
  ):  # fmt: skip
    assert len(server_crowd.find_problems('memory', {**crowd, **change})) == 1


@pytest.mark.slow
@pytest.mark.parametrize('wire', ['memory', 'flight'])
def test_a_crowd_is_served(wire):
  found = server_crowd.measure(wire, 10.0)
  assert found['least'] > 0
  # Whether all are served alike, the suite says: a busy machine is not fair.
  fair = {**found, 'least': found['most']}
  assert not server_crowd.find_problems(wire, fair)
