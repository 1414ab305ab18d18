"""`python -m jasgd.runtime.child`: see `jasgd.runtime.processes`."""

from jasgd.runtime import processes

if __name__ == '__main__':
  processes.run_child()
