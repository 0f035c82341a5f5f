"""Heads: what turns the hidden states of any family into an answer."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from transformers_jax.models.output import Cache, ModelOutput
from transformers_jax.nn import Linear, normal_init
from transformers_jax.nn.dropout import PRNGKey


class LanguageModel(nnx.Module):
    """Next-token logits on top of a decoder.

    `backbone` returns `hidden` and has `config`, `embedding` and `init_cache`. With `config.tie_embeddings` the logits
    are read out through the token embedding, otherwise through a layer of their own.
    """

    def __init__(self, backbone: Any, *, rngs: nnx.Rngs):
        self.backbone = backbone
        config = backbone.config
        self.head = nnx.data(None)
        if not config.tie_embeddings:
            self.head = Linear(
                config.dim,
                config.vocab_size,
                use_bias=False,
                kernel_init=normal_init(config.init_std),
                dtype=jnp.dtype(config.dtype),
                param_dtype=jnp.dtype(config.param_dtype),
                rngs=rngs,
            )

    @property
    def config(self) -> Any:
        return self.backbone.config

    def __call__(
        self,
        input_ids: Int[Array, "batch length"],
        attention_mask: Int[Array, "batch length"] | None = None,
        *,
        positions: Int[Array, "batch length"] | None = None,
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
            input_ids, attention_mask, positions=positions, cache=cache, key=key, capture=capture
        )  # fmt: skip
        hidden = output.hidden if logits_to_keep is None else output.hidden[:, -logits_to_keep:]
        return dataclasses.replace(output, logits=self.read_out(hidden))

    def read_out(self, hidden: Float[Array, "*lead dim"]) -> Float[Array, "*lead vocab"]:
        """The logits of hidden states, in float32."""
        if self.head is None:
            return self.backbone.embedding.read_out(hidden)
        return self.head(hidden).astype(jnp.float32)

    def init_cache(self, batch: int, length: int) -> Cache:
        """An empty cache with `length` slots a row."""
        return self.backbone.init_cache(batch, length)
