"""Operations on values: what the records of a trace do to weights.

Replicas are sets of weights with versions: node i's is number i, and that of a
server or of an elastic centre is number `SERVER`. A learner that steps on its
own has a replica too, which has no records of its own: the server's determine
it.

Everything that changes weights is an operation. It reads values and makes new
ones, and a value is never changed (static single assignment). Versions of
replicas are names of values and may share one: all replicas at the start, nodes
that have just averaged, a node that went back to its checkpoint. So nothing is
computed or copied twice.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

SERVER = -1

# Operations on minibatches: a worker computes a gradient, and an optimizer
# takes it and changes weights (STEP), or keeps it for a later STEP
# (ACCUMULATE), or the gradient itself is the result (GRADIENT); or a learner
# steps on its own replica and then fetches weights (FETCH).
STEP, ACCUMULATE, GRADIENT, FETCH = range(4)
# Operations without a minibatch: own and other weights times a factor each
# (MIX); a scaled difference of two, which one subtracts (DIFFERENCE, SUBTRACT,
# both by one call) and another adds (MOVE); one addition of a mean (AVERAGE);
# an optimizer that takes a mean of gradients (UPDATE); the optimizer of a node
# that has joined starts anew, and the weights stay (START).
MIX, DIFFERENCE, SUBTRACT, MOVE, AVERAGE, UPDATE, START = range(4, 11)
STEP_KINDS = (STEP, ACCUMULATE, GRADIENT, FETCH)
# The own weight of the first AVERAGE of a mean; those that follow have more.
FIRST_SHARE = 0.5

Columns = dict[str, np.ndarray]


class Operation(NamedTuple):
  """Reads values and makes one of weights, and one of an optimizer's state.

  Attributes:
    kind: What is done.
    own: The weights that change; -1: those in the state of a server.
    source: The other weights: where a gradient is computed, or what is mixed
      in; of a MOVE or SUBTRACT a difference, of an UPDATE a gradient.
    write: The new value of weights; -1: none.
    own_weight: The factor of `own`.
    weight: The factor of `source`; of a DIFFERENCE, that of the difference.
    state_read: The optimizer's state before; -1: not needed.
    state_write: Its state afterwards; -1: none.
    worker: Who computes the minibatch.
    step: The worker's first minibatch, counted from 0; of an UPDATE, the one
      that the gradients are of; of a START, the first one to come.
    time: When it was done.
    record: The index of its record in the trace.
  """

  kind: int
  own: int
  source: int
  write: int
  own_weight: float = 1.0
  weight: float = 1.0
  state_read: int = -1
  state_write: int = -1
  worker: int = 0
  step: int = 0
  time: float = 0.0
  record: int = 0


# Further columns of operations on minibatches, and their values if a server has
# no part in them.
SERVER_COLUMNS = {
  'replica': SERVER,  # Of the server, or of a fragment of its weights.
  'num_steps': 1,  # Minibatches.
  'staleness': 0,
  'num_learners': 1,  # Present at the time.
  'is_reset': False,  # A learner begins anew: its sum of gradients is lost.
  'is_separate': False,  # The update came later, by a call of its own.
  'call': 0,  # Updates with equal numbers above 0 were made by one call.
  'num_devices': 1,  # That the minibatch was spread over.
  'local_version': 0,  # Of the weights that a learner's own replica began with.
}


class Holdings(NamedTuple):
  """Columns with an entry for each change of the values that a replica has."""

  after: np.ndarray  # Number of operations before.
  replica: np.ndarray
  version: np.ndarray
  value: np.ndarray
  state: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operations:
  """All operations of a trace.

  Attributes:
    columns: From the fields of `Operation` and `SERVER_COLUMNS` to arrays with
      an entry for each operation. A server's have only those that matter.
    holdings: The values that replicas have. None for a server, whose state
      always has its latest weights.
    replicas: The numbers of all replicas that have records.
    num_locals: Number of learners with a replica of their own.
  """

  columns: Columns
  holdings: Holdings | None
  replicas: tuple[int, ...]
  num_locals: int = 0


# --- For readers of records.


def fill_column(value: Any, size: int) -> np.ndarray:
  """A column of one value, which takes no memory."""
  dtype = np.int32 if type(value) is int else None
  return np.broadcast_to(np.asarray(value, dtype), size)


def get_number(numbers: np.ndarray | None, index: int) -> int:
  """The number of a record among those of the trace, with void ones."""
  return index if numbers is None else int(numbers[index])
