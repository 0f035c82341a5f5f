"""The recurrent encoder-decoders: padding, cached writing, beams, and what attention is good for."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import RecurrentSeq2Seq, RecurrentSeq2SeqConfig, Seq2SeqLanguageModel
from transformers_jax.training.mesh import MeshConfig, make_mesh, on_mesh, shardings
from transformers_jax.training.state import count_parameters

SIZES = dict(vocab_size=50, dim=16, depth=2, max_length=24, pad_id=0, init_std=0.5, dropout=0.0)
KINDS = {
    "fixed": dict(attention_score=None, bidirectional=False),
    "fixed lstm": dict(attention_score=None, cell="lstm"),
    "additive": {},
    "additive lstm": dict(cell="lstm", depth=1, bidirectional=False, target_vocab_size=40, tie_embeddings=False),
    "dot": dict(attention_score="dot", logits_bias=True),
}


@functools.cache
def build(kind="additive", **changes):
    config = RecurrentSeq2SeqConfig(**{**SIZES, **KINDS[kind], **changes})
    return Seq2SeqLanguageModel(RecurrentSeq2Seq(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


@jax.jit
def logits_of(model, source, target, mask=None, target_mask=None):
    return model(source, mask, decoder_input_ids=target, decoder_attention_mask=target_mask).logits


@jax.jit
def decode(conditioned, tokens, cache):
    return conditioned(tokens, cache=cache)


def ids(*shape, seed=0, high=40):
    return jnp.asarray(np.random.default_rng(seed).integers(1, high, shape), jnp.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_in_a_batch_is_the_row_alone_whatever_its_padding(kind):
    model, sources = build(kind), [ids(1, 7), ids(1, 3, seed=2), ids(1, 4, seed=4)]
    rows = jnp.concatenate([jnp.pad(source, ((0, 0), pad), constant_values=9) for source, pad in
                            zip(sources, [(0, 0), (2, 2), (0, 3)], strict=True)])  # fmt: skip
    mask = jnp.asarray([[1] * 7, [0, 0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0, 0]])
    targets, target_mask = ids(3, 5, seed=3), jnp.asarray([[1] * 5, [0, 0, 1, 1, 1], [1, 1, 0, 1, 1]])
    output = logits_of(model, rows, targets, mask, target_mask)
    for i, keep in enumerate(np.asarray(target_mask, bool)):
        alone = logits_of(model, sources[i], targets[i : i + 1, keep])
        np.testing.assert_allclose(output[i, keep], alone[0], atol=1e-5)
    left = jnp.pad(sources[1], ((0, 0), (4, 0)), constant_values=9)
    padded = logits_of(model, left, targets[:1], jnp.asarray([[0] * 4 + [1] * 3]))
    np.testing.assert_allclose(padded, logits_of(model, sources[1], targets[:1]), atol=1e-5)


def test_a_source_without_tokens_gives_finite_gradients():
    model, source, target = build(), ids(2, 5), ids(2, 4)
    mask = jnp.asarray([[1] * 5, [0] * 5])
    gradients = jax.jit(jax.grad(lambda model: jnp.sum(logits_of(model, source, target, mask))))(model)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunks", [(6,), (1, 1, 1, 1, 1, 1), (3, 2, 1)])
def test_cached_logits_are_those_of_the_whole_target(kind, chunks):
    model, source, target = build(kind), ids(2, 7), ids(2, 6, seed=1)
    mask = jnp.asarray([[1] * 7, [0, 0, 1, 1, 1, 1, 0]])
    conditioned = model.condition(source, mask)
    cache, logits, start = conditioned.init_cache(2, 11), [], 0
    for size in chunks:
        output = decode(conditioned, target[:, start : start + size], cache)
        cache, start = output.cache, start + size
        logits.append(output.logits)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), logits_of(model, source, target, mask), atol=1e-5)
    assert int(cache.index) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_beams_are_those_of_their_texts_without_copies_of_the_source(kind):
    model, source = build(kind), ids(3, 7)
    mask = jnp.asarray([[1] * 7, [1] * 4 + [0] * 3, [0] * 2 + [1] * 5])
    conditioned = model.condition(source, mask)
    for _ in range(2):  # the search overwrites its state, but not the model's
        found = beam_search(conditioned, jnp.zeros((3, 1), jnp.int32), beams=4, max_new_tokens=5,
                            num_return_sequences=4, length_penalty=0.0)  # fmt: skip
    tokens = jnp.asarray(found.tokens.reshape(12, 5))
    inputs = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    logits = logits_of(model, jnp.repeat(source, 4, axis=0), inputs, jnp.repeat(mask, 4, axis=0))
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1)
    np.testing.assert_allclose(found.scores.reshape(12), jnp.sum(chosen, axis=(1, 2)), atol=1e-4)
    memory = conditioned.init_cache(12, 6).layers.memory
    assert {len(x) for x in jax.tree.leaves(memory)} == {3}


def test_a_beam_as_wide_as_all_texts_finds_the_best_of_all():
    """Three tokens, one of which ends: all texts of up to three tokens, scored without a cache."""
    for kind in ("fixed", "additive lstm"):
        model = build(kind, vocab_size=3, target_vocab_size=None, init_std=1.0)
        source, stop = jnp.asarray([[1, 2, 1, 1]]), 0
        texts = [text for length in (1, 2, 3) for text in np.ndindex(*(3,) * length)]
        texts = [t for t in texts if stop not in t[:-1] and (t[-1] == stop or len(t) == 3)]
        inputs = jnp.asarray([[2, *text[:-1], *[0] * (3 - len(text))] for text in texts], jnp.int32)
        log_probs = jax.nn.log_softmax(logits_of(model, jnp.repeat(source, len(texts), axis=0), inputs))
        sums = [sum(float(log_probs[i, j, t]) for j, t in enumerate(text)) for i, text in enumerate(texts)]
        for penalty in (0.0, 1.0, -1.0):
            scores = [total / len(text) ** penalty for text, total in zip(texts, sums, strict=True)]
            best = int(np.argmax(scores))
            found = beam_search(
                model.condition(source), jnp.asarray([[2]]), beams=15, max_new_tokens=3, stop_ids=[stop],
                length_penalty=penalty, early_stopping="never",
            )  # fmt: skip
            assert tuple(found.tokens[0, 0, : found.lengths[0, 0]].tolist()) == texts[best]
            np.testing.assert_allclose(found.scores[0, 0], scores[best], atol=1e-4)


@pytest.mark.parametrize("kind", ["additive", "dot"])
def test_attention_is_its_formula(kind):
    """Bahdanau et al. 2015, appendix A.1.2: v . tanh(W s + U h); Luong et al. 2015, equation 8: s . h."""
    model = build(kind, depth=1)
    decoder, random = model.backbone.decoder, np.random.default_rng(0)
    states, queries = random.normal(size=(2, 5, 16)), random.normal(size=(4, 16))
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 0, 1]], bool)
    memory = model.backbone.remember(jnp.asarray(states, jnp.float32))
    context, weights = decoder.attention(jnp.asarray(queries, jnp.float32), memory, jnp.asarray(mask))
    for row, query in enumerate(queries):  # two of each source
        source = states[row // 2]
        if kind == "dot":
            scores = source @ query
        else:
            w, u, b, v = (np.asarray(x[...], np.float64) for x in (
                decoder.attention.query.kernel, decoder.attention.key.kernel, decoder.attention.key.bias,
                decoder.attention.score))  # fmt: skip
            scores = np.tanh(query @ w + source @ u + b) @ v
        expected = np.where(mask[row // 2], np.exp(scores), 0)
        expected /= expected.sum()
        np.testing.assert_allclose(weights[row], expected, atol=1e-5)
        np.testing.assert_allclose(context[row], expected @ source, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_captured_weights_show_where_each_token_looked(kind):
    model, source, target = build(kind), ids(2, 5), ids(2, 3)
    mask = jnp.asarray([[1] * 5, [1, 1, 0, 0, 0]])
    weights = model(
        source, mask, decoder_input_ids=target, capture=("cross_attention_weights",)
    ).cross_attention_weights  # fmt: skip
    if model.config.attention_score is None:
        assert weights is None
        return
    assert weights.shape == (1, 2, 1, 3, 5)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not weights[:, 1, :, :, 2:].any()
    assert model(source, mask, decoder_input_ids=target).cross_attention_weights is None


def test_dropout_needs_a_key_and_differs_from_step_to_step():
    model, source, target = build(depth=2, dropout=0.5), ids(2, 5), jnp.ones((2, 6), jnp.int32)
    hidden = jax.jit(lambda key: model(source, decoder_input_ids=target, key=key).hidden)
    plain, dropped = hidden(None), hidden(jax.random.key(0))
    np.testing.assert_array_equal(plain, hidden(None))
    np.testing.assert_array_equal(dropped, hidden(jax.random.key(0)))
    assert np.abs(dropped - plain).max() > 0.1
    zeros = np.asarray(dropped == 0)
    assert 0.3 < zeros.mean() < 0.7 and (zeros[:, 1:] != zeros[:, :-1]).any()


@pytest.mark.parametrize("kind", ["fixed lstm", "additive"])
def test_a_mesh_gives_the_same_gradients_and_vmap_those_of_each_row(kind):
    model, source, target = build(kind), ids(8, 7), ids(8, 6, seed=1)

    def loss(model, source, target):
        logits = model(source, decoder_input_ids=target).logits
        return -jnp.mean(jax.nn.log_softmax(logits)[..., 3])

    expected = jax.jit(jax.grad(loss))(model, source, target)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = jax.device_put(model, shardings(model, mesh))
    found = jax.jit(on_mesh(jax.grad(loss), mesh))(placed, source, target)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    each = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0, 0)))(model, source[:, None], target[:, None])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x.mean(0), y, atol=1e-6), each, expected)


def test_bfloat16_computes_in_bfloat16_and_gives_logits_in_float32():
    model, source, target = build(dtype="bfloat16"), ids(2, 7), ids(2, 6, seed=1)
    output = jax.jit(lambda: model(source, decoder_input_ids=target))()
    assert output.hidden.dtype == jnp.bfloat16 and output.logits.dtype == jnp.float32
    exact = logits_of(build(), source, target)
    assert 0 < np.abs(output.logits - exact).max() < 0.05 * np.abs(exact).max()


def test_attention_learns_to_reverse_what_is_too_long_for_a_fixed_context():
    """Bahdanau et al. 2015: one vector for all of a source is the bottleneck. The same sizes, updates and texts."""
    length, symbols = 10, 10

    def batch(seed):
        source = jax.random.randint(jax.random.key(seed), (32, length), 1, symbols)
        return source, source[:, ::-1]

    def loss(model, source, target):
        before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
        logits = model(source, decoder_input_ids=before).logits
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, target))

    def share_right(**kind):
        config = RecurrentSeq2SeqConfig(vocab_size=symbols, dim=32, pad_id=0, dropout=0.0, **kind)
        model = Seq2SeqLanguageModel(config.build(rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def train(model, state):
            def step(carry, seed):
                model, state = carry
                gradients = jax.grad(loss)(model, *batch(seed))
                updates, state = optimizer.update(gradients, state, model)
                return (optax.apply_updates(model, updates), state), None

            return jax.lax.scan(step, (model, state), jnp.arange(300))[0]

        model, _ = train(model, optimizer.init(model))
        source, target = batch(10_000)
        output = generate(model.condition(source), jnp.zeros((32, 1), jnp.int32), max_new_tokens=length,
                          sampling=Sampling(temperature=0))  # fmt: skip
        return float(np.mean(output.tokens == np.asarray(target)))

    attention, fixed = share_right(), share_right(attention_score=None)
    assert attention > 0.95, (attention, fixed)
    assert fixed < 0.85, (attention, fixed)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # Three gates of GRUs with one bias each, the embedding, start and output layers of Cho et al.'s sizes.
        (
            RecurrentSeq2SeqConfig.fixed_context(vocab_size=30),
            30 * 1000 + 3 * (2 * 1000**2 + 1000) + 3 * (3 * 1000**2 + 1000) + 1000 * 1001 + 2001 * 1000,
        ),
        # The encoder's halves each read 1,000 and have 500; attention has two matrices, a bias and a vector.
        (
            RecurrentSeq2SeqConfig.with_attention(vocab_size=30),
            30 * 1000
            + 2 * 3 * (1000 * 500 + 500**2 + 500)
            + 3 * (3 * 1000**2 + 1000)
            + 1000 * 1001
            + 2001 * 1000
            + 2 * 1000**2
            + 2 * 1000,
        ),
    ],
    ids=["fixed_context", "with_attention"],
)
def test_named_sizes_have_their_parameters_and_their_operations(config, expected):
    model = jax.eval_shape(lambda: Seq2SeqLanguageModel(RecurrentSeq2Seq(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))
    assert count_parameters(model) == expected
    pairs = 0 if config.attention_score is None else 12 * 1000 * 20**2
    weights = (config.flops_per_example(20) - pairs) / (6 * 20)  # all but biases, score and the start's layer
    assert weights == pytest.approx(expected - 1000 * 1001, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(cell="elman"), "unknown cell 'elman'; there are gru, lstm"),
        (dict(attention_score="general"), "attention_score='general' is unknown; there are additive, dot and None"),
        (dict(dim=7), "dim=7 must be even"),
        (dict(depth=0), "depth=0 must be at least 1"),
        (dict(dropout=1.0), "dropout=1.0 must be at least 0 and below 1"),
        (dict(max_length=0), "max_length=0 must be at least 1"),
        (dict(vocab_size=None, target_vocab_size=9), "target_vocab_size=9 needs vocab_size"),
    ],
)
def test_impossible_configurations_are_named(changes, message):
    config = RecurrentSeq2SeqConfig()
    for name, value in changes.items():
        object.__setattr__(config, name, value)  # past the tests' own type checks
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_wrong_inputs_are_named():
    model = build()
    with pytest.raises(ValueError, match="input_ids have 25 tokens, but the model has 24 positions"):
        model(ids(1, 25), decoder_input_ids=ids(1, 2))
    with pytest.raises(ValueError, match="decoder_input_ids hold 50"):
        model(ids(1, 5), decoder_input_ids=jnp.full((1, 2), 50))
    with pytest.raises(ValueError, match="decode needs a context"):
        model.backbone.decode(ids(1, 2))
    with pytest.raises(ValueError, match="cannot capture gates"):
        model(ids(1, 5), decoder_input_ids=ids(1, 2), capture=("gates",))
    assert dataclasses.replace(model.config, max_length=None).build(rngs=nnx.Rngs(0)).encode(ids(1, 99)) is not None
