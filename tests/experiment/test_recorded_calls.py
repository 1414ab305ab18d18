"""Strategies are state machines: the calls of a real run can be repeated.

Every (method, arguments, result) of processes, one of which is killed, is fed
to a fresh object, which gives equal results.
"""

import os
import signal

import numpy as np
import pytest

from jasgd import experiment
from jasgd import gossip
from jasgd import traces
from tests import live
from tests import marks
from tests.experiment import recorded
from tests.experiment import test_real_nodes as real_nodes

NUM_WORKERS = real_nodes.NUM_NODES
PEERS = {
  'Pull': {'beta': 0.3},
  'Push': {},
  'PushSum': {},
  'Elastic': {'rate': 0.2},
  'AllReduce': {'period': 2},
  'Neighbour': {},  # A user's own strategy, as is 'Every' below.
}
PROTOCOLS = {
  'Asynchronous': {},
  'Backup': {'num_backups': 1},
  'Hardsync': {},
  'Rennala': {'s': 2},
  'Ringmaster': {'r': 1},
  'Softsync': {'n': 2},
  'Ssp': {'s': 1},
  'Every': {},
}


@pytest.fixture
def calls(tmp_path, monkeypatch):
  """The folder of all calls."""
  folder = tmp_path / 'calls'
  folder.mkdir()
  monkeypatch.setenv(recorded.VARIABLE, os.fspath(folder))
  return folder


def _make_strategy(name, arguments):
  return experiment.StrategyConfig(
    name=f'tests.experiment.recorded:{name}', **arguments
  )


@pytest.mark.parametrize('name', marks.slow_but(PEERS, 'Neighbour'))
def test_fresh_nodes_repeat_a_real_run_with_a_kill(
  name, processes, calls, tmp_path
):
  num_steps, victim = 150, 2
  config = real_nodes.make_config('pull', num_steps)
  config.runtime.checkpoint_seconds = 3600.0
  config.strategy = _make_strategy(name, PEERS[name])
  plain = recorded.make_plain(name, PEERS[name])
  run = tmp_path / 'run'
  with real_nodes.start_run(config, run) as wait:
    process = f'node-{victim}'
    (pid,) = live.wait_until(lambda: processes.find_children(process))
    live.wait_until(lambda: real_nodes.count_steps(run)[victim] > 20)
    os.kill(pid, signal.SIGKILL)
    if not plain.is_collective:
      wait()
      # As if the launcher had been killed, too: a run with a result is over.
      (run / 'result.json').unlink()
    else:  # All nodes are stopped.
      with pytest.raises(experiment.RunError, match='cannot go on without it'):
        wait()
  # The same command goes on. The killed node has no checkpoint, so it joins the
  # others, which have saved their last steps.
  with real_nodes.start_run(config, run) as wait:
    wait()
  methods = {node: [] for node in range(NUM_WORKERS)}
  for node, seed, own in recorded.read_calls(calls):
    recorded.repeat(plain.make_node(node, NUM_WORKERS, seed), own)
    methods[node] += [method for method, *_ in own]
  for node, called in methods.items():
    is_whole = node != victim or plain.is_collective
    assert called.count('on_step') >= (num_steps if is_whole else 20)
    # The nodes that went on were told of the death.
    if is_whole and not plain.has_centre and not plain.is_collective:
      assert 'on_alive' in called
    if is_whole and plain.node_class.on_message != gossip.PeerNode.on_message:
      assert 'on_message' in called
    assert {'restore', 'on_restart', 'on_done', 'on_end'} <= set(called)
    assert ('on_regroup' in called) == plain.is_collective
  assert ('on_join_reply' in methods[victim]) == (not plain.is_collective)
  real_nodes.check_replay(run)


@pytest.mark.slow
@pytest.mark.parametrize('name', PROTOCOLS)
def test_a_fresh_protocol_repeats_a_real_run_with_kills(
  name, processes, calls, tmp_path
):
  """A learner is killed, and then the server, which comes back."""
  num_updates, victim = 120, 2
  config = live.make_config(
    num_workers=NUM_WORKERS,
    num_updates=num_updates,
    strategy=_make_strategy(name, PROTOCOLS[name]),
    runtime={'checkpoint_seconds': 0.05},
    # The server may go back to a time before the learner left, and wait for it.
    deadlines={'rejoin': 3.0},
  )
  run = tmp_path / 'run'
  with live.start_run(config, run, processes) as (view, result):
    live.wait_until(lambda: view.get_clock() > 10)
    (pid,) = processes.find_children(f'learner-{victim}')
    os.kill(pid, signal.SIGKILL)
    live.wait_until(
      lambda: np.any(view.load_trace().records['kind'] == traces.Kind.LEAVE)
    )
    (pid,) = processes.find_children('server')
    os.kill(pid, signal.SIGKILL)
    result.result(live.PATIENCE)
  assert view.check_replay() == num_updates
  methods = []
  for _, _, own in recorded.read_calls(calls):
    recorded.repeat(recorded.make_plain(name, PROTOCOLS[name]), own)
    called = [method for method, *_ in own]
    if 'save' in called:  # Other objects are of the launcher.
      methods.append(called)
  first, second = sorted(methods, key=lambda each: 'start' not in each)
  assert first.count('on_push') > 10
  assert 'on_leave' in first
  assert second[0] == 'restore'
  assert 'on_push' in second
