"""Products with kernels: their derivatives in every direction, whichever form is chosen for the weight gradient."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from transformers_jax.nn.linear import WIDE, matmul
from transformers_jax.training.mesh import MeshConfig, make_mesh

SHAPES = [(6, WIDE), (5, 7), (9, 4), (WIDE + 2, WIDE)]  # a copy, as it comes, turned, a copy


def arrays(inner: int, outer: int) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shapes = [(3, 2, inner), (inner, outer), (3, 2, outer), (3, 2, inner), (inner, outer)]
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_gradients_are_those_of_the_formula(inner, outer):
    x, kernel, weight, *_ = arrays(inner, outer)
    gradients = jax.jit(jax.grad(lambda x, k: jnp.sum(weight * matmul(x, k)), argnums=(0, 1)))(x, kernel)
    np.testing.assert_allclose(gradients[0], np.einsum("abo,io->abi", weight, kernel), atol=1e-3)
    np.testing.assert_allclose(gradients[1], np.einsum("abi,abo->io", x, weight), atol=1e-4)


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_derivatives_in_other_directions(inner, outer):
    x, kernel, weight, x_dot, kernel_dot = arrays(inner, outer)
    _, change = jax.jvp(matmul, (x, kernel), (x_dot, kernel_dot))
    np.testing.assert_allclose(change, x_dot @ kernel + x @ kernel_dot, atol=1e-3)

    def loss(kernel, weight):
        return jnp.mean((weight * matmul(x, kernel)) ** 2)

    of_rows = jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, weight[:, None])
    one_by_one = [jax.grad(loss)(kernel, row[None]) for row in weight]
    np.testing.assert_allclose(of_rows, jnp.stack(one_by_one), atol=1e-5)
    _, second = jax.jvp(jax.grad(loss), (kernel, weight), (kernel_dot, jnp.zeros_like(weight)))
    expected = 2 / weight.size * np.einsum("abi,abo->io", x, weight**2 * (x @ kernel_dot))
    np.testing.assert_allclose(second, expected, atol=1e-5)


def test_the_backward_pass_is_given_no_copy_of_the_inputs():
    x, kernel, *_ = arrays(5, WIDE)
    _, reverse = jax.vjp(matmul, x, kernel)
    kept = [leaf.shape for leaf in jax.tree.leaves(reverse)]
    assert (6, 5) in kept and (5, 6) not in kept


def test_a_wide_kernels_gradient_has_the_form_that_xla_is_fast_at():
    x, kernel, weight, *_ = arrays(5, WIDE)
    gradient = jax.jit(jax.grad(lambda k: jnp.sum(weight * matmul(x, k)))).lower(kernel).compile().as_text()
    assert re.findall(r"lhs_contracting_dims={(\d)}, rhs_contracting_dims={(\d)}", gradient) == [("1", "0")]


@pytest.mark.mesh
def test_gradients_on_a_mesh_are_those_of_one_device():
    mesh, rng = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)), np.random.default_rng(0)
    inputs = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [(64, WIDE), (WIDE, WIDE), (8, 16, 64)]]
    specs = PartitionSpec("fsdp", "tensor"), PartitionSpec("tensor", "fsdp"), PartitionSpec(("data", "fsdp"))
    placed = tuple(NamedSharding(mesh, spec) for spec in specs)

    def loss(up, down, x):
        return jnp.mean(matmul(jnp.tanh(matmul(x, up)), down) ** 2)

    gradients = jax.grad(loss, argnums=(0, 1, 2))
    spread = jax.jit(gradients, in_shardings=placed, out_shardings=placed)(*inputs)
    for ours, expected in zip(spread, jax.jit(gradients)(*inputs), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5 * float(jnp.abs(expected).max()))
