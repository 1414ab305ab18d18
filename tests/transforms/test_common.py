"""Requirements for every transformation, tested on all of them."""

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
    # One worker runs all tests of a case: they share its run.
    pytest.param(case, id=name, marks=pytest.mark.xdist_group(name))
    for name, case in cases.CASES.items()
  ],
)
PARAMS = cases.make_params()


def _check_tracing(function, *arguments, **keywords):
  """Traces a function, which a run without the compiler does not do."""
  jax.eval_shape(functools.partial(function, **keywords), *arguments)


@every_case
def test_compiled_runs_agree_with_those_without_the_compiler(case):
  """One program: scanned over steps, mapped over starts and hyper-parameters.

  Each row changes one number; the first row and the last have the defaults.
  """
  first = {name: values[0] for name, values in case.traced.items()}
  changed = [
    first | {name: value}
    for name, values in case.traced.items()
    for value in values[1:]
  ]
  numbers = [first, *changed, first]
  starts = [PARAMS] * (len(numbers) - 1)
  starts.append(jax.tree.map(lambda leaf: 2 * leaf, PARAMS))

  def run(start, numbers):
    # A dict without numbers has nothing to trace: build the transform once.
    transform = case.make(**numbers) if numbers else case.default
    return cases.run(transform, start)

  compiled = jax.vmap(run)(
    jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts),
    {name: jnp.asarray([row[name] for row in numbers]) for name in first},
  )
  for i, (start, row) in enumerate(zip(starts, numbers, strict=True)):
    expected = (
      case.eager if i == 0 else cases.run_eagerly(case.make(**row), start)
    )
    one = jax.tree.map(lambda leaf, i=i: leaf[i], compiled)
    # Static numbers may save state that traced numbers need.
    if case.traced:
      one, expected = (one[0][0], one[1]), (expected[0][0], expected[1])
    trees.assert_close(one, expected)


@every_case
def test_a_step_is_traced_once(case):
  """Its results have the types of its arguments, weak types included."""
  num_traces = 0

  @jax.jit
  def step(carry, index):
    nonlocal num_traces
    num_traces += 1
    return cases.take_step(case.default, carry, index)

  carry = (PARAMS, case.default.init(PARAMS))
  for index in range(3):
    carry, _ = step.eval_shape(carry, index)
  assert num_traces == 1


def _check_types(transform, params):
  gradients = cases.make_gradients(params, 0)
  state = jax.eval_shape(transform.init, params)
  updates, new_state = jax.eval_shape(
    functools.partial(transform.update, **cases.make_extra_args(params, 1)),
    gradients,
    state,
    params,
  )
  trees.assert_same_types(updates, gradients)
  trees.assert_same_types(new_state, state)


@every_case
def test_types_do_not_change(case):
  for dtype in (jnp.float32, jnp.bfloat16):
    _check_types(case.default, cases.make_params(dtype))
  _check_types(case.default, cases.make_mixed_params())
  with jax.enable_x64(True):
    _check_types(case.default, cases.make_params(jnp.float64))


@every_case
@jax.disable_jit()
def test_chain_passes_unknown_arguments(case):
  transform = case.default
  chain = optax.chain(optax.identity(), transform, optax.scale(-1.0))
  gradients = cases.make_gradients(PARAMS, 0)
  extra_args = cases.make_extra_args(PARAMS, 2)
  plain, _ = transform.update(
    gradients, transform.init(PARAMS), PARAMS, **extra_args
  )
  chained, _ = chain.update(
    gradients,
    chain.init(PARAMS),
    PARAMS,
    **extra_args,
    value=jnp.ones(()),
    nobody_knows_me='hello',
  )
  trees.assert_close(chained, jax.tree.map(jnp.negative, plain))


@every_case
def test_masked_by_rank(case):
  """Only matrices are transformed, as if there were no other leaves."""
  masked = optax.masked(
    case.make(), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
  )
  (params, _), updates = cases.run_eagerly(masked, PARAMS)
  kernel = {'kernel': PARAMS['dense']['kernel']}
  (alone, _), _ = cases.run_eagerly(case.default, kernel)
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
  (params, _), _ = cases.run_eagerly(split, PARAMS)
  dense = {'dense': PARAMS['dense']}
  (alone, _), _ = cases.run_eagerly(case.default, dense)
  trees.assert_close(params['dense'], alone['dense'])
  scale = {'scale': PARAMS['scale']}
  sgd = optax.with_extra_args_support(optax.sgd(0.1))
  (alone, _), _ = cases.run_eagerly(sgd, scale)
  trees.assert_close(params['scale'], alone['scale'])


@every_case
def test_inject_hyperparams(case):
  static = set(case.static) - {'optimizer', 'where', 'adaptive'}
  injected = optax.inject_hyperparams(case.factory, static_args=static)
  transform = injected(
    **case.static, **{name: values[0] for name, values in case.traced.items()}
  )
  (params, state), _ = cases.run_eagerly(transform, PARAMS)
  trees.assert_close(params, case.eager[0][0])
  assert set(case.traced) <= set(state.hyperparams)
  for name, values in case.traced.items():
    state = transform.init(PARAMS)
    state.hyperparams[name] = jnp.asarray(values[-1])
    carry = (PARAMS, state)
    with jax.disable_jit():
      for i in range(cases.NUM_STEPS):
        carry, _ = cases.take_step(transform, carry, i)
    changed = case.make(**{name: values[-1]})
    trees.assert_close(carry[0], cases.run_eagerly(changed, PARAMS)[0][0])


@every_case
def test_apply_if_finite(case):
  guarded = optax.apply_if_finite(case.make(), max_consecutive_errors=5)
  state = guarded.init(PARAMS)
  extra_args = cases.make_extra_args(PARAMS, 1)
  broken = jax.tree.map(lambda leaf: leaf * jnp.nan, PARAMS)
  _check_tracing(guarded.update, PARAMS, state, PARAMS, **extra_args)
  with jax.disable_jit():
    updates, after = guarded.update(broken, state, PARAMS, **extra_args)
    trees.assert_same_bits(updates, jax.tree.map(jnp.zeros_like, PARAMS))
    trees.assert_same_bits(after.inner_state, state.inner_state)
    updates, _ = guarded.update(PARAMS, state, PARAMS, **extra_args)
    plain, _ = case.make().update(
      PARAMS, state.inner_state, PARAMS, **extra_args
    )
  trees.assert_close(updates, plain)


@every_case
def test_multi_steps(case):
  """MultiSteps steps the transformation once per two calls, on the mean."""
  transform = case.default
  every_two = optax.MultiSteps(transform, 2)
  state, expected_state = every_two.init(PARAMS), transform.init(PARAMS)
  extra_args = cases.make_extra_args(PARAMS, 2)
  _check_tracing(every_two.update, PARAMS, state, PARAMS, **extra_args)
  with jax.disable_jit():
    for i in range(3):
      first, second = (
        cases.make_gradients(PARAMS, 2 * i + j) for j in range(2)
      )
      zeros, state = every_two.update(first, state, PARAMS, **extra_args)
      trees.assert_close(zeros, jax.tree.map(jnp.zeros_like, PARAMS))
      updates, state = every_two.update(second, state, PARAMS, **extra_args)
      mean = jax.tree.map(lambda a, b: (a + b) / 2, first, second)
      expected, expected_state = transform.update(
        mean, expected_state, PARAMS, **extra_args
      )
      trees.assert_close(updates, expected)


def test_states_survive_a_checkpoint(tmp_path):
  """Those of all cases, in one checkpoint, filled with arbitrary numbers."""
  params = cases.make_mixed_params()
  targets = {
    name: jax.eval_shape(case.default.init, params)
    for name, case in cases.CASES.items()
  }
  generator = np.random.default_rng(0)
  states = jax.tree.map(
    lambda leaf: jnp.asarray(
      generator.normal(scale=100, size=leaf.shape).astype(leaf.dtype)
    ),
    targets,
  )
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / 'states', states)
    checkpointer.wait_until_finished()
    restored = checkpointer.restore(tmp_path / 'states', targets)
  trees.assert_same_bits(restored, states)


@every_case
@jax.disable_jit()
def test_python_scalars_are_arrays_too(case):
  transform = case.default
  updates, _ = transform.update(
    0.5, transform.init(2.0), 2.0, staleness=3, stale_params=1.5
  )
  expected, _ = transform.update(
    jnp.asarray(0.5),
    transform.init(jnp.asarray(2.0)),
    jnp.asarray(2.0),
    staleness=3,
    stale_params=jnp.asarray(1.5),
  )
  np.testing.assert_allclose(updates, expected, rtol=1e-6)
