"""Every task with every model, and the folder of the real data.

A new task or model is tested by all of `test_common.py` once it is listed in
`CASES`; the first test there fails until it is listed.
"""

import dataclasses
import functools
import os
import pathlib
import tempfile
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds

from jasgd import tasks
from tests import marks

NUM_DRAWN = 300  # Samples of a set of random images.
ROOT = pathlib.Path(__file__).parent.parent.parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A task, and its expected properties."""

  name: str
  num_params: int
  num_samples: int
  arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
  is_image: bool = True
  has_stats: bool = False

  @property
  def needs_data(self) -> bool:
    return self.name in ('cifar10', 'mnist')

  def make(self, batch: int = 8) -> tasks.Task:
    """The task, with its real data; skips the test if that is missing."""
    options = {'data_dir': find_data()} if self.needs_data else {}
    return tasks.make_task(self.name, batch=batch, **self.arguments, **options)

  def make_small(self, batch: int = 8) -> tasks.Task:
    """The task with random images in place of downloaded ones."""
    with (
      tempfile.TemporaryDirectory() as folder,  # For decoded images.
      mock.patch.dict(os.environ, JASGD_CACHE=folder),
      mock.patch.object(tfds, 'data_source', _draw_source),
    ):
      return tasks.make_task(self.name, batch=batch, **self.arguments)


class Source(list):
  """Examples with reads in blocks, as tensorflow-datasets has them."""

  def __getitems__(self, indices):
    return [self[index] for index in indices]


def _draw_source(name, *, split, **options):
  """A small set of random images, in the format of a real one."""
  del options
  rng = np.random.default_rng(len(split))
  size = NUM_DRAWN if split == 'train' else 100
  name, _ = name.split(':')  # Without the version.
  shape = {'mnist': (28, 28, 1), 'cifar10': (32, 32, 3)}[name]
  images = rng.integers(0, 256, (size, *shape), np.uint8)
  labels = rng.integers(0, 10, size)
  return Source(
    {'image': image, 'label': label}
    for image, label in zip(images, labels, strict=True)
  )


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
    num_samples=NUM_DRAWN,
  ),
  Case(
    name='cifar10',
    arguments={'model': 'a1'},
    num_params=89_578,
    num_samples=NUM_DRAWN,
  ),
  Case(
    name='cifar10',
    arguments={'model': 'resnet20'},
    num_params=269_722,
    num_samples=NUM_DRAWN,
    has_stats=True,
  ),
)

EVERY = {
  '-'.join([case.name, *case.arguments.values()]): case for case in CASES
}

# A deep network takes long to compile, and a second LeNet finds no more.
_SLOW = ('cifar10-resnet20', 'digits-lenet')
every_case = pytest.mark.parametrize(
  'case_id',
  marks.slow_but(EVERY, *(each for each in EVERY if each not in _SLOW)),
)


# For programs that run longer than they compile; see `conftest.py`.
THOROUGH = {
  'xla_backend_optimization_level': 3,
  'xla_llvm_disable_expensive_passes': False,
}


@functools.cache
def make_task(case_id: str) -> tasks.Task:
  """A task with batch 8, made once for all tests."""
  return EVERY[case_id].make_small()


@functools.cache
def make_init(case_id: str) -> Any:
  """`init` of a task, compiled once."""
  return jax.jit(make_task(case_id).init)


def make_initial(case_id: str) -> tuple[tasks.Task, Any, Any]:
  """A task with batch 8, and its params and stats."""
  return make_task(case_id), *make_init(case_id)(jax.random.key(0))


@functools.cache
def make_gradient(case_id: str) -> Any:
  """`((loss, stats), grads)` of (params, stats, batch, key), compiled once."""
  task = make_task(case_id)
  gradient = jax.value_and_grad(task.loss, has_aux=True)
  return jax.jit(gradient)


def find_data() -> str:
  """The folder of the real sets; skips the test if there is none."""
  folder = os.environ.get('JASGD_DATA') or ROOT.parent / 'shared' / 'data'
  if not pathlib.Path(folder).is_dir():
    pytest.skip(f'no data in {folder}; set JASGD_DATA to where it is')
  # Decoded once for all test runs, and not in the user's own cache.
  os.environ.setdefault('JASGD_CACHE', str(ROOT / '.pytest_cache' / 'jasgd'))
  return str(folder)
