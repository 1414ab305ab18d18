"""Runs on many hosts by the command line, with a process for each role."""

import contextlib
import io
import json
import os
import re
import secrets
import shutil
import signal

import numpy as np
import pytest

from jasgd import experiment
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from tests import live
from tests.experiment import test_real_nodes as nodes
from tests.launch import quick

NUM_NODES = quick.NUM_NODES
CLUSTER = '--config.runtime.mode=cluster'
# Steps of runs that must not end during the test.
LONG = f'--config.num_updates={1000 * NUM_NODES}'
# Steps of runs that end only on request.
ENDLESS = '--config.num_updates=3000000'
Kind = traces.Kind


def _start(processes, workdir, *flags, strategy='pull', **environment):
  return processes.start(
    'launch.train',
    f'--config=tests/launch/quick.py:{strategy}',
    *([] if workdir is None else [f'--workdir={workdir}']),
    *flags,
    **environment,
  )


def _check_replay(workdir):
  found = experiment.verify(workdir, stream=io.StringIO())
  assert found.is_same, found


def _wait_for_updates(run, program):
  clock = run.get_clock() + 20
  live.wait_until(lambda: run.get_clock() >= clock, program)


def test_a_server_and_a_learner_of_another_host(processes, tmp_path):
  """The learner has no workdir: it is given an address and a token."""
  flags = (CLUSTER, '--config.num_workers=1')
  server = _start(
    processes, tmp_path, *flags, '--role=server', strategy='asynchronous'
  )
  folder = workdirs.Workdir(tmp_path)
  live.wait_until(folder.server.exists, server)
  address = workdirs.read_json(folder.server)['addresses']['flight']
  learner = _start(
    processes,
    None,
    *flags,
    '--role=learner',
    f'--server={address.rpartition("//")[2]}',
    strategy='asynchronous',
    JASGD_TOKEN=folder.token.read_text(),
  )
  outputs = [program.wait() for program in (server, learner)]
  assert all('All 100 updates were made.' in output for output in outputs)
  assert not processes.find()
  trace = traces.Trace.load(folder.trace)
  assert trace.num_updates == 100
  assert set(trace.worker.tolist()) == {0}
  assert (tmp_path / 'report.html').exists()


@pytest.mark.slow
def test_a_cluster_loses_learners_and_servers(processes, tmp_path):
  flags = [
    CLUSTER,
    '--config.runtime.checkpoint_seconds=0.2',
    f'--config.server.port={runtime.find_free_port()}',
    '--config.num_updates=1000000',
  ]
  run = live.Run(tmp_path)

  def start(role, *arguments, **environment):
    return _start(
      processes,
      None,
      *flags,
      f'--role={role}',
      *arguments,
      strategy='asynchronous',
      **environment,
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
  _wait_for_updates(run, server)
  fourth = start('learner', here)
  live.wait_until(lambda: _count_working(run) == 3, fourth)
  _kill_server(run, server)
  assert all(each.is_running for each in (second, third, fourth))
  server = start('server', here)
  live.wait_until(lambda: run.get_server_pid(incarnation=1), server)
  live.wait_until(lambda: run.get_status()['num_alive'] == 3, server)
  _wait_for_updates(run, server)
  commands |= processes.find()
  server.kill(signal.SIGINT)
  outputs = [each.wait() for each in (server, second, third, fourth)]
  assert all('It was interrupted.' in output for output in outputs)
  run.check_replay()
  # The token is only in its own file.
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
  """Kills a server and its launcher, which would start it again."""
  program.kill(signal.SIGSTOP)
  os.kill(run.get_server_pid(), signal.SIGKILL)
  program.kill(signal.SIGKILL)
  program.wait(-signal.SIGKILL)


def _find_address(workdir, node):
  """Address of a node, as soon as it has one."""
  folder = runtime.find_folder(workdirs.Workdir(workdir), node)
  if not folder.server.exists():
    return None
  address = workdirs.read_json(folder.server)['addresses']['flight']
  return address.removeprefix('grpc+tcp://')


def _count_steps(folders):
  """The steps of each node so far, which has a folder of its own."""
  counts = np.zeros(len(folders), int)
  for node, folder in enumerate(folders):
    path = folder / 'trace' / f'node-{node}'
    with contextlib.suppress(traces.TraceError):  # The file is being made.
      records = traces.Trace.load(path, allow_truncated=True).records
      counts[node] = np.count_nonzero(records['kind'] == Kind.STEP)
  return counts


def _list_sources(folders, node):
  """The peers whose weights a node has mixed with its own so far."""
  path = folders[node] / 'trace' / f'node-{node}'
  mixes = traces.Trace.load(path, allow_truncated=True).mixes
  return set(mixes['source'].tolist())


@pytest.mark.slow
def test_a_cluster_that_shares_a_folder(processes, tmp_path):
  """Nodes choose free numbers; one that died is replaced, and goes on."""
  flags = (CLUSTER, LONG)

  def start(role):
    return _start(
      processes, tmp_path, *flags, f'--role={role}', strategy='elastic'
    )

  watch = start('watch')
  members = [*(start('node') for _ in range(NUM_NODES)), start('centre')]
  live.wait_until(
    lambda: nodes.count_steps(tmp_path, NUM_NODES).min() > 20, watch
  )
  live.wait_until(lambda: nodes.has_saved(tmp_path, NUM_NODES), watch)
  one_more = start('node').wait(1)
  assert f'All {NUM_NODES} nodes of this run are running' in one_more
  victim = members.pop(0)
  for pid in (*_find_child(victim.pid), victim.pid):
    os.kill(pid, signal.SIGKILL)
  members.append(start('node'))
  output = watch.wait()
  assert 'nodes ' in output
  assert 'Wrote' in output
  for member in members:
    member.wait()
  assert not processes.find()
  trace = traces.Trace.load(tmp_path / 'trace')
  assert np.count_nonzero(trace.records['kind'] == Kind.RESTART) == 1
  _check_replay(tmp_path)


def _find_child(pid):
  """The children of a process."""
  path = f'/proc/{pid}/task/{pid}/children'
  with open(path) as file:
    return [int(each) for each in file.read().split()]


@pytest.mark.slow
def test_a_cluster_by_addresses(processes, tmp_path):
  """Nodes share no folder; the first dies, later ones join through others."""
  num_nodes = 3
  flags = (
    CLUSTER,
    '--role=node',
    '--listen=127.0.0.1',
    '--config.deadlines.start=4',
    ENDLESS,
    f'--config.num_workers={num_nodes}',
  )
  folders = [tmp_path / str(node) for node in range(num_nodes)]
  token = secrets.token_hex(32)

  def start(node, *peers):
    return _start(
      processes,
      folders[node],
      *flags,
      f'--node={node}',
      *(f'--peers={_find_address(folders[peer], peer)}' for peer in peers),
      JASGD_TOKEN=token,
    )

  def get_steps():
    return _count_steps(folders)

  first = start(0)
  live.wait_until(lambda: _find_address(folders[0], 0), first)
  second = start(1, 0)
  live.wait_until(lambda: get_steps()[:2].min() > 10, second)
  live.wait_until(lambda: workdirs.list_checkpoints(folders[0] / 'nodes' / '0'))
  # A number that is taken, and a process without the token.
  wrong = [
    _start(
      processes,
      tmp_path / f'other {number}',
      *flags,
      f'--node={number}',
      f'--peers={_find_address(folders[0], 0)}',
      **environment,
    )
    for number, environment in ((1, {'JASGD_TOKEN': token}), (2, {}))
  ]
  assert 'Node 1 is running already' in wrong[0].wait(1)
  assert 'refused the token, or wants one' in wrong[1].wait(1)
  for pid in (*_find_child(first.pid), first.pid):
    os.kill(pid, signal.SIGKILL)
  others = [start(node, 1) for node in range(2, num_nodes)]
  watch = processes.start(
    'launch.train',
    '--config=tests/launch/quick.py:pull',
    CLUSTER,
    '--config.deadlines.start=4',
    ENDLESS,
    f'--config.num_workers={num_nodes}',
    '--role=watch',
    f'--workdir={tmp_path / "watch"}',
    f'--peers={_find_address(folders[1], 1)}',
    JASGD_TOKEN=token,
  )
  live.wait_until(lambda: get_steps().min() > 10, others[0])
  first = start(0, num_nodes - 1)
  everybody = (first, second, *others)
  # The run ends only on request: the node that came back may be slow.
  live.wait_until(
    lambda: _list_sources(folders, num_nodes - 1) == set(range(num_nodes - 1)),
    first,
  )
  live.wait_until(lambda: f'nodes {num_nodes}' in watch.output, watch)
  watch.kill(signal.SIGINT)
  output = watch.wait()
  for program in everybody:
    program.kill(signal.SIGINT)
  assert 'The traces are in the folders of the nodes' in output
  accuracy = float(re.findall(r'acc (\S+)', output)[-1])
  assert accuracy > 0.5  # Without training it is about 0.1.
  for program in everybody:
    program.wait()
  assert not processes.find()
  # Copied together, the folders are one run.
  whole = tmp_path / 'whole'
  for folder in folders:
    shutil.copytree(folder, whole, dirs_exist_ok=True)
  _check_replay(whole)
  trace = traces.Trace.load(whole / 'trace')
  for node in range(2, num_nodes):
    assert trace.of_replica(node)['kind'][0] == Kind.JOIN
  assert Kind.RESTART in trace.of_replica(0)['kind']
  files = [path for path in tmp_path.rglob('*') if path.is_file()]
  names = {path.name for path in files if token.encode() in path.read_bytes()}
  assert names == {'token'}


def _start_group(processes, folders, *flags, **environment):
  """The nodes of an all-reduce, which meet at a port that is free."""
  place = f'127.0.0.1:{runtime.find_free_port()}'
  return [
    _start(
      processes,
      folder,
      *flags,
      '--role=node',
      f'--node={node}',
      f'--peers={place}',
      strategy='allreduce',
      **environment,
    )
    for node, folder in enumerate(folders)
  ]


GROUP_FLAGS = (
  CLUSTER,
  f'--config.num_updates={400 * NUM_NODES}',
  '--config.deadlines.end=10',
  '--config.deadlines.silence=5',
)


def _kill_one(folders, programs):
  """Kills node 1 of an all-reduce, which ends them all."""
  live.wait_until(lambda: _count_steps(folders).min() > 30, programs[0])
  (pid,) = _find_child(programs[1].pid)
  os.kill(pid, signal.SIGKILL)
  outputs = [program.wait(1) for program in programs]
  assert 'exit code -9' in outputs[1]
  assert re.search(
    r'At step \d+ node 1 was lost, and an all-reduce cannot go on without it',
    outputs[0],
  ), outputs[0]
  assert 'go on from the last checkpoint' in outputs[0]


@pytest.mark.slow
def test_a_cluster_of_an_all_reduce(processes, tmp_path):
  """A node is killed, and all go on together; each has a folder of its own.

  They may have more devices than one.
  """
  folders = [tmp_path / str(node) for node in range(NUM_NODES)]

  def start():
    devices = '--xla_force_host_platform_device_count=2'
    return _start_group(processes, folders, *GROUP_FLAGS, XLA_FLAGS=devices)

  _kill_one(folders, start())
  assert not processes.find()
  for program in start():
    program.wait()
  whole = tmp_path / 'whole'
  for folder in folders:
    shutil.copytree(folder, whole, dirs_exist_ok=True)
  trace = traces.Trace.load(whole / 'trace')
  assert np.count_nonzero(trace.records['kind'] == Kind.RESTART) == NUM_NODES
  _check_replay(whole)


@pytest.mark.slow
def test_a_cluster_of_an_all_reduce_that_shares_a_folder(processes, tmp_path):
  """A node is killed; then one is stopped; then all go on to the end."""
  folders = [tmp_path] * NUM_NODES

  def start():
    programs = _start_group(processes, folders, *GROUP_FLAGS)
    watch = _start(
      processes, tmp_path, *GROUP_FLAGS, '--role=watch', strategy='allreduce'
    )
    return programs, watch

  programs, watch = start()
  _kill_one(folders, programs)
  said = watch.wait(1)
  assert re.search(r'Nothing was heard for 5 s from .*node 1', said), said
  assert not processes.find()
  # All end in good order, and no process treats the run as done.
  before = _count_steps(folders).min()
  programs, watch = start()
  live.wait_until(lambda: _count_steps(folders).min() > before + 10, watch)
  programs[1].kill(signal.SIGINT)
  for program in programs:
    said = program.wait()
    assert re.search(r'Stopped at step \d+, with all others: node 1 was', said)
  said = watch.wait(1)
  assert 'started again, they go on from the last checkpoint' in said
  assert 'was lost' not in said
  assert not (tmp_path / 'result.json').exists()
  assert not processes.find()
  num_steps = len(traces.Trace.load(tmp_path / 'trace').steps)
  programs, watch = start()
  for program in (watch, *programs):
    program.wait()
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['metrics']['gossip/consensus_error'] == 0
  trace = traces.Trace.load(tmp_path / 'trace')
  restarts = np.flatnonzero(trace.records['kind'] == Kind.RESTART)
  assert len(restarts) == 2 * NUM_NODES
  assert result['clock'] == trace.steps['step'].max() * NUM_NODES
  # After the stop, no step was made twice.
  last = trace.records['step'][restarts].max() * NUM_NODES
  assert len(trace.steps) - num_steps == result['clock'] - last
  _check_replay(tmp_path)


@pytest.mark.slow
def test_a_node_that_waits_for_its_group_ends_when_it_is_told(
  processes, tmp_path
):
  program = _start(
    processes,
    tmp_path,
    CLUSTER,
    '--role=node',
    '--node=0',
    f'--peers=127.0.0.1:{runtime.find_free_port()}',
    strategy='allreduce',
  )
  live.wait_until(lambda: _find_child(program.pid), program)
  program.kill(signal.SIGINT)
  assert 'ended with' not in program.wait()
