"""From images to sequences of patches."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from transformers_jax.nn.linear import Linear, normal_init
from transformers_jax.nn.sharding import BATCH, constrain


def to_patches(
    pixels: Float[Array, "batch height width channels"], patch: tuple[int, int]
) -> Float[Array, "batch patches values"]:
    """Cut images into patches of `patch` (height, width) pixels, in reading order; the values of one are those of its
    pixels in reading order. ValueError for a size that the patch does not divide."""
    batch, height, width, channels = pixels.shape
    rows, columns = grid_size((height, width), patch)
    pixels = pixels.reshape(batch, rows, patch[0], columns, patch[1], channels)
    return pixels.transpose(0, 1, 3, 2, 4, 5).reshape(batch, rows * columns, patch[0] * patch[1] * channels)


def grid_size(image: tuple[int, int], patch: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches in an image; sizes are (height, width)."""
    if min(patch) < 1 or image[0] < patch[0] or image[1] < patch[1]:
        raise ValueError(f"an image of {show_size(image)} pixels has no patch of {show_size(patch)}")
    if image[0] % patch[0] or image[1] % patch[1]:
        raise ValueError(
            f"an image of {show_size(image)} pixels (height x width) cannot be cut into patches of {show_size(patch)}"
        )
    return image[0] // patch[0], image[1] // patch[1]


def show_size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def check_channels(pixels: Float[Array, "batch height width values"], channels: int) -> None:
    """ValueError for images of another number of channels."""
    if pixels.shape[-1] != channels:
        raise ValueError(
            f"the images have {pixels.shape[-1]} channels but the model takes {channels}; pixels are "
            "(batch, height, width, channels)"
        )


class PatchEmbedding(nnx.Module):
    """A vector for each patch of an image (Dosovitskiy et al. 2021, equation 1): the convolution whose stride is its
    size, computed as one matrix product."""

    def __init__(
        self,
        patch: tuple[int, int],
        channels: int,
        dim: int,
        *,
        kernel_init: Initializer = normal_init(0.02),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.patch, self.channels = patch, channels
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.projection = Linear(patch[0] * patch[1] * channels, dim, kernel_init=kernel_init, **types)

    def __call__(self, pixels: Float[Array, "batch height width channels"]) -> Float[Array, "batch patches dim"]:
        """The vectors in reading order. ValueError for another number of channels, or a size that the patch does not
        divide."""
        check_channels(pixels, self.channels)
        return constrain(self.projection(to_patches(pixels, self.patch)), BATCH)
