"""How long messages and updates take."""

from typing import NamedTuple

import numpy as np

from jasgd.simulation import _times


class Network(NamedTuple):
  """The way between the learners and the server, in seconds and bytes.

  A push takes the latency, waits for its turn on the server's incoming link,
  and is then sent at the slower of the two bandwidths; a pull likewise, on the
  outgoing link. The server works on one update at a time. With several shards
  each holds a part of the weights, has a link of its own, and updates its part.

  Attributes:
    latency: Of one message.
    bandwidth: Of a learner's link, in bytes per second.
    server_bandwidth: Of the server's link, which all pushes (and, the other
      way, all pulls) share.
    bytes_per_push: Size of a gradient.
    bytes_per_pull: Size of the weights.
    server_time: Of one update: a number, or a time model of its own.
    num_shards: Servers among which the weights are split.
  """

  latency: float = 0.0
  bandwidth: float = np.inf
  server_bandwidth: float = np.inf
  bytes_per_push: float = 0.0
  bytes_per_pull: float = 0.0
  server_time: float | _times.ComputeTime = 0.0
  num_shards: int = 1

  def check(self) -> None:
    """Raises a ValueError for what cannot be."""
    for name in ('latency', 'bytes_per_push', 'bytes_per_pull', 'server_time'):
      value = getattr(self, name)
      if isinstance(value, _times.ComputeTime):
        continue  # It was checked when it was built.
      if not 0 <= value < np.inf:
        raise ValueError(f'{name} must be finite and at least 0, got {value}.')
    for name in ('bandwidth', 'server_bandwidth'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be above 0, got {getattr(self, name)}.')
    if self.num_shards < 1:
      raise ValueError(f'num_shards must be at least 1, got {self.num_shards}.')

  @property
  def is_free(self) -> bool:
    """Whether messages and updates take no time at all."""
    return (
      self.latency == 0
      and self.server_time == 0
      and self.link_time(self.bytes_per_push) == 0
      and self.link_time(self.bytes_per_pull) == 0
    )

  def link_time(self, num_bytes: float) -> float:
    """Seconds that a message is on the wire."""
    slower = min(self.bandwidth, self.server_bandwidth * self.num_shards)
    return num_bytes / slower

  def server_link_time(self, num_bytes: float) -> float:
    """Seconds for which a message occupies the server's link."""
    return num_bytes / (self.server_bandwidth * self.num_shards)


def make_network(
  num_parameters: int,
  *,
  bytes_per_parameter: int = 4,
  latency: float = 0.0,
  bandwidth: float = np.inf,
  server_bandwidth: float = np.inf,
  server_time: float | _times.ComputeTime = 0.0,
  num_shards: int = 1,
) -> Network:
  """A network for messages of a model's size.

  Args:
    num_parameters: Of the model.
    bytes_per_parameter: Of the wire's dtype: 4 for float32, 2 for bfloat16.
    latency: As in `Network`, and so are the others.
    bandwidth: Of a learner's link.
    server_bandwidth: Of the server's link.
    server_time: Of one update.
    num_shards: Servers among which the weights are split.

  Returns:
    A `Network`.

  Examples:
    >>> from jasgd import simulation
    >>> network = simulation.make_network(1_000_000, bandwidth=1e9)
    >>> network.link_time(network.bytes_per_push)
    0.004
  """
  if num_parameters < 1:
    raise ValueError(
      f'num_parameters must be at least 1, got {num_parameters}.'
    )
  size = float(num_parameters * bytes_per_parameter)
  network = Network(
    latency=latency,
    bandwidth=bandwidth,
    server_bandwidth=server_bandwidth,
    bytes_per_push=size,
    bytes_per_pull=size,
    server_time=server_time,
    num_shards=num_shards,
  )
  network.check()
  return network
