"""Convolutions that are fast inside of a compiled loop on CPU.

XLA's CPU compiler calls a fast kernel only for convolutions in the layouts
NHWC, HWIO -> NHWC. Outside of loops it rewrites others to that; inside of a
loop's body it does not, and the two gradients of a convolution, as jax writes
them, then run 4 to 30 times slower. Here both gradients are written in those
layouts. With few channels even that is beaten by one matrix product over
patches, together with the pooling: `convolve_and_pool` does that.

On GPU and TPU the compiler knows better, and gets the plain operations. Weights
and values are the same everywhere, up to rounding. On CPU there is no
forward-mode derivative, which `jax.hessian` and `jax.jvp` would need.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp

# ((before, after) for rows, (before, after) for columns)
Padding = tuple[tuple[int, int], tuple[int, int]]

# With more channels than this, a convolution is taken in place of patches. With
# 5x5 kernels patches win for up to 6 channels and lose for 32; between those it
# makes little difference (3x3 kernels, 16 channels).
_MAX_PATCH_CHANNELS = 16


def convolve(
  images: jax.Array,
  kernel: jax.Array,
  *,
  padding: int = 0,
  stride: int = 1,
) -> jax.Array:
  """A convolution of images.

  Args:
    images: [batch, height, width, channels].
    kernel: [height, width, channels, features].
    padding: Zeros on each side of an image.
    stride: Of the kernel, in both directions.

  Returns:
    [batch, height, width, features].
  """
  around: Padding = ((padding, padding), (padding, padding))
  if jax.default_backend() == 'cpu':
    return _convolve_on_cpu(images, kernel, around, stride)
  return _convolve(images, kernel, around, stride=stride)


def convolve_and_pool(
  images: jax.Array, kernel: jax.Array, *, padding: int = 0
) -> jax.Array:
  """A convolution, and the maxima of its outputs in windows of 2x2.

  Args:
    images: [batch, height, width, channels].
    kernel: [size, size, channels, features], of an odd size.
    padding: Zeros on each side of an image.

  Returns:
    [batch, height / 2, width / 2, features] of the convolution's height and
    width.

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
  """The maxima in windows of 2x2; height and width must be even."""
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
  """The one call of a convolution, in the layouts that are fast."""
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
    del after  # It follows from the sizes.
    size, side = kernel.shape[axis], images.shape[axis + 1]
    # Outputs are `stride` pixels apart, from the first to the last this many:
    reach = (grads.shape[axis + 1] - 1) * stride
    # A convolution of `reach` + 1 dilated outputs with the flipped kernel, that
    # is to give `side` pixels.
    first = size - 1 - before
    image_padding.append((first, side + size - 2 - first - reach))
    # A convolution of the images with the dilated outputs, that is to give
    # `size` pixels.
    kernel_padding.append((before, size + reach - side - before))
  image_grads = _convolve(
    grads,
    jnp.flip(kernel, (0, 1)).transpose(0, 1, 3, 2),
    tuple(image_padding),
    image_dilation=stride,
  )
  # Channels take the place of the batch, and the batch that of the channels.
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
  """[n, 4, channels] -> [n, channels]."""
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
  # Of equal maxima the first gets the gradient, as in `linen.max_pool`.
  parts, is_taken = [], jnp.zeros_like(maxima, bool)
  for index in range(4):
    is_first = (windows[:, index] == maxima) & ~is_taken
    parts.append(jnp.where(is_first, grads, 0))
    is_taken |= is_first
  return (jnp.stack(parts, axis=1),)


_max_of_four.defvjp(_max_forward, _max_backward)


def _split_windows(images: jax.Array) -> jax.Array:
  """[n, h, w, c] -> [n, h/2, w/2, 4, c]: the four pixels of each window."""
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

  The four outputs of a window see, together, a patch that is one pixel larger
  than the kernel. So a patch per window, times the kernel at its four places in
  the patch, is all four outputs, of which the maximum is left to take. That is
  44% more products than needed (5x5), and a third of the memory for patches.
  """
  size, _, channels, features = kernel.shape
  reach = (size + 1) // 2  # Windows that a patch extends over.
  around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
  windows = _split_windows(jnp.pad(images, around))
  batch, rows, columns = windows.shape[:3]
  windows = windows.reshape(batch, rows, columns, 4 * channels)
  rows, columns = rows - reach + 1, columns - reach + 1
  patches = jnp.concatenate(
    [
      windows[:, row : row + rows, column : column + columns]
      for row in range(reach)
      for column in range(reach)
    ],
    axis=-1,
  ).reshape(-1, reach * reach * 4 * channels)
  products = patches @ _place_kernel(kernel)
  return _max_of_four(products.reshape(-1, 4, features)).reshape(
    batch, rows, columns, features
  )


def _place_kernel(kernel: jax.Array) -> jax.Array:
  """The kernel at its four places in a patch: [pixels, 4 features]."""
  size, _, channels, features = kernel.shape
  reach = (size + 1) // 2
  places = jnp.stack(
    [
      jnp.pad(kernel, ((row, 1 - row), (column, 1 - column), (0, 0), (0, 0)))
      for row in (0, 1)
      for column in (0, 1)
    ],
    axis=-2,
  )
  # Pixels in the order of the patches: window by window, four in each.
  return (
    places.reshape(reach, 2, reach, 2, channels, 4, features)
    .transpose(0, 2, 1, 3, 4, 5, 6)
    .reshape(reach * reach * 4 * channels, 4 * features)
  )
