"""Protocols stored as name and arguments, and built from them."""

import json
import sys

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from tests.protocols import cases
from tests.protocols import test_protocols

OWN = 'tests.protocols.cases:Every'


def _copy(protocol):
  """A protocol that went through JSON, as in a trace's header."""
  return gossip.make_strategy(json.loads(json.dumps(protocol.to_config())))


@test_protocols.every_protocol
def test_round_trip(make):
  protocol = make()
  copy = _copy(protocol)
  assert type(copy) is type(protocol)
  assert repr(copy) == repr(protocol)
  for each in (copy, protocol):
    each.init(test_protocols.NUM_LEARNERS)
  assert copy.save() == protocol.save()


def test_every_public_protocol_is_tried():
  kinds = {
    value
    for value in vars(protocols).values()
    if isinstance(value, type) and issubclass(value, protocols.Protocol)
  }
  tried = {type(make()) for make in test_protocols.PROTOCOLS.values()}
  assert tried == kinds - {protocols.Protocol}


def test_the_config_of_a_started_protocol_is_that_of_a_new_one():
  protocol = protocols.softsync(1)
  protocol.init(1)
  protocol.on_push(0, 0, 0)
  assert protocol.clock == 1
  assert _copy(protocol).clock == 0


def test_protocols_nest():
  protocol = protocols.ramp_up(cases.Every(3), 20)
  assert protocol.to_config() == {
    'name': 'ramp_up',
    'arguments': {
      'protocol': {'name': OWN, 'arguments': {'number': 3}},
      'num_updates': 20,
    },
  }
  assert repr(_copy(protocol)) == repr(protocol)


def test_an_own_protocol_is_named_by_its_module():
  protocol = cases.Every(2)
  assert protocol.to_config() == {'name': OWN, 'arguments': {'number': 2}}
  copy = _copy(protocol)
  assert isinstance(copy, cases.Every)
  assert copy.number == 2


def test_a_subclass_of_a_known_protocol_is_not_taken_for_it():
  class Other(protocols.asynchronous):
    pass

  config = Other().to_config()
  assert config['name'].startswith(f'{__name__}:')
  with pytest.raises(ValueError, match='at its top level, not in a'):
    gossip.make_strategy(config)


@pytest.mark.parametrize(
  'note', [None, True, 1, 0.5, 'text', [1, [2]], {'a': 1}, {'name': 2}]
)
def test_arguments_that_json_can_hold(note):
  assert _copy(cases.Noted(note)).note == note


@pytest.mark.parametrize('note', [np.ones(2), object(), float('nan'), {1, 2}])
def test_arguments_that_json_cannot_hold(note):
  message = r'note=.* cannot be stored as JSON .*Noted\.arguments must return'
  with pytest.raises(ValueError, match=message):
    cases.Noted(note).to_config()


@pytest.mark.parametrize(
  ('config', 'message'),
  [
    (None, "{'name': 'softsync', .*}, got None"),
    ('softsync(n=2)', "is a dict .* got 'softsync"),
    ({}, 'is a dict .* got {}'),
    ({'name': 2}, "is a dict .* got {'name': 2}"),
    ({'name': 'ssp', 'arguments': [1]}, 'is a dict'),
    ({'name': 'ssp', 'arguments': {1: 1}}, 'is a dict'),
    ({'name': 'ssp', 's': 1}, "is a dict .* got {'name': 'ssp', 's': 1}"),
    ({'name': 'median'}, "'median'. Known: asynchronous, .*; .*'module:na"),
    ({'name': 'softsync'}, r"'softsync' takes .*\(n\), got {}: missing"),
    (
      {'name': 'softsync', 'arguments': {'m': 2}},
      "'softsync' takes the arguments .* got {'m': 2}",
    ),
    (
      {'name': 'softsync', 'arguments': {'n': 0}},
      'n must be a whole number of at least 1, got 0',
    ),
    (
      {'name': 'ramp_up', 'arguments': {'protocol': 3, 'num_updates': 2}},
      'ramp_up takes a protocol .* got 3',
    ),
    (
      {
        'name': 'ramp_up',
        'arguments': {'protocol': {'name': 'median'}, 'num_updates': 2},
      },
      "Unknown strategy 'median'",
    ),
    ({'name': OWN, 'arguments': {'number': 0}}, 'number must be .* got 0'),
    ({'name': OWN}, r'Every. takes the arguments \(number\), got {}'),
    (
      {'name': 'no_such_module:Every'},
      "'no_such_module:Every' cannot be imported .*ModuleNotFound.*PYTHONPATH",
    ),
    ({'name': ':Every'}, "':Every' cannot be imported"),
    ({'name': f'{OWN}s'}, "no attribute 'Everys'.* at its top level"),
    ({'name': 'tests.protocols.cases:'}, "no attribute ''"),
    (
      {'name': 'tests.protocols.cases:NOT_A_CLASS'},
      r'must be the name of a subclass of jasgd.* but it is every\(number=2\)',
    ),
    ({'name': 'os:getcwd'}, "'os:getcwd' must be the name of a subclass"),
    ({'name': 'builtins:dict'}, 'must be the name of a subclass'),
  ],
)
def test_configs_that_are_refused(config, message):
  with pytest.raises(ValueError, match=message):
    gossip.make_strategy(config)


def test_a_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
  (tmp_path / 'failing_protocol.py').write_text('1 / 0\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ValueError, match=r'imported \(ZeroDivision'):
    gossip.make_strategy({'name': 'failing_protocol:Mine'})
  assert 'failing_protocol' not in sys.modules


def test_a_protocol_without_its_rule_says_which_hook_is_missing():
  class Empty(protocols.Protocol):
    pass

  protocol = Empty()
  protocol.init(1)
  assert protocol.describe() == 'Empty()'
  with pytest.raises(NotImplementedError, match='Empty must override handle_p'):
    protocol.on_push(0, 0, 0)
