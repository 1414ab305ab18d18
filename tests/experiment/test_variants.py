"""Every way to run that changes the numbers, in real processes, replayed."""

import io

import pytest

from jasgd import experiment
from tests import live

MLP = {'name': 'digits', 'model': 'mlp', 'batch': 8}
VARIANTS = {
  'bfloat16 and overlap, flight': {
    'runtime': {'wire': 'flight', 'wire_dtype': 'bfloat16', 'overlap': True},
  },
  'grouped updates': {'server': {'max_group': 8}, 'task': MLP},
  'downpour': {
    'protocol': {'name': 'downpour', 'n_push': 2, 'n_fetch': 3},
    'task': MLP,
  },
  'backup, adam, flight': {
    'protocol': {'name': 'backup', 'num_learners': 3},
    'optimizer': {'name': 'adam', 'rate': 0.003},
    'runtime': {'wire': 'flight'},
    'task': MLP,
  },
  'ramp-up of rennala': {'protocol': {'name': 'rennala', 's': 3, 'ramp_up': 9}},
}


@pytest.mark.slow
@pytest.mark.parametrize('name', VARIANTS)
def test_replay_has_the_same_bits(name, processes, tmp_path):
  del processes  # None is left.
  config = live.make_config(num_updates=80, **VARIANTS[name])
  config.processes.min_seconds = ()
  result = experiment.train_and_evaluate(config, tmp_path, stream=io.StringIO())
  assert result['clock'] == 80
  assert live.Run(tmp_path, config).check_replay() == 80
