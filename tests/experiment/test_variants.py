"""Every setting that changes the numbers, in real processes, replayed."""

import io

import pytest

from jasgd import experiment
from tests import live
from tests.runtime import certificates

MLP = {'name': 'digits', 'model': 'mlp', 'batch': 8}
VARIANTS = {
  'grouped updates': {'server': {'max_group': 8}, 'task': MLP},
  'downpour': {
    'strategy': {'name': 'downpour', 'n_push': 2, 'n_fetch': 3},
    'task': MLP,
  },
  'backup, adam, flight': {
    'strategy': {'name': 'backup'},
    'num_workers': 3,
    'optimizer': {'name': 'adam', 'rate': 0.003},
    'runtime': {'wire': 'flight'},
    'task': MLP,
  },
  'ramp-up of rennala': {'strategy': {'name': 'rennala', 's': 3, 'ramp_up': 9}},
}


def _check(config, workdir):
  config.processes.min_seconds = ()
  result = experiment.train_and_evaluate(config, workdir, stream=io.StringIO())
  assert result.clock == 80
  assert result.metrics['server/num_refused'] == 0
  assert live.Run(workdir, config).check_replay() == 80


@pytest.mark.slow
@pytest.mark.parametrize('name', VARIANTS)
def test_replay_has_the_same_bits(name, processes, tmp_path):
  del processes  # The fixture checks that no process is left.
  _check(live.make_config(num_updates=80, **VARIANTS[name]), tmp_path)


@pytest.mark.slow
def test_mutual_tls_with_bfloat16_and_overlap(processes, tmp_path):
  del processes
  tls = certificates.make_authority(tmp_path, 'ours')
  names = ('certificate', 'key', 'authority')
  files = {name: str(getattr(tls, name)) for name in names}
  config = live.make_config(
    num_updates=80,
    runtime={'wire': 'flight', 'wire_dtype': 'bfloat16', 'overlap': True},
    server=files,
  )
  _check(config, tmp_path / 'run')
