"""Convolutions of maps, one channel at a time."""

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from transformers_jax.nn.linear import normal_init


@jax.custom_vjp
def depthwise(
    x: Float[Array, "batch height width dim"], kernel: Float[Array, "rows columns dim"]
) -> Float[Array, "batch height width dim"]:
    """Each channel of `x` convolved with its own kernel of odd height and width, with zeros around the map; computed in
    float32.

    It is a sum of shifted products, which XLA fuses into one pass over the map: its CPU backend takes ten to twenty
    times as long for the convolution with one group a channel. There, the kernel's gradient is summed row by row, since
    reductions over the whole map are slow.
    """
    rows, columns = kernel.shape[:2]
    places = [(i, j) for i in range(rows) for j in range(columns)]
    padded, height, width = _pad(x, (rows, columns)), x.shape[1], x.shape[2]
    wide = _wide(x, kernel)
    total = sum(padded[:, i : i + height, j : j + width].astype(wide) * kernel[i, j].astype(wide) for i, j in places)
    return jnp.asarray(total, x.dtype)


def _forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return depthwise(x, kernel), (x, kernel)


def _backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = kept
    rows, columns = kernel.shape[:2]
    padded, wide, (_, height, width, _) = _pad(x, (rows, columns)), _wide(x, kernel), x.shape

    def products(padded: Array, gradient: Array) -> list[Array]:
        """For each place of the kernel, what it is multiplied with at each place of the map."""
        gradient, padded = gradient.astype(wide), padded.astype(wide)
        height = gradient.shape[1]
        return [padded[:, i : i + height, j : j + width] * gradient for i in range(rows) for j in range(columns)]

    if jax.default_backend() == "cpu":

        def add_row(row: Array, sums: list[Array]) -> list[Array]:
            above = jax.lax.dynamic_slice_in_dim(padded, row, rows, axis=1)
            new = products(above, jax.lax.dynamic_slice_in_dim(gradient, row, 1, axis=1))
            return [old + change for old, change in zip(sums, new, strict=True)]

        empty = [jnp.zeros((len(x), 1, *x.shape[2:]), wide) for _ in range(rows * columns)]
        terms = jax.lax.fori_loop(0, height, add_row, empty)
    else:
        terms = products(padded, gradient)
    of_kernel = jnp.stack([jnp.sum(term, axis=(0, 1, 2)) for term in terms]).reshape(kernel.shape)
    return depthwise(gradient, kernel[::-1, ::-1]), of_kernel.astype(kernel.dtype)


depthwise.defvjp(_forward, _backward)


def _pad(x: Array, size: tuple[int, int]) -> Array:
    return jnp.pad(x, ((0, 0), (size[0] // 2,) * 2, (size[1] // 2,) * 2, (0, 0)))


def _wide(*arrays: Array) -> DTypeLike:
    return jnp.result_type(*arrays, jnp.float32)


class DepthwiseConvolution(nnx.Module):
    """A kernel of `size` x `size` places (an odd number) and a bias for each channel."""

    def __init__(
        self,
        dim: int,
        *,
        size: int = 3,
        kernel_init: Initializer = normal_init(0.02),
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if size < 1 or size % 2 == 0:
            raise ValueError(f"size={size} must be an odd number")
        self.dtype = dtype
        self.kernel = nnx.Param(kernel_init(rngs.params(), (size, size, dim), param_dtype))
        self.bias = nnx.Param(jnp.zeros(dim, param_dtype))

    def __call__(self, x: Float[Array, "batch height width dim"]) -> Float[Array, "batch height width dim"]:
        """Maps of the same size: outside of them there are zeros."""
        kernel, bias = self.kernel[...], self.bias[...]
        dtype = jnp.result_type(x, kernel) if self.dtype is None else self.dtype
        return depthwise(x.astype(dtype), kernel.astype(dtype)) + bias.astype(dtype)
