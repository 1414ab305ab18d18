"""A worker's side of the suite `gossip`: questions, and answers to them."""

import json
import os
import signal
import sys
from typing import Any


class Parent:
  """Who asks: a line for each question, a line of JSON for each answer.

  From then on stdout is for answers alone: what libraries print (gloo does)
  goes to stderr. And Ctrl-C is for the parent, which ends its workers.
  """

  def __init__(self) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.flush()
    self._answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)

  def take(self) -> str:
    """The next question; '' if there are no more."""
    return sys.stdin.readline()

  def answer(self, found: dict[str, Any]) -> None:
    """Says what was found."""
    self._answers.write(json.dumps(found) + '\n')
    self._answers.flush()
