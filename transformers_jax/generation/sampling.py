"""From logits to a token: the settings (`Sampling`) and what they do to the scores of every token."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.pytree import pytree_dataclass


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The controls act in the order of the fields from `repetition_penalty` to
    `suppress_ids`, then temperature, top-k and top-p, as in Hugging Face's `generate`.

    Changing a number compiles nothing; turning a control on or off does, once. Nonsense is a ValueError when built.
    """

    temperature: float = 1.0
    """The logits are divided by it; 0 takes the most likely token (greedy), the lowest id among equals."""
    top_k: int | None = None
    """Draw among the k most likely tokens only. Of equally likely tokens the lower ids count as more likely."""
    top_p: float | None = None
    """Draw among the fewest most likely tokens whose probabilities, after top-k, add up to at least this much."""
    repetition_penalty: float = 1.0
    """Tokens already there, in the prompt or the new text, have positive scores divided and negative ones multiplied
    by it (Keskar et al. 2019): above 1 discourages repetition."""
    no_repeat_ngram_size: int | None = None
    """No run of so many tokens occurs twice, prompt included."""
    min_new_tokens: int = 0
    """Stop ids cannot be chosen before this many new tokens."""
    suppress_ids: tuple[int, ...] = ()
    """Tokens that are never chosen."""

    def __post_init__(self):
        if not (0 <= self.temperature < math.inf):
            raise ValueError(f"temperature={self.temperature} must be at least 0 (0 is greedy) and finite")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1; use None to keep all tokens")
        if self.top_p is not None and not (0 <= self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p} must be between 0 and 1; use None to keep all tokens")
        if not (0 < self.repetition_penalty < math.inf):
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 turns it off")
        if self.no_repeat_ngram_size is not None and self.no_repeat_ngram_size < 1:
            raise ValueError(
                f"no_repeat_ngram_size={self.no_repeat_ngram_size} must be at least 1; use None to turn it off"
            )
        if self.min_new_tokens < 0:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} must be at least 0")

    @property
    def greedy(self) -> bool:
        """Whether no randomness is needed."""
        return self.temperature == 0

    def knobs(self) -> "Knobs":
        """The settings as arguments of a compiled function."""

        def number(value, kind, active: bool = True):
            return kind(value) if active and value is not None else None

        draws = not self.greedy
        return Knobs(
            # XLA takes numbers below the smallest normal one for 0.
            temperature=number(max(self.temperature, np.finfo(np.float32).tiny), np.float32, draws),
            top_k=number(self.top_k, np.float32, draws),
            top_p=number(self.top_p, np.float32, draws),
            repetition_penalty=number(self.repetition_penalty, np.float32, self.repetition_penalty != 1),
            no_repeat_ngram_size=number(self.no_repeat_ngram_size, np.int32),
            min_new_tokens=number(self.min_new_tokens, np.int32, self.min_new_tokens > 0),
            suppress_ids=np.asarray(self.suppress_ids, np.int32) if self.suppress_ids else None,
        )


@pytree_dataclass
class Knobs:
    """The active numbers of a `Sampling`. None is a control turned off: to JAX it is structure and not a value."""

    temperature: Any
    top_k: Any
    top_p: Any
    repetition_penalty: Any
    no_repeat_ngram_size: Any
    min_new_tokens: Any
    suppress_ids: Any


@pytree_dataclass
class History:
    """The tokens so far, in slots of a row: `tokens` (rows, slots) int32, of which those from `start` (rows,) up to
    `end` () are real, the last `new` () of them generated."""

    tokens: Array
    start: Array
    end: Array
    new: Array

    def real(self) -> Bool[Array, "rows slots"]:
        """Which slots hold real tokens."""
        slots = jnp.arange(self.tokens.shape[1])
        return (slots >= self.start[:, None]) & (slots < self.end)


def control(
    scores: Float[Array, "rows vocab"], history: History, stop_ids: Int[Array, "stops"], knobs: Knobs
) -> Float[Array, "rows vocab"]:
    """Scores (logits or log-probabilities) after the controls from repetition penalty to suppressed tokens; -inf is
    banned."""
    if knobs.repetition_penalty is not None:
        seen = _mark(history.tokens, history.real(), scores.shape[1])
        penalised = jnp.where(scores > 0, scores / knobs.repetition_penalty, scores * knobs.repetition_penalty)
        scores = jnp.where(seen, penalised, scores)
    if knobs.no_repeat_ngram_size is not None:
        scores = jnp.where(_repeats(history, knobs.no_repeat_ngram_size, scores.shape[1]), -jnp.inf, scores)
    if knobs.min_new_tokens is not None:
        stopped = scores.at[:, stop_ids].set(-jnp.inf)
        scores = jnp.where(history.new < knobs.min_new_tokens, stopped, scores)
    if knobs.suppress_ids is not None:
        scores = scores.at[:, knobs.suppress_ids].set(-jnp.inf)
    return scores


def choose(logits: Float[Array, "rows vocab"], keys: Any, knobs: Knobs) -> Int[Array, "rows"]:
    """A token for every row, drawn with the row's own key (`keys` is None for greedy)."""
    if knobs.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    filtered = filter_logits(logits, knobs)
    return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)


def filter_logits(logits: Float[Array, "rows vocab"], knobs: Knobs) -> Float[Array, "rows vocab"]:
    """Logits divided by the temperature, with -inf where top-k or top-p leave a token out."""
    # The greatest logit becomes 0 first, so that no temperature, however small, makes an infinity of it.
    highest = jnp.max(logits, axis=-1, keepdims=True)
    logits = (logits - jnp.where(jnp.isfinite(highest), highest, 0)) / knobs.temperature
    if knobs.top_k is not None:
        logits = jnp.where(best_within(logits, jnp.ones_like(logits), knobs.top_k), logits, -jnp.inf)
    if knobs.top_p is not None:
        kept = best_within(logits, jax.nn.softmax(logits, axis=-1), knobs.top_p)
        most_likely = jnp.arange(logits.shape[1]) == jnp.argmax(logits, axis=-1)[:, None]
        # Rounded sums may reach 1 early; 1 keeps everything all the same.
        logits = jnp.where(kept | most_likely | (knobs.top_p >= 1), logits, -jnp.inf)
    return logits


def best_within(
    scores: Float[Array, "rows vocab"], weights: Float[Array, "rows vocab"], limit: Float[Array, ""] | np.float32
) -> Bool[Array, "rows vocab"]:
    """Which tokens are kept when they are taken from the best score down, equal scores by lower id, for as long as the
    weights already taken are below `limit`.

    Sorting a vocabulary is slow on every backend (20 ms a row of GPT-2's on a CPU), so the score at which the limit is
    reached is searched for, bit by bit: floats compare like their bits read as integers, once negative ones are turned.
    """
    bits = jax.lax.bitcast_convert_type(scores.astype(jnp.float32) + 0.0, jnp.int32)  # + 0.0 turns -0 into 0
    order = jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)

    def halve(_, bounds):
        # Everything from `low` up reaches the limit (or is all there is); everything from `high` up does not.
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        reached = jnp.sum(jnp.where(order >= middle[:, None], weights, 0), axis=-1) >= limit
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    rows = scores.shape[0]
    lowest, highest = (jnp.full((rows,), getattr(jnp.iinfo(jnp.int32), end), jnp.int32) for end in ("min", "max"))
    low, _ = jax.lax.fori_loop(0, 32, halve, (lowest, highest))
    above, level = order > low[:, None], order == low[:, None]
    taken = jnp.sum(jnp.where(above, weights, 0), axis=-1, keepdims=True)
    tied = jnp.where(level, weights, 0)
    return above | (level & (taken + jnp.cumsum(tied, axis=-1) - tied < limit))


def _mark(tokens: Array, where: Array, vocab: int) -> Array:
    """(rows, vocab) True for the tokens that occur in `where`."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros((tokens.shape[0], vocab), bool).at[rows, tokens].max(where)


def _repeats(history: History, size: Any, vocab: int) -> Array:
    """(rows, vocab) True for the tokens that would end an n-gram of `size` that is already there."""
    tokens, end = history.tokens, history.end
    slots = jnp.arange(tokens.shape[1])

    def also_before(distance, match):
        last = jax.lax.dynamic_slice_in_dim(tokens, end - distance, 1, axis=1)
        return match & (jnp.roll(tokens, distance, axis=1) == last)

    match = jax.lax.fori_loop(1, size, also_before, history.real())
    # The n-gram that ends in a slot must begin at a real token, and so must the one being written.
    fits = (slots - (size - 1) >= history.start[:, None]) & (end - (size - 1) >= history.start[:, None])
    return _mark(tokens, match & fits, vocab)
