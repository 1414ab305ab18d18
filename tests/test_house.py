"""The house itself: rooms, public names, the wheel, the README."""

import ast
from importlib import metadata
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tomllib
import warnings
import zipfile

import optax
import pytest

import jasgd
from jasgd import gossip
from jasgd import protocols
from jasgd import transforms
from tests.transforms import cases

ROOT = pathlib.Path(__file__).parent.parent

# Room -> the outside packages that it may use. A room may import those above.
ROOMS = {
  'transforms': {'jax', 'optax'},
  'protocols': {'numpy'},
  'gossip': {'jax', 'numpy'},
  'traces': {'numpy'},
  'simulation': {'numpy'},
  'tasks': {'jax', 'numpy', 'flax', 'tensorflow_datasets', 'grain', 'sklearn'},
  'workdir': {'jax', 'numpy', 'orbax', 'tensorboardX'},
  'engine': {'jax', 'numpy', 'optax'},
  'runtime': {'jax', 'numpy', 'pyarrow'},
  'reports': {'numpy', 'matplotlib'},
  'experiment': {'jax', 'numpy', 'optax', 'ml_collections'},
}
HEAVY = {
  'absl.flags',
  'flax',
  'grain',
  'matplotlib',
  'ml_collections',
  'orbax',
  'pyarrow',
  'sklearn',
  'tensorflow_datasets',
  'tensorstore',
}
# Names of strategies in configs.
STRATEGY_NAMES = {*protocols.PROTOCOLS, *gossip.STRATEGIES}
# Names of their classes, in `jasgd.protocols` and `jasgd.gossip`.
STRATEGY_CLASSES = {
  *('Protocol', 'PeerStrategy', 'PeerNode', 'Gossip', 'GossipNode'),
  *('Strategy', '_Strategy', '_Protocol'),
  *protocols.PROTOCOLS,
  *(kind.__name__ for kind in protocols.PROTOCOLS.values()),
  *(kind.__name__ for kind in gossip.STRATEGIES.values()),
}
# What tensorflow-datasets reads and decodes with, and does not ask for itself.
READERS = {'array-record', 'pillow'}


def _imports(source):
  """The absolute names of all modules that a source text imports."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, 'Imports are absolute.'
      yield from (f'{node.module}.{alias.name}' for alias in node.names)


def _find_trespasses(room, source):
  """What a room imports and may not."""
  names = list(ROOMS)
  above = set(names[: names.index(room) + 1])
  for name in _imports(source):
    package, *rest = name.split('.')
    if package == 'jasgd':
      if not rest:
        yield f'jasgd/{room} imports all of jasgd'
      elif rest[0] not in above:
        yield f'jasgd/{room} imports jasgd.{rest[0]}, which is below it'
    elif package not in sys.stdlib_module_names | ROOMS[room]:
      yield f'jasgd/{room} imports {package}'
    elif name.startswith('jax._src'):
      yield f'jasgd/{room} imports {name}, which is private'


def test_rooms_only_import_rooms_above():
  rooms = [path for path in (ROOT / 'jasgd').iterdir() if path.is_dir()]
  assert {path.name for path in rooms} - {'__pycache__'} <= set(ROOMS)
  trespasses = [
    f'{path.relative_to(ROOT)}: {trespass}'
    for room in rooms
    for path in room.rglob('*.py')
    for trespass in _find_trespasses(room.name, path.read_text())
  ]
  assert not trespasses


@pytest.mark.parametrize(
  ('room', 'source', 'is_allowed'),
  [
    ('engine', 'from jasgd.transforms import policies', True),
    ('transforms', 'from jasgd.engine import replay', False),
    ('transforms', 'from jasgd import engine', False),
    ('engine', 'import jasgd', False),
    ('protocols', 'import jax', False),
    ('protocols', 'import json', True),
    ('transforms', 'from absl import flags', False),
    ('transforms', 'import jax._src.core', False),
    ('transforms', 'from jax._src import core', False),
  ],
)
def test_the_walk_over_imports_finds_trespasses(room, source, is_allowed):
  assert (not list(_find_trespasses(room, source))) == is_allowed


def _names_class(node):
  """Whether an expression names the class of a strategy, in any room."""
  return any(
    getattr(part, 'attr', getattr(part, 'id', None)) in STRATEGY_CLASSES
    for part in ast.walk(node)
    if isinstance(part, ast.Attribute | ast.Name)
  )


def _is_strategy(node):
  """Whether an expression is a strategy, going by its name."""
  return bool(re.search(r'(strategy|protocol)(\(.*\))?$', ast.unparse(node)))


def _is_dispatch(node):
  """Whether an expression tells strategies apart by class, name or fields."""
  if isinstance(node, ast.Call) and len(node.args) >= 2:
    function = ast.unparse(node.func)
    if function in ('isinstance', 'issubclass'):
      return _names_class(node.args[1])
    return function in ('getattr', 'hasattr') and _is_strategy(node.args[0])
  if isinstance(node, ast.Match):
    sides = [node.subject]
  elif isinstance(node, ast.Compare):
    sides = [node.left, *node.comparators]
  else:
    return False
  texts = {
    part.value
    for side in sides
    for part in ast.walk(side)
    if isinstance(part, ast.Constant) and isinstance(part.value, str)
  }
  is_named = any(
    isinstance(side, ast.Attribute)
    and side.attr == 'name'
    and (_is_strategy(side.value) or texts & STRATEGY_NAMES)
    for side in sides
  )
  is_typed = any(ast.unparse(side).startswith('type(') for side in sides)
  return is_named or (is_typed and any(map(_names_class, sides)))


def _list_dispatches(source):
  """Expressions that should ask a strategy instead."""
  for node in ast.walk(ast.parse(source)):
    if _is_dispatch(node):
      yield ast.unparse(node)


def test_rooms_ask_strategies_instead_of_telling_them_apart():
  """Attributes such as `has_server` also hold for the classes of users."""
  inside = {ROOT / 'jasgd/protocols', ROOT / 'jasgd/gossip'}
  found = [
    f'{path.relative_to(ROOT)}: {dispatch}'
    for folder in ('jasgd', 'launch', 'configs')
    for path in (ROOT / folder).rglob('*.py')
    if not inside & {*path.parents}
    for dispatch in _list_dispatches(path.read_text())
  ]
  assert not found


@pytest.mark.parametrize(
  ('source', 'is_dispatch'),
  [
    ('isinstance(strategy, gossip.PeerStrategy)', True),
    ('isinstance(strategy, (int, protocols.constant_delay))', True),
    ('isinstance(strategy, (int, ConstantDelay))', True),
    ('isinstance(each, Pull | Push)', True),
    ('issubclass(kind, gossip.Strategy)', True),
    ('type(each) is gossip.Pull', True),
    ("self.strategy.name == 'mine'", True),
    ("config.make_strategy().name != 'mine'", True),
    ("each.name in ('pull', 'push')", True),
    ("'constant_delay' == part.name", True),
    ("getattr(strategy, 'protocol', strategy)", True),
    ("hasattr(self.protocol, 'delay')", True),
    ("match strategy.name:\n  case 'mine':\n    pass", True),
    ('isinstance(value, simulation.Network)', False),
    ("self.name == 'sgd'", False),
    ("getattr(self, 'name')", False),
    ('strategy.has_server', False),
    ('first.strategy == second.strategy', False),
  ],
)
def test_the_walk_over_expressions_finds_dispatches(source, is_dispatch):
  assert bool(list(_list_dispatches(source))) == is_dispatch


def test_nothing_else_at_the_top():
  listing = subprocess.run(
    ['git', 'ls-files'], cwd=ROOT, check=True, capture_output=True, text=True
  )
  files = set(listing.stdout.splitlines())
  assert {name for name in files if name.startswith('.ci')} == {'.ci/run'}
  assert {name.split('/')[0] for name in files} == {
    '.ci',
    '.gitignore',
    'CHANGELOG.md',
    'LICENSE',
    'README.md',
    'configs',
    'jasgd',
    'launch',
    'pyproject.toml',
    'tests',
  }


def _modules_after(program):
  """The names of the modules that a fresh interpreter has after `program`."""
  listing = subprocess.run(
    [sys.executable, '-c', f'{program}\nimport sys\nprint(*sys.modules)'],
    cwd=ROOT,
    check=True,
    capture_output=True,
    text=True,
    timeout=120,
  )
  return set(listing.stdout.split())


def test_import_is_lazy_and_light():
  assert 'jax' not in _modules_after('import jasgd')
  everything = _modules_after('from jasgd import *\nimport jasgd.transforms')
  assert 'jasgd.transforms._delay' in everything
  assert not everything & HEAVY - _modules_after('import optax')


def test_contents():
  assert {*jasgd.__all__, *jasgd._ROOMS} <= set(dir(jasgd))
  for name in jasgd.__all__:
    room = getattr(jasgd, jasgd._ROOM_OF.get(name, 'transforms'))
    assert name in room.__all__
    assert getattr(jasgd, name) is getattr(room, name)
  with pytest.raises(AttributeError, match="no attribute 'nothing'"):
    _ = jasgd.nothing


def test_type_checkers_see_the_same_contents():
  tree = ast.parse((ROOT / 'jasgd/__init__.py').read_text())
  typed = {
    alias.name
    for node in ast.walk(tree)
    if isinstance(node, ast.If)
    for statement in node.body
    if isinstance(statement, ast.ImportFrom)
    for alias in statement.names
  }
  assert typed == set(jasgd.__all__)


def test_no_public_function_has_the_name_of_a_room():
  assert not set(jasgd.__all__) & set(ROOMS)


def test_every_transformation_is_in_the_common_test():
  listed = {name.split(',')[0] for name in cases.CASES}
  returned = optax.GradientTransformationExtraArgs
  public = {
    name
    for name in transforms.__all__
    if inspect.isfunction(getattr(transforms, name))
    and inspect.signature(getattr(transforms, name)).return_annotation
    is returned
  }
  assert 'delay' in public
  assert listed == public


def test_every_public_function_has_an_example():
  for name in transforms.__all__:
    function = getattr(transforms, name)
    if inspect.isfunction(function):
      assert '>>> ' in function.__doc__, name
      assert 'Examples:' in function.__doc__, name


def test_wheel_holds_the_library_alone(tmp_path):
  subprocess.run(
    [sys.executable, '-m', 'hatchling', 'build', '-t', 'wheel', '-d', tmp_path],
    cwd=ROOT,
    check=True,
    capture_output=True,
    timeout=120,
  )
  (wheel,) = tmp_path.glob('*.whl')
  assert f'jasgd-{jasgd.__version__}-' in wheel.name
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    (metadata,) = (name for name in names if name.endswith('/METADATA'))
    text = archive.read(metadata).decode()
  top = {name.split('/')[0] for name in names}
  assert top == {'jasgd', f'jasgd-{jasgd.__version__}.dist-info'}
  assert 'jasgd/py.typed' in names
  assert 'Requires-Python: >=3.11' in text


def test_every_dependency_is_used_and_bounded():
  project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
  # What a name is imported from: sklearn comes with scikit-learn.
  packages = metadata.packages_distributions()
  used = {
    package.replace('_', '-')
    for path in (ROOT / 'jasgd').rglob('*.py')
    for name in _imports(path.read_text())
    for package in packages.get(name.split('.')[0], ())
  }
  if 'tensorflow-datasets' in used:
    used |= READERS
  for requirement in project['dependencies']:
    assert re.fullmatch(r'[\w-]+>=[\d.]+,<[\d.]+', requirement), requirement
    assert re.match(r'[\w-]+', requirement).group() in used, requirement


def _list_readme_blocks():
  return re.findall(
    r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL
  )


def test_readme_example_runs():
  """The first block of Python is the 15 lines that we promise."""
  blocks = _list_readme_blocks()
  assert blocks
  assert len(blocks[0].splitlines()) <= 15
  namespace = {'__name__': 'readme'}
  for block in blocks:
    exec(block, namespace)
  assert namespace['loss'] < 1e-9
  assert abs(namespace['mean'] - 29 / 6) < 0.05
  assert namespace['accuracy'] > 0.9


def test_readme_example_of_a_users_own_model_runs(tmp_path):
  """As a user would: a script, real learner processes, and replay."""
  (script,) = (block for block in _list_readme_blocks() if '.train(' in block)
  assert len(script.splitlines()) <= 45
  path = tmp_path / 'own.py'
  path.write_text(script)
  done = subprocess.run(
    [sys.executable, path],
    cwd=tmp_path,
    env={
      **os.environ,
      'NPROC': '1',
      'TMPDIR': str(tmp_path),
      # All of its processes run the same code; one of them compiles it.
      'JAX_COMPILATION_CACHE_DIR': str(tmp_path / 'compiled'),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    },
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert done.returncode == 0, done.stderr
  accuracy, same = done.stdout.splitlines()
  assert float(accuracy.split()[1]) > 0.9
  assert same == 'replayed to the same bits: True'


def test_warnings_of_our_own_are_errors():
  with pytest.raises(UserWarning, match='careful'):
    warnings.warn_explicit(
      'careful', UserWarning, 'file.py', 1, module='jasgd.transforms._delay'
    )


def test_the_readme_says_where_to_change_what():
  """It lists every room in order, and names files that exist."""
  text = (ROOT / 'README.md').read_text()
  table = text.split('where do I change ...?')[1]
  rooms = re.findall(r'^\| `(\w+)`: ', table, re.MULTILINE)
  assert rooms == list(ROOMS)
  rows = re.findall(r'^\|.*\| (an? .*) \| (.*) \| (.*) \|$', table, re.M)
  assert len(rows) > len(rooms)
  for row in rows:
    assert re.search(r'`jasgd/[\w/]+\.py`', row[1]), row
    assert re.fullmatch(r'`tests/[\w/]+\.py`', row[2]), row
  names = re.findall(r'\b(?:jasgd|tests|configs|launch)/[\w/]+\.\w+', text)
  names += [
    f'{name.replace(".", "/")}.py'
    for name in re.findall(r'\blaunch\.\w+', text)
  ]
  assert not [name for name in names if not (ROOT / name).exists()]


def test_help_says_where_to_change_what():
  """It lists every room in order, and names files that exist."""
  table = jasgd.__doc__.split('\nPublic are')[0]
  rooms = re.split(r'^`(\w+)`', table, flags=re.MULTILINE)[1:]
  assert rooms[::2] == list(ROOMS)
  for room, text in zip(rooms[::2], rooms[1::2], strict=True):
    names = re.findall(r'`([\w/]+\.py)`', text)
    assert names, room
    for name in names:
      assert (ROOT / 'jasgd' / room / name).exists(), (room, name)


def test_ci_names_tests_that_exist():
  script = (ROOT / '.ci/run').read_text()
  names = re.findall(r'tests/[\w/]+\.py', script)
  assert len(names) > 5
  assert not [name for name in names if not (ROOT / name).exists()]
