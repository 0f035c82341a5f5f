"""JAX's fused attention kernel for TPUs, by patterns."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.kernels import LANES
from transformers_jax.nn.patterns import Pattern
from transformers_jax.nn.sharding import BATCH, TENSOR, fitting_axes


def splash(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    value: Float[Array, "batch k kv_heads value_dim"],
    *,
    mask: Bool[Array, "#batch 1 1 #k"] | None,
    segment_ids: Int[Array, "batch k"] | None,
    pattern: Pattern,
    scale: float,
) -> Float[Array, "batch q heads value_dim"]:
    """JAX's Pallas kernel for TPUs (interpreted elsewhere, which is slow); what it gives a query that sees nothing is
    not zero. On a mesh each device computes its examples and heads."""
    (batch, q), k, value_dim = query.shape[:2], key.shape[1], value.shape[-1]
    of_queries = of_keys = None
    if segment_ids is not None or mask is not None:
        of_queries = jnp.zeros((batch, q), jnp.int32) if segment_ids is None else segment_ids.astype(jnp.int32)
        of_keys = jnp.zeros((batch, k), jnp.int32) if segment_ids is None else of_queries
        if mask is not None:  # what is hidden is of a segment of its own
            of_keys = jnp.where(mask[:, 0, 0], of_keys, jnp.iinfo(jnp.int32).min)

    def compute(query, key, value, of_queries, of_keys):
        kernel = _splash_kernel(pattern, query.shape[2], q, k, jax.default_backend() != "tpu")

        def of_row(query, key, value, of_queries, of_keys):
            ids = None if of_queries is None else splash_attention_kernel.SegmentIds(of_queries, of_keys)
            output = kernel(query, key, value, segment_ids=ids)
            assert isinstance(output, jax.Array)  # it would be a pair if we asked for more
            return output

        return jax.vmap(of_row)(query, key, value, of_queries, of_keys)

    def widen(x: Array) -> Array:
        """(batch, heads, length, width up to a multiple of the lanes)"""
        return jnp.swapaxes(jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[-1] % LANES)]), 1, 2)

    scaled = (query.astype(jnp.float32) * scale).astype(query.dtype)
    arguments = widen(scaled), widen(key), widen(value), of_queries, of_keys
    spread = [fitting_axes(axis, size) for axis, size in ((BATCH, batch), (TENSOR, key.shape[2]))]
    if any(spread):
        rows, whole = PartitionSpec(spread[0] or None), PartitionSpec(spread[0] or None, spread[1] or None)
        specs = tuple(None if x is None else whole if x.ndim == 4 else rows for x in arguments)
        compute = jax.shard_map(compute, in_specs=specs, out_specs=whole, check_vma=False)
    return jnp.swapaxes(compute(*arguments), 1, 2)[..., :value_dim]


def _splash_kernel(pattern: Pattern, heads: int, q: int, k: int, interpret: bool):
    blocks = {}
    for name, length in (("q", q), ("kv", k)):
        size = next(size for size in (512, 256, 128) if length % size == 0)
        blocks |= {f"block_{name}{part}": size for part in ("", "_dkv", "_dq")}
    with jax.ensure_compile_time_eval():
        masks = splash_attention_mask.MultiHeadMask([_Mask(pattern, (q, k))] * heads)
        return splash_attention_kernel.make_splash_mha(
            mask=masks,
            block_sizes=splash_attention_kernel.BlockSizes(**blocks),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


class _Mask(splash_attention_mask.Mask):
    """A pattern as the kernel asks for it: block by block, never whole."""

    def __init__(self, pattern: Pattern, shape: tuple[int, int]):
        self.pattern, self._shape = pattern, shape

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        queries, keys = (np.arange(size)[part] for size, part in zip(self._shape, index, strict=True))
        return np.broadcast_to(self.pattern.allows(queries[:, None], keys[None, :]), (len(queries), len(keys)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mask) and (self.pattern, self._shape) == (other.pattern, other._shape)

    def __hash__(self) -> int:
        return hash((self.pattern, self._shape))
