"""Weights over MPI: rank 0 serves, the others learn.

  mpirun -n 3 .venv-mpi4py/bin/python -m launch.benchmarks.peer_mpi WORK

The parent starts them. On one host Open MPI goes through shared memory. Nothing
else imports this module, for mpi4py lives in an environment of its own.
"""

import sys
from typing import Any

from launch.benchmarks import server_work

_PUSH, _PULL = 1, 2


def serve(world: Any, work: server_work.Work) -> server_work.Log:
  """Answers until every learner knows that it is over."""
  from mpi4py import MPI  # pyrefly: ignore

  server = server_work.Server(work)
  push = server_work.Message(work.num_parameters)
  status = MPI.Status()
  num_left = work.num_learners
  world.Barrier()
  while num_left:
    world.Recv([push.buffer, MPI.BYTE], MPI.ANY_SOURCE, _PUSH, status)
    server.update(push)
    world.Send([server.answer.buffer, MPI.BYTE], status.Get_source(), _PULL)
    num_left -= server.log.is_over
  return server.log


def learn(world: Any, work: server_work.Work) -> server_work.Checker:
  """Pushes until it is over."""
  from mpi4py import MPI  # pyrefly: ignore

  # Sending copies it out of private memory.
  push = server_work.Message(work.num_parameters)
  push.values[...] = server_work.make_gradient(work)
  pull = server_work.Message(work.num_parameters)
  checker = server_work.Checker(work)
  # Whoever starts first would be measured alone.
  world.Barrier()
  while pull.clock < work.num_updates:
    push.clock = pull.clock
    world.Send([push.buffer, MPI.BYTE], 0, _PUSH)
    world.Recv([pull.buffer, MPI.BYTE], 0, _PULL)
    checker.check(pull.values, pull.clock)
  return checker


def main(line: str) -> None:
  """Serves or learns, by its rank."""
  work = server_work.start_process(line)
  from mpi4py import MPI  # pyrefly: ignore

  world = MPI.COMM_WORLD
  rank = world.Get_rank()
  if rank == 0:
    server_work.write_report(work, 'server', serve(world, work).make_report())
  else:
    report = learn(world, work).make_report()
    server_work.write_report(work, f'learner-{rank}', report)


if __name__ == '__main__':
  main(sys.argv[1])
