"""Every wire, for the tests that all of them must pass.

A case is a function of an inbox and a payload size in bytes. It makes a
listener, and a function `connect` that gives a new connection to it each time;
`connect(payload_size=n)` makes a client that expects another size.
"""

from collections.abc import Callable
from typing import Any

from jasgd.runtime import wires
from tests.runtime import flight_case

DEADLINE = 60.0  # Seconds: never reached, unless something is broken.


def _make_queue(inbox, payload_size):
  listener = wires.QueueListener(inbox, payload_size)
  return listener, listener.connect


def _make_memory(inbox, payload_size):
  listener = wires.MemoryListener(inbox, payload_size)

  def connect(payload_size=payload_size):
    return wires.connect_memory(
      listener.address, payload_size, deadline=DEADLINE
    )

  return listener, connect


EVERY: dict[str, Callable[..., tuple[Any, Any]]] = {
  'queue': _make_queue,
  'memory': _make_memory,
  'flight': flight_case.make_flight,
}
# Functions of `wires` that connect from other processes, by wire. They take an
# address, a payload size and a deadline.
REMOTE = {'memory': 'connect_memory', 'flight': 'connect_flight'}
