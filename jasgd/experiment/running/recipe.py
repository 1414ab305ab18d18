"""The recipe of a real run: from a config, or from the arguments of `train`."""

from collections.abc import Callable
import dataclasses
import math
import time
from typing import Any

import jax
import optax

from jasgd import engine
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.configs import strategy as strategies
from jasgd.experiment.configs import training
from jasgd.experiment.running import virtual

# Number of the server, or of an elastic centre, among the members of a run.
# Workers have the numbers 0, 1, 2 and so on.
SERVER = traces.SERVER

_WIRES = {
  'auto': ('memory', 'flight'),
  'memory': ('memory',),
  'flight': ('flight',),
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
  """Settings on which all processes of a run agree.

  Attributes:
    task: The task.
    optimizer: Optimizer of the server, or of each node.
    strategy: The protocol or peer strategy.
    num_workers: Number of learners or nodes.
    settings: The config of the workdir, as a JSON-serialisable dict.
    num_updates: Updates, or steps of all nodes, at most; None: no bound.
    num_epochs: Passes over the training set; None: no bound.
    seed: Seed of every random draw.
    init: The first (params, stats); None: drawn from the seed.
    policy: Policy of a server.
    per_gradient: Transformation of each gradient at a server.
    get_rate: Schedule, from epochs to a factor; None: there is none.
    local_rate: Rate of a learner's own steps (downpour).
    num_threads: Threads that XLA sees in each process.
    eval_every: Updates, or steps of all nodes, between evaluations.
    checkpoint_seconds: Seconds between checkpoints.
    wire: 'auto', 'memory' or 'flight'.
    wire_dtype: Type that float32 is rounded to in messages.
    overlap: Whether learners fetch while they compute.
    max_group: Largest number of gradients that one call applies.
    on_learner_lost: 'continue' or 'fail'.
    min_seconds: Least seconds per gradient of each worker.
    patience: Seconds for which a learner tries to find its server.
    deadlines: The deadlines.
    host: Address to listen at.
    port: Port to listen at; 0: any.
    tls: Certificates of mutual TLS.
  """

  task: tasks.Task
  optimizer: optax.GradientTransformation
  strategy: Any  # A `gossip.Strategy`; see `is_peer`.
  num_workers: int
  settings: dict[str, Any]
  num_updates: int | None = None
  num_epochs: float | None = None
  seed: int = 0
  init: tuple[Any, Any] | None = None
  policy: Any = 'constant'
  per_gradient: optax.GradientTransformation | None = None
  get_rate: Callable[[float], float] | None = None
  local_rate: float = 1.0
  num_threads: int = 1
  eval_every: int = 100
  checkpoint_seconds: float = 30.0
  wire: str = 'auto'
  wire_dtype: str = 'float32'
  overlap: bool = False
  max_group: int = 1
  on_learner_lost: str = 'continue'
  min_seconds: tuple[float, ...] = ()
  patience: float = 120.0
  deadlines: runtime.Deadlines = dataclasses.field(
    default_factory=runtime.Deadlines
  )
  host: str = '127.0.0.1'
  port: int = 0
  tls: runtime.Tls | None = None

  @property
  def is_peer(self) -> bool:
    """Whether there is no server."""
    return not self.strategy.has_server

  @property
  def is_collective(self) -> bool:
    """Whether all nodes wait for each other, so that a lost one stops them."""
    return self.is_peer and self.strategy.is_collective

  @property
  def owner(self) -> int | None:
    """The member that all workers need: server, or centre; None: no member."""
    has_owner = not self.is_peer or self.strategy.has_centre
    return SERVER if has_owner else None

  @property
  def num_steps(self) -> int:
    """Steps that each node makes."""
    num_steps = math.inf if self.num_updates is None else self.num_updates
    if self.num_epochs is not None:
      num_samples = self.num_epochs * self.task.num_samples
      num_steps = min(num_steps, num_samples / self.task.batch)
    return math.ceil(num_steps / self.num_workers)

  def count_updates(self) -> int:
    """Updates, or steps of all nodes, if no gradient is dropped."""
    if self.is_peer:
      return self.num_steps * self.num_workers
    num_updates = math.inf if self.num_updates is None else self.num_updates
    if self.num_epochs is not None:
      per_update = self.task.batch * strategies.count_gradients_per_update(
        self.strategy, self.num_workers
      )
      num_samples = math.ceil(self.num_epochs * self.task.num_samples)
      num_updates = min(num_updates, math.ceil(num_samples / per_update))
    return int(num_updates)

  def make_layout(self) -> engine.Layout:
    """The layout of weights in messages."""
    weights = jax.eval_shape(self.task.init, jax.random.key(0))
    return engine.make_layout(weights, self.wire_dtype)

  def make_bind_address(
    self, host: str = '', port: int | None = None
  ) -> runtime.BindAddress:
    """The address to listen at; by default that of the recipe."""
    return runtime.BindAddress(
      host=host or self.host,
      port=self.port if port is None else port,
      wires=_WIRES[self.wire],
      tls=self.tls,
    )

  def make_registry(
    self, folder: workdirs.Workdir, peers: tuple[str, ...] = ()
  ) -> runtime.Registry:
    """The addresses of nodes.

    Args:
      folder: Folder of the run.
      peers: Addresses of nodes that do not share the folder.

    Returns:
      The registry.
    """
    return runtime.Registry(folder, peers, wire=self.wire, tls=self.tls)

  def make_server_settings(self) -> runtime.ServerSettings:
    """The settings of a server."""
    return runtime.ServerSettings(
      task=self.task,
      update=engine.make_update(
        self.optimizer, policy=self.policy, per_gradient=self.per_gradient
      ),
      protocol=self.strategy,
      num_learners=self.num_workers,
      seed=self.seed,
      init=self.init,
      num_updates=self.num_updates,
      num_epochs=self.num_epochs,
      get_rate=self.get_rate,
      local_rate=self.local_rate,
      wire_dtype=self.wire_dtype,
      overlap=self.overlap,
      eval_every=self.eval_every,
      checkpoint_seconds=self.checkpoint_seconds,
      max_group=self.max_group,
      on_learner_lost=self.on_learner_lost,
      deadlines=self.deadlines,
      header=workdirs.describe_run(self.settings, self.seed),
    )

  def make_node_settings(
    self, header: dict[str, Any] | None = None
  ) -> runtime.NodeSettings:
    """The settings of nodes and of a centre.

    Args:
      header: Result of `find_header`; None for an observer, without a trace.

    Returns:
      The settings.
    """
    header = header or {'began_at': 0.0}
    return runtime.NodeSettings(
      task=self.task,
      optimizer=self.optimizer,
      strategy=self.strategy,
      num_nodes=self.num_workers,
      num_steps=self.num_steps,
      seed=self.seed,
      init=self.init,
      get_rate=self.get_rate,
      wire_dtype=self.wire_dtype,
      checkpoint_seconds=self.checkpoint_seconds,
      min_seconds=self.min_seconds,
      deadlines=self.deadlines,
      origin=header['began_at'],
      header=header,
    )

  def find_header(
    self, folder: workdirs.Workdir, began_at: float | None = None
  ) -> dict[str, Any]:
    """The header of the traces of nodes, as it was when the run began.

    Args:
      folder: Folder of the run, which keeps it. Several processes may call this
        at once.
      began_at: Time of day at which the run began elsewhere; None: now.

    Returns:
      The header.

    Raises:
      WorkdirError: if another process holds the lock for too long.
    """
    if not folder.provenance.exists():
      # Before the lock: the processes of a group find devices together.
      header = workdirs.describe_run(self.settings, self.seed)
      # Threads of the nodes, not of this process: bits depend on them.
      header['num_threads'] = self.num_threads
      header['began_at'] = time.time() if began_at is None else began_at
      path, patience = folder.root / 'header.lock', self.deadlines.start
      with workdirs.lock_file(path, patience=patience) as is_mine:
        if not is_mine:
          raise workdirs.WorkdirError(
            f'Another process has held {str(path)!r} for {patience:g} s '
            'without writing provenance.json: end that process first.'
          )
        if not folder.provenance.exists():
          workdirs.write_json(folder.provenance, header)
    return workdirs.read_json(folder.provenance)


def from_config(
  config: training.TrainingConfig, folder: workdirs.Workdir | None = None
) -> Recipe:
  """The recipe of a config.

  Args:
    config: The config.
    folder: Folder of the run. A server that has a checkpoint there does not
      need the first weights, which may be deleted by then.

  Returns:
    The recipe.

  Raises:
    ValueError: if the data, or the weights of `init_from`, do not fit.
  """
  has_begun = folder is not None and bool(workdirs.list_checkpoints(folder))
  is_peer = config.strategy.is_peer
  return Recipe(
    task=config.make_task(),
    optimizer=config.make_optimizer(),
    strategy=config.make_strategy(),
    num_workers=config.count_workers(),
    settings=dataclasses.asdict(config),
    num_updates=config.num_updates or None,
    num_epochs=config.num_epochs,
    seed=config.seed,
    init=virtual.load_init(config) if is_peer or not has_begun else None,
    get_rate=config.make_schedule(),
    **({} if is_peer else config.make_update_options()),
    num_threads=config.processes.num_threads,
    eval_every=config.choose_eval_every(),
    checkpoint_seconds=config.runtime.checkpoint_seconds,
    wire=config.runtime.wire,
    wire_dtype=config.runtime.wire_dtype,
    overlap=config.runtime.overlap,
    max_group=config.server.max_group,
    on_learner_lost=config.server.on_learner_lost,
    min_seconds=tuple(config.processes.min_seconds),
    patience=config.processes.patience,
    deadlines=config.deadlines.make(),
    host=config.server.host,
    # Several nodes of one host cannot share a port.
    port=0 if is_peer else config.server.port,
    tls=config.server.make_tls(),
  )
