"""Protocols from configs: name and arguments, as in a trace's header."""

import importlib
import inspect
from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _counting
from jasgd.protocols import _quorum
from jasgd.protocols import _ramp_up
from jasgd.protocols import _ssp

_KNOWN: dict[str, type[_base.Protocol]] = {
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
  if not _is_config(config):
    raise ValueError(
      "A protocol's config is a dict {'name': ..., 'arguments': {...}}, as in "
      "{'name': 'softsync', 'arguments': {'n': 2}}, got "
      f'{config!r}.'
    )
  name = config['name']
  kind = _find_class(name)
  arguments = {
    key: from_config(value) if _is_config(value) else value
    for key, value in config.get('arguments', {}).items()
  }
  signature = inspect.signature(kind)
  try:
    signature.bind(**arguments)
  except TypeError as error:
    raise ValueError(
      f'The protocol {name!r} takes the arguments '
      f'({", ".join(signature.parameters)}), got {arguments!r}: {error}.'
    ) from None
  return kind(**arguments)


def _is_config(value: Any) -> bool:
  """Whether a value has the form of a protocol's config."""
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return False
  arguments = value.get('arguments', {})
  return (
    value.keys() <= {'name', 'arguments'}
    and isinstance(arguments, dict)
    and all(isinstance(key, str) for key in arguments)
  )


def _find_class(name: str) -> type[_base.Protocol]:
  """The class of a name: a known one, or `'module:name'`, imported."""
  module_name, separator, class_name = name.partition(':')
  if not separator:
    if name not in _KNOWN:
      raise ValueError(
        f'Unknown protocol {name!r}. Known: {", ".join(_KNOWN)}; name a class '
        "of your own as 'module:name'."
      )
    return _KNOWN[name]
  try:
    found = importlib.import_module(module_name)
  except Exception as error:  # A module may fail in any way while it loads.
    raise ValueError(
      f'The module of the protocol {name!r} cannot be imported '
      f'({type(error).__name__}: {error}): check its name, and that its folder '
      'is in PYTHONPATH.'
    ) from None
  try:
    # A name with dots is that of a class inside a class.
    for part in class_name.split('.'):
      found = getattr(found, part)
  except AttributeError:
    raise ValueError(
      f'The protocol {name!r} was not found: the module {module_name!r} has no '
      f'{class_name!r}. Define the class at the top level of a module that can '
      'be imported, not in a script or a function.'
    ) from None
  if not (isinstance(found, type) and issubclass(found, _base.Protocol)):
    raise ValueError(
      f'{name!r} must be the name of a subclass of jasgd.protocols.Protocol, '
      f'but it is {found!r}.'
    )
  return found
