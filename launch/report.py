"""Writes a page of HTML on a run, or on several side by side.

  python -m launch.report --workdir=/tmp/a
  python -m launch.report --workdir=/tmp/a,/tmp/b,/tmp/c --output=compare.html

The page of one run is `report.html` in its workdir, unless --output names
another file. It shows curves against epochs and time, staleness, a timeline,
the fates of gradients, the work of each learner, and the settings; without a
server, the ages of mixed weights, the rate of each node, and the traffic. The
pictures also lie beside the page as PNG files, in a folder of the same name. A
run that is not finished gets a report of the files that are there.
"""

from absl import app
from absl import flags

from jasgd import reports
from launch import entry

_WORKDIR = flags.DEFINE_list(
  'workdir', None, 'Folder of a run, or of several runs: A,B,C.', required=True
)
_OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'Page to write, .html; needed if there are several workdirs.',
)


def main() -> None:
  """Reads the workdirs, and writes the page."""
  if len(_WORKDIR.value) > 1 and not _OUTPUT.value:
    raise app.UsageError(
      f'--output is needed for {len(_WORKDIR.value)} workdirs: the page that '
      'shows them side by side, .html.'
    )
  try:
    page = reports.write_report(_WORKDIR.value, _OUTPUT.value)
  except (OSError, ValueError) as error:
    raise app.UsageError(str(error)) from None
  print(f'Wrote {page} and its pictures into {page.with_suffix("")}')


if __name__ == '__main__':
  entry.run(main)
