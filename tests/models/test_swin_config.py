"""Sizes that are the published ones, and configurations that are refused."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from transformers_jax.models import ImageClassifier, Swin, SwinConfig
from transformers_jax.models.swin import fit_window

LABELS = tuple(map(str, range(1000)))
SIZES = [
    ("tiny", 28_288_354, 4.5e9),
    ("small", 49_606_258, 8.7e9),
    ("base", 87_768_224, 15.4e9),
    ("large", 196_532_476, 34.5e9),
]


@pytest.mark.parametrize(("size", "parameters", "operations"), SIZES)
def test_sizes(size, parameters, operations):
    """As many parameters as timm's and torchvision's models have, and multiplications as in the paper's table 1."""
    config = getattr(SwinConfig, size)(labels=LABELS)
    model = jax.eval_shape(lambda: ImageClassifier(Swin(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == parameters
    assert config.flops_per_example() / 6 == pytest.approx(operations, rel=0.01)


def test_larger_images_and_windows_of_the_paper():
    config = SwinConfig.base(image_size=384, window=12)
    assert config.flops_per_example(2) / 12 == pytest.approx(47.0e9, rel=0.01)
    assert config.maps() == ((96, 96), (48, 48), (24, 24), (12, 12)) and config.dim == 1024 and config.depth == 24
    assert SwinConfig(image_size=(61, 50)).maps() == ((16, 13), (8, 7), (4, 4), (2, 2))


def test_operations_by_the_formula():
    """Six for each weight and place, padded ones in attention, and twelve times width and window for its scores."""
    config = SwinConfig(dims=(8, 16), depths=(2, 1), heads=(2, 4), mlp_ratio=2, window=3, patch_size=2, image_size=10)
    first = 36 * (6 * 4 * 64 + 12 * 8 * 9) + 25 * 6 * 2 * 8 * 16  # 5 x 5 places in windows for 6 x 6
    second = 9 * (6 * 4 * 256 + 12 * 16 * 9) + 9 * 6 * 2 * 16 * 32  # one window
    patches, merging = 25 * 6 * 12 * 8, 9 * 6 * 32 * 16
    assert config.flops_per_example() == 2 * first + second + patches + merging


@pytest.mark.parametrize(
    ("window", "size", "expected"),
    [
        ((7, 7), (8, 8), ((7, 7), (3, 3))),
        ((7, 7), (7, 7), ((7, 7), (0, 0))),
        ((7, 7), (7, 20), ((7, 7), (0, 0))),
        ((7, 7), (4, 4), ((4, 4), (0, 0))),
        ((7, 7), (20, 4), ((4, 4), (0, 0))),  # the original's rule: the shorter side
        ((4, 6), (5, 7), ((4, 6), (2, 3))),
        ((1, 1), (5, 5), ((1, 1), (0, 0))),
    ],
)
def test_windows_of_maps(window, size, expected):
    assert fit_window(window, size, shifted=True) == expected
    assert fit_window(window, size, shifted=False) == (expected[0], (0, 0))


def test_windows_of_a_checkpoint_are_kept_unless_others_are_asked_for():
    checkpoint, chosen = SwinConfig.base(window=12, image_size=384), SwinConfig.tiny(stochastic_depth=0.1)
    config = checkpoint.with_run_fields(chosen)
    assert (config.window, config.stochastic_depth, config.dims) == (12, 0.1, checkpoint.dims)
    config = checkpoint.with_run_fields(dataclasses.replace(chosen, resize_window=8))
    assert (config.window, config.resize_window) == (8, None)
    with pytest.raises(ValueError, match="resize_window=8 is for the windows of a checkpoint; set window"):
        SwinConfig(resize_window=8).build(rngs=nnx.Rngs(0))


def test_tables_are_resized_one_by_one_and_their_centre_stays():
    old = SwinConfig(dims=(6,), depths=(4,), heads=(3,), window=7)
    name = "backbone.stages.0.stack.layers.1.relative.embedding"
    table = jax.numpy.asarray(np.random.default_rng(0).normal(size=(2, 169, 3)), "float32")
    other = jax.numpy.ones((2, 2))
    carried = dataclasses.replace(old, window=12).carry_over({name: table, "backbone.norm.scale": other}, old)
    assert carried[name].shape == (2, 529, 3) and carried["backbone.norm.scale"] is other
    np.testing.assert_allclose(carried[name][:, 264], table[:, 84], rtol=1e-6)
    alone = dataclasses.replace(old, window=12).carry_over({name: table[1:]}, old)
    np.testing.assert_array_equal(alone[name][0], carried[name][1])
    assert dataclasses.replace(old, window=(7, 7)).carry_over({name: table}, old)[name] is table


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window=0 must be a whole number of places of the map, or two"),
        ({"window": (7, 0)}, r"window=\(7, 0\) must be"),
        ({"resize_window": -1}, "resize_window=-1 must be"),
        ({"image_size": 3}, "image_size=3, patch_size=4: an image of 3 x 3 pixels has no patch of 4 x 4"),
        ({"dims": (64, 128, 192, 256)}, r"in stage 0 .* dims=\(64, 128, 192, 256\), .* 3 does not divide 64"),
        ({"dims": (96, 190, 384, 768)}, "in stage 1 .* and 6 does not divide 190"),
        ({"depths": (2, 2)}, "need a number for each stage, but have dims 4, depths 2, heads 4"),
        ({"dims": (), "depths": (), "heads": ()}, "but have dims 0, depths 0, heads 0"),
        ({"depths": (2, 2, 0, 2)}, r"depths=\(2, 2, 0, 2\) must be whole numbers of at least 1"),
        ({"mlp_ratio": 0.0}, r"mlp_ratio=0\.0 leaves nothing inside the MLP"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"stochastic_depth": 1.0}, r"stochastic_depth=1\.0 must be at least 0 and below 1"),
        ({"activation": "swish"}, "unknown activation 'swish'"),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        SwinConfig(**changes)
