"""`write_report`: one page for one run, or for several side by side."""

from collections.abc import Sequence
import os
import pathlib

from matplotlib import figure as mpl_figure

from jasgd.reports import _curves
from jasgd.reports import _formats
from jasgd.reports import _members
from jasgd.reports import _page
from jasgd.reports import _predictions
from jasgd.reports import _results
from jasgd.reports import _runs
from jasgd.reports import _staleness
from jasgd.reports import _timeline
from jasgd.reports import _words
from jasgd.reports import _workers

_Path = str | os.PathLike[str]


def write_report(
  workdirs: _Path | Sequence[_Path],
  path: _Path | None = None,
  title: str | None = None,
) -> pathlib.Path:
  """Writes a page on the course and the end of runs.

  The page is one file of HTML with everything in it. The pictures are also
  written as PNGs, into a folder with the page's name without its suffix. A run
  that is not finished, or has lost files, gets a report of the existing files.

  Args:
    workdirs: The folder of a run, or those of several to compare.
    path: The page to write, which ends in '.html'; None: `report.html` in the
      workdir, if there is only one.
    title: Heading of the page; None: the name of the folder, or the number of
      runs.

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
    ...     protocols.softsync(2), num_workers=4, num_gradients=100)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   trace.save(pathlib.Path(folder, 'trace'))
    ...   page = reports.write_report(folder)
    ...   print(page.name, '50 updates' in page.read_text())
    ...   print(*sorted(file.name for file in page.with_suffix('').iterdir()))
    report.html True
    rates.png staleness.png timeline.png workers.png
  """
  roots = _list_roots(workdirs)
  page = _choose_page(roots, path)
  runs = _runs.read_runs(roots)
  if title is None:
    title = f'{len(runs)} runs side by side' if len(runs) > 1 else runs[0].label
  report = _Report(runs, page.with_suffix(''))
  page.write_text(_page.make_page(title, report.make_parts()), encoding='utf-8')
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


class _Report:
  """The parts of a page on some runs.

  Args:
    runs: The runs.
    folder: Folder for the pictures; made if it is not there.
  """

  def __init__(self, runs: Sequence[_runs.Run], folder: pathlib.Path) -> None:
    self._runs = runs
    self._folder = folder
    folder.mkdir(parents=True, exist_ok=True)

  def make_parts(self) -> list[str]:
    """The parts of the page in their order, as HTML."""
    runs = self._runs
    has_server = [run.has_server for run in runs]
    workers = f'{_members.name_worker(*has_server).capitalize()}s'
    parts = [
      *map(self._tell, runs),
      *self._list_tables(_results.make_results(runs)),
      *self._list_tables(_results.make_fates(runs)),
      _page.make_section('Curves', self._show_curves()),
      _page.make_section(
        'Staleness' if any(has_server) else 'Ages', self._show_ages()
      ),
      _page.make_section('Timeline', self._show_timelines()),
      _page.make_section(workers, self._show_workers()),
      *self._show_details(),
      *self._list_tables(_results.make_settings(runs)),
    ]
    provenance = _results.make_provenance(runs)
    if provenance is not None:
      parts.append(_page.make_details(provenance))
    return [part for part in parts if part]

  def _tell(self, run: _runs.Run) -> str:
    is_bad = run.diverged_at is not None
    return _page.make_paragraph(
      _words.tell_run(run), self._get_label(run), is_bad=is_bad
    )

  def _show_curves(self) -> list[str]:
    caption = 'Metrics of the training, against epochs and time.'
    return self._save(_curves.draw_curves(self._runs), 'curves', caption)

  def _show_ages(self) -> list[str]:
    """Staleness of gradients with its prediction, and ages of mixes."""
    parts = []
    known = [run for run in self._runs if run.trace and run.trace.num_gradients]
    server_runs = [run for run in known if run.has_server]
    caption = 'Age, in updates, of the weights that gradients were computed on.'
    if len(server_runs) == 1 and server_runs[0].trace:
      prediction = server_runs[0].prediction
      predicted = prediction.traces if prediction else ()
      caption += ' The line is the prediction.' if predicted else ''
      figure = _staleness.plot_staleness(
        server_runs[0].trace, predicted=predicted
      )
      parts += self._save(figure, 'staleness', caption)
    elif server_runs:
      figure = _staleness.draw_several(
        [
          (run.trace, _formats.escape_math(run.label))
          for run in server_runs
          if run.trace
        ]
      )
      parts += self._save(figure, 'staleness', caption)
    for run in self._runs:
      parts += self._show_prediction(run)
    for run in known:
      if run.trace and run.summary and run.summary.age.count:
        figure = _staleness.plot_ages(run.trace)
        caption = 'Ages of the weights that nodes mixed in, and their lags.'
        parts += self._save(figure, 'ages', caption, run)
    return parts

  def _show_prediction(self, run: _runs.Run) -> list[str]:
    """A real run beside the simulator's prediction."""
    label = self._get_label(run)
    if run.prediction is None or run.summary is None:
      problem = run.prediction_problem
      words = f'There is no prediction: {problem}'
      return [_page.make_paragraph(words, label)] if problem else []
    words = _predictions.tell_prediction(
      run.prediction, run.summary.staleness.mean
    )
    title = self._add_label('Measured and predicted', run)
    table = _predictions.make_table(run.prediction, title)
    return [_page.make_paragraph(words, label), *self._list_tables(table)]

  def _show_timelines(self) -> list[str]:
    parts = []
    for run in self._runs:
      if not run.trace or not run.trace.num_gradients:
        continue
      when = 'once all had compiled' if run.is_real else 'at the start'
      activities, mark = (
        ('computed, communicated and waited', 'a line is an update')
        if run.has_server
        else ('computed and waited for mixes', 'a dot is a mix')
      )
      parts += self._save(
        _timeline.plot_timeline(run.trace),
        'timeline',
        f'When each {run.worker} {activities}, {when}; {mark}.',
        run,
      )
      if run.is_real:
        parts += self._save(
          _members.plot_members(run.trace),
          'members',
          f'When each {run.worker} was present, over the whole run.',
          run,
        )
    return parts

  def _show_workers(self) -> list[str]:
    runs = self._runs
    return [
      *self._save(
        _workers.draw_workers(runs),
        'workers',
        "Each worker's share of the work (dashed: equal shares), and the use "
        'of its time.',
      ),
      *self._save(
        _workers.draw_rates(runs),
        'rates',
        'Gradients per second of each worker, from its first to its last.',
      ),
      *self._list_tables(_workers.make_rates(runs)),
      *self._list_tables(_workers.make_traffic(runs)),
    ]

  def _show_details(self) -> list[str]:
    """The tables of workers, folded."""
    tables = [
      _workers.make_workers(
        run, self._add_label(f'Table of {run.worker}s', run)
      )
      for run in self._runs
    ]
    return [_page.make_details(table) for table in tables if table is not None]

  def _list_tables(self, table: _formats.Table | None) -> list[str]:
    """A section with a table, if there is one."""
    if table is None:
      return []
    return [_page.make_section(table.title, [_page.make_table(table)])]

  def _save(
    self,
    figure: mpl_figure.Figure | None,
    name: str,
    caption: str,
    run: _runs.Run | None = None,
  ) -> list[str]:
    """Writes a picture, of one run or of all, and makes its part of a page."""
    if figure is None:
      return []
    if run is not None and len(self._runs) > 1:
      name = f'{name}-{self._runs.index(run) + 1}'
      caption = f'{run.label}: {caption}'
    path = self._folder / f'{name}.png'
    figure.savefig(path, dpi=120)
    return [_page.make_figure(path, caption)]

  def _get_label(self, run: _runs.Run) -> str:
    return run.label if len(self._runs) > 1 else ''

  def _add_label(self, text: str, run: _runs.Run) -> str:
    return f'{text}: {run.label}' if len(self._runs) > 1 else text
