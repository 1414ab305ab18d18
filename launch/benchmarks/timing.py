"""Timing programs in turns, so that all of them meet the same machine."""

from collections.abc import Callable
import time
from typing import Any

import jax


class Program:
  """A donated step and what it carries, to be called again and again."""

  def __init__(
    self,
    step: Callable[..., Any],
    carry: tuple[Any, ...],
    num_steps: int,
    num_warm_up: int = 1,
  ) -> None:
    """Prepares a program.

    Args:
      step: Maps the carry to the next one, by `num_steps` steps.
      carry: Where it starts.
      num_steps: Steps per call.
      num_warm_up: Steps to do before any is timed.
    """
    self._step = step
    self._carry = carry
    self._num_steps = num_steps
    self._num_warm_up = num_warm_up
    self.best_seconds = float('inf')  # Per step.

  def warm_up(self, seconds_per_turn: float) -> int:
    """Compiles and warms up; gives the steps that fit into a turn."""
    self.advance(self._num_warm_up)
    for _ in range(5):  # The first calls after a compilation are slow.
      self.best_seconds = float('inf')
      self.advance(1)
    return max(1, int(seconds_per_turn / self.best_seconds))

  def advance(self, num_steps: int) -> None:
    """Does `num_steps` steps, rounded up to whole calls, and times them."""
    num_calls = -(-num_steps // self._num_steps)
    start = time.perf_counter()
    for _ in range(num_calls):
      self._carry = self._step(*self._carry)
    jax.block_until_ready(self._carry)
    seconds = time.perf_counter() - start
    per_step = seconds / (num_calls * self._num_steps)
    self.best_seconds = min(self.best_seconds, per_step)


def measure_in_turns(
  programs: dict[str, Program],
  num_rounds: int,
  seconds_per_turn: float,
) -> dict[str, float]:
  """The best seconds per step of each program, over rounds of one turn each."""
  num_steps = {
    name: program.warm_up(seconds_per_turn)
    for name, program in programs.items()
  }
  for _ in range(num_rounds):
    for name, program in programs.items():
      program.advance(num_steps[name])
  return {name: program.best_seconds for name, program in programs.items()}
