"""Nodes that step and then mix with peers, against plain numpy."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import gossip
from tests.engine import device_cases

pytestmark = pytest.mark.usefixtures('quick_compiler')


def test_gossip_steps_and_then_mixes():
  task, topology = (
    device_cases.make_quadratic(),
    gossip.topologies.one_peer_exponential(device_cases.NUM_NODES),
  )
  program = device_cases.make_program(
    task, device_cases.SGD, gossip.Pull(peers=topology, period=2)
  )
  x = device_cases.make_start(task)[None].repeat(device_cases.NUM_NODES, 0)
  for step in range(8):
    x = x - 0.1 * device_cases.get_gradients(task, x, step)
    if step % 2:
      x = topology.pull(x, step // 2).astype(np.float32)
  state, _ = device_cases.run(program, 8)
  np.testing.assert_allclose(
    device_cases.get_params(program, state), x, atol=1e-6
  )
  distance = np.sqrt(
    np.square(x - x.mean(axis=0)).sum() / device_cases.NUM_NODES
  )
  assert program.consensus(state) == pytest.approx(distance, rel=1e-4)


def test_push_sum_takes_gradients_at_the_quotient():
  task = device_cases.make_quadratic()
  topology = gossip.topologies.with_uniform_weights(
    gossip.topologies.star(device_cases.NUM_NODES)
  )
  program = device_cases.make_program(
    task, device_cases.SGD, gossip.PushSum(peers=topology)
  )
  x, w = (
    device_cases.make_start(task)[None].repeat(device_cases.NUM_NODES, 0),
    np.ones(device_cases.NUM_NODES),
  )
  for step in range(8):
    z = (x / w[:, None]).astype(np.float32)
    x = x - 0.1 * device_cases.get_gradients(task, z, step)
    x, w = topology.push(x, 0), topology.push(w, 0)
  state, _ = device_cases.run(program, 8)
  arrays = program.fetch(state)
  np.testing.assert_allclose(arrays.node.params, x, atol=1e-5)
  np.testing.assert_allclose(arrays.mass, w, atol=1e-6)
  assert np.ptp(w) > 1
  mean, _ = program.mean(state)
  np.testing.assert_allclose(
    mean, x.sum(axis=0) / device_cases.NUM_NODES, atol=1e-5
  )
  z = x / w[:, None]
  distance = np.sqrt(
    np.square(z - z.mean(axis=0)).sum() / device_cases.NUM_NODES
  )
  assert program.consensus(state) == pytest.approx(distance, rel=1e-4)


@pytest.mark.parametrize(
  'link',
  [
    jasgd.delay_compensation(0.5),
    pytest.param(optax.add_decayed_weights(0.5), marks=pytest.mark.slow),
    pytest.param(optax.scale_by_trust_ratio(), marks=pytest.mark.slow),
  ],
  ids=['DC-ASGD', 'decay', 'trust ratio'],
)
def test_push_sum_passes_the_quotient_to_the_optimizer(link):
  """The quotient is the weights; a node stores them times its mass."""
  task = device_cases.make_quadratic()
  topology = gossip.topologies.with_uniform_weights(
    gossip.topologies.star(device_cases.NUM_NODES)
  )
  program = device_cases.make_program(
    task, optax.chain(link, device_cases.SGD), gossip.PushSum(peers=topology)
  )
  x, w = device_cases.make_starts(task), np.ones(device_cases.NUM_NODES)
  for step in range(5):
    z = (x / w[:, None]).astype(np.float32)
    grads = device_cases.get_gradients(task, z, step)
    updates = [
      _apply(link, grad, own) for grad, own in zip(grads, z, strict=True)
    ]
    x = topology.push(x - 0.1 * np.stack(updates), 0)
    w = topology.push(w, 0)
  state, _ = device_cases.run(program, 5)
  np.testing.assert_allclose(
    device_cases.get_params(program, state), x, atol=1e-4
  )


def _apply(link, grad, params):
  """A transformation of a stale gradient, applied to a fresh one."""
  link = optax.with_extra_args_support(link)
  grad, params = jnp.asarray(grad), jnp.asarray(params)
  updates, _ = link.update(
    grad, link.init(params), params, stale_params=params, staleness=0
  )
  return np.asarray(updates)


def test_random_peers_depend_on_the_seed_alone():
  """Without noise, only the peers are random."""
  task = device_cases.make_quadratic(noise=0.0)
  start = device_cases.make_starts(task).astype(np.float32)
  start += np.arange(device_cases.NUM_NODES, dtype=np.float32)[:, None]
  found = []
  for seed in (1, 1, 2):
    program = device_cases.make_program(
      task, device_cases.SGD, gossip.Pull(), seed=seed
    )
    arrays = program.fetch(program.init())
    node = arrays.node._replace(params=start)
    state = program.place(arrays._replace(node=node), 0)
    for _ in range(3):
      state, _ = program.step(state)
    found.append(device_cases.get_params(program, state))
  np.testing.assert_array_equal(found[0], found[1])
  assert np.abs(found[0] - found[2]).max() > 0.1


def test_messages_may_be_rounded():
  ring = gossip.Pull(peers=gossip.topologies.ring(device_cases.NUM_NODES))
  exact, rounded = (
    device_cases.make_program(
      device_cases.make_quadratic(), device_cases.SGD, ring, dtype=dtype
    )
    for dtype in (None, jnp.bfloat16)
  )
  a, b = (
    device_cases.get_params(program, device_cases.run(program, 5)[0])
    for program in (exact, rounded)
  )
  assert 1e-5 < np.abs(a - b).max() < 0.05
  assert a.dtype == b.dtype == np.float32
