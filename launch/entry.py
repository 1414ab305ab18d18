"""How the entry points start."""

from collections.abc import Callable

from absl import app
from absl import flags
from absl import logging


def run(main: Callable[[], None]) -> None:
  """Parses the flags and calls `main`, which takes none."""

  def parsed_main(argv: list[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f'Unknown arguments: {argv[1:]}')
    # By default jax says at length which accelerators it did not find.
    if not flags.FLAGS['verbosity'].present:
      logging.set_verbosity(logging.WARNING)
    main()

  app.run(parsed_main)
