"""GPT-2 and GPT-3: decoders with pre-norm layers and learned positions, or others.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; Brown et al. 2020, "Language Models are
Few-Shot Learners" (table 2.1). Numbers equal those of Hugging Face's GPT-2.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from transformers_jax.models.base import TextConfig, TransformerConfig
from transformers_jax.models.output import Cache, ModelOutput, check_capture, check_ids
from transformers_jax.nn import (
    LearnedPositions,
    RelativePositionBias,
    Rotary,
    Stack,
    TokenEmbedding,
    dropout,
    normal_init,
    positions_from_mask,
    positions_from_segments,
    sinusoidal_positions,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.linear import NORMS
from transformers_jax.nn.pooling import Pooling
from transformers_jax.nn.positions import check_buckets
from transformers_jax.nn.stack import Unstacked

Positions = Literal["learned", "sinusoidal", "rotary", "relative"]
POSITIONS = get_args(Positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(TransformerConfig):
    """What the decoder below reads of a configuration, whether its tokens are of texts or of pictures."""

    embedding_dropout: float = 0.1
    """Dropout on the embeddings."""
    positions: Positions = "learned"
    """learned, sinusoidal: added to the embeddings. rotary: queries and keys are turned. relative: a bias on the scores
    by bucket of distance. All but the learned ones go on beyond the longest text of the training."""
    rotary_base: float = 10_000.0
    """The longest wave of rotary positions is 2 pi times this."""
    rotary_share: float = 1.0
    """The share of each head that they turn."""
    relative_buckets: int = 32
    """Buckets of relative positions."""
    relative_max_distance: int = 128
    """The distance from which on all are one bucket."""

    norm_type: ClassVar[str] = "layer"
    decodes: ClassVar[bool] = True
    classifier_bias: ClassVar[bool] = False
    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*TransformerConfig.RUN_FIELDS, "embedding_dropout")

    def __post_init__(self):
        super().__post_init__()
        self.check_rates("embedding_dropout")
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is not one of {', '.join(POSITIONS)}")
        if self.rotary is not None:
            self.rotary.check(self.dim // self.heads)
        if self.positions == "sinusoidal" and self.dim % 2:
            raise ValueError(f"positions='sinusoidal' needs an even dim, not {self.dim}")
        if self.positions == "relative":
            check_buckets(self.relative_buckets, self.relative_max_distance, bidirectional=False)

    @property
    def rotary(self) -> Rotary | None:
        """What turns queries and keys, if anything does."""
        return Rotary(self.rotary_base, self.rotary_share) if self.positions == "rotary" else None

    def check_vocabulary(self) -> int:
        """The number of tokens that are read."""
        raise NotImplementedError

    @property
    def places(self) -> int:
        """The number of positions that have a vector."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        return self.places


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
    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*TextConfig.RUN_FIELDS, "embedding_dropout")

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
        self.positions = self.relative = nnx.data(None)
        if config.positions == "learned":
            self.positions = LearnedPositions(config.places, config.dim, **options)
        elif config.positions == "relative":
            self.relative = RelativePositionBias(
                config.heads,
                buckets=config.relative_buckets,
                max_distance=config.relative_max_distance,
                bidirectional=False,
                embedding_init=normal_init(config.init_std),
                param_dtype=jnp.dtype(config.param_dtype),
                rngs=rngs,
            )
        output_init = normal_init(config.init_std / (2 * config.depth) ** 0.5)
        patterns = config.read_patterns("patterns", config.depth, decodes=True)
        cycle = config.cycle(
            patterns, norm="pre", norm_type=config.norm_type, rotary=config.rotary, output_init=output_init
        )
        self.stack = Stack(cycle, config.depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.goes_by_places = not all(pattern.relative for pattern in patterns)
        self.norm = NORMS[config.norm_type](config.dim, epsilon=config.norm_epsilon, **config.types, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        positions: Int[Array, "batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        cache: Cache | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states of `input_ids`.

        `attention_mask` is 1 for tokens and 0 for padding, on either side; positions count its ones. With `cache` the
        tokens follow those in the cache and may be any chunk of the sequence. `segment_ids` tell apart the texts of a
        row, which lie one after the other: they do not see each other, and positions start again. `key` turns dropout
        on. `capture` names what else to return: "hidden_states" and "attention_weights".
        """
        check_capture(capture)
        check_ids(input_ids, self.embedding.embedding.shape[0])
        length = input_ids.shape[1]
        if segment_ids is not None:
            if cache is not None:
                raise ValueError("segment_ids go without a cache")
            positions = positions_from_segments(segment_ids) if positions is None else positions
        as_they_come = positions is None and attention_mask is None and cache is None
        if as_they_come:
            positions = jnp.arange(length)[None]
        elif positions is None:
            ones = jnp.ones_like(input_ids) if attention_mask is None else attention_mask
            seen = 0 if cache is None else jnp.sum(cache.mask, axis=-1, keepdims=True, dtype=jnp.int32)
            # A row may have used up all positions and get only padding from here on: position 0, not beyond.
            positions = jnp.where(ones != 0, positions_from_mask(ones) + seen, 0)
        hidden = self.embedding(input_ids)
        if self.positions is not None and not as_they_come:
            check_ids(positions, self.config.places, name="positions")
        if self.positions is not None:
            hidden = hidden + self.positions(length if as_they_come else positions)
        elif self.config.positions == "sinusoidal":
            hidden = hidden + sinusoidal_positions(positions, self.config.dim).astype(hidden.dtype)

        mask, index = attention_mask, 0
        if cache is not None:
            index = cache.index
            cache = cache.extend(length, attention_mask)
            mask = cache.mask
        places = None
        if self.goes_by_places:
            if segment_ids is not None:
                places = positions_from_segments(segment_ids)
            elif mask is not None:
                places = positions_from_mask((mask != 0).astype(jnp.int32))
        mask = None if mask is None else (mask != 0)[:, None, None, :]

        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(hidden, self.config.embedding_dropout, embedding_key)
        bias = None
        if self.relative is not None:
            bias = self.relative(length, length if cache is None else cache.mask.shape[1], offset=index)

        def apply(layer, hidden, layer_cache, layer_key):
            output = layer(
                hidden,
                mask=mask,
                bias=bias,
                segment_ids=segment_ids,
                places=places,
                positions=positions,
                cache=layer_cache,
                cache_index=index,
                key=layer_key,
                capture=capture,
            )
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
        """An empty cache with `length` slots a row, for calls with `cache=`. Once the layers are unstacked, those of
        local patterns remember no more than they look back."""
        rolling = isinstance(self.stack, Unstacked)
        layers = self.stack.init_state(lambda layer: layer.attention.init_cache(batch, length, rolling=rolling))
        return Cache(layers, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))
