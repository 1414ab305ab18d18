"""What do people look at? Pictures of traces."""

from jasgd.reports._pictures import plot_staleness
from jasgd.reports._pictures import plot_timeline

__all__ = ['plot_staleness', 'plot_timeline']
