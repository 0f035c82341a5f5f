"""The blocks: import them to build models of your own."""

from transformers_jax.nn.attention import (
    AttentionOutput,
    MultiHeadAttention,
    attend,
    attention_weights,
    choose_implementation,
)
from transformers_jax.nn.cache import BeamKVCache, KVCache, RollingKVCache, SharedKVCache
from transformers_jax.nn.convolution import DepthwiseConvolution
from transformers_jax.nn.dropout import drop_path, dropout, split_key
from transformers_jax.nn.embedding import TokenEmbedding
from transformers_jax.nn.layer import LayerOutput, TransformerLayer
from transformers_jax.nn.linear import LayerNorm, Linear, RMSNorm, normal_init
from transformers_jax.nn.mlp import ACTIVATIONS, MLP
from transformers_jax.nn.patch import PatchEmbedding, to_patches
from transformers_jax.nn.patterns import Causal, Full, Global, Local, Pattern, Random, Strided, parse_pattern
from transformers_jax.nn.pooling import AttentionPooling, Pooling, pool, pool_texts
from transformers_jax.nn.positions import (
    LearnedPositions,
    RelativePositionBias,
    Resampling,
    Rotary,
    extend_positions,
    positions_from_mask,
    positions_from_segments,
    resize_positions,
    sinusoidal_grid,
    sinusoidal_positions,
)
from transformers_jax.nn.pytree import pytree_dataclass
from transformers_jax.nn.sharding import constrain
from transformers_jax.nn.stack import REMAT_POLICIES, Stack, stacked_mask, unstack
from transformers_jax.nn.windows import WindowPositionBias, from_windows, pad_to_windows, shifted_mask, to_windows

__all__ = [
    "ACTIVATIONS",
    "MLP",
    "REMAT_POLICIES",
    "AttentionOutput",
    "AttentionPooling",
    "BeamKVCache",
    "Causal",
    "DepthwiseConvolution",
    "Full",
    "Global",
    "KVCache",
    "LayerNorm",
    "LayerOutput",
    "LearnedPositions",
    "Linear",
    "Local",
    "MultiHeadAttention",
    "PatchEmbedding",
    "Pattern",
    "Pooling",
    "RMSNorm",
    "Random",
    "RelativePositionBias",
    "Resampling",
    "RollingKVCache",
    "Rotary",
    "SharedKVCache",
    "Stack",
    "Strided",
    "TokenEmbedding",
    "TransformerLayer",
    "WindowPositionBias",
    "attend",
    "attention_weights",
    "choose_implementation",
    "constrain",
    "drop_path",
    "dropout",
    "extend_positions",
    "from_windows",
    "normal_init",
    "pad_to_windows",
    "parse_pattern",
    "pool",
    "pool_texts",
    "positions_from_mask",
    "positions_from_segments",
    "pytree_dataclass",
    "resize_positions",
    "shifted_mask",
    "sinusoidal_grid",
    "sinusoidal_positions",
    "split_key",
    "stacked_mask",
    "to_patches",
    "to_windows",
    "unstack",
]
