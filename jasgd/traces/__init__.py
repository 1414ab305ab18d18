"""What happened, in which order: records, files and statistics of runs."""

from jasgd.protocols import Fate
from jasgd.traces import statistics
from jasgd.traces._checks import check_history
from jasgd.traces._checks import check_records
from jasgd.traces._checks import refuse_record
from jasgd.traces._folder import get_file_name
from jasgd.traces._folder import TraceTail
from jasgd.traces._schema import Kind
from jasgd.traces._schema import make_records
from jasgd.traces._schema import RECORD
from jasgd.traces._schema import SERVER
from jasgd.traces._schema import TraceError
from jasgd.traces._summary import format_summary
from jasgd.traces._summary import summarize
from jasgd.traces._summary import Summary
from jasgd.traces._trace import Trace
from jasgd.traces._writer import TraceWriter

__all__ = [
  'RECORD',
  'SERVER',
  'Fate',
  'Kind',
  'Summary',
  'Trace',
  'TraceError',
  'TraceTail',
  'TraceWriter',
  'check_history',
  'check_records',
  'format_summary',
  'get_file_name',
  'make_records',
  'refuse_record',
  'statistics',
  'summarize',
]
