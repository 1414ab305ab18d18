"""The compiled program of a delay: in place, whatever the delay."""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import jasgd
from tests import marks

SHAPE = (20, 50)
NUM_LATE = 16
LEAF_BYTES = 4 * SHAPE[0] * SHAPE[1]
RING_BYTES = (NUM_LATE + 1) * LEAF_BYTES


def _late_then_overwrite(num_late):
  """A ring of d slots, read before it is overwritten: the costly way."""

  def init_fn(params):
    return jnp.int32(0), jnp.zeros((num_late, *params.shape))

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    count, ring = state
    late = ring[count % num_late]
    return late, (count + 1, ring.at[count % num_late].set(updates))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _compile(optimizer, num_steps=None, dtype=jnp.float32):
  """A donated step, or a donated scan of `num_steps`, compiled."""

  def step(params, state, inputs):
    gradients = jax.grad(lambda p: jnp.sum(jnp.square(inputs @ p)))(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  def scan(params, state, inputs):
    return jax.lax.scan(
      lambda carry, _: (step(*carry, inputs), None),
      (params, state),
      length=num_steps,
    )[0]

  params = jnp.ones(SHAPE, dtype)
  program = jax.jit(step if num_steps is None else scan, donate_argnums=(0, 1))
  return program.lower(
    params, optimizer.init(params), jnp.ones((4, SHAPE[0]), dtype)
  ).compile()


def _num_ring_copies(compiled):
  """Passes over anything as large as the ring; it has d or d + 1 slots."""
  slots = f'({NUM_LATE}|{NUM_LATE + 1})'
  shape = rf'\w+\[{slots},{SHAPE[0]},{SHAPE[1]}\]'
  passes = rf'= {shape}\S* (copy|convert|select|add|multiply)\('
  return len(re.findall(passes, compiled.as_text()))


OPTIMIZERS = {
  'delay': optax.chain(jasgd.delay(NUM_LATE), optax.sgd(0.01, momentum=0.9)),
  'delay, traced': optax.chain(
    jasgd.delay(jnp.asarray(3), max_delay=NUM_LATE), optax.sgd(0.01)
  ),
  'delay, varying': optax.chain(
    jasgd.delay(lambda count: count % 7, max_delay=NUM_LATE), optax.sgd(0.01)
  ),
  'delayed sgd': jasgd.delayed(optax.sgd(0.01, momentum=0.9), NUM_LATE),
  'delayed adam': jasgd.delayed(optax.adam(0.01), NUM_LATE),
  'delayed, keep_params': jasgd.delayed(
    optax.chain(jasgd.gap_aware(0.01), optax.sgd(0.01)),
    NUM_LATE,
    keep_params=True,
  ),
  'delayed softsync': jasgd.delayed(
    jasgd.softsync(optax.sgd(0.01), 2), NUM_LATE
  ),
  'apply_if_finite': optax.apply_if_finite(
    jasgd.delayed(optax.sgd(0.01), NUM_LATE), 3
  ),
}
every_way = pytest.mark.parametrize('num_steps', [None, 100])


@every_way
@pytest.mark.parametrize(
  'dtype',
  marks.slow_but([jnp.float32, jnp.bfloat16, jnp.float16], jnp.bfloat16),
)
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_ring_is_never_copied(name, dtype, num_steps):
  compiled = _compile(OPTIMIZERS[name], num_steps, dtype)
  assert _num_ring_copies(compiled) == 0
  memory = compiled.memory_analysis()
  # The gradient and the updates, say; not the ring.
  assert memory.temp_size_in_bytes < 6 * LEAF_BYTES


@every_way
def test_this_test_can_fail(num_steps):
  compiled = _compile(_late_then_overwrite(NUM_LATE), num_steps)
  assert _num_ring_copies(compiled) > 0
  assert compiled.memory_analysis().temp_size_in_bytes >= NUM_LATE * LEAF_BYTES


@pytest.mark.parametrize('num_late', [0, 1, 16, 256])
def test_memory_is_one_slot_more_than_the_delay(num_late):
  num_bytes = functools.partial(
    jax.tree.reduce, lambda total, leaf: total + leaf.nbytes, initializer=0
  )
  params = jnp.ones(SHAPE)
  num_slots = num_late + 1 if num_late else 0
  line = jasgd.delay(num_late).init(params)
  assert num_bytes(line.ring) == num_slots * LEAF_BYTES
  # The clocks at which the waiting gradients were computed come along.
  plain = optax.adam(0.1)
  wrapped = jasgd.delayed(plain, num_late).init(params)
  extra = num_bytes(wrapped) - num_bytes(plain.init(params))
  assert num_slots * LEAF_BYTES <= extra <= num_slots * (LEAF_BYTES + 4) + 100
