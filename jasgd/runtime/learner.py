"""A learner: computes gradients on the server's weights until the run is over.

It has no state of its own. What it computes depends on the weights that it got,
on the run's seed, and on its number and step, so that anybody can compute it
again.
"""

from collections.abc import Callable
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
from jasgd.runtime import _computing
from jasgd.runtime import _messages
from jasgd.runtime import _settings
from jasgd.runtime import _wire

_log = logging.getLogger(__name__)
_Verb = _messages.Verb
_Flag = _messages.Flag

Connect = Callable[[int], _wire.Connection]

# Between two tries to reach a server, in seconds.
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 2.0


class Learner:
  """Computes gradients, and exchanges them for weights.

  Args:
    task: What is learned.
    connect: Gives a connection to the server for payloads of a size, or raises
      a WireError.
    seed: Of the run.
    wire_dtype: What float32 is rounded to in messages.
    num_devices: Over how many of this process's devices a minibatch is spread;
      None: over as many as divide it.
    min_seconds: A gradient takes no less than that: to stand for a learner
      that is slower than this one. By the learner's number; the last one stands
      for all that follow. (): no matter.
    patience: For how long a server may be away, in seconds.
    stopped: Set, it makes the learner leave after its gradient.
  """

  def __init__(
    self,
    task: tasks.Task,
    connect: Connect,
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
    self._computing = _computing.Computing(
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
    self._told: dict[str, Any] = {}
    # What the server has not answered yet, and its gradient.
    self._held: tuple[_messages.Message, np.ndarray | None] | None = None
    self._connection: _wire.Connection

  def run(self) -> str:
    """Learns until the server says that it is over.

    Returns:
      What the server said.

    Raises:
      WireError: if the server was away for too long.
      RefusedError: if the server does not want this learner.
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
        # With some chance in it, so that not all come at once.
        self._stopped.wait(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, _LAST_PAUSE)
        if self._stopped.is_set():
          return 'The learner was stopped.'

  def _say_hello(self) -> _messages.Message:
    """Comes, or comes back with a gradient that was not answered."""
    try:
      answer = self._request(self._make_hello())
    except _wire.RefusedError:
      if self._learner < 0:
        raise
      # Somebody has taken its place: it comes as a new one.
      self._learner, self._held = -1, None
      answer = self._request(self._make_hello())
    if answer.verb != _Verb.END:
      self._told = json.loads(answer.text)
      self._learner = self._computing.learner = answer.learner
      self._computing.local_rate = self._told['local_rate']
      self._silence = self._told['silence']
    return answer

  def _make_hello(self) -> _messages.Message:
    message = _messages.Message(
      _Verb.HELLO,
      learner=self._learner,
      step=-1,
      text=json.dumps(self._hello),
    )
    if self._held is not None:
      held = self._held[0]
      message.step, message.clock = held.step, held.clock
      message.incarnation, message.seconds = held.incarnation, held.seconds
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
    held, self._held = self._held, None
    if answer.flags & _Flag.RESEND:
      assert held is not None  # Or the server would not want it.
      answer = self._send_again(*held)
    if answer.verb == _Verb.END:
      return answer.text
    if self._told['steps_per_push'] != self._told['steps_per_fetch']:
      return self._learn_apart(answer)
    if self._told['overlap']:
      return self._learn_overlapped(answer)
    while answer.verb != _Verb.END:
      if self._stopped.is_set():
        return self._leave()
      push, seconds = self._compute(answer, answer.step)
      message = self._make_message(push, seconds, answer, answer.step)
      answer = self._exchange(message, push)
    return answer.text

  def _compute(
    self, weights: _messages.Message, step: int
  ) -> tuple[engine.Push, float]:
    """A gradient at some weights, and how long it took."""
    num_steps = self._told['steps_per_push']
    return self._computing.compute(weights, step * num_steps, num_steps)

  def _learn_overlapped(self, answer: _messages.Message) -> str:
    """Fetches the next weights while a gradient is computed."""
    usual = fetch_seconds = 0.0  # How long things took the last time.
    with futures.ThreadPoolExecutor(1) as thread:
      weights, step = answer, answer.step
      while True:
        if self._stopped.is_set():
          return self._leave()
        # Just in time, as weights grow old from when they are fetched.
        delay = max(0.0, usual - 1.5 * fetch_seconds)
        computed = threading.Event()
        fetched = thread.submit(self._fetch_later, computed, delay, step)
        try:
          push, usual = self._compute(weights, step)
        finally:
          computed.set()
        message = self._make_message(push, usual, weights, step)
        message.flags = _Flag.KEEPS_WEIGHTS
        try:
          following, fetch_seconds = fetched.result()
        except _wire.WireError:
          self._hold(message, push)
          raise
        answer = self._exchange(message, push)
        if answer.verb == _Verb.END:
          return answer.text
        # After a gradient that is not finite, the answer has weights.
        weights = answer if answer.payload is not None else following
        step = answer.step

  def _fetch_later(
    self, computed: threading.Event, delay: float, step: int
  ) -> tuple[_messages.Message, float]:
    """New weights, after a while at most; and how long that took."""
    computed.wait(delay)
    begin = time.perf_counter()
    answer = self._request(
      _messages.Message(_Verb.FETCH, learner=self._learner, step=step)
    )
    return answer, time.perf_counter() - begin

  def _learn_apart(self, answer: _messages.Message) -> str:
    """Steps on a copy, with pushes and fetches each at their own pace."""
    n_push, n_fetch = (
      self._told[name] for name in ('steps_per_push', 'steps_per_fetch')
    )
    computing, functions = self._computing, self._computing.functions
    position = self._told['num_computed']
    weights, push_number = answer, answer.step
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
        seconds += computing.rest(begin, num_steps)
        answer = self._request(
          _messages.Message(_Verb.FETCH, learner=self._learner, step=position)
        )
      else:
        push, copy = functions.push_copy(copy)
        jax.block_until_ready(push.loss)
        seconds += computing.rest(begin, num_steps)
        flags = _Flag.KEEPS_WEIGHTS if since_fetch < n_fetch else _Flag.NONE
        is_lost = not push.is_finite
        message = self._make_message(push, seconds, weights, push_number)
        message.flags = flags
        answer = self._exchange(message, push)
        seconds, since_push, push_number = 0.0, 0, push_number + 1
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
    step: int,
  ) -> _messages.Message:
    """What to say of a gradient: a notice, if it is none."""
    return _messages.Message(
      _Verb.EXCHANGE if push.is_finite else _Verb.NOTICE,
      learner=self._learner,
      incarnation=weights.incarnation,
      step=step,
      clock=weights.clock,
      seconds=seconds,
      loss=float(push.loss),
    )

  def _exchange(
    self, message: _messages.Message, push: engine.Push
  ) -> _messages.Message:
    """Sends a gradient, or the notice that it is none."""
    if message.verb == _Verb.EXCHANGE:
      self._layout.pack(push.message, self._connection.outgoing)
    return self._send(message)

  def _hold(self, message: _messages.Message, push: engine.Push) -> None:
    """Keeps a gradient for the server that will be there next."""
    gradient = np.empty(self._layout.size, np.uint8)
    self._layout.pack(push.message, gradient)
    self._held = (message, gradient)

  def _send_again(
    self, message: _messages.Message, gradient: np.ndarray | None
  ) -> _messages.Message:
    """Sends what an earlier server has not answered."""
    if gradient is not None:
      np.copyto(self._connection.outgoing, gradient)
    message.flags &= ~_Flag.KEEPS_WEIGHTS  # It has none to go on with.
    return self._send(message)

  def _send(self, message: _messages.Message) -> _messages.Message:
    """Sends what may have to be sent again."""
    has_payload = message.verb == _Verb.EXCHANGE
    gradient = self._connection.outgoing if has_payload else None
    self._held = (message, gradient)
    answer = self._request(message, has_payload)
    self._held = None
    return answer

  def _leave(self) -> str:
    self._request(_messages.Message(_Verb.LEAVE, learner=self._learner))
    return 'The learner was stopped.'
