"""The centre of elastic averaging: alone, and with nodes in threads."""

import contextlib
import threading

import numpy as np
import pytest

from jasgd import gossip
from jasgd import traces
from jasgd.runtime import wires
from tests.runtime import peer_cases as peers


@contextlib.contextmanager
def _open_centre(folder):
  """A centre without wires, and its records and publications in order."""
  group = peers.Group(folder, peers.STRATEGIES['elastic'])
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


def _make_force(centre, value):
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
  """As on a full disk: no node may see weights that replay cannot make."""

  def write(kind, rows):
    raise OSError('No space left on device')

  with _open_centre(tmp_path) as (centre, events):
    centre._files.recorder.write = write
    with pytest.raises(OSError, match='No space'):
      centre._receive(_make_force(centre, 0.5))
    assert events == []


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
