"""The blocks of image models against their formulas: positions on grids, patches, stochastic depth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from transformers_jax.nn import (
    AttentionPooling,
    PatchEmbedding,
    TransformerLayer,
    drop_path,
    resize_positions,
    sinusoidal_grid,
    to_patches,
)
from transformers_jax.nn.patch import grid_size
from transformers_jax.nn.positions import check_resampling

WAYS = ("bicubic", "bicubic_antialias", "bilinear", "corners")


def random(*size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


# Positions


@pytest.mark.parametrize("new", [(7, 5), (2, 11), (1, 7), (9, 1), (3, 4)])
@pytest.mark.parametrize("prefix", [0, 1])
def test_corners_is_the_linear_zoom_of_scipy(new, prefix):
    """What Google's ViT resizes its checkpoints with."""
    table = random(prefix + 12, 5)
    grid = table[prefix:].reshape(3, 4, 5).astype(np.float64)
    expected = ndimage.zoom(grid, (new[0] / 3, new[1] / 4, 1), order=1).reshape(-1, 5)
    resized = resize_positions(jnp.asarray(table), (3, 4), new, prefix=prefix, how="corners")
    np.testing.assert_allclose(resized[prefix:], expected, atol=1e-6)
    np.testing.assert_array_equal(resized[:prefix], table[:prefix])


@pytest.mark.parametrize("how", WAYS)
@settings(max_examples=10, deadline=None)
@given(
    old=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    new=st.tuples(st.integers(1, 19), st.integers(1, 19)),
    prefix=st.integers(0, 2),
)
def test_resizing_keeps_what_is_the_same_everywhere(how, old, new, prefix):
    """A constant grid stays constant, whatever the sizes; the tokens in front stay as they are."""
    table = np.full((prefix + old[0] * old[1], 2), [3.0, -1.0], np.float32)
    table[:prefix] = random(prefix, 2)
    resized = np.asarray(resize_positions(jnp.asarray(table), old, new, prefix=prefix, how=how))
    assert resized.shape == (prefix + new[0] * new[1], 2)
    np.testing.assert_array_equal(resized[:prefix], table[:prefix])
    np.testing.assert_allclose(resized[prefix:], np.broadcast_to([3.0, -1.0], (new[0] * new[1], 2)), rtol=1e-6)


@pytest.mark.parametrize("how", WAYS)
def test_rows_and_columns_are_not_mixed_up(how):
    """A slope in one direction only stays one: rows are constant along columns, and the other way round."""
    rows, columns = np.mgrid[:4, :6].astype(np.float32)
    table = jnp.asarray(np.stack([rows, columns], axis=-1).reshape(24, 2))
    resized = np.asarray(resize_positions(table, (4, 6), (9, 5), how=how)).reshape(9, 5, 2)
    np.testing.assert_allclose(resized[..., 0], np.repeat(resized[:, :1, 0], 5, axis=1), atol=1e-5)
    np.testing.assert_allclose(resized[..., 1], np.repeat(resized[:1, :, 1], 9, axis=0), atol=1e-5)
    assert (np.diff(resized[:, 0, 0]) > 0).all() and (np.diff(resized[0, :, 1]) > 0).all()


@pytest.mark.parametrize("how", WAYS)
def test_the_same_size_is_the_identity(how):
    table = jnp.asarray(random(13, 4))
    assert resize_positions(table, (3, 4), (3, 4), prefix=1, how=how) is table
    jitted = jax.jit(lambda table: resize_positions(table, (3, 4), (3, 4), prefix=1, how=how))
    np.testing.assert_array_equal(jitted(table), table)


@pytest.mark.parametrize("how", WAYS)
def test_resizing_under_jit_grad_and_in_bfloat16(how):
    table = jnp.asarray(random(13, 4))

    def resize(table):
        return resize_positions(table, (3, 4), (5, 7), prefix=1, how=how)

    plain = resize(table)
    np.testing.assert_allclose(jax.jit(resize)(table), plain, atol=1e-6)
    half = resize(table.astype(jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(half, np.float32), plain, atol=0.03)  # inputs and result are rounded
    # Linear: the derivative along a direction is the resized direction.
    _, change = jax.jvp(resize, (table,), (table * 2,))
    np.testing.assert_allclose(change, 2 * plain, atol=1e-5)


def test_the_filters_differ():
    """So that a wrong one would be seen."""
    table = jnp.asarray(random(36, 2))
    for new in ((3, 4), (11, 9)):
        resized = [np.asarray(resize_positions(table, (6, 6), new, how=how)) for how in WAYS]
        for i, one in enumerate(resized):
            assert all(np.abs(one - other).max() > 0.05 for other in resized[:i])


@pytest.mark.parametrize(
    ("old", "new", "prefix", "how", "message"),
    [
        ((3, 4), (5, 5), 0, "bicubic", "a table of 13 positions is not one of 0 \\+ 3 x 4 = 12"),
        ((3, 4), (5, 0), 1, "bicubic", "a grid of 5 x 0 has no place"),
        ((3, 4), (5, 5), 1, "cubic", "unknown resampling 'cubic'; there are bicubic, bicubic_antialias, bilinear"),
    ],
)
def test_resizing_that_makes_no_sense(old, new, prefix, how, message):
    resize = resize_positions if how in WAYS else lambda *_, how, **__: check_resampling(how)
    with pytest.raises(ValueError, match=message):
        resize(jnp.zeros((13, 2)), old, new, prefix=prefix, how=how)


@pytest.mark.parametrize(("height", "width", "dim"), [(3, 5, 8), (7, 2, 32), (1, 1, 12)])
def test_sinusoidal_grid(height, width, dim):
    """Beyer et al. 2022, place by place: wave lengths from 2 pi to 20,000 pi, x before y, sine before cosine."""
    quarter = dim // 4
    expected = np.zeros((height * width, dim))
    for y in range(height):
        for x in range(width):
            for i in range(quarter):
                omega = 1.0 / 10_000.0 ** (i / (quarter - 1))
                expected[y * width + x, [i, quarter + i, 2 * quarter + i, 3 * quarter + i]] = (
                    *(np.sin(x * omega), np.cos(x * omega)),
                    *(np.sin(y * omega), np.cos(y * omega)),
                )
    ours = sinusoidal_grid(height, width, dim)
    assert ours.dtype == jnp.float32
    np.testing.assert_allclose(ours, expected, atol=1e-6)


@pytest.mark.parametrize("dim", [4, 6, 10])
def test_sinusoidal_grid_needs_four_parts(dim):
    with pytest.raises(ValueError, match=f"a dim that 4 divides, of at least 8, not {dim}"):
        sinusoidal_grid(2, 2, dim)


# Patches


def test_patches_are_cut_in_reading_order():
    pixels = np.arange(2 * 4 * 9 * 3, dtype=np.float32).reshape(2, 4, 9, 3)
    patches = np.asarray(to_patches(jnp.asarray(pixels), (2, 3)))
    assert patches.shape == (2, 6, 18)
    for number, (row, column) in enumerate((row, column) for row in range(2) for column in range(3)):
        cut = pixels[:, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3]
        np.testing.assert_array_equal(patches[:, number], cut.reshape(2, -1))


@pytest.mark.parametrize(
    ("image", "patch", "message"),
    [
        ((7, 9), (2, 3), r"an image of 7 x 9 pixels \(height x width\) cannot be cut into patches of 2 x 3"),
        ((8, 10), (2, 3), "cannot be cut into patches of 2 x 3"),
        ((1, 9), (2, 3), "an image of 1 x 9 pixels has no patch of 2 x 3"),
        ((2, 0), (2, 3), "an image of 2 x 0 pixels has no patch of 2 x 3"),
        ((2, 3), (0, 3), "has no patch of 0 x 3"),
    ],
)
def test_images_that_cannot_be_cut(image, patch, message):
    with pytest.raises(ValueError, match=message):
        grid_size(image, patch)
    if min(image) and min(patch):
        with pytest.raises(ValueError, match=message):
            PatchEmbedding(patch, 1, 4, rngs=nnx.Rngs(0))(jnp.zeros((1, *image, 1)))


def test_channels_must_fit():
    with pytest.raises(ValueError, match="the images have 1 channels but the model takes 3"):
        PatchEmbedding((2, 2), 3, 4, rngs=nnx.Rngs(0))(jnp.zeros((1, 4, 4, 1)))


# Stochastic depth


def test_drop_path_skips_whole_examples():
    x, key = jnp.asarray(random(4000, 3, 2)) + 5, jax.random.key(0)
    dropped = np.asarray(drop_path(x, 0.3, key))
    skipped = (dropped == 0).reshape(4000, -1)
    assert (skipped.all(axis=1) | ~skipped.any(axis=1)).all()
    kept = ~skipped[:, 0]
    np.testing.assert_allclose(dropped[kept], np.asarray(x)[kept] / 0.7, rtol=1e-6)
    assert abs((~kept).mean() - 0.3) < 0.03  # standard error 0.007
    np.testing.assert_allclose(dropped.mean(), np.asarray(x).mean(), rtol=0.05)  # the expectation stays
    np.testing.assert_array_equal(dropped, drop_path(x, 0.3, key))
    assert not np.array_equal(dropped, drop_path(x, 0.3, jax.random.key(1)))


def test_drop_path_off():
    x, key = jnp.asarray(random(5, 3)), jax.random.key(0)
    assert drop_path(x, 0.3, None) is x and drop_path(x, 0.0, key) is x
    np.testing.assert_array_equal(drop_path(x, jnp.float32(0.0), key), x)  # a traced rate may be 0, too
    assert drop_path(x.astype(jnp.bfloat16), jnp.float32(0.3), key).dtype == jnp.bfloat16
    traced = jax.jit(lambda rate: drop_path(x, rate, key))(0.4)
    np.testing.assert_allclose(traced, drop_path(x, 0.4, key), rtol=1e-6)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_layer_skips_its_parts_example_by_example(norm):
    """Each example is one of four: both parts skipped, one of them, or none. What is kept counts 1 / (1 - rate)."""
    layer = TransformerLayer(6, 2, 8, norm=norm, rngs=nnx.Rngs(0))
    hidden = jnp.asarray(random(64, 3, 6))
    after = (layer.attention_norm, layer.mlp_norm) if norm == "post" else (lambda x: x, lambda x: x)
    before = (layer.attention_norm, layer.mlp_norm) if norm == "pre" else (lambda x: x, lambda x: x)
    rate = 0.4
    outcomes = []
    for attended in (0, 1 / (1 - rate)):
        for transformed in (0, 1 / (1 - rate)):
            middle = after[0](hidden + attended * layer.attention(before[0](hidden)).hidden)
            outcomes.append(after[1](middle + transformed * layer.mlp(before[1](middle))))
    output = layer(hidden, drop_path_rate=rate, key=jax.random.key(0)).hidden
    distance = np.abs(np.asarray(outcomes) - np.asarray(output)).max(axis=(2, 3))  # (outcome, example)
    assert (distance.min(axis=0) < 1e-5).all()
    counts = np.bincount(distance.argmin(axis=0), minlength=4)
    assert (counts > 0).all() and counts[3] > counts[0]  # 36 % against 16 %
    plain = layer(hidden).hidden
    np.testing.assert_array_equal(layer(hidden, drop_path_rate=rate).hidden, plain)  # without a key
    np.testing.assert_array_equal(layer(hidden, key=jax.random.key(0)).hidden, plain)  # without a rate


# Pooling


def test_attention_pooling_has_a_query_for_all_and_follows_the_types():
    pooling = AttentionPooling(8, 2, 12, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert pooling.query.shape == (8,) and {leaf.dtype for leaf in jax.tree.leaves(pooling)} == {jnp.dtype("float32")}
    hidden = jnp.asarray(random(3, 5, 8), jnp.bfloat16)
    assert pooling(hidden).dtype == jnp.bfloat16
    exact = AttentionPooling(8, 2, 12, rngs=nnx.Rngs(0))
    shuffled = jnp.asarray(random(3, 5, 8))
    np.testing.assert_allclose(exact(shuffled), exact(shuffled[:, ::-1]), atol=1e-6)  # a set, not a sequence
