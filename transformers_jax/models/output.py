"""What models take along and give back."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from transformers_jax.nn.pytree import pytree_dataclass


@pytree_dataclass
class Cache:
    """What a decoder remembers of the tokens it has seen.

    `layers` holds keys and values (`nn.KVCache`), or whatever else has a `take` and a `branch` like theirs; `mask`
    (batch, slots) bool says which slots hold real tokens; `index` int32 is the number of slots filled. Slots are not
    positions: padding takes a slot, but no position.
    """

    layers: object
    mask: Array
    index: Array

    def extend(self, length: int, attention_mask: Int[Array, "batch length"] | None) -> "Cache":
        """The cache with its next `length` slots taken, by the tokens whose `attention_mask` is 1 (None: all).

        The caller makes sure that there are that many slots: JAX would write to the last ones instead.
        """
        batch = self.mask.shape[0]
        real = jnp.ones((batch, length), bool) if attention_mask is None else attention_mask != 0
        mask = jax.lax.dynamic_update_slice(self.mask, real, (0, self.index))
        return Cache(self.layers, mask, self.index + length)

    def take(self, rows: Int[Array, "rows"]) -> "Cache":
        """The cache of the batch rows `rows`, for beams that continue other beams."""
        return Cache(self._of_layers("take", rows), self.mask.take(rows, axis=0), self.index)

    def branch(self, beams: int, prompt: int) -> "Cache":
        """The cache of `beams` rows for each of this one's, which has read nothing but a prompt of `prompt` slots:
        the beams of a search, which go on by one token at a time."""
        return Cache(self._of_layers("branch", beams, prompt), jnp.repeat(self.mask, beams, axis=0), self.index)

    def _of_layers(self, name: str, *arguments: Any) -> Any:
        return jax.tree.map(
            lambda layer: getattr(layer, name)(*arguments), self.layers, is_leaf=lambda x: hasattr(x, name)
        )


@pytree_dataclass
class ModelOutput:
    """What a model gives back; None where the model, or the call, does not have it.

    `hidden` (batch, length, dim) after the last norm, where the tokens of an image are those in front and its patches;
    `pooled` (batch, dim); `logits` float32: (batch, length, vocab) of language models, (batch, labels) and (batch,
    length, labels) of classifiers, (batch, length, 2) of span predictors; `next_sentence_logits` (batch, 2) float32;
    `cache`; and when named in `capture`: `hidden_states` (depth, batch, length, dim), the input of every layer, and
    `attention_weights` (depth, batch, heads, length, slots). A decoder that looks at a source has `encoder_hidden`
    (batch, source, dim) and, when captured, `cross_attention_weights` (depth, batch, heads, length, source). A pyramid
    gives, when captured, `stages`: the map (batch, rows, columns, width) that each stage gives out, as a tuple.
    """

    hidden: Array
    pooled: Array | None = None
    logits: Array | None = None
    next_sentence_logits: Array | None = None
    cache: Cache | None = None
    hidden_states: Array | None = None
    attention_weights: Array | None = None
    encoder_hidden: Array | None = None
    cross_attention_weights: Array | None = None
    stages: tuple[Array, ...] | None = None


CAPTURES = ("hidden_states", "attention_weights", "cross_attention_weights")
PYRAMID_CAPTURES = ("stages",)


def check_capture(capture: Collection[str], known: Sequence[str] = CAPTURES) -> None:
    """ValueError that lists what can be captured, if `capture` names anything else."""
    unknown = set(capture) - set(known)
    if unknown:
        raise ValueError(f"cannot capture {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def check_ids(input_ids: Int[Array, "batch length"], size: int, *, name: str = "input_ids") -> None:
    """ValueError for an id that is not 0 to `size` - 1, where ids are known; while tracing they are the caller's
    affair."""
    if isinstance(input_ids, Tracer) or input_ids.size == 0:
        return
    ids = np.asarray(input_ids)  # computed with NumPy: ids may be known while other things are traced
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= size:
        what = "the vocabulary is" if name == "input_ids" else "the model has"
        raise ValueError(f"{name} hold {low if low < 0 else high} but {what} 0 to {size - 1}")
