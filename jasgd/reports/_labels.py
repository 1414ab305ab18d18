"""What to call runs that are shown side by side."""

from collections.abc import Sequence
import json
import os
from typing import Any

from jasgd.reports import _formats
from jasgd.reports import _runs

# As much as there is room for in a label.
_MAX_SETTINGS = 3
_MAX_LETTERS = 24


def name_runs(runs: Sequence[_runs.Run]) -> list[str]:
  """A label for each run: what is different in its config, or its folder."""
  if len(runs) == 1:
    return name_folders(runs)
  keys = find_differences([run.config for run in runs])
  if 0 < len(keys) <= _MAX_SETTINGS:
    labels = [
      ', '.join(
        f'{key}={_formats.format_value(run.config[key], _MAX_LETTERS)}'
        for key in keys
        if key in run.config
      )
      for run in runs
    ]
    if len({*labels}) == len(labels) and all(labels):
      return labels
  return name_folders(runs)


def name_folders(runs: Sequence[_runs.Run]) -> list[str]:
  """The folders of the runs, from where their paths part."""
  roots = [run.root.resolve() for run in runs]
  common = os.path.commonpath([root.parent for root in roots])
  return [root.relative_to(common).as_posix() for root in roots]


def find_differences(trees: Sequence[dict[str, Any]]) -> list[str]:
  """The keys whose values are not the same everywhere."""
  keys = dict.fromkeys(key for tree in trees for key in tree)
  return [key for key in keys if len({_say(tree, key) for tree in trees}) > 1]


def _say(tree: dict[str, Any], key: str) -> str:
  """A value as JSON, in which 1 and True are two things; '' for none."""
  return json.dumps(tree[key], default=str) if key in tree else ''
