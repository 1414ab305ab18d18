"""Runs entry points without the seconds that their imports take.

A process imports the libraries once. It forks for each command, and the fork
runs the module as `python -m MODULE ARGUMENTS` would. Nothing is computed
before the fork, so jax has started no threads.
"""

import json
import os
import pathlib
import runpy
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parent.parent


class Commands:
  """Runs commands one after the other.

  Args:
    folder: Folder for the output of the commands.
    environment: Environment variables of all commands.
  """

  def __init__(self, folder, environment):
    self._folder = folder
    self._process = subprocess.Popen(
      [sys.executable, '-m', 'tests.commands'],
      cwd=_ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      env=environment,
      text=True,
    )

  def run(self, module, *arguments, **environment):
    """Runs a command; gives exit code, stdout and stderr."""
    streams = [self._folder / name for name in ('stdout', 'stderr')]
    job = {
      'module': module,
      'arguments': [str(each) for each in arguments],
      'environment': environment,
      'streams': [os.fspath(stream) for stream in streams],
    }
    print(json.dumps(job), file=self._process.stdin, flush=True)
    code = int(self._process.stdout.readline())
    texts = [stream.read_text() for stream in streams]
    return subprocess.CompletedProcess([module, *arguments], code, *texts)

  def close(self):
    """Ends the process."""
    self._process.communicate()


def _run_job(job):
  """Runs a command, in a process of its own."""
  streams = [os.devnull, *job['streams']]
  for number, path in enumerate(streams):
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(path, flags), number)
  os.environ |= job['environment']
  sys.argv[1:] = job['arguments']
  runpy.run_module(job['module'], run_name='__main__', alter_sys=True)


def main():
  """Reads jobs from the standard input, and prints their exit codes."""
  # What most of the entry points import.
  import ml_collections.config_flags  # noqa: F401

  import jasgd.experiment
  import jasgd.reports  # noqa: F401

  while line := sys.stdin.readline():
    child = os.fork()
    if not child:
      _run_job(json.loads(line))
      return
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == '__main__':
  main()
