"""What do people look at? Pictures of traces and sweeps, tables, pages."""

from jasgd.reports._heat_maps import plot_heat_map
from jasgd.reports._member_pictures import plot_members
from jasgd.reports._node_pictures import plot_ages
from jasgd.reports._node_pictures import plot_node_timeline
from jasgd.reports._node_rates import measure_step_rates
from jasgd.reports._pictures import plot_staleness
from jasgd.reports._pictures import plot_timeline
from jasgd.reports._report import write_report
from jasgd.reports._sweeps import plot_sweep
from jasgd.reports._text_tables import format_table

__all__ = [
  'format_table',
  'measure_step_rates',
  'plot_ages',
  'plot_heat_map',
  'plot_members',
  'plot_node_timeline',
  'plot_staleness',
  'plot_sweep',
  'plot_timeline',
  'write_report',
]
