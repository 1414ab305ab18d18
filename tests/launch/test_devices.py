"""Nodes on the devices of one host, by the command line: one on each device."""

import json
import signal

import pytest

import jasgd
from jasgd import workdir as workdirs
from tests import live
from tests import trees
from tests.launch import quick

FOUR = {'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'NPROC': '1'}


def _start(processes, workdir, *flags):
  return processes.start(
    'launch.train',
    '--config=configs/gossip_digits.py:devices',
    f'--workdir={workdir}',
    '--config.num_epochs=3',
    '--config.runtime.checkpoint_seconds=0',
    *flags,
    **FOUR,
  )


def test_each_node_has_a_device(processes, tmp_path):
  """The smallest run, under pmap, to its end."""
  said = processes.start(
    'launch.train',
    '--config=tests/launch/quick.py:pull',
    f'--workdir={tmp_path}',
    '--config.runtime.mode=devices',
    **FOUR,
  ).wait()
  assert 'on a device each (pmap), of 4 here.' in said
  assert not processes.find()
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['clock'] == 60 * quick.NUM_NODES
  assert result['metrics']['test/accuracy'] > 0.5  # Untrained: about 0.1.
  assert (tmp_path / 'report.html').exists()


@pytest.mark.slow
def test_four_devices_are_used_and_a_killed_run_goes_on(processes, tmp_path):
  """The default is pmap if there are enough devices."""
  calm, killed = tmp_path / 'calm', tmp_path / 'killed'
  said = _start(processes, calm).wait()
  assert 'on a device each (pmap), of 4 here.' in said
  program = _start(processes, killed)
  live.wait_until(lambda: workdirs.list_checkpoints(killed), program)
  program.kill(signal.SIGKILL)
  program.wait(-signal.SIGKILL)
  assert not (killed / 'result.json').exists()
  _start(processes, killed).wait()
  results = [
    json.loads((folder / 'result.json').read_text())
    for folder in (calm, killed)
  ]
  assert results[0] == results[1]
  assert results[0]['metrics']['test/accuracy'] > 0.8
  trees.assert_same_bits(jasgd.load_params(calm), jasgd.load_params(killed))
  assert (calm / 'report.html').exists()
