"""Attention: the one place where it is computed (`attend`), and the module around it (`MultiHeadAttention`)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.blockwise import attend_by_blocks
from transformers_jax.nn.cache import Index, KVCache, RollingKVCache, View
from transformers_jax.nn.dropout import PRNGKey, dropout
from transformers_jax.nn.kernels import (
    Call,
    Implementation,
    check_implementation,
    choose,
    fused_by_xla,
    refusal,
)
from transformers_jax.nn.linear import Linear, normal_init
from transformers_jax.nn.patterns import Causal, Full, Pattern
from transformers_jax.nn.positions import Rotary
from transformers_jax.nn.pytree import pytree_dataclass
from transformers_jax.nn.sharding import BATCH, TENSOR, constrain

Mask = Bool[Array, "#batch #heads #q #k"]
Bias = Float[Array, "#batch #heads #q #k"]


def attend(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    value: Float[Array, "batch k kv_heads value_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    segment_ids: Int[Array, "batch k"] | None = None,
    pattern: Pattern = Full(),
    query_offset: Index = 0,
    places: Int[Array, "batch k"] | None = None,
    scale: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: PRNGKey | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch q heads value_dim"]:
    """Scaled dot-product attention, `softmax(scale * query @ key + bias) @ value` (Vaswani et al. 2017, equation 1).

    A key counts where `pattern` and `mask` (True = may look) both allow it and its bias is not -inf; a query that may
    look at nothing gives zeros, with finite gradients. With `segment_ids`, of as many queries as keys, those of
    different segments do not see each other (packed texts). Scores and softmax are computed in float32.

    Patterns go by the index of the keys, of which the first query stands at `query_offset`; with `places` (padding in
    front, packed texts), those that do not go by distance alone go by these. `scale` defaults to 1/sqrt(head_dim).
    When kv_heads is smaller than heads, each key head serves a group of consecutive query heads. Dropout acts on the
    weights when `dropout_key` is given. `implementation` forces one way of computing it, otherwise
    `choose_implementation` does; a forced one that cannot serve raises ValueError.
    """
    check_implementation(implementation)
    _check_heads(query, key)
    if segment_ids is not None and query.shape[1] != key.shape[1]:
        raise ValueError(f"segment_ids need as many queries as keys, not {query.shape[1]} and {key.shape[1]}")
    if places is None and pattern.longest is not None and key.shape[1] > pattern.longest:
        raise ValueError(f"{pattern}: it was not drawn for {key.shape[1]} keys")
    places = None if pattern.relative else places
    dropped = dropout_key is not None and dropout_rate > 0.0
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    seen: dict[str, Any] = dict(mask=mask, bias=bias, segment_ids=segment_ids, pattern=pattern, places=places)
    call = _call(query, key, value, mask, bias, pattern, query_offset, places, dropped)
    if implementation is None:
        implementation = choose(call)
    elif why := refusal(implementation, call):
        raise ValueError(f"implementation={implementation!r} cannot serve this call: {why}; 'plain' serves every call")

    if implementation == "plain":
        weights = attention_weights(query, key, **seen, query_offset=query_offset, scale=factor)
        weights = dropout(weights, dropout_rate, dropout_key)
        # The heads stay in front of the queries until the product is there: asked for in the caller's order, einsum
        # exchanges its factors, which XLA computes more slowly.
        mixed = jnp.einsum("bhqk,bkhd->bhqd", weights.astype(value.dtype), _repeat_heads(value, query))
        return jnp.swapaxes(mixed, 1, 2)

    if implementation == "blockwise":
        of_part = partial(attend, scale=factor, dropout_rate=dropout_rate, implementation="plain")
        return attend_by_blocks(of_part, query, key, value, **seen, dropout_key=dropout_key if dropped else None)

    if implementation == "splash":
        from transformers_jax.nn.splash import splash  # takes a while to import

        output = splash(query, key, value, mask=mask, segment_ids=segment_ids, pattern=pattern, scale=factor)
        if mask is None and pattern in (Full(), Causal()):
            return output
        return _zero_blind(output, _combine(query, key, **seen, query_offset=0)[0])

    is_causal = pattern == Causal() and call.from_start and call.q == call.k
    combined, bias = _combine(
        query, key, **seen | dict(pattern=Full() if is_causal else pattern), query_offset=query_offset
    )
    output = fused_by_xla(
        query, key, value, mask=combined, bias=bias, is_causal=is_causal, scale=factor, implementation=implementation
    )
    if combined is None:
        return output
    # The mask and the causal flag may leave a query blind only together: padding in front.
    return _zero_blind(output, combined & pattern.mask(call.q, call.k) if is_causal else combined)


def attention_weights(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    segment_ids: Int[Array, "batch k"] | None = None,
    pattern: Pattern = Full(),
    query_offset: Index = 0,
    places: Int[Array, "batch k"] | None = None,
    scale: float | None = None,
) -> Float[Array, "batch heads q k"]:
    """The weights that `attend` gives the values: float32, rows sum to one, or to zero where nothing may be seen."""
    _check_heads(query, key)
    # Where every query sees at least the first key, no row needs to be zeroed.
    sees_first = pattern == Full() or (pattern == Causal() and isinstance(query_offset, int) and query_offset >= 0)
    blind_rows = mask is not None or bias is not None or segment_ids is not None or not sees_first
    mask, bias = _combine(query, key, mask, bias, segment_ids, pattern, query_offset, places)
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


def choose_implementation(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    pattern: Pattern = Full(),
    query_offset: Index = 0,
    places: Any = None,
    dropped: bool = False,
) -> Implementation:
    """How `attend` computes a call when it is not told; shapes and types (`jax.ShapeDtypeStruct`) are enough."""
    return choose(_call(query, key, value, mask, bias, pattern, query_offset, places, dropped))


def _call(query, key, value, mask, bias, pattern: Pattern, query_offset: Index, places, dropped: bool) -> Call:
    (batch, q, heads, head_dim), k = query.shape, key.shape[1]
    return Call(
        batch=batch,
        heads=heads,
        q=q,
        k=k,
        head_dim=head_dim,
        value_dim=value.shape[-1],
        dtype=np.dtype(query.dtype),
        pattern=pattern,
        from_start=isinstance(query_offset, int) and query_offset == 0,
        placed=places is not None and not pattern.relative,
        bias=bias is not None,
        dropped=dropped,
        mask=None if mask is None else tuple(mask.shape),
    )


def _check_heads(query, key) -> None:
    if query.shape[2] % key.shape[2]:
        raise ValueError(f"{query.shape[2]} query heads are not a multiple of {key.shape[2]} key heads")


def _repeat_heads(x, query):
    group = query.shape[2] // x.shape[2]
    return x if group == 1 else jnp.repeat(x, group, axis=2)


def _combine(query, key, mask, bias, segment_ids, pattern: Pattern, query_offset: Index, places):
    """One boolean mask of everything that blocks, and the bias without its -inf (whose softmax would be NaN)."""
    if pattern != Full():
        allowed = View(pattern=pattern, query_offset=query_offset, places=places).allowed(query.shape[1], key.shape[1])
        mask = allowed if mask is None else mask & allowed
    if segment_ids is not None:
        same = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
        mask = same if mask is None else mask & same
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
        rotary: Rotary | None = None,
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
        if rotary is not None:
            rotary.check(head_dim)
        self.scale, self.pattern, self.rotary, self.dropout = scale, pattern, rotary, dropout
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
        segment_ids: Int[Array, "batch q"] | None = None,
        places: Int[Array, "batch k"] | None = None,
        positions: Int[Array, "#batch q"] | None = None,
        cache: KVCache | None = None,
        cache_index: Index = 0,
        key: PRNGKey | None = None,
        capture_weights: bool = False,
    ) -> AttentionOutput:
        """Attend from `hidden` to itself, or to `context`.

        With `cache`, the new keys and values are written to its slots from `cache_index` on and the queries look at
        the whole cache: `mask` is then over slots, and the causal pattern hides the slots not yet written. A KVCache
        as `context` is used as it is (`keys_and_values` makes one): a decoder projects its encoder's output once.

        `segment_ids` and `places` are those of `attend`, the latter of all slots. Self-attention with rotary positions
        needs the `positions` of the queries.

        A `context` of fewer rows serves several consecutive rows of `hidden` each (beams of one source, one token of
        each), without being copied for them.
        """
        query = self._heads(self.query(hidden), self.heads)
        if isinstance(context, KVCache):
            keys_values = context
        else:
            keys_values = self.keys_and_values(hidden if context is None else context)
        if self.rotary is not None and context is None:
            if positions is None:
                raise ValueError("rotary positions need `positions`")
            query = self.rotary(query, positions)
            turned = self.rotary(jnp.swapaxes(keys_values.key, 1, 2), positions)
            keys_values = KVCache(jnp.swapaxes(turned, 1, 2), keys_values.value)
        view = View(mask, bias, self.pattern, 0 if cache is None else cache_index, places)
        if cache is not None:
            cache, keys_values, view = cache.read(keys_values, view)
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (keys_values.key, keys_values.value))
        if len(keys) != len(query):  # each serves several consecutive rows
            query = query.reshape(len(keys), -1, *query.shape[2:])
        arguments: dict[str, Any] = dict(vars(view), scale=self.scale)
        mixed = attend(
            query,
            keys,
            values,
            segment_ids=segment_ids,
            dropout_rate=self.dropout,
            dropout_key=key,
            implementation=self.implementation,
            **arguments,
        )
        weights = None
        if capture_weights:
            weights = attention_weights(query, keys, segment_ids=segment_ids, **arguments)
        if weights is not None and len(weights) != len(hidden):  # of rows that share a context
            parts = weights.reshape(*weights.shape[:2], -1, hidden.shape[1], weights.shape[-1])
            weights = jnp.swapaxes(parts, 1, 2).reshape(len(hidden), -1, *parts.shape[3:])
        hidden = constrain(self.output(mixed.reshape(*hidden.shape[:2], -1)), BATCH)
        return AttentionOutput(hidden, cache, weights)

    def init_cache(self, batch: int, length: int, *, rolling: bool = False) -> KVCache:
        """An empty cache for `length` tokens a row; if `rolling`, of the newest ones only where the pattern looks no
        further back."""
        kind, slots, reach = KVCache, length, self.pattern.reach
        if rolling and reach is not None and reach + 1 < length:
            kind, slots = RollingKVCache, reach + 1
        dtype = self.key.dtype or self.key.kernel.dtype
        return kind.zeros((batch, self.kv_heads, slots, self.head_dim), dtype)

    def keys_and_values(self, context: Float[Array, "batch k context_dim"]) -> KVCache:
        """The projected keys and values of `context`."""
        projected = (self._heads(linear(context), self.kv_heads) for linear in (self.key, self.value))
        return KVCache(*(jnp.swapaxes(x, 1, 2) for x in projected))

    def _heads(self, x, heads: int):
        return constrain(x.reshape(*x.shape[:-1], heads, self.head_dim), BATCH, None, TENSOR)
