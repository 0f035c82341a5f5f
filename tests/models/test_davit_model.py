"""DaViT against what timm computed with the same files (tests/goldens/make_davit.py), and what it promises beside."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from transformers_jax.models import DaViT, DaViTConfig, ImageClassifier
from transformers_jax.models.davit import ChannelAttention
from transformers_jax.nn import stacked_mask
from transformers_jax.pretrained import from_pretrained
from transformers_jax.pretrained.engine import named_leaves
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer

GOLDENS = Path(__file__).parents[1] / "goldens/davit"
SMALL = dict(dims=(6, 8, 12, 16), heads=(2, 2, 3, 4), depths=(1, 2, 1, 1))
QUICK = [("tiny", "60x60"), ("tiny", "37x61"), ("florence", "20x23")]
SLOW = [("tiny", "64x64"), ("tiny", "96x96"), ("tiny", "20x23"), ("florence", "37x61")]  # each is compiled anew
CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in SLOW)]


def near(found, expected, scale=0.0):
    expected = np.asarray(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(scale, np.abs(expected).max()))


@pytest.fixture(scope="module")
def golden():
    known = {}

    def load(name):
        if name not in known:
            known[name] = from_pretrained(GOLDENS / name), dict(np.load(GOLDENS / name / "outputs.npz"))
        return known[name]

    return load


def pixels_of(values, size):
    return (values[f"{size}/pixels"] / 255 * 2 - 1).astype(np.float32)


def random(config, seed=0):
    """A DaViT with every parameter random."""
    abstract, rng = jax.eval_shape(lambda: DaViT(config, rngs=nnx.Rngs(0))), np.random.default_rng(seed)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(abstract)]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_stage_and_the_logits_are_timms(name, size, golden):
    model, values = golden(name)
    with jax.default_matmul_precision("highest"):
        output = jax.jit(lambda model, x: model(x, capture=("stages",)))(model, pixels_of(values, size))
    for stage, found in enumerate(output.stages):
        near(found, values[f"{size}/stage{stage}"])
    near(output.pooled, values[f"{size}/pooled"])
    near(output.logits, values[f"{size}/logits"])
    assert output.logits.dtype == jnp.float32
    np.testing.assert_array_equal(output.hidden.reshape(output.stages[-1].shape), output.stages[-1])
    sizes = tuple((found.shape[1], found.shape[2]) for found in output.stages)
    assert model.config.maps(tuple(map(int, size.split("x")))) == sizes


@pytest.mark.parametrize(("name", "remat"), [("tiny", None), ("florence", "full")])
def test_gradients_are_pytorchs(name, remat, golden, tmp_path):
    _, values = golden(name)
    model = from_pretrained(GOLDENS / name, changes={"remat": remat})
    gradients = {key.removeprefix("gradient/"): x for key, x in values.items() if key.startswith("gradient/")}
    save_file(gradients, tmp_path / "model.safetensors")  # gradients of parameters have their names and shapes
    (tmp_path / "config.json").write_bytes((GOLDENS / name / "config.json").read_bytes())
    expected = named_leaves(from_pretrained(tmp_path))

    def loss(model, x):
        return jnp.sum(model(x).logits * jnp.arange(1, 6))

    with jax.default_matmul_precision("highest"):
        found = named_leaves(jax.jit(jax.grad(loss))(model, pixels_of(values, "20x23")))
    assert set(found) == set(expected) and len(found) > 100
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in expected.items():  # those of a key's bias are nothing but rounding
        near(found[path], gradient, scale=0.01 * largest)


@pytest.mark.parametrize(("image", "maps"), [(64, (16, 8, 4, 2)), (60, (15, 8, 4, 2)), (96, (24, 12, 6, 3))])
def test_maps_are_halved_and_rounded_up(image, maps):
    config = DaViTConfig(**SMALL, image_size=image)
    assert config.maps() == tuple((side, side) for side in maps)
    model = jax.eval_shape(lambda: DaViT(config, rngs=nnx.Rngs(0)))
    pixels = jax.ShapeDtypeStruct((2, image, image, 3), jnp.float32)
    stages = jax.eval_shape(lambda model, x: model(x, capture=("stages",)).stages, model, pixels)
    assert [stage.shape for stage in stages] == [
        (2, side, side, dim) for side, dim in zip(maps, SMALL["dims"], strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # timm's models count the same with torch
        ("tiny", 28_360_168),
        ("small", 49_745_896),
        ("base", 87_954_408),
        ("large", 196_811_752),
        ("huge", 348_922_856),
        ("giant", 1_406_470_120),
    ],
)
def test_sizes_have_their_numbers_of_parameters(name, parameters):
    config = getattr(DaViTConfig, name)(labels=tuple(map(str, range(1000))))
    model = jax.eval_shape(lambda: ImageClassifier(config.build(rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == parameters


@pytest.mark.parametrize(("name", "parameters"), [("base", 90_370_048), ("large", 360_636_416)])
def test_the_encoders_of_florence_have_their_numbers_of_parameters(name, parameters):
    config = getattr(DaViTConfig, "florence2_" + name)()
    model = jax.eval_shape(lambda: config.build(rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(dims=(64, 128, 192, 256), heads=(3, 6, 12, 24)),
            "in stage 0 the width is no multiple of the heads: dims=(64, 128, 192, 256), heads=(3, 6, 12, 24), and 3 "
            "does not divide 64",
        ),
        (dict(depths=(1, 1, 1)), "dims, depths and heads need a number for each stage, but have dims 4, depths 3"),
        (dict(channel_scale="tokens"), "channel_scale='tokens' is not one of channels, places"),
        (dict(downsampling=4), "downsampling=4 must be 2 or 3"),
        (dict(window=(7, 0)), "window=(7, 0) must be a whole number"),
        (dict(image_size=3), "an image of 3 x 3 pixels has no patch of 4 x 4"),
    ],
)
def test_impossible_configurations_name_their_fields(changes, message):
    config = DaViTConfig()
    for name, value in changes.items():  # past the shape checks of the tests, which know the types
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError) as error:
        config.__post_init__()
    assert message in str(error.value)


def test_widths_that_the_heads_divide_are_built():
    assert DaViTConfig(dims=(24, 48, 96, 192), heads=(3, 6, 12, 24)).dim == 192


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.zeros((1, 32, 32, 1), np.float32), "have 1 channels but the model takes 3"),
        (np.zeros((1, 32, 3, 3), np.float32), "an image of 32 x 3 pixels has no patch of 4 x 4"),
    ],
)
def test_unsuitable_pixels_are_named(pixels, message):
    model = DaViT(DaViTConfig(**SMALL), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        model(jnp.asarray(pixels))
    with pytest.raises(ValueError, match="cannot capture attention_weights; there are stages"):
        model(jnp.zeros((1, 32, 32, 3)), capture=("attention_weights",))


@pytest.mark.parametrize("scale", ["channels", "places"])
def test_channel_attention_is_that_of_its_formula(scale):
    config = DaViTConfig(dims=(12,), depths=(1,), heads=(3,), channel_scale=scale)
    attention, rng = ChannelAttention(config, 12, 3, rngs=nnx.Rngs(0)), np.random.default_rng(1)
    for linear in (attention.query, attention.key, attention.value, attention.output):
        linear.kernel[...], linear.bias[...] = rng.normal(size=(12, 12)), rng.normal(size=12)
    x = rng.normal(size=(2, 7, 12))
    query, key, value = (
        x @ np.asarray(linear.kernel[...]) + linear.bias[...]
        for linear in (attention.query, attention.key, attention.value)
    )
    mixed = np.zeros_like(x)
    for group in range(3):
        for channel in range(4 * group, 4 * group + 4):
            others = range(4 * group, 4 * group + 4)
            scores = np.array([[query[b, :, channel] @ key[b, :, other] for other in others] for b in range(2)])
            weights = np.exp(scores / np.sqrt(4 if scale == "channels" else 7))
            weights /= weights.sum(-1, keepdims=True)
            mixed[:, :, channel] = np.einsum("bo,bno->bn", weights, value[:, :, list(others)])
    expected = mixed @ np.asarray(attention.output.kernel[...]) + attention.output.bias[...]
    with jax.default_matmul_precision("highest"):
        near(attention(jnp.asarray(x, jnp.float32)), expected)


def test_only_windows_and_maps_bound_what_a_place_sees():
    """One spatial block: a place changes those of its window and the neighbours of the convolutions, and no others."""
    config = DaViTConfig(dims=(4,), depths=(1,), heads=(2,), window=3)
    block = random(config).stages[0].stack.unstack().layers[0].spatial
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 8, 8, 4)).astype(np.float32)
    changed = x.copy()
    changed[0, 4, 4] += 1
    different = np.any(np.asarray(block(jnp.asarray(x))) != np.asarray(block(jnp.asarray(changed))), axis=-1)[0]
    # The first convolution carries it to 3..5, all inside the middle window of 3..5; the second one to 2..6.
    expected = np.zeros((8, 8), bool)
    expected[2:7, 2:7] = True
    np.testing.assert_array_equal(different, expected)


def test_without_a_key_nothing_is_random_and_with_one_everything_set_is():
    config = DaViTConfig(dims=(8,), depths=(2,), heads=(2,), dropout=0.1, attention_dropout=0.1, stochastic_depth=0.5)
    model, x = random(config), jnp.asarray(np.random.default_rng(0).normal(size=(4, 32, 32, 3)), jnp.float32)
    run = jax.jit(lambda model, x, key: model(x, key=key).pooled)
    plain = run(model, x, None)
    still = random(dataclasses.replace(config, dropout=0.0, attention_dropout=0.0, stochastic_depth=0.0))
    np.testing.assert_allclose(plain, run(still, x, None), rtol=1e-6)
    one, same, other = (run(model, x, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3 and np.abs(one - plain).max() > 1e-3
    for rate in ("dropout", "attention_dropout", "stochastic_depth"):
        alone = random(dataclasses.replace(still.config, **{rate: 0.5}))
        assert np.abs(run(alone, x, jax.random.key(0)) - plain).max() > 1e-3, rate


def test_bfloat16_stays_near_float32(golden):
    _, values = golden("tiny")
    pixels = pixels_of(values, "37x61")
    half = from_pretrained(GOLDENS / "tiny", changes={"dtype": "bfloat16"})
    output = jax.jit(lambda model, x: model(x))(half, pixels)
    assert output.hidden.dtype == output.pooled.dtype == jnp.bfloat16 and output.logits.dtype == jnp.float32
    np.testing.assert_allclose(output.logits, values["37x61/logits"], atol=0.1 * np.abs(values["37x61/logits"]).max())


def test_layers_are_stacked_and_their_learning_rate_falls_from_stage_to_stage():
    config = DaViTConfig(**SMALL, labels=("a", "b"))
    model = jax.eval_shape(lambda: ImageClassifier(config.build(rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)))
    stacked = named_leaves(stacked_mask(model))
    assert {path for path, is_stacked in stacked.items() if is_stacked} == {path for path in stacked if "stack" in path}
    settings = OptimizerConfig(name="sgd", momentum=0.0, learning_rate=1.0, schedule="constant", layer_decay=0.5)
    settings = dataclasses.replace(settings, clip_norm=None)
    optimizer = make_optimizer(settings, 10, model, stacked=stacked_mask(model))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), model)
    updates = named_leaves(optimizer.update(ones, optimizer.init(ones), ones)[0])
    size = {path: np.abs(np.asarray(x)).reshape(-1, x.shape[-1])[:, 0] for path, x in updates.items()}
    layer = "backbone.stages.{}.stack.layers.0.{}.mlp.up.bias"
    # five pairs of blocks in all; the head has the whole rate
    assert size["head.bias"][0] == size["backbone.norm.scale"][0] == 1
    for block in ("spatial", "channel"):
        np.testing.assert_allclose(size[layer.format(3, block)], [2.0**-1])
        np.testing.assert_allclose(size[layer.format(2, block)], [2.0**-2])
        np.testing.assert_allclose(size[layer.format(1, block)], [2.0**-4, 2.0**-3])
        np.testing.assert_allclose(size[layer.format(0, block)], [2.0**-5])
    np.testing.assert_allclose(size["backbone.stages.0.projection.bias"], [2.0**-6])
