"""The centre of elastic averaging: alone, and with nodes in threads."""

import contextlib
import threading

import numpy as np
import pytest

from jasgd import gossip
from jasgd import protocols
from jasgd import traces
from jasgd.runtime import wires
from tests.runtime import peer_cases as peers


class FreshElastic(gossip.Elastic):
  """Its centre refuses forces that were computed with an old version."""

  def make_centre(self):
    return protocols.ringmaster(0)


@contextlib.contextmanager
def _open_centre(folder, strategy=peers.STRATEGIES['elastic']):
  """A centre without wires, and its records and publications in order."""
  group = peers.Group(folder, strategy)
  centre = group.make(traces.SERVER, threading.Event())
  files, events = centre._files, []
  write, publish = files.recorder.write, files.snapshots.publish

  def note_write(kind, *rows):
    events.append(('write', kind, [row['version'] for row in rows]))
    write(kind, *rows)

  def note_publish(weights, version, step, mass):
    params, _ = weights
    events.append(('publish', version, np.array(params)))
    publish(weights, version, step, mass)

  files.recorder.write, files.snapshots.publish = note_write, note_publish
  try:
    yield centre, events
  finally:
    files.close()


def _make_force(centre, value, read_version=0):
  """A force of node 1, with the same value everywhere."""
  layout = centre._files.layout
  params, stats = centre._replica.state.params, centre._replica.state.stats
  payload = wires.make_aligned(layout.size)
  fill = lambda leaf: np.full(leaf.shape, value, leaf.dtype)
  layout.pack(
    (fill(params), {name: fill(stats[name]) for name in stats}), payload
  )
  return wires.Message(
    wires.Verb.EXCHANGE,
    worker=1,
    version=3,
    step=2,
    share=1.0,
    elastic_rate=0.2,
    read_version=read_version,
    payload=payload,
  )


def test_a_move_is_recorded_before_it_is_published(tmp_path):
  with _open_centre(tmp_path) as (centre, events):
    before = np.array(centre._replica.state.params)
    for version in (1, 2):
      assert centre._receive(_make_force(centre, 0.5)) == gossip.Outcome.TAKEN
      written, published = events
      events.clear()
      assert written == ('write', traces.Kind.MOVE, [version])
      assert published[:2] == ('publish', version)
      np.testing.assert_allclose(
        published[2], before + 0.5 * version, rtol=1e-5, atol=1e-6
      )


def test_a_move_that_cannot_be_recorded_is_not_published(tmp_path):
  """The disk is full: no node may see weights that replay cannot make."""

  def write(kind, rows):
    raise OSError('No space left on device')

  with _open_centre(tmp_path) as (centre, events):
    centre._files.recorder.write = write
    with pytest.raises(OSError, match='No space'):
      centre._receive(_make_force(centre, 0.5))
    assert events == []


def test_a_force_that_the_protocol_refuses_changes_nothing(tmp_path):
  with _open_centre(tmp_path, FreshElastic()) as (centre, events):
    take = lambda version: centre._receive(_make_force(centre, 0.5, version))
    assert take(0) == gossip.Outcome.TAKEN
    events.clear()
    assert take(0) == gossip.Outcome.REFUSED
    assert not events
    assert take(1) == gossip.Outcome.TAKEN
    assert events[-1][:2] == ('publish', 2)
    for version in (-1, 3):  # The centre has no such version.
      with pytest.raises(wires.MessageError, match='from 0 to 2, got'):
        take(version)


def test_a_centre_that_is_restarted_has_its_protocol_again(tmp_path):
  """The protocol's clock equals the version, which the restart advances."""
  made = []

  class Elastic(gossip.Elastic):
    def make_centre(self):
      made.append(super().make_centre())
      return made[-1]

  group = peers.Group(tmp_path, Elastic())
  stopped = threading.Event()
  stopped.set()
  centre = group.make(traces.SERVER, stopped)
  for _ in range(3):
    centre._receive(_make_force(centre, 0.5))
  centre._files.finish(centre._replica.state, centre._replica.position)
  centre._files.close()
  for number in (1, 2):
    centre = group.make(traces.SERVER, stopped)
    centre.run()
    (*_, protocol) = made
    assert protocol.alive == {1}
    assert protocol.clock == centre.describe()['version'] == 3 + number
    last = centre._files.recorder.get_trace().records[-2:]
    assert last['kind'].tolist() == [traces.Kind.RESTART, traces.Kind.END]
    assert last['incarnation'].tolist() == [number, number]


def test_a_node_joins_with_its_first_force_and_leaves_when_it_is_dead(tmp_path):
  with _open_centre(tmp_path) as (centre, _):
    protocol, files = centre._protocol, centre._files
    files._note_node(1, None, 5.0)
    assert protocol.alive == set()
    for since in (-1.0, 6.0):  # A launcher reports a death; then a new process.
      centre._receive(_make_force(centre, 0.5))
      assert protocol.alive == {1}
      files._note_node(1, None, since)
      assert protocol.alive == set()


def test_nodes_that_are_done_stay_while_others_step(tmp_path):
  """A node asks the centre, its only contact, whether nodes make steps."""
  with peers.start_group(
    tmp_path, 'elastic', num_steps=12, min_seconds=(0.0, 0.0, 0.1)
  ) as group:
    group.wait()
  trace = group.load_trace()
  last_step = trace.steps['end_time'].max()
  ends = trace.records[trace.records['kind'] == traces.Kind.END]
  assert sorted(ends['replica']) == [traces.SERVER, 0, 1, 2]
  assert ends['end_time'].min() > last_step
