"""Nodes without a server by the command line, as people run them."""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal

import jax
import numpy as np
import pytest

import jasgd
from jasgd import experiment
from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.traces import _file
from tests import live
from tests.experiment import test_real_nodes as nodes

NUM_NODES = nodes.NUM_NODES
NUMBER = r'-?\d[\d.e-]*'
LINE = re.compile(
  rf'^steps (\d+)/\1 100%  {NUMBER}/s  took \w+  (age {NUMBER} \(max \d+\)  )?'
  rf'loss {NUMBER}  acc {NUMBER}  nodes {NUM_NODES}$',
  re.MULTILINE,
)
CLUSTER = '--config.runtime.mode=cluster'
Kind = traces.NodeKind


def _start(processes, workdir, *flags, strategy='pull', **environment):
  return processes.start(
    'launch.train',
    f'--config=tests/launch/quick_nodes.py:{strategy}',
    f'--workdir={workdir}',
    *flags,
    **environment,
  )


def _replay(processes, workdir, code=0):
  return processes.start('launch.replay', f'--workdir={workdir}').wait(code)


def _damage(workdir):
  """Changes the weight of a peer in one mix of one node."""
  path = workdir / 'trace' / 'node-1'
  trace = traces.NodeTrace.load(workdir / 'trace')
  records = trace.of_node(1).copy()
  rows = np.flatnonzero(records['kind'] == Kind.MIX)
  records['peer_weight'][rows[len(rows) // 2]] *= 1.5
  data = path.read_bytes()
  path.write_bytes(data[: -records.nbytes] + records.tobytes())


def _find_address(workdir, node):
  """Where a node is, once it is."""
  folder = runtime.find_folder(workdirs.Workdir(workdir), node)
  if not folder.server.exists():
    return None
  address = workdirs.read_json(folder.server)['addresses']['flight']
  return address.removeprefix('grpc+tcp://')


def _count_steps(folders):
  """The steps of each node so far, which has a folder of its own."""
  counts = np.zeros(NUM_NODES, int)
  for node, folder in enumerate(folders):
    path = folder / 'trace' / f'node-{node}'
    with contextlib.suppress(traces.TraceError):  # It is being made.
      records, _ = _file.read_file(path, True, traces.NODE_RECORD)
      counts[node] = np.count_nonzero(records['kind'] == Kind.STEP)
  return counts


@pytest.mark.parametrize(
  'strategy',
  [
    'pull',
    *(
      pytest.param(name, marks=pytest.mark.slow)
      for name in ('elastic', 'allreduce')
    ),
  ],
)
def test_a_run_to_its_end(strategy, processes, tmp_path):
  output = _start(processes, tmp_path, strategy=strategy).wait()
  assert LINE.search(output), output
  assert 'processes start, and compile first' in output
  assert 'Lost on the way' not in output
  assert not processes.find()
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['clock'] == 100 * NUM_NODES
  for name in result:
    assert re.search(rf'^{name} ', output, re.MULTILINE), name
  assert ('gossip/age_mean' in result) == (strategy != 'allreduce')
  assert ('gossip/lag_mean' in result) == (strategy == 'pull')
  groups = {'test', 'local', 'centre'} if strategy == 'elastic' else {'test'}
  for group in groups:
    assert result[f'{group}/accuracy'] > 0.8
  page = (tmp_path / 'report.html').read_text()
  assert 'Traffic' in page
  assert ('centre' in page) == (strategy == 'elastic')
  # Evaluations under way are of the steps that they say.
  columns = workdirs.read_metrics(tmp_path)
  assert np.all(np.diff(columns['clock']) > 0)
  assert np.all(np.diff(columns['test/loss']))
  assert columns['test/loss'][-1] == result['test/loss']
  # What is left is the mean of what nodes have.
  own = [
    workdirs.load_weights(tmp_path / 'nodes' / str(node))
    for node in range(NUM_NODES)
  ]
  mean = jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *own)
  np.testing.assert_allclose(
    jasgd.load_params(tmp_path), mean[0], rtol=1e-5, atol=1e-6
  )
  said = _replay(processes, tmp_path)
  assert 'Bit-identical: the replay gives the weights' in said
  assert f'node {NUM_NODES - 1} (version ' in said
  assert ('the centre (version ' in said) == (strategy == 'elastic')
  if strategy == 'pull':
    _damage(tmp_path)
    said = _replay(processes, tmp_path, 1)
    assert re.search('Different: .*node 1.*; the largest difference is', said)


@pytest.mark.slow
def test_the_config_of_the_readme(processes, tmp_path):
  """Other strategies differ by one field, which the quick config has, too."""
  output = processes.start(
    'launch.train',
    '--config=configs/gossip_digits.py:push_sum,smoke',
    f'--workdir={tmp_path}',
  ).wait()
  assert re.search(r'^steps (\d+)/\1 100% .* nodes 4$', output, re.MULTILINE)
  assert (tmp_path / 'report.html').exists()
  assert 'the replay gives the weights' in _replay(processes, tmp_path)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on(processes, tmp_path):
  """By SIGTERM, as early as can be; later ones are among the real nodes."""
  program = _start(processes, tmp_path)
  live.wait_until(lambda: processes.find_children('node-0'), program)
  program.kill(signal.SIGTERM)
  output = program.wait()
  assert re.search(r'^The same command goes on from clock \d+\.$', output, re.M)
  assert 'Traceback' not in output
  assert not processes.find()
  assert not (tmp_path / 'result.json').exists()
  output = _start(processes, tmp_path).wait()
  assert LINE.search(output), output
  assert 'Bit-identical' in _replay(processes, tmp_path)


@pytest.mark.slow
def test_a_cluster_that_shares_a_folder(processes, tmp_path):
  """Numbers are shared out; one that died is replaced, and goes on."""
  flags = (CLUSTER, '--config.num_epochs=30')  # They must not end too soon.

  def start(role):
    return _start(
      processes, tmp_path, *flags, f'--role={role}', strategy='elastic'
    )

  watch = start('watch')
  members = [*(start('node') for _ in range(NUM_NODES)), start('centre')]
  live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 20, watch)
  live.wait_until(lambda: nodes.has_saved(tmp_path), watch)
  one_more = start('node').wait(1)
  assert f'All {NUM_NODES} nodes of this run are there' in one_more
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
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert np.count_nonzero(trace.records['kind'] == Kind.RESTART) == 1
  assert 'Bit-identical' in _replay(processes, tmp_path)


def _find_child(pid):
  """The children of a process."""
  path = f'/proc/{pid}/task/{pid}/children'
  with open(path) as file:
    return [int(each) for each in file.read().split()]


@pytest.mark.slow
def test_a_cluster_by_addresses(processes, tmp_path):
  """Nobody shares a folder; the first one dies, others join through others."""
  flags = (
    CLUSTER,
    '--role=node',
    '--listen=127.0.0.1',
    '--config.deadlines.start=4',
    '--config.num_epochs=30',
  )
  folders = [tmp_path / str(node) for node in range(NUM_NODES)]
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
  # A number that is taken, and a stranger without the token.
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
  others = [start(node, 1) for node in range(2, NUM_NODES)]
  watch = processes.start(
    'launch.train',
    '--config=tests/launch/quick_nodes.py',
    CLUSTER,
    '--config.deadlines.start=4',
    '--config.num_epochs=30',
    '--role=watch',
    f'--workdir={tmp_path / "watch"}',
    f'--peers={_find_address(folders[1], 1)}',
    JASGD_TOKEN=token,
  )
  live.wait_until(lambda: get_steps().min() > 10, others[0])
  first = start(0, NUM_NODES - 1)
  output = watch.wait()
  assert f'nodes {NUM_NODES}' in output
  assert 'The traces are in the folders of the nodes' in output
  assert (
    json.loads((tmp_path / 'watch' / 'result.json').read_text())[
      'test/accuracy'
    ]
    > 0.8
  )
  for program in (first, second, *others):
    program.wait()
  assert not processes.find()
  # Copied together, the folders are one run.
  whole = tmp_path / 'whole'
  for folder in folders:
    shutil.copytree(folder, whole, dirs_exist_ok=True)
  assert 'Bit-identical' in _replay(processes, whole)
  trace = traces.NodeTrace.load(whole / 'trace')
  for node in range(2, NUM_NODES):
    assert trace.of_node(node)['kind'][0] == Kind.JOIN
  assert Kind.RESTART in trace.of_node(0)['kind']
  peers = trace.mixes['peer'][trace.mixes['node'] == NUM_NODES - 1]
  assert set(peers) == set(range(NUM_NODES - 1))
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


@pytest.mark.slow
@pytest.mark.parametrize('is_shared', [False, True])
def test_a_cluster_of_an_all_reduce(is_shared, processes, tmp_path):
  """One is killed, and all go on together, in one folder or in many.

  They may have more devices than one.
  """
  folders = [
    tmp_path / ('whole' if is_shared else str(node))
    for node in range(NUM_NODES)
  ]

  flags = [
    CLUSTER,
    '--config.num_epochs=8',
    '--config.deadlines.end=10',
    '--config.deadlines.silence=5',
  ]

  def start():
    devices = '--xla_force_host_platform_device_count=2'
    return _start_group(processes, folders, *flags, XLA_FLAGS=devices)

  def watch():
    return _start(
      processes, folders[0], *flags, '--role=watch', strategy='allreduce'
    )

  programs = start()
  watcher = watch() if is_shared else None
  live.wait_until(lambda: _count_steps(folders).min() > 30, programs[0])
  (pid,) = _find_child(programs[1].pid)
  os.kill(pid, signal.SIGKILL)
  outputs = [program.wait(1) for program in programs]
  assert 'exit code -9' in outputs[1]
  others = [outputs[0], *outputs[2:]]
  for output in others:
    assert re.search(
      r'At step \d+ (node 1|one of (node \d, )*node 1(, node \d)* \(.*\)) was '
      'lost, and an all-reduce cannot go on without it',
      output,
    ), output
    assert 'go on from the last checkpoint' in output
  # Whoever is the first to see it knows.
  assert any(re.search(r'At step \d+ node 1 was', output) for output in others)
  if watcher is not None:
    output = watcher.wait(1)
    assert re.search(r'Nothing was heard for 5 s from .*node 1', output), output
  assert not processes.find()
  programs = start()
  if is_shared:
    programs.append(watch())
  for program in programs:
    program.wait()
  whole = tmp_path / 'whole'
  for folder in () if is_shared else folders:
    shutil.copytree(folder, whole, dirs_exist_ok=True)
  trace = traces.NodeTrace.load(whole / 'trace')
  assert np.count_nonzero(trace.records['kind'] == Kind.RESTART) == NUM_NODES
  if is_shared:
    result = json.loads((whole / 'result.json').read_text())
    assert result['clock'] == trace.steps['step'].max() * NUM_NODES
    assert result['gossip/consensus_error'] == 0
  found = experiment.verify_nodes(whole)
  assert found.is_same, found


@pytest.mark.slow
def test_a_cluster_of_an_all_reduce_that_is_stopped_goes_on(
  processes, tmp_path
):
  """One is told to end: all do, in good order, and nobody takes it for done."""
  flags = (CLUSTER, '--config.num_epochs=8', '--config.deadlines.silence=5')
  folders = [tmp_path] * NUM_NODES

  def start():
    programs = _start_group(processes, folders, *flags)
    watch = _start(
      processes, tmp_path, *flags, '--role=watch', strategy='allreduce'
    )
    return programs, watch

  programs, watch = start()
  live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 30, watch)
  programs[1].kill(signal.SIGINT)
  for program in programs:
    said = program.wait()
    assert re.search(r'Stopped at step \d+, with all others: node 1 was', said)
  said = watch.wait(1)
  assert 'started again, they go on from the last checkpoint' in said
  assert 'was lost' not in said
  assert not (tmp_path / 'result.json').exists()
  assert not processes.find()
  programs, watch = start()
  for program in (watch, *programs):
    program.wait()
  result = json.loads((tmp_path / 'result.json').read_text())
  trace = traces.NodeTrace.load(tmp_path / 'trace')
  assert result['clock'] == len(trace.steps)  # Nothing was made twice.
  assert 'Bit-identical' in _replay(processes, tmp_path)


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


@pytest.mark.parametrize(
  ('flags', 'problem'),
  [
    pytest.param(
      ['--role=server', CLUSTER],
      'give --role=node or --role=centre or',
      marks=pytest.mark.slow,
    ),
    pytest.param(
      ['--node=1'],
      '--node is for --role=node or centre or watch',
      marks=pytest.mark.slow,
    ),
    (['--role=node', '--node=9', CLUSTER], 'have the numbers 0 to 2, got 9'),
  ],
)
def test_bad_flags_are_named_in_a_line(flags, problem, processes, tmp_path):
  output = _start(processes, tmp_path / 'work', *flags).wait(1)
  assert problem in output, output
  assert 'Traceback' not in output
  assert not (tmp_path / 'work').exists()
