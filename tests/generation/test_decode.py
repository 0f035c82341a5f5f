"""Generation: padding, caches, limits, stops, random draws and compilations."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax import nn
from transformers_jax.generation import Sampling, generate, stream
from transformers_jax.generation.decode import round_up

A, B = [5, 6, 7], [9, 10, 11, 12, 13, 14, 15]
GREEDY_A, GREEDY_B = [36, 25, 19, 26, 25, 39, 10, 4], [22, 9, 12, 1, 6, 22, 36, 36]
GREEDY = Sampling(temperature=0)


def padded(rows, *, left=0, length=None, pad=39):
    """Rows with `left` pads in front and the rest behind; None puts all of them in front."""
    length = length or max(map(len, rows))
    ids, mask = np.full((len(rows), length), pad), np.zeros((len(rows), length), int)
    for i, row in enumerate(rows):
        first = length - len(row) if left is None else left
        ids[i, first : first + len(row)], mask[i, first : first + len(row)] = row, 1
    return ids, mask


@contextlib.contextmanager
def compilations():
    """The names of what is compiled meanwhile."""
    names = []

    class Handler(logging.Handler):
        def emit(self, record):
            message = record.getMessage()
            if message.startswith("Compiling "):
                names.append(message.split(" with ")[0])

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Handler()
    logger.addHandler(handler)
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    "layout", [dict(left=None), dict(left=0), dict(left=None, length=27), dict(left=3, length=13), dict(length=20)]
)
def test_padding_changes_nothing(tiny, goldens, layout):
    output = generate(tiny, *padded([A, B], **layout), max_new_tokens=8, sampling=GREEDY)
    assert output.tokens.tolist() == [GREEDY_A, GREEDY_B]
    for row, name in enumerate("ab"):
        logits = goldens[f"logits.{name}"].astype(np.float64)
        expected = logits.max(axis=-1) - np.log(np.exp(logits).sum(axis=-1))
        np.testing.assert_allclose(output.log_probs[row], expected, atol=1e-4)


def test_prompt_tokens_equal_to_the_pad_id_are_seen(tiny):
    prompt = [39, 5, 39, 39, 7]
    alone = generate(tiny, [prompt], max_new_tokens=6, sampling=GREEDY, pad_id=39)
    together = generate(tiny, *padded([prompt, B], left=None), max_new_tokens=6, sampling=GREEDY, pad_id=39)
    hidden = generate(tiny, [[5, 7]], max_new_tokens=6, sampling=GREEDY)
    assert together.tokens[0].tolist() == alone.tokens[0].tolist() != hidden.tokens[0].tolist()


def test_greedy_equals_pytorch_for_64_steps(odd, goldens):
    output = generate(odd, [[3, 1, 4, 1, 5]], max_new_tokens=64, sampling=GREEDY)
    assert output.tokens[0].tolist() == goldens["greedy64"].tolist()
    assert output.lengths.tolist() == [64]


@pytest.mark.parametrize("control", ["penalty", "ngram"])
def test_controls_equal_hugging_face(tiny, goldens, control):
    options = dict(repetition_penalty=1.7) if control == "penalty" else dict(no_repeat_ngram_size=2)
    sampling = Sampling(temperature=0, **options)
    output = generate(tiny, *padded([A, B], left=None, length=11), max_new_tokens=20, sampling=sampling)
    assert output.tokens.tolist() == [goldens[f"{control}.a"].tolist(), goldens[f"{control}.b"].tolist()]


@pytest.mark.parametrize("laid_out", [False, True])
@pytest.mark.parametrize("chunks", [[5] + 6 * [1], [3, 2] + 6 * [1], 11 * [1], [4, 7]])
@pytest.mark.parametrize("slots", [11, 64])
def test_cached_logits_equal_one_pass(tiny, chunks, slots, laid_out):
    model = jax.jit(nn.unstack)(tiny) if laid_out else tiny
    ids = np.random.default_rng(0).integers(0, 40, (2, 11)).astype(np.int32)
    mask = np.ones((2, 11), np.int32)
    mask[1, :2] = 0
    whole = jax.jit(lambda model, ids, mask: model(ids, mask).logits)(model, ids, mask)
    cached = jax.jit(lambda model, ids, mask, cache: model(ids, mask, cache=cache))
    cache, parts, first = model.init_cache(2, slots), [], 0
    for chunk in chunks:
        output = cached(model, ids[:, first : first + chunk], mask[:, first : first + chunk], cache)
        cache, first = output.cache, first + chunk
        parts.append(output.logits)
    logits = jnp.concatenate(parts, axis=1)
    np.testing.assert_allclose(logits[0], whole[0], atol=1e-4)
    np.testing.assert_allclose(logits[1, 2:], whole[1, 2:], atol=1e-4)
    alone = jax.jit(lambda model, ids: model(ids).logits)(model, ids[1:, 2:])
    np.testing.assert_allclose(logits[1, 2:], alone[0], atol=1e-4)


def test_up_to_the_last_position_equals_recomputing_everything(tiny):
    prompt = np.random.default_rng(1).integers(0, 40, (1, 30))
    tokens = generate(tiny, prompt, max_new_tokens=2, sampling=GREEDY).tokens
    ids = jnp.asarray(prompt, jnp.int32)
    for token in tokens[0]:
        logits = tiny(ids).logits[0, -1]
        assert np.isfinite(logits).all() and int(jnp.argmax(logits)) == token
        ids = jnp.concatenate([ids, jnp.full((1, 1), token)], axis=1)


@pytest.mark.parametrize("call", [generate, stream])
def test_more_positions_than_the_model_has(tiny, call):
    said = r"33 positions are needed \(30 in the prompt \+ 3 new\) but this model has 32; shorten the prompt or max_new"
    with pytest.raises(ValueError, match=said):
        call(tiny, np.ones((1, 30), int), max_new_tokens=3, sampling=GREEDY)
    with pytest.raises(ValueError, match=r"41 positions.*has 32"):
        call(tiny, np.ones((1, 40), int), max_new_tokens=1, sampling=GREEDY)
    # Padding is no position.
    ids, mask = padded([[1] * 24, [2] * 3], length=60)
    generate(tiny, ids, mask, max_new_tokens=8, sampling=GREEDY)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(input_ids=[[1, 40]]), "input_ids hold 40 but the vocabulary of this model is 0 to 39"),
        (dict(input_ids=[[-1, 3]]), "input_ids hold -1"),
        (dict(input_ids=[1, 2]), r"must be integers \(batch, length\), not int64 of shape \(2,\)"),
        (dict(input_ids=[[0.5]]), "must be integers"),
        (dict(input_ids=np.zeros((1, 0), int)), "row 0 of the prompts has no tokens"),
        (dict(input_ids=[[1], [2]], attention_mask=[[1], [0]]), "row 1 of the prompts has no tokens"),
        (dict(attention_mask=[[1]]), r"attention_mask has shape \(1, 1\) but input_ids \(1, 2\)"),
        (dict(max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (dict(stop_ids=[50]), "stop_ids hold 50"),
        (dict(sampling=Sampling()), r"needs key=jax.random.key\(seed\)"),
    ],
)
@pytest.mark.parametrize("call", [generate, stream])
def test_bad_arguments_are_refused_in_one_line(tiny, call, change, said):
    arguments = dict(input_ids=[[1, 2]], max_new_tokens=2, sampling=GREEDY) | change
    with pytest.raises(ValueError, match=said) as error:
        call(tiny, **arguments)
    assert "\n" not in str(error.value)


def test_ids_under_the_padding_do_not_matter(tiny):
    ids, mask = padded([A, B], left=None, pad=-100)
    assert generate(tiny, ids, mask, max_new_tokens=8, sampling=GREEDY).tokens.tolist() == [GREEDY_A, GREEDY_B]


def test_stop_ids_end_a_row_and_pads_follow(tiny):
    output = generate(tiny, *padded([A, B]), max_new_tokens=8, sampling=GREEDY, stop_ids=[26, 12], pad_id=-1)
    assert output.tokens.tolist() == [GREEDY_A[:4] + 4 * [-1], GREEDY_B[:3] + 5 * [-1]]
    assert output.lengths.tolist() == [4, 3]
    assert (output.log_probs[0, 4:] == 0).all() and (output.log_probs[0, :4] < 0).all()


def test_minimum_length_holds_back_stop_ids(tiny):
    sampling = Sampling(temperature=0, min_new_tokens=5)
    output = generate(tiny, [A], max_new_tokens=8, sampling=sampling, stop_ids=GREEDY_A[:1])
    assert output.lengths[0] >= 5 and GREEDY_A[0] not in output.tokens[0, :4]


def test_stream_gives_the_tokens_of_generate_and_stops_with_them(tiny):
    options = dict(max_new_tokens=8, sampling=Sampling(temperature=0.8, top_k=9), key=jax.random.key(5), pad_id=39)
    steps = np.stack(list(stream(tiny, *padded([A, B]), **options)), axis=1)
    assert steps.tolist() == generate(tiny, *padded([A, B]), **options).tokens.tolist()
    greedy = list(stream(tiny, *padded([A, B]), max_new_tokens=8, sampling=GREEDY, stop_ids=[26, 12], pad_id=39))
    assert np.stack(greedy, axis=1).tolist() == [GREEDY_A[:4], [*GREEDY_B[:3], 39]]


def test_draws_depend_on_key_and_row_only(tiny):
    sampling, key = Sampling(temperature=1.5, top_p=0.95), jax.random.key(7)
    both = generate(tiny, *padded([A, B], left=None), max_new_tokens=9, sampling=sampling, key=key).tokens
    again = generate(tiny, *padded([A, B], length=19), max_new_tokens=9, sampling=sampling, key=key).tokens
    alone = generate(tiny, [A], max_new_tokens=9, sampling=sampling, key=key).tokens
    other = generate(tiny, *padded([A, A]), max_new_tokens=9, sampling=sampling, key=key).tokens
    assert both.tolist() == again.tolist()
    assert both[0].tolist() == alone[0].tolist() == other[0].tolist() != other[1].tolist()
    another = generate(tiny, [A], max_new_tokens=9, sampling=sampling, key=jax.random.key(8)).tokens
    assert another.tolist() != alone.tolist()


def test_generated_tokens_are_drawn_from_the_model(tiny):
    """Chi-square of 2,000 first tokens, one row each; 58 is about its 0.1 % point at 29 degrees of freedom."""
    rows = 2000
    output = generate(tiny, np.tile(A, (rows, 1)), max_new_tokens=1, sampling=Sampling(), key=jax.random.key(0))
    expected = rows * np.asarray(jax.nn.softmax(tiny(jnp.asarray([A])).logits[0, -1]))
    observed = np.bincount(output.tokens[:, 0], minlength=40)
    common = expected >= 5
    expected = np.append(expected[common], expected[~common].sum())
    observed = np.append(observed[common], observed[~common].sum())
    assert len(expected) <= 30
    assert np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9)) < 58


def test_a_second_call_of_the_same_bucket_compiles_nothing(tiny):
    def call(prompts, new, key=0, **options):
        sampling = Sampling(**dict(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.1) | options)
        ids, mask = padded(prompts)
        generate(tiny, ids, mask, max_new_tokens=new, sampling=sampling, stop_ids=[3], key=jax.random.key(key))
        return list(stream(tiny, ids, mask, max_new_tokens=new, sampling=sampling, stop_ids=[3], key=jax.random.key(1)))

    with compilations() as first:
        call([[7] * 11, [8]], 10)
    with compilations() as second:
        call([[1, 2], [3, 4, 5]], 16, key=4, temperature=1.3, top_k=30, top_p=0.2, repetition_penalty=1.9)
        call([[1] * 16, [2]], 1)
    assert any("_advance" in name for name in first)
    assert second == []


def test_a_model_that_is_laid_out_already_generates_the_same(tiny):
    laid_out = jax.jit(nn.unstack)(tiny)
    assert generate(laid_out, [A], max_new_tokens=8, sampling=GREEDY).tokens.tolist() == [GREEDY_A]


def test_buckets_waste_at_most_a_quarter_beyond_the_smallest():
    for length in range(1, 5000):
        bucket = round_up(length)
        assert length <= bucket <= max(length + 15, length * 1.25) and round_up(bucket) == bucket
    assert len({round_up(length) for length in range(1, 4097)}) <= 32
