"""What the Transformer replaced: recurrent encoder-decoders with one fixed context vector (Sutskever et al. 2014, Cho
et al. 2014), and with attention (Bahdanau et al. 2015, Luong et al. 2015)."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.models.base import ModelConfig
from transformers_jax.models.output import Cache, ModelOutput, check_capture
from transformers_jax.models.seq2seq import Seq2SeqBackbone, Seq2SeqConfig
from transformers_jax.nn import Linear, constrain, dropout, normal_init, pytree_dataclass, split_key
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.sharding import BATCH

Score = Literal["additive", "dot"]
CELLS = {"gru": nnx.GRUCell, "lstm": nnx.OptimizedLSTMCell}
"""Recurrent cells by name; their last state is what they give, (batch, width)."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSeq2SeqConfig(Seq2SeqConfig):
    """Sizes and details of a recurrent encoder-decoder."""

    dim: int = 512
    """Width of the embeddings, the states of every layer and the context."""
    depth: int = 1
    """Layers of the encoder, and of the decoder."""
    cell: Literal["gru", "lstm"] = "gru"
    """What a layer is made of: gru or lstm."""
    attention_score: Score | None = "additive"
    """How the decoder scores the encoder's states at each step: additive (Bahdanau et al. 2015) or dot (Luong et al.
    2015). None: it has one vector of all of the source, the encoder's last state (Cho et al. 2014)."""
    bidirectional: bool = True
    """Whether half of each layer of the encoder reads from the end."""
    dropout: float = 0.2
    """Dropout of embeddings, between layers and of what is read out; never from step to step (Zaremba et al. 2014)."""
    init_std: float = 0.05
    """Standard deviation of the initial weights, but for the cells', which are Flax's (orthogonal recurrence)."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*ModelConfig.RUN_FIELDS, "dropout")

    def __post_init__(self):
        self.check_common()
        self.check_positive("dim", "depth")
        self.check_rates("dropout")
        if self.cell not in CELLS:
            raise ValueError(f"unknown cell {self.cell!r}; there are {', '.join(CELLS)}")
        if self.attention_score not in (None, *get_args(Score)):
            raise ValueError(
                f"attention_score={self.attention_score!r} is unknown; there are {', '.join(get_args(Score))} and None"
            )
        if self.bidirectional and self.dim % 2:
            raise ValueError(f"dim={self.dim} must be even: with bidirectional=True half of it reads from the end")

    def build(self, *, rngs: nnx.Rngs) -> "RecurrentSeq2Seq":
        return RecurrentSeq2Seq(self, rngs=rngs)

    def flops_per_example(self, items: int) -> float:
        """Forward and backward, for a source and a target of `items` tokens each: 6 per weight and token, and 12 * dim
        per pair of them for attention."""
        gates = 3 if self.cell == "gru" else 4
        encoder = gates * self.dim**2 * self.depth * (1.5 if self.bidirectional else 2)
        decoder = gates * self.dim**2 * (2 * self.depth + 1) + 2 * self.dim**2
        vocabulary = self.dim * (self.target_vocab_size or self.check_vocabulary())
        attention = 2 * self.dim**2 if self.attention_score == "additive" else 0
        pairs = 12.0 * self.dim * items**2 if self.attention_score is not None else 0.0
        return 6.0 * (encoder + decoder + attention + vocabulary) * items + pairs

    @classmethod
    def fixed_context(cls, **changes: Any) -> "RecurrentSeq2SeqConfig":
        """The RNN encoder-decoder of Cho et al. 2014: one layer of 1,000 GRUs on either side. (Sutskever et al. 2014:
        cell="lstm", depth=4.)"""
        sizes: dict[str, Any] = dict(dim=1000, attention_score=None, bidirectional=False)
        return cls(**sizes | changes)

    @classmethod
    def with_attention(cls, **changes: Any) -> "RecurrentSeq2SeqConfig":
        """The same with additive attention and a bidirectional encoder, as RNNsearch of Bahdanau et al. 2015."""
        sizes: dict[str, Any] = dict(dim=1000)
        return cls(**sizes | changes)


@pytree_dataclass
class Memory:
    """What the decoder has of its sources: `summary` (batch, dim), the encoder's last state; and for attention its
    `states` and `keys` (batch, source, dim)."""

    summary: Array
    states: Array | None
    keys: Array | None


@pytree_dataclass
class DecoderState:
    """The `carries` of the decoder's cells, arrays with a row for each of the target, and its `memory`, which several
    consecutive rows may share."""

    carries: list[Any]
    memory: Memory

    def take(self, rows: Int[Array, "rows"]) -> "DecoderState":
        """The state of other rows of the same sources."""
        carries = jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), self.carries)
        return DecoderState(carries, self.memory)

    def branch(self, beams: int, prompt: int) -> "DecoderState":
        """The state of `beams` rows for each of this one's; there are no slots of a prompt to share."""
        return DecoderState(jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), self.carries), self.memory)


def read(
    cell: Any, inputs: Float[Array, "batch length in"], real: Bool[Array, "batch length"], *, reverse: bool = False
) -> Float[Array, "batch length out"]:
    """What `cell` gives at each step, from the first or from the last one on, starting from zeros.

    It keeps its state where `real` is False: the step that is read last has that of a whole row, wherever its padding.
    """
    cell = jax.tree.map(constrain, cell)  # gathered once, not at every step
    projected = constrain(cell.dense_i(inputs), BATCH)
    cell.dense_i = _identity  # of this copy: all inputs are projected by one product
    zeros = jnp.zeros((len(inputs), cell.hidden_features), projected.dtype)

    def step(carry, given):
        return _advance(cell, carry, *given)

    start = zeros if isinstance(cell, nnx.GRUCell) else (zeros, zeros)
    _, outputs = jax.lax.scan(step, start, (jnp.swapaxes(projected, 0, 1), real.T), reverse=reverse)
    return constrain(jnp.swapaxes(outputs, 0, 1), BATCH)


class Encoder(nnx.Module):
    """Layers that read the source from its start and, if bidirectional, with half of their units from its end."""

    def __init__(self, config: RecurrentSeq2SeqConfig, *, rngs: nnx.Rngs):
        self.config = config
        make, width = CELLS[config.cell], config.dim // (2 if config.bidirectional else 1)

        def layers() -> nnx.List:
            return nnx.List([make(config.dim, width, **config.types, rngs=rngs) for _ in range(config.depth)])

        self.forward = layers()
        self.backward = layers() if config.bidirectional else nnx.data(None)

    def __call__(
        self, hidden: Float[Array, "batch source dim"], real: Bool[Array, "batch source"], *, key: PRNGKey | None = None
    ) -> Float[Array, "batch source dim"]:
        """The last layer's states of embedded tokens; `real` says which are no padding."""
        for i, layer_key in enumerate(split_key(key, self.config.depth)):
            given = dropout(hidden, self.config.dropout, layer_key)
            hidden = read(self.forward[i], given, real)
            if self.backward is not None:
                hidden = jnp.concatenate([hidden, read(self.backward[i], given, real, reverse=True)], axis=-1)
        return hidden


class Attention(nnx.Module):
    """Weights for the states of the source, and their mean: additive (Bahdanau et al. 2015, appendix A.1.2), or dot
    products (Luong et al. 2015, equation 8), which have no parameters."""

    def __init__(self, config: RecurrentSeq2SeqConfig, *, rngs: nnx.Rngs):
        self.query = self.key = self.score = nnx.data(None)
        if config.attention_score == "additive":
            init, types = normal_init(config.init_std), dict(**config.types, rngs=rngs)
            self.query = Linear(config.dim, config.dim, use_bias=False, kernel_init=init, **types)
            self.key = Linear(config.dim, config.dim, kernel_init=init, **types)
            self.score = nnx.Param(init(rngs.params(), (config.dim,), jnp.dtype(config.param_dtype)))

    def keys(self, states: Float[Array, "batch source dim"]) -> Float[Array, "batch source dim"]:
        """What queries are compared with."""
        return states if self.key is None else constrain(self.key(states), BATCH)

    def __call__(
        self, query: Float[Array, "rows dim"], memory: Memory, mask: Bool[Array, "batch source"] | None
    ) -> tuple[Float[Array, "rows dim"], Float[Array, "rows source"]]:
        """The context of each query, and the weights (float32) it is made with; rows / batch queries in a row share a
        source. Masked places weigh nothing."""
        assert memory.keys is not None and memory.states is not None
        grouped = (query if self.query is None else self.query(query)).reshape(len(memory.keys), -1, query.shape[-1])
        if self.score is None:
            scores = jnp.einsum("bqd,bsd->bqs", grouped, memory.keys, preferred_element_type=jnp.float32)
        else:
            mixed = jnp.tanh(grouped[:, :, None] + memory.keys[:, None])
            scores = jnp.einsum("bqsd,d->bqs", mixed, self.score[...].astype(mixed.dtype))
        scores = scores.astype(jnp.float32)
        if mask is not None:
            scores = jnp.where(mask[:, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1)
        if mask is not None:  # a source without any token
            weights = jnp.where(mask[:, None], weights, 0.0)
        context = jnp.einsum("bqs,bsd->bqd", weights.astype(query.dtype), memory.states)
        return context.reshape(query.shape), weights.reshape(len(query), -1)


class Decoder(nnx.Module):
    """Cells that see the token before, their own states and the context, which attention makes with the last layer's
    state of the step before. `tanh(output [state; context])` is what tokens are read from (Luong et al. 2015,
    equation 5). All states begin as `tanh(start summary)` (Cho et al. 2014)."""

    def __init__(self, config: RecurrentSeq2SeqConfig, *, rngs: nnx.Rngs):
        self.config = config
        make, init, types = CELLS[config.cell], normal_init(config.init_std), dict(**config.types, rngs=rngs)
        states = 1 if config.cell == "gru" else 2
        self.start = Linear(config.dim, config.depth * states * config.dim, kernel_init=init, **types)
        self.attention = nnx.data(None) if config.attention_score is None else Attention(config, rngs=rngs)
        self.cells = nnx.List([make((1 + (i == 0)) * config.dim, config.dim, **types) for i in range(config.depth)])
        self.output = Linear(2 * config.dim, config.dim, kernel_init=init, **types)

    def begin(self, memory: Memory, rows: int) -> DecoderState:
        """The state before the first token, of as many rows of each source as make `rows`."""
        first = jnp.repeat(jnp.tanh(self.start(constrain(memory.summary, BATCH))), rows // len(memory.summary), axis=0)
        parts = jnp.split(first, first.shape[-1] // self.config.dim, axis=-1)
        carries = parts if self.config.cell == "gru" else list(zip(parts[::2], parts[1::2], strict=True))
        return DecoderState(carries, memory)

    def __call__(
        self,
        embedded: Float[Array, "rows length dim"],
        real: Bool[Array, "rows length"],
        state: DecoderState,
        mask: Bool[Array, "batch source"] | None,
        *,
        key: PRNGKey | None = None,
    ) -> tuple[Float[Array, "rows length dim"], DecoderState, Float[Array, "rows length source"] | None]:
        """Hidden states of embedded tokens, the state after them, and the weights of attention."""
        rate, keys, memory = self.config.dropout, split_key(key, 3), state.memory
        attention = None if self.attention is None else jax.tree.map(constrain, self.attention)
        cells = [jax.tree.map(constrain, cell) for cell in self.cells]
        summary = jnp.repeat(memory.summary, len(embedded) // len(memory.summary), axis=0)

        # What attention computes for each pair of tokens is far larger than all else, and quickly computed again.
        @jax.checkpoint
        def look(query):
            return (summary, None) if attention is None else attention(query, memory, mask)

        def step(carries, given):
            token, real, step_key = given
            context, weights = look(_output(carries[-1]))
            hidden, after = jnp.concatenate([token, context], axis=-1), []
            for i, (cell, layer_key) in enumerate(zip(cells, split_key(step_key, len(cells)), strict=True)):
                hidden = hidden if i == 0 else dropout(hidden, rate, layer_key)
                carry, hidden = _advance(cell, carries[i], hidden, real)
                after.append(carry)
            return after, (hidden, context, weights)

        step_keys = None if keys[1] is None else jax.random.split(keys[1], embedded.shape[1])
        given = (jnp.swapaxes(dropout(embedded, rate, keys[0]), 0, 1), real.T, step_keys)
        carries, (hidden, context, weights) = jax.lax.scan(step, state.carries, given)
        both = constrain(jnp.swapaxes(jnp.concatenate([hidden, context], axis=-1), 0, 1), BATCH)
        hidden = dropout(jnp.tanh(self.output(both)), rate, keys[2])
        return hidden, DecoderState(carries, memory), None if weights is None else jnp.swapaxes(weights, 0, 1)


class RecurrentSeq2Seq(Seq2SeqBackbone):
    """A recurrent encoder that reads a source, and a recurrent decoder that writes a target.

    `Seq2SeqLanguageModel(RecurrentSeq2Seq(config, rngs=rngs), rngs=rngs)` gives logits, and writes. Of what can be
    captured there are `cross_attention_weights` (1, batch, 1, length, source), of models with attention.
    """

    def __init__(self, config: RecurrentSeq2SeqConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)

    def encode(
        self,
        input_ids: Int[Array, "batch source"],
        attention_mask: Int[Array, "batch source"] | None = None,
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        check_capture(capture)
        real = self.ones(input_ids, attention_mask) != 0
        return ModelOutput(self.encoder(self.embedding(input_ids), real, key=key))

    def remember(self, hidden: Float[Array, "batch source dim"]) -> Memory:
        width = self.config.dim // (2 if self.config.bidirectional else 1)
        summary = jnp.concatenate([hidden[:, -1, :width], hidden[:, 0, width:]], axis=-1)  # the last of both directions
        attention = self.decoder.attention
        return Memory(summary, *((None, None) if attention is None else (hidden, attention.keys(hidden))))

    def decode(
        self,
        input_ids: Int[Array, "rows length"],
        attention_mask: Int[Array, "rows length"] | None = None,
        *,
        context: Memory | None = None,
        context_mask: Int[Array, "batch source"] | None = None,
        cache: Cache | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        check_capture(capture)
        real = self.ones(input_ids, attention_mask, target=True) != 0
        if cache is not None:
            cache = cache.extend(input_ids.shape[1], attention_mask)
            state: Any = cache.layers
        elif context is not None:
            state = self.decoder.begin(context, len(input_ids))
        else:
            raise ValueError("decode needs a context, which `remember` gives, or a cache, which `init_cache` makes")
        mask = None if context_mask is None else context_mask != 0
        hidden, state, weights = self.decoder(self.output_embedding(input_ids), real, state, mask, key=key)
        if weights is not None:
            weights = weights[None, :, None] if "cross_attention_weights" in capture else None
        return ModelOutput(
            hidden,
            cache=None if cache is None else dataclasses.replace(cache, layers=state),
            cross_attention_weights=weights,
        )

    def init_cache(self, context: Memory, batch: int, length: int) -> Cache:
        state = self.decoder.begin(context, batch)
        return Cache(state, jnp.zeros((batch, length), bool), jnp.zeros((), jnp.int32))


def _identity(x: Array) -> Array:
    return x


def _output(carry: Any) -> Array:
    return jax.tree.leaves(carry)[-1]  # of an LSTM (memory, state); a GRU has the state alone


def _advance(cell: Any, carry: Any, inputs: Array, real: Array) -> tuple[Any, Array]:
    """One step, which rows that are not `real` do not take."""
    after, _ = cell(carry, inputs)
    carry = jax.tree.map(lambda new, old: constrain(jnp.where(real[:, None], new, old), BATCH), after, carry)
    return carry, _output(carry)
