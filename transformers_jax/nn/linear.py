"""Dense layers and normalisation: Flax's own, with the two settings this package needs everywhere."""

from functools import cache

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float


@cache
def normal_init(std: float) -> Initializer:
    """Normal initialiser with standard deviation `std`; the same function for the same `std`."""
    return nnx.initializers.normal(std)


def matmul(
    x: Float[Array, "*lead inner"], kernel: Float[Array, "inner outer"], **kwargs
) -> Float[Array, "*lead outer"]:
    """`x @ kernel` over the last axis of x; `kwargs` go to `jnp.matmul`.

    On XLA's CPU backend the weight gradient of a product with several leading axes contracts them one by one and is
    about half as fast as the same product over one flat axis, so the leading axes are merged there, and only there.
    """
    if jax.default_backend() == "cpu" and x.ndim > 2:
        return jnp.matmul(x.reshape(-1, x.shape[-1]), kernel, **kwargs).reshape(*x.shape[:-1], kernel.shape[-1])
    return jnp.matmul(x, kernel, **kwargs)


class Linear(nnx.Linear):
    """`x @ kernel + bias` with kernel (in_features, out_features); `nnx.Linear` with `matmul` above."""

    def __call__(self, inputs: Float[Array, "*lead in"], out_sharding=None) -> Float[Array, "*lead out"]:
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        outputs = matmul(inputs, kernel, precision=self.precision)
        return outputs if bias is None else outputs + bias


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation over the last axis (Ba et al. 2016), statistics in float32.

    The variance is computed from the centred values: the shorter E[x^2] - E[x]^2 loses its digits once activations
    drift from zero.
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
        super().__init__(
            dim, epsilon=epsilon, dtype=dtype, param_dtype=param_dtype, use_fast_variance=False, rngs=rngs
        )  # fmt: skip
