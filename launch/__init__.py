"""Entry points: `python -m launch.train --help`, and others."""

import os
import signal
import sys
from types import FrameType


def _leave(number: int, frame: FrameType | None) -> None:
  """Ends a program that is still loading: nothing has begun."""
  del number, frame
  os.write(2, b'\nStopped before it began.\n')
  os._exit(0)


# Before other modules are loaded, which takes seconds. `launch.entry` restores
# the usual handlers.
if sys.argv[0] == '-m':
  for _number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(_number, _leave)
