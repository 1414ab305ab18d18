"""`write_report`: one page for one run, or for several side by side."""

from collections.abc import Sequence
import os
import pathlib

from matplotlib import figure as mpl_figure

from jasgd import traces
from jasgd.reports import _curves
from jasgd.reports import _fate_tables
from jasgd.reports import _histograms
from jasgd.reports import _labels
from jasgd.reports import _member_pictures
from jasgd.reports import _node_pictures
from jasgd.reports import _node_rates
from jasgd.reports import _node_traffic
from jasgd.reports import _page
from jasgd.reports import _pictures
from jasgd.reports import _prediction_tables
from jasgd.reports import _runs
from jasgd.reports import _shares
from jasgd.reports import _tables
from jasgd.reports import _words

_Path = str | os.PathLike[str]


def write_report(
  workdirs: _Path | Sequence[_Path],
  path: _Path | None = None,
  title: str | None = None,
) -> pathlib.Path:
  """Writes a page that shows what runs did, and how they ended.

  The page is one file of HTML with everything in it. The pictures lie beside it
  as PNGs too, in a folder of the page's name without its ending. A run that is
  not finished, or has lost files, gets a report of what is there.

  Args:
    workdirs: The folder of a run, or those of several to compare.
    path: The page to write, which ends in '.html'; None: `report.html` in the
      workdir, if there is only one.
    title: What stands on top; None: the name of the folder, or how many runs
      there are.

  Returns:
    The path of the page.

  Raises:
    WorkdirError: if a folder is not that of a run.
    ValueError: if there are no workdirs, one is given twice, or there are
      several and no path; or if the path does not end in '.html'.

  Examples:
    >>> import pathlib, tempfile
    >>> import jasgd
    >>> from jasgd import protocols, reports
    >>> trace = jasgd.simulate(
    ...     protocols.softsync(2), num_learners=4, num_gradients=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   trace.save(pathlib.Path(folder, 'trace'))
    ...   page = reports.write_report(folder)
    ...   print(page.name, '50 updates' in page.read_text())
    ...   print(*sorted(file.name for file in page.with_suffix('').iterdir()))
    report.html True
    learners.png staleness.png timeline.png
  """
  roots = _list_roots(workdirs)
  page = _choose_page(roots, path)
  runs = [_runs.read_run(root) for root in roots]
  labels = _labels.name_runs(runs)
  if title is None:
    title = labels[0] if len(runs) == 1 else f'{len(runs)} runs side by side'
  folder = page.with_suffix('')
  folder.mkdir(parents=True, exist_ok=True)
  parts = [
    *_tell(runs, labels),
    *_show_results(runs, labels),
    _page.make_section('Curves', _show_curves(runs, labels, folder)),
    _page.make_section(
      'Ages' if all(run.is_of_nodes for run in runs) else 'Staleness',
      _show_staleness(runs, labels, folder),
    ),
    _page.make_section('Timeline', _show_timelines(runs, labels, folder)),
    *_show_learners(runs, labels, folder),
    *_show_settings(runs, labels),
  ]
  page.write_text(_page.make_page(title, filter(None, parts)), encoding='utf-8')
  return page


def _list_roots(workdirs: _Path | Sequence[_Path]) -> list[pathlib.Path]:
  if isinstance(workdirs, (str, os.PathLike)):
    workdirs = [workdirs]
  roots = [pathlib.Path(root) for root in workdirs]
  if not roots:
    raise ValueError('workdirs must be one or more folders, got none.')
  seen = set()
  for root in roots:
    if root.resolve() in seen:
      raise ValueError(f'workdirs must be different, got {str(root)!r} twice.')
    seen.add(root.resolve())
  return roots


def _choose_page(
  roots: Sequence[pathlib.Path], path: _Path | None
) -> pathlib.Path:
  if path is None:
    if len(roots) > 1:
      raise ValueError(
        f'A report on {len(roots)} workdirs needs a path to be written to.'
      )
    return roots[0] / 'report.html'
  page = pathlib.Path(path)
  if page.suffix != '.html':
    raise ValueError(f"path must end in '.html', got {str(page)!r}.")
  return page


def _tell(runs: Sequence[_runs.Run], labels: Sequence[str]) -> list[str]:
  return [
    _page.make_paragraph(
      _words.tell_run(run),
      label if len(runs) > 1 else '',
      is_bad=run.diverged_at is not None,
    )
    for run, label in zip(runs, labels, strict=True)
  ]


def _show_results(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> list[str]:
  tables = (
    _tables.make_results(runs, labels),
    _fate_tables.make_fates(runs, labels),
  )
  return [
    _page.make_section(table.title, [_page.make_table(table)])
    for table in tables
    if table is not None
  ]


def _show_settings(
  runs: Sequence[_runs.Run], labels: Sequence[str]
) -> list[str]:
  settings = _tables.make_settings(runs, labels)
  provenance = _tables.make_provenance(runs, labels)
  parts = []
  if settings is not None:
    table = _page.make_table(settings)
    parts.append(_page.make_section(settings.title, [table]))
  if provenance is not None:
    parts.append(_page.make_details(provenance))
  return parts


def _show_curves(
  runs: Sequence[_runs.Run], labels: Sequence[str], folder: pathlib.Path
) -> list[str]:
  figure = _curves.draw_curves(runs, labels)
  caption = 'How training went, against epochs and time.'
  return _save(figure, folder / 'curves.png', caption)


def _show_staleness(
  runs: Sequence[_runs.Run], labels: Sequence[str], folder: pathlib.Path
) -> list[str]:
  parts = []
  caption = 'How many updates old the weights of gradients were.'
  server_runs = [
    (run.trace, run.prediction, label)
    for run, label in zip(runs, labels, strict=True)
    if isinstance(run.trace, traces.Trace) and run.trace.num_gradients
  ]
  if len(server_runs) == 1:
    trace, prediction, _ = server_runs[0]
    predicted = prediction.traces if prediction else ()
    caption += ' The line is what was predicted.' if predicted else ''
    _pictures.plot_staleness(trace, folder / 'staleness.png', predicted)
  elif server_runs:
    labelled = [(trace, label) for trace, _, label in server_runs]
    _histograms.plot_histograms(labelled, folder / 'staleness.png')
  if server_runs:
    parts += [_embed(folder / 'staleness.png', caption)]
  for run, label in zip(runs, labels, strict=True):
    parts += _show_prediction(run, label, len(runs))
  for number, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
    has_ages = run.node_summary and len(run.node_summary.age.values)
    if isinstance(run.trace, traces.NodeTrace) and has_ages:
      path = folder / _name('ages', number, len(runs))
      _node_pictures.plot_ages(run.trace, path)
      caption = 'How old what nodes mixed in was, and how far behind.'
      parts.append(_embed(path, _add_label(caption, label, len(runs))))
  return parts


def _show_prediction(run: _runs.Run, label: str, num_runs: int) -> list[str]:
  """A real run beside what the simulator says about it."""
  words = _words.tell_prediction(run)
  title = 'Measured and predicted' + (f': {label}' if num_runs > 1 else '')
  table = _prediction_tables.make_prediction(run, title)
  parts = [_page.make_paragraph(words, label if num_runs > 1 else '')]
  if table is not None:
    parts.append(_page.make_section(table.title, [_page.make_table(table)]))
  return parts if words else []


def _show_timelines(
  runs: Sequence[_runs.Run], labels: Sequence[str], folder: pathlib.Path
) -> list[str]:
  parts = []
  for number, (run, label) in enumerate(zip(runs, labels, strict=True), 1):
    path = folder / _name('timeline', number, len(runs))
    if isinstance(run.trace, traces.NodeTrace) and len(run.trace):
      _node_pictures.plot_node_timeline(run.trace, path)
      when = 'once all had compiled' if run.is_real else 'at the start'
      caption = f'Who computed and who waited for mixes, {when}.'
    elif isinstance(run.trace, traces.Trace) and run.trace.num_gradients:
      _pictures.plot_timeline(run.trace, path)
      when = 'once all had compiled' if run.is_real else 'at the start'
      caption = (
        f'Who computed, communicated and waited, {when}; a line is an update.'
      )
    else:
      continue
    parts.append(_embed(path, _add_label(caption, label, len(runs))))
    if isinstance(run.trace, traces.Trace) and run.is_real:
      path = folder / _name('members', number, len(runs))
      _member_pictures.plot_members(run.trace, path)
      caption = 'Who was there, who came and went, over the whole run.'
      parts.append(_embed(path, _add_label(caption, label, len(runs))))
  return parts


def _show_learners(
  runs: Sequence[_runs.Run], labels: Sequence[str], folder: pathlib.Path
) -> list[str]:
  figure = _shares.draw_learners(runs, labels)
  caption = (
    "Each one's share of the work (dashed: equal shares), and what it spent "
    'its time on.'
  )
  parts = _save(figure, folder / 'learners.png', caption)
  parts += _show_rates(runs, labels, folder)
  details = []
  for run, label in zip(runs, labels, strict=True):
    noun = 'nodes' if run.node_summary else 'learners'
    title = f'Table of {noun}' + (f': {label}' if len(runs) > 1 else '')
    table = _tables.make_learners(run, title)
    if table is not None:
      details.append(_page.make_details(table))
  is_server = any(run.summary is not None for run in runs)
  heading = 'Learners' if is_server else 'Nodes'
  return [_page.make_section(heading, parts), *details]


def _show_rates(
  runs: Sequence[_runs.Run], labels: Sequence[str], folder: pathlib.Path
) -> list[str]:
  """How fast nodes stepped, and what they sent."""
  parts = _save(
    _node_rates.draw_rates(runs, labels),
    folder / 'rates.png',
    'Steps per second of each node, from its first step to its last.',
  )
  tables = (
    _node_rates.make_rates(runs, labels),
    _node_traffic.make_traffic(runs, labels),
  )
  return parts + [
    _page.make_section(table.title, [_page.make_table(table)])
    for table in tables
    if table is not None
  ]


def _save(
  figure: mpl_figure.Figure | None, path: pathlib.Path, caption: str
) -> list[str]:
  """Writes a picture, if there is one, and gives the part of the page."""
  if figure is None:
    return []
  figure.savefig(path, dpi=120)
  return [_embed(path, caption)]


def _embed(path: pathlib.Path, caption: str) -> str:
  return _page.make_figure(_page.Picture(path, caption))


def _name(what: str, number: int, num_runs: int) -> str:
  return f'{what}.png' if num_runs == 1 else f'{what}-{number}.png'


def _add_label(caption: str, label: str, num_runs: int) -> str:
  return caption if num_runs == 1 else f'{label}: {caption}'
