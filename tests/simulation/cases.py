"""What is simulated: a new time model or protocol is tested by being listed."""

import pytest

from jasgd import protocols
from jasgd import simulation

TIMES = {
  'constant': simulation.constant(1.0),
  'normal': simulation.normal(1.0, 0.2),
  'lognormal': simulation.lognormal(1.0, 0.8),
  'exponential': simulation.exponential(1.0),
  'gamma': simulation.gamma(1.0, 10.0),
  'pareto': simulation.pareto(1.0, 2.5),
  'recorded': simulation.recorded([1.0, 2.0, 0.5]),
  'slow minority': simulation.with_slow_minority(
    simulation.normal(1.0, 0.2), 0.25, 5.0
  ),
  'slow spells': simulation.with_slow_spells(
    simulation.constant(1.0), 20, 4, 3.0
  ),
}
every_time = pytest.mark.parametrize('name', TIMES)

PROTOCOLS = {
  'hardsync': protocols.hardsync,
  'backup': lambda: protocols.backup(1),
  'softsync': lambda: protocols.softsync(2),
  'asynchronous': protocols.asynchronous,
  'downpour': lambda: protocols.downpour(2, 2),
  'downpour, rarely': lambda: protocols.downpour(2, 4),
  'downpour, unevenly': lambda: protocols.downpour(3, 2),
  'ssp': lambda: protocols.ssp(2),
  'rennala': lambda: protocols.rennala(3),
  'ringmaster': lambda: protocols.ringmaster(3),
  'ramp_up': lambda: protocols.ramp_up(protocols.hardsync(), 20),
}
every_protocol = pytest.mark.parametrize('protocol_name', PROTOCOLS)

NETWORKS = {
  'free': simulation.Network(),
  'slow': simulation.Network(latency=0.05, server_time=0.01),
  'shared': simulation.make_network(
    100, latency=0.05, bandwidth=1e4, server_bandwidth=5e3, server_time=0.02
  ),
}
every_network = pytest.mark.parametrize('network_name', NETWORKS)
