"""The outcome of a training run, and the file that holds it."""

import dataclasses
import functools
import os
from typing import Any

from jasgd import traces
from jasgd import workdir as workdirs


class RunError(RuntimeError):
  """A run that cannot go on; the text names the reason and the cure."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """Outcome of a training run. Weights and trace are read when first used.

  Attributes:
    workdir: Folder of the run.
    clock: Updates of the server, or steps of all nodes together.
    metrics: The last metrics: `train/loss`, `test/accuracy`, ...
    end_reason: Reason for the end, as a sentence.
    lost: Names of the processes that were lost on the way, such as 'node-2'.
    is_diverged: Whether a loss or a weight was not finite.
    is_interrupted: Whether the run was stopped, and can go on.
    is_failed: Whether the run ended because of an error, and can go on.
  """

  workdir: str = dataclasses.field(compare=False)
  clock: int
  metrics: dict[str, float]
  end_reason: str = ''
  lost: list[str] = dataclasses.field(default_factory=list)
  is_diverged: bool = False
  is_interrupted: bool = False
  is_failed: bool = False

  @functools.cached_property
  def weights(self) -> tuple[Any, Any]:
    """(params, stats) of the last checkpoint; of nodes, their mean."""
    return workdirs.load_weights(self.workdir)

  @property
  def params(self) -> Any:
    """The trained weights; of nodes, their mean."""
    return self.weights[0]

  @property
  def stats(self) -> Any:
    """Statistics of the model that are not trained; of nodes, their mean."""
    return self.weights[1]

  @functools.cached_property
  def trace(self) -> traces.Trace:
    """The trace, for `jasgd.replay` and `jasgd.traces.summarize`."""
    return load_trace(workdirs.Workdir(self.workdir))

  def write(self) -> 'Result':
    """Writes result.json, unless the run can go on."""
    if not self.is_interrupted:
      fields = dataclasses.asdict(self)
      del fields['workdir']
      workdirs.write_json(workdirs.Workdir(self.workdir).result, fields)
    return self


def read_result(folder: workdirs.Workdir) -> Result | None:
  """The result of a run that is over; None if it is not."""
  if not folder.result.exists():
    return None
  fields = workdirs.read_json(folder.result)
  return Result(workdir=os.fspath(folder), **fields)


def load_trace(folder: workdirs.Workdir) -> traces.Trace:
  """The trace in a workdir: one file, or a folder of real nodes."""
  return traces.Trace.load(folder.trace, allow_truncated=True)
