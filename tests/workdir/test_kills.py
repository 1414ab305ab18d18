"""kill -9 at any time: the last checkpoint is complete, the run the same."""

import contextlib
import glob
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest

from jasgd import workdir
from tests import trees
from tests.workdir import killed_run

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT = 60  # Seconds.

# Checks the last checkpoint, then saves in an endless loop, and prints the
# clock after each save. An alarm ends it if it is not killed.
PROGRAM = """
import signal, sys
signal.alarm(60)
import jax
import numpy as np
from jasgd import workdir
like = [jax.ShapeDtypeStruct((200_000,), np.float32)]
clock, state, position = workdir.restore_checkpoint(sys.argv[1], like) or (
  0, [np.zeros(200_000, np.float32)], {'clock': 0}
)
assert np.all(np.asarray(state[0]) == clock) and position == {'clock': clock}
while True:
  clock += 1
  state = [np.full(200_000, clock, np.float32)]
  workdir.save_checkpoint(
    sys.argv[1], clock, state, position={'clock': clock}, params=state, keep=1
  )
  print(clock, flush=True)
"""


@pytest.mark.parametrize(
  'stride', [41, pytest.param(1, marks=pytest.mark.slow)]
)
def test_a_killed_run_ends_as_if_it_had_not_been(stride, tmp_path):
  killed, calm = tmp_path / 'killed', tmp_path / 'calm'
  result = subprocess.run(
    [sys.executable, '-m', killed_run.__name__, killed, str(stride)],
    cwd=ROOT,
    check=True,
    stdout=subprocess.PIPE,
    text=True,
    timeout=30 * TIMEOUT,
  )
  numbers = result.stdout.split()
  assert len(numbers) * stride > 100  # The number of file events.
  killed_run.run(calm)
  lines = (calm / 'metrics.jsonl').read_bytes()
  assert lines.count(b'\n') == killed_run.NUM_UPDATES
  for number in numbers:
    folder = killed / number
    assert (folder / 'metrics.jsonl').read_bytes() == lines, number
    trees.assert_same_bits(
      workdir.load_params(folder), workdir.load_params(calm)
    )
    # Older checkpoints, and .part folders, may be left until the next save.
    for clock in workdir.list_checkpoints(folder):
      trees.assert_same_types(
        workdir.load_params(folder, clock), workdir.load_params(calm)
      )
    workdir.save_checkpoint(folder, 100, {}, position={}, params={}, keep=1)
    names = [path.name for path in (folder / 'checkpoints').iterdir()]
    assert names == ['100'], number


@contextlib.contextmanager
def _start(folder):
  """A process that saves in a loop; it is killed at the end of the block."""
  with subprocess.Popen(
    [sys.executable, '-c', PROGRAM, str(folder)],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      yield process
    finally:
      process.kill()


def _wait_for(folder, pattern, clock, process):
  """Polls until a later checkpoint has a file that fits the pattern."""
  deadline = time.monotonic() + TIMEOUT
  # Not Path.glob, which fails if a folder is removed meanwhile.
  while not any(
    int(name.partition('/')[0].partition('.')[0]) > clock
    for name in glob.glob(pattern, root_dir=folder)
  ):
    assert process.poll() is None
    assert time.monotonic() < deadline, pattern


# Files of a new checkpoint, in the order in which they are written.
@pytest.mark.parametrize(
  'patterns',
  [
    pytest.param(['*/params*/manifest.ocdbt'], id='params'),
    pytest.param(
      ['*/state*', '*/params*/manifest.ocdbt', '*/manifest.json*'],
      id='all',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_killed_while_saving_the_last_checkpoint_is_complete(
  patterns, tmp_path
):
  last = 0
  for pattern in patterns:
    with _start(tmp_path) as process:
      # The process checks what it restores before it prints its first line.
      clock = int(process.stdout.readline())
      assert clock == last + 1
      _wait_for(tmp_path / 'checkpoints', pattern, clock, process)
    # The printed checkpoint or a later one exists, and is complete.
    last = workdir.list_checkpoints(tmp_path)[-1]
    assert last >= clock
    (params,) = workdir.load_params(tmp_path)
    np.testing.assert_array_equal(params, np.full(200_000, last, np.float32))
