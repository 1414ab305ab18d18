"""What a delay costs per step: nothing that grows with the delay.

The step is that of a dense layer with momentum SGD, jitted and donated, by
itself and inside a scan. For each delay it runs in turns with the same step
without delay, and with a program that streams one gradient from a buffer into
another that is there already.

Columns: the time of a step; its ratio to d = 0 and to one copy; what it takes
beyond d = 0, in copies; and its ratio to the goal, which is, at every delay, at
most 1.15 x the step without delay plus two copies.
"""

from collections.abc import Callable
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jasgd
from launch.benchmarks import timing

DELAYS = (0, 1, 16, 64, 256)
SIZES = (60_000, 1_000_000, 10_000_000)
BATCH = 16
SCAN_STEPS = 8
OPTIMIZER = optax.sgd(0.01, momentum=0.9)

WRAPPERS = {
  'delayed(sgd, d)': lambda d: jasgd.delayed(OPTIMIZER, d),
  'chain(delay(d), sgd)': lambda d: optax.chain(jasgd.delay(d), OPTIMIZER),
}


def make_program(
  make_optimizer: Callable[[int], optax.GradientTransformation],
  delay: int,
  width: int,
  num_steps: int,
) -> timing.Program:
  """The step of a layer of width x width, ready to be timed."""
  optimizer = make_optimizer(delay)
  # Targets that differ from 0 keep the weights from ending as denormal numbers,
  # which a processor is slow at.
  inputs, targets = jax.random.normal(jax.random.key(0), (2, BATCH, width))

  def step(
    params: jax.Array, state: Any, inputs: jax.Array, targets: jax.Array
  ) -> tuple[Any, ...]:
    grads = jax.grad(lambda w: jnp.mean(jnp.square(inputs @ w - targets)))(
      params
    )
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, inputs, targets

  def steps(*carry: Any) -> tuple[Any, ...]:
    if num_steps == 1:
      return step(*carry)
    return jax.lax.scan(
      lambda carry, _: (step(*carry), None), carry, length=num_steps
    )[0]

  params = jnp.full((width, width), 1 / width)
  return timing.Program(
    jax.jit(steps, donate_argnums=(0, 1, 2, 3)),
    (params, optimizer.init(params), inputs, targets),
    num_steps,
    num_warm_up=delay + 1,  # Then every slot was used, and the optimizer steps.
  )


def make_copy(width: int, num_steps: int) -> timing.Program:
  """Streams one gradient from a buffer into another that is there already."""

  def copy(buffers: Any, i: Any) -> tuple[Any, None]:
    source, _ = buffers
    # A factor that differs each time, or XLA would copy once and for all.
    return (source, source * i), None

  def copies(*buffers: jax.Array) -> tuple[jax.Array, ...]:
    if num_steps == 1:
      return copy(buffers, 2.0)[0]
    return jax.lax.scan(copy, buffers, jnp.arange(1.0, num_steps + 1))[0]

  gradient = jnp.ones((width, width))
  return timing.Program(
    jax.jit(copies, donate_argnums=(0, 1), keep_unused=True),
    (gradient, jnp.zeros_like(gradient)),
    num_steps,
  )


def free_bytes() -> float:
  """Memory that is free on this host; infinite where it does not tell."""
  try:
    with open('/proc/meminfo') as file:
      fields = dict(line.split(':') for line in file)
    return 1024.0 * int(fields['MemAvailable'].split()[0])
  except (OSError, KeyError):
    return math.inf


def print_row(
  wrapper: str, way: str, delay: int, times: dict[str, float]
) -> None:
  """A line of the table."""
  plain, late, copy = (times[key] for key in ('plain', 'late', 'copy'))
  limit = 1.15 * plain + 2 * copy
  print(
    f'{wrapper:21} {way:5} {delay:5d} {1e6 * late:10.1f} {late / plain:6.2f} '
    f'{late / copy:7.1f} {(late - plain) / copy:7.2f} {late / limit:7.2f}',
    flush=True,
  )


def run(quick: bool) -> None:
  """Prints a table for each size."""
  print(__doc__)
  if hasattr(os, 'sched_setaffinity'):
    # One core: how threads share two would blur the ratios.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  print(f'jax {jax.__version__} on {jax.devices()[0].device_kind}')
  for size in SIZES[:1] if quick else SIZES:
    width = math.isqrt(size)
    print(f'\n{width * width:,} parameters')
    print(
      f'{"optimizer":21} {"way":5} {"d":>5} {"us / step":>10} {"x d=0":>6} '
      f'{"x copy":>7} {"extra":>7} {"x goal":>7}'
    )
    for wrapper, make_optimizer in WRAPPERS.items():
      for way, num_steps in (('step', 1), ('scan', SCAN_STEPS)):
        for delay in DELAYS[:3] if quick else DELAYS:
          num_bytes = 4 * width * width * (delay + 10)
          if num_bytes > free_bytes() / 2:
            print(f'{wrapper:21} {way:5} {delay:5d} needs {num_bytes:,} bytes')
            continue
          times = timing.measure_in_turns(
            {
              'plain': make_program(make_optimizer, 0, width, num_steps),
              'late': make_program(make_optimizer, delay, width, num_steps),
              'copy': make_copy(width, num_steps),
            },
            num_rounds=2 if quick else 7,
            seconds_per_turn=0.01 if quick else 0.1,
          )
          print_row(wrapper, way, delay, times)
