"""One mix against one all-reduce, and against a copy of the same bytes.

Every device holds the given megabytes. `x copy` is against a copy in memory of
what all devices hold together. Devices are those of one process, under pmap and
shard_map, and of several processes, under shard_map over jax.distributed.

Then simulated nodes (LeNet on digits, batch 16, one device): a step and a mix
of each of n nodes against n plain steps. The goal: at most 1.25 x.
"""

import json
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import optax

from jasgd import engine
from jasgd import gossip
from jasgd import simulation
from jasgd import tasks

_GOAL = 1.25
_TIMEOUT = 600.0  # Seconds, for one number of devices.


def run(quick: bool) -> None:
  """Prints tables."""
  print(__doc__)
  megabytes = (1,) if quick else (1, 10, 100)
  print(
    f'{"devices":14} {"runner":10} {"MB":>4} {"rule":12} {"ms":>9} '
    f'{"x all-reduce":>13} {"x copy":>8}'
  )
  for num_devices in (2,) if quick else (2, 4, 8):
    runners = ('pmap', 'shard_map')
    _print_rows(
      f'{num_devices} in 1',
      _measure(num_devices, 1, runners, megabytes, quick),
    )
  for num_processes in (2,) if quick else (2, 4):
    _print_rows(
      f'{num_processes} in {num_processes}',
      _measure(num_processes, num_processes, ('shard_map',), megabytes, quick),
    )
  _run_simulated((8,) if quick else (8, 32, 128), quick)


def _measure(
  num_devices: int,
  num_processes: int,
  runners: tuple[str, ...],
  megabytes: tuple[int, ...],
  quick: bool,
) -> list[dict[str, Any]]:
  """Rows of `gossip_worker`, from as many processes."""
  job: dict[str, Any] = {
    'num_devices': num_devices,
    'sizes': [size << 20 for size in megabytes],
    'runners': runners,
    'num_rounds': 2 if quick else 8,
  }
  jobs = [job]
  if num_processes > 1:
    coordinator = f'127.0.0.1:{_find_port()}'
    jobs = [
      {
        **job,
        'coordinator': coordinator,
        'num_processes': num_processes,
        'process': process,
      }
      for process in range(num_processes)
    ]
  workers = [
    subprocess.Popen(
      [sys.executable, '-m', 'launch.benchmarks.gossip_worker', json.dumps(j)],
      stdout=subprocess.PIPE,
      text=True,
    )
    for j in jobs
  ]
  try:
    output, _ = workers[0].communicate(timeout=_TIMEOUT)
    codes = [worker.wait(_TIMEOUT) for worker in workers]
  finally:
    for worker in workers:
      worker.kill()
      worker.wait()
  if any(codes):
    raise SystemExit(f'A worker ended with {codes}.')
  return json.loads(output.splitlines()[-1])


def _find_port() -> int:
  """A port that is free now."""
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    return probe.getsockname()[1]


def _print_rows(where: str, rows: list[dict[str, Any]]) -> None:
  reduced = {
    (row['runner'], row['size']): row['seconds']
    for row in rows
    if row['rule'] == 'all-reduce'
  }
  for row in sorted(rows, key=lambda row: (row['size'], row['runner'])):
    seconds = row['seconds']
    print(
      f'{where:14} {row["runner"]:10} {row["size"] >> 20:4} {row["rule"]:12} '
      f'{1e3 * seconds:9.3f} '
      f'{seconds / reduced[row["runner"], row["size"]]:13.2f} '
      f'{seconds / row["copy_seconds"]:8.2f}',
      flush=True,
    )


def _run_simulated(numbers: tuple[int, ...], quick: bool) -> None:
  """Nodes on one device against plain steps, in turns."""
  task = tasks.make_task('digits', model='lenet', batch=16)
  optimizer = optax.sgd(0.01, momentum=0.9)
  print(f'\n{"nodes":>6} {"rule":12} {"us per step":>12} {"x plain":>8}')
  for num_nodes in numbers:
    num_steps = 2 if quick else max(4, 512 // num_nodes)
    programs = {
      'plain': simulation.simulate_nodes(
        gossip.Pull(period=num_nodes * num_steps + 1),
        num_nodes=1,
        num_steps=num_nodes * num_steps,
      )
    }
    for rule, strategy in {
      'pull': gossip.Pull(),
      'permutation': gossip.Pull(peers='permutation'),
      'all-reduce': gossip.AllReduce(),
    }.items():
      programs[rule] = simulation.simulate_nodes(
        strategy, num_nodes=num_nodes, num_steps=num_steps
      )
    best = dict.fromkeys(programs, np.inf)
    for turn in range(2 if quick else 5):
      for name, trace in programs.items():
        begin = time.perf_counter()
        engine.replay_nodes(task, optimizer, trace)
        seconds = time.perf_counter() - begin
        if turn:  # The first one compiles.
          best[name] = min(best[name], seconds)
    for name, seconds in best.items():
      ratio = seconds / best['plain']
      verdict = ''
      if name != 'plain':
        verdict = f'  goal {_GOAL}: {"met" if ratio <= _GOAL else "missed"}'
      print(
        f'{num_nodes:6} {name:12} '
        f'{1e6 * seconds / (num_nodes * num_steps):12.1f} {ratio:8.2f}'
        f'{verdict}',
        flush=True,
      )
