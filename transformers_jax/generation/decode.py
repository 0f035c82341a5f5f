"""Token-by-token generation over anything that has a cache."""

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from transformers_jax.generation.sampling import History, Knobs, Sampling, choose, control
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.pytree import pytree_dataclass
from transformers_jax.nn.stack import Stack, unstack


@runtime_checkable
class Decoder(Protocol):
    """What can generate: a pytree that maps token ids and a cache to logits and the cache that follows.

    `config` has `vocab_size` and `max_length` (the most positions, or None). The output has `logits` (batch, kept,
    vocab) and `cache`. What a cache holds is the model's own affair, an encoder's output for instance; beam search
    needs its `branch` and `take` (those of `models.output.Cache`).
    """

    @property
    def config(self) -> Any: ...

    def __call__(
        self, input_ids: Array, attention_mask: Array | None = None, *, cache: Any, logits_to_keep: int | None = None
    ) -> Any: ...

    def init_cache(self, batch: int, length: int) -> Any: ...


DEFAULT = Sampling()


@pytree_dataclass
class GenerateOutput:
    """What `generate` gives back, as numpy arrays (traced ones inside `jax.jit`).

    `tokens` (batch, max_new_tokens) int32: the new tokens, `pad_id` after a stop id. `lengths` (batch,) int32: how many
    of them count, the stop id included. `log_probs` (batch, max_new_tokens) float32: the log-probability of each token
    under the model, before temperature and other controls; 0 after the end.
    """

    tokens: Any
    lengths: Any
    log_probs: Any


def generate(
    model: Decoder,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    key: PRNGKey | None = None,
) -> GenerateOutput:
    """Continue every prompt by up to `max_new_tokens` tokens.

    `input_ids` (batch, length) are the prompts; `attention_mask` (batch, length) is 1 where a token is real, the
    padding of shorter prompts being on any side. A row gives what it would give alone. It ends with the first of
    `stop_ids`. Row i draws with `fold_in(key, i)`.

    Compiled once for a bucket of sizes: the length of the prompts and `max_new_tokens` are rounded up. The layers of a
    stacked model are laid out one by one first, which copies its weights; `jax.jit(nn.unstack)(model)` does so once
    for many calls.

    Raises ValueError for an empty prompt, an id outside the vocabulary, more positions than the model has, or a key
    that is missing.
    """
    prompt = check_prompt(model, input_ids, attention_mask, max_new_tokens, stop_ids)
    request = _request(prompt, sampling, stop_ids, pad_id, key)
    model = lay_out(model)
    state = _start(model, prompt.ids, prompt.mask, request, new_slots=round_up(max_new_tokens))
    state = _advance(model, state, request, np.int32(max_new_tokens))
    tokens, lengths, log_probs = to_host((state.tokens, state.lengths, state.log_probs))
    first = prompt.ids.shape[1]
    return GenerateOutput(tokens[:, first : first + max_new_tokens], lengths, log_probs[:, :max_new_tokens])


def stream(
    model: Decoder,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    max_new_tokens: int,
    sampling: Sampling = DEFAULT,
    stop_ids: Sequence[int] = (),
    pad_id: int = 0,
    key: PRNGKey | None = None,
) -> Iterator[np.ndarray]:
    """The tokens of `generate` one step after the other: (batch,) int32, `pad_id` for rows that have ended.

    Ends when all rows have. Arguments, errors (raised here, not at the first step) and compiled functions are
    `generate`'s.
    """
    prompt = check_prompt(model, input_ids, attention_mask, max_new_tokens, stop_ids)
    request = _request(prompt, sampling, stop_ids, pad_id, key)

    def steps() -> Iterator[np.ndarray]:
        laid_out = lay_out(model)
        state = _start(laid_out, prompt.ids, prompt.mask, request, new_slots=round_up(max_new_tokens))
        yield np.asarray(state.last)
        for count in range(2, max_new_tokens + 1):
            if np.all(np.asarray(state.finished)):
                return
            state = _advance(laid_out, state, request, np.int32(count))
            yield np.asarray(state.last)

    return steps()


@pytree_dataclass
class Prompt:
    """Checked prompts with their padding on the left and a length that is a bucket's: `ids` and `mask` (batch, length)
    int32."""

    ids: np.ndarray
    mask: np.ndarray

    @property
    def start(self) -> np.ndarray:
        """(batch,) the slot of each row's first token."""
        return np.argmax(self.mask, axis=1).astype(np.int32)


def check_prompt(
    model: Decoder, input_ids: Any, attention_mask: Any, max_new_tokens: int, stop_ids: Sequence[int]
) -> Prompt:
    """The prompts as compiled functions take them, or a ValueError that says what is wrong with them."""
    ids = np.asarray(input_ids)
    if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer) or ids.shape[0] == 0:
        raise ValueError(f"input_ids must be integers (batch, length), not {ids.dtype} of shape {ids.shape}")
    mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {mask.shape} but input_ids {ids.shape}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    lengths = mask.sum(axis=1)
    if not lengths.all():
        raise ValueError(f"row {int(lengths.argmin())} of the prompts has no tokens; start it with at least one")
    vocab, limit = model.config.vocab_size, model.config.max_length
    for name, values in (("input_ids", ids[mask]), ("stop_ids", np.asarray(stop_ids, np.int64))):
        outside = values[(values < 0) | (values >= vocab)]
        if outside.size:
            raise ValueError(f"{name} hold {outside[0]} but the vocabulary of this model is 0 to {vocab - 1}")
    longest = int(lengths.max())
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"{longest + max_new_tokens} positions are needed ({longest} in the prompt + {max_new_tokens} new) but "
            f"this model has {limit}; shorten the prompt or max_new_tokens"
        )
    slots = 1 if longest == 1 else round_up(longest)  # the start of a target needs no room
    real = np.arange(slots) >= slots - lengths[:, None]
    left = np.zeros(real.shape, np.int32)
    left[real] = ids[mask]
    return Prompt(left, real.astype(np.int32))


def to_host(tree: Any) -> Any:
    """Arrays as numpy arrays; those that are traced stay."""
    return jax.tree.map(lambda x: x if isinstance(x, Tracer) else np.asarray(x), tree)


def round_up(length: int) -> int:
    """The bucket of a length: the next multiple of 16, and from 128 on of an eighth to a quarter of the length."""
    step = max(16, 2 ** (length.bit_length() - 3))
    return -(-length // step) * step


def lay_out(model: Any) -> Any:
    """`model` with its stacks laid out, by one compiled copy; itself if it has none."""
    leaves = jax.tree.leaves(model, is_leaf=lambda x: isinstance(x, Stack))
    return _unstack(model) if any(isinstance(leaf, Stack) for leaf in leaves) else model


_unstack = jax.jit(unstack)


@pytree_dataclass
class Request:
    """What stays the same during a call: `knobs`; `key`, or None; `start` (batch,), the slot of each row's first token;
    `stop_ids` (stops,); `pad_id` ()."""

    knobs: Knobs
    key: Any
    start: Any
    stop_ids: Any
    pad_id: Any


@pytree_dataclass
class State:
    """What changes: the `cache`; `tokens` (batch, slots) of prompt and new text; `log_probs` (batch, new slots); `last`
    (batch,) the newest tokens; `finished` (batch,) bool; `lengths` (batch,); `count` () of new tokens."""

    cache: Any
    tokens: Array
    log_probs: Array
    last: Array
    finished: Array
    lengths: Array
    count: Array


def _request(prompt: Prompt, sampling: Sampling, stop_ids: Sequence[int], pad_id: int, key: Any) -> Request:
    if key is None and not sampling.greedy:
        raise ValueError(
            f"temperature={sampling.temperature} draws at random and needs key=jax.random.key(seed); "
            "give one, or Sampling(temperature=0) for the most likely tokens"
        )
    return Request(
        sampling.knobs(),
        None if sampling.greedy else key,
        prompt.start,
        np.asarray(stop_ids, np.int32),
        np.asarray(operator.index(pad_id), np.int32),
    )


@partial(jax.jit, static_argnames="new_slots")
def _start(model: Any, ids: Array, mask: Array, request: Request, *, new_slots: int) -> State:
    """Fill the cache with the prompts and choose the first token."""
    batch, prompt_slots = ids.shape
    slots = prompt_slots + new_slots
    output = model(ids, mask, cache=model.init_cache(batch, slots), logits_to_keep=1)
    state = State(
        output.cache,
        jnp.full((batch, slots), request.pad_id, jnp.int32).at[:, :prompt_slots].set(ids),
        jnp.zeros((batch, new_slots), jnp.float32),
        last=jnp.zeros((batch,), jnp.int32),
        finished=jnp.zeros((batch,), bool),
        lengths=jnp.zeros((batch,), jnp.int32),
        count=jnp.zeros((), jnp.int32),
    )
    return _append(state, output.cache, output.logits[:, 0], request)


@partial(jax.jit, donate_argnames="state")
def _advance(model: Any, state: State, request: Request, limit: Int[Array, ""]) -> State:
    """Generate until there are `limit` new tokens or all rows have ended. The state is updated in place."""

    def unfinished(state: State):
        return (state.count < limit) & ~jnp.all(state.finished)

    def step(state: State) -> State:
        fed = jnp.where(state.finished, 0, state.last)  # pad_id may be no token of the model
        output = model(fed[:, None], cache=state.cache, logits_to_keep=1)
        return _append(state, output.cache, output.logits[:, 0], request)

    return jax.lax.while_loop(unfinished, step, state)


def _append(state: State, cache: Any, logits: Float[Array, "batch vocab"], request: Request) -> State:
    end = state.tokens.shape[1] - state.log_probs.shape[1] + state.count
    scores = control(
        logits, History(state.tokens, request.start, end, state.count), request.stop_ids, request.knobs
    )  # fmt: skip
    keys = None
    if request.key is not None:
        rows = jnp.arange(logits.shape[0])
        keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(request.key, row), state.count))(rows)
    token = choose(scores, keys, request.knobs)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1)[:, 0]
    log_prob = jnp.where(state.finished, 0, chosen - jax.nn.logsumexp(logits, axis=-1))
    token = jnp.where(state.finished, request.pad_id, token)
    stopped = jnp.any(token[:, None] == request.stop_ids, axis=1)
    return State(
        cache,
        jax.lax.dynamic_update_slice(state.tokens, token[:, None], (0, end)),
        jax.lax.dynamic_update_slice(state.log_probs, log_prob[:, None], (0, state.count)),
        last=token,
        finished=state.finished | stopped,
        lengths=state.lengths + ~state.finished,
        count=state.count + 1,
    )
