"""Downpour: learners make local steps between pushes and fetches."""

from typing import Any

from jasgd.protocols import _checks
from jasgd.protocols.algorithms import _asynchronous


class Downpour(_asynchronous.Asynchronous):
  r"""Learners push every n_push steps and fetch every n_fetch steps.

  .. math::
    y \leftarrow y - \alpha' g, \quad s \leftarrow s + g
    \quad \text{(learner)}; \qquad
    x \leftarrow x - \alpha s \quad \text{(server)}

  Between fetches a learner takes local steps on its own copy y of the weights.
  A push carries the sum s of the gradients since the last push; its read clock
  is that of the last fetch. A fetch replaces y by the server's weights x.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """

  name = 'downpour'

  def __init__(self, n_push: int = 1, n_fetch: int = 1) -> None:
    """Builds the protocol.

    Args:
      n_push: Steps between two pushes of a learner.
      n_fetch: Steps between two fetches of a learner.
    """
    super().__init__()
    self.steps_per_push = _checks.check_count('n_push', n_push, 1)
    self.steps_per_fetch = _checks.check_count('n_fetch', n_fetch, 1)

  def arguments(self) -> dict[str, Any]:
    """The constructor's arguments by name."""
    return {'n_push': self.steps_per_push, 'n_fetch': self.steps_per_fetch}

  def describe(self) -> str:
    """The rule in words."""
    return (
      f'downpour({self.steps_per_push}, {self.steps_per_fetch}): a learner '
      f'pushes the sum of {self.steps_per_push} gradients, and fetches new '
      f'weights every {self.steps_per_fetch} steps; in between it steps on its '
      'own copy. The server updates with every push; no learner waits.'
    )
