"""GPT-2 and GPT-3: decoders with learned positions and pre-norm layers.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Brown et al. 2020, "Language Models are
Few-Shot Learners" (table 2.1). Numbers equal those of Hugging Face's GPT-2.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from transformers_jax.models.base import TextConfig, TransformerConfig
from transformers_jax.models.output import Cache, ModelOutput, check_capture, check_ids
from transformers_jax.nn import (
    Causal,
    KVCache,
    LearnedPositions,
    Stack,
    TokenEmbedding,
    dropout,
    normal_init,
    positions_from_mask,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.linear import NORMS
from transformers_jax.nn.pooling import Pooling


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """What the decoder below reads of a configuration, whether its tokens are of texts or of pictures."""

    embedding_dropout: float = 0.1
    """Dropout on the embeddings."""

    norm_type: ClassVar[str] = "layer"
    classifier_bias: ClassVar[bool] = False
    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*TransformerConfig.RUN_FIELDS, "embedding_dropout")

    def __post_init__(self):
        super().__post_init__()
        self.check_rates("embedding_dropout")

    def check_vocabulary(self) -> int:
        """The number of tokens that are read."""
        raise NotImplementedError

    @property
    def places(self) -> int:
        """The number of positions that have a vector."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GPTConfig(TextConfig, DecoderConfig):
    """Sizes and numbers of a GPT. An impossible combination is a ValueError when it is built."""

    vocab_size: int | None = 50257
    """Number of tokens. None takes the tokenizer's when a training run starts."""
    max_length: int = 1024
    """Longest sequence, prompt and generated text together: the size of the position table."""
    activation: str = "gelu_tanh"
    """Activation of the MLP: gelu, gelu_tanh (GPT-2's), gelu_quick, relu, silu or tanh."""

    pooling: ClassVar[Pooling] = "last"

    @property
    def places(self) -> int:
        """One for each token of the longest sequence."""
        return self.max_length

    def build(self, *, rngs: nnx.Rngs) -> "GPT":
        """A model of this configuration, without a head."""
        return GPT(self, rngs=rngs)

    def flops_per_token(self, length: int) -> float:
        """Those of the layers, and 6 per weight of the output layer."""
        return self.layer_flops_per_token(length) + 6.0 * self.dim * (self.vocab_size or 0)

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

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(embedding_init=normal_init(config.init_std), **config.types, rngs=rngs)
        self.embedding = TokenEmbedding(config.check_vocabulary(), config.dim, **options)
        self.positions = LearnedPositions(config.places, config.dim, **options)
        output_init = normal_init(config.init_std / (2 * config.depth) ** 0.5)
        make_layer = config.layer(norm="pre", norm_type=config.norm_type, pattern=Causal(), output_init=output_init)
        self.stack = Stack(make_layer, config.depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.norm = NORMS[config.norm_type](config.dim, epsilon=config.norm_epsilon, **config.types, rngs=rngs)

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
