"""How `attend` computes a call: the ways there are, what each of them serves, and which is taken."""

import logging
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from transformers_jax.nn.blockwise import plan
from transformers_jax.nn.patterns import Causal, Full, Pattern
from transformers_jax.nn.sharding import BATCH, TENSOR, axis_size

Implementation = Literal["plain", "blockwise", "xla", "cudnn", "splash"]
"""plain: all scores at once. blockwise: block by block, only those that the pattern allows. xla, cudnn: JAX's
dot_product_attention, the latter fused on NVIDIA GPUs. splash: JAX's Pallas kernel, fused on TPUs."""

SHORTEST_BY_BLOCKS = 1024
"""Shorter sequences are computed whole."""
SPARSE = 0.6
"""The share of the scores below which computing by blocks is faster."""
MOST_SCORES = 1 << 26
"""A device with more scores than these (256 MiB) does not hold them all at once."""
LANES = 128
"""What the lengths of a splash kernel's blocks are multiples of."""


@dataclass(frozen=True)
class Call:
    """What is known of a call of `attend` before it is computed."""

    batch: int
    heads: int
    q: int
    k: int
    head_dim: int
    value_dim: int
    dtype: np.dtype
    pattern: Pattern = Full()
    from_start: bool = True
    """Whether the first query stands at index 0 of the keys."""
    placed: bool = False
    """Whether places that are not the indices matter."""
    bias: bool = False
    dropped: bool = False
    mask: tuple[int, ...] | None = None
    """The shape of the mask, if there is one."""

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.q * self.k


def check_implementation(name: str | None) -> None:
    """ValueError that lists the implementations there are, unless `name` is one of them or None."""
    if name is not None and name not in get_args(Implementation):
        raise ValueError(f"unknown attention implementation {name!r}; there are {', '.join(get_args(Implementation))}")


def choose(call: Call) -> Implementation:
    """How `attend` computes a call when it is not told.

    On a TPU "splash" and on an NVIDIA GPU "cudnn", where it serves (the reason why not is logged once) and no sparse
    pattern makes blocks cheaper; otherwise "blockwise" where a pattern leaves out enough of a long sequence, or there
    are more scores than are to be held at once; and "plain".
    """
    backend = jax.default_backend()
    by_blocks = call.from_start and min(call.q, call.k) >= SHORTEST_BY_BLOCKS
    sparse = call.pattern not in (Full(), Causal()) and not call.placed
    sparse = by_blocks and sparse and plan(call.pattern, call.q, call.k).cost < SPARSE * call.q * call.k
    fused: Implementation | None = {"tpu": "splash", "gpu": "cudnn"}.get(backend)  # type: ignore[assignment]
    if fused == "splash" or (fused == "cudnn" and not sparse):
        if (why := refusal(fused, call)) is None:
            return fused
        _log_fallback(fused, why)
    devices = math.prod(axis_size(name) for name in (*BATCH, TENSOR))
    return "blockwise" if sparse or (by_blocks and call.scores > MOST_SCORES * devices) else "plain"


def refusal(name: Implementation, call: Call) -> str | None:
    """Why an implementation cannot serve a call; None if it can."""
    match name:
        case "plain":
            return None
        case "blockwise":
            return None if call.from_start else "it needs query_offset=0"
        case "xla":
            return _refusal_of_xla(call)
        case "cudnn":
            return _refusal_of_cudnn(call)
        case "splash":
            return _refusal_of_splash(call)


def _refusal_of_xla(call: Call) -> str | None:
    if call.dropped:
        return "it has no dropout"
    if call.dtype == jnp.float16 and jax.default_backend() == "cpu":
        return "it has no float16 on the CPU"  # fails while compiling
    if call.value_dim != call.head_dim:
        return f"it needs values as wide as queries, not {call.value_dim} and {call.head_dim}"
    return None


def _refusal_of_cudnn(call: Call) -> str | None:
    if jax.default_backend() != "gpu":
        return f"the backend is {jax.default_backend()}, not an NVIDIA GPU"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the type is {call.dtype}, not bfloat16 or float16"
    if call.head_dim % 8 or call.head_dim > 128 or call.value_dim != call.head_dim:
        return f"head sizes are {call.head_dim} and {call.value_dim}, not one multiple of 8 up to 128"
    if call.q % 2 or call.k % 2:
        return f"lengths {call.q} and {call.k} are not even"
    if call.dropped:
        return "there is dropout on the weights"
    if call.bias:
        return "there is a bias, whose gradient it does not give for every shape"
    return None


def _refusal_of_splash(call: Call) -> str | None:
    if call.q % LANES or call.k % LANES:
        return f"lengths {call.q} and {call.k} are not multiples of {LANES}"
    if not call.from_start:
        return "the first query does not stand at index 0"
    if call.placed:
        return "its pattern goes by places that differ from row to row"
    if call.dropped:
        return "there is dropout on the weights"
    if call.bias:
        return "there is a bias"
    if call.mask is not None and (call.mask[1] != 1 or call.mask[2] != 1):
        return "the mask is not one over keys"
    if call.dtype == jnp.float16:
        return "the type is float16"
    return None


@cache
def _log_fallback(name: str, reason: str) -> None:
    logging.getLogger(__name__).info("attention does not use the fused %s kernel: %s", name, reason)


def fused_by_xla(
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    value: Float[Array, "batch k kv_heads head_dim"],
    *,
    mask: Bool[Array, "#batch #heads #q #k"] | None,
    bias: Float[Array, "#batch #heads #q #k"] | None,
    is_causal: bool,
    scale: float,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "batch q heads head_dim"]:
    """JAX's dot_product_attention; what it gives a query that sees nothing is not zero."""
    q, k = query.shape[1], key.shape[1]
    # The fused kernels want a mask and a bias of full length; their batch and head axes may be 1.
    full = [None if x is None else jnp.broadcast_to(x, (*x.shape[:2], q, k)) for x in (mask, bias)]
    return jax.nn.dot_product_attention(
        query, key, value, full[1], full[0], scale=scale, is_causal=is_causal, implementation=implementation
    )
