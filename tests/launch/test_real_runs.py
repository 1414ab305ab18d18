"""Real servers and learners by the command line, as people run them."""

import io
import json
import os
import re
import signal

import numpy as np
import pytest

from jasgd import experiment
from jasgd import protocols
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live

QUICK = '--config=tests/launch/quick_config.py'
LONG = '--config.num_updates=1000000'
NUMBER = r'\d[\d.e-]*'
LINE = re.compile(
  rf'^clock \d+/\d+ \d+%  {NUMBER}/s  (ETA|took) \w+  '
  rf'staleness {NUMBER} \(max \d+\)  loss {NUMBER}  acc {NUMBER}  learners 2$',
  re.MULTILINE,
)


def _train(processes, workdir, *arguments, **environment):
  return processes.start(
    'launch.train', QUICK, f'--workdir={workdir}', *arguments, **environment
  )


def _replay(processes, workdir, code=0, **environment):
  return processes.start(
    'launch.replay', f'--workdir={workdir}', **environment
  ).wait(code)


def _damage(workdir, change):
  """Changes the applied gradients in a trace's file."""
  path = workdir / 'trace'
  records = traces.Trace.load(path).records.copy()
  rows = np.flatnonzero(
    (records['kind'] == traces.Kind.GRADIENT)
    & (records['fate'] == protocols.Fate.APPLIED)
  )
  clock = change(records, rows)
  data = path.read_bytes()
  path.write_bytes(data[: -records.nbytes] + records.tobytes())
  return clock


def _change_a_step(records, rows):
  records['step'][rows[120]] += 5000
  return 121


def _swap_learners(records, rows):
  learners = records['learner'][rows]
  (first, *_) = 100 + np.flatnonzero(learners[100:-1] != learners[101:])
  for name in ('learner', 'step', 'read_clock'):
    records[name][rows[first : first + 2]] = records[name][
      rows[first : first + 2]
    ][::-1]
  return first + 1


def test_a_run_to_its_end(processes, tmp_path):
  output = _train(processes, tmp_path, '--config.num_updates=200').wait()
  assert output.startswith('asynchronous: the server updates with every')
  assert LINE.search(output), output
  assert not processes.find()
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['clock'] == 200
  assert result['end_reason'] == 'All 200 updates were made.'
  assert result['test/accuracy'] > 0.7
  for name in result:
    assert re.search(rf'^{name} ', output, re.MULTILINE), name
  assert '<html' in (tmp_path / 'report.html').read_text()
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.num_updates == 200
  provenance = json.loads((tmp_path / 'provenance.json').read_text())
  assert provenance == trace.header
  assert not (tmp_path / 'server.json').exists()
  said = _replay(processes, tmp_path)
  assert 'Bit-identical: the replay of 200 updates' in said
  original = (tmp_path / 'trace').read_bytes()
  clock = _damage(tmp_path, _swap_learners)
  found = experiment.verify(tmp_path, stream=io.StringIO())
  assert (found.is_same, found.first_difference) == (False, clock)
  (tmp_path / 'trace').write_bytes(original)
  clock = _damage(tmp_path, _change_a_step)
  said = _replay(processes, tmp_path, 1, NPROC=str(live.NUM_THREADS))
  assert f'the first weights that differ are those of clock {clock}, ' in said
  assert live.Run(tmp_path).go_on() == result  # There is nothing to do.


def _wait_for_clock(run, program, clock=20):
  live.wait_until(lambda: run.get_clock() >= clock, program)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('number', 'num_updates'), [(signal.SIGINT, 500), (signal.SIGTERM, 100)]
)
def test_a_run_that_was_stopped_goes_on(
  number, num_updates, processes, tmp_path
):
  run = live.Run(tmp_path)
  flag = f'--config.num_updates={num_updates}'
  program = _train(processes, tmp_path, flag)
  if number == signal.SIGINT:
    _wait_for_clock(run, program)
  else:  # As early as can be.
    live.wait_until(lambda: processes.find_children('server'), program)
  program.kill(number)
  output = program.wait()
  found = re.search(
    r'^The same command goes on from clock (\d+)\.$', output, re.M
  )
  assert found, output
  assert 'It was interrupted.' in output
  assert 'Traceback' not in output
  assert not processes.find()
  assert not (tmp_path / 'result.json').exists()
  if number == signal.SIGINT:
    assert run.check_replay() == int(found[1]) >= 20
    output = _train(processes, tmp_path, flag).wait()
    assert 'All 500 updates were made.' in output
  else:
    run.go_on()
  assert not processes.find()
  assert run.check_replay() == num_updates
  restarts = run.load_trace().records['kind'] == traces.Kind.RESTART
  assert np.count_nonzero(restarts) == 1


def test_no_child_outlives_its_launcher(processes, tmp_path):
  run = live.Run(tmp_path)
  program = _train(processes, tmp_path, LONG)
  _wait_for_clock(run, program)
  assert len(processes.find()) == 4
  program.kill(signal.SIGKILL)
  program.wait(-signal.SIGKILL)
  live.wait_until(lambda: not processes.find())
  assert run.check_replay() >= 20  # It has even saved.


@pytest.mark.slow  # Without the command line it is among the faults.
def test_a_killed_server_is_started_again(processes, tmp_path):
  run = live.Run(tmp_path)
  program = _train(processes, tmp_path, '--config.num_updates=500')
  _wait_for_clock(run, program)
  os.kill(run.get_server_pid(), signal.SIGKILL)
  output = program.wait()
  assert re.search(r'The server was lost at clock \d+ \(exit code -9\)', output)
  assert json.loads((tmp_path / 'result.json').read_text())['incarnation'] == 1
  assert run.check_replay() == 500


def test_nobody_waits_for_a_learner_that_dies_as_it_starts(processes, tmp_path):
  """Its launcher tells the server, which would wait for ten minutes."""
  program = _train(
    processes,
    tmp_path,
    '--config.num_updates=100',
    '--config.deadlines.start=600',
  )
  (pid,) = live.wait_until(
    lambda: processes.find_children('learner-1'), program
  )
  os.kill(pid, signal.SIGKILL)
  output = program.wait()
  assert 'learner-1 was lost (exit code -9)' in output
  trace = traces.Trace.load(tmp_path / 'trace')
  assert trace.num_updates == 100
  assert len(set(trace.learner.tolist())) == 1


@pytest.mark.slow
def test_a_lost_learner_can_end_the_run(processes, tmp_path):
  run = live.Run(tmp_path)
  program = _train(
    processes,
    tmp_path,
    '--config.num_updates=500',
    '--config.server.on_learner_lost=fail',
  )
  _wait_for_clock(run, program)
  (pid,) = processes.find_children('learner-1')
  os.kill(pid, signal.SIGKILL)
  output = program.wait(1)
  assert re.search(r'Learner \d was lost: its connection is gone\.', output)
  assert 'learner-1 was lost (exit code -9)' in output
  assert 'The same command goes on from clock' in output
  assert 'Traceback' not in output
  assert not processes.find()
  assert run.go_on()['end_reason'] == 'All 500 updates were made.'
  assert run.check_replay() == 500


@pytest.mark.slow
def test_a_run_that_diverges_says_why(processes, tmp_path):
  output = _train(
    processes,
    tmp_path,
    '--config.optimizer.rate=1e9',
    '--config.optimizer.policy=constant',
  ).wait()
  assert re.search(
    r'The loss diverged: the last \d+ gradients were not finite .*the mean '
    r'staleness was \d\.\d \(at most \d+\) and the rate 1e\+09. A rule of '
    r'thumb: .*to be divided by the staleness, which the policy inverse does',
    output,
  ), output
  assert 'Traceback' not in output
  assert json.loads((tmp_path / 'result.json').read_text())['is_diverged']
  assert live.Run(tmp_path).check_replay() < 100


def test_usage_errors_take_a_line(processes, tmp_path):
  folder = f'--workdir={tmp_path}/work'
  cluster = '--config.runtime.mode=cluster'
  cases = {
    'A cluster has roles, and nothing else has': [folder, '--role=server'],
    'a learner may give --server instead': [cluster, '--role=learner'],
    'The deadline silence must be finite and at least 0.001': [
      folder,
      '--config.deadlines.silence=0.0',
    ],
    "Unknown runtime.wire 'pigeon'. Known: auto, memory, flight": [
      folder,
      '--config.runtime.wire=pigeon',
    ],
  }
  programs = {
    problem: processes.start('launch.train', QUICK, *arguments)
    for problem, arguments in cases.items()
  }
  for problem, program in programs.items():
    output = program.wait(1)
    assert problem in output
    assert output.endswith('\nSee --help.\n')
    assert output.count('\n') <= 3, output
  assert not (tmp_path / 'work').exists()


@pytest.mark.slow
def test_a_cluster_loses_learners_and_servers(processes, tmp_path):
  flags = [
    '--config.runtime.mode=cluster',
    '--config.runtime.checkpoint_seconds=0.2',
    f'--config.server.port={runtime.find_free_port()}',
    LONG,
  ]
  run = live.Run(tmp_path)

  def start(role, *arguments, **environment):
    return processes.start(
      'launch.train', QUICK, *flags, f'--role={role}', *arguments, **environment
    )

  here = f'--workdir={tmp_path}'
  server = start('server', here)
  live.wait_until(run.get_server_pid, server)
  address = workdirs.read_json(run.folder.server)['addresses']['flight']
  token = run.folder.token.read_text()
  there = f'--server={address.rpartition("//")[2]}'
  first, second = start('learner', here), start('learner', here)
  strangers = [
    start('learner', there, JASGD_TOKEN=token[:-1]),
    start('learner', there),
  ]
  third = start('learner', there, JASGD_TOKEN=token)
  for stranger in strangers:
    output = stranger.wait(1)
    assert output == (
      f'The server at {address} refused the token, or wants one.\n'
    )
  live.wait_until(lambda: _count_working(run) == 3, third)
  commands = processes.find()
  first.kill(signal.SIGKILL)
  live.wait_until(lambda: run.get_status()['num_alive'] == 2, server)
  _wait_for_clock(run, server, run.get_clock() + 20)
  fourth = start('learner', here)
  live.wait_until(lambda: _count_working(run) == 3, fourth)
  _kill_server(run, server)
  assert all(each.is_running for each in (second, third, fourth))
  server = start('server', here)
  live.wait_until(lambda: run.get_server_pid(incarnation=1), server)
  live.wait_until(lambda: run.get_status()['num_alive'] == 3, server)
  _wait_for_clock(run, server, run.get_clock() + 20)
  commands |= processes.find()
  server.kill(signal.SIGINT)
  outputs = [each.wait() for each in (server, second, third, fourth)]
  assert all('It was interrupted.' in output for output in outputs)
  run.check_replay()
  # The token is where it belongs, and nowhere else.
  assert token not in ''.join(outputs)
  assert not any(token.encode() in line for line in commands.values())
  files = [path for path in tmp_path.rglob('*') if path.is_file()]
  assert [path for path in files if token.encode() in path.read_bytes()] == [
    tmp_path / 'token'
  ]
  assert (tmp_path / 'token').stat().st_mode & 0o777 == 0o600
  log = (tmp_path / 'logs' / 'server.log').read_text()
  assert re.search(r'W Learner \d left at clock \d+: its connection is', log)


def _count_working(run):
  """Learners whose gradients have been applied."""
  status = run.get_status()
  return sum(
    each['num_applied'] > 0 and each['state'] != 'gone'
    for each in status['learners'].values()
  )


def _kill_server(run, program):
  """Kills a server, and the program that would start it again."""
  program.kill(signal.SIGSTOP)
  os.kill(run.get_server_pid(), signal.SIGKILL)
  program.kill(signal.SIGKILL)
  program.wait(-signal.SIGKILL)


@pytest.mark.slow
def test_one_launch_at_a_time(processes, tmp_path):
  first = _train(processes, tmp_path, LONG)
  live.wait_until((tmp_path / 'server.json').exists, first)
  output = _train(processes, tmp_path, LONG).wait(1)
  assert 'is in use: there is a launcher already' in output
  assert 'Traceback' not in output
  first.kill(signal.SIGINT)
  first.wait()


def test_stopped_while_it_loads(processes, tmp_path):
  starting = _train(processes, tmp_path)
  live.wait_until(lambda: live.catches(starting.pid, signal.SIGTERM), starting)
  starting.kill(signal.SIGINT)
  assert 'Stopped before it began.' in starting.wait()
