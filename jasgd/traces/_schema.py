"""What one record of a trace holds."""

import enum
from typing import Any

import numpy as np


class TraceError(ValueError):
  """A trace, or the file of one, that is not what it should be."""


class Kind(enum.IntEnum):
  """What a record tells of."""

  GRADIENT = 0  # A learner pushed a gradient.
  JOIN = 1  # A learner came.
  LEAVE = 2  # A learner went, or was lost.
  RESTART = 3  # The server came back, and forgot what it had not saved.
  FETCH = 4  # A learner got new weights, where that is no part of a push.
  END = 5  # The run is over; gradients of later updates were not applied.


# Those that are no learner's.
SERVER_KINDS = (Kind.RESTART, Kind.END)

# Little-endian on every machine, each field on a multiple of its own size, so
# that columns of a memory-mapped file are arrays as they stand.
RECORD = np.dtype(
  [
    ('kind', 'u1'),
    ('fate', 'u1'),
    # Of an applied gradient that was the last of its update: a digest of the
    # new weights, by which replay finds where it goes astray. 0: not known.
    ('digest', '<u2'),
    ('incarnation', '<i4'),
    ('learner', '<i4'),
    # Updates with equal numbers were made by one call of the compiled function,
    # as several at once round differently. 0: each by a call of its own. Of a
    # JOIN record: the devices that a learner spreads a minibatch over. 0: one.
    ('call', '<i4'),
    # Per learner. Of a FETCH record: minibatches that the learner has computed
    # so far. Of a RESTART record: the index of the last record that still
    # stands; what lies between that one and this is void.
    ('step', '<i8'),
    # Of a FETCH record: the clock of the new weights. Of a LEAVE record: that
    # of the weights which the learner had got and gave no gradient for, or -1.
    # Of a RESTART record: the clock that the server resumed at. Of an END
    # record: the last clock.
    ('read_clock', '<i8'),
    ('arrive_clock', '<i8'),
    ('apply_clock', '<i8'),  # -1 if it was dropped.
    ('samples', '<i8'),  # Of all applied gradients so far, with this one.
    # All but one by the server's clock, in seconds. NaN: not known.
    ('start_time', '<f8'),  # The learner was given its snapshot.
    ('compute_time', '<f8'),  # A duration, measured by the learner.
    ('arrive_time', '<f8'),  # The server had received the gradient.
    # The server let the learner go on; of a FETCH, it sent the weights.
    ('release_time', '<f8'),
  ]
)

# What `Trace.in_flight` holds of each gradient that was never received.
IN_FLIGHT = np.dtype(
  [
    ('learner', '<i4'),
    ('step', '<i8'),
    ('read_clock', '<i8'),
    ('start_time', '<f8'),
  ]
)


def make_records(**columns: Any) -> np.ndarray:
  """Builds records from columns.

  Args:
    **columns: Fields of `RECORD`, as arrays of one length or as scalars that
      hold for all records. What is left out is 0: applied gradients of
      learner 0.

  Returns:
    An array of dtype `RECORD`.

  Raises:
    ValueError: if a name is not that of a field, or the lengths differ.

  Examples:
    >>> from jasgd import traces
    >>> records = traces.make_records(learner=[0, 1], step=7)
    >>> records['step'].tolist()
    [7, 7]
  """
  unknown = sorted(set(columns) - set(RECORD.names or ()))
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
  records = np.zeros(length, RECORD)
  for name, array in arrays.items():
    records[name] = array
  return records
