"""Addresses of a server, and the permissions of its token."""

from concurrent import futures
import contextlib
import os
import socket
import stat

import pytest

from jasgd import workdir
from jasgd.runtime import wires


def test_a_wildcard_is_no_address_for_others(tmp_path):
  folder, inbox = workdir.Workdir(tmp_path), wires.Inbox()
  hosts = {'0.0.0.0': socket.gethostname(), '127.0.0.1': '127.0.0.1'}
  for host, reachable in hosts.items():
    with contextlib.ExitStack() as stack:
      bind = wires.BindAddress(wires=('flight',), host=host)
      found = wires.listen(inbox, 8, folder, bind, stack)['flight']
      assert found.startswith(f'grpc+tcp://{reachable}:')
  inbox.close()


def test_a_token_is_made_once_and_readable_by_its_owner_only(
  tmp_path, monkeypatch
):
  folder = workdir.Workdir(tmp_path)
  assert wires.find_token(folder) is None
  token = wires.make_token(folder)
  assert len(token) == 64
  monkeypatch.setenv(wires.TOKEN_VARIABLE, 'from outside')
  assert wires.find_token(None) == 'from outside'
  assert wires.make_token(folder) == token == wires.find_token(folder)
  assert stat.S_IMODE(folder.token.stat().st_mode) == 0o600
  assert os.listdir(tmp_path) == ['token']


def test_a_token_may_come_from_the_environment(tmp_path, monkeypatch):
  """All nodes get the same token, each in a folder of its own."""
  folder = workdir.Workdir(tmp_path)
  monkeypatch.setenv(wires.TOKEN_VARIABLE, 'from outside')
  assert wires.find_token(folder) == 'from outside'
  assert wires.make_token(folder) == 'from outside'
  monkeypatch.delenv(wires.TOKEN_VARIABLE)
  assert wires.find_token(folder) == 'from outside'


def test_processes_that_make_a_token_at_once_get_the_same(tmp_path):
  folder = workdir.Workdir(tmp_path)
  with futures.ThreadPoolExecutor(8) as executor:
    tokens = list(executor.map(wires.make_token, [folder] * 64))
  assert set(tokens) == {folder.token.read_text()}
  assert os.listdir(tmp_path) == ['token']


def test_a_token_that_others_can_read_is_refused(tmp_path):
  folder = workdir.Workdir(tmp_path)
  wires.make_token(folder)
  folder.token.chmod(0o640)
  with pytest.raises(workdir.WorkdirError, match=r'0600.*got mode 0640'):
    wires.find_token(folder)


def test_the_wire_is_chosen_by_where_the_server_is(tmp_path):
  """No server listens: the error names the address that was tried."""
  folder = workdir.Workdir(tmp_path)
  both = {'memory': 'memory:@nobody', 'flight': 'grpc+tcp://127.0.0.1:1'}

  def check(wire, message):
    connect = wires.make_connect(folder, wire=wire, deadline=0.1)
    with pytest.raises(wires.WireError, match=message):
      connect(8)

  check('auto', 'no server')
  wires.write_address(folder, both)
  check('auto', 'memory:@nobody')
  check('memory', 'memory:@nobody')
  check('flight', 'grpc')
  workdir.write_json(folder.server, {'addresses': both, 'host': 'another'})
  check('auto', 'grpc')
  check('memory', 'another host')
  wires.write_address(folder, {'flight': both['flight']})
  check('memory', "no wire 'memory'")
  folder.server.write_text('{"addresses": ')
  check('auto', 'no server')


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'server': 'a:1', 'wire': 'pigeon'}, "Unknown wire 'pigeon'"),
    ({}, 'workdir or its address'),
    ({'server': 'localhost'}, "HOST:PORT, got 'localhost'"),
    ({'server': ':5'}, "HOST:PORT, got ':5'"),
    ({'server': 'a b:5'}, "HOST:PORT, got 'a b:5'"),
  ],
)
def test_bad_fields_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    wires.make_connect(**options)
