"""What happened, in which order: records, files and statistics of runs."""

from jasgd.protocols import Fate
from jasgd.traces import statistics
from jasgd.traces._node_ages import measure_ages
from jasgd.traces._node_deaths import find_downtimes
from jasgd.traces._node_schema import ALL
from jasgd.traces._node_schema import CENTRE
from jasgd.traces._node_schema import NODE_RECORD
from jasgd.traces._node_schema import NodeKind
from jasgd.traces._node_summary import format_node_summary
from jasgd.traces._node_summary import keep_first_of_mix
from jasgd.traces._node_summary import NodeColumns
from jasgd.traces._node_summary import NodeSummary
from jasgd.traces._node_summary import Spread
from jasgd.traces._node_summary import summarize_nodes
from jasgd.traces._node_tail import NodeTail
from jasgd.traces._nodes import NodeTrace
from jasgd.traces._schema import IN_FLIGHT
from jasgd.traces._schema import Kind
from jasgd.traces._schema import make_records
from jasgd.traces._schema import RECORD
from jasgd.traces._schema import TraceError
from jasgd.traces._summary import format_summary
from jasgd.traces._summary import LearnerSummary
from jasgd.traces._summary import summarize
from jasgd.traces._summary import Summary
from jasgd.traces._trace import Trace
from jasgd.traces._waits import find_wait_ends
from jasgd.traces._writer import NodeTraceWriter
from jasgd.traces._writer import TraceWriter

__all__ = [
  'ALL',
  'CENTRE',
  'IN_FLIGHT',
  'NODE_RECORD',
  'RECORD',
  'Fate',
  'Kind',
  'LearnerSummary',
  'NodeColumns',
  'NodeKind',
  'NodeSummary',
  'NodeTail',
  'NodeTrace',
  'NodeTraceWriter',
  'Spread',
  'Summary',
  'Trace',
  'TraceError',
  'TraceWriter',
  'find_downtimes',
  'find_wait_ends',
  'format_node_summary',
  'format_summary',
  'keep_first_of_mix',
  'make_records',
  'measure_ages',
  'statistics',
  'summarize',
  'summarize_nodes',
]
