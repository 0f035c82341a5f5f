"""Swin against attention that loops over pixels, and what it promises whatever its weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

from transformers_jax.models import ImageClassifier, Swin, SwinConfig
from transformers_jax.models.swin import PatchMerging, SwinLayer
from transformers_jax.nn import stacked_mask
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, trained_part
from transformers_jax.training.paths import named_leaves

SIZES = dict(dims=(12, 24), depths=(2, 2), heads=(2, 3), window=3, patch_size=2, mlp_ratio=1.5, image_size=(14, 19))
SIZES |= dict(init_std=0.3)
LABELS = ("a", "b", "c", "d", "e")


def randomly(abstract, seed=0):
    """A module with every parameter random."""
    rng = np.random.default_rng(seed)
    leaves = [
        jnp.asarray(rng.normal(name.endswith("scale"), 0.3, leaf.shape), leaf.dtype)
        for name, leaf in named_leaves(abstract).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def build(head=None, **changes):
    config = SwinConfig(**SIZES | dict(labels=LABELS) | changes)

    def make():
        model = Swin(config, rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(1))

    return randomly(jax.eval_shape(make))


def draw(height=14, width=19, *, batch=2, channels=3, seed=0):
    pixels = np.random.default_rng(seed).normal(size=(batch, height, width, channels))
    return jnp.asarray(pixels, jnp.float32)


@jax.jit
def run(model, pixels, key=None):
    return model(pixels, key=key, capture=("stages",))


# Against loops over pixels


def value(parameter):
    return np.asarray(parameter[...], np.float64)


def dense(layer, x):
    return x @ value(layer.kernel) + (0 if layer.bias is None else value(layer.bias))


def normed(norm, x):
    deviation = x - x.mean(-1, keepdims=True)
    scaled = deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + norm.epsilon)
    return scaled * value(norm.scale) + value(norm.bias)


def by_pixels(layer, x, window, shift, table_window):
    """One layer: each place looks, one by one, at those that lie in its window of a grid that begins at `shift`. What
    fills up the last windows is zero after the norm and takes part."""
    height, width, dim = x.shape
    filled = np.zeros((height + -height % window[0], width + -width % window[1], dim))
    filled[:height, :width] = normed(layer.attention_norm, x)
    heads, attention = layer.attention.heads, layer.attention
    query, key, values = (
        dense(one, filled).reshape(*filled.shape[:2], heads, dim // heads)
        for one in (attention.query, attention.key, attention.value)
    )
    table = value(layer.relative.embedding)
    change = np.zeros_like(x)
    for i, j in np.ndindex(height, width):
        seen = [
            (k, m)
            for k, m in np.ndindex(*filled.shape[:2])
            if (k - shift[0]) // window[0] == (i - shift[0]) // window[0]
            and (m - shift[1]) // window[1] == (j - shift[1]) // window[1]
        ]
        mixed = []
        for head in range(heads):
            scores = []
            for k, m in seen:
                row = (i - k + table_window[0] - 1) * (2 * table_window[1] - 1) + j - m + table_window[1] - 1
                scores.append(query[i, j, head] @ key[k, m, head] / np.sqrt(dim // heads) + table[row, head])
            weights = np.exp(np.array(scores) - max(scores))
            mixed.append(weights / weights.sum() @ np.array([values[k, m, head] for k, m in seen]))
        change[i, j] = dense(attention.output, np.concatenate(mixed))
    x = x + change
    inside = dense(layer.mlp.up, normed(layer.mlp_norm, x))
    return x + dense(layer.mlp.down, inside * (1 + erf(inside / np.sqrt(2))) / 2)


@pytest.mark.parametrize(
    ("size", "window", "shifted", "used", "shift"),
    [
        ((6, 9), (3, 3), False, (3, 3), (0, 0)),
        ((6, 9), (3, 3), True, (3, 3), (1, 1)),
        ((8, 8), (4, 4), True, (4, 4), (2, 2)),
        ((5, 7), (3, 3), True, (3, 3), (1, 1)),  # windows do not divide it
        ((7, 5), (4, 2), True, (4, 2), (2, 1)),
        ((4, 4), (4, 4), True, (4, 4), (0, 0)),  # the map is the window
        ((3, 3), (4, 4), True, (3, 3), (0, 0)),  # smaller
        ((2, 7), (4, 4), True, (2, 2), (0, 0)),
    ],
)
def test_a_layer_is_attention_pixel_by_pixel(size, window, shifted, used, shift):
    def make():
        init = nnx.initializers.normal(1.0)
        return SwinLayer(8, 2, 10, window=window, shifted=shifted, kernel_init=init, rngs=nnx.Rngs(0))

    layer = randomly(jax.eval_shape(make))
    x = np.random.default_rng(1).normal(size=(2, *size, 8))
    with jax.default_matmul_precision("highest"):
        actual = jax.jit(lambda layer, x: layer(x))(layer, jnp.asarray(x, jnp.float32))
    expected = np.stack([by_pixels(layer, one, used, shift, window) for one in x])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_patch_merging_takes_the_columns_of_four_neighbours():
    merging = randomly(jax.eval_shape(lambda: PatchMerging(3, 5, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))))
    x = np.random.default_rng(1).normal(size=(2, 3, 5, 3))
    actual = merging(jnp.asarray(x, jnp.float32))
    filled = np.zeros((2, 4, 6, 3))
    filled[:, :3, :5] = x
    for example, i, j in np.ndindex(2, 2, 3):
        four = [filled[example, 2 * i + row, 2 * j + column] for column in (0, 1) for row in (0, 1)]
        expected = normed(merging.norm, np.concatenate(four)) @ value(merging.reduction.kernel)
        np.testing.assert_allclose(actual[example, i, j], expected, atol=1e-5)


# Shapes, sizes, stages


def test_shapes_and_pooling():
    model = build(ImageClassifier)
    output = run(model, draw())
    assert [stage.shape for stage in output.stages] == [(2, 7, 10, 12), (2, 4, 5, 24)]
    assert output.hidden.shape == (2, 20, 24) and output.logits.shape == (2, 5) and output.logits.dtype == jnp.float32
    np.testing.assert_allclose(output.pooled, np.asarray(output.hidden).mean(1), atol=1e-6)
    np.testing.assert_allclose(output.hidden.reshape(2, 4, 5, 24), model.backbone.norm(output.stages[-1]), atol=1e-5)
    assert jax.eval_shape(lambda model, x: model(x), model, draw()).stages is None


def test_a_row_is_what_it_is_alone():
    model, pixels = build(ImageClassifier), draw(batch=3)
    whole = run(model, pixels).logits
    for row in range(3):
        np.testing.assert_allclose(run(model, pixels[row : row + 1]).logits[0], whole[row], atol=1e-5)


def test_images_that_patches_do_not_divide_get_black_borders():
    model, pixels = build(), draw(13, 17)
    filled = jnp.pad(pixels, ((0, 0), (0, 1), (0, 1), (0, 0)))
    np.testing.assert_array_equal(run(model, pixels).pooled, run(model, filled).pooled)


def test_a_pixel_touches_its_window_first_and_more_after_the_shift():
    """One layer: the 3 x 3 places of its window. Two: those of all shifted windows that have a part in it."""
    for depth, rows in ((1, [3, 5]), (2, [1, 6])):
        model = build(dims=(12,), depths=(depth,), heads=(2,), image_size=18)
        pixels = draw(18, 18, batch=1)
        change = run(model, pixels.at[0, 8, 8].add(3.0)).stages[0] - run(model, pixels).stages[0]
        touched = np.argwhere(np.abs(change[0]).max(-1) > 0)
        assert touched.min(0).tolist() == [rows[0]] * 2 and touched.max(0).tolist() == [rows[1]] * 2


# Training


def test_randomness_needs_a_key_and_depth_is_skipped_by_example():
    model = build(stochastic_depth=0.5, dropout=0.0)
    pixels = jnp.repeat(draw(batch=1), 8, axis=0)
    output = run(model, pixels, jax.random.key(0))
    assert len({float(x) for x in output.pooled[:, 0]}) > 3
    # The first layer is never skipped.
    alone = build(dims=(12,), depths=(1,), heads=(2,), stochastic_depth=0.5)
    np.testing.assert_allclose(run(alone, pixels, jax.random.key(0)).pooled, run(alone, pixels).pooled, atol=1e-6)
    for rates in (dict(dropout=0.5), dict(attention_dropout=0.5)):
        dropped = build(**rates)
        assert np.abs(run(dropped, pixels, jax.random.key(0)).pooled - run(dropped, pixels).pooled).max() > 1e-3


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_recomputing_changes_no_gradient(remat):
    model, pixels = build(), draw()

    @jax.jit
    def gradient(model):
        return jax.grad(lambda model: run(model, pixels, jax.random.key(1)).pooled.sum())(model)

    for one, other in zip(
        jax.tree.leaves(gradient(model)), jax.tree.leaves(gradient(build(remat=remat, unroll=4))), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_half_precision_computes_in_it():
    model = build(ImageClassifier, dtype="bfloat16")
    output = run(model, draw())
    assert output.hidden.dtype == jnp.bfloat16 and output.logits.dtype == jnp.float32
    exact = run(build(ImageClassifier), draw()).logits
    assert np.abs(output.logits - exact).max() < 0.1 * np.abs(exact).max()


def test_layer_decay_counts_through_the_stages():
    model = build(ImageClassifier, depths=(2, 4))
    config = OptimizerConfig("sgd", 1.0, "constant", momentum=0.0, clip_norm=None, layer_decay=0.5)
    optimizer = make_optimizer(config, 1, model, stacked=stacked_mask(model))
    updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, model), optimizer.init(model), model)
    scales = {
        name: np.abs(x).reshape(len(x) if "stack" in name else 1, -1)[:, 0] for name, x in named_leaves(updates).items()
    }
    assert scales["head.kernel"] == scales["backbone.norm.scale"] == 1
    assert scales["backbone.patch_embedding.projection.kernel"] == scales["backbone.embedding_norm.scale"] == 0.5**7
    assert scales["backbone.stages.0.stack.layers.0.mlp.up.kernel"].tolist() == [0.5**6]
    assert scales["backbone.stages.0.stack.layers.1.relative.embedding"].tolist() == [0.5**5]
    assert scales["backbone.stages.1.merging.reduction.kernel"] == 0.5**5  # as the layer before it
    assert scales["backbone.stages.1.stack.layers.0.mlp.up.kernel"].tolist() == [0.5**4, 0.5**2]
    assert scales["backbone.stages.1.stack.layers.1.mlp.up.kernel"].tolist() == [0.5**3, 0.5**1]


def test_the_first_layers_can_be_frozen_across_stages():
    model = build(ImageClassifier, depths=(2, 4))
    kept = trained_part(OptimizerConfig(frozen_layers=4), model, stacked=stacked_mask(model))(model)
    assert not any(".stages.0." in name or "embedding_norm" in name for name in kept)
    assert "backbone.stages.1.merging.norm.scale" not in kept
    assert kept["backbone.stages.1.stack.layers.0.mlp.up.kernel"].shape[0] == 1
    assert "head.kernel" in kept and "backbone.norm.scale" in kept
    with pytest.raises(ValueError, match="frozen_layers is 7 but the model has 6 layers"):
        trained_part(OptimizerConfig(frozen_layers=7), model, stacked=stacked_mask(model))


# Limits


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((1, 14, 19, 1), np.float32), "the images have 1 channels but the model takes 3"),
        (np.zeros((1, 1, 19, 3), np.float32), "an image of 1 x 19 pixels has no patch of 2 x 2"),
    ],
)
def test_images_that_do_not_fit(pixels, message):
    with pytest.raises(ValueError, match=message):
        build()(jnp.asarray(pixels))


def test_what_cannot_be_captured():
    with pytest.raises(ValueError, match="cannot capture hidden_states; there are stages"):
        build()(draw(), capture=("hidden_states",))
