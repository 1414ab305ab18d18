"""Convolutions whose gradients are fast inside a compiled loop on CPU.

XLA's CPU compiler has a fast kernel only for convolutions in the layouts NHWC,
HWIO -> NHWC. Outside loops it rewrites other layouts to these. Inside the body
of a loop it does not, so the two gradients of a convolution, as jax writes
them, run 4 to 30 times slower. This module writes both gradients in the fast
layouts. With few channels, one matrix product over patches that includes the
pooling is faster still: see `convolve_and_pool`.

GPU and TPU get the plain operations, which their compilers optimise well.
Weights and values are equal everywhere, up to rounding. On CPU there is no
forward-mode derivative, so `jax.jvp` and `jax.hessian` do not work.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

# ((before, after) for rows, (before, after) for columns)
Padding = tuple[tuple[int, int], tuple[int, int]]

# With more channels than this, a convolution replaces the patches. Measured:
# with 5x5 kernels patches are faster up to 6 channels and slower for 32; with
# 3x3 kernels and 16 channels there is little difference.
_MAX_PATCH_CHANNELS = 16


def convolve(
  images: jax.Array,
  kernel: jax.Array,
  *,
  padding: int = 0,
  stride: int = 1,
) -> jax.Array:
  """Convolves images with a kernel.

  Args:
    images: Array [batch, height, width, channels].
    kernel: Array [height, width, channels, features].
    padding: Number of zeros on each side of an image.
    stride: Stride of the kernel, in both directions.

  Returns:
    Array [batch, height, width, features].
  """
  around: Padding = ((padding, padding), (padding, padding))
  if jax.default_backend() == 'cpu':
    return _convolve_on_cpu(images, kernel, around, stride)
  return _convolve(images, kernel, around, stride=stride)


def convolve_and_pool(
  images: jax.Array, kernel: jax.Array, *, padding: int = 0
) -> jax.Array:
  """Convolves images, then takes the maxima in windows of 2x2.

  Args:
    images: Array [batch, height, width, channels].
    kernel: Array [size, size, channels, features]; the size is odd.
    padding: Number of zeros on each side of an image.

  Returns:
    Array [batch, height / 2, width / 2, features] with the height and width of
    the convolution's output.

  Raises:
    ValueError: if the kernel is even or not square, or if the convolution's
      height or width is odd.
  """
  size, width, channels, _ = kernel.shape
  outputs = [side + 2 * padding - size + 1 for side in images.shape[1:3]]
  if size != width or size % 2 == 0 or any(side % 2 for side in outputs):
    raise ValueError(
      'Convolution with pooling needs an odd, square kernel and an even height '
      f'and width of its outputs, got the kernel {kernel.shape}, padding '
      f'{padding} and images {images.shape}.'
    )
  if jax.default_backend() == 'cpu' and channels <= _MAX_PATCH_CHANNELS:
    return _convolve_and_pool_patches(images, kernel, padding)
  return max_pool(convolve(images, kernel, padding=padding))


def max_pool(images: jax.Array) -> jax.Array:
  """Takes the maxima in windows of 2x2; height and width must be even."""
  batch, height, width, channels = images.shape
  shape = (batch, height // 2, width // 2, channels)
  if jax.default_backend() != 'cpu':
    return images.reshape(batch, height // 2, 2, width // 2, 2, channels).max(
      axis=(2, 4)
    )
  windows = _split_windows(images).reshape(-1, 4, channels)
  return _max_of_four(windows).reshape(shape)


def _convolve(
  images: jax.Array,
  kernel: jax.Array,
  padding: Padding,
  *,
  stride: int = 1,
  image_dilation: int = 1,
  kernel_dilation: int = 1,
) -> jax.Array:
  """Calls the convolution in the fast layouts."""
  return lax.conv_general_dilated(
    images,
    kernel,
    (stride, stride),
    padding,
    lhs_dilation=(image_dilation, image_dilation),
    rhs_dilation=(kernel_dilation, kernel_dilation),
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve_on_cpu(
  images: jax.Array, kernel: jax.Array, padding: Padding, stride: int
) -> jax.Array:
  return _convolve(images, kernel, padding, stride=stride)


def _convolve_forward(
  images: jax.Array, kernel: jax.Array, padding: Padding, stride: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return _convolve(images, kernel, padding, stride=stride), (images, kernel)


def _convolve_backward(
  padding: Padding,
  stride: int,
  residuals: tuple[jax.Array, jax.Array],
  grads: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  images, kernel = residuals
  image_padding, kernel_padding = [], []
  for axis, (before, after) in enumerate(padding):
    del after  # The sizes determine it.
    size, side = kernel.shape[axis], images.shape[axis + 1]
    # Distance from the first to the last output, in pixels of the image.
    span = (grads.shape[axis + 1] - 1) * stride
    # Gradient of the images: the span + 1 dilated outputs, convolved with the
    # flipped kernel, must give `side` pixels.
    first = size - 1 - before
    image_padding.append((first, side + size - 2 - first - span))
    # Gradient of the kernel: the images, convolved with the dilated outputs,
    # must give `size` pixels.
    kernel_padding.append((before, size + span - side - before))
  image_grads = _convolve(
    grads,
    jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2),
    tuple(image_padding),
    image_dilation=stride,
  )
  # Sum over the batch: the batch axis takes the place of the channels.
  kernel_grads = _convolve(
    images.transpose(3, 1, 2, 0),
    grads.transpose(1, 2, 0, 3),
    tuple(kernel_padding),
    kernel_dilation=stride,
  ).transpose(1, 2, 0, 3)
  return image_grads, kernel_grads


_convolve_on_cpu.defvjp(_convolve_forward, _convolve_backward)


@jax.custom_vjp
def _max_of_four(windows: jax.Array) -> jax.Array:
  """Takes the maximum over the second axis: [n, 4, c] -> [n, c]."""
  return jnp.maximum(
    jnp.maximum(windows[:, 0], windows[:, 1]),
    jnp.maximum(windows[:, 2], windows[:, 3]),
  )


def _max_forward(
  windows: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  maxima = _max_of_four(windows)
  return maxima, (windows, maxima)


def _max_backward(
  residuals: tuple[jax.Array, jax.Array], grads: jax.Array
) -> tuple[jax.Array]:
  windows, maxima = residuals
  # The first of equal maxima gets the gradient, as in `linen.max_pool`.
  parts, is_taken = [], jnp.zeros_like(maxima, bool)
  for index in range(4):
    is_first = (windows[:, index] == maxima) & ~is_taken
    parts.append(jnp.where(is_first, grads, 0))
    is_taken |= is_first
  return (jnp.stack(parts, axis=1),)


_max_of_four.defvjp(_max_forward, _max_backward)


def _split_windows(images: jax.Array) -> jax.Array:
  """Groups the pixels of each window: [n, h, w, c] -> [n, h/2, w/2, 4, c]."""
  batch, height, width, channels = images.shape
  return (
    images.reshape(batch, height // 2, 2, width // 2, 2, channels)
    .transpose(0, 1, 3, 2, 4, 5)
    .reshape(batch, height // 2, width // 2, 4, channels)
  )


def _convolve_and_pool_patches(
  images: jax.Array, kernel: jax.Array, padding: int
) -> jax.Array:
  """Convolution and pooling as one matrix product.

  The four outputs of a window depend on one patch, which is one pixel larger
  than the kernel. The product of a patch per window and the kernel at its four
  places in the patch gives all four outputs; their maximum is the result. For
  a 5x5 kernel this takes 44% more multiplications than needed, and a third of
  the memory of a patch per output.
  """
  size, _, channels, features = kernel.shape
  side = (size + 1) // 2  # Windows that a patch covers, per direction.
  around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
  windows = _split_windows(jnp.pad(images, around))
  batch, rows, columns = windows.shape[:3]
  windows = windows.reshape(batch, rows, columns, 4 * channels)
  rows, columns = rows - side + 1, columns - side + 1
  patches = jnp.concatenate(
    [
      windows[:, row : row + rows, column : column + columns]
      for row in range(side)
      for column in range(side)
    ],
    axis=-1,
  ).reshape(-1, side * side * 4 * channels)
  products = patches @ _place_kernel(kernel)
  return _max_of_four(products.reshape(-1, 4, features)).reshape(
    batch, rows, columns, features
  )


def _place_kernel(kernel: jax.Array) -> jax.Array:
  """Places the kernel at four places in a patch: [pixels, 4 features]."""
  size, _, channels, features = kernel.shape
  side = (size + 1) // 2
  places = jnp.stack(
    [
      jnp.pad(kernel, ((row, 1 - row), (column, 1 - column), (0, 0), (0, 0)))
      for row in (0, 1)
      for column in (0, 1)
    ],
    axis=-2,
  )
  # In the pixel order of the patches: window by window, four pixels in each.
  return (
    places.reshape(side, 2, side, 2, channels, 4, features)
    .transpose(0, 2, 1, 3, 4, 5, 6)
    .reshape(side * side * 4 * channels, 4 * features)
  )
