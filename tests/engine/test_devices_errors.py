"""Error messages of training on devices."""

import dataclasses

import jax
import numpy as np
import pytest

from jasgd import gossip
from tests.engine import device_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'runner': 'map'}, "Unknown runner 'map'. Known: pmap, shard_map, vmap"),
    ({'num_nodes': 0}, 'num_nodes must be a whole number of at least 1'),
    (
      {'runner': 'pmap', 'num_nodes': 1000},
      '1000 nodes need a device each, and there are .*device_count=1000',
    ),
    ({'runner': 'shard_map', 'num_nodes': 1000}, '1000 nodes need a device'),
    (
      {'strategy': gossip.Pull(peers=gossip.topologies.ring(4))},
      'The topology has 4 nodes, but there are 6',
    ),
    (
      {'strategy': gossip.Elastic(), 'dtype': 'bfloat16'},
      'sends weights as they are, got dtype=bfloat16',
    ),
    (
      {'strategy': gossip.Pairs()},
      "Pairs need peers='matching' or a symmetric .*, got 'independent'",
    ),
    ({'strategy': 'pull'}, r"such as jasgd.gossip.Pull\(\), got 'pull'"),
    ({'seed': 2**31}, 'seed must be from 0 to 2.31 - 1, got 2147483648'),
  ],
)
def test_errors_say_what_was_given(arguments, message):
  arguments = {
    'task': device_cases.make_quadratic(),
    'optimizer': device_cases.SGD,
    'strategy': gossip.Pull(),
  } | arguments
  with pytest.raises(ValueError, match=message):
    device_cases.make_program(**arguments)


def test_a_mesh_must_fit():
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ('x',))
  arguments = (device_cases.make_quadratic(), device_cases.SGD, gossip.Pull())
  with pytest.raises(ValueError, match="A mesh is for runner='shard_map', got"):
    device_cases.make_program(*arguments, mesh=mesh)
  message = r"one axis, of num_nodes=6 devices, got \{'x': 1\}"
  with pytest.raises(ValueError, match=message):
    device_cases.make_program(*arguments, mesh=mesh, runner='shard_map')
  program = device_cases.make_program(
    *arguments, mesh=mesh, runner='shard_map', num_nodes=1
  )
  _, losses = device_cases.run(program, 2)
  assert losses.shape == (2, 1)


def test_streamed_tasks_have_no_data_for_devices():
  streamed = dataclasses.replace(
    device_cases.make_quadratic(), is_streamed=True, data=None
  )
  with pytest.raises(ValueError, match="The task 'quadratic' is streamed"):
    device_cases.make_program(streamed, device_cases.SGD, gossip.Pull())
