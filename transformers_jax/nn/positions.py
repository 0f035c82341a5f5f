"""Positions of tokens: counted from the attention mask, and their encodings."""

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from transformers_jax.nn.embedding import take_rows
from transformers_jax.nn.linear import normal_init


def positions_from_mask(attention_mask: Int[Array, "batch length"]) -> Int[Array, "batch length"]:
    """0, 1, 2, ... over the tokens whose mask is 1, whichever side the padding is on; 0 for padding in front."""
    return jnp.maximum(jnp.cumsum(attention_mask, axis=-1) - 1, 0)


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
        table = self.embedding[...]
        if isinstance(positions, int):
            if positions > table.shape[0]:
                raise ValueError(f"{positions} positions are needed but the table has {table.shape[0]}")
            vectors = table[None, :positions]
        else:
            vectors = take_rows(table, positions)
        return vectors if self.dtype is None else vectors.astype(self.dtype)
