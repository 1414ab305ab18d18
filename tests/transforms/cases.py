"""Every transformation of the library, and a small problem to run it on.

A new transformation is tested by all of `test_common.py` once it is listed in
`CASES`; `test_house.py` fails until it is listed.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jasgd
from tests import trees

NUM_STEPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A transformation, and its hyper-parameters that may be traced."""

  factory: Callable[..., optax.GradientTransformation]
  static: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Hyper-parameters that may be traced -> values to sweep them over.
  traced: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

  @functools.cached_property
  def default(self) -> optax.GradientTransformationExtraArgs:
    """The transformation, built once so that jax reuses its traces."""
    return self.make()

  @functools.cached_property
  def eager(self) -> tuple[Any, Any]:
    """`run_eagerly` of the default, from `make_params()`."""
    return run_eagerly(self.default, make_params())

  def make(self, **traced) -> optax.GradientTransformationExtraArgs:
    first = {name: values[0] for name, values in self.traced.items()}
    return self.factory(**self.static, **{**first, **traced})


def _scale_polynomially(exponent):
  return jasgd.scale_by_staleness(('polynomial', exponent))


MOMENTUM = optax.sgd(0.1, momentum=0.9)
ADAM = optax.adam(0.1)

CASES = {
  'scale_by_staleness': Case(
    factory=jasgd.scale_by_staleness, static={'policy': 'inverse'}
  ),
  'scale_by_staleness, callable': Case(
    factory=jasgd.scale_by_staleness,
    static={'policy': lambda tau, count: 1 / (1 + tau + count)},
  ),
  'scale_by_staleness, polynomial': Case(
    factory=_scale_polynomially, traced={'exponent': (0.5, 0.0, 2.0)}
  ),
  'delay': Case(
    factory=jasgd.delay,
    static={'max_delay': 4},
    traced={'num_updates': (2, 0, 4)},
  ),
  'delay, constant': Case(factory=lambda: jasgd.delay(3)),
  'delay, none': Case(factory=lambda: jasgd.delay(0)),
  'delay, varying': Case(
    factory=lambda: jasgd.delay(lambda count: count % 3, max_delay=2)
  ),
  'delayed': Case(
    factory=jasgd.delayed,
    static={'optimizer': ADAM, 'max_delay': 4},
    traced={'num_updates': (2, 0, 4)},
  ),
  'delayed, keep_params': Case(
    factory=lambda: jasgd.delayed(
      optax.chain(jasgd.gap_aware(0.1), MOMENTUM), 2, keep_params=True
    )
  ),
  'softsync': Case(
    factory=jasgd.softsync,
    static={'optimizer': MOMENTUM, 'policy': 'inverse'},
    traced={'num_gradients': (2, 1, 3)},
  ),
  'softsync, single': Case(factory=lambda: jasgd.softsync(MOMENTUM, 1)),
  'softsync, per_gradient': Case(
    factory=lambda: jasgd.softsync(
      MOMENTUM, 3, per_gradient=jasgd.delay_compensation(adaptive=True)
    )
  ),
  'delay_compensation': Case(
    factory=jasgd.delay_compensation, traced={'strength': (0.04, 0.0, 1.0)}
  ),
  'delay_compensation, adaptive': Case(
    factory=jasgd.delay_compensation,
    static={'adaptive': True},
    traced={'strength': (2.0, 0.0), 'decay': (0.95, 0.5)},
  ),
  'gap_aware': Case(
    factory=jasgd.gap_aware, traced={'rate': (0.1, 0.01), 'decay': (0.9, 0.99)}
  ),
  'monitor_staleness': Case(factory=lambda: jasgd.monitor_staleness(8)),
  'monitor_staleness, gap': Case(
    factory=lambda: jasgd.monitor_staleness(8, measure_gap=True)
  ),
  'staleness_aware': Case(
    factory=jasgd.staleness_aware, static={'optimizer': MOMENTUM}
  ),
  'staleness_aware, updates': Case(
    factory=jasgd.staleness_aware,
    static={'optimizer': MOMENTUM, 'where': 'updates'},
  ),
}


def make_params(dtype=jnp.float32) -> Any:
  """A small tree: a matrix, a scalar and an empty node."""
  return {
    'dense': {'kernel': jnp.linspace(-1, 1, 6).reshape(2, 3).astype(dtype)},
    'empty': {},
    'scale': jnp.asarray(2.0, dtype),
  }


def make_mixed_params() -> Any:
  """The same tree, with leaves of two dtypes."""
  params = make_params()
  params['dense']['kernel'] = params['dense']['kernel'].astype(jnp.bfloat16)
  return params


def make_gradients(params, step) -> Any:
  """Gradients that differ from step to step."""
  step = jnp.asarray(step, jnp.float32)
  return jax.tree.map(
    lambda leaf: (0.3 * jnp.sin(leaf + step) + 0.1).astype(leaf.dtype), params
  )


def make_extra_args(params, step) -> dict[str, Any]:
  """The keywords that a server would give."""
  return {
    'staleness': jnp.asarray(step, jnp.int32) % 4,
    'stale_params': jax.tree.map(
      lambda leaf: leaf - jnp.asarray(0.01, leaf.dtype), params
    ),
  }


def take_step(transform, carry, step) -> tuple[Any, Any]:
  """One step; the carry is (params, state), and the updates come out too."""
  params, state = carry
  updates, state = transform.update(
    make_gradients(params, step),
    state,
    params,
    **make_extra_args(params, step),
  )
  return (optax.apply_updates(params, updates), state), updates


@functools.partial(jax.jit, static_argnames=('transform', 'num_steps'))
def run(transform, params, num_steps=NUM_STEPS) -> tuple[Any, Any]:
  """A whole run, compiled as one scan. Gives (params, state), all updates."""
  return jax.lax.scan(
    lambda carry, step: take_step(transform, carry, step),
    (params, transform.init(params)),
    jnp.arange(num_steps),
  )


def run_eagerly(transform, params, num_steps=NUM_STEPS) -> tuple[Any, Any]:
  """The same run: traced as one scan, but computed operation by operation.

  Tracing finds what cannot be compiled. The values come from operations that
  are compiled once for all transformations, so that a run costs no compilation.
  """
  traced = jax.eval_shape(
    functools.partial(run, transform, num_steps=num_steps), params
  )
  with jax.disable_jit():
    carry, all_updates = (params, transform.init(params)), []
    for step in range(num_steps):
      carry, updates = take_step(transform, carry, step)
      all_updates.append(updates)
    found = carry, jax.tree.map(lambda *rows: jnp.stack(rows), *all_updates)
  trees.assert_same_types(found, traced)
  return found
