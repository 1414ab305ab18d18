"""Checkpoints: saving, restoring, loading weights, refused arguments."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jasgd
from jasgd import workdir
from tests import trees
from tests.transforms import cases


class Pair(NamedTuple):
  first: Any
  second: Any


def _make_server_state():
  """State of a server: weights, optimizer state, a key, counts."""
  params = cases.make_mixed_params()
  optimizer = jasgd.softsync(optax.adam(0.1), 2)
  return {
    'params': params,
    'opt_state': optimizer.init(params),
    'key': jax.random.PRNGKey(7),
    'samples': jnp.asarray(320, jnp.int32),
  }


STATES = {
  'server': _make_server_state,
  'bits': lambda: [
    jnp.array([0.0, -0.0, jnp.nan, jnp.inf, 1e-45], jnp.float32),
    jnp.array([3.0, -0.0], jnp.bfloat16),
    jnp.array([1.5], jnp.float16),
  ],
  'other dtypes': lambda: (
    jnp.array([True, False]),
    jnp.array([-1], jnp.int8),
    jnp.array([2**32 - 1], jnp.uint32),
    jnp.array([1 + 2j], jnp.complex64),
    jnp.ones(3, jnp.float8_e4m3fn),
  ),
  'no elements': lambda: {'a': jnp.zeros((0, 3)), 'b': jnp.ones(())},
  'only no elements': lambda: [jnp.zeros((2, 0), jnp.int32)],
  'no leaves': lambda: {'a': {}, 'b': None, 'c': optax.EmptyState(), 'd': ()},
  'a leaf': lambda: jnp.asarray(2.0),
  'keys that look like paths': lambda: {
    'a.b': jnp.zeros(1),
    'a': {'b': jnp.ones(1)},
    'a/b': jnp.full(1, 2.0),
    "']['": jnp.full(1, 3.0),
    '': jnp.full(1, 4.0),
  },
  'eleven': lambda: [jnp.asarray(i) for i in range(11)],
  'named': lambda: Pair([jnp.ones(2)], Pair(None, (jnp.zeros(()),))),
  'numpy and numbers': lambda: [np.float32([1, 2]), 3, 0.5, True],
}
PARAMS = {
  'nested': {'a': {'b': np.ones((2, 3), np.float32)}, 'c': {}},
  'lists and tuples': [(np.int32(1), [np.zeros(0)]), (), [], None],
  'numbers as keys': {0: np.zeros(1), 10: np.ones(1), 2: (np.ones(()),)},
  'wide dtypes': {'a': np.array([2**40]), 'b': np.array([1e300])},
  'narrow dtypes': (np.ones(2, jnp.bfloat16), np.array([True])),
  'a leaf': np.float32([1, 2]),
  'nothing': None,
}


def _save(folder, clock, state, position=None, params=None, **options):
  return workdir.save_checkpoint(
    folder, clock, state, position=position or {}, params=params, **options
  )


def _assert_restores(folder, state):
  like = jax.eval_shape(lambda: state)
  _, restored, _ = workdir.restore_checkpoint(folder, like)
  trees.assert_same_bits(restored, jax.tree.map(jnp.asarray, state))
  leaves = jax.tree.leaves(restored)
  assert all(isinstance(leaf, jax.Array) for leaf in leaves)
  return restored


@pytest.mark.parametrize('name', STATES)
def test_a_state_comes_back_as_it_was(name, tmp_path):
  state = STATES[name]()
  _save(tmp_path, 0, state)
  _assert_restores(tmp_path, state)


def test_states_of_every_transformation_are_restored(tmp_path):
  """All of them in one checkpoint, each after an update."""
  params = cases.make_params()
  transforms = {name: case.default for name, case in cases.CASES.items()}

  with jax.disable_jit():  # Compiling all of them would take longer.
    carries = {
      name: cases.take_step(each, (params, each.init(params)), 1)[0]
      for name, each in transforms.items()
    }
  _save(tmp_path, 5, carries)
  _assert_restores(tmp_path, carries)


@pytest.mark.parametrize('name', PARAMS)
def test_params_need_no_model(name, tmp_path):
  params = PARAMS[name]
  _save(tmp_path, 3, {}, params=params)
  loaded = workdir.load_params(tmp_path)
  trees.assert_same_bits(loaded, params)
  assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(loaded))


def test_params_of_other_classes_are_dicts(tmp_path):
  _save(tmp_path, 3, {}, params=[Pair({'a': jnp.ones(1)}, None)])
  expected = [{'first': {'a': np.ones(1, np.float32)}, 'second': None}]
  trees.assert_same_bits(workdir.load_params(tmp_path), expected)


def test_position_and_clock_come_back(tmp_path):
  position = {'trace': 2**40, 'metrics': 33, 'nested': {'a': [1.5, None, 'b']}}
  path = _save(tmp_path, 12, {}, position=position)
  assert path == tmp_path / 'checkpoints' / '12'
  assert workdir.restore_checkpoint(tmp_path, {}) == (12, {}, position)


def test_the_last_are_kept(tmp_path):
  assert workdir.list_checkpoints(tmp_path) == []
  assert workdir.restore_checkpoint(tmp_path, {}) is None
  for clock in (8, 9, 10, 100):
    _save(tmp_path, clock, jnp.asarray(clock), params=np.float32(clock))
  assert workdir.list_checkpoints(tmp_path) == [10, 100]
  like = jax.ShapeDtypeStruct((), jnp.int32)
  for clock in (10, 100):
    restored = workdir.restore_checkpoint(tmp_path, like, clock)
    assert restored == (clock, clock, {})
    assert workdir.load_params(tmp_path, clock) == clock
  assert workdir.load_params(tmp_path) == 100
  _save(tmp_path, 101, {}, keep=3)
  assert workdir.list_checkpoints(tmp_path) == [10, 100, 101]
  _save(tmp_path, 102, {}, keep=1)
  names = [path.name for path in (tmp_path / 'checkpoints').iterdir()]
  assert names == ['102']


def test_a_restored_state_may_be_donated_and_so_may_a_saved_one(tmp_path):
  increment = jax.jit(lambda x: x + 1, donate_argnums=0)
  state = increment(jnp.zeros(1 << 16))
  _save(tmp_path, 0, state)
  _, restored, _ = workdir.restore_checkpoint(tmp_path, state)
  for array in (state, restored):
    pointer = array.unsafe_buffer_pointer()
    # The same memory: no view was left behind that makes jax copy.
    assert increment(array).unsafe_buffer_pointer() == pointer


def test_a_sharding_is_obeyed(tmp_path):
  _save(tmp_path, 0, jnp.ones(4))
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
  like = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding)
  _, restored, _ = workdir.restore_checkpoint(tmp_path, like)
  assert restored.sharding == sharding
  assert restored.committed


@pytest.mark.parametrize(
  ('like', 'message'),
  [
    ({'a': jnp.ones(3), 'b': [jnp.ones(())]}, r"\['a'\].*32\[3\].*32\[2\]\."),
    (
      {'a': jnp.ones(2, jnp.bfloat16), 'b': [jnp.ones(())]},
      r"\['a'\] must be bfloat16\[2\], found float32\[2\]\. .*differ: 1",
    ),
    (
      {'a': jnp.ones(2), 'b': [jnp.ones(()), jnp.ones(4, int)]},
      r"\['b'\]\[1\] must be int32\[4\], found nothing",
    ),
    ({'a': jnp.ones(2)}, r"\['b'\]\[0\] must be nothing, found float32\[\]"),
    (jnp.ones(2), r'the tree must be .* found nothing.*differ: 3'),
  ],
)
def test_another_state_is_refused(like, message, tmp_path):
  _save(tmp_path, 4, {'a': jnp.ones(2), 'b': [jnp.ones(())]})
  with pytest.raises(workdir.WorkdirError, match=message):
    workdir.restore_checkpoint(tmp_path, like)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'state': {'a': np.arange(2)}}, r"\['a'\] is int64.*narrows to int32"),
    ({'state': [jax.random.key(0)]}, r'\[0\] must be.*key<fry>.*key_data'),
    ({'state': ['text']}, r'\[0\] must be an array, got str'),
    ({'params': [object()]}, r'\[0\] must be an array, got object'),
    ({'params': {(1, 2): np.ones(1)}}, r'a string or a number, got \(1, 2\)'),
    ({'position': [1]}, r'position must be a dict, got \[1\]'),
    ({'position': {'a': object()}}, r'position must be writable as JSON'),
    ({'clock': 3}, r'must be above.*checkpoints.*, 3, got 3.*remove'),
    ({'clock': 2}, r'above.*got 2'),
    ({'clock': -1}, r'clock must be a whole number of at least 0, got -1'),
    ({'clock': 4.5}, r'clock must be a whole number of at least 0, got 4.5'),
    ({'keep': 0}, r'keep must be a whole number of at least 1, got 0'),
  ],
)
def test_a_refused_save_changes_nothing(arguments, message, tmp_path):
  _save(tmp_path, 3, jnp.ones(2))
  given = {'clock': 4, 'state': {}, 'position': {}, 'params': {}, **arguments}
  with pytest.raises(ValueError, match=message):
    workdir.save_checkpoint(tmp_path, **given)
  assert workdir.list_checkpoints(tmp_path) == [3]
  _assert_restores(tmp_path, jnp.ones(2))
  _save(tmp_path, 5, jnp.ones(2), keep=1)
  assert len(list((tmp_path / 'checkpoints').iterdir())) == 1


def test_no_checkpoint(tmp_path):
  folder = tmp_path / 'checkpoints'
  with pytest.raises(workdir.WorkdirError, match=f"no checkpoint in '{folder}"):
    workdir.load_params(tmp_path)
  _save(tmp_path, 3, {})
  for read in (
    lambda: workdir.load_params(tmp_path, 4),
    lambda: workdir.restore_checkpoint(tmp_path, {}, 4),
  ):
    with pytest.raises(workdir.WorkdirError, match=r'clock 4 in .* only of 3'):
      read()


def test_a_damaged_checkpoint_is_refused(tmp_path):
  path = _save(tmp_path, 3, jnp.ones(2), params=np.ones(2))
  (path / 'params' / 'manifest.ocdbt').write_bytes(b'')
  with pytest.raises(workdir.WorkdirError, match=r'params.* is damaged'):
    workdir.load_params(tmp_path)
  (path / 'manifest.json').write_text('{')
  with pytest.raises(workdir.WorkdirError, match='is not a file of JSON'):
    workdir.restore_checkpoint(tmp_path, jnp.ones(2))
