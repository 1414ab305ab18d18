"""How the entry points start."""

from collections.abc import Callable
import os
import signal
import sys
from typing import Any, NoReturn

from absl import app
from absl import flags
from absl import logging

# Set when a program has started itself again.
_MARK = 'JASGD_ADOPTED'


def run(main: Callable[[], None], *, has_begun: bool = True) -> None:
  """Parses the flags and calls `main`, which takes none.

  Args:
    main: The program.
    has_begun: Whether Ctrl-C and SIGTERM are as usual from now on; else `main`
      calls `take_signals` when there is something to lose.
  """

  def parsed_main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'Unknown arguments: {argv[1:]}')
    # By default jax says at length which accelerators it did not find.
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)
    try:
      if has_begun:
        take_signals()
      main()
    except app.UsageError as error:
      _refuse(argv[0], str(error))

  app.run(parsed_main, flags_parser=_parse)


def take_signals() -> None:
  """Makes Ctrl-C and SIGTERM what they usually are."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)


def adopt(variables: dict[str, str]) -> None:
  """Starts this program again if its environment is another.

  Args:
    variables: What the environment is to have, from the very beginning.
  """
  is_same = all(
    os.environ.get(name) == text for name, text in variables.items()
  )
  if is_same or _MARK in os.environ:
    return
  spec = sys.modules['__main__'].__spec__
  assert spec is not None  # Entry points are started with -m.
  command = [sys.executable, '-m', spec.name, *sys.argv[1:]]
  os.execve(sys.executable, command, {**os.environ, **variables, _MARK: '1'})


def _parse(argv: list[str]) -> list[str]:
  """Parses flags; whatever is wrong with them is said in a line."""
  try:
    return flags.FLAGS(argv)
  except (
    AttributeError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
    flags.Error,
  ) as error:
    # Where a config file raises, the text has a whole traceback in it.
    text = ' '.join(map(str, error.args)).strip().splitlines()[-1].strip()
    _refuse(argv[0], f'bad flags: {text}')


def _refuse(program: str, message: str) -> NoReturn:
  """Says what is wrong, and no more: --help says the rest."""
  sys.stderr.write(f'{program}: {message}\nSee --help.\n')
  sys.exit(1)


def check_config(config: Any, *kinds: type) -> None:
  """Raises a usage error unless `config` is of one of the kinds, and valid."""
  try:
    # A file that is not there, or does not load, says so only when it is used.
    config.validate()
  except (ImportError, OSError, SyntaxError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  if not isinstance(config, kinds):
    names = ' or a '.join(kind.__name__ for kind in kinds)
    raise app.UsageError(
      f'--config must be a {names}, got a {type(config).__name__}.'
    )
