"""What a ViT and the image classifier promise whatever their weights: pooling, positions, sizes, settings, limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import ImageClassifier, ViT, ViTConfig
from transformers_jax.nn import resize_positions, sinusoidal_grid, stacked_mask
from transformers_jax.training.mesh import MeshConfig, batch_sharding, make_mesh, shardings
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, trained_part
from transformers_jax.training.paths import named_leaves

# Odd sizes, and weights large enough for every part to matter.
SIZES = dict(image_size=(6, 9), patch_size=3, dim=12, depth=3, heads=3, mlp_dim=20, init_std=0.3)
LABELS = ("a", "b", "c", "d", "e")
KINDS = {
    "class token": {},
    "distilled": dict(distillation_token=True, distillation_head=True),
    "mean": dict(pooling="mean"),
    "no class token": dict(pooling="mean", class_token=False),
    "attention": dict(pooling="attention", class_token=False),
    "sines": dict(positions="sinusoidal"),
}


def build(head=None, kind="class token", **changes):
    """A model with every parameter random, biases, norms and the classifier's zeros too."""
    config = ViTConfig(**SIZES | KINDS[kind] | dict(labels=LABELS) | changes)

    def make():
        model = ViT(config, rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(1))

    abstract, rng = jax.eval_shape(make), np.random.default_rng(0)
    leaves = [
        jnp.asarray(rng.normal(name.endswith("scale"), 0.3, leaf.shape), leaf.dtype)
        for name, leaf in named_leaves(abstract).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def draw(height=6, width=9, *, batch=2, channels=3, seed=0):
    pixels = np.random.default_rng(seed).normal(size=(batch, height, width, channels))
    return jnp.asarray(pixels, jnp.float32)


@jax.jit
def run(model, pixels, key=None):
    return model(pixels, key=key, capture=("hidden_states", "attention_weights"))


@jax.jit
def features_of(model, pixels):
    return model.features(pixels)


# Shapes and pooling


@pytest.mark.parametrize("kind", KINDS)
def test_shapes(kind):
    model = build(ImageClassifier, kind)
    output = run(model, draw())
    tokens = 6 + model.config.prefix
    assert output.logits.shape == (2, 5) and output.logits.dtype == jnp.float32
    assert output.hidden.shape == (2, tokens, 12) and output.pooled.shape == (2, 12)
    assert output.hidden_states.shape == (3, 2, tokens, 12)
    assert output.attention_weights.shape == (3, 2, 3, tokens, tokens)
    np.testing.assert_allclose(output.attention_weights.sum(-1), 1, rtol=1e-5)


def test_nothing_is_captured_that_is_not_asked_for():
    output = jax.eval_shape(lambda model, x: model(x), build(), draw())
    assert output.hidden_states is None and output.attention_weights is None and output.logits is None


def test_pooling_by_its_formula():
    for kind in ("class token", "distilled", "sines"):
        output = run(build(ImageClassifier, kind), draw())
        np.testing.assert_array_equal(output.pooled, output.hidden[:, 0])
    for kind, prefix, changes in (
        *(("mean", 1, {}), ("no class token", 0, {})),
        ("mean", 2, dict(distillation_token=True)),
    ):
        output = run(build(ImageClassifier, kind, **changes), draw())
        np.testing.assert_allclose(output.pooled, np.asarray(output.hidden)[:, prefix:].mean(1), atol=1e-6)
    model = build(ImageClassifier, "attention")
    output = run(model, draw())
    np.testing.assert_allclose(output.pooled, model.backbone.attention_pooling(output.hidden), atol=1e-5)
    model = build(pooler=True)
    output = run(model, draw())
    dense = np.asarray(output.hidden)[:, 0] @ np.asarray(model.pooler.kernel[...]) + np.asarray(model.pooler.bias[...])
    np.testing.assert_allclose(output.pooled, np.tanh(dense), atol=1e-5)


def test_logits_by_their_formula():
    model = build(ImageClassifier, "distilled")
    output = run(model, draw())
    ours = [
        np.asarray(output.hidden)[:, place] @ np.asarray(head.kernel[...]) + np.asarray(head.bias[...])
        for place, head in enumerate((model.head, model.distillation_head))
    ]
    np.testing.assert_allclose(output.logits, (ours[0] + ours[1]) / 2, atol=1e-5)


def test_a_new_head_gives_every_label_the_same():
    config = ViTConfig(**SIZES | dict(labels=LABELS) | KINDS["distilled"])
    model = ImageClassifier(ViT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(run(model, draw()).logits, 0)


def test_features_lie_as_in_the_image():
    for kind in ("distilled", "no class token"):
        model = build(kind=kind)
        features = features_of(model, draw(9, 12))
        hidden = run(model, draw(9, 12)).hidden
        assert features.shape == (2, 3, 4, 12)
        np.testing.assert_allclose(features[:, 1, 2], hidden[:, model.config.prefix + 1 * 4 + 2], atol=1e-5)


def test_a_patch_that_changes_is_the_one_in_the_features():
    """Without layers in between (their outputs are zero), a changed pixel touches the features of its patch alone."""
    model = build(kind="no class token")
    for part in (model.stack.layers[0].attention.output, model.stack.layers[0].mlp.down):
        part.kernel[...], part.bias[...] = part.kernel[...] * 0, part.bias[...] * 0
    change = np.abs(features_of(model, draw()) - features_of(model, draw().at[:, 4, 7].add(1.0))).max(axis=(0, 3))
    assert np.argwhere(change > 1e-3).tolist() == [[1, 2]]


def test_a_row_is_what_it_is_alone():
    model, pixels = build(ImageClassifier, "distilled"), draw(batch=3)
    whole = run(model, pixels).logits
    for row in range(3):
        np.testing.assert_allclose(run(model, pixels[row : row + 1]).logits[0], whole[row], atol=1e-5)


# Positions


def test_learned_positions_are_resized():
    """Like a model whose table has the other size to begin with."""
    for kind in ("distilled", "no class token"):
        model, larger = build(kind=kind), build(kind=kind, image_size=(15, 6))
        carried = larger.config.carry_over(named_leaves(model), model.config)
        table = model.positions.embedding[...]
        resized = resize_positions(table, (2, 3), (5, 2), prefix=model.config.prefix, how="bicubic")
        np.testing.assert_array_equal(carried["positions.embedding"], resized)
        larger = jax.tree.unflatten(jax.tree.structure(larger), [carried[name] for name in named_leaves(larger)])
        expected = run(larger, draw(15, 6)).hidden
        np.testing.assert_allclose(run(model, draw(15, 6)).hidden, expected, rtol=1e-5, atol=1e-5)


def test_carrying_over_under_a_head_leaves_the_rest_alone():
    model = build(ImageClassifier)
    before = named_leaves(model)
    after = ViTConfig(**SIZES | {"image_size": 12}).carry_over(before, model.config)
    assert {name for name in before if after[name] is not before[name]} == {"backbone.positions.embedding"}
    assert after["backbone.positions.embedding"].shape == (17, 12)
    same = model.config.carry_over(before, model.config)
    assert all(same[name] is before[name] for name in before)


@pytest.mark.parametrize("how", ["bicubic_antialias", "corners"])
def test_the_filter_is_the_configurations(how):
    plain, other = build(), build(position_resampling=how)
    np.testing.assert_array_equal(run(plain, draw()).hidden, run(other, draw()).hidden)
    assert np.abs(run(plain, draw(3, 6)).hidden - run(other, draw(3, 6)).hidden).max() > 1e-3


def test_sines_need_no_parameters_at_any_size():
    model = build(kind="sines")
    assert model.positions is None
    for part in (model.stack.layers[0].attention.output, model.stack.layers[0].mlp.down):
        part.kernel[...], part.bias[...] = part.kernel[...] * 0, part.bias[...] * 0
    pixels = draw(9, 15)
    expected = model.patch_embedding(pixels) + sinusoidal_grid(3, 5, 12)
    np.testing.assert_allclose(run(model, pixels).hidden[:, 1:], model.norm(expected), atol=1e-5)
    token = model.norm(model.class_token[...])  # has no place in the image
    np.testing.assert_allclose(run(model, pixels).hidden[:, 0], np.broadcast_to(token, (2, 12)), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_where_patches_lie_counts(kind):
    model, pixels = build(ImageClassifier, kind), draw()
    swapped = jnp.concatenate([pixels[:, 3:], pixels[:, :3]], axis=1)
    assert np.abs(run(model, pixels).pooled - run(model, swapped).pooled).max() > 0.01


# Limits


def test_grey_images():
    model = build(ImageClassifier, channels=1)
    assert np.isfinite(run(model, draw(channels=1)).logits).all()
    with pytest.raises(ValueError, match="the images have 3 channels but the model takes 1; pixels are"):
        model(draw())


@pytest.mark.parametrize("jitted", [True, False])
def test_images_that_do_not_fit(jitted):
    model = build(ImageClassifier)
    call = jax.jit(lambda model, x: model(x).logits) if jitted else (lambda model, x: model(x).logits)
    with pytest.raises(ValueError, match=r"an image of 7 x 9 pixels .* cannot be cut into patches of 3 x 3"):
        call(model, draw(7, 9))
    with pytest.raises(ValueError, match="an image of 2 x 9 pixels has no patch of 3 x 3"):
        call(model, draw(2, 9))
    with pytest.raises(ValueError, match="cannot capture logits"):
        model(draw(), capture=("logits",))


def test_pixels_must_be_normalised_floats():
    """Pixels between 0 and 255 would give numbers without an error. (Here without the shape checks of the tests.)"""
    call = getattr(ViT.__call__, "__wrapped__", ViT.__call__)
    with pytest.raises(ValueError, match="pixels are uint8; divide them by 255 and normalise them"):
        call(build(), jnp.zeros((1, 6, 9, 3), jnp.uint8))


# Transformations, randomness, types


def test_without_jit_it_is_the_same():
    model, pixels = build(ImageClassifier), draw()
    np.testing.assert_allclose(model(pixels).logits, run(model, pixels).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "pooling"), [("distilled", "attention"), ("no class token", "mean")])
def test_jit_grad_and_vmap(kind, pooling):
    model, pixels = build(ImageClassifier, kind, pooling=pooling), draw(batch=3)
    logits = run(model, pixels).logits
    mapped = jax.jit(jax.vmap(lambda model, row: model(row[None]).logits[0], in_axes=(None, 0)))(model, pixels)
    np.testing.assert_allclose(mapped, logits, rtol=1e-5, atol=1e-5)
    # At another size, so that the gradient flows through the resizing, too.
    gradients = jax.jit(jax.grad(lambda model, x: jnp.sum(model(x).logits ** 2)))(model, draw(9, 6))
    unused = {path for path, leaf in named_leaves(gradients).items() if not np.any(leaf)}
    assert not unused, unused
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_dropout_and_stochastic_depth_need_a_key():
    for changes in ({"dropout": 0.2}, {"attention_dropout": 0.2}, {"stochastic_depth": 0.5}):
        model, pixels = build(ImageClassifier, **changes), draw()
        plain = run(model, pixels).logits
        np.testing.assert_array_equal(plain, run(build(ImageClassifier), pixels).logits)
        one, same, other = (run(model, pixels, key=jax.random.key(seed)).logits for seed in (0, 0, 3))
        np.testing.assert_array_equal(one, same)
        assert np.abs(one - plain).max() > 1e-3 and np.abs(one - other).max() > 1e-3, changes
    off = run(build(ImageClassifier), draw(), key=jax.random.key(0)).logits
    np.testing.assert_allclose(off, run(build(ImageClassifier), draw()).logits, rtol=1e-5, atol=1e-5)


def test_stochastic_depth_grows_in_a_straight_line():
    """Each layer adds 1 to every value, or nothing; what is kept counts 1 / (1 - rate), which gives the rate away."""

    class Same(nnx.Module):
        def __call__(self, x):
            return x

    model = build(depth=5, stochastic_depth=0.4)
    layer = model.stack.layers[0]
    for part, value in ((layer.attention.output, 0.0), (layer.mlp.down, 1.0)):
        part.kernel[...], part.bias[...] = part.kernel[...] * 0, jnp.full_like(part.bias[...], value)
    model.norm = Same()
    output = run(model, draw(batch=1000), jax.random.key(0))
    states = np.concatenate([output.hidden_states, output.hidden[None]])
    changes = np.diff(states, axis=0)  # (layer, example, token, value)
    np.testing.assert_allclose(changes, np.broadcast_to(changes[:, :, :1, :1], changes.shape), atol=1e-5)
    for change, rate in zip(changes[:, :, 0, 0], [0, 0.1, 0.2, 0.3, 0.4], strict=True):
        kept = change > 0.5
        np.testing.assert_allclose(change, np.where(kept, 1 / (1 - rate), 0), atol=1e-5)
        assert abs((~kept).mean() - rate) < 0.06  # standard error at most 0.016
    skipped = changes[1:, :, 0, 0] < 0.5
    assert len({tuple(row) for row in skipped.T}) == 16  # independently of one another


@pytest.mark.parametrize("kind", ["distilled", "attention"])
def test_bfloat16_keeps_logits_in_float32(kind):
    exact = run(build(ImageClassifier, kind), draw(9, 6))
    half = run(build(ImageClassifier, kind, dtype="bfloat16"), draw(9, 6))
    assert half.hidden.dtype == jnp.bfloat16 == half.pooled.dtype and half.logits.dtype == jnp.float32
    np.testing.assert_allclose(half.logits, exact.logits, atol=0.08 * np.abs(exact.logits).max())  # 8 bits of mantissa
    stored = build(ImageClassifier, kind, dtype="bfloat16", param_dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(run, stored, draw(9, 6)).hidden.dtype == jnp.bfloat16


@jax.jit
@jax.value_and_grad
def loss(model, pixels):
    return jnp.sum(model(pixels, key=jax.random.key(0)).logits ** 2)


def assert_same_gradients(gradients, others):
    # By the largest of all gradients: those of the key's bias are rounding.
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))
    for (path, leaf), other in zip(named_leaves(gradients).items(), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-4, atol=1e-5 * largest, err_msg=path)


def test_settings_of_speed_change_no_number():
    rates = dict(dropout=0.1, stochastic_depth=0.3)
    value, gradients = loss(build(ImageClassifier, **rates), draw())
    for changes in ({"remat": "full"}, {"unroll": 3}):
        other_value, others = loss(build(ImageClassifier, **rates, **changes), draw())
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        assert_same_gradients(gradients, others)


def test_eight_devices_compute_what_one_does():
    # A width and heads that the axes divide; the table of positions, of 8 rows, lies on some of them whole.
    sizes = dict(dim=16, heads=4, mlp_dim=32, depth=2, stochastic_depth=0.3)
    model = build(ImageClassifier, "distilled", pooling="attention", **sizes)
    pixels = draw(batch=8)
    value, gradients = loss(model, pixels)
    for config in (MeshConfig(fsdp=8), MeshConfig(data=2, fsdp=2, tensor=2)):
        mesh = make_mesh(config)
        placed = jax.device_put(model, shardings(model, mesh))
        other_value, others = loss(placed, jax.device_put(pixels, batch_sharding(mesh)))
        np.testing.assert_allclose(other_value, value, rtol=1e-5)
        assert_same_gradients(gradients, others)
        kernel = placed.backbone.patch_embedding.projection.kernel[...]
        assert kernel.addressable_shards[0].data.size == kernel.size // config.fsdp


# Its parameters in an optimizer


BOTTOM = {"class_token", "distillation_token", "positions.embedding"}
BOTTOM |= {"patch_embedding.projection.kernel", "patch_embedding.projection.bias"}


def test_layer_decay_knows_top_and_bottom():
    model = build(ImageClassifier, "distilled", pooling="attention")
    config = OptimizerConfig(name="sgd", momentum=0.0, schedule="constant", clip_norm=None, layer_decay=0.5)
    optimizer = make_optimizer(config, 10, model, stacked=stacked_mask(model))
    ones = jax.tree.map(jnp.ones_like, model)
    updates, _ = optimizer.update(ones, optimizer.init(model), model)
    for name, update in named_leaves(updates).items():
        rates = np.unique(np.asarray(update) / -config.learning_rate)
        own = name.removeprefix("backbone.")
        layers = [0.5**3, 0.5**2, 0.5]
        expected = layers if own.startswith("stack.") else [0.5**4] if own in BOTTOM else [1.0]
        np.testing.assert_allclose(rates, expected, rtol=1e-6, err_msg=name)


def test_frozen_layers_take_the_tokens_along():
    model = build(ImageClassifier, "distilled")
    trained = trained_part(OptimizerConfig(frozen_layers=3), model, stacked=stacked_mask(model))(model)
    top = {"head.kernel", "head.bias", "distillation_head.kernel", "distillation_head.bias"}
    assert set(trained) == top | {"backbone.norm.scale", "backbone.norm.bias"}


def test_muon_leaves_pixels_and_labels_to_adamw():
    """Its state has a second moment for those parameters, and only for those."""
    model = build(ImageClassifier, "distilled", pooling="attention")
    optimizer = make_optimizer(OptimizerConfig(name="muon"), 10, model, stacked=stacked_mask(model))
    state = jax.eval_shape(optimizer.init, model)
    adam = {
        name
        for name, leaf in named_leaves(model).items()
        if any(".nu." in path and path.endswith(name) and leaf.shape == other.shape
               for path, other in named_leaves(state).items())
    }  # fmt: skip
    kernels = {name for name in named_leaves(model) if name.endswith("kernel")}
    by_adam = {name for name in kernels if "head" in name or "patch_embedding" in name}
    assert kernels & adam == by_adam and len(by_adam) == 3
    assert set(named_leaves(model)) - kernels <= adam
