"""Protocols from text: what a trace's header says, made a protocol again."""

import ast
from typing import Any

from jasgd.protocols import _base
from jasgd.protocols import _counting
from jasgd.protocols import _quorum
from jasgd.protocols import _ramp_up
from jasgd.protocols import _ssp

_KINDS = {
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


def parse_protocol(text: str) -> _base.Protocol:
  """A fresh protocol from its `repr`: the inverse of that.

  The text is only read, and never run.

  Args:
    text: A call of a protocol by its name, with whole numbers and protocols
      as arguments, as in 'ramp_up(protocol=softsync(n=2), num_updates=20)'.

  Returns:
    The protocol.

  Raises:
    ValueError: if the text is something else, or the protocol refuses its
      arguments.

  Examples:
    >>> from jasgd import protocols
    >>> protocols.parse_protocol('softsync(n=2)')
    softsync(n=2)
  """
  if not isinstance(text, str):
    raise ValueError(f'A protocol is parsed from a text, got {text!r}.')
  try:
    # It may be nested too deeply for Python, or hold bytes that no text has.
    return _build(ast.parse(text.strip(), mode='eval').body, text)
  except (SyntaxError, RecursionError, MemoryError) as error:
    raise ValueError(
      "A protocol is written like 'softsync(n=2)', got "
      f'{text!r}: {type(error).__name__}.'
    ) from None


def _build(node: ast.expr, text: str) -> _base.Protocol:
  """The protocol that a call stands for."""
  if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
    raise ValueError(
      f"A protocol is written like 'softsync(n=2)', got {text!r}."
    )
  name = node.func.id
  if name not in _KINDS:
    raise ValueError(
      f'Unknown protocol {name!r} in {text!r}. Known: {", ".join(_KINDS)}.'
    )
  arguments = [_read(argument, text) for argument in node.args]
  # Without a name, it is the `**` of a dict: the protocol will refuse it.
  named = {
    keyword.arg or '**': _read(keyword.value, text) for keyword in node.keywords
  }
  try:
    return _KINDS[name](*arguments, **named)
  except TypeError as error:
    raise ValueError(f'{text!r} is no protocol: {error}.') from None


def _read(node: ast.expr, text: str) -> Any:
  """A whole number, or a protocol."""
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  if isinstance(node, ast.Call):
    return _build(node, text)
  raise ValueError(
    'The arguments of a protocol are whole numbers and protocols, got '
    f'{ast.unparse(node)!r} in {text!r}.'
  )
