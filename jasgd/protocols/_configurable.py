"""Objects stored as name and arguments, and objects built from that.

Configs and trace headers store a protocol, a peer strategy or a topology as
`{'name': ..., 'arguments': {...}}`, which is plain JSON.
"""

from collections.abc import Callable, Mapping
import importlib
import inspect
import json
from typing import Any, ClassVar


class Configurable:
  """Base class of objects that are stored as name and arguments.

  Attributes:
    name: Name in configs, in `repr` and in reports.
  """

  name: ClassVar[str] = ''

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name, for `repr` and `to_config`.

    Returns:
      Values that JSON can hold, or further objects that have `to_config`.
    """
    return {}

  def to_config(self) -> dict[str, Any]:
    """Name and arguments: an equal object can be built from them.

    Returns:
      A JSON-serialisable dict `{'name': ..., 'arguments': {...}}`. The name of
      a class outside jasgd is `'module:name'`. An argument that has a config
      itself, such as the protocol inside `ramp_up`, becomes such a dict.

    Raises:
      ValueError: if JSON cannot hold an argument.

    Examples:
      >>> from jasgd import protocols
      >>> protocols.softsync(2).to_config()
      {'name': 'softsync', 'arguments': {'n': 2}}
    """
    kind = type(self)
    name = self.name
    if not kind.__module__.startswith('jasgd.'):
      # A subclass of a known class inherits its name, but is another class.
      name = f'{kind.__module__}:{kind.__qualname__}'
    arguments = {}
    for key, value in self.arguments().items():
      if isinstance(value, Configurable):
        arguments[key] = value.to_config()
        continue
      try:
        json.dumps(value, allow_nan=False)
      except (TypeError, ValueError) as error:
        raise ValueError(
          f'The argument {key}={value!r} of {self!r} cannot be stored as JSON '
          f'({error}): {kind.__name__}.arguments must return numbers, strings, '
          'lists, dicts or objects with to_config.'
        ) from None
      arguments[key] = value
    return {'name': name, 'arguments': arguments}

  def identify(self) -> dict[str, Any] | str:
    """The identity by which saved states and runs recognise the object.

    `repr` and `describe` may leave arguments out: two random topologies of
    different seeds can have the same.

    Returns:
      The config as JSON gives it back, with lists for tuples; `repr` if JSON
      cannot hold an argument.

    Examples:
      >>> from jasgd import protocols
      >>> protocols.softsync(2).identify()
      {'name': 'softsync', 'arguments': {'n': 2}}
    """
    try:
      return json.loads(json.dumps(self.to_config()))
    except ValueError:  # `to_config` could not store an argument.
      return repr(self)


def build(
  config: Any,
  known: Mapping[str, Callable[..., Any]],
  noun: str,
  parts: Mapping[str, Callable[..., Any]] | None = None,
) -> Any:
  """Builds an object from its config. The inverse of `to_config`.

  Args:
    config: `{'name': ..., 'arguments': {...}}`. The name is one of `known`, or
      `'module:name'` of a subclass of `Configurable`, which is imported. A
      dict of this form among the arguments is built too. Without 'arguments'
      there are none.
    known: Classes and functions by name.
    noun: Noun for the object in error messages, such as 'protocol'.
    parts: Further classes and functions, for dicts among the arguments only.

  Returns:
    A new object.

  Raises:
    ValueError: if the config has another form, the name is unknown or not that
      of a `Configurable`, the module cannot be imported, or the arguments do
      not fit.
  """
  if not _is_config(config):
    raise ValueError(
      f"The config of a {noun} is a dict {{'name': ..., 'arguments': {{...}}}} "
      "such as {'name': 'softsync', 'arguments': {'n': 2}}, got "
      f'{config!r}.'
    )
  name = config['name']
  make = find_named(noun, known, name)
  is_class = inspect.isclass(make) and issubclass(make, Configurable)
  if name not in known and not is_class:
    raise ValueError(
      f'{name!r} must be the name of a subclass of jasgd.protocols.Protocol '
      f'or jasgd.gossip.PeerStrategy, but it is {make!r:.80}.'
    )
  every = {**known, **(parts or {})}
  arguments = {
    key: build(value, every, noun) if _is_config(value) else value
    for key, value in config.get('arguments', {}).items()
  }
  signature = inspect.signature(make)
  try:
    signature.bind(**arguments)
  except TypeError as error:
    raise ValueError(
      f'The {noun} {name!r} takes the arguments '
      f'({", ".join(signature.parameters)}), got {arguments!r}: {error}.'
    ) from None
  return make(**arguments)


def _is_config(value: Any) -> bool:
  """Whether a value has the form of a config."""
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return False
  arguments = value.get('arguments', {})
  return (
    value.keys() <= {'name', 'arguments'}
    and isinstance(arguments, dict)
    and all(isinstance(key, str) for key in arguments)
  )


def find_named(
  noun: str, known: Mapping[str, Callable[..., Any]], name: str
) -> Callable[..., Any]:
  """The class or function of a name: a known one, or one of the user.

  Args:
    noun: Noun for the object in error messages, such as 'task'.
    known: Classes and functions by name.
    name: A name in `known`, or `'module:name'`, which is imported.

  Returns:
    The class or function.

  Raises:
    ValueError: if the name is unknown, or cannot be imported.
  """
  if name in known:
    return known[name]
  module, separator, attribute = name.partition(':')
  if not separator:
    raise ValueError(
      f'Unknown {noun} {name!r}. Known: {", ".join(known)}; name your own as '
      "'module:name'."
    )
  try:
    found: Any = importlib.import_module(module)
    # A name with dots is that of a class inside a class.
    for part in attribute.split('.'):
      found = getattr(found, part)
  except Exception as error:  # A module may fail in any way while it loads.
    raise ValueError(
      f'The {noun} {name!r} cannot be imported ({type(error).__name__}: '
      f'{error}): check that the folder of the module is in PYTHONPATH, and '
      'that the module defines the name at its top level, not in a function.'
    ) from None
  return found
