"""`python -m jasgd.runtime.child`: see `_processes.run_child`."""

from jasgd.runtime import _processes

if __name__ == '__main__':
  _processes.run_child()
