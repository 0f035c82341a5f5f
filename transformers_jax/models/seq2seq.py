"""What all models share that read a source and write a target, whatever their layers are."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from transformers_jax.models.base import VocabularyConfig
from transformers_jax.models.output import Cache, ModelOutput, check_ids
from transformers_jax.nn import TokenEmbedding, normal_init, split_key
from transformers_jax.nn.dropout import PRNGKey


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(VocabularyConfig):
    """What their configurations share."""

    target_vocab_size: int | None = None
    """Tokens of the target where it has a vocabulary and an embedding of its own. None: those of the source."""
    max_length: int | None = 512
    """Longest source, and longest target, in tokens. None: any, which learned positions do not allow."""
    scale_logits: bool = False
    """Whether the last hidden states are divided by sqrt(dim) before they are read out."""
    logits_bias: bool = False
    """Whether there is a bias on the logits."""
    start_id: int | None = None
    """Token that starts every target. None: `pad_id`."""

    def check_common(self) -> None:
        super().check_common()
        self.check_positive("target_vocab_size")
        if self.target_vocab_size is not None and self.vocab_size is None:
            raise ValueError(f"target_vocab_size={self.target_vocab_size} needs vocab_size, that of the source")

    @property
    def start(self) -> int:
        """The token that starts every target; ValueError where neither `start_id` nor `pad_id` is given."""
        start = self.pad_id if self.start_id is None else self.start_id
        if start is None:
            raise ValueError("neither start_id nor pad_id is given; a target needs a token to start with")
        return start


class Seq2SeqBackbone(nnx.Module):
    """The embeddings of both sides, and the way from source and target to hidden states. A family adds `encode`,
    `remember`, `decode` and `init_cache`."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(embedding_init=normal_init(config.init_std), **config.types, rngs=rngs)
        self.embedding = TokenEmbedding(config.check_vocabulary(), config.dim, **options)
        self.target_embedding = nnx.data(None)
        if config.target_vocab_size is not None:
            self.target_embedding = TokenEmbedding(config.target_vocab_size, config.dim, **options)

    @property
    def output_embedding(self) -> TokenEmbedding:
        """The embedding of target tokens."""
        return self.embedding if self.target_embedding is None else self.target_embedding

    def __call__(
        self,
        input_ids: Int[Array, "batch source"],
        attention_mask: Int[Array, "batch source"] | None = None,
        *,
        decoder_input_ids: Int[Array, "batch length"],
        decoder_attention_mask: Int[Array, "batch length"] | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """The decoder's hidden states of `decoder_input_ids` for the sources `input_ids`.

        The masks are 1 for tokens and 0 for padding, on either side, which changes nothing. `key` turns dropout on.
        `capture` names what else to return of the decoder: "hidden_states", "attention_weights" and
        "cross_attention_weights", where it has them.
        """
        keys = split_key(key, 2)
        encoded = self.encode(input_ids, attention_mask, key=keys[0])
        output = self.decode(
            decoder_input_ids,
            decoder_attention_mask,
            context=self.remember(encoded.hidden),
            context_mask=attention_mask,
            key=keys[1],
            capture=capture,
        )
        return dataclasses.replace(output, encoder_hidden=encoded.hidden)

    def encode(
        self,
        input_ids: Int[Array, "batch source"],
        attention_mask: Int[Array, "batch source"] | None = None,
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """The encoder's hidden states."""
        raise NotImplementedError

    def remember(self, hidden: Float[Array, "batch source dim"]) -> Any:
        """What the decoder looks at of an encoder's hidden states."""
        raise NotImplementedError

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
        raise NotImplementedError

    def init_cache(self, context: Any, batch: int, length: int) -> Cache:
        """A cache of `length` target tokens a row, none written yet, that holds `context`."""
        raise NotImplementedError

    def ones(self, ids: Array, mask: Array | None, *, target: bool = False) -> Array:
        """1 for tokens and 0 for padding, int32; ValueError for ids that the model does not know, or too many."""
        name, embedding = ("decoder_input_ids", self.output_embedding) if target else ("input_ids", self.embedding)
        check_ids(ids, embedding.embedding.shape[0], name=name)
        limit = self.config.max_length
        if limit is not None and ids.shape[1] > limit:
            raise ValueError(f"{name} have {ids.shape[1]} tokens, but the model has {limit} positions; cut the text")
        return jnp.ones_like(ids) if mask is None else (mask != 0).astype(jnp.int32)
