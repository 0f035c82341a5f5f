"""Positions of tokens in a text and of patches in an image, and their encodings."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from transformers_jax.nn.embedding import take_rows
from transformers_jax.nn.linear import normal_init
from transformers_jax.nn.sharding import BATCH, constrain


def positions_from_mask(attention_mask: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """0, 1, 2, ... over the tokens whose mask is 1, whichever side the padding is on; 0 for padding in front."""
    return jnp.maximum(jnp.cumsum(attention_mask, axis=-1) - 1, 0)


def positions_from_segments(segment_ids: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """0, 1, 2, ... over the tokens of each segment: texts that lie in one row, one after the other."""
    indices = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
    starts = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    return indices - jax.lax.cummax(jnp.where(starts, indices, 0), axis=1)


def sinusoidal_positions(
    positions: Int[Array, "*lead"], dim: int, *, base: float = 10_000.0, interleaved: bool = True
) -> Float[Array, "*lead dim"]:
    """Sines and cosines of wave lengths from 2 pi to `base` * 2 pi (Vaswani et al. 2017, section 3.5), any position.

    `interleaved` puts sin and cos in turns as the paper's formula does; otherwise all sines come first, as in
    tensor2tensor and Marian.
    """
    if dim % 2:
        raise ValueError(f"sinusoidal positions need an even dim, not {dim}")
    frequencies = base ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    if interleaved:
        return jnp.stack([sines, cosines], axis=-1).reshape(*positions.shape, dim)
    return jnp.concatenate([sines, cosines], axis=-1)


@dataclass(frozen=True)
class Rotary:
    """Rotary positions (Su et al. 2021, RoFormer): queries and keys are turned by angles that grow with their
    position, so that their product depends on the distance alone.

    Of each head the first `share` of its width is turned; place i of its first half and place i of its second half are
    the coordinates of a plane, as in GPT-NeoX and Llama. Wave lengths are those of `sinusoidal_positions`.
    """

    base: float = 10_000.0
    share: float = 1.0

    def check(self, head_dim: int) -> None:
        """ValueError unless heads of this width can be turned."""
        turned = head_dim * self.share
        if not 0 < self.share <= 1 or turned % 2 or not 1 < self.base < math.inf:
            raise ValueError(
                f"rotary positions with base={self.base} and share={self.share} turn {turned:g} of the {head_dim} "
                "numbers of a head; that must be an even number, and base above 1"
            )

    def __call__(
        self, x: Float[Array, "batch length heads head_dim"], positions: Int[Array, "#batch length"]
    ) -> Float[Array, "batch length heads head_dim"]:
        """`x` turned; the angles are computed in float32."""
        turned, still = jnp.split(x, [int(x.shape[-1] * self.share)], axis=-1)
        sines, cosines = jnp.split(
            sinusoidal_positions(positions, turned.shape[-1], base=self.base, interleaved=False)[:, :, None], 2, axis=-1
        )
        first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
        parts = first * cosines - second * sines, second * cosines + first * sines
        return jnp.concatenate([*(part.astype(x.dtype) for part in parts), still], axis=-1)


class LearnedPositions(nnx.Module):
    """A learned vector for each position from 0 to length - 1."""

    def __init__(
        self,
        length: int,
        dim: int,
        *,
        embedding_init: Initializer = normal_init(0.02),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.embedding = nnx.Param(embedding_init(rngs.params(), (length, dim), param_dtype))
        self.dtype = dtype

    def __call__(self, positions: Int[Array, "batch length"] | int) -> Float[Array, "#batch length dim"]:
        """The vectors of `positions`; an int n stands for positions 0 ... n - 1 of every row.

        A position beyond the table gives NaN, as JAX cannot raise while running; the caller checks before tracing.
        """
        table = self.table()
        if isinstance(positions, int):
            if positions > table.shape[0]:
                raise ValueError(f"{positions} positions are needed but the table has {table.shape[0]}")
            vectors = table[None, :positions]
        else:
            vectors = constrain(take_rows(table, positions), BATCH)
        return vectors if self.dtype is None else vectors.astype(self.dtype)

    def table(self) -> Float[Array, "length dim"]:
        """All vectors, whole on every device of a mesh."""
        return constrain(self.embedding[...])


def extend_positions(table: Float[Array, "length dim"], length: int, *, prefix: int = 0) -> Float[Array, "new dim"]:
    """A table of learned positions with `length` of them after the first `prefix` rows: the first ones if it has more;
    otherwise they begin again after the last one (Beltagy et al. 2020, Longformer, section 5)."""
    held = table.shape[0] - prefix
    return jnp.concatenate([table[:prefix], table[prefix:][jnp.arange(length) % held]])


def sinusoidal_grid(height: int, width: int, dim: int, *, base: float = 10_000.0) -> Float[Array, "places dim"]:
    """Sines and cosines of the columns, then of the rows, of a grid in reading order (Beyer et al. 2022, "Better plain
    ViT baselines for ImageNet-1k"): four parts of dim / 4 wave lengths each, from 2 pi to `base` * 2 pi."""
    if dim % 4 or dim < 8:
        raise ValueError(f"sinusoidal positions on a grid need a dim that 4 divides, of at least 8, not {dim}")
    frequencies = base ** -(np.arange(dim // 4) / (dim // 4 - 1))
    rows, columns = np.mgrid[:height, :width].reshape(2, -1, 1) * frequencies
    parts = (np.sin(columns), np.cos(columns), np.sin(rows), np.cos(rows))
    return jnp.asarray(np.concatenate(parts, axis=-1), jnp.float32)


Resampling = Literal["bicubic", "bicubic_antialias", "bilinear", "corners"]
"""How a grid of vectors is resized: PyTorch's bicubic (Hugging Face's ViT and DeiT), the same with antialias (timm),
PyTorch's bilinear, or linear between aligned corners (Google's own ViT)."""


def check_resampling(name: str) -> str:
    """`name`, or a ValueError that lists the ways there are."""
    if name not in get_args(Resampling):
        raise ValueError(f"unknown resampling {name!r}; there are {', '.join(get_args(Resampling))}")
    return name


def resize_positions(
    table: Float[Array, "length dim"],
    old: tuple[int, int],
    new: tuple[int, int],
    *,
    prefix: int = 0,
    how: Resampling = "bicubic",
) -> Float[Array, "new_length dim"]:
    """Position vectors of a grid of `old` (height, width) places, in reading order, for a grid of `new` ones.

    The first `prefix` vectors belong to tokens that are not on the grid, such as a class token, and stay as they are.
    The same size gives the table back. Each direction is resized by a matrix, computed while tracing.
    """
    check_resampling(how)
    height, width = old
    if table.shape[0] != prefix + height * width:
        raise ValueError(
            f"a table of {table.shape[0]} positions is not one of {prefix} + {height} x {width} = "
            f"{prefix + height * width}"
        )
    if min(new) < 1:
        raise ValueError(f"a grid of {new[0]} x {new[1]} has no place")
    if old == new:
        return table
    grid = table[prefix:].astype(jnp.float32).reshape(height, width, -1)
    rows, columns = (_resampling_matrix(*sizes, how) for sizes in zip(old, new, strict=True))
    grid = jnp.einsum("ri,cj,ijd->rcd", rows, columns, grid, precision="highest").reshape(new[0] * new[1], -1)
    return jnp.concatenate([table[:prefix], grid.astype(table.dtype)])


def _resampling_matrix(old: int, new: int, how: Resampling) -> np.ndarray:
    """(new, old) weights of one direction."""
    scale = old / new
    places = (np.arange(new) + 0.5) * scale - 0.5
    stretch = 1.0
    if how == "corners":
        places = np.linspace(0, old - 1, new) if new > 1 else np.zeros(1)
    if how == "bicubic_antialias":
        stretch = max(scale, 1.0)
    reach = int(np.ceil(2 * stretch)) + 1
    neighbours = np.floor(places)[:, None] + np.arange(-reach, reach + 1)
    distance = np.abs(neighbours - places[:, None]) / stretch
    if how.startswith("bicubic"):
        weights = _cubic(distance, -0.5 if how == "bicubic_antialias" else -0.75)
    else:
        weights = np.maximum(1 - distance, 0)
    if how == "bicubic_antialias":  # what lies outside does not count; otherwise the border goes on
        weights = np.where((neighbours >= 0) & (neighbours < old), weights, 0)
        weights = weights / weights.sum(axis=1, keepdims=True)
    matrix = np.zeros((new, old))
    rows = np.broadcast_to(np.arange(new)[:, None], neighbours.shape)
    np.add.at(matrix, (rows, np.clip(neighbours, 0, old - 1).astype(int)), weights)
    return matrix.astype(np.float32)


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """The cubic convolution kernel (Keys 1981)."""
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def check_buckets(buckets: int, max_distance: int, *, bidirectional: bool) -> None:
    """ValueError unless `RelativePositionBias` can be built of so many buckets."""
    exact = buckets // 2 // (2 if bidirectional else 1)
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"relative positions: buckets={buckets} with max_distance={max_distance} leave no bucket for larger offsets"
        )


class RelativePositionBias(nnx.Module):
    """A learned number for each head and bucket of offsets, added to the scores of attention (Raffel et al. 2020, T5).

    Half of the buckets (of each direction, where keys on both sides are looked at) are one offset each from 0 on; the
    other half grow in width by a constant factor up to `max_distance`, and the last one holds all beyond.
    """

    def __init__(
        self,
        heads: int,
        *,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool,
        embedding_init: Initializer = normal_init(0.02),
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_buckets(buckets, max_distance, bidirectional=bidirectional)
        self.max_distance, self.bidirectional = max_distance, bidirectional
        self.embedding = nnx.Param(embedding_init(rngs.params(), (buckets, heads), param_dtype))

    def __call__(self, q: int, k: int, *, offset: int | Int[Array, ""] = 0) -> Float[Array, "1 heads q k"]:
        """What `attend` takes as `bias`, for `q` queries of which the first stands at index `offset` of `k` keys."""
        table = self.embedding[...]
        distance = jnp.arange(k)[None] - (jnp.arange(q)[:, None] + offset)
        return jnp.moveaxis(table[self.bucket(distance)], -1, 0)[None]

    def bucket(self, distance: Int[Array, "*lead"]) -> Int[Array, "*lead"]:
        """The bucket of key index - query index."""
        count, first = self.embedding.shape[0], 0
        if self.bidirectional:
            count //= 2
            first = jnp.where(distance > 0, count, 0)
            distance = jnp.abs(distance)
        else:
            distance = jnp.maximum(-distance, 0)
        exact = count // 2
        # In float32, as the reference computes it: the borders of the wide buckets depend on the rounding.
        growth = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / np.log(self.max_distance / exact)
        wide = exact + (growth * (count - exact)).astype(jnp.int32)
        return first + jnp.where(distance < exact, distance, jnp.minimum(wide, count - 1))
