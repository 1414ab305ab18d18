"""The record: one entry of a trace, the same for every strategy.

A run has *replicas*: sets of weights, each with a version that grows by one at
every change. Worker i's replica (a node's, or a learner's own) has number i, a
server or an elastic centre has number `SERVER`, and further fragments of a
server's weights have the numbers below it. A record tells what happened to one
replica. Its owner writes it before any other process can see the result.
"""

import enum
from typing import Any

import numpy as np

from jasgd import protocols


class TraceError(ValueError):
  """A trace, or the file of a trace, that is damaged or makes no sense."""


class Kind(enum.IntEnum):
  """What happened."""

  PUSH = 0  # A learner's gradient reached the server.
  STEP = 1  # A worker computed a gradient and applied it to its own replica.
  FETCH = 2  # A learner got weights from the server, apart from a push.
  MIX = 3  # Weights of another replica were mixed into this one.
  MOVE = 4  # The centre moved by the force of a node.
  MEAN = 5  # This node's part in an average over all nodes (all-reduce).
  LOST = 6  # A message or question to a dead node; a force that was refused.
  JOIN = 7  # A worker came. A node that joins late mixes next, if it can.
  LEAVE = 8  # A worker left, or was lost.
  RESTART = 9  # The replica's owner came back with earlier weights.
  END = 10  # The run is over for this owner. Without it, the owner died.


# The server's replica, or the centre's.
SERVER = -1

# Above the number of workers, and the staleness, of any run: a record with such
# a number is damaged, and arrays of that length would not fit in memory.
MAX_WORKERS = MAX_STALENESS = 1 << 24

# The kinds of records that stand for one gradient.
GRADIENTS = (Kind.PUSH, Kind.STEP)

# Little-endian on every machine. Every field lies on a multiple of its size, so
# the columns of a memory-mapped file are arrays without any conversion. A field
# that a kind of record has no use for is 0.
RECORD = np.dtype(
  [
    ('kind', 'u1'),
    # PUSH: fate of the gradient, a `protocols.Fate`.
    ('fate', 'u1'),
    # 1: this record made `version`, alone or with others of its group. 0: it
    # changed no weights.
    ('updates', 'u1'),
    ('reserved', 'u1'),
    # Digest of the new weights, by which a replay finds its first difference.
    # 0: not known.
    ('digest', '<u2'),
    # JOIN: devices that the worker spreads a minibatch over; 0 means 1.
    ('num_devices', '<u2'),
    # The replica that this record is about.
    ('replica', '<i4'),
    # The worker that computed, sent, asked, came or left.
    ('worker', '<i4'),
    # MIX, MOVE: the other replica, whose weights are read. LOST: the node that
    # should have received the message.
    ('source', '<i4'),
    # Records with equal numbers above 0 belong together: updates of a replica
    # that one call made, as several at once round differently; the sources of
    # one mix of a replica; the members of one mean. A number is never reused.
    ('group', '<i4'),
    # Incarnation of the replica's owner: grows by 1 at each RESTART.
    ('incarnation', '<i4'),
    # Number of samples in the gradient's minibatch.
    ('samples', '<i4'),
    # Minibatches that `worker` has computed so far, those of this gradient
    # included. MOVE: moves that the centre has made.
    ('step', '<i8'),
    # Version of `replica` after this record. A RESTART of a server goes back to
    # an earlier version, in a new incarnation; a node or a centre gets a new
    # number, as others may have read those that it had since.
    ('version', '<i8'),
    # Version of `replica` that was read: where a PUSH or STEP computed its
    # gradient, what a FETCH got, what a RESTART goes on from, what a LOST sent
    # (-1: it was a question), or what a worker that LEAVEs was computing on
    # (-1: nothing).
    ('read_version', '<i8'),
    # Version of `source` that was read. MOVE: version of the node before its
    # own mix with the centre.
    ('source_version', '<i8'),
    # Steps in the weights of `source`: `step` of its last record by then.
    ('source_step', '<i4'),
    # RESTART of a server: the index of the last record that is still
    # valid. A group of gradients may be half filled there, so a version would
    # not do. The records between that one and this are void.
    ('stands', '<i4'),
    # Factors on the own weights and on those of `source`.
    ('own_weight', '<f8'),
    ('weight', '<f8'),
    # Push-sum's mass: what the node has after a STEP, MIX, RESTART or END; what
    # a LEAVE or LOST loses; what a JOIN adds.
    ('mass', '<f8'),
    # Seconds since the run began, by the owner's clock. NaN: not known.
    ('start_time', '<f8'),  # The work began: the worker had its weights.
    ('compute_time', '<f8'),  # PUSH: a duration, by the learner's clock.
    ('end_time', '<f8'),  # The work was done, or a push had arrived.
    ('release_time', '<f8'),  # PUSH, FETCH: the learner was answered.
  ]
)

# Fields of `Trace.in_flight`, for each gradient that was never received.
IN_FLIGHT = np.dtype(
  [
    ('worker', '<i4'),
    ('step', '<i8'),
    ('read_version', '<i8'),
    ('start_time', '<f8'),
  ]
)

_OWN_KINDS = (Kind.STEP, Kind.MIX, Kind.MEAN, Kind.LOST)
_CHANGES = (Kind.STEP, Kind.MIX, Kind.MOVE, Kind.MEAN)


def make_records(**columns: Any) -> np.ndarray:
  """Builds records from columns.

  Args:
    **columns: Fields of `RECORD`, as arrays of one length or as scalars that
      hold for all records; and `clock`, the version before the record, which
      may be given in place of `version`, and is 0 by default. Left out, `kind`
      is PUSH, `replica` is `SERVER`, or the worker for kinds that are about a
      worker's replica, `updates` is 1 for changes and for applied pushes, and
      others are 0.

  Returns:
    An array of dtype `RECORD`.

  Raises:
    ValueError: if a name is not that of a field, or the lengths differ.

  Examples:
    >>> from jasgd import traces
    >>> records = traces.make_records(worker=[0, 1], clock=[0, 1])
    >>> records['version'].tolist()
    [1, 2]
  """
  unknown = sorted(set(columns) - {'clock', *(RECORD.names or ())})
  if unknown:
    raise ValueError(
      f'A record has no field {", ".join(unknown)}; its fields are '
      f'{", ".join(RECORD.names or ())}.'
    )
  arrays = {name: np.atleast_1d(column) for name, column in columns.items()}
  shapes = {name: array.shape for name, array in arrays.items()}
  try:
    (length,) = np.broadcast_shapes((1,), *shapes.values())
  except ValueError:
    raise ValueError(
      f'Columns must have one length, or be scalars, got shapes {shapes}.'
    ) from None
  clock = arrays.pop('clock', 0)
  records = np.zeros(length, RECORD)
  for name, array in arrays.items():
    records[name] = array
  kinds = records['kind']
  if 'replica' not in arrays:
    is_own = np.isin(kinds, _OWN_KINDS)
    records['replica'] = np.where(is_own, records['worker'], SERVER)
  if 'updates' not in arrays:
    is_applied = records['fate'] == protocols.Fate.APPLIED
    is_applied &= kinds == Kind.PUSH
    records['updates'] = np.isin(kinds, _CHANGES) | is_applied
  if 'version' not in arrays:
    records['version'] = clock + records['updates']
  return records
