"""What a BERT and the heads promise whatever their weights: padding, settings, types and limits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    MaskedLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)

VOCAB, LENGTH = 37, 11
# Odd sizes, and weights large enough for every part to matter.
SIZES = dict(vocab_size=VOCAB, max_length=16, dim=12, depth=3, heads=3, mlp_dim=20, init_std=0.3, token_types=3)
LABELS = ("a", "b", "c", "d", "e")
FAMILIES = {
    "bert": {},
    "roberta": dict(position_offset=2, classifier_activation="tanh", pad_id=1),
    "distilbert": dict(token_types=0, classifier_activation="relu"),
    "mean": dict(classifier_activation="tanh", pooling="mean"),
}
HEADS = (MaskedLanguageModel, SequenceClassifier, TokenClassifier, SpanPredictor)


def build(head=None, family="bert", **changes):
    config = BertConfig(**SIZES | FAMILIES[family] | dict(labels=LABELS) | changes).for_head(head)
    backbone = Bert(config, rngs=nnx.Rngs(0))
    return backbone if head is None else head(backbone, rngs=nnx.Rngs(1))


def draw(batch=2, length=LENGTH, seed=0, vocab=VOCAB):
    return jnp.asarray(np.random.default_rng(seed).integers(0, vocab, (batch, length)), jnp.int32)


@partial(jax.jit, static_argnames="capture")
def run(model, ids, mask=None, capture=(), **inputs):
    return model(ids, mask, capture=capture, **inputs)


def pad(x, left, right, value=0):
    return jnp.pad(x, ((0, 0), (left, right)), constant_values=value)


# Padding


@pytest.mark.parametrize(
    ("family", "head"),
    [
        *(("bert", head) for head in HEADS),
        *((family, SequenceClassifier) for family in FAMILIES if family != "bert"),
    ],
)
def test_padding_changes_nothing(family, head):
    """On either side or both, whatever the padding's id, and beyond max_length."""
    model = build(head, family, next_sentence=family == "bert")
    types = {"token_type_ids": draw(seed=1, vocab=3)} if family != "distilbert" else {}
    whole = run(model, draw(), **types)
    for left, right in ((0, 7), (7, 0), (4, 3)):
        mask = pad(jnp.ones((2, LENGTH), jnp.int32), left, right)
        padded = {name: pad(value, left, right, 2) for name, value in types.items()}
        output = run(model, pad(draw(), left, right, 5), mask, **padded)
        place = slice(None) if head is SequenceClassifier else slice(left, left + LENGTH)
        np.testing.assert_allclose(output.logits[:, place], whole.logits, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(output.hidden[:, left : left + LENGTH], whole.hidden, rtol=1e-5, atol=1e-5)
        assert np.isfinite(output.logits).all()
        for name in ("pooled", "next_sentence_logits"):
            if getattr(whole, name) is not None:
                np.testing.assert_allclose(getattr(output, name), getattr(whole, name), rtol=1e-5, atol=1e-5)


def test_rows_of_different_length_are_what_they_are_alone():
    model, ids = build(SequenceClassifier), draw(batch=3)
    lengths, starts = (11, 1, 6), (0, 10, 2)
    places = np.arange(LENGTH)[None]
    mask = jnp.asarray(
        [(places[0] >= s) & (places[0] < s + n) for s, n in zip(starts, lengths, strict=True)], jnp.int32
    )
    logits = run(model, ids, mask).logits
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        alone = run(model, ids[row : row + 1, start : start + length]).logits
        np.testing.assert_allclose(logits[row], alone[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("left", "right"), [(0, 2), (2, 0), (1, 1)])
def test_a_decoders_classifier_reads_the_last_real_token(left, right):
    """Case C03: the mask decides what is padding, not the ids: a last token with the padding's id counts."""
    config = GPTConfig(**{k: v for k, v in SIZES.items() if k != "token_types"}, labels=LABELS, pad_id=0)
    model = SequenceClassifier(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    run = jax.jit(lambda model, ids, mask=None: model(ids, mask))
    for row in ([5, 6, 7], [5, 0, 7], [5, 6, 0]):
        ids = jnp.asarray([row, [8, 9, 0]], jnp.int32)
        alone = run(model, ids)
        np.testing.assert_allclose(alone.pooled, alone.hidden[:, -1], rtol=1e-6)
        mask = pad(jnp.ones((2, 3), jnp.int32), left, right)
        np.testing.assert_allclose(run(model, pad(ids, left, right), mask).logits, alone.logits, rtol=1e-5, atol=1e-5)


# What is read out


def test_masked_positions_are_those_of_the_whole():
    model, places = build(MaskedLanguageModel), jnp.asarray([[3, 0, 3], [10, 9, 1]], jnp.int32)
    whole = run(model, draw()).logits
    some = run(model, draw(), masked_positions=places).logits
    assert some.shape == (2, 3, VOCAB)
    np.testing.assert_allclose(some, jnp.take_along_axis(whole, places[..., None], axis=1), rtol=1e-5, atol=1e-5)


def test_shapes():
    for head, shape in zip(HEADS, [(2, LENGTH, VOCAB), (2, 5), (2, LENGTH, 5), (2, LENGTH, 2)], strict=True):
        assert run(build(head), draw()).logits.shape == shape
    output = run(build(), draw(), capture=("hidden_states", "attention_weights"))
    assert output.hidden.shape == (2, LENGTH, 12) and output.pooled.shape == (2, 12) and output.logits is None
    assert output.hidden_states.shape == (3, 2, LENGTH, 12)
    assert output.attention_weights.shape == (3, 2, 3, LENGTH, LENGTH)
    np.testing.assert_allclose(output.attention_weights.sum(-1), 1, rtol=1e-5)


def test_the_pooler_is_there_where_it_is_read():
    for head, family, pooled in [
        *((SequenceClassifier, "bert", True), (SequenceClassifier, "roberta", False), (TokenClassifier, "bert", False)),
        *((SpanPredictor, "bert", False), (MaskedLanguageModel, "bert", False)),
    ]:
        assert (build(head, family).backbone.pooler is not None) == pooled
    assert build(MaskedLanguageModel, next_sentence=True).backbone.pooler is not None


def test_every_input_counts():
    model, ids = build(), draw()
    whole = run(model, ids).hidden
    types, positions = jnp.full((2, LENGTH), 2), jnp.tile(jnp.arange(LENGTH)[::-1], (2, 1))
    np.testing.assert_allclose(run(model, ids, token_type_ids=types * 0).hidden, whole, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(run(model, ids, positions=positions[:, ::-1]).hidden, whole, rtol=1e-5, atol=1e-5)
    for changed in (
        run(model, ids, token_type_ids=types),
        run(model, ids, positions=positions),
        run(model, ids, jnp.ones_like(ids).at[:, 3].set(0)),
        run(model, ids.at[:, -1].set(0)),  # a token sees those behind it
    ):
        assert np.abs(changed.hidden[:, 0] - whole[:, 0]).max() > 0.01


def test_without_jit_it_is_the_same():
    model, ids = build(SequenceClassifier), draw()
    np.testing.assert_allclose(model(ids).logits, run(model, ids).logits, rtol=1e-5, atol=1e-5)


def test_one_token():
    model = build(SequenceClassifier)
    logits = run(model, draw(length=1)).logits
    assert np.isfinite(logits).all() and not np.allclose(logits[0], logits[1])


# Limits


@pytest.mark.parametrize("jitted", [True, False])
def test_too_long(jitted):
    model = build()
    call = jax.jit(lambda model, ids: model(ids)) if jitted else (lambda model, ids: model(ids))
    assert np.isfinite(call(model, draw(length=16)).hidden).all()
    with pytest.raises(ValueError, match="17 tokens are more than the 16 positions; cut the text"):
        call(model, draw(length=17))


def test_more_tokens_than_positions_among_the_padding():
    """17 places may hold fewer tokens; where the mask is known, one token too many is an error and not NaN."""
    model, ids, mask = build(), draw(length=17), jnp.ones((2, 17), jnp.int32)
    assert np.isfinite(model(ids, mask.at[:, 4].set(0)).hidden).all()
    with pytest.raises(ValueError, match="positions hold 16 but the model has 0 to 15"):
        model(ids, mask)
    with pytest.raises(ValueError, match="positions hold 16 but the model has 0 to 15"):
        model(draw(length=1), positions=jnp.full((2, 1), 16))


def test_ids_out_of_range():
    model, ids = build(), draw()
    for wrong, value in ((VOCAB, VOCAB), (-100, -100)):
        with pytest.raises(ValueError, match=f"input_ids hold {value} but the vocabulary is 0 to {VOCAB - 1}"):
            model(ids.at[1, 3].set(wrong))
    with pytest.raises(ValueError, match="token_type_ids hold 3 but the model has 0 to 2"):
        model(ids, token_type_ids=jnp.full_like(ids, 3))
    with pytest.raises(ValueError, match="cannot capture logits"):
        model(ids, capture=("logits",))


# Transformations, dropout, types


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_jit_grad_and_vmap(head):
    model, ids = build(head, next_sentence=True), draw(batch=3)
    logits = run(model, ids).logits
    mapped = jax.jit(jax.vmap(lambda model, row: model(row[None]).logits[0], in_axes=(None, 0)))(model, ids)
    np.testing.assert_allclose(mapped, logits, rtol=1e-5, atol=1e-5)

    def loss(model):
        output = model(ids)
        return jnp.sum(output.logits**2) + (
            0 if output.next_sentence_logits is None else jnp.sum(output.next_sentence_logits)
        )

    gradients = jax.jit(jax.grad(loss))(model)
    unused = {path for path, leaf in jax.tree.leaves_with_path(gradients) if not np.any(leaf)}
    assert not unused, unused
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("head", [MaskedLanguageModel, SequenceClassifier])
def test_dropout_needs_a_key(head):
    model, ids = build(head), draw()
    plain, again = run(model, ids).logits, run(model, ids).logits
    np.testing.assert_array_equal(plain, again)
    one, same, other = (run(model, ids, key=jax.random.key(seed)).logits for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - plain).max() > 1e-3 and np.abs(one - other).max() > 1e-3
    off = build(head, dropout=0.0, attention_dropout=0.0)
    np.testing.assert_allclose(run(off, ids, key=jax.random.key(0)).logits, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", [SequenceClassifier, TokenClassifier])
def test_a_classifier_has_its_own_dropout(head):
    rates = dict(dropout=0.0, attention_dropout=0.0)
    plain = run(build(head, **rates), draw()).logits
    dropped = run(build(head, **rates, classifier_dropout=0.5), draw(), key=jax.random.key(0)).logits
    assert np.abs(dropped - plain).max() > 0.01


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)
def test_bfloat16_keeps_logits_in_float32(head):
    exact = run(build(head, next_sentence=True), draw())
    half = run(build(head, next_sentence=True, dtype="bfloat16"), draw())
    assert half.hidden.dtype == jnp.bfloat16 and half.logits.dtype == jnp.float32
    if head is MaskedLanguageModel:
        assert half.next_sentence_logits.dtype == jnp.float32
    np.testing.assert_allclose(half.logits, exact.logits, atol=0.05 * np.abs(exact.logits).max())  # 8 bits of mantissa
    stored = build(head, dtype="bfloat16", param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype("bfloat16")}


def test_settings_of_speed_change_no_number():
    @jax.jit
    @jax.value_and_grad
    def loss(model, ids):
        return jnp.sum(model(ids, key=jax.random.key(0)).logits ** 2)

    value, gradients = loss(build(SequenceClassifier), draw())
    # By the largest of all gradients: those of the key's bias are rounding.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    for changes in ({"remat": "full"}, {"unroll": 3}):
        other_value, others = loss(build(SequenceClassifier, **changes), draw())
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        for leaf, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(others), strict=True):
            np.testing.assert_allclose(other, leaf, rtol=1e-4, atol=1e-5 * largest)
