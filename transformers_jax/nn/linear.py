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

    XLA's CPU backend is slow at two forms of the weight gradient, which are avoided there, and only there. With several
    leading axes it contracts them one by one, at half the speed of the same product over one flat axis, so they are
    merged. For a kernel that is taller than wide (an MLP's way back), `x.T @ gradient` takes up to twice the time of
    its transpose.
    """
    plain = partial(jnp.matmul, precision=precision, preferred_element_type=preferred_element_type)
    if jax.default_backend() != "cpu" or x.ndim < 2:
        return plain(x, kernel)
    tall = kernel.shape[0] > kernel.shape[1] and precision is None and preferred_element_type is None
    product = _tall_matmul if tall else plain
    return product(x.reshape(-1, x.shape[-1]), kernel).reshape(*x.shape[:-1], kernel.shape[-1])


@jax.custom_jvp
def _tall_matmul(x: Array, kernel: Array) -> Array:
    return x @ kernel


@_tall_matmul.defjvp
def _tall_matmul_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, kernel), (x_dot, kernel_dot) = primals, tangents
    # Reversed, this is the fast form of the weight gradient; the barrier keeps XLA from folding it into the slow one.
    change = jnp.einsum("ni,oi->no", x, jax.lax.optimization_barrier(kernel_dot.T))
    return x @ kernel, x_dot @ kernel + change


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
