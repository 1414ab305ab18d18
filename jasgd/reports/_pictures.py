"""Pictures of a trace, drawn with matplotlib."""

import os

from matplotlib import axes as mpl_axes
from matplotlib import figure as mpl_figure
from matplotlib import patches
import numpy as np

from jasgd import protocols
from jasgd import traces

# What a learner does -> its colour in a timeline.
_COLORS = {
  'computes': '#4c72b0',
  'communicates': '#dd8452',
  'waits': '#c8c8c8',
}


def plot_staleness(trace: traces.Trace, path: str | os.PathLike[str]) -> None:
  """Draws the distribution of staleness, of applied and of dropped gradients.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
  """
  figure = mpl_figure.Figure(figsize=(7, 3.6), layout='constrained')
  axes = figure.subplots()
  staleness, fate = trace.staleness, trace.fate
  largest = int(staleness.max(initial=0))
  # A bar per value, or as many bars as the eye can tell apart.
  width = max(1, -(-(largest + 1) // 200))
  bins = np.arange(0, largest + 2 * width, width) - 0.5
  is_kept = np.isin(fate, (protocols.Fate.APPLIED, protocols.Fate.PENDING))
  groups = {'applied': staleness[is_kept], 'dropped': staleness[~is_kept]}
  groups = {name: group for name, group in groups.items() if len(group)}
  axes.hist(
    list(groups.values()),
    bins.tolist(),
    stacked=True,
    label=list(groups),
    rwidth=0.9,
  )
  if len(staleness):
    mean = staleness.mean()
    axes.axvline(mean, color='black', linestyle='--', linewidth=1)
    axes.set_title(f'mean {mean:.2f}, largest {largest}', fontsize=10)
  axes.set_xlabel('staleness: updates since the weights were read')
  axes.set_ylabel('gradients')
  axes.legend()
  figure.savefig(path, dpi=120)


def plot_timeline(
  trace: traces.Trace,
  path: str | os.PathLike[str],
  *,
  max_learners: int = 16,
  num_rounds: float = 8.0,
) -> None:
  """Draws who computed, communicated and waited when, in the first part.

  Args:
    trace: What to draw.
    path: The file to write; its ending chooses the format.
    max_learners: How many learners to draw.
    num_rounds: How many gradients of a typical learner to draw.
  """
  figure = mpl_figure.Figure(figsize=(9, 4.2), layout='constrained')
  axes = figure.subplots()
  cycle = np.median(trace.arrive_time - trace.start_time) if len(trace) else 1.0
  end = num_rounds * cycle
  is_drawn = (trace.learner < max_learners) & (trace.start_time < end)
  for index in np.flatnonzero(is_drawn):
    start, arrive = trace.start_time[index], trace.arrive_time[index]
    computed = min(trace.compute_time[index], arrive - start)
    # Where in between the learner computed is not recorded: the pull and the
    # push are drawn as equally long.
    transfer = (arrive - start - computed) / 2
    release = trace.release_time[index]
    row = int(trace.learner[index])
    _draw(axes, row, start, arrive, 'communicates')
    _draw(axes, row, start + transfer, arrive - transfer, 'computes')
    _draw(axes, row, arrive, end if np.isnan(release) else release, 'waits')
  # An update is made when the last gradient of its group has come.
  is_applied = trace.apply_clock >= 0
  is_last = np.diff(trace.apply_clock[is_applied], append=-1) != 0
  for time in trace.arrive_time[is_applied][is_last]:
    if time < end:
      axes.axvline(time, color='black', linewidth=0.5, alpha=0.5)
  axes.set_xlim(0, end)
  axes.set_ylim(min(max_learners, trace.learner.max(initial=0) + 1) - 0.5, -0.5)
  axes.set_xlabel('time')
  axes.set_ylabel('learner')
  axes.legend(
    handles=[
      patches.Patch(color=color, label=name) for name, color in _COLORS.items()
    ],
    loc='lower right',
    bbox_to_anchor=(1, 1),
    ncols=3,
    frameon=False,
    fontsize=8,
  )
  figure.savefig(path, dpi=120)


def _draw(
  axes: mpl_axes.Axes, row: int, start: float, end: float, what: str
) -> None:
  """A bar in a learner's row."""
  if end > start:
    axes.barh(
      row, end - start, left=start, height=0.8, color=_COLORS[what], linewidth=0
    )
