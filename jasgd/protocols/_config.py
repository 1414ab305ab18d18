"""Protocols by name, and protocols built from configs."""

from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _configurable
from jasgd.protocols import _counting
from jasgd.protocols import _quorum
from jasgd.protocols import _ramp_up
from jasgd.protocols import _ssp

PROTOCOLS: dict[str, type[_base.Protocol]] = {
  kind.name: kind
  for kind in (
    _counting.Asynchronous,
    _counting.ConstantDelay,
    _counting.Downpour,
    _counting.Rennala,
    _counting.Ringmaster,
    _counting.Softsync,
    _quorum.Backup,
    _quorum.Hardsync,
    _ramp_up.RampUp,
    _ssp.Ssp,
  )
}


def from_config(config: dict[str, Any]) -> _base.Protocol:
  """Builds a protocol from its config. The inverse of `Protocol.to_config`.

  `jasgd.gossip.make_strategy` does the same for protocols and peer strategies.

  Args:
    config: `{'name': ..., 'arguments': {...}}`. The name is that of a function
      of `jasgd.protocols`, or `'module:name'` of your own subclass of
      `Protocol`, which is imported. A dict of this form among the arguments
      is a protocol too. Without 'arguments' there are none.

  Returns:
    A new protocol, before the start of a run.

  Raises:
    ValueError: if the config has another form, the name is unknown, the module
      cannot be imported, the name is not that of a `Protocol`, or the
      arguments do not fit.

  Examples:
    >>> from jasgd import protocols
    >>> protocols.from_config({'name': 'softsync', 'arguments': {'n': 2}})
    softsync(n=2)
  """
  found = _configurable.build(config, PROTOCOLS, 'protocol')
  if not isinstance(found, _base.Protocol):
    raise ValueError(
      f'{config["name"]!r} must be the name of a subclass of '
      f'jasgd.protocols.Protocol, but it is {type(found)!r}.'
    )
  return found
