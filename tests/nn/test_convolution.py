"""Depthwise convolutions, against a loop over places and XLA's own convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.nn import DepthwiseConvolution
from transformers_jax.nn.convolution import depthwise


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def by_xla(x, kernel):
    return jax.lax.conv_general_dilated(
        x,
        kernel[:, :, None],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def test_it_is_the_sum_over_neighbours_of_each_channel():
    x, kernel = draw(2, 4, 5, 3), draw(3, 3, 3, seed=1)
    expected = np.zeros_like(x)
    for row in range(4):
        for column in range(5):
            for i in range(3):
                for j in range(3):
                    if 0 <= row + i - 1 < 4 and 0 <= column + j - 1 < 5:
                        expected[:, row, column] += x[:, row + i - 1, column + j - 1] * kernel[i, j]
    layer = DepthwiseConvolution(3, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = jnp.asarray(kernel), jnp.asarray([1.0, 2.0, 3.0])
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected + np.arange(1, 4), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # the sum over places is taken in another way on the CPU
@pytest.mark.parametrize(
    ("size", "kernel"), [((2, 7, 5, 4), (3, 3)), ((3, 1, 2, 1), (3, 3)), ((1, 6, 9, 2), (5, 3)), ((2, 1, 1, 3), (3, 3))]
)
def test_values_and_gradients_are_those_of_xlas_convolution(size, kernel, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    x, kernel = jnp.asarray(draw(*size)), jnp.asarray(draw(*kernel, size[-1], seed=1))
    weights = draw(*size, seed=2)

    def run(function):
        return jax.value_and_grad(lambda x, kernel: jnp.sum(jnp.sin(function(x, kernel)) * weights), (0, 1))(x, kernel)

    for found, expected in zip(*map(jax.tree.leaves, (run(depthwise), run(by_xla))), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_is_summed_in_float32():
    x, kernel = (jnp.asarray(draw(*shape), jnp.bfloat16) for shape in ((8, 16, 16, 4), (3, 3, 4)))
    gradient = jax.grad(lambda kernel: jnp.sum(depthwise(x, kernel).astype(jnp.float32)))(kernel)
    exact = jax.grad(lambda kernel: jnp.sum(by_xla(x.astype(jnp.float32), kernel)))(kernel.astype(jnp.float32))
    assert gradient.dtype == depthwise(x, kernel).dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient, exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("size", [0, 2])
def test_a_kernel_without_a_centre_is_refused(size):
    with pytest.raises(ValueError, match=f"size={size} must be an odd number"):
        DepthwiseConvolution(3, size=size, rngs=nnx.Rngs(0))
