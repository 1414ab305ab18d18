"""Asynchronous SGD: every gradient makes its own update on arrival."""

from jasgd.protocols.algorithms import _counting


class Asynchronous(_counting.Counting):
  r"""Every gradient makes its own update on arrival: Downpour's server.

  .. math:: x \leftarrow x - \alpha(\tau) \, g

  No learner waits. With N learners the mean staleness is N - 1, whatever their
  speeds.

  References:
    Dean et al., `Large Scale Distributed Deep Networks
    <https://papers.nips.cc/paper/4687>`_, 2012
  """

  name = 'asynchronous'
  updates_each = True

  def describe(self) -> str:
    """The rule in words."""
    return (
      'asynchronous: the server updates with every gradient on arrival; no '
      'learner waits.'
    )
