"""BERT and its relatives RoBERTa, DistilBERT and MiniLM: encoders with learned positions and post-norm layers.

Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers"; Liu et al. 2019, "RoBERTa"; Sanh et al.
2019, "DistilBERT". What sets the relatives apart is configuration. Numbers equal those of Hugging Face's models.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from transformers_jax.models.base import TextConfig
from transformers_jax.models.heads import MaskedLanguageModel, SequenceClassifier
from transformers_jax.models.output import ModelOutput, check_capture, check_ids
from transformers_jax.nn import (
    LayerNorm,
    LearnedPositions,
    Linear,
    Stack,
    TokenEmbedding,
    dropout,
    normal_init,
    pool,
    positions_from_mask,
    positions_from_segments,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.mlp import check_activation
from transformers_jax.nn.pooling import Pooling, check_pooling
from transformers_jax.nn.sharding import BATCH, constrain


@dataclasses.dataclass(frozen=True)
class BertConfig(TextConfig):
    """Sizes and numbers of a BERT. An impossible combination is a ValueError when it is built."""

    vocab_size: int | None = 30522
    """Number of tokens. None takes the tokenizer's when a training run starts."""
    norm_epsilon: float = 1e-12
    """Added to the variance in layer norms."""
    token_types: int = 2
    """Number of segment embeddings. 0: none (DistilBERT)."""
    position_offset: int = 0
    """Row of the position table that the first token has: 2 in RoBERTa, whose rows 0 and 1 are never a token's."""
    pooler: bool = True
    """Give `pooled`: the first token's state through a dense layer and tanh."""
    classifier_activation: str | None = None
    """Activation of a dense layer in front of a sequence classifier, for models whose classifier does not use the
    pooler: tanh in RoBERTa, relu in DistilBERT."""
    pooling: Pooling = "first"
    """What that dense layer sees of the hidden states, and what stands for a text where there is no pooler."""
    next_sentence: bool = False
    """Under a masked-language-model head, also tell whether the second segment follows the first (BERT's own)."""
    pad_id: int | None = 0
    """Token that fills up short rows; the attention mask decides what is padding, not this id."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("token_types", "position_offset"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.classifier_activation is not None:
            check_activation(self.classifier_activation)
        check_pooling(self.pooling)

    def build(self, *, rngs: nnx.Rngs) -> "Bert":
        """A model of this configuration, without a head."""
        return Bert(self, rngs=rngs)

    def for_head(self, head: type | None) -> "BertConfig":
        """With the pooler only where `head` reads it, as the checkpoints of transformers have it."""
        if head is None:
            return self
        if head is SequenceClassifier:
            return dataclasses.replace(self, pooler=self.classifier_activation is None)
        return dataclasses.replace(self, pooler=head is MaskedLanguageModel and self.next_sentence)

    def flops_per_token(self, length: int) -> float:
        """Those of the layers."""
        return self.layer_flops_per_token(length)

    @classmethod
    def tiny(cls, **changes: Any) -> "BertConfig":
        """4.4 M parameters (this and the next three: Turc et al. 2019)."""
        return cls._sized(changes, dim=128, depth=2, heads=2)

    @classmethod
    def mini(cls, **changes: Any) -> "BertConfig":
        """11 M parameters."""
        return cls._sized(changes, dim=256, depth=4, heads=4)

    @classmethod
    def small(cls, **changes: Any) -> "BertConfig":
        """29 M parameters."""
        return cls._sized(changes, dim=512, depth=4, heads=8)

    @classmethod
    def medium(cls, **changes: Any) -> "BertConfig":
        """41 M parameters."""
        return cls._sized(changes, dim=512, depth=8, heads=8)

    @classmethod
    def base(cls, **changes: Any) -> "BertConfig":
        """110 M parameters."""
        return cls(**changes)

    @classmethod
    def large(cls, **changes: Any) -> "BertConfig":
        """The paper's large model, about 340 M parameters."""
        return cls._sized(changes, dim=1024, depth=24, heads=16)

    @classmethod
    def minilm_l6(cls, **changes: Any) -> "BertConfig":
        """MiniLM with 6 layers of width 384: 23 M parameters (Wang et al. 2020)."""
        return cls._sized(changes, dim=384, depth=6, heads=12)

    @classmethod
    def roberta_base(cls, **changes: Any) -> "BertConfig":
        """125 M parameters."""
        return cls._sized(_ROBERTA | changes)

    @classmethod
    def roberta_large(cls, **changes: Any) -> "BertConfig":
        """355 M parameters."""
        return cls._sized(_ROBERTA | changes, dim=1024, depth=24, heads=16)

    @classmethod
    def distilbert(cls, **changes: Any) -> "BertConfig":
        """66 M parameters."""
        return cls._sized(changes, depth=6, token_types=0, pooler=False, classifier_activation="relu")


_ROBERTA: dict[str, Any] = dict(
    vocab_size=50265,
    norm_epsilon=1e-5,
    token_types=1,
    position_offset=2,
    classifier_activation="tanh",
    bos_id=0,
    pad_id=1,
    eos_id=2,
)


class Bert(nnx.Module):
    """The BERT encoder: token ids to hidden states; the heads of `models.heads` go on top."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(embedding_init=normal_init(config.init_std), **config.types, rngs=rngs)
        self.embedding = TokenEmbedding(config.check_vocabulary(), config.dim, **options)
        self.positions = LearnedPositions(config.max_length + config.position_offset, config.dim, **options)
        self.token_types = nnx.data(None)
        if config.token_types:
            self.token_types = TokenEmbedding(config.token_types, config.dim, **options)
        self.embedding_norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **config.types, rngs=rngs)
        patterns = config.read_patterns("patterns", config.depth, decodes=False)
        cycle = config.cycle(patterns, norm="post")
        self.stack = Stack(cycle, config.depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.goes_by_places = not all(pattern.relative for pattern in patterns)
        self.pooler = nnx.data(None)
        if config.pooler:
            kernel_init = normal_init(config.init_std)
            self.pooler = Linear(config.dim, config.dim, kernel_init=kernel_init, **config.types, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        token_type_ids: Int[Array, "batch length"] | None = None,
        positions: Int[Array, "batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states of `input_ids`, and `pooled` with a pooler.

        `attention_mask` is 1 for tokens and 0 for padding, on either side; `positions` count its ones from 0.
        `segment_ids` tell apart the texts of a row, which lie one after the other: they do not see each other, and
        positions start again (what is `pooled` is of the first).
        `token_type_ids` name the segment of each token (None: the first). `key` turns dropout on. `capture` names what
        else to return: "hidden_states" and "attention_weights".
        """
        config, length = self.config, input_ids.shape[1]
        check_capture(capture)
        check_ids(input_ids, self.embedding.embedding.shape[0])
        if segment_ids is not None and positions is None:
            positions = positions_from_segments(segment_ids)
        if length > config.max_length and attention_mask is None and positions is None:
            raise ValueError(f"{length} tokens are more than the {config.max_length} positions; cut the text")
        if positions is None:
            ones = jnp.ones_like(input_ids[:1]) if attention_mask is None else (attention_mask != 0).astype(jnp.int32)
            positions = positions_from_mask(ones)
        check_ids(positions, config.max_length, name="positions")
        hidden = self.embedding(input_ids) + self.positions(positions + config.position_offset)
        if self.token_types is not None:
            if token_type_ids is None:
                token_type_ids = jnp.zeros_like(input_ids[:1])
            check_ids(token_type_ids, config.token_types, name="token_type_ids")
            hidden = hidden + self.token_types(token_type_ids)

        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(self.embedding_norm(hidden), config.dropout, embedding_key)
        mask = None if attention_mask is None else (attention_mask != 0)[:, None, None, :]
        places = None
        if self.goes_by_places and segment_ids is not None:
            places = positions_from_segments(segment_ids)
        elif self.goes_by_places and attention_mask is not None:
            places = positions_from_mask((attention_mask != 0).astype(jnp.int32))

        def apply(layer, hidden, _, layer_key):
            output = layer(hidden, mask=mask, segment_ids=segment_ids, places=places, key=layer_key, capture=capture)
            return output.hidden, None, (hidden if "hidden_states" in capture else None, output.attention_weights)

        layer_keys = None if stack_key is None else jax.random.split(stack_key, config.depth)
        hidden, _, kept = self.stack(apply, hidden, None, layer_keys)
        pooled = None
        if self.pooler is not None:
            pooled = self.pool(pool(hidden, attention_mask, how="first"))
        return ModelOutput(hidden, pooled, hidden_states=kept[0], attention_weights=kept[1])

    def pool(self, first: Float[Array, "batch *texts dim"]) -> Float[Array, "batch *texts dim"]:
        """What the pooler makes of the state of a text's first token."""
        assert self.pooler is not None
        return jnp.tanh(self.pooler(constrain(first, BATCH)))
