"""Image GPT: published sizes, what it computes by the formulas, and pictures of another size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.generation import Sampling, generate
from transformers_jax.models import ImageGPT, ImageGPTConfig, LanguageModel
from transformers_jax.nn import resize_positions
from transformers_jax.training.paths import named_leaves

TINY = ImageGPTConfig(image_size=(3, 5), clusters=7, dim=12, depth=2, heads=3, init_std=0.3)


def build(config):
    return LanguageModel(ImageGPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


@pytest.mark.parametrize(
    ("name", "dim", "depth", "published"),
    [  # Chen et al. 2020, section 3 and table 1
        ("small", 512, 24, 76e6),
        ("medium", 1024, 36, 455e6),
        ("large", 1536, 48, 1362e6),
        ("xl", 3072, 60, 6801e6),
    ],
)
def test_published_sizes(name, dim, depth, published):
    """By the formula, too: 12 dim^2 + 11 dim a layer, 513 tokens in, 512 out, a position a pixel, the last norm."""
    config = getattr(ImageGPTConfig, name)()
    model = jax.eval_shape(lambda: build(config))
    count = sum(int(np.prod(x.shape, dtype=np.int64)) for x in jax.tree.leaves(model))
    assert (config.dim, config.depth) == (dim, depth)
    assert count == depth * (12 * dim**2 + 11 * dim) + (513 + 512 + config.places) * dim + dim
    assert abs(count / published - 1) < 0.01


def test_the_start_token_is_read_and_never_predicted():
    model, config = build(TINY), TINY
    assert (config.vocab_size, config.bos_id, config.predicted_tokens) == (8, 7, 7)
    assert (config.places, config.max_length) == (15, 16)
    ids = jnp.full((1, 15), config.bos_id)
    assert model(ids).logits.shape == (1, 15, 7)
    with pytest.raises(ValueError, match="input_ids hold 8 but the vocabulary is 0 to 7"):
        model(ids + 1)
    with pytest.raises(ValueError, match="16 positions are needed but the table has 15"):
        model(jnp.zeros((1, 16), jnp.int32))


def test_a_whole_picture_is_generated_from_the_start_token_and_no_pixel_more():
    model = build(TINY)
    output = generate(model, [[7]] * 3, max_new_tokens=15, sampling=Sampling(), key=jax.random.key(0))
    assert output.tokens.shape == (3, 15) and output.tokens.max() < 7
    with pytest.raises(ValueError, match="17 positions are needed"):
        generate(model, [[7]], max_new_tokens=16, sampling=Sampling(temperature=0))
    # The cache gives what the whole picture gives.
    picture = jnp.concatenate([jnp.full((3, 1), 7), output.tokens[:, :-1]], axis=1)
    log_probs = jax.nn.log_softmax(model(picture).logits)
    expected = jnp.take_along_axis(log_probs, output.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(output.log_probs, expected, atol=1e-5)


def test_the_norms_do_not_subtract_the_mean():
    """What transformers' ImageGPTLayerNorm computes: x / sqrt(mean(x^2) + epsilon) * weight."""
    norm = build(dataclasses.replace(TINY, norm_epsilon=0.1)).backbone.norm
    x = np.random.default_rng(0).normal(3, 1, (2, 5, 12)).astype(np.float32)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-6)
    assert not [name for name in named_leaves(build(TINY)) if "norm" in name and not name.endswith("scale")]


def test_positions_are_resized_to_pictures_of_another_size():
    model, larger = build(TINY), dataclasses.replace(TINY, image_size=(6, 4))
    carried = larger.carry_over(named_leaves(model), TINY)
    table = model.backbone.positions.embedding[...]
    np.testing.assert_array_equal(carried["backbone.positions.embedding"], resize_positions(table, (3, 5), (6, 4)))
    assert {name: x.shape for name, x in carried.items()} == {
        name: x.shape for name, x in named_leaves(build(larger)).items()
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(image_size=0), "image_size=0 must be a whole number of pixels, or two"),
        (dict(image_size=(3, 0)), r"image_size=\(3, 0\) must be"),
        (dict(channels=2), r"channels=2 must be 1 \(grey\) or 3"),
        (dict(clusters=1), "clusters=1 must be at least 2"),
        (dict(dim=10, heads=4), "dim=10 is not a multiple of heads=4"),
        (dict(embedding_dropout=1.0), "embedding_dropout=1.0 must be"),
        (dict(activation="swish"), "unknown activation 'swish'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_impossible_settings_name_fields_and_values(fields, message):
    with pytest.raises(ValueError, match=message):
        ImageGPTConfig(**fields)
