"""Writes a page of HTML on a run, or on several side by side.

  python -m launch.report --workdir=/tmp/a
  python -m launch.report --workdir=/tmp/a,/tmp/b,/tmp/c --output=compare.html

On one run it is `report.html` in its workdir, unless --output says otherwise.
The page has everything in it: curves against epochs and time, the staleness,
a timeline, what became of the gradients, what each learner did, and the
settings; of nodes without a server, how old what they mixed in was, how fast
each stepped, and what they sent. Its pictures also lie beside it as PNGs, in a
folder of its name. Runs that are not finished get a report of what is there.
"""

from absl import app
from absl import flags

from jasgd import reports
from launch import entry

_WORKDIR = flags.DEFINE_list(
  'workdir', None, 'The folder of a run, or of several: A,B,C.', required=True
)
_OUTPUT = flags.DEFINE_string(
  'output',
  None,
  'The page to write, .html; needed if there are several workdirs.',
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
