"""What is learned? Models, losses, and which samples a learner sees when.

`make_task` builds one of `TASKS` by name; `from_linen`, `from_nnx` and
`from_functions` make a task of your own model and examples, `stream` one whose
examples do not fit in memory; and whatever has the fields of a `Task` is one.

Samples and augmentation are functions of (seed, learner, step): see
`draw_samples` for the shuffles and `fold_key` for everything else that is
random. Flax, scikit-learn, grain and tensorflow-datasets are loaded by what
needs them.
"""

from jasgd.tasks._augmentation import augment_images
from jasgd.tasks._augmentation import AUGMENTATIONS
from jasgd.tasks._convex import find_optimum
from jasgd.tasks._datasets import MissingDataError
from jasgd.tasks._evaluation import evaluate
from jasgd.tasks._evaluation import evaluate_all
from jasgd.tasks._functions import from_functions
from jasgd.tasks._functions import measure_classifier
from jasgd.tasks._modules import from_linen
from jasgd.tasks._modules import from_nnx
from jasgd.tasks._names import make_task
from jasgd.tasks._names import TASKS
from jasgd.tasks._shards import draw_dirichlet_shards
from jasgd.tasks._shards import SHARDS
from jasgd.tasks._shuffles import draw_samples
from jasgd.tasks._streams import stream
from jasgd.tasks._task import choose_chunk
from jasgd.tasks._task import fold_key
from jasgd.tasks._task import Task

__all__ = [
  'AUGMENTATIONS',
  'SHARDS',
  'TASKS',
  'MissingDataError',
  'Task',
  'augment_images',
  'choose_chunk',
  'draw_dirichlet_shards',
  'draw_samples',
  'evaluate',
  'evaluate_all',
  'find_optimum',
  'fold_key',
  'from_functions',
  'from_linen',
  'from_nnx',
  'make_task',
  'measure_classifier',
  'stream',
]
