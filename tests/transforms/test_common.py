"""What every transformation must do, run over every one of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from tests import trees
from tests.transforms import cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

every_case = pytest.mark.parametrize(
  'case',
  [
    # One worker process runs all tests of a case, and compiles its run once.
    pytest.param(case, id=name, marks=pytest.mark.xdist_group(name))
    for name, case in cases.CASES.items()
  ],
)
PARAMS = cases.make_params()


@every_case
def test_eager_jit_and_scan_agree(case):
  transform = case.default
  params = PARAMS
  step = functools.partial(cases.take_step, transform)
  eager = compiled = (params, transform.init(params))
  jitted = jax.jit(step)
  for i in range(cases.NUM_STEPS):
    eager, _ = step(eager, i)
    compiled, _ = jitted(compiled, i)
  scanned, _ = cases.run(transform, params)
  trees.assert_close(compiled, eager)
  trees.assert_close(scanned, eager)


@every_case
def test_a_second_call_does_not_trace_again(case):
  transform = case.default
  num_traces = 0

  @jax.jit
  def step(params, state, staleness):
    nonlocal num_traces
    num_traces += 1
    updates, state = transform.update(
      params, state, params, staleness=staleness, stale_params=params
    )
    return optax.apply_updates(params, updates), state

  params = PARAMS
  state = transform.init(params)
  for staleness in (0, 3, 5):
    params, state = step(params, state, staleness)
  assert num_traces == 1


@every_case
@pytest.mark.parametrize(
  'make_params',
  [
    pytest.param(functools.partial(cases.make_params, jnp.float32), id='f32'),
    pytest.param(functools.partial(cases.make_params, jnp.bfloat16), id='bf16'),
    pytest.param(cases.make_mixed_params, id='mixed'),
  ],
)
def test_types_do_not_change(case, make_params):
  params = make_params()
  gradients = cases.make_gradients(params, 0)
  state = case.default.init(params)
  updates, new_state = jax.eval_shape(
    functools.partial(case.default.update, **cases.make_extra_args(params, 1)),
    gradients,
    state,
    params,
  )
  trees.assert_same_types(updates, gradients)
  trees.assert_same_types(new_state, state)


@every_case
def test_types_do_not_change_with_64_bits(case):
  with jax.enable_x64(True):
    test_types_do_not_change(
      case, functools.partial(cases.make_params, jnp.float64)
    )


@every_case
def test_vmap_over_what_may_be_traced(case):
  for name, values in case.traced.items():

    def final_params(value, name=name):
      return cases.run(case.make(**{name: value}), PARAMS)[0][0]

    swept = jax.vmap(final_params)(jnp.asarray(values))
    for i, value in enumerate(values):
      one = jax.tree.map(lambda leaf, i=i: leaf[i], swept)
      trees.assert_close(one, final_params(value))


@every_case
def test_vmap_over_runs(case):
  transform = case.default
  params = PARAMS
  many = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
  swept = jax.vmap(lambda p: cases.run(transform, p)[0])(many)
  double = jax.tree.map(lambda leaf: 2 * leaf, params)
  for i, start in enumerate((params, double)):
    one = jax.tree.map(lambda leaf, i=i: leaf[i], swept)
    trees.assert_close(one, cases.run(transform, start)[0])


@every_case
def test_chain_passes_unknown_arguments(case):
  transform = case.default
  chain = optax.chain(optax.identity(), transform, optax.scale(-1.0))
  params = PARAMS
  gradients = cases.make_gradients(params, 0)
  extra_args = cases.make_extra_args(params, 2)
  plain, _ = transform.update(
    gradients, transform.init(params), params, **extra_args
  )
  chained, _ = chain.update(
    gradients,
    chain.init(params),
    params,
    **extra_args,
    value=jnp.ones(()),
    nobody_knows_me='hello',
  )
  trees.assert_close(chained, jax.tree.map(jnp.negative, plain))


@every_case
def test_masked_by_rank(case):
  """The matrices alone are transformed, as if they were all there is."""
  masked = optax.masked(
    case.make(), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
  )
  (params, _), updates = cases.run(masked, PARAMS)
  kernel = {'kernel': PARAMS['dense']['kernel']}
  (alone, _), _ = cases.run(case.default, kernel)
  trees.assert_close(params['dense']['kernel'], alone['kernel'])
  untouched = cases.make_gradients(PARAMS, 0)
  trees.assert_close(updates['scale'][0], untouched['scale'])


@every_case
def test_partition_by_path(case):
  def label(tree):
    return jax.tree.map_with_path(
      lambda path, _: 'dense' if 'dense' in str(path[0]) else 'rest', tree
    )

  split = optax.partition({'dense': case.make(), 'rest': optax.sgd(0.1)}, label)
  (params, _), _ = cases.run(split, PARAMS)
  dense = {'dense': PARAMS['dense']}
  (alone, _), _ = cases.run(case.default, dense)
  trees.assert_close(params['dense'], alone['dense'])
  scale = {'scale': PARAMS['scale']}
  sgd = optax.with_extra_args_support(optax.sgd(0.1))
  (alone, _), _ = cases.run(sgd, scale)
  trees.assert_close(params['scale'], alone['scale'])


@every_case
def test_inject_hyperparams(case):
  static = set(case.static) - {'optimizer', 'where', 'adaptive'}
  injected = optax.inject_hyperparams(case.factory, static_args=static)
  transform = injected(
    **case.static, **{name: values[0] for name, values in case.traced.items()}
  )
  (params, state), _ = cases.run(transform, PARAMS)
  trees.assert_close(params, cases.run(case.default, PARAMS)[0][0])
  assert set(case.traced) <= set(state.hyperparams)
  for name, values in case.traced.items():
    state = transform.init(PARAMS)
    state.hyperparams[name] = jnp.asarray(values[-1])
    carry = (PARAMS, state)
    step = jax.jit(functools.partial(cases.take_step, transform))
    for i in range(cases.NUM_STEPS):
      carry, _ = step(carry, i)
    expected = cases.run(case.make(**{name: values[-1]}), PARAMS)[0][0]
    trees.assert_close(carry[0], expected)


@every_case
def test_apply_if_finite(case):
  guarded = optax.apply_if_finite(case.make(), max_consecutive_errors=5)
  params = PARAMS
  state = guarded.init(params)
  update = jax.jit(guarded.update)
  extra_args = cases.make_extra_args(params, 1)
  broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
  updates, after = update(broken, state, params, **extra_args)
  trees.assert_same_bits(updates, jax.tree.map(jnp.zeros_like, params))
  trees.assert_same_bits(after.inner_state, state.inner_state)
  updates, after = update(params, state, params, **extra_args)
  plain, _ = case.make().update(params, state.inner_state, params, **extra_args)
  trees.assert_close(updates, plain)


@every_case
def test_multi_steps(case):
  """MultiSteps steps the transformation once per two calls, on the mean."""
  transform = case.default
  every_two = optax.MultiSteps(transform, 2)
  params = PARAMS
  state, expected_state = every_two.init(params), transform.init(params)
  update = jax.jit(every_two.update)
  extra_args = cases.make_extra_args(params, 2)
  for i in range(3):
    first, second = (cases.make_gradients(params, 2 * i + j) for j in range(2))
    zeros, state = update(first, state, params, **extra_args)
    trees.assert_close(zeros, jax.tree.map(jnp.zeros_like, params))
    updates, state = update(second, state, params, **extra_args)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
    expected, expected_state = transform.update(
      mean, expected_state, params, **extra_args
    )
    trees.assert_close(updates, expected)


@every_case
def test_state_survives_a_checkpoint(case, tmp_path):
  transform = case.default
  params = cases.make_mixed_params()
  (params, state), _ = cases.run(transform, params)
  target = jax.eval_shape(transform.init, params)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'state', state)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / 'state', target)
  trees.assert_same_bits(restored, state)
  step = jax.jit(functools.partial(cases.take_step, transform))
  trees.assert_same_bits(step((params, restored), 3), step((params, state), 3))


@every_case
def test_python_scalars_are_arrays_too(case):
  transform = case.default
  state = transform.init(2.0)
  updates, state = transform.update(
    0.5, state, 2.0, staleness=3, stale_params=1.5
  )
  expected, _ = transform.update(
    jnp.asarray(0.5),
    transform.init(jnp.asarray(2.0)),
    jnp.asarray(2.0),
    staleness=3,
    stale_params=jnp.asarray(1.5),
  )
  np.testing.assert_allclose(updates, expected, rtol=1e-6)
