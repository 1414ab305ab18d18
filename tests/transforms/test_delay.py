r"""`delay` and `delayed`: values, stability and compiled programs.

The values are compared with those of a plain queue. The stability on a
quadratic is compared with the exact bound: on f(x) = a x^2 / 2 a delay of d
makes x_{t+1} = x_t - r a x_{t-d}, with the characteristic equation
z^{d+1} - z^d + r a = 0. A root crosses the unit circle at z = e^{i w} with
w = pi / (2 d + 1), where r a = 2 sin(w / 2). With momentum m and d = 1 the
equation is z^3 - (1 + m) z^2 + m z + r a = 0, whose roots (by Jury's criterion)
are all inside exactly for r a < 1 - m.
"""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from tests import trees

OPTIMIZERS = {
  'nesterov': optax.sgd(0.02, momentum=0.9, nesterov=True),
  'adamw': optax.adamw(0.05, weight_decay=0.1),
}
PARAMS = {'w': np.array([[1.0, -2.0], [0.5, 3.0]]), 'b': np.array([0.1])}


def _gradient(params, step):
  """Gradient of a quadratic whose curvature and centre change."""
  return jax.tree.map(
    lambda leaf: (1 + 0.5 * jnp.sin(step)) * leaf + 0.1 * jnp.cos(2.0 * step),
    params,
  )


def _run(optimizer, num_steps):
  """Yields (params, state) after each step of an ordinary training loop."""

  @jax.jit
  def train(params, state, step):
    updates, state = optimizer.update(_gradient(params, step), state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.asarray, PARAMS)
  state = optimizer.init(params)
  for step in range(num_steps):
    params, state = train(params, state, step)
    yield params, state


def _run_with_queue(optimizer, num_late, num_steps):
  """The same loop, with a queue of gradients in front of the optimizer."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = optimizer.init(params)
  queue = collections.deque()
  for step in range(num_steps):
    queue.append(_gradient(params, step))
    if len(queue) > num_late:
      updates, state = optimizer.update(queue.popleft(), state, params)
      params = optax.apply_updates(params, updates)
    yield params, state


@pytest.mark.parametrize('num_late', [1, 4])
@pytest.mark.parametrize('name', OPTIMIZERS)
@jax.disable_jit()  # `test_common.py` compares eager with compiled runs.
def test_delayed_equals_a_queue_step_for_step(name, num_late):
  optimizer = OPTIMIZERS[name]
  num_steps = 2 * num_late + 3  # The ring has been filled twice.
  with jax.enable_x64(True):  # So that rounding cannot hide a mistake.
    for (params, state), expected in zip(
      _run(jasgd.delayed(optimizer, num_late), num_steps),
      _run_with_queue(optimizer, num_late, num_steps),
      strict=True,
    ):
      trees.assert_close(
        (params, state.optimizer_state), expected, rtol=1e-11, atol=1e-12
      )


@pytest.mark.parametrize('num_late', [0, 3])
def test_a_traced_delay_is_the_same(num_late):
  fixed = jasgd.delayed(optax.adam(0.05), num_late)
  traced = jasgd.delayed(optax.adam(0.05), jnp.asarray(num_late), max_delay=5)
  for (params, _), (expected, _) in zip(
    _run(traced, 12), _run(fixed, 12), strict=True
  ):
    trees.assert_close(params, expected)


def test_no_delay_is_bit_identical_to_no_transform():
  gradients = {'w': jnp.array([0.0, -0.0, jnp.nan, 1e-40]), 'b': jnp.pi}
  line = jasgd.delay(0)
  updates, _ = jax.jit(line.update)(gradients, line.init(gradients))
  trees.assert_same_bits(updates, jax.jit(lambda tree: tree)(gradients))
  for optimizer in OPTIMIZERS.values():
    for (params, state), (expected, (_, expected_state)) in zip(
      _run(optimizer, 5),
      _run(optax.chain(jasgd.delay(0), optimizer), 5),
      strict=True,
    ):
      trees.assert_same_bits(params, expected)
      trees.assert_same_bits(state, expected_state)


def test_the_optimizer_waits_for_the_first_gradient():
  optimizer = jasgd.delayed(optax.adamw(0.1, weight_decay=0.1), 3)
  params = jax.tree.map(jnp.asarray, PARAMS)
  start = params, optimizer.init(params).optimizer_state
  for step, (params, state) in enumerate(_run(optimizer, 6)):
    if step < 3:
      trees.assert_same_bits((params, state.optimizer_state), start)
    assert optax.tree.get(state, 'num_applied') == max(0, step - 2)
    assert state.optimizer_state[0].count == max(0, step - 2)


@jax.disable_jit()
def test_the_optimizer_is_told_the_staleness():
  """It is min(updates so far, d); the caller's value is ignored."""

  def update_fn(updates, state, params=None, *, staleness, **extra_args):
    del state, params
    assert extra_args == {'value': 7, 'stale_params': None}
    return updates, staleness

  spy = optax.GradientTransformationExtraArgs(
    lambda _: jnp.int32(-1), update_fn
  )
  optimizer = jasgd.delayed(spy, 3)
  gradient = jnp.ones(())
  state = optimizer.init(gradient)
  seen = []
  for _ in range(8):
    _, state = optimizer.update(
      gradient, state, gradient, staleness=99, read_clock=99, value=7
    )
    seen.append(int(state.optimizer_state))
  assert seen == [-1, -1, -1, 0, 1, 2, 3, 3]


@jax.disable_jit()
def test_keep_params_gives_the_params_of_the_gradient():
  """With the gradient -1/x of -log x, compensation by 1 is a Taylor step."""
  optimizer = jasgd.delayed(
    optax.chain(jasgd.delay_compensation(1.0), optax.sgd(0.1)),
    2,
    keep_params=True,
  )
  x = jnp.array(1.0)
  state, xs = optimizer.init(x), [1.0]
  for _ in range(8):
    updates, state = optimizer.update(-1 / x, state, x)
    x = optax.apply_updates(x, updates)
    xs.append(float(x))
  for t in range(2, 8):
    old, now = xs[t - 2], xs[t]
    gradient = -1 / old + (now - old) / old**2
    np.testing.assert_allclose(xs[t + 1], now - 0.1 * gradient, rtol=1e-6)
  with pytest.raises(ValueError, match='needs the current weights'):
    optimizer.update(x, state)


def test_a_varying_delay_is_a_lookup():
  delays = jnp.array([0, 1, 1, 3, 0, 2, 4])  # 4 is clipped to 3.
  line = jasgd.delay(lambda count: delays[count], max_delay=3)
  state = line.init(jnp.zeros(()))
  seen = []
  for step in range(7):
    late, state = jax.jit(line.update)(jnp.asarray(step + 10.0), state)
    seen.append(float(late))
  assert seen == [10, 10, 11, 10, 14, 13, 13]


def test_a_delay_drawn_before_anything_arrived_gives_zeros():
  line = jasgd.delay(lambda count: 2, max_delay=5)
  state = line.init(jnp.zeros(()))
  seen = []
  for step in range(20):
    late, state = line.update(jnp.asarray(step + 1.0), state)
    seen.append(float(late))
  assert seen == [0, 0, *range(1, 19)]


def test_the_ring_outlives_the_counter():
  line = jasgd.delay(2)
  state = line.init(jnp.zeros(()))
  largest = jnp.iinfo(jnp.int32).max
  state = state._replace(num_received=jnp.asarray(largest - 1, jnp.int32))
  seen = []
  for step in range(6):
    late, state = line.update(jnp.asarray(step + 1.0), state)
    seen.append(float(late))
  assert seen == [0, 0, 1, 2, 3, 4]
  assert state.num_received == largest


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((-1,), 'num_updates must be an int of at least 0, got -1'),
    ((5, 3), 'num_updates must be from 0 to max_delay=3, got 5'),
    ((jnp.asarray(2),), 'needs max_delay'),
    ((lambda count: 2,), 'needs max_delay'),
    ((jnp.asarray(-2), 3), 'must be from 0 to max_delay=3, got -2'),
    ((jnp.asarray(9), 3), 'must be from 0 to max_delay=3, got 9'),
    ((jnp.asarray([1, 2]), 3), 'an integer scalar'),
    ((1.5, 3), 'an int, an integer scalar or a function'),
    ((1, 2.5), 'max_delay must be an int of at least 0, got 2.5'),
    ((0, -1), 'max_delay must be an int of at least 0, got -1'),
    (('3', 4), "num_updates must be an int.* got '3'"),
    ((True, 4), 'num_updates must be an int'),
  ],
)
def test_impossible_delays(arguments, message):
  with pytest.raises(ValueError, match=message):
    jasgd.delay(*arguments)
  with pytest.raises(ValueError, match=message):
    jasgd.delayed(optax.sgd(0.1), *arguments)


def test_bfloat16_survives_the_ring_bit_by_bit():
  values = jnp.array([1.0, -0.0, 3e38, 1e-40, jnp.inf, jnp.nan], jnp.bfloat16)
  line = jasgd.delay(1)
  _, state = line.update(values, line.init(values))
  late, _ = line.update(jnp.zeros_like(values), state)
  trees.assert_same_bits(late, values)


def test_integers_of_16_bits_are_not_taken_for_bfloat16():
  values = jnp.array([1, 65535], jnp.uint16)
  line = jasgd.delay(1)
  _, state = line.update(values, line.init(values))
  late, _ = line.update(jnp.zeros_like(values), state)
  trees.assert_same_bits(late, values)


@pytest.mark.parametrize(
  'wrap',
  [
    lambda optimizer: jasgd.delayed(optimizer, 0),
    lambda optimizer: jasgd.delayed(optimizer, 2),
    lambda optimizer: jasgd.softsync(optimizer, 1),
    lambda optimizer: jasgd.softsync(optimizer, 2),
  ],
)
def test_any_state_can_be_wrapped(wrap):
  """Random keys; and a momentum that would drift from bfloat16 to float32."""
  optimizer = wrap(
    optax.chain(
      optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1, momentum=0.9)
    )
  )
  params = jnp.ones(3, jnp.bfloat16)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  for _ in range(4):
    updates, new_state = update(
      params.astype(jnp.float32), state, params, staleness=0
    )
    trees.assert_same_types(new_state, state)
    state = new_state
  assert jnp.all(jnp.isfinite(updates))


@pytest.mark.parametrize(
  'build',
  [
    lambda: jasgd.delayed('sgd', 2),
    lambda: jasgd.softsync(0.1, 2),
    lambda: jasgd.staleness_aware(None),
  ],
)
def test_an_optimizer_must_be_a_transformation(build):
  with pytest.raises(ValueError, match='must be an optax'):
    build()


def test_a_delay_that_is_drawn_must_be_whole():
  line = jasgd.delay(lambda count: 2.7, max_delay=4)
  with pytest.raises(ValueError, match=r'num_updates must be an int.* 2\.7'):
    line.update(jnp.ones(()), line.init(jnp.ones(())))


# --- Stability.

NUM_STEPS = 100_000
CURVATURE = 3.0


@functools.partial(jax.jit, static_argnames=('num_late', 'momentum'))
def _final_size(rate, num_late, momentum=None):
  """The largest |x| in the last 5% of a run that starts at x = 1."""
  optimizer = jasgd.delayed(optax.sgd(rate, momentum=momentum), num_late)

  def step(carry, _):
    x, state = carry
    updates, state = optimizer.update(CURVATURE * x, state, x)
    x = optax.apply_updates(x, updates)
    return (x, state), jnp.abs(x)

  x = jnp.array(1.0)
  _, sizes = jax.lax.scan(step, (x, optimizer.init(x)), length=NUM_STEPS)
  # In float32 the difference of two infinities is NaN.
  return jnp.max(jnp.nan_to_num(sizes[-NUM_STEPS // 20 :], nan=jnp.inf))


def _assert_bound(bound, **arguments):
  below, above = (
    float(_final_size(factor * bound / CURVATURE, **arguments))
    for factor in (0.99, 1.01)
  )
  assert below < 0.1, f'1% below the bound {bound} it ended at {below}'
  assert above > 10, f'1% above the bound {bound} it ended at {above}'


@pytest.mark.parametrize('num_late', [0, 1, 16])
def test_stability_of_a_delay(num_late):
  bound = 2 * math.sin(math.pi / (2 * (2 * num_late + 1)))
  _assert_bound(bound, num_late=num_late)


@pytest.mark.parametrize('momentum', [0.5, 0.9])
def test_stability_of_a_delay_of_one_with_momentum(momentum):
  _assert_bound(1 - momentum, num_late=1, momentum=momentum)


# --- The compiled program: in place, whatever the delay.

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


COMPILED = {
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


def _list_compiled():
  """(name, dtype, number of steps): bfloat16 in a scan of each, and few others.

  The rings of bfloat16 are kept as integers, those of other dtypes as they are.
  """
  for name in COMPILED:
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float16):
      for num_steps in (100,) if dtype == jnp.float16 else (100, None):
        is_fast = dtype == jnp.bfloat16 and (
          num_steps is not None or name == 'delayed adam'
        )
        yield pytest.param(
          *(name, dtype, num_steps),
          id=f'{name}, {jnp.dtype(dtype)}, {num_steps}',
          marks=[] if is_fast else [pytest.mark.slow],
        )


@pytest.mark.parametrize(('name', 'dtype', 'num_steps'), list(_list_compiled()))
def test_the_ring_is_never_copied(name, dtype, num_steps):
  compiled = _compile(COMPILED[name], num_steps, dtype)
  assert _num_ring_copies(compiled) == 0
  memory = compiled.memory_analysis()
  # For instance the gradient and the updates, but not the ring.
  assert memory.temp_size_in_bytes < 6 * LEAF_BYTES


@pytest.mark.parametrize('num_steps', [None, 100])
def test_a_copy_of_the_ring_would_be_found(num_steps):
  compiled = _compile(_late_then_overwrite(NUM_LATE), num_steps)
  assert _num_ring_copies(compiled) > 0
  assert compiled.memory_analysis().temp_size_in_bytes >= NUM_LATE * LEAF_BYTES


@pytest.mark.parametrize('num_late', [0, 1, 16])
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
