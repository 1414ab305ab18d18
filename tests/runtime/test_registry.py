"""Members of a run and their addresses: by folder, by messages, by hand."""

import contextlib
import json
import threading
import types

import numpy as np
import pytest

from jasgd import engine
from jasgd import gossip
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.runtime import nodes
from jasgd.runtime import wires

PATIENCE = 30.0  # Seconds: never reached, unless something is broken.
LAYOUT = engine.make_layout(np.zeros(3, np.float32))
HERE, THERE = '10.0.0.1:4000', '10.0.0.2:4000'


@pytest.fixture
def run(tmp_path):
  """The folder of a run."""
  return workdirs.Workdir(tmp_path)


@contextlib.contextmanager
def run_node(run, node, *, is_in_folder=False, **known):
  """A node's host, behind a Flight on this machine, in this process."""
  registry = nodes.Registry(run)
  asked = []

  def describe():
    asked.append(node)
    return {'node': node, 'members': registry.list_addresses()}

  host = nodes.SnapshotServer(
    LAYOUT,
    'fingerprint',
    is_shared=False,
    receive=lambda message: gossip.Outcome.TAKEN,
    describe=describe,
    on_node=registry.add,  # A HELLO carries the address.
  )
  with contextlib.ExitStack() as stack:
    stack.callback(host.close)
    bind = wires.BindAddress(wires=('flight',))
    found = wires.listen(host.inbox, LAYOUT.size, run, bind, stack)
    registry.add(node, found['flight'], 1.0)
    registry.merge(known)
    thread = threading.Thread(target=host.run)
    thread.start()
    stack.callback(thread.join, PATIENCE)
    stack.callback(host.stop)
    if is_in_folder:
      folder = nodes.find_folder(run, node)
      folder.root.mkdir(parents=True)
      wires.write_address(folder, found)
      stack.callback(folder.server.unlink)
    yield types.SimpleNamespace(
      address=found['flight'], host=host, asked=asked, registry=registry
    )
  assert not thread.is_alive()


# --- Addresses in messages.


def test_the_newest_address_counts(run):
  registry = nodes.Registry(run)
  registry.add(3, HERE, 5.0)
  assert registry.list_addresses() == {'3': [HERE, 5.0]}
  registry.add(3, THERE, 4.0)  # An older address.
  registry.add(3, THERE, 5.0)
  assert registry.list_addresses() == {'3': [HERE, 5.0]}
  registry.add(3, THERE, 5.5)
  assert registry.list_addresses() == {'3': [THERE, 5.5]}


def test_addresses_are_merged(run):
  """As JSON; an older address does not replace a newer one."""
  first, second = nodes.Registry(run), nodes.Registry(run)
  first.add(0, HERE, 1.0)
  first.add(traces.SERVER, HERE, 2.0)
  first.add(1, HERE, 9.0)
  second.add(1, THERE, 3.0)
  second.add(2, THERE, 4.0)
  second.add(0, THERE, 7.0)
  for _ in range(2):
    second.merge(json.loads(json.dumps(first.list_addresses())))
    first.merge(json.loads(json.dumps(second.list_addresses())))
    assert first.list_addresses() == second.list_addresses()
  assert first.list_addresses() == {
    '0': [THERE, 7.0],
    '1': [HERE, 9.0],
    '2': [THERE, 4.0],
    str(traces.SERVER): [HERE, 2.0],
  }
  assert first.list_members() == [traces.SERVER, 0, 1, 2]


def test_nodes_with_files_are_members(run):
  registry = nodes.Registry(run)
  assert registry.list_members() == nodes.list_members(run) == []
  for member in (10, 2, traces.SERVER):
    nodes.find_folder(run, member).root.mkdir(parents=True)
  (run.root / 'nodes' / 'notes.txt').touch()
  (run.root / 'nodes' / '-7').mkdir()
  assert nodes.list_members(run) == [traces.SERVER, 2, 10]
  registry.add(2, HERE, 1.0)
  registry.add(4, HERE, 1.0)
  assert registry.list_members() == [traces.SERVER, 2, 4, 10]
  assert nodes.list_members(run) == [traces.SERVER, 2, 10]


def test_several_threads_may_add_addresses(run):
  """One thread adds addresses while another one lists them."""
  registry = nodes.Registry(run)
  num_threads, num_members = 4, 60

  def note(number):
    for member in range(num_members):
      registry.add(member, f'10.0.0.{number}:1', member + number / 10)
      registry.merge(registry.list_addresses())

  threads = [
    threading.Thread(target=note, args=(number,))
    for number in range(num_threads)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE)
  newest = num_threads - 1
  assert registry.list_addresses() == {
    str(member): [f'10.0.0.{newest}:1', member + newest / 10]
    for member in range(num_members)
  }


@pytest.mark.parametrize(
  ('member', 'name'),
  [(traces.SERVER, 'the centre'), (0, 'node 0'), (12, 'node 12')],
)
def test_names(run, member, name):
  assert nodes.name_member(member) == name
  folder = nodes.find_folder(run, member).root
  assert folder.parent == run.root / 'nodes'
  assert folder.name == name.split()[-1]
  # Its address is not known.
  registry = nodes.Registry(run)
  with pytest.raises(
    wires.WireError, match=f'The address of {name} is not known'
  ):
    registry.connect(member)(0)
  assert registry.get_status(member, LAYOUT.size) is None


# --- Addresses given by hand.


def test_shared_memory_reaches_no_address(run):
  with pytest.raises(ValueError, match=f"'memory' and {HERE}, {THERE}"):
    nodes.Registry(run, (HERE, THERE), wire='memory')
  nodes.Registry(run, wire='memory')
  for wire in ('auto', 'flight'):
    nodes.Registry(run, (HERE, THERE), wire=wire)


@pytest.mark.parametrize('address', ['localhost', ':5', 'a b:5', 'a:port', ''])
def test_bad_addresses_are_refused(run, address):
  with pytest.raises(ValueError, match=r'address|HOST:PORT') as caught:
    nodes.Registry(run, (HERE, address))
  assert not address or f'got {address!r}' in str(caught.value)


# --- Running nodes.


@pytest.mark.parametrize('is_short', [False, True])
def test_an_address_gives_its_number_and_its_members(run, is_short):
  with run_node(run, 4, **{'7': [THERE, 3.0]}) as node:
    address = node.address.removeprefix('grpc+tcp://' if is_short else '')
    registry = nodes.Registry(run, (address,))
    assert registry.list_members() == []
    (status,) = registry.contact_addresses()
    assert status['node'] == 4
    assert registry.list_addresses() == {
      '4': [node.address, 1.0],
      '7': [THERE, 3.0],
    }
    assert registry.list_members() == [4, 7]
    # The number of this node is known now, so it is not asked again.
    for _ in range(3):
      assert registry.contact_addresses() == []
    assert node.asked == [4]
    assert registry.get_status(4, LAYOUT.size)['node'] == 4


def test_an_address_that_does_not_answer_is_asked_again(run):
  with run_node(run, 0) as gone:
    pass
  with run_node(run, 1) as node:
    registry = nodes.Registry(run, (gone.address, node.address))
    (status,) = registry.contact_addresses()
    assert status['node'] == 1
    assert registry.contact_addresses() == []
    assert registry._unknown == [gone.address]
    assert node.asked == [1]


def test_a_wrong_token_raises(run, tmp_path, monkeypatch):
  other = workdirs.Workdir(tmp_path / 'other')
  other.root.mkdir()
  with run_node(run, 0) as node:
    registry = nodes.Registry(other, (node.address,))
    with pytest.raises(wires.RefusedError, match='token'):
      registry.contact_addresses()
    # A node that does not share the folder gets the token from the environment.
    token = wires.find_token(run)
    monkeypatch.setenv(wires.TOKEN_VARIABLE, token)
    (status,) = registry.contact_addresses()
    assert status['node'] == 0


def test_a_number_is_taken_while_its_node_runs(run):
  registry = nodes.Registry(run)
  registry.check_free(3)  # No address is known.
  with run_node(run, 3) as node:
    registry.add(3, node.address, 1.0)
    with pytest.raises(ValueError, match='Node 3 is running') as caught:
      registry.check_free(3)
    assert node.address in str(caught.value)
    registry.check_free(2)
    registry.add(4, node.address, 1.0)  # Node 3 has the old address of node 4.
    registry.check_free(4)
  registry.check_free(3)
  assert registry.get_status(3, LAYOUT.size) is None


def test_a_node_with_a_new_address_is_found(run):
  """A function to connect looks up the address at each call."""
  registry = nodes.Registry(run)
  connect = registry.connect(5)
  with run_node(run, 5) as old:
    registry.add(5, old.address, 1.0)
    connect(LAYOUT.size).close()
  with run_node(run, 5) as new:
    assert registry.get_status(5, LAYOUT.size) is None
    registry.add(5, new.address, 2.0)
    with contextlib.closing(connect(LAYOUT.size)) as connection:
      connection.request(
        wires.Message(
          wires.Verb.HELLO,
          text=nodes.make_hello('fingerprint', 8, HERE, 3.0),
        ),
        deadline=PATIENCE,
      )
    # The new node knows the sender from now on.
    assert new.registry.list_addresses()['8'] == [HERE, 3.0]


def test_an_address_in_the_folder_counts_first(run):
  """A node that shares the folder is found there, despite other addresses."""
  registry = nodes.Registry(run)
  registry.add(6, '127.0.0.1:1', 1e9)
  assert registry.get_status(6, LAYOUT.size) is None
  with run_node(run, 6, is_in_folder=True):
    assert registry.list_members() == [6]
    assert registry.get_status(6, LAYOUT.size)['node'] == 6
  # A node that ends removes its address.
  assert registry.list_members() == [6]
  assert registry.get_status(6, LAYOUT.size) is None


# --- Numbers.


def test_the_lowest_free_number(run):
  with contextlib.ExitStack() as stack:
    for expected in range(3):
      with nodes.claim_number(run, 3) as number:
        assert number == expected
        folder = nodes.find_folder(run, number)
        stack.enter_context(workdirs.hold_workdir(folder, 'node'))
    with (
      pytest.raises(workdirs.WorkdirError, match=r'All 3 .*num_workers is 3'),
      nodes.claim_number(run, 3),
    ):
      pass
    with nodes.claim_number(run, 4) as number:
      assert number == 3
  # All have ended: their folders exist, and no process holds them.
  assert nodes.list_members(run) == [0, 1, 2]
  with workdirs.hold_workdir(nodes.find_folder(run, 0), 'node'):
    for _ in range(2):  # The number was not taken, so it is still free.
      with nodes.claim_number(run, 3) as number:
        assert number == 1


def test_one_process_at_a_time_claims_a_number(run):
  lock = run.root / 'numbers.lock'
  with (
    nodes.claim_number(run, 3),
    workdirs.lock_file(lock, patience=0.0) as is_free,
  ):
    assert not is_free
  with pytest.raises(KeyError), nodes.claim_number(run, 3):
    raise KeyError
  with workdirs.lock_file(lock, patience=0.0) as is_free:
    assert is_free


def test_a_claim_gives_up_after_its_patience(run):
  with (
    nodes.claim_number(run, 3),
    pytest.raises(workdirs.WorkdirError, match=r'Another .*numbers\.lock'),
    nodes.claim_number(run, 3, patience=0.0),
  ):
    pass


def test_threads_get_different_numbers(run):
  num_threads = 2
  begin, end = (threading.Barrier(num_threads, timeout=PATIENCE) for _ in '12')
  numbers, errors = [], []

  def work():
    try:
      with contextlib.ExitStack() as stack:
        begin.wait()
        with nodes.claim_number(run, num_threads) as number:
          folder = nodes.find_folder(run, number)
          stack.enter_context(workdirs.hold_workdir(folder, 'node'))
        numbers.append(number)
        end.wait()  # Both threads hold their numbers now.
    except Exception as error:  # Shown by the test.
      errors.append(error)
      end.abort()

  threads = [threading.Thread(target=work) for _ in range(num_threads)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(PATIENCE)
  assert errors == []
  assert sorted(numbers) == [0, 1]


def test_whether_a_folder_is_held(run):
  folder = nodes.find_folder(run, 0)
  assert not workdirs.is_held(folder, 'node')
  assert not folder.root.exists()  # The check makes no files.
  for _ in range(2):
    with workdirs.hold_workdir(folder, 'node'):
      assert workdirs.is_held(folder, 'node')
      assert workdirs.is_held(folder, 'node')
      assert not workdirs.is_held(folder, 'server')
      assert not workdirs.is_held(nodes.find_folder(run, 1), 'node')
    assert not workdirs.is_held(folder, 'node')
  assert [path.name for path in folder.root.iterdir()] == ['node.lock']
