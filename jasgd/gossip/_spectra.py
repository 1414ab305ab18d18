"""Largest eigenvalues of what gossip does to disagreement.

Three ways, by what the topology allows: where all nodes see the same, the
Fourier transform of one row, exact for any n; for few nodes the matrix; else
Lanczos, which needs products with vectors only.
"""

from collections.abc import Callable

import numpy as np

from jasgd.gossip import _draws
from jasgd.gossip import _topology

_MAX_DENSE = 256
_MAX_STEPS = 1024
# The largest residual of Lanczos, relative to how far the eigenvalue is from 1.
# The gap then has an error of at most this, and in practice of its square.
_TOLERANCE = 1e-6
_ROUNDING = 1e-13


def find_circulant_moduli(topology: _topology.Topology) -> np.ndarray | None:
  """The moduli of all eigenvalues of each round, if every W is circulant.

  W is circulant if node i sees at distance o what node 0 sees there. Such
  matrices all have the same (Fourier) eigenvectors: a product of them has the
  products of their eigenvalues, and singular values are the moduli.

  Args:
    topology: Any.

  Returns:
    float64 [num_rounds, num_nodes], of which column 0 belongs to the vector of
    ones; None if some round is not circulant.
  """
  n = topology.num_nodes
  rows = np.zeros((topology.num_rounds, n))
  rows[:, 0] = topology.own_weights[:, 0]
  for index in range(topology.num_rounds):
    edges = slice(*topology.starts[index : index + 2])
    nodes = topology.nodes[edges]
    if (topology.degrees[index] != topology.degrees[index, 0]).any():
      return None
    offsets = ((topology.peers[edges] - nodes) % n).reshape(n, -1)
    order = np.argsort(offsets, axis=-1)
    offsets = np.take_along_axis(offsets, order, axis=-1)
    weights = topology.weights[edges].reshape(n, -1)
    weights = np.take_along_axis(weights, order, axis=-1)
    if (offsets != offsets[0]).any() or (weights != weights[0]).any():
      return None
    rows[index, offsets[0]] = weights[0]
  return np.abs(np.fft.fft(rows, axis=-1))


def find_largest_eigenvalue(
  multiply: Callable[[np.ndarray], np.ndarray], num_nodes: int
) -> float:
  """The largest eigenvalue, from 0 to 1, of a symmetric A with A 1 = 0.

  Args:
    multiply: x -> A x, for a vector x; also for a matrix x, column by column.
    num_nodes: The length of x.

  Returns:
    The eigenvalue.

  Raises:
    RuntimeError: if Lanczos does not settle.
  """
  if num_nodes <= _MAX_DENSE:
    matrix = multiply(np.eye(num_nodes))
    return float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
  return _run_lanczos(multiply, num_nodes)


def _run_lanczos(
  multiply: Callable[[np.ndarray], np.ndarray], num_nodes: int
) -> float:
  """Lanczos without reorthogonalisation, orthogonal to the vector of ones.

  Rounding makes it find the same eigenvalue several times over, which does not
  hurt the largest one. The residual of a Ritz pair is the last off-diagonal
  entry times the last entry of its vector, and bounds its error.

  Args:
    multiply: As above.
    num_nodes: The length of the vectors.

  Returns:
    The largest Ritz value.
  """
  # Any vector will do that is orthogonal to no eigenvector; a fixed random one.
  words = _draws.make_philox('independent', 0).random_raw(num_nodes)
  vector = _normalize(np.asarray(words) * 2.0**-64)
  previous, off_diagonal = np.zeros(num_nodes), 0.0
  diagonals, off_diagonals = [], []
  largest = 0.0
  for step in range(1, _MAX_STEPS + 1):
    image = multiply(vector) - off_diagonal * previous
    diagonals.append(float(vector @ image))
    image -= diagonals[-1] * vector
    image -= image.mean()
    off_diagonal = float(np.linalg.norm(image))
    is_stuck = off_diagonal < _ROUNDING  # The whole invariant space is found.
    # To look at every step would cost more than the steps: look at 8, 16, 32...
    if is_stuck or (step >= 8 and step & (step - 1) == 0):
      values, vectors = np.linalg.eigh(
        np.diag(diagonals)
        + np.diag(off_diagonals, 1)
        + np.diag(off_diagonals, -1)
      )
      largest = float(values[-1])
      residual = off_diagonal * abs(vectors[-1, -1])
      if residual <= _TOLERANCE * (1 - largest) + _ROUNDING:
        return largest
    off_diagonals.append(off_diagonal)
    previous, vector = vector, image / off_diagonal
  raise RuntimeError(
    f'The largest eigenvalue did not settle in {_MAX_STEPS} steps of Lanczos. '
    f'It is at least {largest}: nearer to 1 than {1 - largest:.2g}, so that '
    'these nodes hardly ever agree.'
  )


def _normalize(vector: np.ndarray) -> np.ndarray:
  centred = vector - vector.mean()
  return centred / np.linalg.norm(centred)
