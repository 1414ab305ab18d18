"""Every task with every model, and where the real data is.

A new task or model is tested by all of `test_common.py` once it is listed in
`CASES`; the first tests there fail while it is not.
"""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import jax
import pytest

from jasgd import tasks
from tests import marks

ROOT = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A task, and what must be true of it."""

  name: str
  num_params: int
  num_samples: int
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  is_image: bool = True
  has_stats: bool = False

  @property
  def needs_data(self) -> bool:
    return self.name in ('cifar10', 'mnist')

  def make(self, batch: int = 8, **options: Any) -> tasks.Task:
    """The task; skips the test if its data is not here."""
    if self.needs_data:
      options['data_dir'] = find_data()
    return tasks.make_task(self.name, batch=batch, **self.arguments, **options)


CASES = (
  Case(name='quadratic', num_params=10, num_samples=1000, is_image=False),
  Case(name='logistic', num_params=20, num_samples=1000, is_image=False),
  Case(
    name='digits',
    arguments={'model': 'mlp'},
    num_params=4_810,
    num_samples=1_437,
  ),
  Case(
    name='digits',
    arguments={'model': 'lenet'},
    num_params=13_706,
    num_samples=1_437,
  ),
  Case(
    name='mnist',
    arguments={'model': 'lenet'},
    num_params=61_706,
    num_samples=60_000,
  ),
  Case(
    name='cifar10',
    arguments={'model': 'a1'},
    num_params=89_578,
    num_samples=50_000,
  ),
  Case(
    name='cifar10',
    arguments={'model': 'resnet20'},
    num_params=269_722,
    num_samples=50_000,
    has_stats=True,
  ),
)

EVERY = {
  '-'.join([case.name, *case.arguments.values()]): case for case in CASES
}

# A deep network takes long to compile.
every_case = pytest.mark.parametrize(
  'case_id',
  marks.slow_but(EVERY, *(each for each in EVERY if 'resnet' not in each)),
)


# Most of a test's time is that of the compiler. What is not itself under test
# is compiled in a hurry.
QUICK = {
  'xla_backend_optimization_level': 0,
  'xla_llvm_disable_expensive_passes': True,
}


@functools.cache
def make_task(case_id: str) -> tasks.Task:
  """A task with batch 8, made once for all tests."""
  return EVERY[case_id].make()


@functools.cache
def make_init(case_id: str) -> Any:
  """`init` of a task, compiled once."""
  return jax.jit(make_task(case_id).init, compiler_options=QUICK)


def make_initial(case_id: str) -> tuple[tasks.Task, Any, Any]:
  """A task with batch 8, and its params and stats."""
  return make_task(case_id), *make_init(case_id)(jax.random.key(0))


@functools.cache
def make_gradient(case_id: str) -> Any:
  """`((loss, stats), grads)` of (params, stats, batch, key), compiled once."""
  task = make_task(case_id)
  gradient = jax.value_and_grad(task.loss, has_aux=True)
  return jax.jit(gradient, compiler_options=QUICK)


def find_data() -> str:
  """The folder of the real sets; skips the test if there is none."""
  folder = os.environ.get('JASGD_DATA') or ROOT.parent / 'shared' / 'data'
  if not pathlib.Path(folder).is_dir():
    pytest.skip(f'no data in {folder}; set JASGD_DATA to where it is')
  # Decoded once for all test runs, and not in the user's own cache.
  os.environ.setdefault('JASGD_CACHE', str(ROOT / '.pytest_cache' / 'jasgd'))
  return str(folder)
