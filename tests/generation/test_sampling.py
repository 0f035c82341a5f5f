"""Sampling keeps and draws what its settings say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.generation import Sampling
from transformers_jax.generation.sampling import History, choose, control, filter_logits

DYADIC = [0.5, 0.25, 0.125, 0.125]
FILTER = jax.jit(filter_logits)


def kept(probabilities, **options) -> list[int]:
    logits = jnp.log(jnp.asarray([probabilities], jnp.float32))
    filtered = FILTER(logits, Sampling(**options).knobs())
    return np.flatnonzero(np.isfinite(np.asarray(filtered[0]))).tolist()


@pytest.mark.parametrize(("top_p", "count"), [(0.5, 1), (0.75, 2), (0.76, 3), (0.875, 3), (1.0, 4), (0.0, 1)])
def test_top_p_keeps_the_fewest_that_reach_it(top_p, count):
    assert kept(DYADIC, top_p=top_p) == list(range(count))


@pytest.mark.parametrize(("top_k", "count"), [(1, 1), (3, 3), (4, 4), (50, 4)])
def test_top_k_keeps_k_and_of_equals_the_lower_ids(top_k, count):
    assert kept(DYADIC, top_k=top_k) == list(range(count))


def test_ties_never_keep_more_than_k():
    assert kept([0.1, 0.2, 0.2, 0.2, 0.3], top_k=2) == [1, 4]
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.5) == [0, 1]


def test_temperature_acts_before_top_p_and_top_k_before_top_p():
    # Halving the temperature squares the probabilities: 16, 4, 1, 1 of 22.
    assert kept(DYADIC, top_p=0.7) == [0, 1]
    assert kept(DYADIC, top_p=0.7, temperature=0.5) == [0]
    # Of the best two the first holds two thirds.
    assert kept(DYADIC, top_p=0.6, top_k=2) == [0]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_kept_set_equals_that_of_sorting(data):
    # Some are equal, some are zero.
    counts = data.draw(st.lists(st.integers(0, 5), min_size=9, max_size=9).filter(any))
    k, p = data.draw(st.integers(1, 10)), data.draw(st.integers(0, 16)) / 16
    weights = np.array(counts, np.float64) / sum(counts)
    order = sorted(range(9), key=lambda i: (-counts[i], i))
    best = [i for i in order if counts[i]][:k]
    total = sum(counts[i] for i in best)
    expected, mass = [], 0
    for i in best:
        # Not at a boundary, which the softmax's rounding moves to either side; powers of two, above, are exact.
        if mass and abs(mass / total - p) < 1e-6:
            return
        if expected and mass / total >= p and p < 1:
            break
        expected.append(i)
        mass += counts[i]
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(weights)[None], jnp.float32)
    filtered = FILTER(logits, Sampling(top_k=k, top_p=p).knobs())
    assert np.flatnonzero(np.isfinite(np.asarray(filtered[0]))).tolist() == sorted(expected)


@pytest.mark.parametrize(
    ("options", "kept_tokens"),
    [({}, 4), (dict(top_k=2), 2), (dict(top_p=0.76), 3), (dict(top_k=3, top_p=0.75), 2), (dict(temperature=0.5), 4)],
)
def test_draws_follow_the_renormalised_kept_probabilities(options, kept_tokens):
    """Chi-square of 2,000 draws with fixed keys; 16.27 is its 0.1 % point at three degrees of freedom."""
    draws = 2000
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(DYADIC)), (draws, 4))
    tokens = jax.jit(choose)(logits, jax.random.split(jax.random.key(3), draws), Sampling(**options).knobs())
    expected = np.array(DYADIC) ** (1 / options.get("temperature", 1.0))
    expected[kept_tokens:] = 0
    expected *= draws / expected.sum()
    observed = np.bincount(np.asarray(tokens), minlength=4)
    assert observed[kept_tokens:].sum() == 0
    assert np.sum((observed - expected)[:kept_tokens] ** 2 / expected[:kept_tokens]) < 16.27


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45])
def test_a_tiny_temperature_is_greedy_and_finite(temperature):
    logits = jnp.asarray([[1.0, 3.0, 2.0], [50.0, -1e30, 49.0]])
    knobs = Sampling(temperature=temperature, top_p=0.9, top_k=2).knobs()
    assert not np.isnan(np.asarray(filter_logits(logits, knobs))).any()
    assert choose(logits, jax.random.split(jax.random.key(0), 2), knobs).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(temperature=-1), "temperature=-1 must be at least 0"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_k=0), "top_k=0 must be at least 1; use None"),
        (dict(top_k=-3), "top_k=-3"),
        (dict(top_p=-0.1), "top_p=-0.1 must be between 0 and 1"),
        (dict(top_p=1.1), "top_p=1.1"),
        (dict(repetition_penalty=0.0), "repetition_penalty=0.0 must be above 0"),
        (dict(no_repeat_ngram_size=0), "no_repeat_ngram_size=0"),
        (dict(min_new_tokens=-1), "min_new_tokens=-1"),
    ],
)
def test_nonsense_is_refused_when_built(options, said):
    with pytest.raises(ValueError, match=said) as error:
        Sampling(**options)
    assert "\n" not in str(error.value)


def controlled(scores, tokens, start, stop_ids=(), new=0, **options):
    history = History(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(start, jnp.int32), jnp.int32(len(tokens[0])), jnp.int32(new)
    )
    knobs = Sampling(temperature=0, **options).knobs()
    return np.asarray(control(jnp.asarray(scores, jnp.float32), history, jnp.asarray(stop_ids, jnp.int32), knobs))


def test_repetition_penalty_moves_every_token_seen_once_and_no_padding():
    scores = controlled([[2.0, -1.0, 3.0, 4.0]], [[0, 1, 2, 2]], [1], repetition_penalty=2.0)
    np.testing.assert_allclose(scores, [[2.0, -2.0, 1.5, 4.0]])


@pytest.mark.parametrize(
    ("size", "tokens", "start", "banned"),
    [
        (1, [0, 3, 1], 0, [0, 1, 3]),
        (2, [1, 2, 3, 1], 0, [2]),
        (2, [1, 2, 1, 3, 1], 0, [2, 3]),
        (3, [1, 2, 3, 0, 1, 2], 0, [3]),
        (3, [1, 2], 0, []),
        (2, [1, 2, 3, 1], 1, []),  # the first 1 is padding
        (1, [0, 3, 1], 1, [1, 3]),
        (4, [2, 2, 2, 2, 2], 0, [2]),
        (9, [2, 2, 2], 0, []),
    ],
)
def test_ngrams_are_not_repeated(size, tokens, start, banned):
    scores = controlled(np.zeros((1, 4)), [tokens], [start], no_repeat_ngram_size=size)
    assert np.flatnonzero(np.isneginf(scores[0])).tolist() == banned


def test_stop_ids_wait_for_the_minimum_length():
    for new, banned in ((0, [1, 3]), (1, [1, 3]), (2, [])):
        scores = controlled(np.zeros((1, 4)), [[0, 0, 0]], [0], stop_ids=[1, 3], new=new, min_new_tokens=2)
        assert np.flatnonzero(np.isneginf(scores[0])).tolist() == banned
