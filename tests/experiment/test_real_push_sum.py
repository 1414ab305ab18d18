"""Push-sum in real processes: Ctrl-C loses no mass, whichever node is slow."""

import io
import os
import signal

import pytest

from jasgd import experiment
from jasgd import traces
from tests import live
from tests.experiment import test_real_nodes as nodes

# Seconds of a step, by node: nodes that are asked first to end have ended long
# before the last one.
SPEEDS = (0.005, 0.05, 0.4)
NUM_STEPS = 15
Kind = traces.Kind


def make_config(wire):
  return nodes.make_config(
    'push_sum',
    NUM_STEPS,
    runtime={'wire': wire},
    processes={'min_seconds': SPEEDS},
    deadlines={'step': live.PATIENCE},  # No node counts as silent.
  )


def check_masses(workdir):
  """All nodes have ended in good order, and no mass is missing."""
  trace = traces.Trace.load(workdir / 'trace')
  last = [trace.of_replica(node)[-1] for node in range(nodes.NUM_NODES)]
  assert [record['kind'] for record in last] == [Kind.END] * nodes.NUM_NODES
  total = sum(record['mass'] for record in last)
  assert total == pytest.approx(nodes.NUM_NODES, abs=1e-9)
  assert Kind.LOST not in trace.records['kind']
  assert traces.summarize(trace).lost_mass == 0
  nodes.check_replay(workdir)


@pytest.mark.slow
@pytest.mark.parametrize('wire', ['auto', 'flight'])
def test_no_mass_is_lost_when_a_run_is_stopped(wire, processes, tmp_path):
  script = (
    'import sys; from tests.experiment import test_real_push_sum as t;'
    'from jasgd import experiment;'
    f'c = t.make_config({wire!r});'
    'print(experiment.train_and_evaluate(c, sys.argv[1]))'
  )
  program = processes.start_python('-c', script, os.fspath(tmp_path))
  live.wait_until(lambda: nodes.count_steps(tmp_path).min() > 3, program)
  program.kill(signal.SIGINT)
  assert 'is_interrupted=True' in program.wait()
  live.wait_until(lambda: not processes.find())
  check_masses(tmp_path)
  result = experiment.train_and_evaluate(
    make_config(wire), tmp_path, stream=io.StringIO()
  )
  assert result.clock == NUM_STEPS * nodes.NUM_NODES
  assert result.metrics['gossip/mass_lost'] == pytest.approx(0, abs=1e-9)
  check_masses(tmp_path)
