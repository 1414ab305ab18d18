"""Clients that connect to a Flight server and never show a token."""

import collections
import contextlib
import select
import socket
import subprocess
import sys
import time

import pytest

from jasgd import runtime
from jasgd import workdir
from jasgd.runtime import wires
from tests import live
from tests.runtime import cases
from tests.runtime import flight_case

DEADLINE = flight_case.DEADLINE
TOKEN = 'a-token'
# First bytes of strangers. gRPC itself cuts clients that do not speak HTTP/2.
SAID = {
  'nothing': b'',
  'a part': b'PRI',
  'HTTP/2': b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, *[0] * 5]),
}
LIMIT = 500  # Open files of a process that only this test uses.
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
from jasgd import runtime, workdir
from tests.runtime import cases
folder = workdir.Workdir(sys.argv[1])
server = runtime.serve(
  cases.make_settings(num_learners=1, num_updates=20, checkpoint_seconds=0.0),
  folder,
  runtime.BindAddress(wires=('flight',)),
  on_ready=lambda server: print('ready', flush=True),
)
print(server.end_reason)
"""

# Takes all file descriptors, and frees them at the first warning.
SHORT_OF_FILES = f"""
import logging, os, resource, sys
from jasgd import workdir
from tests.runtime import scripted
bench = scripted.Bench(
  workdir=workdir.Workdir(sys.argv[1]), num_learners=1, num_updates=1
)
(client,) = scripted.join(bench, 1)
taken = []
class Handler(logging.Handler):
  def emit(self, record):
    if 'too many open files' in record.getMessage() and taken:
      while taken:
        os.close(taken.pop())
      print('freed')
logging.getLogger('jasgd').addHandler(Handler())
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))
try:
  while True:
    taken.append(os.dup(0))
except OSError:
  pass
client.push()
bench.server.finish()
bench.close()
"""


@pytest.fixture
def inbox():
  inbox = wires.Inbox()
  yield inbox
  inbox.close()


class Strangers:
  """Connections that stay open for as long as the server lets them."""

  def __init__(self, address, count, said=b''):
    port = int(address.rsplit(':', 1)[1])
    self._poller = select.poll()
    self._open = {}
    for _ in range(count):
      connection = socket.create_connection(('127.0.0.1', port), DEADLINE)
      connection.setblocking(False)
      self._open[connection.fileno()] = connection
      self._poller.register(connection, select.POLLIN)
      with contextlib.suppress(OSError):  # The server has already cut it.
        connection.send(said)

  def wait_until_left(self, count):
    """Waits until the server has cut all but `count` connections."""
    deadline = time.monotonic() + live.PATIENCE
    while len(self._open) > count:
      assert time.monotonic() < deadline, len(self._open)
      for descriptor, _ in self._poller.poll(100):
        try:
          if self._open[descriptor].recv(1 << 16):
            continue  # gRPC sends something before it disconnects.
        except OSError:
          pass
        self._poller.unregister(descriptor)
        self._open.pop(descriptor).close()

  def __len__(self):
    return len(self._open)

  def close(self):
    for connection in self._open.values():
      connection.close()


def _count_events(inbox, count):
  """The reasons of the next events."""
  return collections.Counter(
    flight_case.get_error(inbox).reason for _ in range(count)
  )


def _ask(inbox, connection):
  event, answer = flight_case.ask(inbox, connection)
  assert answer.verb == wires.Verb.ANSWER
  return event


@pytest.mark.parametrize('said', SAID.values(), ids=SAID)
def test_no_more_strangers_than_allowed(said, inbox):
  with (
    flight_case.listen(
      inbox, token=TOKEN, max_strangers=5, patience=1e6
    ) as listener,
    flight_case.connect(listener, token=TOKEN) as client,
  ):
    _ask(inbox, client)
    with contextlib.closing(Strangers(listener.address, 40, said)) as strangers:
      strangers.wait_until_left(5)
      assert _count_events(inbox, 35) == {'crowded': 35}
      # Connected clients stay, and others can connect.
      _ask(inbox, client)
      with flight_case.connect(listener, token=TOKEN) as newcomer:
        _ask(inbox, newcomer)
      assert len(strangers) == 5


def test_strangers_may_not_stay(inbox):
  with (
    # Enough time for the client, from its connection to its exchange.
    flight_case.listen(inbox, token=TOKEN, patience=3.0) as listener,
    flight_case.connect(listener, token=TOKEN) as client,
  ):
    _ask(inbox, client)
    silent = Strangers(listener.address, 3)
    polite = Strangers(listener.address, 3, SAID['HTTP/2'])
    with contextlib.closing(silent), contextlib.closing(polite):
      silent.wait_until_left(0)
      polite.wait_until_left(0)
      assert _count_events(inbox, 6) == {'idle': 6}
      # A client with an exchange may be silent for any time.
      _ask(inbox, client)


def test_a_run_goes_on_while_strangers_hold_their_connections(tmp_path):
  folder = workdir.Workdir(tmp_path)
  with subprocess.Popen(
    [sys.executable, '-c', SERVER, tmp_path],
    cwd=live.ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  ) as server:
    try:
      assert server.stdout.readline() == 'ready\n'
      address = workdir.read_json(folder.server)['addresses']['flight']
      strangers = Strangers(address, 2 * LIMIT)
      with contextlib.closing(strangers):
        strangers.wait_until_left(LIMIT // 4)
        learner = runtime.Learner(
          cases.make_task(), runtime.make_connect(folder, wire='flight')
        )
        assert learner.run() == 'All 20 updates were made.'
        output, errors = server.communicate(timeout=live.PATIENCE)
    finally:
      server.kill()
  assert (server.returncode, output) == (0, 'All 20 updates were made.\n')
  assert 'Traceback' not in errors
  assert workdir.list_checkpoints(folder)[-1] == 20


def test_a_checkpoint_waits_for_file_descriptors(tmp_path):
  """None is free when it begins; all are free again after a warning."""
  done = subprocess.run(
    [sys.executable, '-c', SHORT_OF_FILES, tmp_path],
    cwd=live.ROOT,
    timeout=live.PATIENCE,
    capture_output=True,
    text=True,
  )
  assert (done.returncode, done.stdout) == (0, 'freed\n'), done.stderr
  assert workdir.list_checkpoints(tmp_path) == [0, 1]
  assert workdir.set_aside_broken(tmp_path) == []  # No checkpoint is broken.
