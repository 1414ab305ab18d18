"""What the processes of a group agree on, and how often they vote."""

import numpy as np
import pytest

from jasgd.runtime import _group_votes


class Voters:
  """Votes of nodes whose steps take some seconds each, by a clock by hand."""

  def __init__(self, seconds):
    self._seconds = seconds
    self._times = [100.0 * node for node in range(len(seconds))]
    self._told = []
    self._is_listening = True
    self._votes = [
      _group_votes.Votes(self._tell_all, lambda node=node: self._times[node])
      for node in range(len(seconds))
    ]

  def _tell_all(self, numbers):
    """What all say, once they have been asked what they would."""
    if not self._is_listening:
      return np.array(self._told)
    self._told.append(numbers)
    raise InterruptedError

  def vote(self, **own):
    """All vote; how many steps they make then, which pass."""
    options = {'is_stopping': False, 'is_diverged': False, 'is_due': False}
    self._told, self._is_listening = [], True
    for votes in self._votes:
      with pytest.raises(InterruptedError):
        votes.vote(**options, **own)
    self._is_listening = False
    verdicts = [votes.vote(**options, **own) for votes in self._votes]
    assert all(verdict == verdicts[0] for verdict in verdicts)
    for node, seconds in enumerate(self._seconds):
      self._times[node] += verdicts[0].num_steps * seconds
    return verdicts[0].num_steps

  def slow_down(self, seconds):
    """Steps take longer from now on."""
    self._seconds = seconds


def test_votes_are_as_often_as_steps_are_long():
  short = Voters((1e-3, 2e-4))
  intervals = [short.vote() for _ in range(12)]
  assert intervals[:5] == [1, 2, 4, 8, 16]
  assert intervals[-1] == _group_votes._MAX_STEPS
  # Some steps may be long, as they are compiled, or from some time on.
  short.slow_down((1e-3, 0.1))
  short.vote()
  assert [short.vote() for _ in range(3)] == [5, 5, 5]
  short.slow_down((20.0, 0.1))
  short.vote()
  assert [short.vote() for _ in range(3)] == [1, 1, 1]
  short.slow_down((0.0, 0.0))
  assert [short.vote() for _ in range(4)] == [1, 2, 4, 8]


@pytest.mark.parametrize('seconds', [0.0, 1e-6, 0.01, 0.3, 40.0, 1e5])
def test_whoever_waits_for_a_vote_does_not_wait_long(seconds):
  voters = Voters((seconds, seconds / 2))
  for _ in range(30):
    num_steps = voters.vote()
    assert 1 <= num_steps <= _group_votes._MAX_STEPS
    assert num_steps * seconds <= max(seconds, _group_votes._SECONDS)


def make_votes(rows):
  """Votes where others say what they say."""
  return _group_votes.Votes(lambda numbers: np.array([numbers, *rows(numbers)]))


def test_what_all_agree_on():
  assert make_votes(lambda own: [[3], [5]]).agree_on_number(4) == 5
  pad = [-1] * 6
  votes = make_votes(lambda own: [[10, 20, *pad], [20, 40, *pad]])
  assert votes.agree_on_step({10: 1, 20: 2, 40: 3}) == 20
  assert votes.agree_on_step([40]) is None
  assert votes.agree_on_step([]) is None
  votes = make_votes(lambda own: [own[::-1]])
  found = votes.exchange_addresses('h:1')
  assert found[0] == 'h:1'
  verdict = make_votes(lambda own: [[1, 0, 0, 5], [0, 0, 1, 9]]).vote(
    is_stopping=False, is_diverged=True, is_due=False
  )
  assert verdict == ([1], True, True, 1)
