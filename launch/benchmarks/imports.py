"""How long `import jasgd` takes, against `import optax`, which it builds on.

Each is a fresh interpreter, in turns; the bare interpreter's own start is
subtracted. The goal: at most 1.25 x optax, with every public name loaded.
"""

import subprocess
import sys
import time

import jasgd

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
  best = dict.fromkeys(PROGRAMS, float('inf'))
  for _ in range(2 if quick else 10):
    for name, program in PROGRAMS.items():
      best[name] = min(best[name], time_program(program))
  optax_seconds = best['import optax'] - best['nothing']
  print(f'{"program":14} {"seconds":>8} {"x optax":>8}')
  for name, seconds in best.items():
    seconds -= best['nothing']
    print(f'{name:14} {seconds:8.3f} {seconds / optax_seconds:8.2f}')
