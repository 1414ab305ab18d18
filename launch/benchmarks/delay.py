"""What a delay costs per step: nothing that grows with the delay.

The step is that of a dense layer with momentum SGD, jitted and donated, by
itself and inside a scan. For each delay it runs in turns with the same step
without delay, and with a program that copies one gradient from a buffer into
another that is there already.

Columns: the time of a step; its ratio to d = 0 and to one copy; what it takes
beyond d = 0, in copies; and its ratio to the goal, which is, at every delay, at
most 1.15 x the step without delay plus two copies.
"""

from collections.abc import Callable
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jasgd
from launch.benchmarks import measuring
from launch.benchmarks import processes

DELAYS = (0, 1, 16, 64, 256)
SIZES = (60_000, 1_000_000, 10_000_000)
BATCH = 16
SCAN_STEPS = 8
OPTIMIZER = optax.sgd(0.01, momentum=0.9)

WRAPPERS = {
  'delayed(sgd, d)': lambda d: jasgd.delayed(OPTIMIZER, d),
  'chain(delay(d), sgd)': lambda d: optax.chain(jasgd.delay(d), OPTIMIZER),
}


def time_steps(
  step: Callable[..., Any],
  carry: tuple[Any, ...],
  num_steps: int,
  num_warm_up: int,
  seconds_per_turn: float,
) -> Callable[[], float]:
  """Compiles and warms up a program.

  Args:
    step: Maps the carry to the next one, by `num_steps` steps.
    carry: The first carry.
    num_steps: Steps per call.
    num_warm_up: Steps before any is timed.
    seconds_per_turn: About how long a turn takes.

  Returns:
    A function that runs one turn, and returns its seconds per step.
  """

  def advance(num_calls: int) -> float:
    nonlocal carry
    start = time.perf_counter()
    for _ in range(num_calls):
      carry = step(*carry)
    jax.block_until_ready(carry)
    return (time.perf_counter() - start) / (num_calls * num_steps)

  advance(-(-num_warm_up // num_steps))
  # The first calls after a compilation are slow; the last one counts.
  seconds = [advance(1) for _ in range(5)][-1] * num_steps
  num_calls = max(1, int(seconds_per_turn / seconds))
  return lambda: advance(num_calls)


def make_steps(
  optimizer: optax.GradientTransformation, width: int, num_steps: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Steps of a layer of width x width: the program, and its first carry."""
  # Targets that differ from 0 keep the weights from ending as denormal numbers,
  # which a processor is slow at.
  inputs, targets = jax.random.normal(jax.random.key(0), (2, BATCH, width))

  def step(carry: Any, _: None) -> tuple[Any, None]:
    params, state, inputs, targets = carry
    grads = jax.grad(lambda w: jnp.mean(jnp.square(inputs @ w - targets)))(
      params
    )
    updates, state = optimizer.update(grads, state, params)
    return (optax.apply_updates(params, updates), state, inputs, targets), None

  def steps(*carry: Any) -> tuple[Any, ...]:
    if num_steps == 1:
      return step(carry, None)[0]
    return jax.lax.scan(step, carry, length=num_steps)[0]

  params = jnp.full((width, width), 1 / width)
  carry = (params, optimizer.init(params), inputs, targets)
  return jax.jit(steps, donate_argnums=(0, 1, 2, 3)), carry


def make_copies(
  width: int, num_steps: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Copies of one gradient: the program, and its first carry."""

  def copy(buffers: Any, factor: Any) -> tuple[Any, None]:
    source, _ = buffers
    # A factor that differs each time, or XLA would copy only once.
    return (source, source * factor), None

  def copies(*buffers: jax.Array) -> tuple[jax.Array, ...]:
    if num_steps == 1:
      return copy(buffers, 2.0)[0]
    return jax.lax.scan(copy, buffers, jnp.arange(1.0, num_steps + 1))[0]

  gradient = jnp.ones((width, width))
  program = jax.jit(copies, donate_argnums=(0, 1), keep_unused=True)
  return program, (gradient, jnp.zeros_like(gradient))


def measure(
  wrapper: str, delay: int, width: int, num_steps: int, quick: bool
) -> tuple[float, float, float]:
  """The best seconds per step: without delay, with the delay, of a copy."""
  make_optimizer = WRAPPERS[wrapper]
  # After `delay` + 1 steps every slot was used, and the optimizer steps.
  programs = {
    'plain': (*make_steps(make_optimizer(0), width, num_steps), num_steps, 1),
    'late': (
      *make_steps(make_optimizer(delay), width, num_steps),
      num_steps,
      delay + 1,
    ),
    'copy': (*make_copies(width, num_steps), num_steps, 1),
  }
  seconds_per_turn = 0.01 if quick else 0.1
  turns = {
    name: time_steps(*program, seconds_per_turn)
    for name, program in programs.items()
  }
  results = measuring.run_in_turns(turns, 2 if quick else 7)
  return min(results['plain']), min(results['late']), min(results['copy'])


def get_free_bytes() -> int:
  """Memory that processes of this host can still take."""
  with open('/proc/meminfo') as file:
    fields = dict(line.split(':') for line in file)
  return 1024 * int(fields['MemAvailable'].split()[0])


def run(quick: bool) -> None:
  """Prints a table for each size."""
  print(__doc__)
  processes.pin(1)  # How threads share two cores would blur the ratios.
  print(f'jax {jax.__version__} on {jax.devices()[0].device_kind}')
  for size in SIZES[:1] if quick else SIZES:
    width = math.isqrt(size)
    print(f'\n{width * width:,} parameters')
    print(
      f'{"optimizer":21} {"way":5} {"d":>5} {"us / step":>10} {"x d=0":>6} '
      f'{"x copy":>7} {"extra":>7} {"x goal":>7}'
    )
    for wrapper in WRAPPERS:
      for way, num_steps in (('step', 1), ('scan', SCAN_STEPS)):
        for delay in DELAYS[1:2] if quick else DELAYS:
          cells = f'{wrapper:21} {way:5} {delay:5d}'
          num_bytes = 4 * width * width * (delay + 10)
          if num_bytes > get_free_bytes() / 2:
            print(f'{cells} needs {num_bytes:,} bytes')
            continue
          plain, late, copy = measure(wrapper, delay, width, num_steps, quick)
          print(
            f'{cells} {1e6 * late:10.1f} {late / plain:6.2f} '
            f'{late / copy:7.1f} {(late - plain) / copy:7.2f} '
            f'{late / (1.15 * plain + 2 * copy):7.2f}',
            flush=True,
          )
