"""Attention: the one place where it is computed (`attend`), and the module around it (`MultiHeadAttention`)."""

import logging
from functools import cache
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from transformers_jax.nn.cache import BeamKVCache, Index, KVCache
from transformers_jax.nn.dropout import PRNGKey, dropout
from transformers_jax.nn.linear import Linear, normal_init
from transformers_jax.nn.patterns import Causal, Full, Pattern
from transformers_jax.nn.pytree import pytree_dataclass
from transformers_jax.nn.sharding import BATCH, TENSOR, constrain

Implementation = Literal["plain", "xla", "cudnn"]
Mask = Bool[Array, "#batch #heads #q #k"]
Bias = Float[Array, "#batch #heads #q #k"]


def attend(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    value: Float[Array, "batch k kv_heads value_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    pattern: Pattern = Full(),
    query_offset: Index = 0,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKey | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch q heads value_dim"]:
    """Scaled dot-product attention, `softmax(scale * query @ key + bias) @ value` (Vaswani et al. 2017, equation 1).

    A key counts where `pattern` and `mask` (True = may look) both allow it and its bias is not -inf; a query that may
    look at nothing gives zeros, with finite gradients. Scores and softmax are computed in float32. The first query
    stands at index `query_offset` of the keys, which is what patterns go by. `scale` defaults to 1/sqrt(head_dim).
    When kv_heads is smaller than heads, each key head serves a group of consecutive query heads. Dropout acts on the
    weights when `dropout_key` is given. `implementation` forces one way of computing it, otherwise
    `choose_implementation` does; a forced one that cannot serve raises ValueError.
    """
    check_implementation(implementation)
    _check_heads(query, key)
    dropped = dropout_key is not None and dropout_rate > 0.0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    refusal = _fused_refusal(query, key, value, bias=bias, dropped=dropped)
    if implementation is None:
        implementation = choose_implementation(query, key, value, bias=bias, dropped=dropped)
    elif implementation == "cudnn" and refusal:
        raise ValueError(f"implementation='cudnn' cannot serve this call: {refusal}")
    elif implementation == "xla" and dropped:
        raise ValueError("implementation='xla' has no dropout; use 'plain'")
    elif implementation == "xla" and query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        raise ValueError("implementation='xla' has no float16 on the CPU; use 'plain'")  # fails while compiling
    elif implementation == "xla" and value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"implementation='xla' needs values as wide as queries, not {value.shape[-1]} and {query.shape[-1]}; "
            "use 'plain'"
        )

    if implementation == "plain":
        weights = attention_weights(
            query, key, mask=mask, bias=bias, pattern=pattern, query_offset=query_offset, scale=scale
        )
        weights = dropout(weights, dropout_rate, dropout_key)
        # The heads stay in front of the queries until the product is there: asked for in the caller's order, einsum
        # exchanges its factors, which XLA computes more slowly.
        mixed = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), _repeat_heads(value, query))
        return jnp.swapaxes(mixed, 1, 2)

    is_causal = pattern == Causal() and isinstance(query_offset, int) and query_offset == 0
    is_causal = is_causal and query.shape[1] == key.shape[1]
    mask, bias = _combine(query, key, mask, bias, Full() if is_causal else pattern, query_offset)
    q, k = query.shape[1], key.shape[1]
    # The fused kernels want a mask and a bias of full length; their batch and head axes may be 1.
    full = [None if x is None else jnp.broadcast_to(x, (*x.shape[:2], q, k)) for x in (mask, bias)]
    output = jax.nn.dot_product_attention(
        query, key, value, full[1], full[0], scale=scale, is_causal=is_causal, implementation=implementation
    )
    if mask is None:
        return output
    # The mask and the causal flag may leave a query blind only together: padding in front.
    return _zero_blind(output, mask & pattern.mask(q, k) if is_causal else mask)


def attention_weights(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    pattern: Pattern = Full(),
    query_offset: Index = 0,
    scale: float | None = None,
) -> Float[Array, "batch heads q k"]:
    """The weights that `attend` gives the values: float32, rows sum to one, or to zero where nothing may be seen."""
    _check_heads(query, key)
    # Where every query sees at least the first key, no row needs to be zeroed.
    sees_first = pattern == Full() or (pattern == Causal() and isinstance(query_offset, int) and query_offset >= 0)
    blind_rows = mask is not None or bias is not None or not sees_first
    mask, bias = _combine(query, key, mask, bias, pattern, query_offset)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    # The scale goes to the query, the smaller tensor, unless rounding the product to 16 bits would blur the scores.
    scale_query = query.dtype == jnp.float32
    query = query * factor if scale_query else query
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, _repeat_heads(key, query), preferred_element_type=jnp.float32)
    scores = scores if scale_query else scores * factor
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if mask is not None and blind_rows:
        weights = jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0.0)
    return weights


def check_implementation(name: str | None) -> None:
    """ValueError that lists the implementations there are, unless `name` is one of them or None."""
    if name is not None and name not in get_args(Implementation):
        raise ValueError(f"unknown attention implementation {name!r}; there are {', '.join(get_args(Implementation))}")


def choose_implementation(query, key, value, *, bias=None, dropped: bool = False) -> Implementation:
    """How `attend` computes a call when it is not told: "cudnn" on an NVIDIA GPU where it serves, otherwise "plain".

    The reason for not using the fused kernel on a GPU is logged once.
    """
    if jax.default_backend() != "gpu":
        return "plain"
    refusal = _fused_refusal(query, key, value, bias=bias, dropped=dropped)
    if refusal:
        _log_fallback(refusal)
        return "plain"
    return "cudnn"


def _fused_refusal(query, key, value, *, bias, dropped: bool) -> str | None:
    head_dim = query.shape[-1]
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not an NVIDIA GPU"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the type is {query.dtype}, not bfloat16 or float16"
    if head_dim % 8 or head_dim > 128 or value.shape[-1] != head_dim:
        return f"head sizes are {head_dim} and {value.shape[-1]}, not one multiple of 8 up to 128"
    if query.shape[1] % 2 or key.shape[1] % 2:
        return f"lengths {query.shape[1]} and {key.shape[1]} are not even"
    if dropped:
        return "there is dropout on the weights"
    if bias is not None:
        return "there is a bias, whose gradient it does not give for every shape"
    return None


@cache
def _log_fallback(reason: str) -> None:
    logging.getLogger(__name__).info("attention does not use the fused cuDNN kernel: %s", reason)


def _check_heads(query, key) -> None:
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")


def _repeat_heads(x, query):
    group = query.shape[2] // x.shape[2]
    return x if group == 1 else jnp.repeat(x, group, axis=2)


def _combine(query, key, mask, bias, pattern: Pattern, query_offset: Index):
    """One boolean mask of everything that blocks, and the bias without its -inf (whose softmax would be NaN)."""
    if pattern != Full():
        allowed = pattern.mask(query.shape[1], key.shape[1], offset=query_offset)[None, None]
        mask = allowed if mask is None else mask & allowed
    if bias is not None:
        open_ = bias > -jnp.inf
        mask = open_ if mask is None else mask & open_
        bias = jnp.where(open_, bias, 0.0)
    return mask, bias


def _zero_blind(output, mask):
    sees = jnp.swapaxes(jnp.any(mask, axis=-1), 1, 2)[..., None]  # (batch, q, heads, 1)
    return jnp.where(sees, output, 0.0)


@pytree_dataclass
class AttentionOutput:
    """`hidden` (batch, q, dim); the new `cache`; `weights` (batch, heads, q, k) when asked for, else None."""

    hidden: Array
    cache: KVCache | None = None
    weights: Array | None = None


class MultiHeadAttention(nnx.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): self- and cross-attention, with or without a cache.

    Queries come from `hidden` (dim wide), keys and values from `context` (context_dim wide, default dim) when it is
    given and from `hidden` otherwise. `kv_heads` smaller than `heads` gives grouped-query attention; `scale` is that of
    `attend`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        context_dim: int | None = None,
        use_bias: bool = True,
        scale: float | None = None,
        pattern: Pattern = Full(),
        dropout: float = 0.0,
        implementation: Implementation | None = None,
        kernel_init: Initializer = normal_init(0.02),
        output_init: Initializer | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if head_dim is None:
            if dim % heads:
                raise ValueError(f"dim={dim} is not a multiple of heads={heads}; change one, or give head_dim")
            head_dim = dim // heads
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale, self.pattern, self.dropout = scale, pattern, dropout
        self.implementation: Implementation | None = implementation

        def linear(inner: int, outer: int, init: Initializer) -> Linear:
            return Linear(
                inner, outer, use_bias=use_bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        context_dim = dim if context_dim is None else context_dim
        self.query = linear(dim, heads * head_dim, kernel_init)
        self.key = linear(context_dim, kv_heads * head_dim, kernel_init)
        self.value = linear(context_dim, kv_heads * head_dim, kernel_init)
        self.output = linear(heads * head_dim, dim, kernel_init if output_init is None else output_init)

    def __call__(
        self,
        hidden: Float[Array, "batch q dim"],
        *,
        context: Float[Array, "rows k context_dim"] | KVCache | None = None,
        mask: Bool[Array, "#rows #heads #q #k"] | None = None,
        bias: Bias | None = None,
        cache: KVCache | None = None,
        cache_index: Index = 0,
        key: PRNGKey | None = None,
        capture_weights: bool = False,
    ) -> AttentionOutput:
        """Attend from `hidden` to itself, or to `context`.

        With `cache`, the new keys and values are written to its slots from `cache_index` on and the queries look at
        the whole cache: `mask` is then over slots, and the causal pattern hides the slots not yet written. A KVCache
        as `context` is used as it is (`keys_and_values` makes one): a decoder projects its encoder's output once.

        A `context` of fewer rows serves several consecutive rows of `hidden` each (beams of one source, one token of
        each), without being copied for them.
        """
        query = self._heads(self.query(hidden), self.heads)
        if isinstance(context, KVCache):
            keys_values = context
        else:
            keys_values = self.keys_and_values(hidden if context is None else context)
        pattern, offset = self.pattern, 0
        if cache is not None:
            cache = keys_values = cache.write(keys_values, cache_index)
            offset = cache_index
        if isinstance(cache, BeamKVCache):
            mask, bias = cache.seen(mask, bias, pattern, offset)
            pattern, offset = Full(), 0
        arguments: dict[str, Any] = dict(mask=mask, bias=bias, pattern=pattern, query_offset=offset, scale=self.scale)
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (keys_values.key, keys_values.value))
        if len(keys) != len(query):  # each serves several consecutive rows
            query = query.reshape(len(keys), -1, *query.shape[2:])
        mixed = attend(
            query,
            keys,
            values,
            dropout_rate=self.dropout,
            dropout_key=key,
            implementation=self.implementation,
            **arguments,
        )
        weights = attention_weights(query, keys, **arguments) if capture_weights else None
        if weights is not None and len(weights) != len(hidden):  # of rows that share a context
            parts = weights.reshape(*weights.shape[:2], -1, hidden.shape[1], weights.shape[-1])
            weights = jnp.swapaxes(parts, 1, 2).reshape(len(hidden), -1, *parts.shape[3:])
        hidden = constrain(self.output(mixed.reshape(*hidden.shape[:2], -1)), BATCH)
        return AttentionOutput(hidden, cache, weights)

    def keys_and_values(self, context: Float[Array, "batch k context_dim"]) -> KVCache:
        """The projected keys and values of `context`."""
        projected = (self._heads(linear(context), self.kv_heads) for linear in (self.key, self.value))
        return KVCache(*(jnp.swapaxes(x, 1, 2) for x in projected))

    def _heads(self, x, heads: int):
        return constrain(x.reshape(*x.shape[:-1], heads, self.head_dim), BATCH, None, TENSOR)
