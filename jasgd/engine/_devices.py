"""Training on devices: all nodes in one program, one device per node."""

from collections.abc import Callable
from typing import Any, cast, NamedTuple

import jax
from jax import lax
from jax import sharding
import jax.numpy as jnp
import numpy as np
import optax

from jasgd import gossip
from jasgd import protocols
from jasgd import tasks
from jasgd.engine import _device_runners
from jasgd.engine import _gradient
from jasgd.engine import _node_functions
from jasgd.engine import _plan

_PEERS = 0x70656572  # Keeps the draws of peers apart from other uses of a seed.


class DeviceArrays(NamedTuple):
  """Arrays of a node on its device; of all nodes with a leading axis."""

  node: _node_functions.NodeState
  mass: Any  # shape=(), float32; None except for push-sum.
  # (params, stats), the same on all nodes; None except for elastic averaging.
  centre: Any


class DeviceState(NamedTuple):
  """State of all nodes, on their devices."""

  arrays: DeviceArrays  # With a leading axis of nodes.
  step: int  # Steps made so far.


class DeviceProgram:
  """Trains all nodes at the same time; made by `make_device_program`.

  `step` donates the state that it is given.

  Attributes:
    num_nodes: Number of nodes in all processes.
    local_nodes: Numbers of the nodes of this process, ascending.
  """

  def __init__(
    self,
    task: tasks.Task,
    strategy: gossip.PeerStrategy,
    work: _node_functions.NodeWork,
    runner: _device_runners.Runner,
    *,
    seed: int,
    get_rate: Callable[[float], float] | None,
    init: tuple[Any, Any] | None,
    dtype: Any,
  ) -> None:
    """See `make_device_program`; nothing is compiled yet."""
    self.num_nodes = runner.num_nodes
    self.local_nodes = runner.local_nodes
    self._task = task
    self._runner = runner
    self._seed = seed
    self._get_rate = get_rate
    self._init = init
    self._data, data_has_rows = runner.place(task.data)
    axis = runner.axis_name
    self._start = runner.compile(_make_start(work, strategy), (False,))
    self._step = runner.compile(
      _make_step(work, strategy, axis, dtype),
      (True, data_has_rows, False, False, False),
      donates=True,
    )
    self._average = runner.compile(
      lambda arrays: _average(arrays, axis), (True,)
    )
    self._measure = runner.compile(
      lambda arrays: gossip.consensus_distance(_get_weights(arrays)[0], axis),
      (True,),
    )
    # On a CPU, devices share a few threads, and about 30 steps in flight can
    # deadlock. Therefore no step begins before the last but one has ended.
    self._has_few_threads = (
      runner.num_devices > 1 and jax.default_backend() == 'cpu'
    )
    self._in_flight: list[jax.Array] = []  # Losses of the last two steps.

  def init(self) -> DeviceState:
    """The state at the start: all nodes and the centre have equal weights."""
    key = jax.random.key(self._seed, impl='threefry2x32')
    weights = self._init or self._task.init(key)
    # Numpy arrays: equal in all processes, and not on one device.
    weights = jax.tree.map(np.asarray, weights)
    return DeviceState(self._start(weights), 0)

  def step(self, state: DeviceState) -> tuple[DeviceState, jax.Array]:
    """Starts one step of every node, and a mix if it is due.

    It returns before the step has ended.

    Args:
      state: State of all nodes; it is donated.

    Returns:
      The new state, and the losses of all nodes on their minibatches, an array
      of shape [num_nodes], of which each process has a part.
    """
    if len(self._in_flight) > 1:
      jax.block_until_ready(self._in_flight.pop(0))
    arrays, losses = self._step(
      state.arrays,
      self._data,
      np.int32(self._seed),
      np.int32(state.step),
      self._find_rate(state.step),
    )
    if self._has_few_threads:
      self._in_flight.append(losses)
    return DeviceState(arrays, state.step + 1), losses

  def mean(self, state: DeviceState) -> tuple[Any, Any]:
    """The mean of all nodes' (params, stats), for evaluation.

    With push-sum it is the sum of all weights over the sum of all masses.
    """
    return self._runner.read_one(self._average(state.arrays))

  def consensus(self, state: DeviceState) -> float:
    """Distance of the nodes from their mean: `gossip.consensus_distance`."""
    return float(self._runner.read_one(self._measure(state.arrays)))

  def centre(self, state: DeviceState) -> tuple[Any, Any]:
    """The (params, stats) of the centre; a ValueError if there is none."""
    if state.arrays.centre is None:
      raise ValueError('Only elastic averaging has a centre.')
    return self._runner.read_one(state.arrays.centre)

  def fetch(self, state: DeviceState) -> DeviceArrays:
    """Copies this process's rows of a state to numpy arrays."""
    return self._runner.read_rows(state.arrays)

  def place(self, arrays: DeviceArrays, step: int) -> DeviceState:
    """Puts arrays from `fetch` back on the devices; the inverse of `fetch`."""
    return DeviceState(self._runner.put_rows(arrays), int(step))

  def _find_rate(self, step: int) -> Any:
    """Factor of the rate of a step; None if there is no schedule."""
    if self._get_rate is None:
      return None
    epochs = _plan.count_epochs(
      step,
      num_nodes=self.num_nodes,
      batch=self._task.batch,
      num_samples=self._task.num_samples,
    )
    return np.float32(self._get_rate(epochs))


def make_device_program(
  task: tasks.Task,
  optimizer: optax.GradientTransformation,
  strategy: gossip.PeerStrategy,
  *,
  num_nodes: int,
  runner: str = 'pmap',
  seed: int = 0,
  get_rate: Callable[[float], float] | None = None,
  init: tuple[Any, Any] | None = None,
  mesh: sharding.Mesh | None = None,
  dtype: Any = None,
) -> DeviceProgram:
  r"""Makes the program that trains all nodes at the same time.

  ===========================  =================================================
  strategy                     one step of every node
  ===========================  =================================================
  `Pull`, `Push`, `Pairs`      :math:`x \leftarrow x + u(\nabla f(x))`, then mix
  `PushSum`                    the same with :math:`\nabla f(x / w)`: SGP
  `AllReduce()`                the mean of all gradients, then the update
  `AllReduce(period)`          updates, and now and then the mean: local SGD
  `Elastic(order='a3')`        update, then the exchange with the centre
  `Elastic(order='easgd')`     gradient, exchange, and then its update
  ===========================  =================================================

  u is the optimizer's update for a gradient. Node i has the minibatches and
  random keys of learner i. The state of an optimizer stays with its node;
  statistics such as those of batch normalisation are mixed like weights. A mix
  is due after every `strategy.period` steps. Step and mix are one compiled
  program, also with random peers. It donates the arrays that it changes.

  ===============  ============================================================
  runner           devices of the nodes
  ===============  ============================================================
  `'pmap'`         the devices of this process, for training on one host
  `'shard_map'`    the devices of a mesh, also of many processes and hosts,
                   after `jax.distributed.initialize`; all processes make the
                   same program and call the same methods in the same order
  `'vmap'`         one device for any number of nodes
  ===============  ============================================================

  Args:
    task: Task to learn; it must not be streamed.
    optimizer: Any optax optimizer.
    strategy: Strategy by which the nodes mix.
    num_nodes: Number of nodes in all processes.
    runner: Name of the runner, from the table.
    seed: Seed of minibatches, peers, and the first weights.
    get_rate: Function from the epochs of all nodes to a factor of the rate, as
      in `replay`.
    init: First (params, stats). None: the task draws them with the seed.
    mesh: Mesh with one axis, of any name, for `'shard_map'`. None: all devices.
    dtype: Dtype of messages, as in `gossip.mix`. None: that of the arrays.
      Where gradients are averaged, statistics keep their dtype. Not for
      `Elastic`.

  Returns:
    The program.

  Raises:
    ValueError: if `check_devices` refuses the arguments, the task is streamed,
      or the seed is not from 0 to 2^31 - 1.

  Examples:
    >>> import optax
    >>> from jasgd import engine, gossip, tasks
    >>> program = engine.make_device_program(
    ...   tasks.make_task('quadratic', batch=1),
    ...   optax.sgd(0.1),
    ...   gossip.Pull(peers='permutation'),
    ...   num_nodes=4,
    ...   runner='vmap',
    ... )
    >>> state = program.init()
    >>> for _ in range(10):
    ...   state, losses = program.step(state)
    >>> params, stats = program.mean(state)
    >>> losses.shape, params.shape, program.consensus(state) > 0
    ((4,), (10,), True)

  References:
    Jin et al., `How to scale distributed deep learning?
    <https://arxiv.org/abs/1611.04581>`_, 2016; Assran et al., `Stochastic
    Gradient Push for Distributed Deep Learning
    <https://arxiv.org/abs/1811.10792>`_, 2019; Zhang et al., `Deep learning
    with Elastic Averaging SGD <https://arxiv.org/abs/1412.6651>`_, 2015
  """
  check_devices(
    strategy, num_nodes=num_nodes, runner=runner, mesh=mesh, dtype=dtype
  )
  if task.is_streamed:
    raise ValueError(
      f'The task {task.name!r} is streamed; nodes need its data.'
    )
  if not 0 <= seed < 2**31:
    raise ValueError(f'seed must be from 0 to 2^31 - 1, got {seed}.')
  return DeviceProgram(
    task,
    strategy,
    _node_functions.make_node_work(task, optimizer),
    _device_runners.Runner(runner, num_nodes, mesh),
    seed=seed,
    get_rate=get_rate,
    init=init,
    dtype=dtype,
  )


def check_devices(
  strategy: gossip.PeerStrategy,
  *,
  num_nodes: int,
  runner: str = 'pmap',
  mesh: sharding.Mesh | None = None,
  dtype: Any = None,
) -> None:
  """Checks that the nodes can be trained on the devices of this machine.

  Args:
    strategy: Strategy by which the nodes mix.
    num_nodes: Number of nodes in all processes.
    runner: Name of the runner, as in `make_device_program`.
    mesh: Mesh of devices, as in `make_device_program`.
    dtype: Dtype of messages, as in `make_device_program`.

  Raises:
    ValueError: if there are too few devices, or the strategy does not fit the
      number of nodes, the dtype, or nodes that all mix at once.
  """
  protocols.check_count('num_nodes', num_nodes, 1)
  gossip.check_strategy(strategy)
  if strategy.has_server:
    raise ValueError(
      'strategy must be one of jasgd.gossip, such as gossip.Pull(), got '
      f'{strategy!r}.'
    )
  strategy.check_together(num_nodes)
  if dtype is not None and strategy.has_centre:
    raise ValueError(
      'On devices elastic averaging sends weights as they are, got '
      f'dtype={dtype}.'
    )
  _device_runners.Runner(runner, num_nodes, mesh)


# --- One step of one node among others, all at the same time.


def _make_start(
  work: _node_functions.NodeWork, strategy: gossip.PeerStrategy
) -> Callable[..., DeviceArrays]:
  """Makes the function `(weights) -> arrays` that starts a node."""

  def start(weights: tuple[Any, Any]) -> DeviceArrays:
    params, stats = weights
    return DeviceArrays(
      node=_node_functions.NodeState(params, stats, work.init(params)),
      mass=jnp.ones(()) if strategy.has_mass else None,
      centre=weights if strategy.has_centre else None,
    )

  return start


def _make_step(
  work: _node_functions.NodeWork,
  strategy: gossip.PeerStrategy,
  axis_name: str,
  dtype: Any = None,
) -> Callable[..., tuple[DeviceArrays, jax.Array]]:
  """Makes the function of one step of a node.

  Args:
    work: Gradient and update.
    strategy: Strategy by which the nodes mix.
    axis_name: Name of the axis of nodes.
    dtype: Dtype of messages, as in `gossip.mix`.

  Returns:
    `(arrays, data, seed, step, rate) -> (arrays, loss)`, where `step` is the
    number of steps made before this one.
  """

  def differentiate(
    weights: tuple[Any, Any], data: Any, seed: Any, step: Any
  ) -> _gradient.Gradient:
    learner = lax.axis_index(axis_name)
    return work.gradient(*weights, data, seed, learner, step)

  def mix(
    tree: Any, seed: Any, step: Any, mass: Any = None, dtype: Any = dtype
  ) -> Any:
    key = jax.random.key(seed, impl='threefry2x32')
    return gossip.mix(
      tree,
      axis_name,
      strategy,
      step=step,
      key=jax.random.fold_in(key, _PEERS),
      mass=mass,
      dtype=dtype,
    )

  def step_and_mix(
    arrays: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """Gossip, and local SGD, which averages all weights at intervals."""
    node = arrays.node
    result = differentiate((node.params, node.stats), data, seed, step)
    node = work.update(node, result, node.params, rate)
    params, stats = mix((node.params, node.stats), seed, step + 1)
    node = node._replace(params=params, stats=stats)
    return arrays._replace(node=node), result.loss

  def mix_and_step(
    arrays: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """All-reduce: the mean of all gradients, then the update of each node."""
    node = arrays.node
    result = differentiate((node.params, node.stats), data, seed, step)
    grads = mix(result.gradient, seed, step + 1)
    # Never in a narrower dtype: a running mean that is rounded at each step
    # stops as soon as its changes are below the rounding.
    stats = mix(result.stats, seed, step + 1, dtype=None)
    mean = result._replace(gradient=grads, stats=stats)
    node = work.update(node, mean, node.params, rate)
    return arrays._replace(node=node), result.loss

  def step_and_push(
    arrays: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """SGP: a node stores its weights and statistics times its mass."""
    node, mass = arrays.node, arrays.mass
    params, stats = _scale_floats((node.params, node.stats), 1 / mass)
    result = differentiate((params, stats), data, seed, step)
    result = result._replace(stats=_scale_floats(result.stats, mass))
    # The optimizer gets the weights without the mass, for weight decay, and
    # its update is added to the weights times the mass.
    node = work.update(node, result, params, rate, params)
    (params, stats), mass = mix((node.params, node.stats), seed, step + 1, mass)
    node = node._replace(params=params, stats=stats)
    return arrays._replace(node=node, mass=mass), result.loss

  if strategy.has_centre:
    elastic = cast(gossip.Elastic, strategy)
    return _make_elastic_step(work, elastic, axis_name, differentiate)
  if strategy.has_mass:
    return step_and_push
  if strategy.averages_gradients:
    return mix_and_step
  return step_and_mix


def _make_elastic_step(
  work: _node_functions.NodeWork,
  strategy: gossip.Elastic,
  axis_name: str,
  differentiate: Callable[..., _gradient.Gradient],
) -> Callable[..., tuple[DeviceArrays, jax.Array]]:
  """A step and an exchange with the centre, in the strategy's order."""

  def exchange(arrays: DeviceArrays, step: Any) -> DeviceArrays:
    node = arrays.node
    (params, stats), centre = gossip.mix_elastic(
      (node.params, node.stats), arrays.centre, axis_name, strategy, step=step
    )
    return arrays._replace(
      node=node._replace(params=params, stats=stats), centre=centre
    )

  def step_a3(
    arrays: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """Update, then exchange: the next gradient is at the mixed weights."""
    node = arrays.node
    result = differentiate((node.params, node.stats), data, seed, step)
    node = work.update(node, result, node.params, rate)
    return exchange(arrays._replace(node=node), step + 1), result.loss

  def step_easgd(
    arrays: DeviceArrays, data: Any, seed: Any, step: Any, rate: Any
  ) -> tuple[DeviceArrays, jax.Array]:
    """The gradient at the weights before the exchange updates those after."""
    params, stats, _ = arrays.node
    result = differentiate((params, stats), data, seed, step)
    # Before the first step all nodes equal the centre: the force is 0.
    arrays = exchange(arrays, step)
    changed = _node_functions.add_changes(
      arrays.node.stats, result.stats, stats
    )
    result = result._replace(stats=changed)
    node = work.update(arrays.node, result, params, rate)
    return arrays._replace(node=node), result.loss

  return step_easgd if strategy.order == 'easgd' else step_a3


def _get_weights(arrays: DeviceArrays) -> tuple[Any, Any]:
  """A node's (params, stats), as gradients and evaluation see them."""
  weights = (arrays.node.params, arrays.node.stats)
  if arrays.mass is None:
    return weights
  return _scale_floats(weights, 1 / arrays.mass)


def _average(arrays: DeviceArrays, axis_name: str) -> tuple[Any, Any]:
  """The mean of all nodes' (params, stats); by mass, if there is one."""
  weight = jnp.ones(()) if arrays.mass is None else arrays.mass
  share = 1 / lax.psum(weight, axis_name)

  def mean(leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
      return leaf  # Integers are not mixed.
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    total = lax.psum(leaf.astype(dtype), axis_name)
    return (total * share.astype(dtype)).astype(leaf.dtype)

  return jax.tree.map(mean, (arrays.node.params, arrays.node.stats))


def _scale_floats(tree: Any, factor: Any) -> Any:
  """Multiplies the floats of a tree, in their own dtypes."""

  def scale(leaf: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      return leaf
    dtype = jnp.promote_types(leaf.dtype, jnp.float32)
    return (leaf.astype(dtype) * factor.astype(dtype)).astype(leaf.dtype)

  return jax.tree.map(scale, tree)
