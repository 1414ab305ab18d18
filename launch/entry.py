"""The start of every entry point: flags, signals, errors in one line."""

from collections.abc import Callable
import itertools
import os
import signal
import sys
from typing import Any, NoReturn

from absl import app
from absl import flags
from absl import logging

# Variable that is set when a program has started itself again.
_MARK = 'JASGD_ADOPTED'


def run(main: Callable[[], None], *, has_begun: bool = True) -> None:
  """Parses the flags and calls `main`.

  Args:
    main: The program.
    has_begun: Whether Ctrl-C and SIGTERM act as usual from now on; otherwise
      `main` calls `take_signals` when there is something to lose.
  """

  def parsed_main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'Unknown arguments: {argv[1:]}')
    # By default jax logs at length which accelerators it did not find.
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
  """Gives Ctrl-C and SIGTERM their usual effect."""
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)


def adopt(variables: dict[str, str]) -> None:
  """Starts this program again if its environment lacks some variables.

  Args:
    variables: Variables that must be set before jax is imported.
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
  """Parses flags; an error takes one line."""
  configs = _list_configs(argv)
  # ml_collections loads each file into the module of the file before it: a
  # second file without get_config would get the function of the first.
  if len(configs) > 1:
    _refuse(
      argv[0], f'--config must be given once, got {" and ".join(configs)}.'
    )
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
    # If a config file raises, the text contains a whole traceback.
    text = ' '.join(map(str, error.args)).strip().splitlines()[-1].strip()
    if configs and text.endswith("has no attribute 'get_config'"):
      text = f'{configs[0].split(":")[0]} has no function get_config.'
    _refuse(argv[0], f'bad flags: {text}')


def _list_configs(argv: list[str]) -> list[str]:
  """Values of all flags --config=FILE or --config FILE."""
  found = []
  for flag, following in itertools.pairwise([*argv, '']):
    if flag == '--':
      break
    name, is_assigned, value = flag.partition('=')
    if name in ('--config', '-config'):
      found.append(value if is_assigned else following)
  return found


def _refuse(program: str, message: str) -> NoReturn:
  """Prints an error, and ends the program."""
  sys.stderr.write(f'{program}: {message}\nSee --help.\n')
  sys.exit(1)


def check_config(config: Any) -> None:
  """Raises a usage error unless a config is a valid `TrainingConfig`."""
  try:
    # Errors in loading the file come with the first use of the config.
    config.validate()
  except AttributeError:
    raise app.UsageError(
      '--config must name a file whose get_config returns a '
      f'jasgd.experiment.TrainingConfig, got a {type(config).__name__}.'
    ) from None
  except (ImportError, OSError, SyntaxError, ValueError) as error:
    raise app.UsageError(str(error)) from None
