"""A user's own model and arrays, and a script that trains it.

python own_model.py WORKDIR NUM_UPDATES
"""

import sys

from flax import linen as nn
import jax
import numpy as np
import optax

import jasgd
from jasgd import protocols
from jasgd import tasks

OPTIMIZER = optax.sgd(0.05, momentum=0.9)
OPTIONS = {'num_workers': 2, 'policy': 'inverse', 'eval_every': 100}


class Net(nn.Module):
  """Two layers, with statistics that are not trained."""

  @nn.compact
  def __call__(self, inputs, train):
    """Logits."""
    hidden = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(inputs))
    return nn.Dense(3)(nn.tanh(hidden))


def make_task(num_samples=400):
  """A task: which of three coordinates is the largest?"""
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(num_samples, 3)).astype(np.float32)
  data = {'image': inputs, 'label': inputs.argmax(-1).astype(np.int32)}
  half = num_samples // 2
  train, test = (
    {name: array[part] for name, array in data.items()}
    for part in (slice(half), slice(half, None))
  )
  return tasks.from_linen(Net(), train, test, batch=8)


def is_replayed(result):
  """Whether a replay has the same bits."""
  again = jasgd.replay(
    make_task(), OPTIMIZER, result.trace, policy='inverse', mode='exact'
  )
  found, replayed = ((each.params, each.stats) for each in (result, again))
  return jax.tree.all(jax.tree.map(np.array_equal, found, replayed))


def main(workdir, num_updates):
  """Trains, and prints how the run ended."""
  result = jasgd.train(
    make_task,
    OPTIMIZER,
    protocols.asynchronous(),
    workdir=workdir,
    num_updates=num_updates,
    min_seconds=(0.01,),
    **OPTIONS,
  )
  print('clock', result.clock)
  print('end', result.end_reason)
  print('same', is_replayed(result))


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
