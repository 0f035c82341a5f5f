"""What training changes, as one pytree."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class TrainState:
    """Number of updates made, model, and the optimizer's state."""

    step: Any
    model: Any
    optimizer: Any

    @classmethod
    def create(cls, model: Any, optimizer: optax.GradientTransformation) -> "TrainState":
        """The state before the first update. Under `jax.jit` with `out_shardings` it is built sharded."""
        return cls(jnp.zeros((), jnp.int32), model, optimizer.init(model))


def count_parameters(model: Any) -> int:
    """Number of parameters of a model, or of an abstract one (`jax.eval_shape`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
