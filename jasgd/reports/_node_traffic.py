"""What nodes send, beside what a server for them would have to."""

from collections.abc import Sequence

import numpy as np

from jasgd import traces
from jasgd.reports import _formats
from jasgd.reports import _runs
from jasgd.reports import _tables


def make_traffic(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> _tables.Table | None:
  """The traffic of runs of nodes; None if it is not known of any.

  A server would get each step's gradient and send the weights back: all of it
  through its one link. Without one there is no such link, but for the centre's.
  """
  columns = [_list_traffic(run) for run in runs]
  table = _tables.join('Traffic', 'kB', columns, labels)
  if table is None:
    return None
  return table._replace(
    note='A step is one of one node; a round is as many steps as there are '
    'nodes. Of an all-reduce it is what its messages hold: small weights are '
    'sent whole, to all; of others, 2 (n - 1) / n by each of n nodes. What was '
    'refused (gossip/refused_full, gossip/refused_done) is not in it.'
  )


def _list_traffic(run: _runs.Run) -> dict[str, str]:
  """In kB, by what it is."""
  summary = run.node_summary
  if summary is None or not isinstance(run.trace, traces.NodeTrace):
    return {}
  nodes, size = summary.nodes, run.trace.header.get('bytes_per_message')
  if nodes.bytes_sent is None or nodes.bytes_received is None or not size:
    return {}
  if not summary.num_steps:
    return {}
  num_rounds = summary.num_steps / summary.num_nodes
  links = (nodes.bytes_sent + nodes.bytes_received) / num_rounds
  results = {
    'the weights': size,
    'sent by a node, per step': nodes.bytes_sent.sum() / summary.num_steps,
    'received by a node, per step': (
      nodes.bytes_received.sum() / summary.num_steps
    ),
    "through the busiest node's link, per round": links.max(),
  }
  is_centre = np.any(run.trace.mixes['peer'] == traces.CENTRE)
  if is_centre:
    results["through the centre's link, per round"] = links.sum()
  results |= {
    'with a server: sent by a learner, per step': size,
    'with a server: received by a learner, per step': size,
    "with a server: through the server's link, per round": (
      2 * size * summary.num_nodes
    ),
  }
  return {
    name: _formats.format_number(float(value) / 1e3)
    for name, value in results.items()
  }
