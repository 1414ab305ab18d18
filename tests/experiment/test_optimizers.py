"""Configs of optimizers and schedules against optax, and closed forms."""

import inspect
import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jasgd import experiment

PARAMS = {'w': jnp.array([1.0, -2.0, 3.0])}
GRADS = {'w': jnp.array([0.5, 0.1, -4.0])}


def _step_twice(optimizer, rate=1.0):
  """The weights after two steps, the updates multiplied by `rate`."""
  params, state = PARAMS, optimizer.init(PARAMS)
  for _ in range(2):
    updates, state = optimizer.update(GRADS, state, params)
    params = {'w': params['w'] + rate * updates['w']}
  return np.asarray(params['w'])


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [
    ({'momentum': 0.0}, optax.sgd(0.1)),
    ({'momentum': 0.9}, optax.sgd(0.1, 0.9)),
    ({'nesterov': True}, optax.sgd(0.1, 0.9, nesterov=True)),
    ({'name': 'adagrad'}, optax.adagrad(0.1)),
    ({'name': 'adam'}, optax.adam(0.1)),
    (
      {'name': 'adam', 'arguments': (('b1', 0.5),)},
      optax.adam(0.1, b1=0.5),
    ),
    (
      {'name': 'adamw', 'weight_decay': 0.2},
      optax.adamw(0.1, weight_decay=0.2),
    ),
    ({'name': 'rmsprop'}, optax.rmsprop(0.1)),
    ({'name': 'lion', 'weight_decay': 0.2}, optax.lion(0.1, weight_decay=0.2)),
    (
      {'weight_decay': 0.2, 'clip_update': 1.0},
      optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.add_decayed_weights(0.2),
        optax.sgd(0.1, 0.9),
      ),
    ),
  ],
)
def test_optimizers_are_those_of_optax(changes, expected):
  config = experiment.OptimizerConfig(rate=0.1, **changes)
  assert not config.list_problems()
  ours = _step_twice(config.make_optimizer(), config.rate)
  np.testing.assert_allclose(ours, _step_twice(expected), rtol=1e-6)


def _list_aliases():
  """All names in optax that could be the name of an optimizer."""
  for name in sorted(vars(optax)):
    make = getattr(optax, name)
    if (
      inspect.isfunction(make)
      and not name.startswith('scale_by')
      and 'learning_rate' in inspect.signature(make).parameters
    ):
      yield name


@pytest.mark.parametrize('name', list(_list_aliases()))
def test_every_alias_is_right_or_refused(name):
  config = experiment.OptimizerConfig(name=name, rate=0.1, momentum=0.0)
  if problems := config.list_problems():
    assert f'optax.{name} cannot be used' in problems[0]
    return
  ours = _step_twice(config.make_optimizer(), config.rate)
  make = getattr(optax, name)
  takes_decay = 'weight_decay' in inspect.signature(make).parameters
  expected = make(0.1, **({'weight_decay': 0.0} if takes_decay else {}))
  np.testing.assert_allclose(ours, _step_twice(expected), rtol=1e-4)


def test_most_aliases_can_be_used():
  refused = []
  for name in _list_aliases():
    try:
      experiment.OptimizerConfig(name=name).make_optimizer()
    except ValueError:
      refused.append(name)
  assert {'adam', 'adamw', 'lamb', 'lars', 'lion', 'rmsprop', 'sgd'}.isdisjoint(
    refused
  )


def test_each_gradient_is_clipped_and_corrected():
  config = experiment.OptimizerConfig(clip_gradient=2.0)
  per_gradient = config.make_per_gradient()
  updates, _ = per_gradient.update(GRADS, per_gradient.init(PARAMS), PARAMS)
  np.testing.assert_allclose(optax.tree.norm(updates), 2.0, rtol=1e-6)
  assert experiment.OptimizerConfig().make_per_gradient() is None
  for correction in ('delay_compensation', 'gap_aware'):
    config = experiment.OptimizerConfig(correction=correction)
    per_gradient = config.make_per_gradient()
    stale = {'w': PARAMS['w'] + 1.0}
    updates, _ = per_gradient.update(
      GRADS, per_gradient.init(PARAMS), PARAMS, stale_params=stale, staleness=3
    )
    assert not np.allclose(updates['w'], GRADS['w'])


def test_a_policy_may_stand_behind_the_optimizer():
  config = experiment.OptimizerConfig(
    name='adam', rate=0.1, policy='inverse', policy_on='update'
  )
  assert config.make_policy() == ('constant',)
  optimizer = config.make_optimizer()
  updates, _ = optimizer.update(
    GRADS, optimizer.init(PARAMS), PARAMS, staleness=4
  )
  plain = optax.adam(1.0)
  expected, _ = plain.update(GRADS, plain.init(PARAMS), PARAMS)
  np.testing.assert_allclose(updates['w'], expected['w'] / 4, rtol=1e-6)


def test_the_same_settings_are_the_same_object():
  first, second = (
    experiment.OptimizerConfig(name='adam', rate=rate).make_optimizer()
    for rate in (0.1, 0.2)
  )
  assert first is second  # So that a sweep over rates compiles once.


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'rate': 0.0}, 'optimizer.rate must be finite and above 0, got 0.0'),
    ({'rate': math.inf}, 'optimizer.rate must be finite'),
    ({'momentum': 1.0}, r'optimizer.momentum must be in \[0, 1\), got 1.0'),
    ({'weight_decay': -1.0}, 'optimizer.weight_decay must be .* got -1.0'),
    ({'clip_update': math.nan}, 'optimizer.clip_update must be finite'),
    ({'name': 'sdg'}, "Unknown optimizer 'sdg'"),
    ({'name': 'chain'}, "Unknown optimizer 'chain'"),
    ({'name': 'adam', 'arguments': (('b3', 1),)}, 'optax.adam cannot be used'),
    ({'arguments': (('momentum', 0.5),)}, 'must not have momentum'),
    ({'name': 'scale_by_rprop'}, "Unknown optimizer 'scale_by_rprop'"),
    ({'name': 'fromage'}, 'steps are not proportional to its rate'),
    ({'name': 'lbfgs'}, 'optax.lbfgs cannot be used'),
    ({'policy': 'invers'}, "Unknown policy 'invers'"),
    (
      {'policy_on': 'weights'},
      "must be one of gradient, update, got 'weights'",
    ),
    ({'correction': 'dc'}, "Unknown correction 'dc'. Known: none"),
  ],
)
def test_what_is_wrong_with_an_optimizer(changes, message):
  problems = experiment.OptimizerConfig(**changes).list_problems()
  with pytest.raises(AssertionError, match=message):
    assert not problems, ' '.join(problems)


def _get_rates(at, rate=1.0, num_epochs=10.0, update_batch=128, **changes):
  get_rate = experiment.ScheduleConfig(**changes).make(
    rate, num_epochs, update_batch
  )
  return [get_rate(epoch) for epoch in at]


def test_schedules():
  assert _get_rates([0, 5, 10], rate=0.3) == [0.3] * 3
  assert _get_rates(
    [0, 1.99, 2, 3.9, 4, 9], name='steps', epochs=(2, 4), factor=0.5
  ) == [1, 1, 0.5, 0.5, 0.25, 0.25]
  np.testing.assert_allclose(
    _get_rates([0, 5, 10, 11], name='cosine'), [1, 0.5, 0, 0], atol=1e-12
  )


def test_the_rate_is_scaled_and_warmed_up():
  arguments = {'update_batch': 512, 'rate': 0.1}
  assert _get_rates([0], scaling='linear', **arguments) == [0.4]
  assert _get_rates([0], scaling='sqrt', **arguments) == [0.2]
  # Goyal et al.: from the unscaled rate to the scaled one, over 5 epochs.
  np.testing.assert_allclose(
    _get_rates([0, 2.5, 5, 6], scaling='linear', warm_up=5, **arguments),
    [0.1, 0.25, 0.4, 0.4],
  )
  np.testing.assert_allclose(_get_rates([0, 1, 2], warm_up=2), [0, 0.5, 1])


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'name': 'step'}, "Unknown schedule 'step'. Known: constant"),
    ({'scaling': 'cubic'}, "Unknown scaling 'cubic'. Known: none"),
    ({'epochs': (3.0, 2.0)}, 'schedule.epochs must ascend'),
    ({'name': 'steps'}, 'A schedule of steps needs schedule.epochs'),
    ({'factor': 0.0}, 'schedule.factor must be above 0, got 0.0'),
    ({'warm_up': -1.0}, 'schedule.warm_up must be at least 0, got -1.0'),
    ({'base_batch': 0}, 'schedule.base_batch must be at least 1, got 0'),
  ],
)
def test_what_is_wrong_with_a_schedule(changes, message):
  (problem,) = experiment.ScheduleConfig(**changes).list_problems()
  assert message in problem
