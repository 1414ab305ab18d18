"""Configs of optimizers, policies and schedules."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
import math
from typing import Any

import optax

from jasgd import protocols
from jasgd import transforms

_SCALINGS: dict[str, Callable[[float], float]] = {
  'none': lambda ratio: 1.0,
  'linear': lambda ratio: ratio,
  'sqrt': math.sqrt,
}
_CORRECTIONS = ('none', 'delay_compensation', 'gap_aware')
_PLACES = ('gradient', 'update')
_SCHEDULES = ('constant', 'steps', 'cosine')
# Optimizers of optax whose steps are not their rate times a direction. The
# engine makes steps at rate 1 and multiplies them by the schedule's rate.
_REFUSED = ('fromage', 'lbfgs')


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig:
  """Optimizer of the server or of each node, and treatment of staleness."""

  # An optimizer of optax by its name: sgd, adagrad, adam, adamw, rmsprop, ...
  # Or 'module:name' of your function that returns an optimizer; it must take
  # `learning_rate`, and its steps must be proportional to it.
  name: str = 'sgd'
  # Rate, before scaling and schedule.
  rate: float = 0.1
  # sgd: momentum, and whether it is Nesterov's.
  momentum: float = 0.9
  nesterov: bool = False
  # Further arguments of the function, such as (('b1', 0.9), ('b2', 0.99)).
  arguments: tuple[tuple[str, Any], ...] = ()
  # Factor on a gradient by its staleness: a name in `jasgd.policies`, such as
  # 'inverse', with its arguments.
  policy: str = 'constant'
  policy_arguments: tuple[float, ...] = ()
  # Place of the policy: on each 'gradient', or on the optimizer's 'update'.
  # Adam divides by the size of its gradients, so a constant factor on them has
  # no effect: choose 'update' there.
  policy_on: str = 'gradient'
  # Correction of a stale gradient: none, delay_compensation or gap_aware.
  correction: str = 'none'
  # Weight decay: its product with the weights is added to the gradient, or to
  # the update by optimizers that have a decay of their own, such as adamw.
  weight_decay: float = 0.0
  # Largest norm of a gradient, and of an update's mean gradient; 0: no bound.
  clip_gradient: float = 0.0
  clip_update: float = 0.0

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
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
    transforms.policies.make_policy(self._get_policy())  # Raises if it is bad.
    return self._get_policy() if self.policy_on == 'gradient' else ('constant',)

  def _get_policy(self) -> tuple[Any, ...]:
    return (self.policy, *self.policy_arguments)


def _find(name: str) -> Callable[..., optax.GradientTransformation]:
  """The function of an optimizer: of optax, or 'module:name'."""
  if ':' in name:
    return protocols.find_named('optimizer', {}, name)
  if name in _REFUSED:
    raise ValueError(
      f'optax.{name} cannot be used: its steps are not proportional to its '
      'rate, which the engine sets for each update.'
    )
  make = getattr(optax, name, None)
  if (
    not inspect.isfunction(make)
    or name.startswith('scale_by')
    or 'learning_rate' not in inspect.signature(make).parameters
  ):
    raise ValueError(
      f'Unknown optimizer {name!r}: it must be an optimizer of optax with a '
      "learning_rate, such as sgd, adagrad, adam or adamw, or 'module:name' of "
      'your own function.'
    )
  return make


# The same object for the same settings, so that nothing is compiled twice.
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
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'optax.{name} cannot be used with {dict(arguments)}: {error}.'
    ) from None
  if weight_decay:
    links.insert(0, optax.add_decayed_weights(weight_decay))
  if clip_update:
    links.insert(0, optax.clip_by_global_norm(clip_update))
  if policy is not None:
    links.append(transforms.scale_by_staleness(policy))
  return links[0] if len(links) == 1 else optax.chain(*links)


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
  """Rate as a function of epochs: passes over the training set."""

  # constant, steps or cosine (down to 0 at the end).
  name: str = 'constant'
  # steps: epochs after which the rate is multiplied by the factor.
  epochs: tuple[float, ...] = ()
  factor: float = 0.1
  # Epochs over which the rate rises: from the unscaled rate if it is scaled up
  # (Goyal et al.), else from 0.
  warm_up: float = 0.0
  # Growth of the rate with the samples of an update: none, linear or sqrt of
  # their ratio to `base_batch`.
  scaling: str = 'none'
  base_batch: int = 128

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
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
      rate: Rate before scaling.
      num_epochs: Epochs at the end of the run.
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
