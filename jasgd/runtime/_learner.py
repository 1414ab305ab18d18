"""A learner: computes gradients on the server's weights until the run is over.

It has no state. A gradient depends on the weights, on the seed of the
run, and on the learner's number and step, so that replay can compute it again.
"""

from concurrent import futures
import json
import logging
import os
import random
import secrets
import threading
import time
from typing import Any

import jax
import numpy as np

from jasgd import engine
from jasgd import tasks
from jasgd import workdir as workdirs
from jasgd.runtime import _crash
from jasgd.runtime import _processes
from jasgd.runtime import _settings
from jasgd.runtime.wires import _addresses
from jasgd.runtime.wires import _messages
from jasgd.runtime.wires import _security
from jasgd.runtime.wires import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb
_Flag = _messages.Flag

# Seconds between two tries to reach a server.
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 2.0


class Learner:
  """Computes gradients, and exchanges them for weights.

  Args:
    task: Task to learn.
    connect: Function that connects to the server, from `make_connect`.
    seed: Seed of the run.
    wire_dtype: Dtype that float32 is rounded to in messages.
    num_devices: Devices of this process over which a minibatch is spread; None:
      as many as divide it.
    min_seconds: Least seconds of a gradient, by the learner's number, to
      imitate slower learners; the last entry is for all further learners. ():
      no limit.
    patience: Seconds for which the learner tries to reach the server.
    stopped: Event that makes the learner leave after its gradient.
  """

  def __init__(
    self,
    task: tasks.Task,
    connect: _wire.Connect,
    *,
    seed: int = 0,
    wire_dtype: str = 'float32',
    num_devices: int | None = None,
    min_seconds: tuple[float, ...] = (),
    patience: float = 120.0,
    stopped: threading.Event | None = None,
  ) -> None:
    self._connect = connect
    self._patience = patience
    self._stopped = threading.Event() if stopped is None else stopped
    if num_devices is None:
      num_devices = engine.choose_devices(task.batch)
    self._computing = Computing(
      task,
      seed=seed,
      wire_dtype=wire_dtype,
      num_devices=num_devices,
      min_seconds=min_seconds,
    )
    self._layout = self._computing.layout
    self._hello = {
      'fingerprint': _settings.make_fingerprint(task, self._layout, seed),
      'instance': secrets.token_hex(8),
      'num_devices': num_devices,
      'pid': os.getpid(),
    }
    self._silence = _settings.Deadlines().silence
    self._learner = -1
    self._run_settings: dict[str, Any] = {}  # The server sends them.
    # The request that is not answered yet, and its gradient: a restarted server
    # may ask for it again.
    self._unanswered: tuple[_messages.Message, np.ndarray | None] | None = None
    self._connection: _wire.Connection

  def run(self) -> str:
    """Learns until the server says that the run is over.

    Returns:
      The reason that the server gives.

    Raises:
      WireError: if the server could not be reached for `patience` seconds.
      RefusedError: if the server refuses this learner.
    """
    self._computing.warm_up()
    pause = _FIRST_PAUSE
    away_since = time.monotonic()
    while True:
      try:
        self._connection = self._connect(self._layout.size)
        try:
          answer = self._say_hello()
          pause, away_since = _FIRST_PAUSE, time.monotonic()
          return self._learn(answer)
        finally:
          self._connection.close()
      except _wire.WireError as error:
        if pause == _FIRST_PAUSE:
          away_since = time.monotonic()
          _log.warning('Learner %d: %s Trying again.', self._learner, error)
        if time.monotonic() - away_since > self._patience:
          raise
        # Random, so that not all learners reconnect at once.
        self._stopped.wait(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LAST_PAUSE)
        if self._stopped.is_set():
          return 'The learner was stopped.'

  def _say_hello(self) -> _messages.Message:
    """Joins, or comes back with a gradient that was not answered."""
    try:
      answer = self._request(self._make_hello())
    except _wire.RefusedError:
      if self._learner < 0:
        raise
      # Another process has its number: it joins as a new learner.
      self._learner, self._unanswered = -1, None
      answer = self._request(self._make_hello())
    if answer.verb != _Verb.END:
      self._run_settings = json.loads(answer.text)
      self._learner = self._computing.learner = answer.worker
      self._computing.local_rate = self._run_settings['local_rate']
      self._silence = self._run_settings['silence']
    return answer

  def _make_hello(self) -> _messages.Message:
    message = _messages.Message(
      _Verb.HELLO,
      worker=self._learner,
      text=json.dumps(self._hello),
    )
    if self._unanswered is not None:
      sent = self._unanswered[0]
      message.push, message.version = sent.push, sent.version
      message.incarnation, message.seconds = sent.incarnation, sent.seconds
    return message

  def _request(
    self, message: _messages.Message, has_payload: bool = False
  ) -> _messages.Message:
    return self._connection.request(
      message,
      has_payload=has_payload,
      deadline=self._silence,
      on_wait=lambda text: _log.info('Waiting: %s', text),
    )

  # --- Learning.

  def _learn(self, answer: _messages.Message) -> str:
    """Exchanges gradients for weights until the end."""
    unanswered, self._unanswered = self._unanswered, None
    if answer.flags & _Flag.RESEND:
      assert unanswered is not None  # The server knows of it from the HELLO.
      answer = self._send_again(*unanswered)
    if answer.verb == _Verb.END:
      return answer.text
    run = self._run_settings
    if run['steps_per_push'] != run['steps_per_fetch']:
      return self._learn_apart(answer)
    if run['overlap']:
      return self._learn_overlapped(answer)
    while answer.verb != _Verb.END:
      if self._stopped.is_set():
        return self._leave()
      push, seconds = self._compute(answer, answer.push)
      message = self._make_message(push, seconds, answer, answer.push)
      answer = self._exchange(message, push)
    return answer.text

  def _compute(
    self, weights: _messages.Message, number: int
  ) -> tuple[engine.Push, float]:
    """Computes a push at some weights; gives it with the seconds it took."""
    num_steps = self._run_settings['steps_per_push']
    return self._computing.compute(weights, number * num_steps, num_steps)

  def _learn_overlapped(self, answer: _messages.Message) -> str:
    """Fetches the next weights while a gradient is computed."""
    # Seconds of the last gradient and of the last fetch.
    usual = fetch_seconds = 0.0
    with futures.ThreadPoolExecutor(1) as thread:
      weights, number = answer, answer.push
      while True:
        if self._stopped.is_set():
          return self._leave()
        # The fetch should end just before the gradient: weights that are
        # fetched earlier are staler.
        delay = max(0.0, usual - 1.5 * fetch_seconds)
        computed = threading.Event()
        fetched = thread.submit(self._fetch_later, computed, delay)
        try:
          push, usual = self._compute(weights, number)
        finally:
          computed.set()
        message = self._make_message(push, usual, weights, number)
        message.flags = _Flag.KEEPS_WEIGHTS
        try:
          following, fetch_seconds = fetched.result()
        except _wire.WireError:
          # Copied, as `outgoing` is lost with the connection: a restarted
          # server may ask for this gradient.
          gradient = np.empty(self._layout.size, np.uint8)
          self._layout.pack(push.message, gradient)
          self._unanswered = (message, gradient)
          raise
        answer = self._exchange(message, push)
        if answer.verb == _Verb.END:
          return answer.text
        # After a gradient that is not finite, the answer has weights.
        weights = answer if answer.payload is not None else following
        number = answer.push

  def _fetch_later(
    self, computed: threading.Event, delay: float
  ) -> tuple[_messages.Message, float]:
    """Fetches weights after a delay, or earlier once the gradient is computed.

    Returns:
      The weights, and the seconds that the fetch took.
    """
    computed.wait(delay)
    begin = time.perf_counter()
    answer = self._request(_messages.Message(_Verb.FETCH, worker=self._learner))
    return answer, time.perf_counter() - begin

  def _learn_apart(self, answer: _messages.Message) -> str:
    """Steps on its own replica; pushes and fetches have their own periods."""
    n_push, n_fetch = (
      self._run_settings[name] for name in ('steps_per_push', 'steps_per_fetch')
    )
    computing, functions = self._computing, self._computing.functions
    position = self._run_settings['num_computed']
    weights, number = answer, answer.push
    copy = functions.start_copy(computing.view(weights))
    since_push = since_fetch = 0
    seconds = 0.0
    while answer.verb != _Verb.END:
      if self._stopped.is_set():
        return self._leave()
      num_steps = min(n_push - since_push, n_fetch - since_fetch)
      begin = time.perf_counter()
      copy = computing.step(copy, position, num_steps, weights.rate)
      position += num_steps
      since_push += num_steps
      since_fetch += num_steps
      if since_push < n_push:
        jax.block_until_ready(copy.loss_sum)
        seconds += computing.sleep_until_min_seconds(begin, num_steps)
        answer = self._request(
          _messages.Message(_Verb.FETCH, worker=self._learner, step=position)
        )
      else:
        push, copy = functions.push_copy(copy)
        jax.block_until_ready(push.loss)
        seconds += computing.sleep_until_min_seconds(begin, num_steps)
        flags = _Flag.KEEPS_WEIGHTS if since_fetch < n_fetch else _Flag.NONE
        is_lost = not push.is_finite
        message = self._make_message(push, seconds, weights, number)
        message.flags = flags
        answer = self._exchange(message, push)
        seconds, since_push, number = 0.0, 0, number + 1
        if is_lost and answer.payload is not None:
          copy = functions.start_copy(computing.view(answer))
      if answer.payload is not None:
        weights, since_fetch = answer, 0
        copy = functions.keep_copy(copy, computing.view(weights))
    return answer.text

  def _make_message(
    self,
    push: engine.Push,
    seconds: float,
    weights: _messages.Message,
    number: int,
  ) -> _messages.Message:
    """Makes the message of a push: a NOTICE if it is not finite."""
    return _messages.Message(
      _Verb.EXCHANGE if push.is_finite else _Verb.NOTICE,
      worker=self._learner,
      incarnation=weights.incarnation,
      push=number,
      version=weights.version,
      seconds=seconds,
      loss=float(push.loss),
    )

  def _exchange(
    self, message: _messages.Message, push: engine.Push
  ) -> _messages.Message:
    """Sends a gradient, or a NOTICE."""
    if message.verb == _Verb.EXCHANGE:
      outgoing = self._connection.outgoing
      _crash.maybe_crash('writing', lambda: self._write_half(push, outgoing))
      self._layout.pack(push.message, outgoing)
    return self._send(message)

  def _write_half(self, push: engine.Push, outgoing: np.ndarray) -> None:
    """Writes the first half of a gradient, for a crash in a test."""
    gradient = np.empty_like(outgoing)
    self._layout.pack(push.message, gradient)
    half = gradient.nbytes // 2
    outgoing[:half] = gradient[:half]

  def _send_again(
    self, message: _messages.Message, gradient: np.ndarray | None
  ) -> _messages.Message:
    """Sends the request that an earlier server has not answered."""
    if gradient is not None:
      np.copyto(self._connection.outgoing, gradient)
    # After a reconnection the learner has no weights to keep.
    message.flags &= ~_Flag.KEEPS_WEIGHTS
    return self._send(message)

  def _send(self, message: _messages.Message) -> _messages.Message:
    """Sends a request, which is kept until it is answered."""
    has_payload = message.verb == _Verb.EXCHANGE
    gradient = self._connection.outgoing if has_payload else None
    self._unanswered = (message, gradient)
    answer = self._request(message, has_payload)
    self._unanswered = None
    return answer

  def _leave(self) -> str:
    self._request(_messages.Message(_Verb.LEAVE, worker=self._learner))
    return 'The learner was stopped.'


class Computing:
  """Computes gradients at weights in messages.

  Args:
    task: Task to learn.
    seed: Seed of the run.
    wire_dtype: Dtype that float32 is rounded to in messages.
    num_devices: Devices over which a minibatch is spread.
    min_seconds: Least seconds of a gradient; see `Learner`.

  Attributes:
    layout: Layout of weights and gradients in messages.
    functions: Compiled functions.
    learner: Number of the learner.
    local_rate: Rate of steps on its own replica.
  """

  def __init__(
    self,
    task: tasks.Task,
    *,
    seed: int,
    wire_dtype: str,
    num_devices: int,
    min_seconds: tuple[float, ...],
  ) -> None:
    self._task = task
    self._seed = seed
    self._min_seconds = min_seconds
    weights = jax.eval_shape(
      task.init, jax.random.key(seed, impl='threefry2x32')
    )
    self.layout = engine.make_layout(weights, wire_dtype)
    self.functions = engine.make_learner(task, self.layout, num_devices)
    self._data = engine.place_data(task.data, num_devices)
    self.learner = -1
    self.local_rate = 1.0

  def warm_up(self) -> None:
    """Compiles, so that the first gradient takes no longer than others."""
    buffer = np.zeros(self.layout.size, np.uint8)
    data = self._data
    if self._task.is_streamed:
      data = self._task.batches(None, self._seed, 0, 0)
    parts = self.layout.view(buffer)
    push = self.functions.compute(parts, data, self._seed, 0, 0)
    jax.block_until_ready(push)

  def view(self, weights: _messages.Message) -> engine.BufferViews:
    """The weights in a message."""
    assert weights.payload is not None  # The server has sent weights.
    return self.layout.view(weights.payload)

  def compute(
    self, weights: _messages.Message, step: int, num_steps: int
  ) -> tuple[engine.Push, float]:
    """Computes a push.

    Args:
      weights: Message with the weights.
      step: Number of the first minibatch.
      num_steps: Minibatches in a push; several are steps on a replica of the
        learner's own.

    Returns:
      The push, and the seconds that it took.
    """
    begin = time.perf_counter()
    parts = self.view(weights)
    if num_steps == 1:
      push = self.functions.compute(parts, *self._locate(step))
    else:
      copy = self.functions.start_copy(parts)
      copy = self.step(copy, step, num_steps, weights.rate)
      push, _ = self.functions.push_copy(copy)
    _crash.maybe_crash('computing')
    jax.block_until_ready(push)
    return push, self.sleep_until_min_seconds(begin, num_steps)

  def step(
    self, copy: engine.LocalReplica, first: int, num_steps: int, rate: float
  ) -> engine.LocalReplica:
    """Makes steps on a replica of the learner's own."""
    rate = self.local_rate * rate
    for step in range(first, first + num_steps):
      copy = self.functions.step_copy(copy, *self._locate(step), rate)
    return copy

  def sleep_until_min_seconds(self, begin: float, num_steps: int) -> float:
    """Sleeps until the least time has passed since `begin`; gives the time."""
    seconds = time.perf_counter() - begin
    if self._min_seconds:
      index = min(self.learner, len(self._min_seconds) - 1)
      time.sleep(max(0.0, num_steps * self._min_seconds[index] - seconds))
      seconds = time.perf_counter() - begin
    return seconds

  def _locate(self, step: int) -> tuple[Any, int, int, int]:
    """(data, seed, learner, step) of a minibatch."""
    data = self._data
    if self._task.is_streamed:
      data = self._task.batches(None, self._seed, self.learner, step)
    return data, self._seed, self.learner, step


def learn(
  make_task: str,
  arguments: dict[str, Any],
  *,
  stopped: threading.Event,
  workdir: str = '',
  server: str = '',
  wire: str = 'auto',
  tls: dict[str, str] | None = None,
  **options: Any,
) -> str:
  """Makes a task, connects, and learns: the work of a learner's process.

  Args:
    make_task: Name of the function that makes the task: 'module:function'.
    arguments: Arguments of that function.
    stopped: Event that ends the learner.
    workdir: Folder with address and token of the server.
    server: Address of the server, if there is no workdir.
    wire: Wire, as in `make_connect`.
    tls: Arguments of `Tls`, for mutual TLS; None: no TLS.
    **options: Options of `Learner`.

  Returns:
    The reason for the end.
  """
  task = _processes.find_function(make_task)(**arguments)
  connect = _addresses.make_connect(
    workdirs.Workdir(workdir) if workdir else None,
    server=server,
    wire=wire,
    tls=None if tls is None else _security.Tls(**tls),
  )
  if 'min_seconds' in options:
    options['min_seconds'] = tuple(options['min_seconds'])
  learner = Learner(task, connect, stopped=stopped, **options)
  reason = learner.run()
  _log.info('%s', reason)
  return reason
