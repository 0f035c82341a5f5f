"""The encoder-decoder Transformer (Vaswani et al. 2017), of which Marian, T5 and BART are configurations."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from transformers_jax.models.base import TextConfig
from transformers_jax.models.heads import Head, logits_of
from transformers_jax.models.output import Cache, ModelOutput, check_capture
from transformers_jax.models.seq2seq import Seq2SeqBackbone, Seq2SeqConfig
from transformers_jax.nn import (
    KVCache,
    LearnedPositions,
    Linear,
    RelativePositionBias,
    SharedKVCache,
    Stack,
    dropout,
    normal_init,
    positions_from_mask,
    pytree_dataclass,
    sinusoidal_positions,
    split_key,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.linear import NORMS, check_norm
from transformers_jax.nn.positions import check_buckets

Positions = Literal["sinusoidal", "learned", "relative"]


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Seq2SeqConfig, TextConfig):
    """Sizes and details of an encoder-decoder. The defaults are those of the paper's base model."""

    dim: int = 512
    """Width of the hidden states."""
    depth: int = 6
    """Layers of the encoder."""
    heads: int = 8
    """Attention heads; they divide `dim`, unless there is a `head_dim`."""
    decoder_depth: int | None = None
    """Layers of the decoder. None: as many as the encoder has."""
    decoder_patterns: tuple[str, ...] = ()
    """Attention patterns of the decoder's layers, which look at the target; `patterns` are the encoder's."""
    head_dim: int | None = None
    """Width of a head. None is dim / heads."""
    norm: Literal["pre", "post"] = "post"
    """Whether the input or the output of each part of a layer is normalised; with pre, so is that of the last one."""
    norm_type: str = "layer"
    """Which norm: layer or rms."""
    embedding_norm: bool = False
    """Whether what enters the first layer is normalised."""
    activation: str = "relu"
    """Activation of the MLP: gelu (exact), gelu_tanh, gelu_quick, relu, silu or tanh."""
    gated: bool = False
    """Whether the MLP has a second way up, which the activation gates."""
    use_bias: bool = True
    """Whether the dense layers inside have biases."""
    positions: Positions = "sinusoidal"
    """sinusoidal: added, any length; learned: added; relative: a bias on the scores by bucket of distance."""
    interleaved: bool = True
    """Whether sines and cosines take turns, as in the paper; otherwise all sines come first."""
    position_offset: int = 0
    """The place of the first learned position in its table."""
    relative_buckets: int = 32
    """Buckets of relative positions."""
    relative_max_distance: int = 128
    """The distance from which on all are one bucket."""
    relative_per_layer: bool = False
    """Whether each layer has biases of its own; otherwise all layers of a side share them."""
    scale_embedding: bool = True
    """Whether embeddings are multiplied by sqrt(dim)."""
    scale_attention: bool = True
    """Whether scores are divided by sqrt(head_dim)."""
    mlp_dropout: float = 0.0
    """Dropout inside the MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*TextConfig.RUN_FIELDS, "mlp_dropout")
    PATTERN_FIELDS: ClassVar[tuple[str, ...]] = ("patterns", "decoder_patterns")

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("decoder_depth", "head_dim", "relative_buckets")
        self.check_rates("mlp_dropout")
        check_norm(self.norm_type)
        self.read_patterns("decoder_patterns", self.decoder_depth or self.depth, decodes=True)
        if self.positions == "relative":
            check_buckets(self.relative_buckets, self.relative_max_distance, bidirectional=True)
        if self.max_length is None and self.positions == "learned":
            raise ValueError("max_length=None needs positions='sinusoidal' or 'relative'; a learned table has an end")

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    def build(self, *, rngs: nnx.Rngs) -> "EncoderDecoder":
        return EncoderDecoder(self, rngs=rngs)

    def flops_per_example(self, items: int) -> float:
        """Forward and backward, for a source and a target of `items` tokens each: 6 per weight and token, and 12 * dim
        * length per layer and attention, or less where a pattern lets it see less."""
        width, mlp_dim = self.heads * self.head_size, self.mlp_dim or 4 * self.dim
        mlp = (3 if self.gated else 2) * self.dim * mlp_dim
        attention = 4 * self.dim * width
        decoder_depth = self.decoder_depth or self.depth
        weights = self.depth * (attention + mlp) + decoder_depth * (2 * attention + mlp)
        weights += self.dim * (self.target_vocab_size or self.check_vocabulary())
        seen = self.keys_seen("patterns", self.depth, items, decodes=False) + decoder_depth * items
        seen += self.keys_seen("decoder_patterns", decoder_depth, items, decodes=True)
        return 6.0 * weights * items + 12.0 * width * items * seen

    @classmethod
    def _sized(cls, changes: dict[str, Any], **sizes: Any) -> "EncoderDecoderConfig":
        return cls(**sizes | changes)

    @classmethod
    def base(cls, **changes: Any) -> "EncoderDecoderConfig":
        """The paper's base model: 63 M parameters with 37,000 tokens (the paper says 65 M)."""
        return cls._sized(changes)

    @classmethod
    def big(cls, **changes: Any) -> "EncoderDecoderConfig":
        """The paper's big model: 214 M parameters with 37,000 tokens (the paper says 213 M)."""
        return cls._sized(changes, dim=1024, heads=16, dropout=0.3)

    @classmethod
    def marian(cls, **changes: Any) -> "EncoderDecoderConfig":
        """OPUS-MT's models (Tiedemann and Thottingal 2020): base with SiLU, sines first, a bias on the logits."""
        own = dict(activation="silu", interleaved=False, logits_bias=True, eos_id=0)
        return cls._sized(changes, **own)

    @classmethod
    def bart_base(cls, **changes: Any) -> "EncoderDecoderConfig":
        """139 M parameters (Lewis et al. 2020)."""
        return cls._sized(_BART | changes, dim=768, heads=12)

    @classmethod
    def bart_large(cls, **changes: Any) -> "EncoderDecoderConfig":
        """406 M parameters."""
        return cls._sized(_BART | changes, dim=1024, depth=12, heads=16)

    @classmethod
    def t5_small(cls, **changes: Any) -> "EncoderDecoderConfig":
        """60 M parameters (Raffel et al. 2020)."""
        return cls._sized(_T5 | changes)

    @classmethod
    def t5_base(cls, **changes: Any) -> "EncoderDecoderConfig":
        """223 M parameters."""
        return cls._sized(_T5 | changes, dim=768, depth=12, heads=12)

    @classmethod
    def t5_large(cls, **changes: Any) -> "EncoderDecoderConfig":
        """738 M parameters."""
        return cls._sized(_T5 | changes, dim=1024, depth=24, heads=16)

    @classmethod
    def t5_3b(cls, **changes: Any) -> "EncoderDecoderConfig":
        """2.9 B parameters."""
        return cls._sized(_T5 | changes, dim=1024, depth=24, heads=32, head_dim=128, mlp_dim=16384)

    @classmethod
    def t5_11b(cls, **changes: Any) -> "EncoderDecoderConfig":
        """11.3 B parameters."""
        return cls._sized(_T5 | changes, dim=1024, depth=24, heads=128, head_dim=128, mlp_dim=65536)


_BART: dict[str, Any] = dict(
    vocab_size=50265,
    max_length=1024,
    activation="gelu",
    positions="learned",
    position_offset=2,
    embedding_norm=True,
    scale_embedding=False,
    logits_bias=True,
    mlp_dropout=0.1,
    attention_dropout=0.1,
    pad_id=1,
    bos_id=0,
    eos_id=2,
    start_id=2,
)

_T5: dict[str, Any] = dict(
    vocab_size=32128,
    max_length=None,
    norm="pre",
    norm_type="rms",
    norm_epsilon=1e-6,
    use_bias=False,
    positions="relative",
    scale_embedding=False,
    scale_attention=False,
    scale_logits=True,
    mlp_dropout=0.1,
    attention_dropout=0.1,
    pad_id=0,
    eos_id=1,
)


class Side(nnx.Module):
    """An encoder, or a decoder that also looks at one: everything but the token embedding."""

    def __init__(self, config: EncoderDecoderConfig, depth: int, *, decodes: bool, rngs: nnx.Rngs):
        self.config = config
        init, types = normal_init(config.init_std), dict(**config.types, rngs=rngs)
        make_norm = NORMS[config.norm_type]
        self.positions = nnx.data(None)
        if config.positions == "learned":
            places = (config.max_length or 0) + config.position_offset
            self.positions = LearnedPositions(places, config.dim, embedding_init=init, **types)
        self.embedding_norm = nnx.data(None)
        if config.embedding_norm:
            self.embedding_norm = make_norm(config.dim, epsilon=config.norm_epsilon, **types)
        patterns = config.read_patterns("decoder_patterns" if decodes else "patterns", depth, decodes=decodes)
        cycle = config.cycle(
            patterns,
            norm=config.norm,
            norm_type=config.norm_type,
            gated=config.gated,
            use_bias=config.use_bias,
            head_dim=config.head_dim,
            attention_scale=None if config.scale_attention else 1.0,
            mlp_dropout=config.mlp_dropout,
            cross_attention=decodes,
        )
        self.stack = Stack(cycle, depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.goes_by_places = not all(pattern.relative for pattern in patterns)
        self.norm = nnx.data(None)
        if config.norm == "pre":
            self.norm = make_norm(config.dim, epsilon=config.norm_epsilon, **types)
        self.relative = nnx.data(None)
        if config.positions == "relative":

            def make_bias(key: Array) -> RelativePositionBias:
                return RelativePositionBias(
                    config.heads,
                    buckets=config.relative_buckets,
                    max_distance=config.relative_max_distance,
                    bidirectional=not decodes,
                    embedding_init=init,
                    param_dtype=jnp.dtype(config.param_dtype),
                    rngs=nnx.Rngs(key),
                )

            self.relative = make_bias(rngs.params())
            if config.relative_per_layer:
                self.relative = jax.vmap(make_bias)(jax.random.split(rngs.params(), depth))

    def __call__(
        self,
        hidden: Float[Array, "batch length dim"],
        positions: Int[Array, "#batch length"],
        *,
        mask: Array | None,
        context: KVCache | None = None,
        context_mask: Array | None = None,
        cache: Cache | None = None,
        index: int | Array = 0,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> tuple[Array, Any, tuple[Any, Any, Any]]:
        """Hidden states of embedded tokens, the layers' new cache, and what was captured."""
        config, keys = self.config, split_key(key, 3)
        if config.scale_embedding:
            hidden = hidden * jnp.asarray(config.dim**0.5, hidden.dtype)
        if self.positions is not None:
            hidden = hidden + self.positions(positions + config.position_offset)
        elif config.positions == "sinusoidal":
            places = sinusoidal_positions(positions, config.dim, interleaved=config.interleaved)
            hidden = hidden + places.astype(hidden.dtype)
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        hidden = dropout(hidden, config.dropout, keys[0])
        length = hidden.shape[1]
        slots = length if cache is None else cache.mask.shape[1]
        shared = None
        if self.relative is not None and not config.relative_per_layer:
            shared = self.relative(length, slots, offset=index)

        places = None
        if self.goes_by_places and mask is not None:
            places = positions_from_mask(mask[:, 0, 0].astype(jnp.int32))

        def apply(layer, hidden, state, given):
            layer_key, relative, remembered = given
            own, remembered = (None, remembered) if state is None else state
            output = layer(
                hidden,
                mask=mask,
                bias=shared if relative is None else relative(length, slots, offset=index),
                places=places,
                context=remembered,
                context_mask=context_mask,
                cache=own,
                cache_index=index,
                key=layer_key,
                capture=capture,
            )
            kept = (
                hidden if "hidden_states" in capture else None,
                output.attention_weights,
                output.cross_attention_weights,
            )
            return output.hidden, None if state is None else (output.cache, remembered), kept

        layer_keys = None if keys[1] is None else jax.random.split(keys[1], self.stack.depth)
        relative = self.relative if config.relative_per_layer else None
        state = None if cache is None else cache.layers
        hidden, layers, kept = self.stack(apply, hidden, state, (layer_keys, relative, context))
        if self.norm is not None:
            hidden = self.norm(hidden)
        if config.positions == "relative":  # T5 drops what leaves its stacks, too
            hidden = dropout(hidden, config.dropout, keys[2])
        return hidden, layers, kept


class EncoderDecoder(Seq2SeqBackbone):
    """An encoder that reads a source, and a decoder that writes a target while it looks at what the encoder made of it.

    `Seq2SeqLanguageModel(EncoderDecoder(config, rngs=rngs), rngs=rngs)` gives logits, and writes.
    """

    def __init__(self, config: EncoderDecoderConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.encoder = Side(config, config.depth, decodes=False, rngs=rngs)
        self.decoder = Side(config, config.decoder_depth or config.depth, decodes=True, rngs=rngs)

    def encode(
        self,
        input_ids: Int[Array, "batch source"],
        attention_mask: Int[Array, "batch source"] | None = None,
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """The encoder's hidden states."""
        check_capture(capture)
        ones = self.ones(input_ids, attention_mask)
        hidden, _, kept = self.encoder(
            self.embedding(input_ids),
            positions_from_mask(ones),
            mask=None if attention_mask is None else (attention_mask != 0)[:, None, None, :],
            key=key,
            capture=capture,
        )
        return ModelOutput(hidden, hidden_states=kept[0], attention_weights=kept[1])

    def remember(self, hidden: Float[Array, "batch source dim"]) -> Any:
        """What the decoder's layers look at of an encoder's hidden states: keys and values, for each layer."""

        def project(layer):
            projected = layer.cross_attention.keys_and_values(hidden)
            return SharedKVCache(projected.key, projected.value)

        return self.decoder.stack.map(project)

    def decode(
        self,
        input_ids: Int[Array, "rows length"],
        attention_mask: Int[Array, "rows length"] | None = None,
        *,
        context: Any = None,
        context_mask: Int[Array, "batch source"] | None = None,
        cache: Cache | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """The decoder's hidden states of target tokens, which follow those in `cache`.

        `context` is what `remember` gives; a cache that `init_cache` made holds it. Rows of the target may be several
        for each of the source, one after the other (beams).
        """
        check_capture(capture)
        ones = self.ones(input_ids, attention_mask, target=True)
        seen = 0 if cache is None else jnp.sum(cache.mask, axis=-1, keepdims=True, dtype=jnp.int32)
        positions = jnp.where(ones != 0, positions_from_mask(ones) + seen, 0)
        mask, index = attention_mask, 0
        if cache is not None:
            index, cache = cache.index, cache.extend(input_ids.shape[1], attention_mask)
            mask = cache.mask
        hidden, layers, kept = self.decoder(
            self.output_embedding(input_ids),
            positions,
            mask=None if mask is None else (mask != 0)[:, None, None, :],
            context=context,
            context_mask=None if context_mask is None else (context_mask != 0)[:, None, None, :],
            cache=cache,
            index=index,
            key=key,
            capture=capture,
        )
        return ModelOutput(
            hidden,
            cache=None if cache is None else dataclasses.replace(cache, layers=layers),
            hidden_states=kept[0],
            attention_weights=kept[1],
            cross_attention_weights=kept[2],
        )

    def init_cache(self, context: Any, batch: int, length: int) -> Cache:
        """A cache of `length` target tokens a row, none written yet, that holds `context`."""
        stack = self.decoder.stack
        laid_out = not isinstance(stack, Stack)
        empty = stack.init_state(lambda layer: layer.attention.init_cache(batch, length, rolling=laid_out))
        pairs = tuple(zip(empty, context, strict=True)) if laid_out else (empty, context)
        return Cache(pairs, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))


@pytree_dataclass
class Conditioned:
    """A model and the source that it is to write for: it generates like a language model, from the target's start."""

    model: Any
    encoder_hidden: Array
    attention_mask: Array | None

    @property
    def config(self) -> Any:
        """That of the model, with the vocabulary of the target."""
        config = self.model.config
        return dataclasses.replace(config, vocab_size=config.target_vocab_size or config.vocab_size)

    def __call__(
        self,
        input_ids: Int[Array, "rows length"],
        attention_mask: Int[Array, "rows length"] | None = None,
        *,
        cache: Cache,
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Logits of the next target tokens."""
        backbone = self.model.backbone
        output = backbone.decode(input_ids, attention_mask, context_mask=self.attention_mask, cache=cache)
        hidden = output.hidden if logits_to_keep is None else output.hidden[:, -logits_to_keep:]
        return dataclasses.replace(output, logits=self.model.read_out(hidden))

    def init_cache(self, batch: int, length: int) -> Cache:
        """A cache of `length` target tokens a row, with what the decoder looks at of the source."""
        backbone = self.model.backbone
        return backbone.init_cache(backbone.remember(self.encoder_hidden), batch, length)


class Seq2SeqLanguageModel(Head):
    """Next-token logits of the target, on top of an encoder-decoder."""

    def __init__(self, backbone: Seq2SeqBackbone, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        config = backbone.config
        vocab_size = config.target_vocab_size or config.check_vocabulary()
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            init = normal_init(config.init_std)
            self.head = Linear(config.dim, vocab_size, use_bias=False, kernel_init=init, **config.types, rngs=rngs)
        self.bias = nnx.data(None)
        if config.logits_bias:
            self.bias = nnx.Param(jnp.zeros(vocab_size, jnp.dtype(config.param_dtype)))

    def __call__(
        self,
        input_ids: Int[Array, "batch source"],
        attention_mask: Int[Array, "batch source"] | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Logits (batch, length, vocab) in float32 of the token after each of `decoder_input_ids`; `inputs` are the
        backbone's."""
        output = self.backbone(input_ids, attention_mask, **inputs)
        return dataclasses.replace(output, logits=self.read_out(output.hidden))

    def read_out(self, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
        """The logits of the decoder's hidden states, in float32."""
        if self.config.scale_logits:
            hidden = hidden * jnp.asarray(self.config.dim**-0.5, hidden.dtype)
        embedding = self.backbone.output_embedding
        logits = embedding.read_out(hidden) if self.head is None else logits_of(self.head, hidden)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)

    def condition(
        self, input_ids: Int[Array, "batch source"], attention_mask: Int[Array, "batch source"] | None = None
    ) -> Conditioned:
        """The model as it writes for these sources: what `generation` takes, with prompts of `config.start`. The
        encoder runs here, once."""
        return Conditioned(self, self.backbone.encode(input_ids, attention_mask).hidden, attention_mask)
