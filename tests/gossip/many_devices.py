"""Runs programs of tests on 8 devices of one process, or 4 each of two.

A program is a module. Its arguments are the file for its results and, for one
of two processes, the coordinator's address and the process's number:

  python -m MODULE FILE
  python -m MODULE FILE ADDRESS PROCESS
"""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from jasgd import runtime

NUM_DEVICES = 8
_ROOT = pathlib.Path(__file__).parent.parent.parent
_PATIENCE = 600.0  # Seconds: never reached, unless something is broken.


def begin(address=None, process=None):
  """Configures the devices of a program, before it uses jax."""
  jax.config.update('jax_disable_most_optimizations', True)
  if address is None:
    jax.config.update('jax_num_cpu_devices', NUM_DEVICES)
    return
  jax.config.update('jax_num_cpu_devices', NUM_DEVICES // 2)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    address, 2, int(process), initialization_timeout=60
  )


def run(module, folder, *arguments):
  """Results of a program on the devices of one process, by name."""
  path = folder / 'found.npz'
  _run(module, [path, *arguments])
  return _load(path)


def run_two(module, folder):
  """Results of each of two processes."""
  address = f'127.0.0.1:{runtime.find_free_port()}'
  paths = [folder / f'{process}.npz' for process in range(2)]
  _run(
    module,
    *([path, address, str(process)] for process, path in enumerate(paths)),
  )
  return [_load(path) for path in paths]


def read_local(leaf):
  """The rows of this process."""
  shards = sorted(
    leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0
  )
  return np.concatenate([np.asarray(shard.data) for shard in shards])


def _load(path):
  with np.load(path) as file:
    return dict(file)


def _run(module, *arguments):
  """Runs a program with each of the lists of arguments, all at once."""
  programs = [
    subprocess.Popen(
      [sys.executable, '-m', module, *each],
      cwd=_ROOT,
      env={**os.environ, 'NPROC': '1'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for each in arguments
  ]
  try:
    for program in programs:
      output, _ = program.communicate(timeout=_PATIENCE)
      assert program.returncode == 0, output[-3000:]
  finally:
    for program in programs:
      program.kill()
      program.wait()
