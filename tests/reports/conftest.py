"""Fixtures of the tests of reports."""

import base64

import pytest

# One white pixel.
_BLANK = base64.b64decode(
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2'
  'FAAAAABJRU5ErkJggg=='
)


@pytest.fixture
def real_pictures():
  """Requested by tests of pages whose pictures must be drawn."""


@pytest.fixture
def blank_pictures(request, monkeypatch):
  """Pages get white pictures: drawing them takes most of a page's time.

  Figures are still built completely, but not drawn as pixels.
  """
  if 'real_pictures' in request.fixturenames:
    return
  from matplotlib import figure

  monkeypatch.setattr(
    figure.Figure,
    'savefig',
    lambda self, path, **options: path.write_bytes(_BLANK),
  )
