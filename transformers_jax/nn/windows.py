"""Windows on a map: how tokens that lie on a plane are cut into rectangles, and put back."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from transformers_jax.nn.linear import normal_init
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


class WindowPositionBias(nnx.Module):
    """A learned number for each head and offset between two places of a window, added to the scores of attention (Liu
    et al. 2021, Swin, equation 4)."""

    def __init__(
        self,
        heads: int,
        window: tuple[int, int],
        *,
        embedding_init: Initializer = normal_init(0.02),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.window = window
        offsets = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.embedding = nnx.Param(embedding_init(rngs.params(), (offsets, heads), param_dtype))

    def __call__(self, window: tuple[int, int] | None = None) -> Float[Array, "1 heads tokens tokens"]:
        """What `attend` takes as `bias` in windows of this size, or of the smaller size `window`."""
        height, width = self.window if window is None else window
        if height > self.window[0] or width > self.window[1]:
            raise ValueError(f"a window of {show_size((height, width))} is larger than {show_size(self.window)}")
        rows, columns = (
            np.arange(side)[:, None] - np.arange(side) + most - 1
            for side, most in zip((height, width), self.window, strict=True)
        )
        index = rows[:, None, :, None] * (2 * self.window[1] - 1) + columns[None, :, None, :]
        tokens = height * width
        return jnp.moveaxis(self.embedding[...][index.reshape(tokens, tokens)], -1, 0)[None]


def shifted_mask(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int]
) -> Bool[Array, "windows 1 tokens tokens"]:
    """Which places of each window may look at one another on a map of `size` that was rolled by -`shift`: those that
    lay side by side before, and not at opposite edges (Liu et al. 2021, section 3.2)."""
    rows, columns = _counts(size, window)
    # Before rolling, the windows begin at shift, shift + window, ...; what is in front of the first makes one, too.
    parts = [
        np.roll((np.arange(side) - offset) // length, -offset)
        for side, length, offset in zip(size, window, shift, strict=True)
    ]
    group = parts[0][:, None] * (columns + 1) + parts[1]
    group = group.reshape(rows, window[0], columns, window[1]).swapaxes(1, 2).reshape(rows * columns, 1, -1)
    group = jnp.asarray(group)
    return group[..., :, None] == group[..., None, :]
