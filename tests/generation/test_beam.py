"""Beam search equals Hugging Face's, whatever stands around a prompt."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax import nn
from transformers_jax.generation import beam_search
from transformers_jax.models import Cache

A, B = [1, 2, 3], [0, 1, 2, 3, 4, 0]
PADDED = np.array([[0, 0, 0, *A], B]), np.array([[0, 0, 0, 1, 1, 1], [1] * 6])


@pytest.mark.parametrize("penalty", [0, 1, 3])
def test_tokens_and_scores_equal_pytorch_alone_and_in_a_batch(tiny, goldens, penalty):
    options = dict(beams=4, max_new_tokens=5, length_penalty=penalty, num_return_sequences=4)
    batch = beam_search(tiny, *PADDED, **options)
    for row, (name, prompt) in enumerate(dict(a=A, b=B).items()):
        alone = beam_search(tiny, [prompt], **options)
        for tokens, scores in ((batch.tokens[row], batch.scores[row]), (alone.tokens[0], alone.scores[0])):
            assert tokens.tolist() == goldens[f"beam.{name}.{penalty}"].tolist()
            np.testing.assert_allclose(scores, goldens[f"beam_scores.{name}.{penalty}"], rtol=1e-5)


def test_scores_follow_the_formula(tiny):
    for penalty in (0.0, 1.0, 3.0):
        output = beam_search(tiny, [A], beams=4, max_new_tokens=12, length_penalty=penalty, stop_ids=[36, 10])
        length = int(output.lengths[0, 0])
        ids = np.array([[*A, *output.tokens[0, 0, :length]]])
        log_probs = jax.nn.log_softmax(tiny(jnp.asarray(ids)).logits[0, len(A) - 1 : -1])
        total = sum(float(log_probs[i, token]) for i, token in enumerate(ids[0, len(A) :]))
        np.testing.assert_allclose(output.scores[0, 0], total / length**penalty, rtol=1e-5)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_stop_ids_and_early_stopping_equal_pytorch(tiny, goldens, early_stopping):
    name = str(early_stopping).lower()
    stop_ids = goldens["beam_stop_ids"].tolist()
    output = beam_search(
        tiny,
        [A],
        beams=3,
        max_new_tokens=20,
        early_stopping=early_stopping,
        num_return_sequences=3,
        stop_ids=stop_ids,
        pad_id=39,
    )
    expected = goldens[f"beam_stop.{name}"]
    longest = expected.shape[1]
    assert output.tokens[0, :, :longest].tolist() == expected.tolist()
    assert (output.tokens[0, :, longest:] == 39).all()
    np.testing.assert_allclose(output.scores[0], goldens[f"beam_stop_scores.{name}"], rtol=1e-5)
    for tokens, length in zip(output.tokens[0], output.lengths[0], strict=True):
        assert length == 20 or tokens[length - 1] in stop_ids


def test_one_beam_is_greedy(tiny):
    output = beam_search(tiny, [[5, 6, 7]], beams=1, max_new_tokens=8)
    assert output.tokens[0, 0].tolist() == [36, 25, 19, 26, 25, 39, 10, 4]


def test_enough_beams_find_the_best_of_all_texts(tiny):
    """With a beam for every text of two tokens the search is exhaustive."""
    output = beam_search(tiny, [A], beams=40, max_new_tokens=2, num_return_sequences=40)
    first = jax.nn.log_softmax(tiny(jnp.asarray([A])).logits[0, -1])
    ids = jnp.asarray([[*A, token] for token in range(40)])
    sums = first[:, None] + jax.nn.log_softmax(tiny(ids).logits[:, -1])
    best = np.sort(np.asarray(sums).ravel())[::-1][:40] / 2
    np.testing.assert_allclose(output.scores[0], best, rtol=1e-5)


def test_a_model_that_is_laid_out_already_finds_the_same(tiny):
    options = dict(beams=4, max_new_tokens=5)
    laid_out = jax.jit(nn.unstack)(tiny)
    assert (beam_search(laid_out, [B], **options).tokens == beam_search(tiny, [B], **options).tokens).all()


def test_controls_act_on_every_beam(tiny):
    output = beam_search(
        tiny, [A], beams=4, max_new_tokens=12, num_return_sequences=4, no_repeat_ngram_size=1, min_new_tokens=9,
        stop_ids=[36],
    )  # fmt: skip
    for tokens, length in zip(output.tokens[0], output.lengths[0], strict=True):
        assert length >= 10 - 1 and 36 not in tokens[:8]
        assert len({*A, *tokens[:length].tolist()}) == len(A) + length


@pytest.mark.parametrize("laid_out", [False, True])
def test_a_cache_takes_rows_and_branches(tiny, laid_out):
    model = jax.jit(nn.unstack)(tiny) if laid_out else tiny
    ids = jnp.asarray([[0, 1, 2, 3], [1, 2, 9, 8]])
    mask = jnp.ones_like(ids).at[0, 0].set(0)
    cache = model(ids, mask, cache=model.init_cache(2, 6)).cache

    def go_on(cache: Cache, tokens):
        output = model(jnp.asarray(tokens)[:, None], cache=cache)
        return np.asarray(output.logits[:, 0]), output.cache

    plain, _ = go_on(cache, [5, 5])
    twice, _ = go_on(cache.take(jnp.asarray([1, 0, 1])), [5, 5, 5])
    np.testing.assert_allclose(twice, plain[[1, 0, 1]], atol=1e-5)
    assert abs(plain[0] - plain[1]).max() > 0.1

    beams = cache.branch(3, 4)
    first, beams = go_on(beams, [5, 6, 7, 5, 6, 7])
    np.testing.assert_allclose(first[[0, 3]], plain, atol=1e-5)
    kept = jnp.asarray([1, 1, 2, 5, 3, 3])  # of each prompt's three
    second, _ = go_on(beams.take(kept), [8, 9, 8, 8, 8, 9])
    texts = [[6, 8], [6, 9], [7, 8], [7, 8], [5, 8], [5, 9]]
    whole_ids = jnp.concatenate([jnp.repeat(ids, 3, axis=0), jnp.asarray(texts)], axis=1)
    whole_mask = jnp.pad(jnp.repeat(mask, 3, axis=0), ((0, 0), (0, 2)), constant_values=1)
    np.testing.assert_allclose(second, model(whole_ids, whole_mask).logits[:, -1], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(beams=0), "num_return_sequences=1 must be between 1 and beams=0"),
        (dict(num_return_sequences=5), "num_return_sequences=5 must be between 1 and beams=4"),
        (dict(early_stopping="soon"), "early_stopping='soon' is not True, False or 'never'"),
        (dict(length_penalty=float("nan")), "length_penalty=nan must be finite"),
        (dict(stop_ids=list(range(40))), "40 stop_ids leave no token of the 40"),
        (dict(max_new_tokens=30), "33 positions are needed"),
        (dict(no_repeat_ngram_size=0), "no_repeat_ngram_size=0"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(tiny, change, said):
    with pytest.raises(ValueError, match=said) as error:
        beam_search(tiny, [A], **(dict(beams=4, max_new_tokens=2) | change))
    assert "\n" not in str(error.value)
