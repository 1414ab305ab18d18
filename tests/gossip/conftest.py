"""Results of programs on many devices, shared by tests."""

import numpy as np
import pytest


@pytest.fixture(scope='session')
def found_few(tmp_path_factory):
  """Results of a few cases under pmap and shard_map, by name."""
  from tests.gossip import many_devices

  folder = tmp_path_factory.mktemp('mix')
  return many_devices.run('tests.gossip.mix_devices', folder, 'few')


@pytest.fixture(scope='session')
def found(tmp_path_factory):
  """Results of all cases under all runners on 8 devices, by name."""
  from tests.gossip import many_devices

  folder = tmp_path_factory.mktemp('mix')
  return many_devices.run('tests.gossip.mix_devices', folder)


@pytest.fixture(scope='session')
def found_by_two(tmp_path_factory):
  """Results of two processes with 4 devices each, joined, by name."""
  from tests.gossip import many_devices

  folder = tmp_path_factory.mktemp('mix')
  first, second = many_devices.run_two('tests.gossip.mix_devices', folder)
  assert first.keys() == second.keys()
  return {name: np.concatenate([first[name], second[name]]) for name in first}
