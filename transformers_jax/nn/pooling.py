"""From the hidden states of a sequence to one vector."""

from typing import Literal, get_args

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Pooling = Literal["first", "last", "mean"]


def check_pooling(name: str) -> str:
    """`name`, or a ValueError that lists the ways there are."""
    if name not in get_args(Pooling):
        raise ValueError(f"unknown pooling {name!r}; there are {', '.join(get_args(Pooling))}")
    return name


def pool(
    hidden: Float[Array, "batch length dim"],
    attention_mask: Int[Array, "batch length"] | Bool[Array, "batch length"] | None = None,
    *,
    how: Pooling,
) -> Float[Array, "batch dim"]:
    """One vector for each row: that of its first or last token, or the mean over its tokens (summed in float32).

    The tokens are those with a mask of 1, wherever padding stands; a row without any gives its first or last place, and
    a mean of zeros.
    """
    check_pooling(how)
    if attention_mask is None:
        if how == "mean":
            return jnp.mean(hidden, axis=1, dtype=jnp.float32).astype(hidden.dtype)
        return hidden[:, 0 if how == "first" else -1]
    real = attention_mask != 0
    if how == "mean":
        total = jnp.sum(hidden * real[..., None], axis=1, dtype=jnp.float32)
        return (total / jnp.maximum(jnp.sum(real, axis=1, keepdims=True), 1)).astype(hidden.dtype)
    index = jnp.argmax(real, axis=1) if how == "first" else real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
    return jnp.take_along_axis(hidden, index[:, None, None], axis=1)[:, 0]
