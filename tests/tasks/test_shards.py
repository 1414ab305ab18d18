"""Shards: every sample has one owner, also with newcomers."""

import functools
import itertools

import jax
import numpy as np
import pytest
from scipy import stats

from jasgd import tasks

LABELS = np.arange(1003) % 7


def make_task(labels=LABELS, num_samples=1003, **options):
  """A task whose images are the numbers of the samples."""
  train = {'image': np.arange(num_samples)}
  if labels is not None:
    train['label'] = labels
  return tasks.from_functions(
    lambda key: ({}, {}),
    lambda params, stats, inputs, key: (inputs, stats),
    train,
    **options,
  )


@functools.cache
def make_draw(shards, batch, seed):
  """The data for four learners, and draws for many steps, compiled."""
  task = make_task(shards=shards, batch=batch, num_learners=4, seed=seed)
  draw = lambda *arguments: task.batches(*arguments)['image']
  return task.data, jax.jit(jax.vmap(draw, (None, None, None, 0)))


def draw_epoch(shards, learner, *, batch=10, seed=0, epoch=0):
  """The samples of all batches of one epoch of a learner."""
  data, draw = make_draw(shards, batch, seed)
  size = len(LABELS)
  if shards == 'shards':
    size = len(range(learner % 4, size, 4))
  elif shards == 'dirichlet':
    size = int(data['shards']['sizes'][learner % 4])
  steps = size // batch
  # A constant number of steps, so that it is compiled once.
  rows = draw(data, 3, learner, epoch * steps + np.arange(len(LABELS) // batch))
  return np.asarray(rows)[:steps].ravel().tolist()


@pytest.mark.parametrize('shards', tasks.SHARDS)
def test_an_epoch_is_without_repeats(shards):
  for learner in (0, 3, 5):
    samples = draw_epoch(shards, learner)
    assert len(set(samples)) == len(samples)
    assert set(samples) <= set(range(len(LABELS)))


@pytest.mark.parametrize('shards', ['shards', 'dirichlet'])
def test_shards_divide_the_set(shards):
  """With batches of one no sample is left out, and each has one owner."""
  parts = [draw_epoch(shards, learner, batch=1) for learner in range(4)]
  assert sorted(itertools.chain(*parts)) == list(range(len(LABELS)))
  again = [
    draw_epoch(shards, learner, batch=1, epoch=1) for learner in range(4)
  ]
  for part, other in zip(parts, again, strict=True):
    assert sorted(part) == sorted(other)
    assert part != other
  # A newcomer shares a shard, in a different order.
  newcomer = draw_epoch(shards, 6, batch=1)
  assert sorted(newcomer) == sorted(parts[2])
  assert newcomer != parts[2]
  # Another seed of the task makes another division.
  assert sorted(draw_epoch(shards, 0, batch=1, seed=1)) != sorted(parts[0])


def test_whole_gives_every_learner_all_samples():
  first, second = (draw_epoch('whole', learner, batch=1) for learner in (0, 1))
  assert sorted(first) == sorted(second) == list(range(len(LABELS)))
  assert first != second


def test_equal_shards_are_equal_in_size_and_labels():
  parts = [draw_epoch('shards', learner, batch=1) for learner in range(4)]
  assert sorted(map(len, parts)) == [250, 251, 251, 251]
  counts = [np.bincount(LABELS[part], minlength=7) for part in parts]
  assert stats.chi2_contingency(counts).pvalue > 1e-3


@pytest.mark.parametrize('alpha', [0.05, 1.0, 1000.0])
@pytest.mark.parametrize('num_shards', [1, 2, 10, 100])
def test_dirichlet_is_a_partition_with_no_small_shard(alpha, num_shards):
  parts = tasks.draw_dirichlet_shards(
    LABELS, num_shards, alpha=alpha, min_size=10, seed=5
  )
  assert len(parts) == num_shards
  assert min(map(len, parts)) >= 10
  assert {part.dtype for part in parts} == {np.dtype(np.int32)}
  assert sorted(np.concatenate(parts)) == list(range(len(LABELS)))


def test_dirichlet_proportions_have_the_right_variance():
  """A share of a label is Beta(alpha, (n - 1) alpha) distributed."""
  num_shards, alpha = 5, 0.5
  labels = np.zeros(10_000, int)
  shares = np.array(
    [
      [len(part) / len(labels) for part in parts]
      for parts in (
        tasks.draw_dirichlet_shards(
          labels, num_shards, alpha=alpha, min_size=0, seed=seed
        )
        for seed in range(300)
      )
    ]
  )
  np.testing.assert_allclose(shares.mean(axis=0), 1 / num_shards, atol=0.06)
  beta = stats.beta(alpha, (num_shards - 1) * alpha)
  for column in shares.T:
    assert stats.kstest(column, beta.cdf).pvalue > 1e-4


def test_large_alpha_makes_shards_alike_and_small_alpha_does_not():
  def spread(alpha):
    parts = tasks.draw_dirichlet_shards(LABELS, 4, alpha=alpha)
    counts = np.array([np.bincount(LABELS[p], minlength=7) for p in parts])
    return (counts / counts.sum(axis=0)).std(axis=0).mean()

  assert spread(1e6) < 0.01 < 0.1 < spread(0.1)


def test_dirichlet_depends_on_the_seed_alone():
  def draw(seed):
    return np.concatenate(tasks.draw_dirichlet_shards(LABELS, 4, seed=seed))

  np.testing.assert_array_equal(draw(1), draw(1))
  assert (draw(1) != draw(2)).any()


def test_a_task_has_the_table_in_its_data():
  task = tasks.make_task(
    'digits', batch=16, shards='dirichlet', num_learners=3, alpha=0.2
  )
  table = task.data['shards']
  owned = np.asarray(table['samples'])[: int(table['sizes'][0])]
  labels = np.asarray(task.data['examples']['label'])
  batches = jax.jit(task.batches)
  drawn = [batches(task.data, 0, 0, step)['label'] for step in range(20)]
  counts = np.bincount(np.concatenate(drawn), minlength=10)
  assert set(np.flatnonzero(counts)) <= set(labels[owned])
  assert set(labels[owned]) <= set(range(10))
  assert 'shards' in task.data
  assert not tasks.make_task('digits', batch=16).data['shards']


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'shards': 'parts'}, "Unknown shards 'parts'. Known: dirichlet, shards"),
    (
      {'num_learners': 0},
      'num_learners must be a whole number of at least 1, got 0',
    ),
    ({'batch': 0}, 'batch must be a whole number of at least 1, got 0'),
    ({'shards': 'whole', 'batch': 101}, 'batch=101 where 100 samples among 1'),
    (
      {'shards': 'shards', 'num_learners': 7, 'batch': 15},
      'batch=15 where 100 samples among 7 make 14',
    ),
    (
      {'shards': 'dirichlet', 'num_learners': 7, 'batch': 15},
      'batch=15 where 100 samples among 7 make 14',
    ),
    ({'shards': 'dirichlet'}, "shards='dirichlet' needs labels, got None"),
    (
      {'shards': 'dirichlet', 'labels': LABELS[:100], 'alpha': 0.0},
      'alpha must be finite and above 0, got 0.0',
    ),
    (
      {'shards': 'dirichlet', 'labels': LABELS[:100], 'seed': -1},
      'seed must be a whole number of at least 0, got -1',
    ),
  ],
)
def test_refuses(options, message):
  usual = {'shards': 'shards', 'num_samples': 100, 'batch': 10, 'labels': None}
  with pytest.raises(ValueError, match=message):
    make_task(**usual | options)
