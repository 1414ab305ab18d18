"""A replay of nodes under way: chunk by chunk, to be saved and resumed."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import gossip
from jasgd import tasks
from jasgd import traces
from jasgd.engine import _memory
from jasgd.engine import _node_exact
from jasgd.engine import _node_fast
from jasgd.engine import _node_plan
from jasgd.engine import _node_step
from jasgd.engine import _run


class NodeReplay:
  """A replay of nodes under way, chunk by chunk, which can be saved.

  All nodes, and the centre, start from the same weights.

  Attributes:
    plan: What is to be computed.
    clock: Steps of all nodes that were made, with all mixes up to the next one.
    is_diverged: Whether a loss was not finite.

  Examples:
    >>> import optax
    >>> from jasgd import engine, gossip, simulation, tasks
    >>> task = tasks.make_task('quadratic', batch=1)
    >>> trace = simulation.simulate_nodes(
    ...     gossip.Pull(), num_nodes=4, num_steps=25)
    >>> plan = engine.make_node_plan(
    ...     trace, num_samples=task.num_samples, batch=task.batch)
    >>> run = engine.NodeReplay(task, optax.sgd(0.1), plan, chunk=30)
    >>> while not run.is_done:
    ...   history = run.advance()
    ...   print(run.clock, len(history['loss']))
    30 30
    60 30
    90 30
    100 10
  """

  def __init__(
    self,
    task: tasks.Task,
    optimizer: optax.GradientTransformation,
    plan: _node_plan.NodePlan,
    *,
    seed: int = 0,
    mode: str = 'fast',
    chunk: int = 1000,
    init: tuple[Any, Any] | None = None,
  ) -> None:
    """Starts at clock 0.

    Args:
      task: What is learned; node i computes what learner i would.
      optimizer: Any optax optimizer; every node has a state of its own.
      plan: What `make_node_plan` gave.
      seed: Of all that is random.
      mode: 'fast' or 'exact', as in `replay`.
      chunk: Steps of all nodes per `advance`.
      init: The first (params, stats); None: those of the seed.

    Raises:
      ValueError: if the mode is not known, or does not go with the task, or the
        weights have no room.
    """
    if mode not in _run.MODES:
      raise ValueError(
        f'mode must be one of {", ".join(_run.MODES)}, got {mode!r}.'
      )
    self._task = task
    self.plan = plan
    self.clock = 0
    self.is_diverged = False
    self._chunk = chunk
    weights = init or task.init(jax.random.key(seed, impl='threefry2x32'))
    weights = jax.tree.map(jnp.asarray, weights)
    work = _node_step.make_node_work(task, optimizer)
    _memory.check_memory(plan.num_slots, weights)
    _memory.check_memory(plan.num_states, jax.eval_shape(work.init, weights[0]))
    self._engine: _node_exact.ExactNodes | _node_fast.FastNodes
    if mode == 'exact':
      self._engine = _node_exact.ExactNodes(
        task, optimizer, plan, weights=weights, seed=seed
      )
    else:
      self._engine = _node_fast.FastNodes(
        task, work, plan, weights=weights, seed=seed, chunk=chunk
      )

  @property
  def carry(self) -> Any:
    """All that is needed, with `clock`, to go on: a tree of arrays."""
    return self._engine.carry

  @property
  def is_done(self) -> bool:
    """Whether all steps were made, or there is no use in making more."""
    return self.clock >= self.plan.num_steps or self.is_diverged

  def restore(self, clock: int, carry: Any) -> None:
    """Goes on from a `carry` that was saved at `clock`."""
    self.clock = clock
    self._engine.restore(carry)

  def advance(self) -> dict[str, np.ndarray]:
    """Makes the steps of one chunk, and the mixes in between.

    Returns:
      An entry for each step: `clock` (after it), `epoch`, `time`, `node` and
      `loss`. Of a run that diverges it ends with the first loss that is not
      finite.
    """
    start = self.clock
    # Chunks end at multiples, so that a resumed run has the same ones.
    stop = min((start // self._chunk + 1) * self._chunk, self.plan.num_steps)
    loss = self._engine.advance(start, stop)
    self.clock = stop
    is_bad = ~np.isfinite(loss)
    end = stop - start
    if np.any(is_bad):
      self.is_diverged = True
      end = int(np.argmax(is_bad)) + 1
    chosen = slice(start, start + end)
    return {
      'clock': np.arange(start + 1, start + end + 1),
      'epoch': self.plan.samples[chosen] / self._task.num_samples,
      'time': self.plan.time[chosen],
      'node': self.plan.steps.node[chosen],
      'loss': loss[:end],
    }

  def evaluate(self) -> dict[str, Any]:
    """The task's metrics on its test data, at the mean of the nodes, now.

    Returns:
      `clock`, `epoch`, `time`, `consensus` (the root of the mean squared
      distance of the nodes from their mean) and the metrics. If there is a
      centre, also those of the centre, as `centre_loss` and so on, and the
      means of the nodes' own, as `local_loss` and so on.
    """
    last = max(self.clock - 1, 0)
    nodes = self.nodes
    params, stats = _average(nodes, self._shares)
    row = {
      'clock': self.clock,
      'epoch': self.clock * self._task.batch / self._task.num_samples,
      'time': float(self.plan.time[last]),
      'consensus': float(_measure_consensus(nodes[0])),
    }
    if self._task.test_data is None:
      return row
    metrics = tasks.evaluate(self._task, params, stats)
    row |= {name: float(value) for name, value in metrics.items()}
    if self.centre is not None:
      metrics = tasks.evaluate(self._task, *self.centre)
      row |= {f'centre_{name}': float(each) for name, each in metrics.items()}
      metrics = tasks.evaluate_all(
        self._task,
        (
          jax.tree.map(lambda leaf, node=node: leaf[node], nodes)
          for node in range(self.plan.num_nodes)
        ),
      )
      row |= {f'local_{name}': each for name, each in metrics.items()}
    return row

  # --- Weights, after the steps made so far.

  @property
  def nodes(self) -> tuple[Any, Any]:
    """(params, stats) of all nodes, with a leading axis."""
    return self._engine.read(self._held.slot[: self.plan.num_nodes])

  @property
  def opt_states(self) -> Any:
    """What the nodes' optimizers keep, with a leading axis."""
    return self._engine.read_states(self._held.state[: self.plan.num_nodes])

  @property
  def mean(self) -> tuple[Any, Any]:
    """(params, stats): the mean of all nodes; by their masses, if any."""
    return _average(self.nodes, self._shares)

  @property
  def centre(self) -> tuple[Any, Any] | None:
    """(params, stats) of the centre, if there is one."""
    if not self.plan.has_centre:
      return None
    rows = self._engine.read(self._held.slot[self.plan.num_nodes :])
    return jax.tree.map(lambda leaf: leaf[0], rows)

  @property
  def versions(self) -> dict[int, int]:
    """How often the weights of each node, and of `CENTRE`, have changed."""
    versions = dict(enumerate(self._held.version.tolist()))
    if self.plan.has_centre:
      versions[traces.CENTRE] = versions.pop(self.plan.num_nodes)
    return versions

  @property
  def _shares(self) -> np.ndarray | None:
    return self.plan.find_shares(self.clock)

  @property
  def _held(self) -> _node_plan.Held:
    return self.plan.locate(self.clock)


@jax.jit
def _average(
  nodes: tuple[Any, Any], shares: np.ndarray | None
) -> tuple[Any, Any]:
  """The mean of nodes, by shares or plain."""

  def average(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      return leaf[0]  # Nobody mixes these.
    if shares is None:
      return leaf.mean(axis=0)
    wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    weighted = jnp.tensordot(jnp.asarray(shares, wide.dtype), wide, axes=1)
    return weighted.astype(leaf.dtype)

  return jax.tree.map(average, nodes)


@jax.jit
def _measure_consensus(params: Any) -> jax.Array:
  """How far nodes are from their plain mean, the nearest to all of them."""
  measure = functools.partial(gossip.consensus_distance, axis_name='nodes')
  return jax.vmap(measure, axis_name='nodes')(params)[0]
