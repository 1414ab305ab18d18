"""Sets of tensorflow-datasets: read once, cached, or missing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow_datasets as tfds

from jasgd import tasks
from jasgd.tasks import _cifar10
from jasgd.tasks import _datasets
from jasgd.tasks import _mnist
from tests.tasks import cases

IMAGES = np.arange(25 * 4 * 3).astype(np.uint8).reshape(25, 2, 2, 3)
EXAMPLES = [
  {'id': b'x', 'image': image, 'label': index % 10}
  for index, image in enumerate(IMAGES)
]


@pytest.fixture
def reads(monkeypatch, tmp_path):
  """Requests to a fake tensorflow-datasets with one small set."""
  calls = []

  def data_source(name, **arguments):
    calls.append((name, arguments))
    return cases.Source(EXAMPLES)

  monkeypatch.setattr(tfds, 'data_source', data_source)
  monkeypatch.setattr(_datasets, '_BLOCK', 10)  # The last block is smaller.
  monkeypatch.setenv('JASGD_CACHE', str(tmp_path / 'cache'))
  return calls


def test_a_split_is_read_once(reads, tmp_path):
  for _ in range(2):
    split = _datasets.load_split('small', '1.2.3', 'train')
    np.testing.assert_array_equal(split['image'], IMAGES)
    np.testing.assert_array_equal(split['label'], np.arange(25) % 10)
    assert split['image'].dtype == np.uint8
    assert split['label'].dtype == np.int32
    assert isinstance(split['image'], np.memmap)
  (call,) = reads
  assert call == (
    'small:1.2.3',
    {'split': 'train', 'data_dir': None, 'download': True},
  )
  files = [path.name for path in (tmp_path / 'cache').iterdir()]
  assert files == ['small-1.2.3-train.npy']


def test_splits_and_versions_have_files_of_their_own(reads):
  for version, split in (('1', 'train'), ('1', 'test'), ('2', 'train')):
    _datasets.load_split('small', version, split)
  assert len(reads) == 3


def test_a_file_that_could_not_be_written_is_not_there(
  reads, tmp_path, monkeypatch
):
  def save(file, records):
    file.write(b'half')
    raise OSError('disk full')

  monkeypatch.setattr(np, 'save', save)
  with pytest.raises(OSError, match='disk full'):
    _datasets.load_split('small', '1', 'train')
  assert not list((tmp_path / 'cache').iterdir())


def test_the_default_cache_is_in_the_home_folder(monkeypatch, tmp_path):
  monkeypatch.delenv('JASGD_CACHE', raising=False)
  monkeypatch.setenv('HOME', str(tmp_path))
  assert _datasets.find_cache() == tmp_path / '.cache' / 'jasgd'


def test_a_missing_set_says_where_and_how_to_fetch_it(monkeypatch, tmp_path):
  monkeypatch.setenv('JASGD_CACHE', str(tmp_path / 'cache'))
  with pytest.raises(tasks.MissingDataError) as caught:
    tasks.make_task('mnist', batch=8, data_dir=str(tmp_path))
  assert isinstance(caught.value, FileNotFoundError)
  message = str(caught.value)
  assert str(tmp_path / 'mnist' / _mnist.VERSION) in message
  assert (
    'python -c "import tensorflow_datasets as tfds; '
    f"tfds.data_source('mnist:{_mnist.VERSION}', data_dir='{tmp_path}')\""
  ) in message


def test_a_failed_download_says_how_to_fetch_it(monkeypatch, tmp_path):
  def data_source(name, **arguments):
    raise ConnectionError('no network')

  monkeypatch.setattr(tfds, 'data_source', data_source)
  monkeypatch.setenv('JASGD_CACHE', str(tmp_path))
  with pytest.raises(
    tasks.MissingDataError, match='~/tensorflow_datasets'
  ) as caught:
    tasks.make_task('cifar10', batch=8)
  assert f"tfds.data_source('cifar10:{_cifar10.VERSION}')" in str(caught.value)
  assert isinstance(caught.value.__cause__, ConnectionError)


def test_pixels_of_cifar10():
  """Inputs have mean 0 at every pixel and variance 1, whatever the parts."""
  images = np.random.default_rng(0).integers(0, 256, (1500, 4, 4, 3))
  images = images.astype(np.uint8)
  mean, deviation = _cifar10.measure_pixels(images)
  np.testing.assert_allclose(mean, images.mean(axis=0))
  np.testing.assert_allclose(deviation, (images - mean).std())
  prepare = _cifar10.make_standardise(mean, deviation)
  inputs = np.asarray(prepare(jnp.asarray(images)))
  assert inputs.dtype == np.float32
  np.testing.assert_allclose(inputs.mean(axis=0), 0, atol=1e-5)
  np.testing.assert_allclose(inputs.var(), 1, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('case_id', ['mnist-lenet', 'cifar10-a1'])
def test_real_data(case_id):
  """The sizes of classes are the known ones, and images are bytes."""
  task = cases.EVERY[case_id].make()
  labels = np.asarray(task.data['examples']['label'])
  counts = np.bincount(labels)
  known = {
    'mnist': [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    'cifar10': [5000] * 10,
  }
  assert counts.tolist() == known[task.name]
  assert task.data['examples']['image'].dtype == jnp.uint8
  assert task.test_data['image'].shape[0] == 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'options', 'num_steps', 'rate', 'at_least'),
  [
    ('mnist', {'batch': 64}, 450, 0.05, 0.97),
    ('cifar10', {'batch': 64, 'augment': 'flip_crop'}, 200, 0.01, 0.4),
  ],
)
def test_real_data_is_learned(name, options, num_steps, rate, at_least):
  task = tasks.make_task(name, data_dir=cases.find_data(), **options)
  params, stats = task.init(jax.random.key(0))

  def step(params, momentum, data, index):
    batch = task.batches(data, 0, 0, index)
    key = tasks.fold_key(0, 0, index)
    grads, _ = jax.grad(task.loss, has_aux=True)(params, stats, batch, key)
    momentum = jax.tree.map(lambda a, b: 0.9 * a + b, momentum, grads)
    params = jax.tree.map(lambda a, b: a - rate * b, params, momentum)
    return params, momentum

  # Not a scan, in which convolutions are slow on a CPU.
  step = jax.jit(step, compiler_options=cases.THOROUGH)
  momentum = jax.tree.map(jnp.zeros_like, params)
  for index in range(num_steps):
    params, momentum = step(params, momentum, task.data, index)
  part = jax.tree.map(lambda leaf: leaf[:2000], task.test_data)
  small = dataclasses.replace(task, test_data=part)
  assert tasks.evaluate(small, params, stats)['accuracy'] > at_least
