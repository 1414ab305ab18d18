"""Protocols from text: the inverse of `repr`, and nothing else."""

import pytest

from jasgd import protocols
from tests.protocols import test_protocols


@test_protocols.every_protocol
def test_it_is_the_inverse_of_repr(make):
  protocol = make()
  parsed = protocols.parse_protocol(repr(protocol))
  assert type(parsed) is type(protocol)
  assert repr(parsed) == repr(protocol)
  for each in (parsed, protocol):
    each.init(test_protocols.NUM_LEARNERS)
  assert parsed.save() == protocol.save()


def test_every_public_protocol_is_tried():
  kinds = {
    value
    for value in vars(protocols).values()
    if isinstance(value, type) and issubclass(value, protocols.Protocol)
  }
  tried = {type(make()) for make in test_protocols.PROTOCOLS.values()}
  assert tried == kinds - {protocols.Protocol}


def test_it_is_a_fresh_one():
  text = 'softsync(n=1)'
  first = protocols.parse_protocol(text)
  first.init(1)
  first.on_push(0, 0, 0)
  assert first.clock == 1
  assert protocols.parse_protocol(text).clock == 0


@pytest.mark.parametrize(
  ('text', 'other'),
  [
    (' softsync( n = 2 )\n', 'softsync(n=2)'),
    ('softsync(2)', 'softsync(n=2)'),
    (
      'ramp_up(protocol=softsync(n=2), num_updates=20)',
      'ramp_up(softsync(2), 20)',
    ),
  ],
)
def test_ways_to_write_the_same(text, other):
  first, second = map(protocols.parse_protocol, (text, other))
  assert repr(first) == repr(second)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('', "written like 'softsync"),
    ('softsync', "written like 'softsync"),
    ('softsync(n=2', 'SyntaxError'),
    ('softsync(2): the server updates once', 'SyntaxError'),
    ('softsync(n=2)\0', 'written like|null'),
    ('softsync(n=2); asynchronous()', 'SyntaxError'),
    ('protocols.softsync(n=2)', "written like 'softsync"),
    ('(lambda: 1)()', "written like 'softsync"),
    ('2', "written like 'softsync"),
    ('median(n=2)', r"Unknown protocol 'median' .* Known: asynchronous, .*ssp"),
    ('print(1)', "Unknown protocol 'print'"),
    ('softsync()', 'no protocol: .*missing 1 required'),
    ('softsync(m=2)', "no protocol: .*unexpected keyword argument 'm'"),
    ('softsync(1, 2)', 'no protocol'),
    ('softsync(1, n=2)', "no protocol: .*multiple values for argument 'n'"),
    ('softsync(**{})', "whole numbers and protocols, got '{}'"),
    ('softsync(**ssp(s=1))', 'no protocol: .*unexpected keyword'),
    ('softsync(*ssp(s=1))', 'whole numbers and protocols'),
    ('softsync(n=0)', 'n must be a whole number of at least 1, got 0'),
    ('softsync(n=-2)', "whole numbers and protocols, got '-2'"),
    ('softsync(n=2.0)', "whole numbers and protocols, got '2.0'"),
    ('softsync(n=True)', "whole numbers and protocols, got 'True'"),
    ('softsync(n=open("x"))', "Unknown protocol 'open'"),
    ('softsync(n=1+1)', r"whole numbers and protocols, got '1 \+ 1'"),
    ('softsync(n=ssp(s=1))', 'n must be a whole number'),
    ('ramp_up(protocol=3, num_updates=2)', 'ramp_up takes a protocol'),
    ('ramp_up(' * 3000 + ')' * 3000, 'Error'),
    (None, 'parsed from a text, got None'),
  ],
)
def test_what_is_refused(text, message):
  with pytest.raises(ValueError, match=message):
    protocols.parse_protocol(text)
