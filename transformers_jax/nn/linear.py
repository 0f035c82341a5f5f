"""Dense layers and normalisation: Flax's own, with the two settings this package needs everywhere."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer, PrecisionLike
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

WIDE = 512
"""Outputs of a kernel from which on its gradient is computed, on CPU, from a copy of x, which takes the time of about
65 outputs."""


@cache
def normal_init(std: float) -> Initializer:
    """Normal initialiser with standard deviation `std`; the same function for the same `std`."""
    return nnx.initializers.normal(std)


def matmul(
    x: Float[Array, "*lead inner"],
    kernel: Float[Array, "inner outer"],
    *,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Float[Array, "*lead outer"]:
    """`x @ kernel` over the last axis of x; the options are those of `jnp.matmul`.

    XLA's CPU backend is slow at the usual forms of the weight gradient, which are avoided there, and only there. With
    several leading axes it contracts them one by one, at half the speed of the same product over one flat axis, so they
    are merged. Its fastest kernels take a product only if the first factor is contracted over its last axis: worth a
    transposed copy of x if the kernel is wide. For a narrow one that is taller than wide, `x.T @ gradient` takes up to
    twice the time of its transpose.
    """
    plain = partial(jnp.matmul, precision=precision, preferred_element_type=preferred_element_type)
    if jax.default_backend() != "cpu" or x.ndim < 2:
        return plain(x, kernel)
    product, (inner, outer) = plain, kernel.shape
    if precision is None and preferred_element_type is None:
        if outer >= WIDE:
            product = _matmul_by_copy
        elif inner > outer:
            product = _matmul_turned
    return product(x.reshape(-1, inner), kernel).reshape(*x.shape[:-1], outer)


def _matmul_with(change: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """`x @ kernel`, whose weight gradient is what the reverse of `change(x, kernel's tangent)` is."""

    @jax.custom_jvp
    def product(x: Array, kernel: Array) -> Array:
        return x @ kernel

    @product.defjvp
    def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
        (x, kernel), (x_dot, kernel_dot) = primals, tangents
        return x @ kernel, change(x, kernel_dot) + x_dot @ kernel

    return product


# The barriers keep XLA from folding the transpositions into the products, the checkpoint JAX from keeping the copy
# beside x until the backward pass.
@_matmul_with
@partial(jax.checkpoint, prevent_cse=False)
def _matmul_by_copy(x: Array, kernel_dot: Array) -> Array:
    return jnp.einsum("in,io->no", jax.lax.optimization_barrier(x.T), kernel_dot)


@_matmul_with
def _matmul_turned(x: Array, kernel_dot: Array) -> Array:
    return jnp.einsum("ni,oi->no", x, jax.lax.optimization_barrier(kernel_dot.T))


class Linear(nnx.Linear):
    """`x @ kernel + bias` with kernel (in_features, out_features); `nnx.Linear` with `matmul` above."""

    def __call__(self, inputs: Float[Array, "*lead in"], out_sharding=None) -> Float[Array, "*lead out"]:
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        outputs = matmul(inputs, kernel, precision=self.precision)
        return outputs if bias is None else outputs + bias


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation over the last axis (Ba et al. 2016), computed in float32.

    The variance is that of the centred values: the shorter E[x^2] - E[x]^2 loses its digits once activations drift from
    zero. For its backward pass it keeps the input, the mean and the deviation, and nothing else of the input's size.
    """

    def __init__(
        self,
        dim: int,
        *,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead dim"]:
        scale, bias = self.scale[...], self.bias[...]  # pyright: ignore[reportOptionalSubscript]
        dtype = jnp.result_type(x, scale) if self.dtype is None else self.dtype
        return _layer_norm(x, scale, bias, self.epsilon).astype(dtype)


class RMSNorm(nnx.RMSNorm):
    """`scale * x / sqrt(mean(x^2) + epsilon)` over the last axis (Zhang and Sennrich 2019), computed in float32."""

    def __call__(self, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead dim"]:
        scale = self.scale[...]  # pyright: ignore[reportOptionalSubscript]
        dtype = jnp.result_type(x, scale) if self.dtype is None else self.dtype
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        size = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + self.epsilon)
        return (wide * size * scale).astype(dtype)


NORMS: dict[str, Callable[..., Any]] = {"layer": LayerNorm, "rms": RMSNorm}
"""Norms by name."""


def check_norm(name: str) -> str:
    """`name`, or a ValueError that lists the norms there are."""
    if name not in NORMS:
        raise ValueError(f"unknown norm {name!r}; there are {', '.join(NORMS)}")
    return name


@partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names("mean", "inverse_deviation"),
    prevent_cse=False,
    static_argnums=3,
)
def _layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = x - checkpoint_name(jnp.mean(x, -1, keepdims=True), "mean")
    variance = jnp.mean(centred * centred, -1, keepdims=True)
    return centred * checkpoint_name(jax.lax.rsqrt(variance + epsilon), "inverse_deviation") * scale + bias
