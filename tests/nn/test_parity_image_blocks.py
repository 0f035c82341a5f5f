"""Patches, positions and attention pooling against PyTorch, transformers and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.nn import AttentionPooling, PatchEmbedding, resize_positions

torch = pytest.importorskip("torch")

SIZES = [(7, 5), (10, 3), (3, 11), (4, 6), (1, 1), (14, 10)]
"""Of the new grid; the old one is 5 x 7."""


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def random(*size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def copy_linear(ours, weight, bias):
    ours.kernel[...], ours.bias[...] = jnp.asarray(weight.detach().numpy().T), jnp.asarray(bias.detach().numpy())


@pytest.mark.parametrize("how", ["bicubic", "bicubic_antialias", "bilinear"])
@pytest.mark.parametrize("new", SIZES)
@pytest.mark.parametrize("prefix", [0, 2])
def test_resized_positions_are_those_of_pytorch(how, new, prefix):
    table = random(prefix + 35, 6)
    grid = torch.tensor(table[prefix:], dtype=torch.float64).reshape(1, 5, 7, 6).permute(0, 3, 1, 2)
    mode, antialias = how.removesuffix("_antialias"), how.endswith("_antialias")
    expected = torch.nn.functional.interpolate(grid, size=new, mode=mode, antialias=antialias, align_corners=False)
    expected = expected.permute(0, 2, 3, 1).reshape(-1, 6).numpy()
    ours = resize_positions(jnp.asarray(table), (5, 7), new, prefix=prefix, how=how)
    np.testing.assert_array_equal(ours[:prefix], table[:prefix])
    np.testing.assert_allclose(ours[prefix:], expected, atol=2e-6, rtol=1e-6)


def test_a_long_way_down_and_up():
    """Where the filters differ most: a fourteenth and sixteenfold."""
    table = random(28 * 14, 3)
    grid = torch.tensor(table, dtype=torch.float64).reshape(1, 28, 14, 3).permute(0, 3, 1, 2)
    for how, new in (("bicubic", (2, 3)), ("bicubic_antialias", (2, 3)), ("bicubic_antialias", (448, 5))):
        antialias = how.endswith("_antialias")
        expected = torch.nn.functional.interpolate(grid, size=new, mode="bicubic", antialias=antialias)
        ours = resize_positions(jnp.asarray(table), (28, 14), new, how=how)
        np.testing.assert_allclose(ours, expected.permute(0, 2, 3, 1).reshape(-1, 3), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("patch", [(4, 4), (2, 5)])
@pytest.mark.parametrize("channels", [1, 3])
def test_patch_embedding_is_a_convolution(patch, channels):
    """Outputs and the gradients of weights and pixels."""
    theirs = torch.nn.Conv2d(channels, 11, patch, stride=patch)
    ours = PatchEmbedding(patch, channels, 11, rngs=nnx.Rngs(0))
    kernel = theirs.weight.detach().numpy().transpose(2, 3, 1, 0).reshape(-1, 11)
    ours.projection.kernel[...] = jnp.asarray(kernel)
    ours.projection.bias[...] = jnp.asarray(theirs.bias.detach().numpy())
    pixels = random(2, 3 * patch[0], 2 * patch[1], channels)
    tensor = torch.tensor(pixels.transpose(0, 3, 1, 2).copy(), requires_grad=True)
    expected = theirs(tensor).flatten(2).transpose(1, 2)
    target = random(2, 6, 11, seed=1)
    (expected * torch.tensor(target)).sum().backward()

    def loss(module, pixels):
        output = module(pixels)
        return jnp.sum(output * target), output

    (gradient, of_pixels), output = jax.grad(loss, argnums=(0, 1), has_aux=True)(ours, jnp.asarray(pixels))
    np.testing.assert_allclose(output, expected.detach(), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(of_pixels, tensor.grad.permute(0, 2, 3, 1), atol=1e-5, rtol=1e-5)
    of_weight = theirs.weight.grad.permute(2, 3, 1, 0).reshape(-1, 11)
    np.testing.assert_allclose(gradient.projection.kernel[...], of_weight, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(gradient.projection.bias[...], theirs.bias.grad, atol=1e-5, rtol=1e-5)


def test_attention_pooling_is_siglips():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=12, num_attention_heads=3, intermediate_size=20, num_hidden_layers=1)
    config = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4, layer_norm_eps=1e-3)
    theirs = transformers.SiglipVisionModel(config).eval()
    head = next(module for module in theirs.modules() if type(module).__name__ == "SiglipMultiheadAttentionPoolingHead")
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, float(name == "layernorm.weight"), 0.4)
    ours = AttentionPooling(12, 3, 20, activation="gelu_tanh", norm_epsilon=1e-3, rngs=nnx.Rngs(0))
    ours.query[...] = jnp.asarray(head.probe.detach().numpy()[0, 0])
    parts = zip(head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3), strict=True)
    for linear, part in zip((ours.attention.query, ours.attention.key, ours.attention.value), parts, strict=True):
        copy_linear(linear, *part)
    copy_linear(ours.attention.output, head.attention.out_proj.weight, head.attention.out_proj.bias)
    copy_linear(ours.mlp.up, head.mlp.fc1.weight, head.mlp.fc1.bias)
    copy_linear(ours.mlp.down, head.mlp.fc2.weight, head.mlp.fc2.bias)
    ours.norm.scale[...] = jnp.asarray(head.layernorm.weight.detach().numpy())
    ours.norm.bias[...] = jnp.asarray(head.layernorm.bias.detach().numpy())
    hidden = random(3, 7, 12)
    with torch.no_grad():
        expected = head(torch.tensor(hidden))
    pooled = ours(jnp.asarray(hidden))
    assert pooled.shape == (3, 12)
    np.testing.assert_allclose(pooled, expected, atol=1e-5, rtol=1e-5)

    # Tokens that a mask hides do not count.
    mask = jnp.arange(7)[None, None, None, :] < 5
    with torch.no_grad():
        expected = head(torch.tensor(hidden[:, :5]))
    np.testing.assert_allclose(ours(jnp.asarray(hidden), mask=mask), expected, atol=1e-5, rtol=1e-5)
