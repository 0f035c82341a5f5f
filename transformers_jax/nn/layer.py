"""The Transformer layer: attention and MLP, each with a residual connection and a norm."""

from collections.abc import Collection
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.attention import MultiHeadAttention
from transformers_jax.nn.cache import Index, KVCache
from transformers_jax.nn.dropout import PRNGKey, drop_path, dropout, split_key
from transformers_jax.nn.kernels import Implementation
from transformers_jax.nn.linear import NORMS, LayerNorm, RMSNorm, check_norm, normal_init
from transformers_jax.nn.mlp import MLP
from transformers_jax.nn.patterns import Full, Pattern
from transformers_jax.nn.positions import Rotary
from transformers_jax.nn.pytree import pytree_dataclass


@pytree_dataclass
class LayerOutput:
    """`hidden` (batch, length, dim), the new `cache`, and when captured `attention_weights` and
    `cross_attention_weights` (batch, heads, q, k)."""

    hidden: Array
    cache: KVCache | None = None
    attention_weights: Array | None = None
    cross_attention_weights: Array | None = None


class TransformerLayer(nnx.Module):
    """Self-attention, optional cross-attention, and an MLP.

    `norm="pre"` normalises the input of each part (GPT-2, ViT): `x + part(norm(x))`; `norm="post"` the sum (Vaswani et
    al. 2017, BERT): `norm(x + part(x))`. `norm_type` is one of `NORMS`, `gated` that of `MLP`, `attention_scale` the
    `scale` of `attend`. `dropout` acts on the output of each part, `attention_dropout` on the attention weights,
    `mlp_dropout` inside the MLP.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        *,
        norm: Literal["pre", "post"] = "pre",
        norm_type: str = "layer",
        activation: str = "gelu",
        gated: bool = False,
        cross_attention: bool = False,
        context_dim: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        attention_scale: float | None = None,
        pattern: Pattern = Full(),
        rotary: Rotary | None = None,
        implementation: Implementation | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        norm_epsilon: float = 1e-5,
        use_bias: bool = True,
        kernel_init: Initializer = normal_init(0.02),
        output_init: Initializer | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if norm not in ("pre", "post"):
            raise ValueError(f"norm={norm!r} is neither 'pre' nor 'post'")
        self.norm, self.dropout = norm, dropout
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        inits: dict[str, Any] = dict(kernel_init=kernel_init, output_init=output_init, use_bias=use_bias)

        def attention(
            pattern: Pattern, rotary: Rotary | None = None, context_dim: int | None = None
        ) -> MultiHeadAttention:
            return MultiHeadAttention(
                dim,
                heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=attention_scale,
                context_dim=context_dim,
                pattern=pattern,
                rotary=rotary,
                dropout=attention_dropout,
                implementation=implementation,
                **inits,
                **types,
            )

        make_norm = partial(NORMS[check_norm(norm_type)], dim, epsilon=norm_epsilon, **types)
        self.attention = attention(pattern, rotary)
        self.attention_norm = make_norm()
        self.cross_attention = attention(Full(), context_dim=context_dim) if cross_attention else nnx.data(None)
        self.cross_attention_norm = make_norm() if cross_attention else nnx.data(None)
        self.mlp = MLP(dim, mlp_dim, activation=activation, gated=gated, dropout=mlp_dropout, **inits, **types)
        self.mlp_norm = make_norm()

    def __call__(
        self,
        hidden: Float[Array, "batch length dim"],
        *,
        mask: Bool[Array, "#batch #heads #length #slots"] | None = None,
        bias: Float[Array, "#batch #heads #length #slots"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        places: Int[Array, "batch slots"] | None = None,
        positions: Int[Array, "#batch length"] | None = None,
        context: Float[Array, "rows k context_dim"] | KVCache | None = None,
        context_mask: Bool[Array, "#rows #heads #length #k"] | None = None,
        cache: KVCache | None = None,
        cache_index: Index = 0,
        drop_path_rate: float | Float[Array, ""] = 0.0,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> LayerOutput:
        """Run the layer. `mask`, `bias`, `segment_ids`, `places`, `positions`, `cache` and `cache_index` are those of
        `MultiHeadAttention`; `context` is what cross-attention looks at; `drop_path_rate` is how often an example skips
        a part of the layer in training (an argument, since it differs from layer to layer); "attention_weights" in
        `capture` returns the weights of the self-attention, "cross_attention_weights" those of the other."""
        if (self.cross_attention is None) != (context is None):
            raise ValueError("a layer takes `context` if, and only if, it was built with cross_attention=True")
        keys = split_key(key, 6)
        rate = drop_path_rate
        attended = self.attention(
            self._before(self.attention_norm, hidden),
            mask=mask,
            bias=bias,
            segment_ids=segment_ids,
            places=places,
            positions=positions,
            cache=cache,
            cache_index=cache_index,
            key=keys[0],
            capture_weights="attention_weights" in capture,
        )
        hidden = self._after(self.attention_norm, hidden, attended.hidden, rate, keys[1])
        cross_weights = None
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            crossed = self.cross_attention(
                self._before(self.cross_attention_norm, hidden),
                context=context,
                mask=context_mask,
                key=keys[2],
                capture_weights="cross_attention_weights" in capture,
            )
            cross_weights = crossed.weights
            hidden = self._after(self.cross_attention_norm, hidden, crossed.hidden, rate, keys[3])
        transformed = self.mlp(self._before(self.mlp_norm, hidden), key=keys[4])
        hidden = self._after(self.mlp_norm, hidden, transformed, rate, keys[5])
        return LayerOutput(hidden, attended.cache, attended.weights, cross_weights)

    def _before(self, norm: LayerNorm | RMSNorm, hidden: Array) -> Array:
        return norm(hidden) if self.norm == "pre" else hidden

    def _after(self, norm: LayerNorm | RMSNorm, hidden: Array, change: Array, rate: Any, key: PRNGKey | None) -> Array:
        if isinstance(rate, float) and rate == 0.0:
            change = dropout(change, self.dropout, key)
        else:
            keys = split_key(key, 2)
            change = drop_path(dropout(change, self.dropout, keys[0]), rate, keys[1])
        hidden = hidden + change
        return norm(hidden) if self.norm == "post" else hidden
