"""What do people look at? Pictures of traces."""

from jasgd.reports._node_pictures import plot_ages
from jasgd.reports._node_pictures import plot_node_timeline
from jasgd.reports._pictures import plot_staleness
from jasgd.reports._pictures import plot_timeline

__all__ = ['plot_ages', 'plot_node_timeline', 'plot_staleness', 'plot_timeline']
