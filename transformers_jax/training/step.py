"""The training step and the evaluation step: pure functions to be compiled by whoever runs them."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from transformers_jax.training.state import TrainState

Batch = Any
Metrics = dict[str, Array]


@runtime_checkable
class Loss(Protocol):
    """The loss of a batch as `(sum, weight)`: its mean is sum / weight. `key=None` means no randomness."""

    def __call__(self, model: Any, batch: Batch, *, key: Array | None) -> tuple[Array, Array]: ...


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    schedule: optax.Schedule | None = None,
    seed: int = 0,
    accumulation: int = 1,
    axis_name: str | tuple[str, ...] | None = None,
    ema: float | None = None,
    trained: Callable[[Any], Any] = lambda gradients: gradients,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure function `step(state, batch) -> (state, metrics)` that makes one optimizer update.

    Sums and weights of the loss and its gradients are added over `accumulation` micro-batches, and over `axis_name`
    under `jax.pmap` or `jax.shard_map`, and divided once: the update is that of the whole batch however it is cut. A
    batch with nothing to learn from (weight 0) gives loss 0 and zero gradients.

    With `ema`, after update n the average of a state made with `ema=True` is d * average + (1 - d) * model, where
    d = min(ema, (1 + n) / (10 + n)), so that a short run does not average its first weights in (the formula of
    TensorFlow's `tf.train.ExponentialMovingAverage` with `num_updates`).

    Randomness is `fold_in(key(seed), state.step)`. Metrics are `loss`, `grad_norm` (before clipping, of the `trained`
    part of the gradients: nothing else needs the others, so they are not computed), `weight`, and with `schedule` the
    `learning_rate` of this update.
    """

    def gradients_of(model: Any, batch: Batch, key: Array) -> tuple[tuple[Array, Array], Any]:
        def in_float32(model: Any) -> tuple[Array, Array]:
            loss_sum, weight = loss(model, batch, key=key)
            return loss_sum.astype(jnp.float32), weight.astype(jnp.float32)

        return jax.value_and_grad(in_float32, has_aux=True)(model)

    def accumulated(model: Any, batch: Batch, key: Array) -> tuple[tuple[Array, Array], Any]:
        # Micro-batch i takes every accumulation-th row, so that each device keeps the rows it has.
        batches = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, accumulation, *x.shape[1:]), 0, 1), batch)

        def add(totals: Any, inputs: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, totals, gradients_of(model, *inputs)), None

        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.promote_types(x.dtype, jnp.float32)), model)
        nothing = jax.tree.map(lambda x: varying(x), (jnp.zeros(()), jnp.zeros(())))
        totals, _ = jax.lax.scan(add, (nothing, zeros), (batches, jax.random.split(key, accumulation)))
        return totals

    def varying(x: Array) -> Array:
        return x if axis_name is None else jax.lax.pcast(x, axis_name, to="varying")

    def moved(average: Any, model: Any, updates: Array) -> Any:
        assert ema is not None
        # 1 - d, which float32 holds better than a d near 1; in this form the average of what is frozen keeps its bits.
        rate = jnp.maximum(1 - ema, 9 / (10 + updates))
        return jax.tree.map(lambda a, x: a + rate * (x.astype(a.dtype) - a), average, model)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if (ema is None) != (state.ema is None):
            raise ValueError("a state has an average (TrainState.create(ema=True)) if, and only if, its step has `ema`")
        key, model = jax.random.fold_in(jax.random.key(seed), state.step), state.model
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
            # Each device's gradient stays its own until the sum below; otherwise shard_map adds them up by itself.
            model = jax.tree.map(varying, model)
        sums = (gradients_of if accumulation == 1 else accumulated)(model, batch, key)
        if axis_name is not None:
            sums = jax.lax.psum(sums, axis_name)
        (loss_sum, weight), gradients = sums
        scale = 1.0 / jnp.where(weight > 0, weight, 1.0)
        gradients = jax.tree.map(lambda g, p: (g * scale).astype(p.dtype), gradients, state.model)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.model)
        metrics = {"loss": loss_sum * scale, "grad_norm": optax.global_norm(trained(gradients)), "weight": weight}
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        model = optax.apply_updates(state.model, updates)
        average = None if ema is None else moved(state.ema, model, state.step + 1)
        return TrainState(state.step + 1, model, optimizer_state, average), metrics

    return step


def make_evaluation_step(
    metrics: Callable[[Any, Batch], dict[str, Array]],
) -> Callable[[Any, Batch, dict[str, Array]], dict[str, Array]]:
    """A pure function `step(model, batch, totals) -> totals` that adds the sums of one batch to those so far.

    `metrics(model, batch)` returns sums and weights by name, never means, so that uneven batches count right. Start
    from totals of zeros.
    """

    def step(model: Any, batch: Batch, totals: dict[str, Array]) -> dict[str, Array]:
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), totals, metrics(model, batch))

    return step
