"""What is trained in the suite `training`, on either side.

Both workers import this, so that it needs nothing but numpy.
"""

from typing import NamedTuple

import numpy as np

NUM_EXAMPLES = 8192
NUM_CLASSES = 10
# Small: with a delay of 256 every network is to stay finite.
RATE = 1e-4
MOMENTUM = 0.9

# Ways of plain SGD that only our side has: one compiled loop, and a compiled
# step that is called again and again.
SCAN = 'scan'
STEPS = 'steps'
# A trace of learners that do not wait for each other.
ASYNC = 'async'
NUM_ASYNC_LEARNERS = 128


class Model(NamedTuple):
  """A network, and how long it is to run before the other side's turn."""

  shape: tuple[int, int, int]  # Height, width and channels of an image.
  images_per_turn: int


MODELS = {
  'lenet': Model((28, 28, 1), 4096),
  'a1': Model((32, 32, 3), 512),
  'resnet20': Model((32, 32, 3), 256),
}


class Case(NamedTuple):
  """One thing to measure: a line, `lenet 64 32`, to a worker."""

  model: str
  batch: int
  way: str  # A constant delay, such as '32', or SCAN, STEPS or ASYNC.

  @property
  def line(self) -> str:
    """What a worker is told."""
    return f'{self.model} {self.batch} {self.way}'

  @property
  def num_steps(self) -> int:
    """Steps per turn; at least 2, so that a loop is a loop."""
    return max(2, MODELS[self.model].images_per_turn // self.batch)

  @property
  def num_images(self) -> int:
    """Images per turn."""
    return self.num_steps * self.batch


def parse_case(line: str) -> Case:
  """The case that a line asks for.

  Args:
    line: A model, a batch and a way, such as `lenet 64 32`.

  Returns:
    The case.

  Raises:
    ValueError: if the line is not of that form, or names nothing known.
  """
  words = line.split()
  if len(words) != 3 or not words[1].isdecimal() or not int(words[1]):
    raise ValueError(f'A case is "model batch way", got {line!r}.')
  case = Case(words[0], int(words[1]), words[2])
  if case.model not in MODELS:
    raise ValueError(f'model must be one of {[*MODELS]}, got {case.model!r}.')
  if not case.way.isdecimal() and case.way not in (SCAN, STEPS, ASYNC):
    raise ValueError(
      f'way must be a delay, {SCAN}, {STEPS} or {ASYNC}, got {case.way!r}.'
    )
  return case


def make_examples(model: str) -> dict[str, np.ndarray]:
  """Random images, as bytes [n, height, width, channels], and their labels."""
  rng = np.random.default_rng(0)
  shape = (NUM_EXAMPLES, *MODELS[model].shape)
  return {
    'image': rng.integers(0, 256, shape, np.uint8),
    'label': rng.integers(0, NUM_CLASSES, NUM_EXAMPLES, np.int32),
  }
