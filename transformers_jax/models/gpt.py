"""GPT-2 and GPT-3: decoders with learned positions and pre-norm layers.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Brown et al. 2020, "Language Models are
Few-Shot Learners" (table 2.1). Numbers equal those of Hugging Face's GPT-2.
"""

import dataclasses
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from transformers_jax.models.base import ModelConfig
from transformers_jax.models.output import Cache, ModelOutput, check_capture, check_ids
from transformers_jax.nn import (
    Causal,
    KVCache,
    LayerNorm,
    LearnedPositions,
    Stack,
    TokenEmbedding,
    TransformerLayer,
    dropout,
    normal_init,
    positions_from_mask,
)
from transformers_jax.nn.attention import Implementation, check_implementation
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.mlp import check_activation
from transformers_jax.nn.pooling import Pooling
from transformers_jax.nn.stack import check_remat


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """Sizes and numbers of a GPT. An impossible combination is a ValueError when it is built."""

    vocab_size: int | None = 50257
    """Number of tokens. None takes the tokenizer's when a training run starts."""
    max_length: int = 1024
    """Longest sequence, prompt and generated text together: the size of the position table."""
    dim: int = 768
    """Width of the hidden states."""
    depth: int = 12
    """Number of layers."""
    heads: int = 12
    """Attention heads; they divide `dim`."""
    mlp_dim: int | None = None
    """Width inside the MLP. None is 4 * dim."""
    activation: str = "gelu_tanh"
    """Activation of the MLP: gelu, gelu_tanh (GPT-2's), gelu_quick, relu, silu or tanh."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer norms."""
    dropout: float = 0.1
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout on the attention weights."""
    embedding_dropout: float = 0.1
    """Dropout on the embeddings."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; output projections start smaller by sqrt(2 * depth)."""
    tie_embeddings: bool = True
    """Read the logits out through the token embedding, as GPT-2 does."""
    bos_id: int | None = None
    """Token that starts a text, if there is one; carried in the checkpoint for generation."""
    eos_id: int | tuple[int, ...] | None = None
    """Token, or tokens, that end a text."""
    pad_id: int | None = None
    """Token that fills up short rows; the attention mask decides what is padding, not this id."""
    remat: str | None = None
    """Recompute layers in the backward pass to save memory: full, dots, dots_no_batch, or None."""
    unroll: int = 1
    """Layers laid out per scan step; the depth of a small model makes it faster on CPU, and slower to compile."""
    attention: Implementation | None = None
    """Force one way of computing attention: plain, xla or cudnn. None chooses by backend."""

    pooling: ClassVar[Pooling] = "last"
    RUN_FIELDS: ClassVar[tuple[str, ...]] = (
        *("dtype", "param_dtype", "classifier_dropout", "remat", "unroll", "attention"),
        *("dropout", "attention_dropout", "embedding_dropout"),
    )

    def __post_init__(self):
        self.check_positive("max_length", "dim", "depth", "heads", "unroll")
        self.check_rates("dropout", "attention_dropout", "embedding_dropout")
        if self.vocab_size is not None:
            self.check_positive("vocab_size")
        if self.mlp_dim is not None:
            self.check_positive("mlp_dim")
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}")
        check_activation(self.activation)
        check_remat(self.remat)
        check_implementation(self.attention)
        self.check_common()

    def build(self, *, rngs: nnx.Rngs) -> "GPT":
        """A model of this configuration, without a head."""
        return GPT(self, rngs=rngs)

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a forward and backward pass for one token in a sequence of `length`: 6 per
        weight of a matrix product, and 12 * depth * dim * length for attention (Chowdhery et al. 2022, appendix B)."""
        mlp_dim = self.mlp_dim or 4 * self.dim
        weights = self.depth * (4 * self.dim**2 + 2 * self.dim * mlp_dim) + self.dim * (self.vocab_size or 0)
        return 6.0 * weights + 12.0 * self.depth * self.dim * length

    @classmethod
    def _sized(cls, changes: dict[str, Any], **sizes: Any) -> "GPTConfig":
        return cls(**(sizes | changes))

    @classmethod
    def gpt2(cls, **changes: Any) -> "GPTConfig":
        """GPT-2 small: 124 M parameters."""
        return cls(**changes)

    @classmethod
    def gpt2_medium(cls, **changes: Any) -> "GPTConfig":
        """355 M parameters."""
        return cls._sized(changes, dim=1024, depth=24, heads=16)

    @classmethod
    def gpt2_large(cls, **changes: Any) -> "GPTConfig":
        """774 M parameters."""
        return cls._sized(changes, dim=1280, depth=36, heads=20)

    @classmethod
    def gpt2_xl(cls, **changes: Any) -> "GPTConfig":
        """1.56 B parameters."""
        return cls._sized(changes, dim=1600, depth=48, heads=25)

    @classmethod
    def gpt3_small(cls, **changes: Any) -> "GPTConfig":
        """GPT-3 125 M: GPT-2's sizes with a context of 2048. (All layers are dense here; the paper makes every second
        one banded and does not give the width of the band.)"""
        return cls._sized(changes, max_length=2048)

    @classmethod
    def gpt3_medium(cls, **changes: Any) -> "GPTConfig":
        """350 M parameters."""
        return cls._sized(changes, max_length=2048, dim=1024, depth=24, heads=16)

    @classmethod
    def gpt3_large(cls, **changes: Any) -> "GPTConfig":
        """760 M parameters."""
        return cls._sized(changes, max_length=2048, dim=1536, depth=24, heads=16)

    @classmethod
    def gpt3_xl(cls, **changes: Any) -> "GPTConfig":
        """1.3 B parameters. The paper's 24 heads of 128 do not make its width of 2048; 16 heads do."""
        return cls._sized(changes, max_length=2048, dim=2048, depth=24, heads=16)

    @classmethod
    def gpt3_2_7b(cls, **changes: Any) -> "GPTConfig":
        """2.7 B parameters."""
        return cls._sized(changes, max_length=2048, dim=2560, depth=32, heads=32)

    @classmethod
    def gpt3_6_7b(cls, **changes: Any) -> "GPTConfig":
        """6.7 B parameters."""
        return cls._sized(changes, max_length=2048, dim=4096, depth=32, heads=32)

    @classmethod
    def gpt3_13b(cls, **changes: Any) -> "GPTConfig":
        """13 B parameters. The paper's width of 5140 is no multiple of its 40 heads of 128; 5120 is."""
        return cls._sized(changes, max_length=2048, dim=5120, depth=40, heads=40)

    @classmethod
    def gpt3_175b(cls, **changes: Any) -> "GPTConfig":
        """175 B parameters."""
        return cls._sized(changes, max_length=2048, dim=12288, depth=96, heads=96)


class GPT(nnx.Module):
    """The GPT decoder: token ids to hidden states. `LanguageModel(GPT(config, rngs=rngs))` gives logits."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        if config.vocab_size is None:
            raise ValueError("vocab_size is None; give a number (a training run takes its tokenizer's)")
        self.config = config
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        init: dict[str, Any] = dict(embedding_init=normal_init(config.init_std))
        self.embedding = TokenEmbedding(config.vocab_size, config.dim, **init, **types, rngs=rngs)
        self.positions = LearnedPositions(config.max_length, config.dim, **init, **types, rngs=rngs)
        make_layer = partial(
            TransformerLayer,
            config.dim,
            config.heads,
            config.mlp_dim or 4 * config.dim,
            norm="pre",
            activation=config.activation,
            pattern=Causal(),
            implementation=config.attention,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            norm_epsilon=config.norm_epsilon,
            kernel_init=normal_init(config.init_std),
            output_init=normal_init(config.init_std / (2 * config.depth) ** 0.5),
            **types,
        )
        self.stack = Stack(make_layer, config.depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **types, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        positions: Int[Array, "batch length"] | None = None,
        cache: Cache | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states of `input_ids`.

        `attention_mask` is 1 for tokens and 0 for padding, on either side; positions count its ones. With `cache` the
        tokens follow those in the cache and may be any chunk of the sequence. `key` turns dropout on. `capture` names
        what else to return: "hidden_states" and "attention_weights".
        """
        check_capture(capture)
        check_ids(input_ids, self.embedding.embedding.shape[0])
        length = input_ids.shape[1]
        if attention_mask is None and cache is None and positions is None:
            placed = self.positions(length)
        else:
            if positions is None:
                ones = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
                seen = 0 if cache is None else jnp.sum(cache.mask, axis=-1, keepdims=True, dtype=jnp.int32)
                # A row may have used up all positions and get only padding from here on: position 0, not beyond.
                positions = jnp.where(ones != 0, positions_from_mask(ones) + seen, 0)
            placed = self.positions(positions)

        mask, index = attention_mask, 0
        if cache is not None:
            index = cache.index
            cache = cache.extend(length, attention_mask)
            mask = cache.mask
        mask = None if mask is None else (mask != 0)[:, None, None, :]

        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(self.embedding(input_ids) + placed, self.config.embedding_dropout, embedding_key)

        def apply(layer, hidden, layer_cache, layer_key):
            output = layer(hidden, mask=mask, cache=layer_cache, cache_index=index, key=layer_key, capture=capture)
            kept = (hidden if "hidden_states" in capture else None, output.attention_weights)
            return output.hidden, output.cache, kept

        layer_keys = None if stack_key is None else jax.random.split(stack_key, self.config.depth)
        hidden, layers, kept = self.stack(apply, hidden, None if cache is None else cache.layers, layer_keys)
        return ModelOutput(
            self.norm(hidden),
            cache=None if cache is None else dataclasses.replace(cache, layers=layers),
            hidden_states=kept[0],
            attention_weights=kept[1],
        )

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache with `length` slots a row, for calls with `cache=`."""
        size = (batch, self.config.heads, length, self.config.dim // self.config.heads)
        layers = self.stack.init_state(lambda: KVCache.zeros(size, jnp.dtype(self.config.dtype)))
        return Cache(layers, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))
