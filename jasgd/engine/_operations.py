"""Operations on values: the effect of the records of a trace on weights.

Replicas are sets of weights with versions. Node i has replica i; a server or an
elastic centre has replica `SERVER`. A learner that makes local steps also has a
replica, but no records of its own: the server's records determine it.

Everything that changes weights is an operation. It reads values and makes new
ones, and a value never changes (static single assignment). Versions of replicas
are names of values and may share one: all replicas at the start, nodes that
have just averaged, a node that went back to its checkpoint. Hence nothing is
computed or copied twice.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

SERVER = -1

# Operations on minibatches. A worker computes a gradient, and then:
# - STEP: an optimizer changes weights with it.
# - ACCUMULATE: the server adds it to the sum of a later STEP.
# - GRADIENT: the gradient itself is the result.
# FETCH: a learner makes steps on its own replica, then fetches weights.
STEP, ACCUMULATE, GRADIENT, FETCH = range(4)
# Operations without a minibatch:
# - MIX: own and other weights, each times a factor, are added.
# - DIFFERENCE, SUBTRACT: a node makes a scaled difference to the centre, and
#   subtracts it. One call makes both.
# - MOVE: the centre adds a node's difference.
# - AVERAGE: one addition of a mean.
# - UPDATE: an optimizer changes weights with a mean of gradients.
# - START: a node that has joined gets a fresh optimizer and keeps its weights.
MIX, DIFFERENCE, SUBTRACT, MOVE, AVERAGE, UPDATE, START = range(4, 11)
STEP_KINDS = (STEP, ACCUMULATE, GRADIENT, FETCH)
# Own weight of the first AVERAGE of a mean. It is larger in the following ones.
FIRST_SHARE = 0.5

Columns = dict[str, np.ndarray]


class Operation(NamedTuple):
  """Reads values; makes a value of weights and one of an optimizer's state.

  Attributes:
    kind: Kind of the operation, one of the constants above.
    own: Value of the weights that change; -1: those in the server's state.
    source: Value of the other weights: those that a gradient is computed at or
      that are mixed in; a difference for MOVE and SUBTRACT, a gradient for
      UPDATE.
    write: New value of weights; -1: none.
    own_weight: Factor of `own`.
    weight: Factor of `source`; for DIFFERENCE, the factor of the difference.
    state_read: Value of the optimizer's state before; -1: not needed.
    state_write: Value of the optimizer's state afterwards; -1: none.
    worker: Number of the worker that computes the minibatch.
    step: Number of the worker's first minibatch, from 0 on; for UPDATE, of the
      minibatches of the gradients; for START, of the next minibatch.
    time: Time of the end of the operation.
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


# Further columns of operations on minibatches, with their values for nodes.
SERVER_COLUMNS = {
  'replica': SERVER,  # Replica of the server, or of a fragment of its weights.
  'num_steps': 1,  # Number of minibatches.
  'staleness': 0,
  'num_learners': 1,  # Number of learners present at that time.
  'is_reset': False,  # Whether the learner joined: its sums begin at zero.
  'is_separate': False,  # Whether a separate, later call made the update.
  'call': 0,  # Updates with equal numbers above 0 were made by one call.
  'num_devices': 1,  # Number of devices that the minibatch was spread over.
  'local_version': 0,  # Version of the weights that the learner fetched last.
}


class ValueChanges(NamedTuple):
  """Columns with an entry for each change of the values of a replica."""

  after: np.ndarray  # Number of operations before the change.
  replica: np.ndarray
  version: np.ndarray
  value: np.ndarray  # Value of its weights.
  state: np.ndarray  # Value of its optimizer's state.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Operations:
  """All operations of a trace.

  Attributes:
    columns: Name of a field of `Operation` or of `SERVER_COLUMNS` -> array with
      an entry for each operation. With a server, unused fields are left out.
    changes: Changes of the values of replicas. None for a server, whose state
      always has its latest weights.
    replicas: Numbers of all replicas that have records.
    num_locals: Number of learners with their own replica.
  """

  columns: Columns
  changes: ValueChanges | None
  replicas: tuple[int, ...]
  num_locals: int = 0


# --- For readers of records.


def fill_column(value: Any, size: int) -> np.ndarray:
  """A column that repeats one value, without the memory for its entries."""
  dtype = np.int32 if type(value) is int else None
  return np.broadcast_to(np.asarray(value, dtype), size)


def get_number(numbers: np.ndarray | None, index: int) -> int:
  """The number of a record in the trace, where void records count too."""
  return index if numbers is None else int(numbers[index])
