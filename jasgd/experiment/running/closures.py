"""Sends Python objects with functions inside to a child process.

Optimizers and schedules are closures, which `pickle` refuses: it stores a
function as its name, and a function inside a function has none. Here such a
function is stored as its code and the values that it closes over. The text goes
to a child by its standard input; nothing of it is ever read from a network or
from a file.
"""

import base64
import importlib
import io
import marshal
import pickle
import types
from typing import Any

from jasgd import runtime

_EMPTY = 'JASGD_EMPTY_CELL'


def dump(value: Any) -> str:
  """An object as text, for `load` in a child process.

  Args:
    value: Any object that can be pickled, with any functions inside.

  Returns:
    The text.

  Raises:
    ValueError: if a part of it cannot be sent.

  Examples:
    >>> from jasgd.experiment.running import closures
    >>> def make_power(n):
    ...   return lambda x: x**n
    >>> closures.load(closures.dump(make_power(3)))(2)
    8
  """
  file = io.BytesIO()
  try:
    _Pickler(file).dump(value)
  except (AttributeError, TypeError, pickle.PicklingError) as error:
    raise ValueError(
      'The optimizer, strategy or schedule cannot be sent to other processes '
      f'({error}). Threads need not send it: processes=False.'
    ) from None
  return base64.b64encode(file.getvalue()).decode()


def load(text: str) -> Any:
  """The object that `dump` wrote."""
  return pickle.loads(base64.b64decode(text))


class _Pickler(pickle.Pickler):
  """Stores functions without a name by their code."""

  def reducer_override(self, obj: Any) -> Any:
    """The parts of an object that `pickle` would refuse."""
    if isinstance(obj, types.ModuleType):
      return importlib.import_module, (obj.__name__,)
    if not isinstance(obj, (types.FunctionType, type)):
      return NotImplemented
    if '<' not in obj.__qualname__ and '.' not in obj.__qualname__:
      if obj.__module__ != '__main__':
        return NotImplemented
      # A script is no module of this name in a child.
      return runtime.find_function, (runtime.name_function(obj),)
    if isinstance(obj, type):
      return NotImplemented
    cells = [_read_cell(cell) for cell in obj.__closure__ or ()]
    arguments = (
      marshal.dumps(obj.__code__),
      _name_globals(obj),
      obj.__name__,
      len(cells),
    )
    # The values come last: a function may close over itself.
    values = (obj.__defaults__, obj.__kwdefaults__, cells)
    return _make_function, arguments, values, None, None, _fill_function


def _read_cell(cell: Any) -> Any:
  try:
    return cell.cell_contents
  except ValueError:
    return _EMPTY


def _name_globals(function: types.FunctionType) -> str:
  """The name by which a child finds the globals of a function."""

  def known() -> None:
    """A function with a name in the same module."""

  known.__module__, known.__qualname__ = function.__module__, '__dict__'
  return runtime.name_function(known)


def _make_function(
  code: bytes, name_of_globals: str, name: str, num_cells: int
) -> types.FunctionType:
  """A function without the values that it closes over."""
  namespace: Any = runtime.find_function(name_of_globals)
  cells = tuple(types.CellType() for _ in range(num_cells))
  return types.FunctionType(
    marshal.loads(code), namespace, name, None, cells or None
  )


def _fill_function(
  function: types.FunctionType, values: tuple[Any, Any, list[Any]]
) -> None:
  """Gives a function its defaults and the values that it closes over."""
  function.__defaults__, function.__kwdefaults__, contents = values
  for cell, value in zip(function.__closure__ or (), contents, strict=True):
    if not (isinstance(value, str) and value == _EMPTY):
      cell.cell_contents = value
