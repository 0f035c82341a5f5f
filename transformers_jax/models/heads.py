"""Heads: what turns the hidden states of any family into an answer."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jaxtyping import Array, Float, Int

from transformers_jax.models.output import Cache, ModelOutput
from transformers_jax.nn import ACTIVATIONS, LayerNorm, Linear, dropout, normal_init, pool, pool_texts, split_key
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.sharding import BATCH, TENSOR, constrain


class Head(nnx.Module):
    """A backbone with something on top; `config` is the backbone's."""

    def __init__(self, backbone: Any):
        self.backbone = backbone

    @property
    def config(self) -> Any:
        return self.backbone.config


class LanguageModel(Head):
    """Next-token logits on top of a decoder.

    `backbone` returns `hidden` and has `config`, `embedding` and `init_cache`. With `config.tie_embeddings` the logits
    are read out through the token embedding, otherwise through a layer of their own: for `config.predicted_tokens`,
    where some tokens are never predicted, and for all without it.
    """

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        config = backbone.config
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            tokens = getattr(config, "predicted_tokens", config.vocab_size)
            self.head = _linear(config, tokens, use_bias=False, rngs=rngs)

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
        logits_to_keep: int | None = None,
    ) -> ModelOutput:
        """Logits (batch, kept, vocab) in float32 for the last `logits_to_keep` places, or for all of them.

        The other arguments are the backbone's.
        """
        if logits_to_keep is not None and logits_to_keep < 1:
            raise ValueError(f"logits_to_keep={logits_to_keep} must be at least 1, or None for all places")
        output = self.backbone(
            input_ids,
            attention_mask,
            positions=positions,
            **({} if segment_ids is None else {"segment_ids": segment_ids}),
            cache=cache,
            key=key,
            capture=capture,
        )
        hidden = output.hidden if logits_to_keep is None else output.hidden[:, -logits_to_keep:]
        return dataclasses.replace(output, logits=self.read_out(hidden))

    def read_out(self, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
        """The logits of hidden states, in float32."""
        if self.head is None:
            return self.backbone.embedding.read_out(hidden)
        return logits_of(self.head, hidden)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache with `length` slots a row."""
        return self.backbone.init_cache(batch, length)


class MaskedLanguageModel(Head):
    """Logits of every token at every place, on top of an encoder (Devlin et al. 2019, section 3.1, task 1).

    `backbone` returns `hidden`, and has `config` and `embedding`. The hidden states pass a dense layer, the activation
    and a layer norm, and are read out through the token embedding, or with `tie_embeddings=False` through a layer of
    their own, plus a bias. With `config.next_sentence` there are `next_sentence_logits` too: (follows, random).
    """

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        config = backbone.config
        self.dense = _linear(config, config.dim, rngs=rngs)
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **config.types, rngs=rngs)
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            self.head = _linear(config, config.vocab_size, use_bias=False, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.dtype(config.param_dtype)))
        self.next_sentence = nnx.data(None)
        if config.next_sentence:
            if not config.pooler:
                raise ValueError("next_sentence=True reads the pooler; set pooler=True")
            self.next_sentence = _linear(config, 2, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        token_type_ids: Int[Array, "batch length"] | None = None,
        positions: Int[Array, "batch length"] | None = None,
        segment_ids: Int[Array, "batch length"] | None = None,
        masked_positions: Int[Array, "batch masked"] | None = None,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Logits (batch, length, vocab) in float32, or (batch, masked, vocab) at the places `masked_positions` only:
        a training step reads out the masked tokens and no others. The other arguments are the backbone's."""
        output = self.backbone(
            input_ids,
            attention_mask,
            token_type_ids=token_type_ids,
            positions=positions,
            **({} if segment_ids is None else {"segment_ids": segment_ids}),
            key=key,
            capture=capture,
        )
        hidden = output.hidden
        if masked_positions is not None:
            hidden = jnp.take_along_axis(hidden, masked_positions[..., None], axis=1)
        logits = self.read_out(hidden)
        if self.next_sentence is None:
            return dataclasses.replace(output, logits=logits)
        next_sentence = logits_of(self.next_sentence, output.pooled)
        return dataclasses.replace(output, logits=logits, next_sentence_logits=next_sentence)

    def read_out(self, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
        """The logits of hidden states, in float32."""
        hidden = self.norm(ACTIVATIONS[self.config.activation](self.dense(constrain(hidden, BATCH))))
        logits = self.backbone.embedding.read_out(hidden) if self.head is None else logits_of(self.head, hidden)
        return logits + self.bias[...].astype(jnp.float32)


class SequenceClassifier(Head):
    """One row of logits for a whole sequence, on top of any backbone: a logit for each of `config.labels`.

    It reads `pooled` where the backbone gives it, otherwise the hidden state that `config.pooling` names (the first
    token of an encoder, the last of a decoder), through a dense layer if `config.classifier_activation` asks for one.
    """

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        config = backbone.config
        self.dense = nnx.data(None)
        if getattr(config, "classifier_activation", None) is not None:
            self.dense = _linear(config, config.dim, rngs=rngs)
        self.head = _linear(config, _count(config), use_bias=config.classifier_bias, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        segment_ids: Int[Array, "batch length"] | None = None,
        texts: Int[Array, "batch texts"] | None = None,
        key: PRNGKey | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Logits (batch, labels) in float32; `pooled` is what they were computed from. `inputs` are the backbone's.

        The attention mask decides which tokens there are, not their ids: without one every token counts. Of packed
        rows, `texts` names the segments that are to be classified: logits (batch, texts, labels).
        """
        if (segment_ids is None) != (texts is None):
            raise ValueError("segment_ids and texts go together: a row of several texts, and which to classify")
        keys = split_key(key, 2)
        if segment_ids is not None:
            inputs["segment_ids"] = segment_ids
        output = self.backbone(input_ids, attention_mask, key=keys[0], **inputs)
        pooled = None if self.dense is not None else output.pooled
        if segment_ids is not None and texts is not None:
            how = self.config.pooling if pooled is None else "first"
            states = pool_texts(output.hidden, segment_ids, texts, how=how)
            pooled = states if pooled is None else self.backbone.pool(states)
        elif pooled is None:
            pooled = pool(output.hidden, attention_mask, how=self.config.pooling)
        if self.dense is not None:
            pooled = ACTIVATIONS[self.config.classifier_activation](self.dense(constrain(pooled, BATCH)))
        logits = logits_of(self.head, _dropout(self.config, pooled, keys[1]))
        return dataclasses.replace(output, pooled=pooled, logits=logits)


class TokenClassifier(Head):
    """Logits for each of `config.labels` at every token, on top of any backbone."""

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        self.head = _linear(backbone.config, _count(backbone.config), rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        key: PRNGKey | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Logits (batch, length, labels) in float32; `inputs` are the backbone's."""
        keys = split_key(key, 2)
        output = self.backbone(input_ids, attention_mask, key=keys[0], **inputs)
        logits = logits_of(self.head, _dropout(self.config, output.hidden, keys[1]))
        return dataclasses.replace(output, logits=logits)


class SpanPredictor(Head):
    """Two logits at every token, for being the first and the last of an answer (Devlin et al. 2019, section 4.2)."""

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        self.head = _linear(backbone.config, 2, rngs=rngs)

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        key: PRNGKey | None = None,
        **inputs: Any,
    ) -> ModelOutput:
        """Logits (batch, length, 2) in float32: [..., 0] for the start, [..., 1] for the end. Padding and question have
        logits like any token; whoever reads them leaves those out. `inputs` are the backbone's."""
        output = self.backbone(input_ids, attention_mask, key=key, **inputs)
        return dataclasses.replace(output, logits=logits_of(self.head, output.hidden))


class ImageClassifier(Head):
    """A logit for each of `config.labels`, on top of any backbone that takes pixels and gives `pooled`.

    The output layer starts with zeros, as Google's ViT does it: a new head on trained features then begins with equal
    odds. With `config.distillation_head` a second one reads the distillation token, which follows the class token, and
    the logits are the mean of both (Touvron et al. 2021, DeiT).
    """

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        super().__init__(backbone)
        config = backbone.config
        zeros = nnx.initializers.zeros
        self.head = _linear(config, _count(config), kernel_init=zeros, rngs=rngs)
        self.distillation_head = nnx.data(None)
        if getattr(config, "distillation_head", False):
            self.distillation_head = _linear(config, _count(config), kernel_init=zeros, rngs=rngs)

    def __call__(
        self,
        pixels: Float[Array, "batch height width channels"],
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Logits (batch, labels) in float32 of normalised `pixels`; the other arguments are the backbone's."""
        keys = split_key(key, 3)
        output = self.backbone(pixels, key=keys[0], capture=capture)
        assert output.pooled is not None  # what a backbone under this head gives
        logits = logits_of(self.head, _dropout(self.config, output.pooled, keys[1]))
        if self.distillation_head is not None:
            distilled = _dropout(self.config, output.hidden[:, 1], keys[2])
            logits = (logits + logits_of(self.distillation_head, distilled)) / 2
        return dataclasses.replace(output, logits=logits)


def _linear(
    config: Any, size: int, *, use_bias: bool = True, kernel_init: Initializer | None = None, rngs: nnx.Rngs
) -> Linear:
    kernel_init = normal_init(config.init_std) if kernel_init is None else kernel_init
    return Linear(config.dim, size, use_bias=use_bias, kernel_init=kernel_init, **config.types, rngs=rngs)


def logits_of(layer: Linear, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead out"]:
    """The scores of an output layer, in float32."""
    scores = layer(constrain(hidden, BATCH)).astype(jnp.float32)
    return constrain(scores, BATCH, *[None] * (scores.ndim - 2), TENSOR)


def _count(config: Any) -> int:
    if not config.labels:
        raise ValueError("config.labels is empty; name what the classifier is to tell apart")
    return len(config.labels)


def _dropout(config: Any, x: Array, key: jax.Array | None) -> Array:
    return dropout(x, config.dropout if config.classifier_dropout is None else config.classifier_dropout, key)
