"""Windows on a map: how tokens that lie on a plane are cut into rectangles, and put back."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from transformers_jax.nn.patch import show_size


def to_windows(
    x: Float[Array, "batch height width dim"], window: tuple[int, int]
) -> Float[Array, "windows tokens dim"]:
    """Cut maps into windows of `window` (height, width) places: those of one example stay together, in reading order,
    and so are the tokens of each. ValueError for a size that the window does not divide."""
    batch, height, width, dim = x.shape
    rows, columns = _counts((height, width), window)
    x = x.reshape(batch, rows, window[0], columns, window[1], dim)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch * rows * columns, window[0] * window[1], dim)


def from_windows(
    x: Float[Array, "windows tokens dim"], window: tuple[int, int], size: tuple[int, int]
) -> Float[Array, "batch height width dim"]:
    """Maps of `size` (height, width) from what `to_windows` made of them."""
    rows, columns = _counts(size, window)
    x = x.reshape(-1, rows, columns, *window, x.shape[-1])
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(-1, *size, x.shape[-1])


def pad_to_windows(
    x: Float[Array, "batch height width dim"], window: tuple[int, int]
) -> Float[Array, "batch padded_height padded_width dim"]:
    """`x` with zeros at the bottom and at the right, so that the window divides its size."""
    bottom, right = -x.shape[1] % window[0], -x.shape[2] % window[1]
    return jnp.pad(x, ((0, 0), (0, bottom), (0, right), (0, 0))) if bottom or right else x


def _counts(size: tuple[int, int], window: tuple[int, int]) -> tuple[int, int]:
    if min(window) < 1 or size[0] % window[0] or size[1] % window[1]:
        raise ValueError(f"a map of {show_size(size)} cannot be cut into windows of {show_size(window)}")
    return size[0] // window[0], size[1] // window[1]
