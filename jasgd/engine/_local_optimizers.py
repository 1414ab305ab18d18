"""Exact replay of learners with their own optimizers, as in DiLoCo.

A learner steps on its own replica with its own optimizer. It pushes the
difference between the weights that it fetched and its present weights, and the
server's optimizer takes the difference as a gradient. The server's weights may
be divided into fragments. A fragment is a replica of some leaves, with its own
version, optimizer state, pushes and fetches.

In the trace, a PUSH or FETCH names the fragment as its `replica`. The worker's
`step` grows by the number of local steps before it. A JOIN resets the state of
the worker's optimizer. The header has `pushes: 'differences'` and, if there are
several fragments, `fragments`: for each replica, from `SERVER` downwards, the
numbers of its leaves in the order of `jax.tree.leaves(params)`.

References:
  Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023;
  `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import tasks
from jasgd.engine import _exact
from jasgd.engine import _layout
from jasgd.engine import _node_functions
from jasgd.engine import _operations
from jasgd.engine import _plan
from jasgd.engine import _server_functions

_Weights = tuple[Any, Any]  # (params, stats)


class LocalCarry(NamedTuple):
  """Complete state of a replay between two updates."""

  weights: tuple[np.ndarray, ...]  # Slots: published versions, in buffers.
  # Replica -> state of this fragment at the server.
  states: dict[int, _server_functions.ServerState]
  learners: tuple[_node_functions.NodeState, ...]


class _Fragment(NamedTuple):
  """A replica of some leaves of the server's weights."""

  leaves: list[int]  # Numbers of the leaves.
  has_stats: bool  # Whether it has the statistics: the first fragment does.
  layout: _layout.Layout
  functions: _server_functions.ServerFunctions


class ExactLocalOptimizers:
  """Executes a plan whose learners push differences, call by call.

  Attributes:
    carry: Complete state after the updates made so far.
  """

  def __init__(
    self,
    task: tasks.Task,
    update: _server_functions.Update,
    local_optimizer: optax.GradientTransformation,
    plan: _plan.Plan,
    *,
    weights: _Weights,
    seed: int,
    wire_dtype: str,
  ) -> None:
    """Starts from weights."""
    assert plan.fragments is not None
    self._task = task
    self._plan = plan
    self._seed = seed
    self._first = weights
    self._treedef = jax.tree.structure(weights[0])
    whole = _layout.make_layout(weights)
    self._local = _node_functions.make_node_functions(
      task, local_optimizer, whole
    )
    self._fragments = {}
    for replica, leaves in plan.fragments.items():
      if leaves is None:
        leaves = list(range(self._treedef.num_leaves))
      has_stats = replica == _plan.SERVER
      tree = self._pick(weights, leaves, has_stats)
      layout = _layout.make_layout(tree, wire_dtype)
      functions = _server_functions.make_server(update, layout)
      self._fragments[replica] = _Fragment(leaves, has_stats, layout, functions)
    _check_partition(self._fragments, self._treedef.num_leaves)
    learner = self._local.start(weights)
    self.carry = LocalCarry(
      # Slot 0 holds the first version of all replicas; see `_read_slot`.
      weights=(np.zeros(0, np.uint8),) * plan.num_slots,
      states={
        replica: each.functions.init(
          # A copy: the state is donated, and the caller keeps the weights.
          *jax.tree.map(
            jnp.copy, self._pick(weights, each.leaves, each.has_stats)
          )
        )
        for replica, each in self._fragments.items()
      },
      learners=tuple(
        jax.tree.map(jnp.copy, learner) for _ in range(plan.num_locals)
      ),
    )

  def restore(self, carry: LocalCarry) -> None:
    """Continues from a saved carry."""
    self.carry = carry

  @property
  def weights(self) -> _Weights:
    """(params, stats) of the server, all fragments together."""
    params, stats = self._first
    leaves = jax.tree.leaves(params)
    for replica, each in self._fragments.items():
      state = self.carry.states[replica]
      for number in each.leaves:
        leaves[number] = state.params[str(number)]
      if each.has_stats:
        stats = state.stats
    return jax.tree.unflatten(self._treedef, leaves), stats

  @property
  def locals(self) -> dict[int, _Weights]:
    """The (params, stats) of the learners' own replicas."""
    return {
      learner: (node.params, node.stats)
      for learner, node in enumerate(self.carry.learners)
    }

  @property
  def opt_states(self) -> dict[int, Any]:
    """States of the server's fragments and of the learners' optimizers."""
    states = [node.opt_state for node in self.carry.learners]
    return {**self.carry.states, **dict(enumerate(states))}

  def advance(self, start: int, stop: int) -> dict[str, np.ndarray]:
    """Makes the updates `start` to `stop`; see `ExactServer.advance`."""
    first, last = self._plan.step_ends[[start, stop]].tolist()
    return _exact.make_columns(
      [self._execute(index) for index in range(first, last)]
    )

  def _execute(self, index: int) -> tuple[Any, Any, Any]:
    """Makes local steps and a push or fetch; returns loss, gap and factor."""
    steps = self._plan.steps
    worker, replica = int(steps.worker[index]), int(steps.replica[index])
    learner, loss = self._step_locally(index, self.carry.learners[worker])
    fragment = self._fragments[replica]
    published = self._read_slot(int(steps.source[index]), fragment)
    if steps.kind[index] == _operations.FETCH:
      if steps.is_reset[index]:  # The learner has joined: a new optimizer.
        learner = self._local.start(self._first)
      learner = self._fetch(learner, fragment, published)
      result = (np.nan, np.nan, np.nan)
    else:
      gap, factor = self._push(index, learner, fragment, published)
      result = (loss, gap, factor)
    learners = list(self.carry.learners)
    learners[worker] = learner
    self.carry = self.carry._replace(learners=tuple(learners))
    return result

  def _step_locally(
    self, index: int, learner: _node_functions.NodeState
  ) -> tuple[_node_functions.NodeState, Any]:
    """Makes the steps up to a push or a fetch; returns their mean loss too."""
    steps, task = self._plan.steps, self._task
    worker, first = int(steps.worker[index]), int(steps.step[index])
    rate = float(steps.local_rate[index]) if self._plan.has_rates else None
    losses = []
    for step in range(first, first + int(steps.num_steps[index])):
      minibatch = _exact.locate_minibatch(
        task, task.data, self._seed, worker, step
      )
      learner, loss = self._local.step(learner, *minibatch, rate)
      losses.append(loss)
    return learner, np.mean(jax.device_get(losses)) if losses else np.nan

  def _fetch(
    self,
    learner: _node_functions.NodeState,
    fragment: _Fragment,
    published: np.ndarray,
  ) -> _node_functions.NodeState:
    """Replaces the leaves of a fragment in the learner's replica."""
    params, stats = fragment.layout.unpack(published)
    leaves = jax.tree.leaves(learner.params)
    for number in fragment.leaves:
      leaves[number] = jnp.asarray(params[str(number)])
    if fragment.has_stats:
      learner = learner._replace(stats=jax.tree.map(jnp.asarray, stats))
    return learner._replace(params=jax.tree.unflatten(self._treedef, leaves))

  def _push(
    self,
    index: int,
    learner: _node_functions.NodeState,
    fragment: _Fragment,
    published: np.ndarray,
  ) -> tuple[Any, Any]:
    """Gives the server a difference; returns gap and factor."""
    steps, layout = self._plan.steps, fragment.layout
    functions = fragment.functions
    replica = int(steps.replica[index])
    stale, _ = layout.unpack(published)
    own, stats = self._pick(
      (learner.params, learner.stats), fragment.leaves, fragment.has_stats
    )
    message = _layout.pack_buffer(layout, (_subtract(stale, own), stats))
    state = self.carry.states[replica]
    staleness = int(steps.staleness[index])
    clock = state.aggregation.server_clock
    # Before `apply`, which donates the state.
    gap = functions.measure_gap(state, layout.view(published))
    factor = functions.get_factor(staleness, clock)
    arguments = (layout.view(message), staleness, layout.view(published))
    if steps.kind[index] == _operations.STEP:
      rate = float(steps.rate[index]) if self._plan.has_rates else None
      is_single = bool(np.asarray(state.aggregation.group_size) == 0)
      state = functions.apply(
        state,
        *arguments,
        rate,
        int(steps.num_learners[index]),
        is_single=is_single,
      )
      self._publish(index, fragment, state)
    else:
      state = functions.accumulate(state, *arguments)
    jax.block_until_ready(state)  # The call reads the message in place.
    self.carry.states[replica] = state
    return gap, factor

  def _publish(
    self,
    index: int,
    fragment: _Fragment,
    state: _server_functions.ServerState,
  ) -> None:
    """Stores a new version in its slot."""
    # A copy: the next call donates the state.
    buffer = _layout.pack_buffer(fragment.layout, (state.params, state.stats))
    weights = list(self.carry.weights)
    weights[int(self._plan.steps.write[index])] = buffer
    self.carry = self.carry._replace(weights=tuple(weights))

  def _read_slot(self, slot: int, fragment: _Fragment) -> np.ndarray:
    """A published version of a fragment, in a buffer."""
    buffer = self.carry.weights[slot]
    if not len(buffer):  # Slot 0: the first weights of every fragment.
      first = self._pick(self._first, fragment.leaves, fragment.has_stats)
      buffer = _layout.pack_buffer(fragment.layout, first)
    return buffer

  def _pick(
    self, weights: _Weights, leaves: list[int], has_stats: bool
  ) -> _Weights:
    """The (params, stats) of a fragment; its params are a dict of leaves."""
    params, stats = weights
    all_leaves = jax.tree.leaves(params)
    picked = {str(number): all_leaves[number] for number in leaves}
    return picked, stats if has_stats else {}


def _check_partition(fragments: dict[int, _Fragment], num_leaves: int) -> None:
  """Raises a ValueError unless every leaf is in exactly one fragment."""
  found = sorted(n for each in fragments.values() for n in each.leaves)
  if found != list(range(num_leaves)):
    raise ValueError(
      "The header's fragments must hold each of the leaves 0 to "
      f'{num_leaves - 1} once, got {found}.'
    )


@jax.jit
def _subtract(stale: Any, own: Any) -> Any:
  """The difference that the server's optimizer takes as a gradient."""
  return jax.tree.map(jnp.subtract, stale, own)
