"""The encoder-decoder: published sizes, cached writing, padding, beams that share a source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.nn import RelativePositionBias, RMSNorm, unstack
from transformers_jax.nn.mlp import MLP
from transformers_jax.training.state import count_parameters

FAR = pytest.mark.exhaustive
SIZES = dict(vocab_size=50, dim=32, depth=2, decoder_depth=3, heads=4, max_length=24, pad_id=0, init_std=0.2)
KINDS = {
    "paper": {},
    "learned": dict(positions="learned", position_offset=2, embedding_norm=True, scale_embedding=False),
    "t5": dict(positions="relative", norm="pre", norm_type="rms", use_bias=False, scale_attention=False, head_dim=5),
    "own biases": dict(positions="relative", norm="pre", gated=True, relative_per_layer=True, max_length=None),
    "two vocabularies": dict(target_vocab_size=40, logits_bias=True, tie_embeddings=False),
}
# Beams ask nothing of positions and biases: what they are is tested without beams.
MOST = [kind if kind not in ("learned", "own biases") else pytest.param(kind, marks=FAR) for kind in KINDS]


def build(kind="paper", **changes):
    config = EncoderDecoderConfig(**{**SIZES, **KINDS[kind], "dropout": 0.0, **changes})
    return Seq2SeqLanguageModel(EncoderDecoder(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


@jax.jit
def logits_of(model, source, target, mask=None, target_mask=None):
    return model(source, mask, decoder_input_ids=target, decoder_attention_mask=target_mask).logits


@jax.jit
def decode(conditioned, tokens, cache):
    return conditioned(tokens, cache=cache)


def ids(*shape, seed=0, high=40):
    return jnp.asarray(np.random.default_rng(seed).integers(1, high, shape), jnp.int32)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # transformers counts the bias on the logits, of zeros, as no parameter.
        (EncoderDecoderConfig.bart_base(), 139_420_416 + 50_265),
        (EncoderDecoderConfig.bart_large(), 406_291_456 + 50_265),
        (EncoderDecoderConfig.t5_small(), 60_506_624),
        (EncoderDecoderConfig.t5_base(), 222_903_552),
        (EncoderDecoderConfig.t5_large(), 737_668_096),
        (EncoderDecoderConfig.t5_3b(), 2_851_598_336),
        (EncoderDecoderConfig.t5_11b(), 11_307_321_344),
        # The sum of Vaswani et al.'s layers: 4 d^2 an attention, 2 d m an MLP, their biases, two numbers a norm.
        (
            EncoderDecoderConfig.base(vocab_size=37_000),
            37_000 * 512 + 6 * (3 * (4 * 512**2 + 4 * 512) + 2 * (2 * 512 * 2048 + 2048 + 512) + 5 * 2 * 512),
        ),
        (
            EncoderDecoderConfig.big(vocab_size=37_000),
            37_000 * 1024 + 6 * (3 * (4 * 1024**2 + 4 * 1024) + 2 * (2 * 1024 * 4096 + 4096 + 1024) + 5 * 2 * 1024),
        ),
    ],
    ids=lambda value: f"{value:,}" if isinstance(value, int) else "",
)
def test_published_sizes_have_their_numbers_of_parameters(config, parameters):
    model = jax.eval_shape(lambda: Seq2SeqLanguageModel(EncoderDecoder(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))
    assert count_parameters(model) == parameters


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("chunks", "laid_out"),
    [pytest.param((6,), False, marks=FAR), ((1, 1, 1, 1, 1, 1), True), ((3, 2, 1), False)],
)
def test_cached_logits_are_those_of_the_whole_target(kind, chunks, laid_out):
    model, source, target = build(kind), ids(2, 7), ids(2, 6, seed=1)
    mask = jnp.asarray([[1] * 7, [0, 0, 1, 1, 1, 1, 0]])
    expected = logits_of(model, source, target, mask)
    conditioned = model.condition(source, mask)
    conditioned = unstack(conditioned) if laid_out else conditioned
    cache, logits, start = conditioned.init_cache(2, 11), [], 0
    for size in chunks:
        output = decode(conditioned, target[:, start : start + size], cache)
        cache, start = output.cache, start + size
        logits.append(output.logits)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_a_batch_is_the_row_alone_and_padding_changes_nothing(kind):
    model, sources = build(kind), [ids(1, 7), ids(1, 3, seed=2)]
    rows = jnp.concatenate([sources[0], jnp.pad(sources[1], ((0, 0), (2, 2)), constant_values=9)])
    mask = jnp.asarray([[1] * 7, [0, 0, 1, 1, 1, 0, 0]])
    targets, target_mask = ids(2, 5, seed=3), jnp.asarray([[1] * 5, [0, 0, 1, 1, 1]])
    output = logits_of(model, rows, targets, mask, target_mask)
    first = logits_of(model, sources[0], targets[:1])[0]
    second = logits_of(model, sources[1], targets[1:, 2:])[0]
    np.testing.assert_allclose(output[0], first, atol=2e-4)
    np.testing.assert_allclose(output[1, 2:], second, atol=2e-4)


@pytest.mark.parametrize("kind", MOST)
def test_beams_look_at_their_source_without_copies_of_it(kind):
    """Each beam's score is the sum of its tokens' log-probabilities, computed without a cache."""
    model, source = build(kind), ids(3, 7)
    found = beam_search(model.condition(source), jnp.zeros((3, 1), jnp.int32), beams=4, max_new_tokens=5,
                        num_return_sequences=4, length_penalty=0.0)  # fmt: skip
    for row in range(3):
        for beam in range(4):
            tokens = jnp.asarray(found.tokens[row, beam])[None]
            inputs = jnp.concatenate([jnp.zeros((1, 1), jnp.int32), tokens[:, :-1]], axis=1)
            logits = logits_of(model, source[row : row + 1], inputs)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
            np.testing.assert_allclose(found.scores[row, beam], jnp.sum(chosen), atol=1e-3)
    conditioned = model.condition(source)
    cache = conditioned.init_cache(12, 6)  # four beams each
    assert {x.shape[1] for x in jax.tree.leaves(cache.layers[1])} == {3}


def test_beams_see_of_their_source_what_a_row_alone_sees():
    model, source, targets = build(), ids(2, 7), ids(6, 4, seed=1)
    backbone, capture = model.backbone, ("cross_attention_weights",)
    together = backbone.decode(targets, context=backbone.remember(backbone.encode(source).hidden), capture=capture)
    each = jnp.repeat(source, 3, axis=0)
    alone = backbone(each, decoder_input_ids=targets, capture=capture)
    np.testing.assert_allclose(together.hidden, alone.hidden, atol=1e-5)
    np.testing.assert_allclose(together.cross_attention_weights, alone.cross_attention_weights, atol=1e-5)


def test_greedy_writing_ends_by_itself_and_is_the_best_token_each_time():
    model, source = build(), ids(2, 7)
    start = jnp.zeros((2, 1), jnp.int32)
    output = generate(model.condition(source), start, max_new_tokens=6, sampling=Sampling(temperature=0))
    whole = logits_of(model, source, jnp.concatenate([start, output.tokens[:, :-1]], axis=1))
    np.testing.assert_array_equal(output.tokens, whole.argmax(-1))


def all_texts(model, source, most):
    """(text, sum of its log-probabilities) of every text of tokens 1 and 2 that ends with 0 or after `most` tokens, by
    NumPy from the logits of whole targets: no cache, no search, no padding."""
    firsts = np.array(list(np.ndindex(*(2,) * (most - 1)))) + 1
    inputs = np.pad(firsts, ((0, 0), (1, 0)), constant_values=2)
    rows = jnp.repeat(source[None], len(firsts), axis=0)
    logits = np.asarray(logits_of(model, rows, jnp.asarray(inputs, jnp.int32)), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    texts = {}
    for first, row in zip(firsts.tolist(), log_probs, strict=True):
        for length in range(most):
            for last in (0, 1, 2) if length == most - 1 else (0,):
                text = (*first[:length], last)
                texts[text] = sum(row[place, token] for place, token in enumerate(text))
    return texts.items()


@pytest.mark.parametrize("kind", ["paper", "t5", "two vocabularies"])
@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_a_beam_as_wide_as_all_texts_ranks_all_of_them(kind, early_stopping):
    """Three tokens, one of which ends: 15 texts of up to three, for two sources of unequal length in one batch."""
    sizes = dict(target_vocab_size=3) if kind == "two vocabularies" else dict(vocab_size=3)
    model = build(kind, init_std=0.5, **sizes)
    sources = [jnp.asarray([1, 2, 1, 1, 2]), jnp.asarray([2, 2, 1])]
    expected = [all_texts(model, source, 3) for source in sources]
    for front in (0, 1, 2):  # so much of the padding stands before the text
        rows = jnp.stack([sources[0], jnp.pad(sources[1], (front, 2 - front), constant_values=1)])
        mask = jnp.ones_like(rows).at[1].set(jnp.pad(jnp.ones(3, jnp.int32), (front, 2 - front)))
        conditioned = model.condition(rows, mask)
        for penalty in (0.0, 1.0, 2.0, -1.0):
            found = beam_search(
                conditioned, np.full((2, 1), 2), beams=15, max_new_tokens=3, num_return_sequences=15, stop_ids=[0],
                length_penalty=penalty, early_stopping=early_stopping,
            )  # fmt: skip
            for row, texts in enumerate(expected):
                ranked = sorted(((total / len(text) ** penalty, text) for text, total in texts), reverse=True)
                written = zip(found.tokens[row].tolist(), found.lengths[row].tolist(), strict=True)
                assert [tuple(tokens[:length]) for tokens, length in written] == [text for _, text in ranked]
                np.testing.assert_allclose(found.scores[row], [score for score, _ in ranked], rtol=1e-4)


def test_relative_buckets_are_those_of_the_formula():
    """Raffel et al. 2020, section 2.1: exact up to a half, then logarithmic up to the largest distance."""
    for bidirectional, buckets, most in ((True, 32, 128), (False, 32, 128), (True, 8, 12), (False, 6, 20)):
        bias = RelativePositionBias(
            2, buckets=buckets, max_distance=most, bidirectional=bidirectional, rngs=nnx.Rngs(0)
        )
        count = buckets // 2 if bidirectional else buckets
        exact = count // 2

        def expected(distance, bidirectional=bidirectional, count=count, exact=exact, most=most):
            first = count if bidirectional and distance > 0 else 0
            size = abs(distance) if bidirectional else max(-distance, 0)
            if size >= exact:
                size = min(exact + int(np.log(size / exact) / np.log(most / exact) * (count - exact)), count - 1)
            return first + size

        # Not at the borders themselves, where float32 decides.
        distances = [d for d in range(-200, 201) if expected(d - 1) == expected(d) == expected(d + 1) or abs(d) < exact]
        np.testing.assert_array_equal(bias.bucket(jnp.asarray(distances)), [expected(d) for d in distances])
    assert bias(3, 5, offset=2).shape == (1, 2, 3, 5)
    np.testing.assert_array_equal(bias(1, 5, offset=2)[0, :, 0], bias(5, 5)[0, :, 2])


def test_rms_norm_and_gated_mlp_are_their_formulas():
    x = jax.random.normal(jax.random.key(0), (2, 3, 8)) * 5 + 2
    norm = RMSNorm(8, epsilon=1e-3, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.arange(8.0)
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.arange(8)
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)
    mlp = MLP(8, 12, activation="silu", gated=True, use_bias=False, rngs=nnx.Rngs(0))
    up, gate, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mlp.up, mlp.gate, mlp.down))
    gated = wide @ gate
    np.testing.assert_allclose(mlp(x), (gated / (1 + np.exp(-gated)) * (wide @ up)) @ down, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(norm_type="batch"), "unknown norm 'batch'"),
        (dict(max_length=None, positions="learned"), "max_length=None needs positions"),
        (dict(decoder_depth=0), "decoder_depth=0 must be at least 1"),
        (dict(heads=5), "dim=32 is not a multiple of heads=5"),
        (dict(positions="relative", relative_buckets=2), "leave no bucket"),
    ],
)
def test_impossible_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_too_long_sources_and_targets_are_errors():
    model = build()
    with pytest.raises(ValueError, match="input_ids have 25 tokens, but the model has 24 positions"):
        model(ids(1, 25), decoder_input_ids=ids(1, 2))
    with pytest.raises(ValueError, match="decoder_input_ids have 30 tokens"):
        model(ids(1, 5), decoder_input_ids=ids(1, 30))
    with pytest.raises(ValueError, match="neither start_id nor pad_id"):
        _ = build(pad_id=None).config.start
