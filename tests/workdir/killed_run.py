"""A run that is killed at each of its operations on files, and then resumed.

    python -m tests.workdir.killed_run FOLDER STRIDE

makes a folder for each kill, with a run that was killed once and then resumed,
and prints its number. Processes are forked, since imports take long; they are
forked before jax is used, which starts threads.
"""

import os
import signal
import sys

import jax
import numpy as np
import orbax.checkpoint  # noqa: F401  Imported before the fork.

from jasgd import workdir

NUM_UPDATES = 4
EVENTS = {'open', 'os.mkdir', 'os.remove', 'os.rename', 'os.rmdir'}
TIMEOUT = 60  # Seconds, after which a process that hangs is killed.


def run(folder):
  """A run of a few updates, with a checkpoint at every other one."""
  paths = workdir.open_workdir(folder, {'num_updates': NUM_UPDATES})
  like = jax.ShapeDtypeStruct((1000,), np.float32)
  restored = workdir.restore_checkpoint(paths, like)
  clock, weights, position = restored or (0, np.ones(1000, np.float32), {})
  with workdir.MetricsWriter(
    paths, resume_at=position.get('metrics', 0), use_tensorboard=False
  ) as writer:
    while clock < NUM_UPDATES:
      clock += 1
      weights = np.asarray(weights) * np.float32(0.7) + np.float32(clock)
      writer.write(clock, {'train/loss': weights[0]})
      if clock % 2 == 0:
        writer.flush(sync=True)
        workdir.save_checkpoint(
          paths,
          clock,
          weights,
          position={'metrics': writer.position},
          params={'w': weights},
          keep=1,
        )


def _kill_at(number):
  """Kills this process just before the given operation on files."""
  count = 0

  def hook(event, arguments):
    nonlocal count
    del arguments
    if event in EVENTS:
      count += 1
      if count >= number:
        os.kill(os.getpid(), signal.SIGKILL)

  sys.addaudithook(hook)


def _fork(folder, kill_at=None):
  """Runs in a new process; returns whether it was killed."""
  pid = os.fork()
  if not pid:
    signal.alarm(TIMEOUT)
    if kill_at is not None:
      _kill_at(kill_at)
    run(folder)
    os._exit(0)
  status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  if status not in (0, -signal.SIGKILL):
    raise RuntimeError(f'A run in {folder} ended with {status}.')
  return status != 0


def main():
  """Kills a run at every STRIDE-th operation, until one ends before that."""
  root, stride = sys.argv[1], int(sys.argv[2])
  number = 1
  while _fork(f'{root}/{number}', kill_at=number):
    _fork(f'{root}/{number}')
    print(number)
    number += stride


if __name__ == '__main__':
  main()
