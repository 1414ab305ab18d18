"""How long `import jasgd` takes, against `import optax`, which it builds on.

Each is a fresh interpreter, in turns; the bare interpreter's own start is
subtracted. The goal: at most 1.25 x optax, with every public name loaded.
"""

import functools
import subprocess
import sys
import time

import jasgd
from launch.benchmarks import measuring

PROGRAMS = {
  'nothing': 'pass',
  'import optax': 'import optax',
  'import jasgd': 'import jasgd',
  'all of jasgd': 'from jasgd import ' + ', '.join(jasgd.__all__),
}


def time_program(program: str) -> float:
  """Seconds that a fresh interpreter needs to run `program`."""
  start = time.perf_counter()
  subprocess.run([sys.executable, '-c', program], check=True, timeout=120)
  return time.perf_counter() - start


def run(quick: bool) -> None:
  """Prints a table."""
  print(__doc__)
  programs = {
    name: functools.partial(time_program, program)
    for name, program in PROGRAMS.items()
  }
  seconds = measuring.run_in_turns(programs, 1 if quick else 10)
  start = min(seconds['nothing'])
  best = {name: min(rounds) - start for name, rounds in seconds.items()}
  print(f'{"program":14} {"seconds":>8} {"x optax":>8}')
  for name, value in best.items():
    print(f'{name:14} {value:8.3f} {value / best["import optax"]:8.2f}')
