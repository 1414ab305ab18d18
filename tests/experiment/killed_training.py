"""A training run that kills itself once, at a clock, and then goes on.

    KILL_AT=CLOCK python -m tests.experiment.killed_training

trains in the folder `run`, and is killed after the metrics of that clock were
written, before its checkpoint. With CLOCK=0 it is not killed. The command is
always the same, because it is in the trace's header.
"""

import os
import signal

from jasgd import experiment
from tests.experiment import cases


def main():
  """Trains; the callback of the metrics kills the process."""
  clock = int(os.environ['KILL_AT'])

  def die(now, metrics):
    del metrics
    if now == clock:
      os.kill(os.getpid(), signal.SIGKILL)

  experiment.train_and_evaluate(cases.make_config(), 'run', on_metrics=die)


if __name__ == '__main__':
  main()
