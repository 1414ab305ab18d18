"""The parent's side of workers: starts them, asks them, ends them."""

from collections.abc import Mapping, Sequence
import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent

# Seconds to go by itself, once its stdin is closed.
_PATIENCE = 5.0


class WorkerError(Exception):
  """A worker died, or did not answer in time."""


class Worker:
  """A child process that answers lines; a context manager that ends it."""

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
  ) -> None:
    """Starts a child.

    Args:
      name: For messages.
      command: The program and its arguments; runs at the checkout's root.
      environment: What is set beyond this process's own variables.
    """
    self.name = name
    # A file, for a pipe that nobody reads would fill up and stop the child. It
    # lives as long as this object, and `close` closes it.
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115
    self._rest = b''
    self._process = subprocess.Popen(
      command,
      cwd=ROOT,
      env={**os.environ, **environment},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      bufsize=0,
    )

  def ask(self, line: str, timeout: float) -> dict[str, Any]:
    """Sends a line and waits for its answer.

    Args:
      line: Without its end.
      timeout: Seconds to wait.

    Returns:
      The JSON object that came back.

    Raises:
      WorkerError: if the child is gone or too slow.
    """
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(f'{line}\n'.encode())
    except BrokenPipeError:
      raise self._make_error(line, 'is gone') from None
    return json.loads(self._read_line(line, time.monotonic() + timeout))

  def close(self) -> None:
    """Ends the child: by asking, by SIGTERM, by SIGKILL."""
    with contextlib.suppress(BrokenPipeError):
      if self._process.stdin is not None:
        self._process.stdin.close()
    for end in (lambda: None, self._process.terminate, self._process.kill):
      end()
      try:
        self._process.wait(_PATIENCE)
        break
      except subprocess.TimeoutExpired:
        continue
    if self._process.stdout is not None:
      self._process.stdout.close()
    self._errors.close()

  def __enter__(self) -> 'Worker':
    return self

  def __exit__(self, *error: object) -> None:
    if any(error):  # It may be busy for long: do not ask.
      self._process.kill()
    self.close()

  def _read_line(self, question: str, deadline: float) -> bytes:
    """The next line of the child's stdout."""
    assert self._process.stdout is not None
    with selectors.DefaultSelector() as selector:
      selector.register(self._process.stdout, selectors.EVENT_READ)
      while b'\n' not in self._rest:
        if not selector.select(max(0.0, deadline - time.monotonic())):
          raise self._make_error(question, 'did not answer in time')
        part = os.read(self._process.stdout.fileno(), 65536)
        if not part:
          raise self._make_error(question, 'is gone')
        self._rest += part
    line, self._rest = self._rest.split(b'\n', 1)
    return line

  def _make_error(self, question: str, problem: str) -> WorkerError:
    """An error with the last that the child said."""
    self._errors.seek(0)
    last = self._errors.read()[-2000:].decode(errors='replace').strip()
    return WorkerError(f'{self.name} {problem}, asked {question!r}. {last}')
