"""Traces of every protocol, small enough to replay in many ways."""

import numpy as np
import pytest

from jasgd import protocols
from jasgd import simulation
from jasgd import traces

# Name -> protocol and number of learners. A new one is tested by being listed.
PROTOCOLS = {
  'asynchronous': (protocols.asynchronous, 8),
  'backup': (lambda: protocols.backup(2), 8),
  'constant_delay': (lambda: protocols.constant_delay(5), 6),
  'downpour, at once': (lambda: protocols.downpour(2, 2), 4),
  'downpour, rarely': (lambda: protocols.downpour(2, 4), 4),
  'downpour, unevenly': (lambda: protocols.downpour(3, 2), 3),
  'hardsync': (protocols.hardsync, 4),
  'ramp_up': (lambda: protocols.ramp_up(protocols.asynchronous(), 50), 6),
  'rennala': (lambda: protocols.rennala(4), 8),
  'ringmaster': (lambda: protocols.ringmaster(5), 8),
  'softsync': (lambda: protocols.softsync(3), 10),
  'ssp': (lambda: protocols.ssp(2), 6),
}
every_protocol = pytest.mark.parametrize('name', PROTOCOLS)


def simulate(name, num_updates, **arguments):
  """A trace of a protocol, with exactly so many updates."""
  make, num_learners = PROTOCOLS[name]
  if name != 'constant_delay':
    arguments = {'compute': simulation.exponential(1.0), **arguments}
  trace = simulation.simulate(
    make(),
    num_workers=num_learners,
    num_gradients=40 * num_updates,
    **arguments,
  )
  records = trace.records
  is_applied = (records['kind'] == traces.Kind.PUSH) & (records['fate'] == 0)
  clock = records['version'] - records['updates']
  return trace[: np.argmax(is_applied & (clock == num_updates))]
