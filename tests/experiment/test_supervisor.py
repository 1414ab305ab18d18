"""What a supervisor of a server and learners says, with members that obey."""

import io
import logging
import types

from jasgd.experiment import _supervisor


class Member:
  """A process that is seen to have ended when somebody waits for it."""

  def __init__(self, name, code=0):
    self.name, self.code, self._last_code = name, None, code

  def end(self, timeout):
    del timeout
    self.code = self._last_code

  def read_log(self):
    return ''


def _run(members, status):
  """A run whose server says the same whenever it is asked."""
  observer = types.SimpleNamespace(
    get_status=lambda: status,
    evaluate=lambda: (status['clock'], {}),
    leave=lambda: None,
    close=lambda: None,
  )
  server, *learners = members
  return _supervisor.Supervisor(
    observer,
    lambda: server,
    [lambda learner=learner: learner for learner in learners],
    num_updates=100,
    stream=io.StringIO(),
  ).run()


def test_a_learner_whose_loss_ends_the_run_is_named(caplog):
  # The server sees a connection break before the process counts as dead.
  members = [Member('server'), Member('learner-0'), Member('learner-1', -9)]
  status = {'clock': 7, 'end_reason': 'Learner 1 was lost.', 'metrics': {}}
  with caplog.at_level(logging.WARNING):
    assert _run(members, status) == {**status, 'test': {}}
  assert 'learner-1 was lost (exit code -9)' in caplog.text
  assert 'learner-0' not in caplog.text
  assert all(member.code is not None for member in members)
