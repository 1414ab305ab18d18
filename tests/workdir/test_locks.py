"""Locks of workdirs, also of a process that is killed."""

import subprocess
import sys

import pytest

from jasgd import workdir

HOLD = """
import sys, time
from jasgd import workdir
with workdir.hold_workdir(sys.argv[1], 'server'):
  print('held', flush=True)
  time.sleep(600)
"""


def test_a_lock_dies_with_its_process(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, '-c', HOLD, tmp_path], stdout=subprocess.PIPE, text=True
  )
  try:
    assert holder.stdout.readline() == 'held\n'
    with (
      pytest.raises(workdir.WorkdirError, match=f'process {holder.pid}'),
      workdir.hold_workdir(tmp_path, 'server'),
    ):
      pass
    with workdir.hold_workdir(tmp_path, 'launcher'):  # Another role.
      pass
    holder.kill()
    with workdir.hold_workdir(tmp_path, 'server', patience=60.0):
      pass
  finally:
    holder.kill()
    holder.wait()
    holder.stdout.close()
