"""Tasks: a model, its loss, its data, and the minibatch of every step.

`make_task` builds one of `TASKS` by name. `from_linen`, `from_nnx` and
`from_functions` make a task of your own model and examples; `stream` reads the
examples of a task from a source that does not fit in memory. You can also fill
in the fields of a `Task` yourself.

Samples and augmentation are functions of (seed, learner, step): `draw_samples`
computes the shuffles, and `fold_key` the key of every other random draw. Flax,
scikit-learn, grain and tensorflow-datasets are imported by the functions that
need them.

Names that are imported here and are not in `__all__` are for other rooms and
for the command line, and not promised to users.
"""

from jasgd.tasks._augmentation import augment_images as augment_images
from jasgd.tasks._augmentation import AUGMENTATIONS as AUGMENTATIONS
from jasgd.tasks._convex import find_optimum
from jasgd.tasks._datasets import MissingDataError
from jasgd.tasks._evaluation import evaluate
from jasgd.tasks._evaluation import evaluate_all as evaluate_all
from jasgd.tasks._functions import from_functions
from jasgd.tasks._functions import measure_classifier
from jasgd.tasks._modules import from_linen
from jasgd.tasks._modules import from_nnx
from jasgd.tasks._names import make_task
from jasgd.tasks._names import TASKS
from jasgd.tasks._shards import draw_dirichlet_shards as draw_dirichlet_shards
from jasgd.tasks._shards import SHARDS as SHARDS
from jasgd.tasks._shuffles import draw_samples
from jasgd.tasks._streams import stream
from jasgd.tasks._task import choose_chunk as choose_chunk
from jasgd.tasks._task import fold_key
from jasgd.tasks._task import Task

__all__ = [
  'TASKS',
  'MissingDataError',
  'Task',
  'draw_samples',
  'evaluate',
  'find_optimum',
  'fold_key',
  'from_functions',
  'from_linen',
  'from_nnx',
  'make_task',
  'measure_classifier',
  'stream',
]
