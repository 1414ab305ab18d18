"""Weights over plain unix sockets: a server, or a learner, in its process.

  python -m launch.benchmarks.peer_unix server DESCRIPTOR,DESCRIPTOR,... WORK
  python -m launch.benchmarks.peer_unix learner NUMBER DESCRIPTOR WORK

The parent made the pairs of sockets. One thread serves whoever has begun to
send, to its end. A thread per connection was measured too: a little faster with
60 thousand parameters, slower with a million, where copies and updates fill the
cores anyway.
"""

import selectors
import socket
import sys

from launch.benchmarks import server_work

# Of the kernel: most gradients of small networks leave in one go.
_BUFFER_BYTES = 1_000_000


def make_pair() -> tuple[socket.socket, socket.socket]:
  """The server's and the learner's end."""
  pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
  for end in pair:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
  return pair


def receive(connection: socket.socket, message: server_work.Message) -> None:
  """Fills a message."""
  view = message.buffer.data
  while len(view):
    num_bytes = connection.recv_into(view)
    if not num_bytes:
      raise EOFError(f'The other end left with {len(view)} bytes to come.')
    view = view[num_bytes:]


def serve(
  connections: list[socket.socket], work: server_work.Work
) -> server_work.Log:
  """Answers until every learner knows that it is over."""
  server = server_work.Server(work)
  push = server_work.Message(work.num_parameters)
  answer = server.answer.buffer.data
  with selectors.DefaultSelector() as selector:
    for connection in connections:
      # Whoever starts first would be measured alone: all have to send first.
      connection.recv(1, socket.MSG_PEEK)
      selector.register(connection, selectors.EVENT_READ, connection)
    while selector.get_map():
      for key, _ in selector.select():
        receive(key.data, push)
        server.update(push)
        key.data.sendall(answer)
        if server.log.is_over:
          selector.unregister(key.data)
  return server.log


def learn(
  connection: socket.socket, work: server_work.Work
) -> server_work.Checker:
  """Pushes until it is over."""
  # Sending copies it out of private memory.
  push = server_work.Message(work.num_parameters)
  push.values[...] = server_work.make_gradient(work)
  pull = server_work.Message(work.num_parameters)
  outgoing = push.buffer.data
  checker = server_work.Checker(work)
  while pull.clock < work.num_updates:
    push.clock = pull.clock
    connection.sendall(outgoing)
    receive(connection, pull)
    checker.check(pull.values, pull.clock)
  return checker


def main(role: str, *words: str) -> None:
  """Does what the parent asks for."""
  work = server_work.start_process(words[-1])
  if role == 'server':
    ends = [socket.socket(fileno=int(word)) for word in words[0].split(',')]
    server_work.write_report(work, role, serve(ends, work).make_report())
  else:
    checker = learn(socket.socket(fileno=int(words[1])), work)
    server_work.write_report(work, f'{role}-{words[0]}', checker.make_report())


if __name__ == '__main__':
  main(*sys.argv[1:])
