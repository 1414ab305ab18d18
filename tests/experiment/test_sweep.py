"""Grids and sweeps: every cell once, by any number of processes."""

import csv
import dataclasses
import multiprocessing

import pytest

from jasgd import experiment
from jasgd.experiment.running import virtual
from tests.experiment import cases

pytestmark = pytest.mark.usefixtures('quick_compiler')

GRID = 'optimizer.rate=0.1,0.2;num_workers=2,4;seed=0,1'


def test_a_grid_is_read():
  axes = experiment.parse_grid(
    'optimizer.name,optimizer.rate=sgd:0.1,adam:1e-3; seed=0,1'
  )
  cells = experiment.list_cells(cases.make_config(), axes)
  assert cells == [
    {'optimizer.name': name, 'optimizer.rate': rate, 'seed': seed}
    for name, rate in (('sgd', 0.1), ('adam', 1e-3))
    for seed in (0, 1)
  ]
  assert isinstance(cells[0]['seed'], int)
  flags = experiment.parse_grid('optimizer.nesterov=true,False')
  cells = experiment.list_cells(cases.make_config(), flags)
  assert [cell['optimizer.nesterov'] for cell in cells] == [True, False]


def _list_fields(part, path=()):
  for field in dataclasses.fields(part):
    value = getattr(part, field.name)
    if dataclasses.is_dataclass(value):
      yield from _list_fields(value, (*path, field.name))
    else:
      yield '.'.join((*path, field.name)), value


@pytest.mark.parametrize(
  ('name', 'value'), list(_list_fields(cases.make_config()))
)
def test_any_field_may_be_an_axis(name, value):
  text = value if isinstance(value, str) else repr(value)
  axes = experiment.parse_grid(f'{name}={text or "x"}')
  ((cell,),) = (
    [cell] for cell in experiment.list_cells(cases.make_config(), axes)
  )
  assert cell == {name: value if text else 'x'}


def test_tuples_are_written_in_parentheses():
  axes = experiment.parse_grid('schedule.epochs=(10,20),(15,);seed=0,1')
  cells = experiment.list_cells(cases.make_config(), axes)
  assert [cell['schedule.epochs'] for cell in cells] == [
    *[(10, 20)] * 2,
    *[(15,)] * 2,
  ]


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path):
  config = cases.make_config()
  config.num_workers = 2
  config.failures.given = ((1.0, 0), (5.0, 1))
  rows = experiment.sweep(config, 'num_updates=2,50,3', tmp_path)
  assert [row['clock'] for row in rows] == [2, 0, 3]
  assert 'All learners were gone' in rows[1]['error']


@pytest.mark.parametrize(
  ('grid', 'message'),
  [
    ('', 'The grid is empty'),
    ('seed', "written as field=value,value, got 'seed'"),
    ('seed=', "written as field=value,value, got 'seed='"),
    ('seed=0,1;seed=2', 'seed is in the grid twice'),
    ('a,b=1:2,3', "'a,b' are 2 fields, but '3' has 1 values"),
    ('optimizer.speed=1', "no field 'optimizer.speed': at 'speed' there are"),
    ('optimizer=sgd', "'optimizer' is no field, but a part"),
    ('seed=1.5', "seed takes a int in a grid, got '1.5'"),
    ('optimizer.nesterov=maybe', "takes a bool in a grid, got 'maybe'"),
    ('time.speeds=(1,', 'time.speeds takes a tuple in a grid'),
  ],
)
def test_bad_grids_are_named(grid, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    experiment.sweep(cases.make_config(), grid, tmp_path)
  assert not list(tmp_path.iterdir())  # Before any work.


def test_bad_cells_are_named_before_any_work(tmp_path):
  grid = 'optimizer.rate=0.1,-1,-2'
  with pytest.raises(ValueError, match='2 cells cannot be trained') as caught:
    experiment.sweep(cases.make_config(), grid, tmp_path)
  assert "{'optimizer.rate': -2.0}: Bad config" in str(caught.value)
  assert not list(tmp_path.iterdir())


def test_a_sweep_goes_on_where_it_stopped(tmp_path):
  class StopError(Exception):
    pass

  done = []

  def stop(row):
    done.append(row)
    if len(done) == 3:
      raise StopError

  config = cases.make_config(num_updates=20)
  with pytest.raises(StopError):
    experiment.sweep(config, GRID, tmp_path, on_row=stop)
  rest = []
  rows = experiment.sweep(config, GRID, tmp_path, on_row=rest.append)
  assert (len(done), len(rest), len(rows)) == (3, 5, 8)
  assert [row['seed'] for row in rows] == [0, 1] * 4
  assert {row['clock'] for row in rows} == {20}
  # Each cell has the result of a run of its own.
  config.optimizer.rate, config.num_workers = 0.2, 2
  alone = experiment.train_and_evaluate(config, tmp_path / 'alone')
  (row,) = (
    row
    for row in rows
    if (row['optimizer.rate'], row['num_workers'], row['seed']) == (0.2, 2, 0)
  )
  for name, value in {'clock': alone.clock, **alone.metrics}.items():
    assert row[name] == pytest.approx(value, rel=1e-5), name
  experiment.write_csv(tmp_path / 'sweep.csv', rows)
  with open(tmp_path / 'sweep.csv', newline='') as file:
    read = list(csv.DictReader(file))
  assert [float(row['test/loss']) for row in read] == [
    row['test/loss'] for row in rows
  ]


def test_cells_start_from_another_run_too(tmp_path):
  first = cases.make_config(num_updates=40)
  result = experiment.train_and_evaluate(first, tmp_path / 'first')
  config = cases.make_config(num_updates=10, init_from=str(tmp_path / 'first'))
  grid = 'optimizer.rate=1e-30'  # The weights stay the first ones.
  (row,) = experiment.sweep(config, grid, tmp_path / 'sweep')
  assert row['test/loss'] == pytest.approx(
    result.metrics['test/loss'], rel=1e-6
  )


def test_another_grid_wants_another_folder(tmp_path):
  config = cases.make_config(num_updates=10)
  experiment.sweep(config, 'seed=0', tmp_path)
  with pytest.raises(ValueError, match='grid is'):
    experiment.sweep(config, 'seed=0,1', tmp_path)


def _work(folder, queue):
  """One of several processes on a folder; prints the cells that it trained."""
  done = []
  experiment.sweep(
    cases.make_config(num_updates=20),
    GRID,
    folder,
    on_row=lambda row: done.append((row['optimizer.rate'], row['seed'])),
  )
  queue.put(done)


def test_several_processes_share_the_cells(tmp_path):
  context = multiprocessing.get_context('spawn')
  queue = context.Queue()
  workers = [
    context.Process(target=_work, args=(tmp_path, queue)) for _ in range(2)
  ]
  for worker in workers:
    worker.start()
  parts = [queue.get(timeout=120) for _ in workers]
  for worker in workers:
    worker.join(timeout=60)
    assert worker.exitcode == 0
  assert sum(map(len, parts)) == 8  # Every cell once.
  rows = experiment.sweep(
    cases.make_config(num_updates=20),
    GRID,
    tmp_path,
    on_row=lambda row: pytest.fail('It was done.'),
  )
  assert len(rows) == 8


def test_cells_share_a_compilation(tmp_path):
  """Rates, delays and seeds are arguments of one compiled program."""
  config = cases.make_config(num_updates=20)
  config.task.name, config.task.model = 'digits', 'mlp'
  config.strategy.name = 'constant_delay'
  config.time = experiment.TimeConfig(name='constant', arguments=(1.0,))
  grid = 'optimizer.rate=0.1,0.2;strategy.delay=0,3,7;seed=0,1'
  experiment.sweep(config, grid, tmp_path)
  run = virtual.make_run(config, config.simulate())
  assert run.replay._engine._loop._cache_size() == 1


def test_nodes_can_be_swept(tmp_path):
  config = cases.make_config('pull')
  rows = experiment.sweep(
    config, 'strategy.name=pull,allreduce;optimizer.rate=0.1,0.2', tmp_path
  )
  assert [row['optimizer.rate'] for row in rows] == [0.1, 0.2, 0.1, 0.2]
  assert all(row['clock'] == 60 for row in rows)
  alone = experiment.train_and_evaluate(config, tmp_path / 'alone')
  assert rows[0]['test/loss'] == pytest.approx(alone.metrics['test/loss'])
