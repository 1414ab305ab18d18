"""The parameter server: owner of the weights, and its learners' sessions."""

from jasgd.runtime.server._server import Server
from jasgd.runtime.server._serving import serve
from jasgd.runtime.server._serving import serve_threads

__all__ = ['Server', 'serve', 'serve_threads']
