"""A real node of the suite `gossip`, which pulls from others over the wire.

  python -m launch.benchmarks.gossip_wire JOB

JOB is JSON: `node`, `num_nodes`, `folder`, `cases` ([wire, bytes of weights,
number of steps] each). The nodes do the cases one after another; each is a run
of its own, of real nodes whose gradients take no time. For each line on its
stdin a node answers when the next case is over, as JSON: `copy_seconds`, of the
same bytes. What its mixes took, each from the question to the new weights, is
in the trace.
"""

import json
import os
import sys
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jasgd import gossip
from jasgd import runtime
from jasgd import tasks
from jasgd import traces
from jasgd import workdir as workdirs
from launch.benchmarks import gossip_answers

_NUM_COPIES = 5
_NUM_WARM_UP = 2  # Mixes: the first ones connect, and touch fresh memory.


def make_task(size: int) -> tasks.Task:
  """Weights of so many bytes, without a model."""
  zeros = jnp.zeros(size // 4)
  return tasks.Task(
    name='mixing',
    batch=1,
    num_samples=1,
    init=lambda key: (zeros, {}),
    loss=lambda params, stats, batch, key: (params[0], stats),
    metrics=lambda params, stats, batch: {'loss': params[0]},
    batches=lambda data, seed, learner, step: data,
    data=jnp.zeros(1),
  )


def run_case(job: dict[str, Any], wire: str, size: int, num_steps: int) -> None:
  """A node's part of one run, which leaves its trace."""
  run = workdirs.Workdir(find_run(job['folder'], wire, size))
  settings = runtime.NodeSettings(
    task=make_task(size),
    optimizer=optax.sgd(0.0),
    strategy=gossip.Pull(),
    num_nodes=job['num_nodes'],
    num_steps=num_steps,
    checkpoint_seconds=3600.0,
  )
  runtime.Peer(
    settings,
    run,
    job['node'],
    runtime.Registry(run, wire=wire),
    runtime.Place(wires=(wire,)),
    linger=0.0,
  ).run()


def find_run(folder: str | os.PathLike[str], wire: str, size: int) -> str:
  """The folder of a case's run."""
  return os.path.join(folder, f'{wire}-{size}')


def read_seconds(folder: str | os.PathLike[str]) -> list[float]:
  """What the mixes of all nodes of a run took, once that is over."""
  trace = traces.NodeTrace.load(workdirs.Workdir(folder).trace)
  mixes = trace.mixes[trace.mixes['mix'] >= _NUM_WARM_UP]
  return (mixes['end_time'] - mixes['start_time']).tolist()


def _time_copies(size: int) -> list[float]:
  """Seconds of copies of the weights, in memory."""
  source = np.ones(size // 4, np.float32)
  target = np.empty_like(source)
  seconds = []
  for _ in range(1 + _NUM_COPIES):
    begin = time.perf_counter()
    np.copyto(target, source)
    seconds.append(time.perf_counter() - begin)
  return seconds[1:]  # The first one touches fresh memory.


def main() -> None:
  """Does the job."""
  job, parent = json.loads(sys.argv[1]), gossip_answers.Parent()
  runtime.compute_in_place()
  for case in job['cases']:
    run_case(job, *case)
    if not parent.take():
      return  # The parent does not want to know any more.
    parent.answer({'copy_seconds': _time_copies(case[1])})


if __name__ == '__main__':
  main()
