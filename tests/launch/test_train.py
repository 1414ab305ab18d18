"""Training, sweeps and reports, as people run them."""

import csv
import json
import pathlib
import re
import subprocess
import sys

import pytest

from configs import gossip_digits
import jasgd
from jasgd import traces
from tests.tasks import cases

pytestmark = pytest.mark.usefixtures('compile_once', 'quick_compiler')

ROOT = pathlib.Path(__file__).parent.parent.parent
SIMULATIONS = ('simulate_gossip', 'simulate_jain')
NODE_CONFIGS = ('gossip_digits', 'mnist_strategies')
CONFIGS = sorted(
  path.stem
  for path in (ROOT / 'configs').glob('*.py')
  if 'def get_config' in path.read_text()
  and path.stem not in (*SIMULATIONS, *NODE_CONFIGS)
)


def test_train_leaves_weights_and_a_report(tmp_path):
  """Runs in a process of its own, unlike the other tests of this file."""
  command = [sys.executable, '-m', 'launch.train']
  command += [
    '--config=configs/digits_async.py',
    f'--workdir={tmp_path}',
    '--config.num_epochs=2',
    '--config.task.model=mlp',
  ]
  done = subprocess.run(
    command, cwd=ROOT, timeout=300, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 'asynchronous: the server updates with every gradient' in done.stdout
  assert re.search(r'clock 90/90 100%  .*/s  took .* acc 0\.\d+', done.stderr)
  accuracy = re.search(r'^test/accuracy +(\S+)$', done.stdout, re.M)
  assert float(accuracy[1]) > 0.5
  assert 'All 90 updates were made.' in done.stdout
  assert traces.Trace.load(tmp_path / 'trace').num_updates == 90
  assert set(jasgd.load_params(tmp_path)) >= {'Dense_0', 'Dense_1'}
  page = (tmp_path / 'report.html').read_text()
  assert 'optimizer.policy' in page


@pytest.mark.slow
@pytest.mark.parametrize('name', CONFIGS)
def test_every_config_runs_as_smoke(name, commands, tmp_path):
  text = (ROOT / 'configs' / f'{name}.py').read_text()
  arguments = []
  if 'digits' not in name:
    arguments = [f'--config.task.data_dir={cases.find_data()}']
  assert f'--config=configs/{name}.py' in text  # The lab note has the command.
  done = commands.run(
    'launch.train',
    f'--config=configs/{name}.py:smoke',
    f'--workdir={tmp_path}',
    *arguments,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['clock'] == 40


@pytest.mark.slow
@pytest.mark.parametrize(
  ('config', 'variant'),
  [
    ('gossip_digits', 'simulate,smoke'),
    ('gossip_digits', 'elastic,devices,smoke'),
    ('mnist_strategies', 'smoke'),
  ],
)
def test_every_config_of_nodes_runs_as_smoke(
  config, variant, commands, tmp_path
):
  assert config in NODE_CONFIGS
  flags = []
  if 'digits' not in config:
    flags = [f'--config.task.data_dir={cases.find_data()}']
  done = commands.run(
    'launch.train',
    f'--config=configs/{config}.py:{variant}',
    f'--workdir={tmp_path}',
    *flags,
  )
  assert done.returncode == 0, done.stderr
  assert re.search(r'steps (\d+)/\1 100%  .* loss \d.* acc 0\.', done.stderr)
  result = json.loads((tmp_path / 'result.json').read_text())
  assert result['metrics']['gossip/consensus_error'] > 0
  assert (tmp_path / 'report.html').exists()
  assert set(jasgd.load_params(tmp_path)) >= {'Dense_0', 'Dense_1'}


def test_gossip_is_what_its_config_says_without_a_variant():
  config = gossip_digits.get_config()
  assert (config.strategy.name, config.num_workers) == ('pull', 4)
  assert config.runtime.mode == 'local'
  for name in ('elastic', 'allreduce'):
    other = gossip_digits.get_config(name)
    config.strategy.name = name
    assert other == config  # They differ by one flag.


def test_configs_of_nodes_have_their_command_in_the_note():
  for name in NODE_CONFIGS:
    text = (ROOT / 'configs' / f'{name}.py').read_text()
    assert f'launch.train --config=configs/{name}.py' in text


BAD_FLAGS = {
  '--config=configs/sizes.py': 'configs/sizes.py has no function get_config.',
  '--config=configs/digits_async.py:big': "must be smoke, got 'big'",
  '--config=configs/gossip_digits.py:gossip': "compare, got 'gossip'",
  '--config=configs/gossip_digits.py:pull,push': (
    'one strategy and one place, got pull, push'
  ),
  '--config=configs/nothing.py': 'nothing.py',
  '--config.nothing=1': 'Field nothing not found',
  '--config.optimizer.rate=-1': 'rate must be finite and above 0, got -1.0',
  '--config.task.name=imagenet': "Unknown task 'imagenet'",
}


@pytest.mark.parametrize('flag', BAD_FLAGS)
def test_bad_flags_are_named_in_a_line(flag, commands, tmp_path):
  config = '--config=configs/digits_async.py'
  flags = [flag] if flag.startswith('--config=') else [config, flag]
  done = commands.run('launch.train', f'--workdir={tmp_path}/work', *flags)
  assert done.returncode == 1
  assert BAD_FLAGS[flag] in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr
  assert not (tmp_path / 'work').exists()


@pytest.mark.parametrize('module', ['compare', 'simulate', 'sweep', 'train'])
def test_a_second_config_is_refused(module, commands, tmp_path):
  """The second file would be loaded into the module of the first one."""
  done = commands.run(
    f'launch.{module}',
    '--config=configs/digits_async.py:smoke',
    '--config',
    'configs/sizes.py',
    f'--workdir={tmp_path}/work',
    *(['--grid=seed=0,1'] if module == 'sweep' else []),
  )
  assert done.returncode == 1
  rule = (
    '--config must be given once, got configs/digits_async.py:smoke and '
    'configs/sizes.py.'
  )
  assert rule in done.stderr
  assert not (tmp_path / 'work').exists()


def test_missing_data_names_the_folder_and_the_way_out(commands, tmp_path):
  done = commands.run(
    'launch.train',
    '--config=configs/mnist_delay.py',
    f'--workdir={tmp_path}/work',
    f'--config.task.data_dir={tmp_path}/data',
    JASGD_CACHE=str(tmp_path / 'cache'),
  )
  assert done.returncode == 1
  assert f'{tmp_path}/data' in done.stdout + done.stderr
  assert 'tfds.data_source' in done.stdout + done.stderr
  assert 'Traceback' not in done.stderr


@pytest.mark.parametrize('name', SIMULATIONS)
def test_simulations_run_as_smoke(name, commands, tmp_path):
  done = commands.run(
    'launch.simulate',
    f'--config=configs/{name}.py:smoke',
    f'--workdir={tmp_path}',
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'timeline.png').exists()


@pytest.mark.slow
def test_sweep_ends_with_a_table_and_a_heat_map(commands, tmp_path):
  arguments = (
    'launch.sweep',
    '--config=configs/digits_delay.py:smoke',
    f'--workdir={tmp_path}',
    '--grid=optimizer.rate=0.01,0.1;task.batch=16,32;strategy.delay=0,8',
  )
  done = commands.run(*arguments)
  assert done.returncode == 0, done.stderr
  assert '8 cells' in done.stdout
  line = r'optimizer.rate=0\.1 task.batch=32 strategy.delay=8 test/accuracy=0\.'
  assert len(re.findall(line, done.stdout)) == 1
  with open(tmp_path / 'sweep.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 8
  assert (tmp_path / 'heat_map.png').read_bytes().startswith(b'\x89PNG')
  again = commands.run(*arguments)
  assert again.returncode == 0
  assert not re.search(line, again.stdout)  # It skips finished cells.


@pytest.mark.slow
def test_reports_of_several_runs(commands, tmp_path):
  for name in ('a', 'b'):
    rate = {'a': 0.01, 'b': 0.02}[name]
    done = commands.run(
      'launch.train',
      '--config=configs/digits_async.py:smoke',
      f'--workdir={tmp_path}/{name}',
      f'--config.optimizer.rate={rate}',
    )
    assert done.returncode == 0, done.stderr
  again = commands.run(
    'launch.train',
    '--config=configs/digits_async.py:smoke',
    f'--workdir={tmp_path}/a',
  )
  assert again.returncode == 1
  assert 'optimizer.rate is 0.01 there and 0.03 here' in again.stderr
  done = commands.run(
    'launch.report',
    f'--workdir={tmp_path}/a,{tmp_path}/b',
    f'--output={tmp_path}/both.html',
  )
  assert done.returncode == 0, done.stderr
  page = (tmp_path / 'both.html').read_text()
  assert '0.01' in page
  assert '0.02' in page
