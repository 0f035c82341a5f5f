"""Beam search over anything that has a cache."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.generation.decode import Decoder, check_prompt, lay_out, round_up, to_host
from transformers_jax.generation.sampling import History, Knobs, Sampling, control
from transformers_jax.nn.pytree import pytree_dataclass

IMPOSSIBLE = -1e9  # a score below every real one, that can still be added to without becoming NaN


@pytree_dataclass
class BeamOutput:
    """What `beam_search` gives back, as numpy arrays (traced ones inside `jax.jit`), the best text first.

    `tokens` (batch, returned, max_new_tokens) int32: the new tokens, `pad_id` after a stop id. `lengths`
    (batch, returned) int32: how many of them count, the stop id included. `scores` (batch, returned) float32: the sum
    of the tokens' log-probabilities divided by `lengths ** length_penalty`.
    """

    tokens: Any
    lengths: Any
    scores: Any


def beam_search(
    model: Decoder,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    beams: int,
    max_new_tokens: int,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int | None = None,
    min_new_tokens: int = 0,
    suppress_ids: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
) -> BeamOutput:
    """Search for the most likely continuations of every prompt, keeping `beams` of them at each step.

    A text's score is the sum of its new tokens' log-probabilities divided by their number to the power of
    `length_penalty`: 0 compares sums, 1 means, and more favours longer texts. Neither prompt nor padding counts.

    A text ends with one of `stop_ids` or after `max_new_tokens`. The search for a row stops once it has `beams` ended
    texts and, by `early_stopping`: True, at once; False, when the best unfinished text, were it to end now, would be
    worse than all of them; "never", when it would be worse even at the length that suits it best.

    Tokens and scores are those of Hugging Face's `generate(num_beams=...)`, version 5. Prompts, the controls, `pad_id`,
    compilation and errors are as in `generate` and `Sampling`.
    """
    if not 1 <= num_return_sequences <= beams:
        raise ValueError(f"num_return_sequences={num_return_sequences} must be between 1 and beams={beams}")
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping={early_stopping!r} is not True, False or 'never'")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty={length_penalty} must be finite; 0 turns it off")
    candidates = beams * max(2, 1 + len(stop_ids))
    if candidates > beams * model.config.vocab_size:
        raise ValueError(f"{len(stop_ids)} stop_ids leave no token of the {model.config.vocab_size} to go on with")
    controls = Sampling(
        temperature=0,
        repetition_penalty=repetition_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        min_new_tokens=min_new_tokens,
        suppress_ids=tuple(suppress_ids),
    )
    prompt = check_prompt(model, input_ids, attention_mask, max_new_tokens, stop_ids)
    rules = Rules(
        controls.knobs(),
        np.repeat(prompt.start, beams),
        np.asarray(stop_ids, np.int32),
        np.int32(max_new_tokens),
        np.float32(length_penalty),
    )
    model = lay_out(model)
    static = dict(new_slots=round_up(max_new_tokens), early_stopping=early_stopping)
    search = _start(model, prompt.ids, prompt.mask, rules, beams=beams, **static)
    ended = _search(model, search, rules, **static).ended
    ended = to_host(ended)
    lengths = ended.lengths[:, :num_return_sequences]
    real = np.arange(max_new_tokens) < lengths[..., None]
    tokens = ended.tokens[:, :num_return_sequences, :max_new_tokens]
    tokens = (tokens - np.int32(pad_id)) * real + np.int32(pad_id)
    return BeamOutput(tokens, lengths, ended.scores[:, :num_return_sequences])


@pytree_dataclass
class Rules:
    """What stays the same during a search: `knobs`; `start` (batch * beams,), the slot of each row's first token;
    `stop_ids` (stops,); `limit` (), the most new tokens; `length_penalty` ()."""

    knobs: Knobs
    start: Any
    stop_ids: Any
    limit: Any
    length_penalty: Any


@pytree_dataclass
class Ended:
    """The best ended texts of each prompt so far, best first: `tokens` (batch, beams, new slots), `lengths`, `scores`
    and whether there `exists` one in the place, (batch, beams)."""

    tokens: Array
    lengths: Array
    scores: Array
    exists: Array


@pytree_dataclass
class Search:
    """What changes: the `cache` of batch * beams rows; `tokens` (batch, beams, slots) of prompts and new text; `sums`
    (batch, beams) of log-probabilities, the best first; the `ended` texts; `open` (batch,), whether better ones may
    come; `count` () of new tokens."""

    cache: Any
    tokens: Array
    sums: Array
    ended: Ended
    open: Array
    count: Array


@partial(jax.jit, static_argnames=("beams", "new_slots", "early_stopping"))
def _start(
    model: Any, ids: Array, mask: Array, rules: Rules, *, beams: int, new_slots: int, early_stopping: bool | str
) -> Search:
    """Read every prompt once, then take the first step of its beams."""
    batch, prompt_slots = ids.shape
    slots = prompt_slots + new_slots
    output = model(ids, mask, cache=model.init_cache(batch, slots), logits_to_keep=1)
    tokens = jnp.zeros((batch, slots), jnp.int32).at[:, :prompt_slots].set(ids)
    search = Search(
        output.cache.branch(beams, prompt_slots),
        jnp.repeat(tokens[:, None], beams, axis=1),
        # All beams are equal yet: only the first may be continued.
        jnp.full((batch, beams), IMPOSSIBLE, jnp.float32).at[:, 0].set(0),
        Ended(
            jnp.zeros((batch, beams, new_slots), jnp.int32),
            jnp.zeros((batch, beams), jnp.int32),
            jnp.full((batch, beams), IMPOSSIBLE, jnp.float32),
            jnp.zeros((batch, beams), bool),
        ),
        open=jnp.ones((batch,), bool),
        count=jnp.zeros((), jnp.int32),
    )
    logits = jnp.repeat(output.logits[:, 0], beams, axis=0)
    search, _ = _extend(search, logits, rules, new_slots, early_stopping)
    return search


@partial(jax.jit, static_argnames=("new_slots", "early_stopping"), donate_argnames="search")
def _search(model: Any, search: Search, rules: Rules, *, new_slots: int, early_stopping: bool | str) -> Search:
    """Search until no row can find better texts. The search is updated in place."""
    prompt_slots = search.tokens.shape[2] - new_slots
    batch, beams = search.sums.shape

    def unfinished(search: Search):
        more = (search.count < rules.limit) & jnp.any(search.open)
        return more & ~jnp.all(search.ended.exists) if early_stopping is True else more

    def step(search: Search) -> Search:
        last = jax.lax.dynamic_index_in_dim(search.tokens, prompt_slots + search.count - 1, axis=2, keepdims=False)
        output = model(last.reshape(-1, 1), cache=search.cache, logits_to_keep=1)
        search, parents = _extend(search, output.logits[:, 0], rules, new_slots, early_stopping)
        rows = (parents + beams * jnp.arange(batch)[:, None]).reshape(-1)
        return dataclasses.replace(search, cache=output.cache.take(rows))

    return jax.lax.while_loop(unfinished, step, search)


def _extend(
    search: Search,
    logits: Float[Array, "rows vocab"],
    rules: Rules,
    new_slots: int,
    early_stopping: bool | str,
) -> tuple[Search, Int[Array, "batch beams"]]:
    """The search one token further, but for the cache, and which beam each new beam continues."""
    batch, beams, slots = search.tokens.shape
    end, count = slots - new_slots + search.count, search.count + 1
    history = History(search.tokens.reshape(-1, slots), rules.start, end, search.count)

    # The best of all are among the best of each beam. There are enough of them for `beams` that do not stop.
    wanted = beams * max(2, 1 + rules.stop_ids.shape[0])
    kept = min(wanted, logits.shape[1])
    if jax.tree.leaves(rules.knobs):
        scores = control(jax.nn.log_softmax(logits, axis=-1), history, rules.stop_ids, rules.knobs)
        best, token = jax.lax.top_k(scores, kept)
    else:  # only what is kept need be made a log-probability
        best, token = jax.lax.top_k(logits, kept)
        best = best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    best = (best.reshape(batch, beams, -1) + search.sums[..., None]).reshape(batch, -1)
    sums, place = jax.lax.top_k(best, wanted)
    parents = place // token.shape[1]
    token = jnp.take_along_axis(token.reshape(batch, -1), place, axis=1)
    stops = jnp.any(token[..., None] == rules.stop_ids, axis=-1) | (count >= rules.limit)

    tokens = jnp.take_along_axis(search.tokens, parents[..., None], axis=1)
    tokens = jax.lax.dynamic_update_slice(tokens, token[..., None], (0, 0, end))
    ended = _collect(search, sums[:, :beams], tokens[:, :beams, -new_slots:], stops[:, :beams], rules, early_stopping)

    sums, place = jax.lax.top_k(jnp.where(stops, sums + IMPOSSIBLE, sums), beams)
    parents = jnp.take_along_axis(parents, place, axis=1)
    tokens = jnp.take_along_axis(tokens, place[..., None], axis=1)
    open_ = search.open & _may_improve(sums[:, 0], ended, count, rules, early_stopping)
    return Search(search.cache, tokens, sums, ended, open_, count), parents


def _collect(
    search: Search,
    sums: Float[Array, "batch beams"],
    tokens: Int[Array, "batch beams new"],
    stops: Bool[Array, "batch beams"],
    rules: Rules,
    early_stopping: bool | str,
) -> Ended:
    """The best of the ended texts and the candidates that stop."""
    ended, count = search.ended, search.count + 1
    accepts = search.open
    if early_stopping is True:
        accepts = accepts & ~jnp.all(ended.exists, axis=1)
    exists = stops & accepts[:, None]
    new = Ended(
        tokens,
        jnp.full_like(ended.lengths, count),
        jnp.where(exists, sums / count.astype(jnp.float32) ** rules.length_penalty, IMPOSSIBLE),
        exists,
    )
    both = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=1), ended, new)
    _, place = jax.lax.top_k(both.scores, sums.shape[1])
    rows = jnp.arange(sums.shape[0])[:, None]
    return jax.tree.map(lambda x: x[rows, place], both)


def _may_improve(
    best: Float[Array, "batch"], ended: Ended, count: Int[Array, ""], rules: Rules, early_stopping: bool | str
) -> Bool[Array, "batch"]:
    """Whether the best unfinished text of a row may still become better than its worst ended one."""
    length = count
    if early_stopping == "never":
        length = jnp.where(rules.length_penalty > 0, rules.limit, count)
    reachable = best / length.astype(jnp.float32) ** rules.length_penalty
    return ~jnp.all(ended.exists, axis=1) | (reachable > jnp.min(ended.scores, axis=1))
