"""What do people look at? Pictures of traces and sweeps, tables, pages.

Names that are imported here and are not in `__all__` are for other rooms and
for the command line, and not promised to users.
"""

from jasgd.reports._formats import format_table as format_table
from jasgd.reports._heat_maps import plot_heat_map
from jasgd.reports._heat_maps import plot_sweep
from jasgd.reports._members import plot_members
from jasgd.reports._report import write_report
from jasgd.reports._staleness import plot_ages
from jasgd.reports._staleness import plot_staleness
from jasgd.reports._timeline import plot_timeline
from jasgd.reports._workers import measure_step_rates as measure_step_rates

__all__ = [
  'plot_ages',
  'plot_heat_map',
  'plot_members',
  'plot_staleness',
  'plot_sweep',
  'plot_timeline',
  'write_report',
]
