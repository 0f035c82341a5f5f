"""The small blocks against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from transformers_jax.nn import (
    ACTIVATIONS,
    MLP,
    LayerNorm,
    LearnedPositions,
    Linear,
    TokenEmbedding,
    dropout,
    normal_init,
    positions_from_mask,
    pytree_dataclass,
    sinusoidal_positions,
    split_key,
)
from transformers_jax.nn.mlp import check_activation


def random(*size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


@pytest.mark.parametrize(("mean", "tolerance"), [(0, 2e-6), (1000, 3e-4), (-20_000, 6e-3)])
def test_layer_norm_far_from_zero(mean, tolerance):
    """The inputs are exact in float32; E[x^2] - E[x]^2 would be off by 0.3 at mean 1000. The tolerance is what float32
    resolves at that mean."""
    x = mean + random(4, 33)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    norm = LayerNorm(33, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, atol=tolerance)


def test_layer_norm_statistics_are_float32_for_bfloat16():
    x = jnp.asarray(30 + random(4, 300), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    output = LayerNorm(300, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))(x)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, atol=2e-2)  # rounding a result of 3


def test_activations_by_their_formulas():
    x = np.linspace(-6, 6, 401)
    formulas = {
        "gelu": [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x],
        "gelu_tanh": 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_quick": x / (1 + np.exp(-1.702 * x)),
        "relu": np.maximum(x, 0),
        "silu": x / (1 + np.exp(-x)),
        "tanh": np.tanh(x),
    }
    assert formulas.keys() == ACTIVATIONS.keys()
    for name, expected in formulas.items():
        np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), expected, atol=1e-6, err_msg=name)
    with pytest.raises(ValueError, match="unknown activation 'swish'; there are gelu, gelu_tanh"):
        check_activation("swish")


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dim", [2, 6, 64])
def test_sinusoidal_positions(dim, interleaved):
    """Sine and cosine of position / 10000^(2i/dim); float32 resolves an angle to 1e-7 of itself."""
    positions = np.array([[0, 1, 2, 63], [511, 2047, 9999, 70_000]])
    angles = positions[..., None] / 10_000.0 ** (np.arange(0, dim, 2) / dim)
    expected = np.zeros((*positions.shape, dim))
    if interleaved:
        expected[..., 0::2], expected[..., 1::2] = np.sin(angles), np.cos(angles)
    else:
        expected[..., : dim // 2], expected[..., dim // 2 :] = np.sin(angles), np.cos(angles)
    ours = sinusoidal_positions(jnp.asarray(positions), dim, interleaved=interleaved)
    errors = np.abs(np.asarray(ours) - expected).max(-1)
    assert (errors < 1e-6 + 1e-7 * positions).all(), errors


def test_sinusoidal_positions_need_an_even_width():
    with pytest.raises(ValueError, match="need an even dim, not 5"):
        sinusoidal_positions(jnp.arange(3), 5)


@settings(max_examples=50, deadline=None)
@given(hnp.arrays(np.int32, (3, 7), elements=st.integers(0, 1)))
def test_positions_count_the_real_tokens(mask):
    """Each real token's position is the number of real tokens before it, wherever the padding is."""
    ours = np.asarray(positions_from_mask(jnp.asarray(mask)))
    for row, positions in zip(mask, ours, strict=True):
        assert positions[row == 1].tolist() == list(range(row.sum()))
        assert ((positions >= 0) & (positions < max(1, row.sum()))).all()  # padding stays inside the table too


def test_learned_positions():
    table = LearnedPositions(6, 3, rngs=nnx.Rngs(0))
    rows = np.asarray(table.embedding[...])
    np.testing.assert_array_equal(table(4), rows[None, :4])
    np.testing.assert_array_equal(table(jnp.array([[5, 0], [2, 2]])), rows[[[5, 0], [2, 2]]])
    with pytest.raises(ValueError, match="7 positions are needed but the table has 6"):
        table(7)
    beyond = np.asarray(jax.jit(lambda t, p: t(p))(table, jnp.array([[5, 6, -1]])))
    assert np.isfinite(beyond[0, 0]).all() and np.isnan(beyond[0, 1:]).all()  # loud, not the last row again


def test_token_embedding_and_read_out():
    embedding = TokenEmbedding(7, 5, embedding_init=normal_init(1.0), rngs=nnx.Rngs(0))
    table = np.asarray(embedding.embedding[...])
    np.testing.assert_array_equal(embedding(jnp.array([[6, 0, 3]])), table[[[6, 0, 3]]])
    assert np.isnan(np.asarray(embedding(jnp.array([[7, -1, -100]])))).all()  # -1 is not the last token
    hidden = random(2, 3, 5)
    expected = hidden.astype(np.float64) @ table.astype(np.float64).T
    np.testing.assert_allclose(embedding.read_out(jnp.asarray(hidden)), expected, atol=1e-5)


def test_read_out_is_float32_under_bfloat16():
    """The products are summed and returned in float32; only the inputs are rounded."""
    embedding = TokenEmbedding(7, 300, embedding_init=normal_init(1.0), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    hidden = jnp.asarray(random(2, 3, 300), jnp.bfloat16)
    table = np.asarray(embedding.embedding[...].astype(jnp.bfloat16), np.float64)
    logits = embedding.read_out(hidden)
    assert logits.dtype == jnp.float32 and embedding(jnp.array([[1]])).dtype == jnp.bfloat16
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float64) @ table.T, atol=1e-4)


@pytest.mark.parametrize("block", [TokenEmbedding, LearnedPositions])
def test_gradients_of_a_frequent_row_add_up_in_bfloat16(block):
    """The same row a thousand times: a sum of ones in bfloat16 stops at 256."""
    table = block(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    rows = jnp.full((1, 1000), 2)
    gradient = jax.grad(lambda t: t(rows).astype(jnp.float32).sum())(table).embedding[...]
    np.testing.assert_array_equal(gradient, [[0] * 3, [0] * 3, [1000] * 3, [0] * 3])


@pytest.mark.parametrize("lead", [(), (4,), (2, 3), (2, 1, 3)])
def test_linear_over_any_leading_axes(lead):
    linear = Linear(5, 4, kernel_init=normal_init(1.0), rngs=nnx.Rngs(0))
    linear.bias[...] = jnp.arange(4.0)
    x = random(*lead, 5)
    expected = x.astype(np.float64) @ np.asarray(linear.kernel[...], np.float64) + np.arange(4)
    output = linear(jnp.asarray(x))
    assert output.shape == (*lead, 4)
    np.testing.assert_allclose(output, expected, atol=1e-5)


@pytest.mark.parametrize("use_bias", [True, False])
def test_mlp(use_bias):
    mlp = MLP(5, 9, activation="silu", use_bias=use_bias, kernel_init=normal_init(0.6), rngs=nnx.Rngs(0))
    assert (mlp.up.bias is not None) == use_bias
    x = random(2, 3, 5)
    up, down = (np.asarray(layer.kernel[...], np.float64) for layer in (mlp.up, mlp.down))
    hidden = x @ up
    np.testing.assert_allclose(mlp(jnp.asarray(x)), hidden / (1 + np.exp(-hidden)) @ down, atol=1e-5)


def test_compute_and_storage_types_are_separate():
    mlp = MLP(5, 9, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {x.dtype for x in jax.tree.leaves(mlp)} == {jnp.dtype(jnp.float32)}
    assert mlp(jnp.ones((1, 5))).dtype == jnp.bfloat16
    stored = MLP(5, 9, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {x.dtype for x in jax.tree.leaves(stored)} == {jnp.dtype(jnp.bfloat16)}


def test_dropout():
    x, key = jnp.ones((200, 300)), jax.random.key(0)
    dropped = np.asarray(dropout(x, 0.3, key))
    assert set(np.unique(dropped)) == {np.float32(0), np.float32(1 / 0.7)}
    assert abs((dropped == 0).mean() - 0.3) < 0.01  # standard error 0.002
    np.testing.assert_array_equal(dropped, dropout(x, 0.3, key))
    np.testing.assert_array_equal(dropped, dropout(x, 0.3, jax.random.PRNGKey(0)))  # keys of the old kind too
    assert dropout(x, 0.3, None) is x and dropout(x, 0.0, key) is x
    assert not np.asarray(dropout(x, 1.0, key)).any()
    assert dropout(x.astype(jnp.bfloat16), 0.3, key).dtype == jnp.bfloat16


def test_split_key():
    assert split_key(None, 3) == (None, None, None)
    keys = split_key(jax.random.key(0), 3)
    assert len({tuple(np.asarray(jax.random.key_data(k)).tolist()) for k in keys}) == 3


def test_pytree_dataclass():
    @pytree_dataclass
    class Pair:
        left: jax.Array
        right: jax.Array | None = None

    pair = Pair(jnp.ones(2))
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(pair)
    np.testing.assert_array_equal(doubled.left, [2, 2])
    assert doubled.right is None
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(Pair(jnp.ones(1), jnp.ones(1)))]
    assert paths == [".left", ".right"]
    with pytest.raises(AttributeError):
        pair.left = 1  # pyright: ignore[reportAttributeAccessIssue]
