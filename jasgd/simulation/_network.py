"""Durations of messages and updates."""

from collections.abc import Iterator
import itertools
from typing import Any, NamedTuple

import numpy as np

from jasgd import protocols
from jasgd.simulation import _times

_NUM_DRAWN = 1000  # Durations of updates that are drawn at once.


class Network(NamedTuple):
  """The links between workers and a server, or among nodes.

  A push takes the latency, waits for its turn on the server's incoming link,
  and is then sent at the slower of the two bandwidths; a pull likewise, on the
  outgoing link. The server's link is full-duplex: pushes share one direction
  and pulls the other, and neither delays the other. The server works on one
  update at a time. With several shards, each holds a part of the weights, has a
  link of its own, and updates its part.

  Attributes:
    latency: Seconds that one message takes whatever its size.
    bandwidth: Bytes per second of a worker's link.
    server_bandwidth: Bytes per second of the server's link, which all pushes
      share, and all pulls, which go the other way.
    bytes_per_push: Size of a gradient, or of a message between nodes.
    bytes_per_pull: Size of the weights.
    server_time: Seconds of one update: a number, or a time model whose one
      worker is the server.
    num_shards: Number of servers among which the weights are split.
  """

  latency: float = 0.0
  bandwidth: float = np.inf
  server_bandwidth: float = np.inf
  bytes_per_push: float = 0.0
  bytes_per_pull: float = 0.0
  server_time: float | _times.ComputeTime = 0.0
  num_shards: int = 1

  def check(self) -> None:
    """Raises a ValueError if a field makes no sense."""
    for name in ('latency', 'bytes_per_push', 'bytes_per_pull'):
      _times.check_not_negative(name, getattr(self, name))
    for name in ('bandwidth', 'server_bandwidth'):
      if not protocols.check_number(name, getattr(self, name)) > 0:
        raise ValueError(f'{name} must be above 0, got {getattr(self, name)}.')
    protocols.check_count('num_shards', self.num_shards, 1)
    self._check_server_time()
    for name in ('bytes_per_push', 'bytes_per_pull'):
      num_bytes = getattr(self, name)
      if not np.isfinite(self.link_time(num_bytes)):
        raise ValueError(
          f'{name}={num_bytes} take no finite time with '
          f'bandwidth={self.bandwidth} and '
          f'server_bandwidth={self.server_bandwidth}: bandwidths are in bytes '
          'per second.'
        )

  def _check_server_time(self) -> None:
    """Raises a ValueError if `server_time` is no number and no time model."""
    time = self.server_time
    if not isinstance(time, _times.ComputeTime):
      _times.check_not_negative('server_time', time)
      return
    try:
      time.table(0, 0, 1, 1, stream=_times.SERVER)
    except ValueError as error:
      raise ValueError(
        f'server_time must be a time model for one worker, got {time.name}: '
        f'{error}'
      ) from None

  def to_header(self) -> dict[str, Any]:
    """All fields, as a JSON-serialisable dict."""
    fields = self._asdict()
    if isinstance(self.server_time, _times.ComputeTime):
      fields['server_time'] = self.server_time.name
    return {
      name: 'inf' if value == np.inf else value
      for name, value in fields.items()
    }

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
  """Makes a network whose messages have the size of a model.

  Args:
    num_parameters: Number of parameters of the model.
    bytes_per_parameter: Bytes of the dtype in messages: 4 for float32, 2 for
      bfloat16.
    latency: Seconds that one message takes whatever its size.
    bandwidth: Bytes per second of a worker's link.
    server_bandwidth: Bytes per second of the server's link.
    server_time: Seconds of one update.
    num_shards: Number of servers among which the weights are split.

  Returns:
    A `Network`.

  Raises:
    ValueError: if an argument makes no sense.

  Examples:
    >>> from jasgd import simulation
    >>> network = simulation.make_network(1_000_000, bandwidth=1e9)
    >>> network.link_time(network.bytes_per_push)
    0.004
  """
  protocols.check_count('num_parameters', num_parameters, 1)
  protocols.check_count('bytes_per_parameter', bytes_per_parameter, 1)
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


def iterate_update_times(network: Network, seed: int) -> Iterator[float]:
  """Durations of updates, one after another; shards share the work."""
  time = network.server_time
  if not isinstance(time, _times.ComputeTime):
    return itertools.repeat(time / network.num_shards)
  blocks = (
    time.table(seed, first, _NUM_DRAWN, 1, stream=_times.SERVER)
    for first in itertools.count(0, _NUM_DRAWN)
  )
  return (
    duration / network.num_shards
    for block in blocks
    for duration in block[:, 0].tolist()
  )
