"""What a GPT promises whatever its weights: padding, caches, settings and types change no result."""

import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.nn import stacked_mask, unstack

VOCAB, LENGTH, DEPTH, HEADS = 37, 11, 3, 3
# Odd sizes, and weights large enough for every part to matter.
CONFIG = dict(vocab_size=VOCAB, max_length=16, dim=12, depth=DEPTH, heads=HEADS, mlp_dim=20, init_std=0.3)


def build(**changes) -> LanguageModel:
    config = GPTConfig(**CONFIG | changes)
    return LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def model():
    return build()


def draw(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


@partial(jax.jit, static_argnames=("capture", "logits_to_keep"))
def run(model, ids, mask=None, positions=None, cache=None, key=None, *, capture=(), logits_to_keep=None):
    return model(
        ids, mask, positions=positions, cache=cache, key=key, capture=capture, logits_to_keep=logits_to_keep
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(model):
    """The logits of `draw()`, without padding or cache."""
    return np.asarray(run(model, draw()).logits)


@pytest.mark.parametrize("call", [run, LanguageModel.__call__], ids=["jitted", "eager"])
@pytest.mark.parametrize("left", [0, 2, 4])
def test_padding_changes_nothing(model, whole, call, left):
    """On the left, on the right, and on both sides; also beyond max_length, and whatever the padding's id is."""
    width = LENGTH + 6
    ids, mask = np.full((2, width), 5, np.int32), np.zeros((2, width), np.int32)
    ids[:, left : left + LENGTH], mask[:, left : left + LENGTH] = draw(), 1
    assert width > model.config.max_length
    logits = call(model, jnp.asarray(ids), jnp.asarray(mask)).logits
    np.testing.assert_allclose(logits[:, left : left + LENGTH], whole, atol=1e-5)
    assert np.isfinite(logits).all()


def test_rows_of_different_length_are_what_they_are_alone(model, whole):
    ids, mask = draw(), np.ones((2, LENGTH), np.int32)
    ids[0], mask[0] = np.r_[np.full(4, 7), ids[0, : LENGTH - 4]], np.r_[np.zeros(4), np.ones(LENGTH - 4)]
    logits = run(model, ids, mask).logits
    np.testing.assert_allclose(logits[0, 4:], whole[0, : LENGTH - 4], atol=1e-5)
    np.testing.assert_allclose(logits[1], whole[1], atol=1e-5)


def test_a_mask_of_ones_and_counted_positions_change_nothing(model, whole):
    ones, positions = np.ones((2, LENGTH), np.int32), np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    np.testing.assert_allclose(run(model, draw(), ones).logits, whole, atol=1e-6)
    np.testing.assert_allclose(run(model, draw(), None, positions).logits, whole, atol=1e-6)
    assert np.abs(run(model, draw(), None, positions[:, ::-1]).logits - whole).max() > 0.1  # they are used


def test_later_tokens_change_nothing_before_them(model, whole):
    ids = draw()
    ids[:, 6:] = (ids[:, 6:] + 1) % VOCAB
    logits = np.asarray(run(model, ids).logits)
    np.testing.assert_allclose(logits[:, :6], whole[:, :6], atol=1e-6)
    assert (np.abs(logits[:, 6:] - whole[:, 6:]).max(-1) > 1e-3).all()


def through_cache(model, ids, mask, lengths, slots):
    cache, outputs, start = model.init_cache(len(ids), slots), [], 0
    for length in lengths:
        part = slice(start, start + length)
        output = run(model, ids[:, part], None if mask is None else mask[:, part], cache=cache)
        cache, start = output.cache, start + length
        outputs.append(output.logits)
    return np.concatenate(outputs, axis=1), cache


@pytest.mark.parametrize(
    ("loose", "slots"), [(False, LENGTH), (False, 64), (True, 64)], ids=["stacked", "longer", "unstacked"]
)
def test_cached_chunks_equal_the_whole(model, whole, loose, slots):
    """A prompt of 5 at once, as 3 + 2 or one by one, then token by token, with 2 places of padding in front of a row;
    a longer cache changes nothing."""
    ids, mask = draw(), np.ones((2, LENGTH), np.int32)
    ids[1], mask[1] = np.r_[[9, 9], ids[1, :-2]], np.r_[[0, 0], np.ones(LENGTH - 2)]
    served = jax.jit(unstack)(model) if loose else model
    for lengths in ((5,) + (1,) * 6, (3, 2) + (1,) * 6, (1,) * LENGTH):
        logits, cache = through_cache(served, ids, mask, lengths, slots)
        np.testing.assert_allclose(logits[0], whole[0], atol=1e-5)
        np.testing.assert_allclose(logits[1, 2:], whole[1, :-2], atol=1e-5)
        assert int(cache.index) == LENGTH
        assert cache.mask.sum(-1).tolist() == [LENGTH, LENGTH - 2]


def test_padding_on_the_right_of_a_chunk(model, whole):
    """Prompts of 3 and 5 tokens padded on the right, then both go on: the padding takes a slot, but no position."""
    ids = np.zeros((2, 5), np.int32)
    ids[0, :3], ids[1] = draw()[0, :3], draw()[1, :5]
    mask = (np.arange(5) < np.array([[3], [5]])).astype(np.int32)
    first = run(model, ids, mask, cache=model.init_cache(2, 20))
    following = np.stack([draw()[0, 3:6], draw()[1, 5:8]])
    logits = run(model, following, cache=first.cache).logits
    np.testing.assert_allclose(logits[0], whole[0, 3:6], atol=1e-5)
    np.testing.assert_allclose(logits[1], whole[1, 5:8], atol=1e-5)


def test_a_finished_row_may_get_padding_for_ever(model):
    """A row that has used up all positions stays finite, and the other is not disturbed."""
    ids, longest = draw(length=24), CONFIG["max_length"]
    mask = np.ones((2, 24), np.int32)
    mask[0, longest:] = 0
    mask[1, :8] = 0  # this row has 8 places of padding in front and goes on to the end
    logits, _ = through_cache(model, ids, mask, (longest, 8), 24)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[1, 8:], run(model, ids[1:, 8:]).logits[0], atol=1e-5)


def test_cache_rows_can_be_taken(model, whole):
    first = run(model, draw()[:, :6], cache=model.init_cache(2, LENGTH))
    swapped = first.cache.take(jnp.array([1, 0, 1]))
    logits = run(model, draw()[[1, 0, 1], 6:], cache=swapped).logits
    np.testing.assert_allclose(logits, whole[[1, 0, 1], 6:], atol=1e-5)


@jax.jit
def gradients_and_logits(model):
    def loss(model):
        logits = model(jnp.asarray(draw())).logits
        return jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), draw(seed=1)[..., None], -1)), logits

    return jax.grad(loss, has_aux=True)(model)


@pytest.mark.parametrize("settings", [dict(remat="dots", unroll=3), dict(remat="full", attention="xla")], ids=str)
def test_settings_change_no_logits_and_no_gradients(model, settings):
    gradients, logits = gradients_and_logits(build(**settings))
    expected_gradients, expected = gradients_and_logits(model)
    np.testing.assert_allclose(logits, expected, atol=2e-6)
    for one, two in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6, rtol=1e-4)


def test_capture(model, whole):
    """Every layer's input and attention weights: the first input is the embedding, the weights are causal."""
    output = run(model, draw(), capture=("hidden_states", "attention_weights"))
    np.testing.assert_allclose(output.logits, whole, atol=1e-6)
    assert output.hidden_states.shape == (DEPTH, 2, LENGTH, 12)
    backbone = model.backbone
    embedded = backbone.embedding(jnp.asarray(draw())) + backbone.positions(LENGTH)
    np.testing.assert_allclose(output.hidden_states[0], embedded, atol=1e-6)
    weights = np.asarray(output.attention_weights)
    assert weights.shape == (DEPTH, 2, HEADS, LENGTH, LENGTH)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (weights[..., ~np.tril(np.ones((LENGTH, LENGTH), bool))] == 0).all()
    assert run(model, draw()).hidden_states is None and run(model, draw()).attention_weights is None
    with pytest.raises(ValueError, match="cannot capture attention; there are hidden_states, attention_weights"):
        model(jnp.asarray(draw()), capture=("attention",))


def test_logits_to_keep(model, whole):
    np.testing.assert_allclose(run(model, draw(), logits_to_keep=2).logits, whole[:, -2:], atol=1e-6)
    assert run(model, draw(), logits_to_keep=50).logits.shape == whole.shape
    with pytest.raises(ValueError, match="logits_to_keep=0 must be at least 1, or None"):
        model(jnp.asarray(draw()), logits_to_keep=0)


@pytest.mark.parametrize(("tie", "param_dtype"), [(True, "float32"), (False, "bfloat16")])
def test_bfloat16(tie, param_dtype):
    """Logits are float32 whatever the type of computation, and as close as bfloat16's 8 bits allow."""
    exact = build(tie_embeddings=tie)
    half = build(tie_embeddings=tie, dtype="bfloat16", param_dtype=param_dtype)
    assert {str(x.dtype) for x in jax.tree.leaves(half)} == {param_dtype}
    half = jax.tree.unflatten(jax.tree.structure(half), [x.astype(param_dtype) for x in jax.tree.leaves(exact)])
    output, expected = run(half, draw(), cache=half.init_cache(2, LENGTH)), run(exact, draw()).logits
    assert output.logits.dtype == jnp.float32 and output.hidden.dtype == jnp.bfloat16
    assert output.cache.layers.key.dtype == jnp.bfloat16
    scale = float(np.std(expected))
    assert np.abs(output.logits - expected).mean() < 0.03 * scale
    gradients, _ = gradients_and_logits(half)
    assert {str(x.dtype) for x in jax.tree.leaves(gradients)} == {param_dtype}
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(gradients))


def test_dropout_only_with_a_key(model, whole):
    np.testing.assert_array_equal(run(model, draw()).logits, whole)
    one, two = (run(model, draw(), key=jax.random.key(i)).logits for i in range(2))
    np.testing.assert_array_equal(run(model, draw(), key=jax.random.key(0)).logits, one)
    assert np.abs(one - two).max() > 0.01 and np.abs(one - whole).max() > 0.01
    certain = build(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
    np.testing.assert_array_equal(run(certain, draw(), key=jax.random.key(0)).logits, run(certain, draw()).logits)


def test_too_long_a_prompt_names_both_numbers(model):
    """Without a mask every token needs a position, and the length is known before running."""
    for call in (model, partial(run, model)):
        with pytest.raises(ValueError, match="17 positions are needed but the table has 16"):
            call(jnp.asarray(draw(length=17)))
    assert np.isfinite(run(model, draw(length=16)).logits).all()


def test_ids_outside_the_vocabulary_are_loud(model):
    for bad in (VOCAB, -1, -100):
        ids = draw()
        ids[0, 4] = bad
        logits = np.asarray(run(model, ids).logits)
        assert np.isnan(logits[0, 4:]).all() and np.isfinite(logits[1]).all()


def test_initial_scale():
    """GPT-2's: 0.02 everywhere, output projections smaller by sqrt(2 * depth); biases 0, norms 1."""
    config = GPTConfig(vocab_size=500, max_length=300, dim=64, depth=8, heads=4)
    layers = (model := GPT(config, rngs=nnx.Rngs(0))).stack.layers[0]
    for kernel in (layers.attention.query, layers.attention.value, layers.mlp.up):
        np.testing.assert_allclose(np.std(kernel.kernel[...], axis=(1, 2)), 0.02, rtol=0.05)
    for kernel in (layers.attention.output, layers.mlp.down):
        np.testing.assert_allclose(np.std(kernel.kernel[...], axis=(1, 2)), 0.02 / 4, rtol=0.05)
    for table in (model.embedding, model.positions):
        np.testing.assert_allclose(np.std(table.embedding[...]), 0.02, rtol=0.05)
    assert not np.any(layers.mlp.up.bias[...]) and np.all(model.norm.scale[...] == 1)


def test_a_model_is_a_pytree(model, whole):
    """Equal structures for models built alike, one gradient per parameter, pmap, and a mask of what is stacked."""
    assert jax.tree.structure(model) == jax.tree.structure(build())
    gradients, _ = gradients_and_logits(model)
    assert jax.tree.structure(gradients) == jax.tree.structure(model)
    paths = {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(stacked_mask(model))}
    assert all(stacked == ("stack.layers" in path) for path, stacked in paths.items())
    halves = jnp.asarray(draw())[:, None]  # one row for each of two devices
    spread = jax.pmap(lambda m, ids: m(ids).logits, in_axes=(None, 0), devices=jax.devices()[:2])(model, halves)
    np.testing.assert_allclose(spread[:, 0], whole, atol=1e-5)


def test_the_program_does_not_grow_with_depth():
    def size(depth):
        model = jax.eval_shape(partial(build, depth=depth))
        gradient = jax.grad(lambda m, ids, key: m(ids, key=key).logits.mean())
        return len(str(jax.make_jaxpr(gradient)(model, jnp.asarray(draw()), jax.random.key(0))).splitlines())

    assert abs(size(24) - size(3)) <= 2


SCRIPT = """
import jax, jax.numpy as jnp, optax
jax.config.update("jax_platforms", "cpu")
from flax import config, nnx
assert not config.nnx_graph_mode and not config.nnx_graph_updates
from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.nn import unstack

settings = GPTConfig(vocab_size=11, max_length=9, dim=8, depth=2, heads=2)
model = LanguageModel(GPT(settings, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
ids = jnp.arange(8).reshape(2, 4) % 11
optimizer = optax.adam(1e-2)

@jax.jit
def step(model, state):
    loss = lambda m: optax.softmax_cross_entropy_with_integer_labels(m(ids, key=jax.random.key(0)).logits, ids).mean()
    value, gradients = jax.value_and_grad(loss)(model)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(model, updates), state, value

state, losses = optimizer.init(model), []
for _ in range(5):
    model, state, value = step(model, state)
    losses.append(float(value))
assert losses[-1] < losses[0], losses
loose = jax.jit(unstack)(model)
cached = jax.jit(lambda m: m(ids, cache=m.init_cache(2, 6)).logits)(loose)
assert jnp.allclose(cached, model(ids).logits, atol=1e-5)
print("ok")
"""


def test_works_in_the_tree_mode_of_nnx():
    """Flax is moving to it: modules as plain trees, without its graph of shared references."""
    environment = os.environ | {
        "NNX_GRAPH_MODE": "false",
        "NNX_GRAPH_UPDATES": "false",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
    }
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert finished.stdout.strip() == "ok"
