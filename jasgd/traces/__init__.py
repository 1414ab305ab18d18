"""What happened, in which order: records, files and statistics of runs."""

from jasgd.protocols import Fate
from jasgd.traces import statistics
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
from jasgd.traces._writer import TraceWriter

__all__ = [
  'IN_FLIGHT',
  'RECORD',
  'Fate',
  'Kind',
  'LearnerSummary',
  'Summary',
  'Trace',
  'TraceError',
  'TraceWriter',
  'format_summary',
  'make_records',
  'statistics',
  'summarize',
]
