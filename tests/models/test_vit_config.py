"""Sizes that are the published ones, and configurations that are refused."""

import dataclasses

import jax
import pytest
from flax import nnx

from transformers_jax.models import ImageClassifier, ViT, ViTConfig

LABELS = tuple(map(str, range(1000)))


def count(config, head=ImageClassifier):
    def build():
        model = ViT(config, rngs=nnx.Rngs(0))
        return model if head is None else head(model, rngs=nnx.Rngs(0))

    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(build)))


@pytest.mark.parametrize(
    ("size", "parameters"),
    [
        ("ti16", 5_717_416),
        ("s16", 22_050_664),
        ("b16", 86_567_656),
        ("b32", 88_224_232),
        ("l16", 304_326_632),
        ("h14", 632_045_800),
    ],
)
def test_sizes(size, parameters):
    """As many parameters as timm's and torchvision's models of these names have."""
    assert count(getattr(ViTConfig, size)(labels=LABELS)) == parameters


def test_what_options_add_and_take_away():
    base = ViTConfig.b16(labels=LABELS)
    whole, dim = count(base), 768

    def more(**changes):
        return count(dataclasses.replace(base, **changes)) - whole

    assert more(distillation_token=True) == 2 * dim  # itself and its position
    assert more(distillation_token=True, distillation_head=True) == 2 * dim + (dim + 1) * 1000  # DeiT-B: 87,338,192
    assert whole + more(distillation_token=True, distillation_head=True) == 87_338_192
    assert more(positions="sinusoidal") == -197 * dim
    assert more(class_token=False, pooling="mean") == -2 * dim
    assert more(image_size=384) == (24**2 - 14**2) * dim
    assert more(channels=1) == -2 * 16 * 16 * dim
    layer = 4 * (dim + 1) * dim + 2 * 4 * dim * dim + 5 * dim
    assert more(pooling="attention") == layer + 3 * dim  # a layer with one norm, and the query
    assert count(dataclasses.replace(base, pooler=True), None) - count(base, None) == (dim + 1) * dim


def test_sizes_can_be_changed():
    config = ViTConfig.l16(depth=2, labels=("a", "b"), image_size=(32, 48))
    assert (config.depth, config.dim, config.labels, config.grid) == (2, 1024, ("a", "b"), (2, 3))
    assert ViTConfig.h14().grid == (16, 16) and ViTConfig(image_size=(32, 48), patch_size=(4, 16)).grid == (8, 3)


def test_the_pooler_is_only_for_the_bare_model():
    config = ViTConfig(pooler=True)
    assert config.for_head(None).pooler and not config.for_head(ImageClassifier).pooler


def test_floating_point_operations():
    """Six for each weight of a matrix product and token, twelve times tokens and width a layer for attention."""
    config = ViTConfig(depth=2, dim=8, heads=2, mlp_dim=10, image_size=(8, 12), patch_size=4, distillation_token=True)
    tokens = 2 * 3 + 2
    layers = tokens * (6 * 2 * (4 * 64 + 2 * 80) + 12 * 2 * 8 * tokens)
    assert config.flops_per_example() == layers + 6 * 6 * (4 * 4 * 3) * 8
    assert config.flops_per_example(3) == 3 * config.flops_per_example()
    # He et al. and others count 17.6 G multiplications for the forward pass of ViT-B/16.
    assert ViTConfig.b16().flops_per_example() / 6 == pytest.approx(17.5e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 30}, r"image_size=30, patch_size=16: an image of 30 x 30 pixels .* cannot be cut"),
        ({"image_size": (32, 40)}, r"image_size=\(32, 40\), patch_size=16: .* cannot be cut into patches of 16 x 16"),
        ({"image_size": 8}, "image_size=8, patch_size=16: an image of 8 x 8 pixels has no patch of 16 x 16"),
        ({"image_size": 0}, "image_size=0 must be a whole number of pixels, or two"),
        ({"image_size": (32, 32, 32)}, "must be a whole number of pixels, or two"),
        ({"patch_size": (16, -1)}, r"patch_size=\(16, -1\) must be a whole number of pixels"),
        ({"patch_size": 2.5}, r"patch_size=2\.5 must be"),
        ({"channels": 0}, "channels=0 must be at least 1"),
        ({"stochastic_depth": 1.0}, r"stochastic_depth=1\.0 must be at least 0 and below 1"),
        ({"image_mean": (0.5, 0.5)}, r"image_mean=\(0\.5, 0\.5\) needs 1 or channels=3 numbers"),
        ({"image_std": (0.0,)}, r"image_std=\(0\.0,\) must be above 0"),
        ({"pooling": "max"}, "pooling='max' is not one of class_token, mean, attention"),
        ({"positions": "rotary"}, "positions='rotary' is not one of learned, sinusoidal"),
        ({"position_resampling": "nearest"}, "unknown resampling 'nearest'; there are bicubic, bicubic_antialias"),
        ({"class_token": False}, "pooling='class_token' needs class_token=True"),
        (
            {"class_token": False, "pooling": "mean", "distillation_token": True},
            "distillation_token=True needs class_token=True",
        ),
        ({"distillation_head": True}, "distillation_head=True needs distillation_token=True"),
        ({"positions": "sinusoidal", "dim": 6, "heads": 2}, "a dim that 4 divides, of at least 8, not dim=6"),
        ({"heads": 5}, "dim=768 is not a multiple of heads=5"),
    ],
)
def test_impossible_settings(changes, message):
    config = ViTConfig()
    for name, value in changes.items():  # past the shape checks of the tests, which know the types
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=message):
        config.__post_init__()


def test_a_classifier_needs_labels():
    backbone = ViT(ViTConfig(image_size=4, patch_size=2, dim=4, depth=1, heads=1), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="labels is empty; name what the classifier is to tell apart"):
        ImageClassifier(backbone, rngs=nnx.Rngs(0))
