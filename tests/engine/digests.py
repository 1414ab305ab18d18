"""Digests of the final weights of seeded runs, by the exact engine.

A refactoring must not change a bit of what a trace does to the weights. That a
real run equals its replay does not show it: both could have changed together.
So print the digests of two commits on one machine, and compare:

  NPROC=1 python -m tests.engine.digests

Every protocol and strategy is there, and what is easily broken: groups of
gradients, local steps, rounded messages, statistics, an update that a leave
caused, a restart within a group, several updates by one call.
"""

import functools
import hashlib

from flax import linen
import jax
import numpy as np
import optax

import jasgd
from jasgd import gossip
from jasgd import protocols
from jasgd import simulation
from jasgd import tasks
from jasgd import traces

MOMENTUM = optax.sgd(0.05, 0.9)
ADAM = optax.adam(0.01)
NUM_NODES = 4


class _Normalized(linen.Module):
  """A small network with batch normalisation."""

  @linen.compact
  def __call__(self, images, train=True):
    hidden = linen.Dense(16)(images.reshape(len(images), -1))
    hidden = linen.BatchNorm(use_running_average=not train)(hidden)
    return linen.Dense(10)(linen.relu(hidden))


@functools.cache
def _make_task(name):
  if name == 'mlp':
    return tasks.make_task('digits', model='mlp', batch=16)
  rng = np.random.default_rng(0)
  data = {
    'image': rng.normal(size=(256, 12)).astype(np.float32),
    'label': rng.integers(0, 10, size=256).astype(np.int32),
  }
  return tasks.from_linen(_Normalized(), data, data, batch=8)


def _serve(protocol, num_learners=6, num_gradients=60, header=(), **arguments):
  """A trace of a server."""
  if 'compute' not in arguments:
    arguments['compute'] = simulation.exponential(1.0)
  trace = simulation.simulate(
    protocol,
    num_workers=num_learners,
    num_gradients=num_gradients,
    seed=7,
    **arguments,
  )
  return traces.Trace(trace.records, {**trace.header, **dict(header)})


def _gossip(strategy, header=(), latency=0.1, **arguments):
  """A trace of nodes without a server."""
  trace = simulation.simulate(
    strategy,
    num_workers=NUM_NODES,
    num_gradients=15 * NUM_NODES,
    compute=simulation.exponential(1.0),
    network=simulation.Network(latency=latency),
    seed=7,
    **arguments,
  )
  return traces.Trace(trace.records, {**trace.header, **dict(header)})


def _restart_within_a_group():
  """A server restarts; one gradient of an incomplete group is kept.

  Groups are of three. Record 20 is the last but one of a group. After the
  restart learners compute other minibatches than before: otherwise the void
  record would be made again, and the weights would be those of the same run
  without a restart, so that the digest showed less.
  """
  trace = _serve(protocols.softsync(2))
  records = np.array(trace.records)
  restart = traces.make_records(
    kind=traces.Kind.RESTART,
    incarnation=1,
    stands=18,
    version=records['version'][18],
    read_version=records['version'][18],
  )
  again = records[19:].copy()
  again['incarnation'] = 1
  again['step'] += 1
  return traces.Trace(
    np.concatenate([records[:20], restart, again]), trace.header
  )


def _several_updates_per_call():
  """Three updates by each call, except for the first updates."""
  trace = _serve(protocols.asynchronous(), 8, compute=simulation.constant(1.0))
  records = np.array(trace.records)
  records['group'][9:] = 1 + np.arange(len(records) - 9) // 3
  return traces.Trace(records, trace.header)


# Name -> (task, optimizer, trace, arguments of replay).
RUNS = {
  'asynchronous, adam': lambda: (
    'mlp', ADAM, _serve(protocols.asynchronous()), {'policy': 'inverse'}
  ),
  'asynchronous, bfloat16': lambda: (
    'mlp',
    MOMENTUM,
    _serve(protocols.asynchronous(), header={'wire_dtype': 'bfloat16'}),
    {},
  ),
  'asynchronous, compensated': lambda: (
    'mlp',
    optax.sgd(0.05),
    _serve(protocols.asynchronous()),
    {'per_gradient': jasgd.transforms.delay_compensation(0.1)},
  ),
  'backup': lambda: ('mlp', MOMENTUM, _serve(protocols.backup(2)), {}),
  'constant delay, schedule': lambda: (
    'mlp',
    MOMENTUM,
    _serve(protocols.constant_delay(5), compute=simulation.constant(1.0)),
    {'get_rate': lambda epochs: 1 / (1 + epochs)},
  ),
  'downpour(2, 2)': lambda: (
    'mlp', MOMENTUM, _serve(protocols.downpour(2, 2)), {'local_rate': 0.05}
  ),
  'downpour(2, 4)': lambda: (
    'mlp', MOMENTUM, _serve(protocols.downpour(2, 4)), {'local_rate': 0.05}
  ),
  'downpour(4, 2)': lambda: (
    'normalized', ADAM, _serve(protocols.downpour(4, 2)), {'local_rate': 0.05}
  ),
  'downpour(2, 4), deaths': lambda: (
    'mlp',
    MOMENTUM,
    _serve(protocols.downpour(2, 4), failures=[(4.0, 1, 9.0), (7.0, 2)]),
    {'local_rate': 0.05},
  ),
  'hardsync': lambda: ('mlp', MOMENTUM, _serve(protocols.hardsync()), {}),
  'hardsync, update by a leave': lambda: (
    'normalized',
    MOMENTUM,
    _serve(protocols.hardsync(), failures=[(4.2, 4, 11.0), (8.2, 0)]),
    {},
  ),
  'ramp up': lambda: (
    'mlp',
    MOMENTUM,
    _serve(protocols.ramp_up(protocols.asynchronous(), 20)),
    {},
  ),
  'rennala': lambda: ('mlp', MOMENTUM, _serve(protocols.rennala(3)), {}),
  'restart within a group': lambda: (
    'normalized', MOMENTUM, _restart_within_a_group(), {}
  ),
  'ringmaster': lambda: ('mlp', ADAM, _serve(protocols.ringmaster(3)), {}),
  'several updates per call': lambda: (
    'mlp', MOMENTUM, _several_updates_per_call(), {'policy': 'inverse'}
  ),
  'softsync, statistics': lambda: (
    'normalized', MOMENTUM, _serve(protocols.softsync(2)), {}
  ),
  'ssp': lambda: ('mlp', MOMENTUM, _serve(protocols.ssp(2)), {}),
  'all-reduce': lambda: ('mlp', MOMENTUM, _gossip(gossip.AllReduce()), {}),
  'all-reduce of weights': lambda: (
    'normalized', ADAM, _gossip(gossip.AllReduce(period=3)), {}
  ),
  'elastic': lambda: (
    'normalized', MOMENTUM, _gossip(gossip.Elastic(rate=0.2, period=2)), {}
  ),
  'elastic, easgd': lambda: (
    'normalized', ADAM, _gossip(gossip.Elastic(rate=0.2, order='easgd')), {}
  ),
  'elastic, bfloat16': lambda: (
    'mlp',
    MOMENTUM,
    _gossip(gossip.Elastic(rate=0.2), header={'wire_dtype': 'bfloat16'}),
    {},
  ),
  'pairs': lambda: (
    'normalized', MOMENTUM, _gossip(gossip.Pairs(peers='permutation')), {}
  ),
  'pull': lambda: ('mlp', MOMENTUM, _gossip(gossip.Pull(beta=0.3)), {}),
  'pull, bfloat16, ring': lambda: (
    'normalized',
    ADAM,
    _gossip(
      gossip.Pull(peers=gossip.topologies.ring(NUM_NODES)),
      header={'wire_dtype': 'bfloat16'},
    ),
    {'get_rate': lambda epochs: 1 / (1 + epochs)},
  ),
  'push': lambda: (
    'mlp', ADAM, _gossip(gossip.Push(peers='exponential')), {}
  ),
  'push-sum': lambda: (
    'normalized', MOMENTUM, _gossip(gossip.PushSum(), latency=0.0), {}
  ),
}  # fmt: skip


def compute_digest(name):
  """A digest of all final weights, with those of nodes and of a centre.

  Args:
    name: One of `RUNS`.

  Returns:
    16 hexadecimal digits.
  """
  task, optimizer, trace, arguments = RUNS[name]()
  result = jasgd.replay(
    _make_task(task), optimizer, trace, mode='exact', seed=3, **arguments
  )
  trees = [(result.params, result.stats)]
  if not trace.has_server:
    centre = result.replicas.pop(-1, None)
    nodes = list(result.replicas.values())
    trees = [jax.tree.map(lambda *leaves: np.stack(leaves), *nodes), centre]
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(trees):
    leaf = np.asarray(leaf)
    digest.update(f'{leaf.dtype} {leaf.shape}'.encode() + leaf.tobytes())
  return digest.hexdigest()[:16]


if __name__ == '__main__':
  for each in RUNS:
    print(f'{compute_digest(each)}  {each}', flush=True)
