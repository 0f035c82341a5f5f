"""The feed-forward half of a Transformer layer."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from transformers_jax.nn.dropout import PRNGKey, dropout
from transformers_jax.nn.linear import Linear, normal_init
from transformers_jax.nn.sharding import BATCH, TENSOR, constrain

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
"""Activations by name. "gelu" is exact (erf), "gelu_tanh" its tanh form (GPT-2), "gelu_quick" x * sigmoid(1.702 x)."""


def check_activation(name: str) -> str:
    """`name`, or a ValueError that lists the names there are."""
    if name not in ACTIVATIONS:
        raise ValueError(f"unknown activation {name!r}; there are {', '.join(ACTIVATIONS)}")
    return name


class MLP(nnx.Module):
    """`down(activation(up(x)))`, dim -> mlp_dim -> dim, at every position alike; `gated` has a second way up,
    `down(activation(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        use_bias: bool = True,
        kernel_init: Initializer = normal_init(0.02),
        output_init: Initializer | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.activation, self.dropout = check_activation(activation), dropout

        def linear(inner: int, outer: int, init: Initializer) -> Linear:
            return Linear(
                inner, outer, use_bias=use_bias, kernel_init=init, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        self.up = linear(dim, mlp_dim, kernel_init)
        self.down = linear(mlp_dim, dim, kernel_init if output_init is None else output_init)
        self.gate = linear(dim, mlp_dim, kernel_init) if gated else nnx.data(None)

    def __call__(self, x: Float[Array, "*lead dim"], *, key: PRNGKey | None = None) -> Float[Array, "*lead dim"]:
        """`dropout` (with `key`) acts between the activation and `down`."""
        activation = ACTIVATIONS[self.activation]
        inside = self._up(self.up, x)
        inside = activation(inside) if self.gate is None else activation(self._up(self.gate, x)) * inside
        return constrain(self.down(dropout(inside, self.dropout, key)), BATCH)

    def _up(self, linear: Linear, x: Array) -> Array:
        return constrain(linear(x), BATCH, *[None] * (x.ndim - 2), TENSOR)
