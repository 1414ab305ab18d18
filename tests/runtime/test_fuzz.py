"""A stranger sends bad messages to a server while learners train."""

import collections
import contextlib
import dataclasses
import random
import re
import socket

import numpy as np
from pyarrow import flight

from jasgd import runtime
from jasgd import traces
from jasgd import workdir as workdirs
from jasgd.experiment.running import children
from jasgd.runtime import wires
from tests import live
from tests.runtime import bad_messages
from tests.runtime import flight_case

WIRES = ('memory', 'flight')
NUM_MESSAGES = 10_000
PER_CHANNEL = 250  # Messages, before the next stranger comes.


class _MemoryChannel:
  """A client of shared memory that sends any bytes."""

  def __init__(self, address):
    self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._socket.settimeout(live.PATIENCE)
    self._socket.connect('\0' + address.removeprefix('memory:@'))
    self.receive()

  def send(self, case):
    self._socket.send(case.data)
    return self.receive()

  def receive(self):
    packet = self._socket.recv(1 << 17)
    return wires.decode_message(packet[4:])[0]

  def close(self):
    self._socket.close()


class _FlightChannel:
  """A client of Flight that sends any bytes."""

  def __init__(self, address, token, payload_size):
    headers = [(b'authorization', f'Bearer {token}'.encode())]
    self._client = flight.FlightClient(address)
    self._writer, self._reader = self._client.do_exchange(
      flight.FlightDescriptor.for_command(flight_case.stream.COMMAND),
      flight.FlightCallOptions(headers=headers, timeout=live.PATIENCE),
    )
    self._writer.begin(flight_case.stream.SCHEMA)
    payload = np.zeros(payload_size, np.uint8)
    self._batches = flight_case.stream.make_batches(payload)

  def send(self, case):
    batches = self._batches if case.has_payload else []
    flight_case.stream.write_message(self._writer, case.data, batches)
    chunk = self._reader.read_chunk()
    answer, size = wires.decode_message(memoryview(chunk.app_metadata))
    while size > (0 if chunk.data is None else chunk.data.nbytes):
      size -= chunk.data.nbytes
      chunk = self._reader.read_chunk()
    return answer

  def close(self):
    self._reader.cancel()
    with contextlib.suppress(*flight_case.stream.STREAM_ERRORS):
      self._writer.close()
    self._client.close()


class _Training:
  """A server process, and a learner process on each wire."""

  def __init__(self, workdir):
    config = live.make_config(processes={'min_seconds': (0.02,)})
    settings = dataclasses.asdict(config)
    self.folder = workdirs.open_workdir(workdir, settings)
    self.run = live.Run(workdir, config)
    job = children.make_learner_job(config, str(workdir))
    self._num_asked = 0
    self.children = [
      self._start(
        'server',
        'jasgd.experiment.running.children:serve',
        {'config': settings, 'workdir': str(workdir)},
      )
    ] + [
      self._start(wire, 'jasgd.runtime:learn', {**job, 'wire': wire})
      for wire in WIRES
    ]

  def _start(self, name, target, arguments):
    return runtime.Child(
      name,
      target,
      arguments,
      num_threads=live.NUM_THREADS,
      log=self.folder.logs / f'{name}.log',
    )

  def ask(self):
    """The status, and the number of accepted messages of non-learners."""
    status = self.run.get_status()
    learners = [each['next_push'] + 1 for each in status['learners'].values()]
    accepted = status['counts'].pop('accepted', 0)
    others = accepted - sum(learners[: len(WIRES)]) - self._num_asked
    self._num_asked += 1
    return status, others

  def is_at_work(self):
    """Whether all learners have given a gradient."""
    if not self.folder.server.exists():
      return False
    learners = self.ask()[0]['learners'].values()
    applied = [each['num_applied'] > 0 for each in learners]
    return len(applied) == len(WIRES) and all(applied)

  def connect(self, wire):
    """A channel for a stranger."""
    addresses = workdirs.read_json(self.folder.server)['addresses']
    if wire == 'memory':
      return _MemoryChannel(addresses['memory'])
    token = self.folder.token.read_text()
    return _FlightChannel(addresses['flight'], token, self.run.layout.size)

  def end(self):
    for child in self.children:
      child.end(10.0)


def _talk(training, wire, rng, num_messages):
  """Sends messages; gives how many were accepted, and refused."""
  counts = collections.Counter()
  fingerprint = workdirs.read_json(training.folder.server)['fingerprint']
  for start in range(0, num_messages, PER_CHANNEL):
    channel = training.connect(wire)
    maker = bad_messages.Maker(rng, fingerprint, training.run.layout.size)
    left = min(PER_CHANNEL, num_messages - start)
    if rng.random() < 0.5:  # A stranger that has joined can do more harm.
      welcome = channel.send(maker.make_welcome())
      assert welcome.verb == wires.Verb.SNAPSHOT
      counts[True] += 1
      left -= 1
      maker = bad_messages.Maker(
        rng, fingerprint, training.run.layout.size, welcome
      )
    for _ in range(left):
      case = maker.draw()
      answer = channel.send(case)
      is_good = answer.verb != wires.Verb.REFUSED
      assert is_good == case.is_good, (case, answer)
      assert is_good or answer.text
      counts[is_good] += 1
    channel.close()
  return counts


def test_bad_messages_are_refused_and_counted(processes, tmp_path):
  training = _Training(tmp_path)
  try:
    live.wait_until(training.is_at_work)
    rng = random.Random(NUM_MESSAGES)
    sent = collections.Counter()
    for wire in WIRES:
      sent += _talk(training, wire, rng, NUM_MESSAGES // len(WIRES))
    status, num_accepted = training.ask()
    refused = status['counts']
    assert sum(refused.values()) == sent[False]
    assert num_accepted == sent[True]
    assert sent.total() == NUM_MESSAGES
    assert min(sent.values()) > NUM_MESSAGES / 20
    assert set(refused) >= {
      *('garbage', 'truncated', 'oversized', 'damaged', 'verb', 'version'),
      *('size', 'clock', 'stranger', 'worker', 'push', 'number'),
      *('future', 'hello', 'fingerprint', 'taken', 'twice'),
    }
    clock = status['clock']
    live.wait_until(lambda: training.run.get_clock() > clock + 10)
    training.run.stop()
    server, *learners = training.children
    assert [child.wait(live.PATIENCE) for child in learners] == [0, 0]
    assert server.end(live.PATIENCE) == 0
  finally:
    training.end()
  records = training.run.load_trace().records
  for learner in range(len(WIRES)):  # No learner had to join twice.
    own = records['kind'][records['worker'] == learner]
    assert np.count_nonzero(own == traces.Kind.JOIN) == 1
  for wire in WIRES:
    log = (training.folder.logs / f'{wire}.log').read_text()
    assert not re.search(r'gone|closed|silent|Traceback', log)
  assert 'Traceback' not in (training.folder.logs / 'server.log').read_text()
  assert training.run.check_replay() > clock
