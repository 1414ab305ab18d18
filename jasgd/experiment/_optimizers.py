"""Configs of optimizers and their rates, and what they stand for."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import math
from typing import Any

import jax.numpy as jnp
import optax

from jasgd import transforms

_SCALINGS: dict[str, Callable[[float], float]] = {
  'none': lambda ratio: 1.0,
  'linear': lambda ratio: ratio,
  'sqrt': math.sqrt,
}
_CORRECTIONS = ('none', 'delay_compensation', 'gap_aware')
_PLACES = ('gradient', 'update')
_SCHEDULES = ('constant', 'steps', 'cosine')


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
  """What becomes of the gradients."""

  # An optimizer of optax by its name: sgd, adagrad, adam, adamw, rmsprop, ...
  name: str = 'sgd'
  # The rate, before scaling and schedule.
  rate: float = 0.1
  # sgd: momentum, and whether it is Nesterov's.
  momentum: float = 0.9
  nesterov: bool = False
  # What else optax's function takes, such as (('b1', 0.9), ('b2', 0.99)).
  arguments: tuple[tuple[str, Any], ...] = ()
  # What staleness leaves of a gradient: a name in `jasgd.policies`, such as
  # 'inverse', with its arguments.
  policy: str = 'constant'
  policy_arguments: tuple[float, ...] = ()
  # What it multiplies: each gradient, or the optimizer's update. Adam divides
  # by the size of its gradients: a constant factor on them does nothing there.
  policy_on: str = 'gradient'
  # What is done to a stale gradient: none, delay_compensation or gap_aware.
  correction: str = 'none'
  # Times the weights, added to the gradient; to the update by those optimizers
  # that have a weight decay of their own, such as adamw.
  weight_decay: float = 0.0
  # The largest norm of a gradient, and of an update's mean gradient; 0: any.
  clip_gradient: float = 0.0
  clip_update: float = 0.0

  def list_problems(self) -> list[str]:
    """What is wrong with it, in words."""
    problems = []
    if not 0 < self.rate < math.inf:
      problems.append(
        f'optimizer.rate must be finite and above 0, got {self.rate}.'
      )
    if not 0 <= self.momentum < 1:
      problems.append(
        f'optimizer.momentum must be in [0, 1), got {self.momentum}.'
      )
    for name in ('weight_decay', 'clip_gradient', 'clip_update'):
      value = getattr(self, name)
      if not 0 <= value < math.inf:
        problems.append(
          f'optimizer.{name} must be finite and at least 0, got {value}.'
        )
    if self.policy_on not in _PLACES:
      problems.append(
        f'optimizer.policy_on must be one of {", ".join(_PLACES)}, got '
        f'{self.policy_on!r}.'
      )
    if self.correction not in _CORRECTIONS:
      problems.append(
        f'Unknown correction {self.correction!r}. Known: '
        f'{", ".join(_CORRECTIONS)}.'
      )
    for make in (self.make_optimizer, self.make_policy):
      try:
        make()
      except ValueError as error:
        problems.append(str(error))
    return problems

  def make_optimizer(self) -> optax.GradientTransformation:
    """The per-update chain, at rate 1: the engine sets the rate."""
    own: dict[str, Any] = {}
    if self.name == 'sgd':
      own = {'momentum': self.momentum or None, 'nesterov': self.nesterov}
    decay = self.weight_decay
    if 'weight_decay' in inspect.signature(_find(self.name)).parameters:
      own, decay = {'weight_decay': decay}, 0.0
    given = dict(self.arguments)
    if twice := sorted({*own} & {*given}):
      raise ValueError(
        f'optimizer.arguments must not have {", ".join(twice)}, which is a '
        'field of its own.'
      )
    return _make_chain(
      self.name,
      tuple(sorted((own | given).items())),
      decay,
      self.clip_update,
      self._get_policy() if self.policy_on == 'update' else None,
    )

  def make_per_gradient(self) -> optax.GradientTransformation | None:
    """The per-gradient chain, if there is one."""
    return _make_per_gradient(self.clip_gradient, self.correction, self.rate)

  def make_policy(self) -> tuple[Any, ...]:
    """The policy of gradients, as `jasgd.scale_by_staleness` takes it."""
    transforms.policies.make_policy(self._get_policy())  # Or it raises.
    return self._get_policy() if self.policy_on == 'gradient' else ('constant',)

  def _get_policy(self) -> tuple[Any, ...]:
    return (self.policy, *self.policy_arguments)


def _find(name: str) -> Callable[..., optax.GradientTransformation]:
  """An optimizer of optax by its name."""
  make = getattr(optax, name, None)
  if (
    not inspect.isfunction(make)
    or name.startswith('scale_by')
    or 'learning_rate' not in inspect.signature(make).parameters
  ):
    raise ValueError(
      f'Unknown optimizer {name!r}: it must be an optimizer of optax with a '
      'learning_rate, such as sgd, adagrad, adam or adamw.'
    )
  return make


# The same objects for the same settings, so that nothing is compiled twice.
@functools.lru_cache(maxsize=64)
def _make_chain(
  name: str,
  arguments: tuple[tuple[str, Any], ...],
  weight_decay: float,
  clip_update: float,
  policy: tuple[Any, ...] | None,
) -> optax.GradientTransformation:
  """Clipping, weight decay, the optimizer at rate 1, and a policy behind it."""
  make = functools.partial(_find(name), **dict(arguments))
  try:
    links = [make(learning_rate=1.0)]
    is_proportional = _is_proportional(make)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'optax.{name} cannot be used with {dict(arguments)}: {error}.'
    ) from None
  if not is_proportional:
    raise ValueError(
      f'optax.{name} cannot be used: its steps are not proportional to its '
      'rate, which the engine sets for each update.'
    )
  if weight_decay:
    links.insert(0, optax.add_decayed_weights(weight_decay))
  if clip_update:
    links.insert(0, optax.clip_by_global_norm(clip_update))
  if policy is not None:
    links.append(transforms.scale_by_staleness(policy))
  return links[0] if len(links) == 1 else optax.chain(*links)


def _is_proportional(make: Callable[..., optax.GradientTransformation]) -> bool:
  """Whether the rate of an optimizer is nothing but a factor on its steps."""
  steps = []
  for rate in (1.0, 0.125):  # A power of 2: so the product is exact.
    optimizer = make(learning_rate=rate)
    params = jnp.array([1.0, -2.0, 0.5])
    state = optimizer.init(params)
    for scale in (1.0, -0.3, 2.0):
      updates, state = optimizer.update(scale * params + 0.1, state, params)
      steps.append(jnp.asarray(updates) / rate)
  return bool(jnp.allclose(jnp.stack(steps[:3]), jnp.stack(steps[3:]), 1e-4))


@functools.lru_cache(maxsize=64)
def _make_per_gradient(
  clip: float, correction: str, rate: float
) -> optax.GradientTransformation | None:
  """Clipping and correction of each gradient."""
  links = [optax.clip_by_global_norm(clip)] if clip else []
  if correction == 'delay_compensation':
    links.append(transforms.delay_compensation())
  elif correction == 'gap_aware':
    links.append(transforms.gap_aware(rate))
  return optax.chain(*links) if links else None


@dataclasses.dataclass(kw_only=True)
class ScheduleConfig:
  """How the rate changes, in epochs: passes over the training set."""

  # constant, steps or cosine (down to 0 at the end).
  name: str = 'constant'
  # steps: after which epochs, and by which factor each time.
  epochs: tuple[float, ...] = ()
  factor: float = 0.1
  # Epochs over which the rate rises: from the unscaled rate if it is scaled up
  # (Goyal et al.), else from 0.
  warm_up: float = 0.0
  # How the rate grows with the samples of an update: none, linear or sqrt of
  # their ratio to `base_batch`.
  scaling: str = 'none'
  base_batch: int = 128

  def list_problems(self) -> list[str]:
    """What is wrong with it, in words."""
    rules = {
      f'Unknown schedule {self.name!r}. Known: {", ".join(_SCHEDULES)}.': (
        self.name in _SCHEDULES
      ),
      f'Unknown scaling {self.scaling!r}. Known: {", ".join(_SCALINGS)}.': (
        self.scaling in _SCALINGS
      ),
      f'schedule.epochs must ascend from above 0, got {self.epochs}.': (
        all(a < b for a, b in zip((0, *self.epochs), self.epochs, strict=False))
      ),
      'A schedule of steps needs schedule.epochs, got none.': (
        self.name != 'steps' or len(self.epochs) > 0
      ),
      f'schedule.factor must be above 0, got {self.factor}.': self.factor > 0,
      f'schedule.warm_up must be at least 0, got {self.warm_up}.': (
        self.warm_up >= 0
      ),
      f'schedule.base_batch must be at least 1, got {self.base_batch}.': (
        self.base_batch >= 1
      ),
    }
    return [rule for rule, holds in rules.items() if not holds]

  def make(
    self, rate: float, num_epochs: float, update_batch: int
  ) -> Callable[[float], float]:
    """The rate as a function of epochs.

    Args:
      rate: Before scaling.
      num_epochs: When the run ends.
      update_batch: Samples of an update.

    Returns:
      A function from epochs to the rate.
    """
    scale = _SCALINGS[self.scaling](update_batch / self.base_batch)
    start = 1 / scale if scale > 1 else 0.0

    def get_rate(epoch: float) -> float:
      factor = 1.0
      if self.name == 'steps':
        factor = self.factor ** sum(epoch >= end for end in self.epochs)
      elif self.name == 'cosine':
        progress = min(epoch / num_epochs, 1.0)
        factor = (1 + math.cos(math.pi * progress)) / 2
      if epoch < self.warm_up:
        factor *= start + (1 - start) * epoch / self.warm_up
      return rate * scale * factor

    return get_rate
