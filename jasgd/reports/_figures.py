"""The look of all pictures: sizes, colours, axes, and how they are saved."""

import os
from typing import Any

from matplotlib import axes as mpl_axes
from matplotlib import colormaps
from matplotlib import colors as mpl_colors
from matplotlib import figure as mpl_figure
from matplotlib import ticker
import numpy as np

# Activity of a worker -> its colour.
COLORS = {
  'computes': '#4c72b0',
  'communicates': '#dd8452',
  'waits': '#c8c8c8',
  'is gone': '#f2cfd0',
}
DIVERGED_COLOR = '#c44e52'
_RUN_COLORS = (
  '#4c72b0',
  '#dd8452',
  '#55a868',
  '#8172b3',
  '#937860',
  '#da8bc3',
  '#64b5cd',
  '#ccb974',
)


def make_figure(height: float) -> mpl_figure.Figure:
  """An empty picture as wide as a page."""
  return mpl_figure.Figure(figsize=(9, height), layout='constrained')


def save(
  figure: mpl_figure.Figure, path: str | os.PathLike[str] | None
) -> mpl_figure.Figure:
  """Returns a picture; writes it to a file if there is a path."""
  if path is not None:
    figure.savefig(path, dpi=120)
  return figure


def set_axes(axes: mpl_axes.Axes, x: str, y: str, whole: str = '') -> None:
  """Labels axes; the axis named `whole` ('x' or 'y') has whole numbers."""
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  axes.spines[['top', 'right']].set_visible(False)
  if whole:  # Ticks at whole numbers only, and one for a single value, too.
    locator = ticker.MaxNLocator(8, integer=True, min_n_ticks=1)
    {'x': axes.xaxis, 'y': axes.yaxis}[whole].set_major_locator(locator)


def add_legend(figure: mpl_figure.Figure, **options: Any) -> None:
  """A legend above a picture."""
  figure.legend(
    **{'loc': 'outside upper left', 'frameon': False, 'fontsize': 9, **options}
  )


def add_axes_legend(axes: mpl_axes.Axes, **options: Any) -> None:
  """A legend in one line above the right end of axes."""
  axes.legend(
    loc='lower right',
    **{'bbox_to_anchor': (1, 1), 'ncols': 8, **options},
    frameon=False,
    fontsize=8,
  )


def draw_times(axes: mpl_axes.Axes, times: np.ndarray, **style: Any) -> None:
  """A vertical line from bottom to top for each time."""
  transform = axes.get_xaxis_transform()
  axes.vlines(times, 0, 1, transform=transform, color='black', **style)


def say_empty(axes: mpl_axes.Axes) -> None:
  """Writes that there is nothing to draw."""
  axes.text(0.5, 0.5, 'no gradients', transform=axes.transAxes, ha='center')


def pick_colors(number: int) -> list[str]:
  """A colour for each of `number` runs."""
  if number <= len(_RUN_COLORS):
    return list(_RUN_COLORS[:number])
  shades = colormaps['viridis'](np.linspace(0, 0.95, number))
  return [mpl_colors.to_hex(shade) for shade in shades]
