"""From the hidden states of a sequence to one vector."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.attention import MultiHeadAttention
from transformers_jax.nn.kernels import Implementation
from transformers_jax.nn.linear import LayerNorm, normal_init
from transformers_jax.nn.mlp import MLP

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


def pool_texts(
    hidden: Float[Array, "batch length dim"],
    segment_ids: Int[Array, "batch length"],
    texts: Int[Array, "batch texts"],
    *,
    how: Pooling,
) -> Float[Array, "batch texts dim"]:
    """One vector for each text of packed rows: `pool` over the tokens whose segment is the number in `texts`.

    A number that no token has gives what `pool` gives of a row without tokens.
    """
    return jax.vmap(lambda real: pool(hidden, real, how=how), in_axes=1, out_axes=1)(
        tokens_of_texts(segment_ids, texts)
    )


def tokens_of_texts(
    segment_ids: Int[Array, "batch length"], texts: Int[Array, "batch texts"]
) -> Bool[Array, "batch texts length"]:
    """Which tokens of packed rows are of which text."""
    return segment_ids[:, None, :] == texts[:, :, None]


class AttentionPooling(nnx.Module):
    """One vector for each row, by a learned query that looks at all of its tokens, and an MLP with a residual
    connection (Zhai et al. 2022, "Scaling Vision Transformers"; SigLIP's pooling head)."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        *,
        activation: str = "gelu",
        norm_epsilon: float = 1e-6,
        implementation: Implementation | None = None,
        kernel_init: Initializer = normal_init(0.02),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.query = nnx.Param(kernel_init(rngs.params(), (dim,), param_dtype))
        self.attention = MultiHeadAttention(
            dim, heads, implementation=implementation, kernel_init=kernel_init, **types
        )  # fmt: skip
        self.norm = LayerNorm(dim, epsilon=norm_epsilon, **types)
        self.mlp = MLP(dim, mlp_dim, activation=activation, kernel_init=kernel_init, **types)

    def __call__(
        self,
        hidden: Float[Array, "batch length dim"],
        *,
        mask: Bool[Array, "#batch #heads #one #length"] | None = None,
    ) -> Float[Array, "batch dim"]:
        """The pooled vectors; `mask` is that of `MultiHeadAttention`."""
        query = jnp.broadcast_to(self.query[...].astype(hidden.dtype), (hidden.shape[0], 1, hidden.shape[2]))
        pooled = self.attention(query, context=hidden, mask=mask).hidden
        return (pooled + self.mlp(self.norm(pooled)))[:, 0]
