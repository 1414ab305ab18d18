"""Weights over torch.distributed.rpc: rank 0 serves, the others learn.

  .venv-torch/bin/python -m launch.benchmarks.peer_torch RANK WORK

The parent starts them. As in PyTorch's tutorials: an object behind an RRef, of
which learners call a method that takes a gradient and gives the weights, under
a lock. Nothing else imports this module, for torch lives in an environment of
its own.
"""

import sys
import threading
from typing import Any

from launch.benchmarks import server_work

# As in the tutorials: threads that run what others call.
_NUM_CALL_THREADS = 8


class ParameterServer:
  """Weights that learners call."""

  def __init__(self, work: server_work.Work) -> None:
    """Begins with weights of zero."""
    import torch  # pyrefly: ignore

    self.log = server_work.Log(work)
    self._lock = threading.Lock()
    self._start = threading.Barrier(work.num_learners)
    self._weights = torch.zeros(work.num_parameters)
    self._velocity = torch.full_like(self._weights, server_work.FIRST_VELOCITY)

  def meet(self) -> None:
    """Waits for all learners: the first would be measured alone."""
    self._start.wait()

  def push_pull(self, gradient: Any, read_clock: int) -> tuple[Any, int]:
    """Applies a gradient; gives the weights and their clock."""
    with self._lock:
      if not self.log.is_over:
        self._velocity.mul_(server_work.MOMENTUM).add_(gradient)
        self._weights.sub_(self._velocity, alpha=server_work.RATE)
        self.log.add(read_clock)
      # The answer is on its way while others change the weights.
      return self._weights.clone(), self.log.clock


def learn(server: Any, work: server_work.Work) -> dict[str, int]:
  """Pushes until it is over; called by rank 0, on the other ranks."""
  import torch  # pyrefly: ignore

  gradient = torch.from_numpy(server_work.make_gradient(work))
  push, pull = torch.zeros_like(gradient), torch.zeros_like(gradient)
  checker = server_work.Checker(work)
  clock = 0
  server.rpc_sync().meet()
  while clock < work.num_updates:
    push.copy_(gradient)
    weights, clock = server.rpc_sync().push_pull(push, clock)
    pull.copy_(weights)
    checker.check(pull.numpy(), clock)
  return checker.make_report()


def main(rank: int, line: str) -> None:
  """Serves or learns, by its rank."""
  work = server_work.start_process(line)
  import torch  # pyrefly: ignore
  from torch.distributed import rpc  # pyrefly: ignore

  torch.set_num_threads(1)
  # Ranks find each other by a file: a port might be taken.
  options = rpc.TensorPipeRpcBackendOptions(
    num_worker_threads=_NUM_CALL_THREADS,
    init_method=f'file://{work.folder}/ranks',
    rpc_timeout=work.timeout,
  )
  ranks = range(1, work.num_learners + 1)
  rpc.init_rpc(
    f'rank-{rank}',
    rank=rank,
    world_size=1 + work.num_learners,
    rpc_backend_options=options,
  )
  if rank == 0:
    server = ParameterServer(work)
    reference = rpc.RRef(server)
    calls = [
      rpc.rpc_async(f'rank-{other}', learn, (reference, work))
      for other in ranks
    ]
    for other, report in zip(ranks, torch.futures.wait_all(calls), strict=True):
      server_work.write_report(work, f'learner-{other}', report)
    server_work.write_report(work, 'server', server.log.make_report())
    # Ranks may not leave while somebody still refers to what they have.
    del reference
  rpc.shutdown()


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2])
