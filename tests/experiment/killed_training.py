"""A training run that kills itself once, at a clock, and then goes on.

    python -m tests.experiment.killed_training FOLDER CLOCK

is killed after the metrics of that clock were written, before its checkpoint;
a CLOCK of 0 never comes.
"""

import os
import signal
import sys

from jasgd import experiment
from tests.experiment import cases


def main(folder, clock):
  """Trains; the metrics' callback is where the end comes."""

  def die(now, metrics):
    del metrics
    if now == clock:
      os.kill(os.getpid(), signal.SIGKILL)

  experiment.train_and_evaluate(cases.make_config(), folder, on_metrics=die)


if __name__ == '__main__':
  main(sys.argv[1], int(sys.argv[2]))
