"""What training changes, as one pytree."""

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class TrainState:
    """Number of updates made, model, the optimizer's state, and the moving average of the model, if one is kept.

    `ema` is in float32 whatever the type of the parameters: a decay of 0.9999 changes the average by a ten-thousandth
    of a difference, which the 8 bits of bfloat16 would round away.
    """

    step: Any
    model: Any
    optimizer: Any
    ema: Any = None

    @classmethod
    def create(cls, model: Any, optimizer: optax.GradientTransformation, *, ema: bool = False) -> "TrainState":
        """The state before the first update. Under `jax.jit` with `out_shardings` it is built sharded."""
        # A copy: the step may be given both to overwrite.
        copy = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32)), model) if ema else None
        return cls(jnp.zeros((), jnp.int32), model, optimizer.init(model), copy)

    @property
    def averaged(self) -> Any:
        """The model to evaluate and to keep: the average in the types of the model, or the model itself without one."""
        if self.ema is None:
            return self.model
        return jax.tree.map(lambda average, x: average.astype(x.dtype), self.ema, self.model)


def count_parameters(model: Any) -> int:
    """Number of parameters of a model, or of an abstract one (`jax.eval_shape`)."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
