"""Who may come to a node, and what it says for that."""

import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from jasgd import traces
from jasgd.runtime import addresses
from tests.runtime import host_cases


@pytest.fixture
def bench():
  with host_cases.open_bench() as bench:
    yield bench


@pytest.mark.parametrize(
  'said',
  [
    (1, host_cases.ADDRESS, 1.5),
    (0, 'grpc+tls://a.b:1', 0),
    (traces.CENTRE, host_cases.ADDRESS, -3.0),
  ],
)
def test_who_learns_the_same_is_met(bench, said):
  assert (
    host_cases.Client(bench).greet(host_cases.FINGERPRINT, *said).verb
    == host_cases.Verb.ANSWER
  )
  assert bench.met == [said]
  assert bench.host.num_refused == 0


def test_who_has_no_address_may_come_too(bench):
  client = host_cases.Client(bench)
  assert client.greet(address=None).verb == host_cases.Verb.ANSWER
  assert bench.met == [(1, None, 1.5)]
  assert client.push().verb == host_cases.Verb.ANSWER


def test_who_learns_something_else_is_refused(bench):
  client = host_cases.Client(bench)
  answer = client.greet('another run', address=host_cases.ADDRESS)
  host_cases.check_refused(
    bench, answer, "'another run'", repr(host_cases.FINGERPRINT)
  )
  assert bench.met == []
  host_cases.check_refused(bench, client.push(), 'HELLO', count=2)
  # It may think better of it.
  assert client.greet().verb == host_cases.Verb.ANSWER
  assert client.push().verb == host_cases.Verb.ANSWER


def make_hello(**changes):
  said = {
    'fingerprint': host_cases.FINGERPRINT,
    'node': 1,
    'address': None,
    'since': 1.5,
  }
  return json.dumps({**said, **changes})


NONSENSE = {
  'nothing': '',
  'no JSON': '{',
  'a number': '7',
  'a text': '"fingerprint"',
  'a list': '["fingerprint", "node", "address", "since"]',
  'deep': '[' * 60_000,
  'a deep field': '{"fingerprint": ' + '{"a": ' * 9_000,
  'something missing': '{"fingerprint": "of this run", "node": 1}',
  'fingerprint': make_hello(fingerprint=None),
  'node, text': make_hello(node='1'),
  'node, fraction': make_hello(node=1.0),
  'node, bool': make_hello(node=True),
  'node, negative': make_hello(node=-1),
  'node, too large': make_hello(node=1 << 31),
  'address, number': make_hello(address=4000),
  'address, none': make_hello(address=''),
  'address, no port': make_hello(address='localhost'),
  'address, no such port': make_hello(address='localhost:65536'),
  'address, surrogate': make_hello(address='\ud800:4000'),
  'since, text': make_hello(since='now'),
  'since, bool': make_hello(since=True),
  'since, NaN': make_hello(since=float('nan')),
  'since, infinite': make_hello(since=float('inf')),
  'since, too large': make_hello(since=10**400),
  'digits': '{"since": ' + '1' * 60_000 + '}',
}


@pytest.mark.parametrize('name', NONSENSE)
def test_nonsense_is_no_greeting(bench, name):
  client = host_cases.Client(bench)
  answer = client.ask(host_cases.Verb.HELLO, text=NONSENSE[name])
  shown = repr(NONSENSE[name][:64])[1:-1]
  host_cases.check_refused(
    bench, answer, 'fingerprint, node, address, since', shown
  )
  assert len(answer.text) < 1000
  assert bench.met == []
  host_cases.check_refused(bench, client.push(), 'HELLO', count=2)


def check_greeting(text):
  """It is refused and counted, or others can use what they are told."""
  with host_cases.open_bench() as bench:
    answer = host_cases.Client(bench).ask(host_cases.Verb.HELLO, text=text)
    is_refused = answer.verb == host_cases.Verb.REFUSED
    assert bench.host.num_refused == is_refused
    answer.text.encode()  # It can be sent.
    assert len(answer.text) < 1000
    for node, address, since in bench.met:
      assert node == traces.CENTRE or node in range(1 << 31)
      assert -np.inf < since < np.inf
      if address is not None:
        addresses.make_connect(server=address)
        address.encode()
    return is_refused


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(text=st.text() | st.text('[]{}":,0123456789.eE- ntfula\\'))
def test_any_text_is_refused(text):
  assert check_greeting(text)


ANYTHING = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
  lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
  max_leaves=5,
)


@hypothesis.settings(max_examples=80, deadline=None)
@hypothesis.given(
  said=st.fixed_dictionaries(
    {
      'fingerprint': st.just(host_cases.FINGERPRINT) | ANYTHING,
      'node': st.integers(-3, 3) | ANYTHING,
      'address': st.from_regex(r'.{1,3}:\d{1,6}') | ANYTHING,
      'since': st.floats() | ANYTHING,
    }
  )
)
def test_whatever_a_greeting_has_in_it(said):
  check_greeting(json.dumps(said))
