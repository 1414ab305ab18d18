"""Configs of the place of a run: virtual time, devices, real processes."""

import dataclasses
import os

import jax

from jasgd import engine
from jasgd import runtime

_MODES = ('simulate', 'local', 'cluster', 'devices')


@dataclasses.dataclass(kw_only=True)
class RuntimeConfig:
  """Place and engine of a run."""

  # simulate: virtual time, in this process. local: processes of this machine.
  # cluster: many hosts, with one command for each process. devices: nodes on
  # the devices of this process, all in step. The configs `time`, `network` and
  # `failures` are for virtual time only.
  mode: str = 'simulate'
  # simulate: fast, one compiled loop; or exact, call by call as in real runs.
  engine: str = 'fast'
  # Wire between processes: memory, flight, or auto, which is shared memory on
  # one host and Arrow Flight between hosts.
  wire: str = 'auto'
  # Type of float32 numbers in messages: float32 or bfloat16.
  wire_dtype: str = 'float32'
  # Whether a learner pulls before its push is applied.
  overlap: bool = False
  # Updates, or steps of all nodes, between evaluations; 0: about an epoch.
  eval_every: int = 0
  # Seconds between checkpoints; there is always one at the end.
  checkpoint_seconds: float = 30.0
  # devices: pmap, shard_map (a device for each node) or vmap (all on one).
  # auto: pmap if there are enough devices, else vmap.
  runner: str = 'auto'

  def choose_runner(self, num_nodes: int) -> str:
    """The runner of nodes on devices; auto depends on their number."""
    if self.runner != 'auto':
      return self.runner
    return 'pmap' if jax.local_device_count() >= num_nodes > 1 else 'vmap'

  @property
  def is_real(self) -> bool:
    """Whether workers are real processes."""
    return self.mode in ('local', 'cluster')

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
    rules = {
      f'Unknown runtime.mode {self.mode!r}. Known: {", ".join(_MODES)}.': (
        self.mode in _MODES
      ),
      f'Unknown runtime.engine {self.engine!r}. Known: '
      f'{", ".join(engine.MODES)}.': self.engine in engine.MODES,
      f'Unknown runtime.wire {self.wire!r}. Known: '
      f'{", ".join(runtime.WIRES)}.': self.wire in runtime.WIRES,
      f'Unknown runtime.wire_dtype {self.wire_dtype!r}. Known: '
      f'{", ".join(engine.WIRE_DTYPES)}.': (
        self.wire_dtype in engine.WIRE_DTYPES
      ),
      f'Unknown runtime.runner {self.runner!r}. Known: auto, '
      f'{", ".join(engine.RUNNERS)}.': (
        self.runner in ('auto', *engine.RUNNERS)
      ),
      f'runtime.eval_every must be at least 0, got {self.eval_every}.': (
        self.eval_every >= 0
      ),
      'runtime.checkpoint_seconds must be at least 0, got '
      f'{self.checkpoint_seconds}.': self.checkpoint_seconds >= 0,
    }
    return [rule for rule, holds in rules.items() if not holds]


@dataclasses.dataclass(kw_only=True)
class ServerConfig:
  """A real server, and the addresses of nodes."""

  # Address to listen at. Unless it is loopback, other processes need the token.
  host: str = '127.0.0.1'
  # Port of the server; 0: any that is free.
  port: int = 0
  # Reaction to the loss of a learner: continue or fail.
  on_learner_lost: str = 'continue'
  # Largest number of waiting gradients that one call applies.
  max_group: int = 1
  # PEM files for mutual TLS, at the same paths for all processes; '': none.
  certificate: str = ''
  key: str = ''
  authority: str = ''

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
    files = (self.certificate, self.key, self.authority)
    rules = {
      f'server.port must be from 0 to 65535, got {self.port}.': (
        0 <= self.port < 1 << 16
      ),
      'server.on_learner_lost must be one of '
      f'{", ".join(runtime.ON_LEARNER_LOST)}, got {self.on_learner_lost!r}.': (
        self.on_learner_lost in runtime.ON_LEARNER_LOST
      ),
      f'server.max_group must be at least 1, got {self.max_group}.': (
        self.max_group >= 1
      ),
      'Mutual TLS needs server.certificate, server.key and server.authority, '
      f'got {files}.': all(files) or not any(files),
    }
    problems = [rule for rule, holds in rules.items() if not holds]
    return problems + [
      f'There is no file {path!r}.'
      for path in files
      if path and not os.path.exists(path)
    ]

  def make_tls(self) -> runtime.Tls | None:
    """The certificates of mutual TLS, if any."""
    if not self.certificate:
      return None
    return runtime.Tls(self.certificate, self.key, self.authority)


@dataclasses.dataclass(kw_only=True)
class ProcessConfig:
  """The processes of a real run."""

  # Threads that XLA sees in each process; on a CPU, bits depend on it.
  num_threads: int = 1
  # Least seconds per gradient of each worker, to stand for slower ones; the
  # last is for all further workers. (): none.
  min_seconds: tuple[float, ...] = ()
  # Seconds for which a learner tries to find its server.
  patience: float = 120.0

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
    rules = {
      f'processes.num_threads must be at least 1, got {self.num_threads}.': (
        self.num_threads >= 1
      ),
      'processes.min_seconds must be at least 0 each, got '
      f'{self.min_seconds}.': all(each >= 0 for each in self.min_seconds),
      f'processes.patience must be at least 0, got {self.patience}.': (
        self.patience >= 0
      ),
    }
    return [rule for rule, holds in rules.items() if not holds]


@dataclasses.dataclass(kw_only=True)
class DeadlineConfig:
  """Deadlines of a real run, in seconds."""

  # Time for all workers to arrive; after it, those that have arrived begin.
  start: float = 120.0
  # Time until any message from a server, node or centre.
  silence: float = 60.0
  # Time until a gradient that other learners wait for, or the answer of a peer;
  # 0: ten times the longest so far.
  step: float = 0.0
  # The same time while a worker may be compiling.
  first_step: float = 300.0
  # Time for learners to come back after a restart of the server.
  rejoin: float = 60.0
  # Time for the last messages of learners. In a cluster, nodes stay for this
  # time so that a watch can evaluate them: an evaluation must take less.
  end: float = 20.0

  def list_problems(self) -> list[str]:
    """Errors in the fields, as sentences."""
    try:
      self.make()
    except ValueError as error:
      return [str(error)]
    return []

  def make(self) -> runtime.Deadlines:
    """The deadlines."""
    return runtime.Deadlines(**dataclasses.asdict(self))
