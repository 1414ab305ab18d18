"""The work of the suite `server`, and the peers that do it besides jasgd.

  python -m launch.benchmarks.server_peers unix WORK RANK
  mpirun -n 3 .venv-mpi4py/bin/python -m launch.benchmarks.server_peers mpi WORK
  .venv-torch/bin/python -m launch.benchmarks.server_peers torch WORK RANK

The suite starts them. Rank 0 serves, the other ranks learn. Each round a
learner sends a gradient that is in its private memory, and the clock of the
weights that it has. The server updates,

  v <- v / 2 + g,    w <- w - RATE v,    clock <- clock + 1,

and answers with all weights and their clock; the learner gets them into a
private array and checks them. Every g is 1/2 and v begins as 1, so that v stays
1 and each weight is -RATE x clock, without rounding: weights that are torn, old
or lost are seen. Learners compute nothing else: only the serving counts.

The learners share a budget of updates, and go on until the server's clock says
that it is used up: all of them are busy from the first to the last update. A
gradient that arrives later is answered, and not applied.

This module needs only numpy: torch and mpi4py are imported where they are used,
as each of them lives in an environment of its own.
"""

from collections.abc import Callable
import json
import pathlib
import selectors
import signal
import socket
import statistics
import sys
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from launch.benchmarks import processes

RATE = 2.0**-10
MOMENTUM = 0.5
GRADIENT = 0.5
FIRST_VELOCITY = 1.0

# Up to here every -RATE x clock is a float32.
MAX_UPDATES = 2**24

# Bytes in front of the values of a message: values stay aligned.
_HEADER = 64
# Send buffer of the kernel: most gradients of small networks leave in one call.
_SOCKET_BYTES = 1_000_000
# Threads that run the calls of other ranks, as in PyTorch's tutorials.
_NUM_RPC_THREADS = 8


class Work(NamedTuple):
  """The work of one run, which every process is told as JSON."""

  num_parameters: int
  num_learners: int
  num_warm_up: int  # Updates before the first that counts.
  num_updates: int  # The budget, with those of the warm-up.
  folder: str  # For the files of the run.
  timeout: float  # Seconds that a process may live.
  # Seconds after the warm-up; 0: until the budget is used up. jasgd only.
  seconds: float = 0.0


def read_work(line: str) -> Work:
  """Reads the work, and ends this process when its time is over."""
  work = Work(**json.loads(line))
  # Without a handler the signal ends a process wherever it waits, in C too.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.setitimer(signal.ITIMER_REAL, work.timeout)
  return work


class Message:
  """A clock and all values, in one buffer that is sent as it is."""

  def __init__(self, num_parameters: int) -> None:
    self.buffer = np.zeros(_HEADER + 4 * num_parameters, np.uint8)
    self.values = self.buffer[_HEADER:].view(np.float32)
    self._header = self.buffer[:8].view(np.int64)

  @property
  def clock(self) -> int:
    """The clock of the weights, or of those that a gradient is from."""
    return int(self._header[0])

  @clock.setter
  def clock(self, clock: int) -> None:
    self._header[0] = clock


class Log:
  """Counts updates, and measures those after the warm-up."""

  def __init__(self, work: Work) -> None:
    self.clock = 0
    self._work = work
    self._staleness: list[int] = []
    self._begin = self._end = (0.0, 0.0)

  @property
  def is_over(self) -> bool:
    """Whether the budget is used up."""
    return self.clock >= self._work.num_updates

  def add(self, read_clock: int) -> None:
    """Notes an update that was just done, with a gradient of `read_clock`."""
    self._staleness.append(self.clock - read_clock)
    self.clock += 1
    # Both times are taken after an update, so that the seconds between them
    # are those of the updates that are counted.
    if self.clock == self._work.num_warm_up:
      self._begin = time.perf_counter(), time.process_time()
    elif self.is_over:
      self._end = time.perf_counter(), time.process_time()

  def make_report(self) -> dict[str, float]:
    """The measurements."""
    staleness = self._staleness[self._work.num_warm_up :]
    seconds, cpu = (
      end - begin for begin, end in zip(self._begin, self._end, strict=True)
    )
    return {
      'updates_per_second': len(staleness) / seconds,
      'mean_staleness': statistics.fmean(staleness),
      'max_staleness': max(staleness),
      'cpu_per_update': cpu / len(staleness),
      'seconds': seconds,
    }


class Server:
  """The server's state and update, in numpy."""

  def __init__(self, work: Work) -> None:
    self.log = Log(work)
    self.answer = Message(work.num_parameters)
    self._velocity = np.full(work.num_parameters, FIRST_VELOCITY, np.float32)
    self._step = np.zeros_like(self._velocity)

  def update(self, push: Message) -> None:
    """Applies a gradient; afterwards `answer` is for its learner."""
    if self.log.is_over:
      return
    self._velocity *= MOMENTUM
    self._velocity += push.values
    np.multiply(self._velocity, RATE, out=self._step)
    self.answer.values -= self._step
    self.log.add(push.clock)
    self.answer.clock = self.log.clock


def learn(
  work: Work, exchange: Callable[[Message, Message], bool]
) -> dict[str, float]:
  """Pushes until the server has ended, and checks every answer.

  Args:
    work: The work.
    exchange: Sends its first argument, and receives into the second; returns
      whether to go on.

  Returns:
    The number of answers, and of those that were wrong.
  """
  push, pull = Message(work.num_parameters), Message(work.num_parameters)
  push.values[:] = GRADIENT
  is_right = np.zeros(work.num_parameters, bool)
  num_answers = num_errors = 0
  goes_on = True
  while goes_on:
    push.clock = pull.clock
    goes_on = exchange(push, pull)
    np.equal(pull.values, np.float32(-RATE * pull.clock), out=is_right)
    num_answers += 1
    num_errors += not is_right.all()
  return {'num_answers': num_answers, 'num_errors': num_errors}


def run_unix(work: Work, rank: int) -> dict[str, float]:
  """One rank over unix sockets.

  One thread serves each learner that has begun to send, to its end. A thread
  per connection was measured too: a little faster with 60 thousand parameters,
  slower with a million, where copies and updates fill the cores anyway.
  """
  path = f'{work.folder}/socket'
  if rank == 0:
    with socket.socket(socket.AF_UNIX) as listener:
      # A learner finds the file only when the server listens.
      listener.bind(f'{path}.part')
      listener.listen(work.num_learners)
      pathlib.Path(f'{path}.part').rename(path)
      ends = [listener.accept()[0] for _ in range(work.num_learners)]
    return _serve_unix(ends, work)
  while not pathlib.Path(path).exists():
    time.sleep(0.01)
  connection = socket.socket(socket.AF_UNIX)
  connection.connect(path)
  connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)

  def exchange(push: Message, pull: Message) -> bool:
    connection.sendall(push.buffer.data)
    _receive(connection, pull)
    return pull.clock < work.num_updates

  return learn(work, exchange)


def _serve_unix(ends: list[socket.socket], work: Work) -> dict[str, float]:
  """Answers until every learner knows that the budget is used up."""
  server, push = Server(work), Message(work.num_parameters)
  with selectors.DefaultSelector() as selector:
    for end in ends:
      end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
      # Wait until all have sent: the first must not be measured alone.
      end.recv(1, socket.MSG_PEEK)
      selector.register(end, selectors.EVENT_READ, end)
    while selector.get_map():
      for key, _ in selector.select():
        _receive(key.data, push)
        server.update(push)
        key.data.sendall(server.answer.buffer.data)
        if server.log.is_over:
          selector.unregister(key.data)
  return server.log.make_report()


def _receive(connection: socket.socket, message: Message) -> None:
  """Fills a message."""
  view = message.buffer.data
  while len(view):
    num_bytes = connection.recv_into(view)
    if not num_bytes:
      raise EOFError(f'The other end left with {len(view)} bytes to come.')
    view = view[num_bytes:]


def run_mpi(work: Work) -> dict[str, float]:
  """This process's rank over MPI, which uses shared memory on one host."""
  from mpi4py import MPI  # pyrefly: ignore

  world = MPI.COMM_WORLD
  push_tag, pull_tag = 1, 2
  # All begin together: the first learner must not be measured alone.
  world.Barrier()
  if world.Get_rank() == 0:
    server, push = Server(work), Message(work.num_parameters)
    status = MPI.Status()
    num_left = work.num_learners
    while num_left:
      world.Recv([push.buffer, MPI.BYTE], MPI.ANY_SOURCE, push_tag, status)
      server.update(push)
      answer = [server.answer.buffer, MPI.BYTE]
      world.Send(answer, status.Get_source(), pull_tag)
      num_left -= server.log.is_over
    return server.log.make_report()

  def exchange(push: Message, pull: Message) -> bool:
    world.Send([push.buffer, MPI.BYTE], 0, push_tag)
    world.Recv([pull.buffer, MPI.BYTE], 0, pull_tag)
    return pull.clock < work.num_updates

  return learn(work, exchange)


class TorchServer:
  """Weights behind an RRef, updated under a lock, as in PyTorch's tutorials."""

  def __init__(self, work: Work) -> None:
    import torch  # pyrefly: ignore

    self.log = Log(work)
    self._lock = threading.Lock()
    self._start = threading.Barrier(work.num_learners)
    self._weights = torch.zeros(work.num_parameters)
    self._velocity = torch.full_like(self._weights, FIRST_VELOCITY)

  def wait_for_all(self) -> None:
    """Waits for all learners: the first would be measured alone."""
    self._start.wait()

  def push_pull(self, gradient: Any, read_clock: int) -> tuple[Any, int]:
    """Applies a gradient; returns the weights and their clock."""
    with self._lock:
      if not self.log.is_over:
        self._velocity.mul_(MOMENTUM).add_(gradient)
        self._weights.sub_(self._velocity, alpha=RATE)
        self.log.add(read_clock)
      # A copy, because the answer is sent while others change the weights.
      return self._weights.clone(), self.log.clock


def learn_torch(server: Any, work: Work) -> dict[str, float]:
  """A learner; rank 0 calls this on the other ranks."""
  import torch  # pyrefly: ignore

  server.rpc_sync().wait_for_all()

  def exchange(push: Message, pull: Message) -> bool:
    gradient = torch.from_numpy(push.values).clone()
    weights, pull.clock = server.rpc_sync().push_pull(gradient, push.clock)
    torch.from_numpy(pull.values).copy_(weights)
    return pull.clock < work.num_updates

  return learn(work, exchange)


def run_torch(work: Work, rank: int, answers: processes.Answers) -> None:
  """One rank over torch.distributed.rpc; rank 0 answers for all."""
  import torch  # pyrefly: ignore
  from torch.distributed import rpc  # pyrefly: ignore

  torch.set_num_threads(1)
  rpc.init_rpc(
    f'rank-{rank}',
    rank=rank,
    world_size=1 + work.num_learners,
    rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
      num_worker_threads=_NUM_RPC_THREADS,
      # Ranks find each other by a file: a port might be taken.
      init_method=f'file://{work.folder}/ranks',
      rpc_timeout=work.timeout,
    ),
  )
  if rank == 0:
    server = TorchServer(work)
    reference = rpc.RRef(server)
    calls = [
      rpc.rpc_async(f'rank-{other}', learn_torch, (reference, work))
      for other in range(1, 1 + work.num_learners)
    ]
    for report in [*torch.futures.wait_all(calls), server.log.make_report()]:
      answers.send(report)
    # Ranks may not leave while another rank refers to their objects.
    del reference
  rpc.shutdown()


def main(peer: str, line: str, rank: str = '') -> None:
  """Runs one rank, and answers with its report."""
  work, answers = read_work(line), processes.Answers()
  if peer == 'torch':
    run_torch(work, int(rank), answers)
  elif peer == 'mpi':
    answers.send(run_mpi(work))
  else:
    answers.send(run_unix(work, int(rank)))


if __name__ == '__main__':
  main(*sys.argv[1:])
