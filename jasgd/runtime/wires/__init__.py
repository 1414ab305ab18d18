"""Wires: messages between processes, over a queue, shared memory or Flight.

Arrow Flight is imported when it is needed, as its import takes long.
"""

import importlib
from typing import Any

from jasgd.runtime.wires._addresses import BindAddress
from jasgd.runtime.wires._addresses import find_free_port
from jasgd.runtime.wires._addresses import listen
from jasgd.runtime.wires._addresses import make_connect
from jasgd.runtime.wires._addresses import WIRES
from jasgd.runtime.wires._addresses import write_address
from jasgd.runtime.wires._buffers import ALIGNMENT
from jasgd.runtime.wires._buffers import Buffer
from jasgd.runtime.wires._buffers import BufferPool
from jasgd.runtime.wires._buffers import make_aligned
from jasgd.runtime.wires._buffers import make_shared
from jasgd.runtime.wires._buffers import map_shared
from jasgd.runtime.wires._memory import connect_memory
from jasgd.runtime.wires._memory import MemoryListener
from jasgd.runtime.wires._messages import check_payload
from jasgd.runtime.wires._messages import decode_message
from jasgd.runtime.wires._messages import encode_message
from jasgd.runtime.wires._messages import Flag
from jasgd.runtime.wires._messages import MAX_SHOWN
from jasgd.runtime.wires._messages import MAX_TEXT
from jasgd.runtime.wires._messages import Message
from jasgd.runtime.wires._messages import MessageError
from jasgd.runtime.wires._messages import Verb
from jasgd.runtime.wires._queue import QueueListener
from jasgd.runtime.wires._security import find_token
from jasgd.runtime.wires._security import make_token
from jasgd.runtime.wires._security import Tls
from jasgd.runtime.wires._security import TOKEN_VARIABLE
from jasgd.runtime.wires._wire import Channel
from jasgd.runtime.wires._wire import Connection
from jasgd.runtime.wires._wire import Event
from jasgd.runtime.wires._wire import Inbox
from jasgd.runtime.wires._wire import RefusedError
from jasgd.runtime.wires._wire import UntakenError
from jasgd.runtime.wires._wire import WireError

_LAZY = {
  'FlightListener': '_flight_server',
  'connect_flight': '_flight_client',
}

__all__ = [
  'ALIGNMENT',
  'MAX_SHOWN',
  'MAX_TEXT',
  'TOKEN_VARIABLE',
  'WIRES',
  'BindAddress',
  'Buffer',
  'BufferPool',
  'Channel',
  'Connection',
  'Event',
  'Flag',
  'FlightListener',
  'Inbox',
  'MemoryListener',
  'Message',
  'MessageError',
  'QueueListener',
  'RefusedError',
  'Tls',
  'UntakenError',
  'Verb',
  'WireError',
  'check_payload',
  'connect_flight',
  'connect_memory',
  'decode_message',
  'encode_message',
  'find_free_port',
  'find_token',
  'listen',
  'make_aligned',
  'make_connect',
  'make_shared',
  'make_token',
  'map_shared',
  'write_address',
]


def __getattr__(name: str) -> Any:
  """Imports a name that needs Arrow Flight."""
  if name not in _LAZY:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(f'{__name__}.{_LAZY[name]}'), name)
