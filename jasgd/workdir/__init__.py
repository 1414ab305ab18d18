"""Files of a run: checkpoints, metrics, progress, provenance.

`Workdir` has the paths. `open_workdir` creates the folder of a run, or opens it
again with the same config. `load_params` and `read_metrics` read the results of
a run.

Names that are imported here and are not in `__all__` are for other rooms and
for the command line, and not promised to users.
"""

from jasgd.workdir._checkpoints import list_checkpoints
from jasgd.workdir._checkpoints import load_params
from jasgd.workdir._checkpoints import load_weights
from jasgd.workdir._checkpoints import read_position as read_position
from jasgd.workdir._checkpoints import restore_checkpoint
from jasgd.workdir._checkpoints import save_checkpoint
from jasgd.workdir._checkpoints import set_aside_broken as set_aside_broken
from jasgd.workdir._files import read_json as read_json
from jasgd.workdir._files import WorkdirError
from jasgd.workdir._files import write_json as write_json
from jasgd.workdir._locks import hold_workdir as hold_workdir
from jasgd.workdir._locks import is_held as is_held
from jasgd.workdir._locks import lock_file as lock_file
from jasgd.workdir._metrics import (
  find_metrics_position as find_metrics_position,
)
from jasgd.workdir._metrics import MetricsWriter
from jasgd.workdir._metrics import read_metrics
from jasgd.workdir._paths import open_workdir as open_workdir
from jasgd.workdir._paths import Workdir
from jasgd.workdir._progress import Progress
from jasgd.workdir._provenance import describe_run as describe_run

__all__ = [
  'MetricsWriter',
  'Progress',
  'Workdir',
  'WorkdirError',
  'list_checkpoints',
  'load_params',
  'load_weights',
  'read_metrics',
  'restore_checkpoint',
  'save_checkpoint',
]
