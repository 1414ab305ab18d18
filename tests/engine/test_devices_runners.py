"""Training on devices, on a mesh and over processes: the same as under vmap.

As a program, it trains and saves what came out:

  python -m tests.engine.test_devices_runners FILE  # On 8 devices.
  python -m tests.engine.test_devices_runners FILE ADDRESS PROCESS  # 1 of 2.
"""

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from jasgd import engine
from tests.engine import test_devices

# Computed once; it takes a minute to compile.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group('devices_runners')]

ROOT = pathlib.Path(__file__).parent.parent.parent
PATIENCE = 360.0  # Seconds: never reached, unless something is broken.
NUM_STEPS = 6
NUM_NODES = 8
RUNNERS = ('vmap', 'pmap', 'shard_map')
OPTIMIZERS = {'momentum': optax.sgd(0.05, 0.9), 'adam': optax.adam(0.02)}


def main(path, address=None, process=None):
  found = {}
  if address is None:
    jax.config.update('jax_num_cpu_devices', NUM_NODES)
    for runner in RUNNERS:
      found |= train_all(runner, f'{runner}|')
  else:
    jax.config.update('jax_num_cpu_devices', 4)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(
      address, 2, int(process), initialization_timeout=60
    )
    found |= train_all('shard_map', '')
    jax.distributed.shutdown()
  np.savez(path, **found)


def train_all(runner, prefix):
  """Every strategy, with an optimizer of its own."""
  found = {}
  for index, (name, strategy) in enumerate(test_devices.STRATEGIES.items()):
    optimizer = list(OPTIMIZERS.values())[index % 2]
    program = engine.make_device_program(
      test_devices.make_network_task(),
      optimizer,
      strategy,
      num_nodes=NUM_NODES,
      runner=runner,
      seed=test_devices.SEED,
      get_rate=lambda epochs: 1 / (1 + epochs),
    )
    state = program.init()
    for step in range(NUM_STEPS):
      if step == 3:  # Saved and restored on the way.
        state = program.place(program.fetch(state), state.step)
      state, losses = program.step(state)
      shards = jax.device_get(
        [shard.data for shard in losses.addressable_shards]
      )
      local = np.concatenate([np.ravel(shard) for shard in shards])
      found[f'{prefix}{name}|local|loss{step}'] = local
    arrays = program.fetch(state)
    for label, tree in (
      ('local', (arrays.node.params, arrays.node.stats, arrays.mass)),
      ('all', program.mean(state)),
      ('all', {'consensus': program.consensus(state)}),
      ('all', program.centre(state) if arrays.centre else {}),
    ):
      for place, leaf in jax.tree.leaves_with_path(tree):
        key = (
          f'{prefix}{name}|{label}|{len(found)}{jax.tree_util.keystr(place)}'
        )
        found[key] = np.asarray(leaf)
    found[f'{prefix}{name}|local|nodes'] = np.asarray(program.local_nodes)
  return found


def _run(*arguments):
  """Runs this module with each of the lists of arguments, all at once."""
  programs = [
    subprocess.Popen(
      [sys.executable, '-m', 'tests.engine.test_devices_runners', *each],
      cwd=ROOT,
      env={**os.environ, 'NPROC': '1'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for each in arguments
  ]
  try:
    for program in programs:
      output, _ = program.communicate(timeout=PATIENCE)
      assert program.returncode == 0, output[-3000:]
  finally:
    for program in programs:
      program.kill()
      program.wait()


def _split(found):
  """By strategy: whether it is a node's own, and what was found, in order."""
  split = {}
  for key, value in found.items():
    name, label, rest = key.rsplit('|', 2)
    split.setdefault(name, []).append((label, rest, value))
  return split


@pytest.fixture(scope='module')
def found(tmp_path_factory):
  """What all runners came to in one process with 8 devices."""
  path = tmp_path_factory.mktemp('devices') / 'found.npz'
  _run([path])
  with np.load(path) as file:
    return _split(dict(file))


@pytest.fixture(scope='module')
def found_by_two(tmp_path_factory):
  """What each of two processes with 4 devices came to."""
  folder = tmp_path_factory.mktemp('devices')
  with socket.socket() as listener:  # A port that is free.
    listener.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{listener.getsockname()[1]}'
  paths = [folder / f'{process}.npz' for process in range(2)]
  _run(*([path, address, str(process)] for process, path in enumerate(paths)))
  return [_split(dict(np.load(path))) for path in paths]


@pytest.mark.parametrize('name', test_devices.STRATEGIES)
@pytest.mark.parametrize('runner', RUNNERS[1:])
def test_runners_agree(found, name, runner):
  expected, given = found[f'vmap|{name}'], found[f'{runner}|{name}']
  assert len(given) == len(expected) > 10
  for (_, _, one), (_, _, other) in zip(expected, given, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('name', test_devices.STRATEGIES)
def test_two_processes_agree(found, found_by_two, name):
  expected = found[f'vmap|{name}']
  first, second = (each[name] for each in found_by_two)
  assert len(first) == len(second) == len(expected)
  for one, other, (label, _, value) in zip(
    first, second, expected, strict=True
  ):
    if label == 'local':  # Each has its own part.
      joined = np.concatenate([one[2], other[2]])
      np.testing.assert_allclose(joined, value, rtol=1e-3, atol=1e-4)
    else:
      np.testing.assert_array_equal(one[2], other[2])
      np.testing.assert_allclose(one[2], value, rtol=1e-3, atol=1e-4)


if __name__ == '__main__':
  main(*sys.argv[1:])
