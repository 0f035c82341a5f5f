"""Layers in a row, stored stacked and run by one `jax.lax.scan`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from transformers_jax.nn.sharding import BATCH, constrain

Apply = Callable[[nnx.Module, Array, Any, Any], tuple[Array, Any, Any]]

REMAT_POLICIES = {
    "full": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}
"""What a rematerialised layer keeps for its backward pass: nothing, every matrix product, or those with weights."""


def check_remat(name: str | None) -> str | None:
    """`name`, or a ValueError that lists the policies there are."""
    if name is not None and name not in REMAT_POLICIES:
        raise ValueError(f"unknown remat policy {name!r}; there are {', '.join(REMAT_POLICIES)} and None")
    return name


class Stack(nnx.Module):
    """`depth` layers whose parameters carry a leading depth axis, so that tracing and compiling do not grow with depth.

    `make_layer(rngs=...)` builds one layer; a sequence of makers is a cycle that repeats (GPT-3's alternating dense and
    banded layers), whose length must divide the depth. `layers[i]` then holds every cycle's i-th layer, stacked.

    Calling it runs `apply(layer, hidden, state, given) -> (hidden, state, captured)` for each layer in turn. `state` is
    what a layer takes and gives back changed (a cache), `given` what it only takes (a key), `captured` what is to be
    kept of it (attention weights); each is any pytree, or None, with a leading depth axis outside `apply`.

    `remat` names a policy of `REMAT_POLICIES`: memory is saved by computing a layer's inside again in the backward
    pass. `unroll` layers are laid out per step of the scan: faster for few small layers, slower to compile.
    """

    def __init__(
        self,
        make_layer: Callable[..., nnx.Module] | Sequence[Callable[..., nnx.Module]],
        depth: int,
        *,
        remat: str | None = None,
        unroll: int = 1,
        rngs: nnx.Rngs,
    ):
        cycle = [make_layer] if callable(make_layer) else list(make_layer)
        if depth < 1 or depth % len(cycle):
            raise ValueError(f"depth={depth} is not a positive multiple of the cycle of {len(cycle)} layers")
        self.depth, self.remat, self.unroll = depth, check_remat(remat), unroll
        self.layers = nnx.List(
            [
                jax.vmap(lambda key, make=make: make(rngs=nnx.Rngs(key)))(
                    jax.random.split(rngs.params(), depth // len(cycle))
                )
                for make in cycle
            ]
        )

    def __call__(self, apply: Apply, hidden: Array, state: Any = None, given: Any = None) -> tuple[Array, Any, Any]:
        cycle, repeats = len(self.layers), self.depth // len(self.layers)
        if self.remat is not None:
            # Inside a scan there is nothing to eliminate across iterations; laid out (XLA does so with one iteration)
            # there is.
            laid_out = self.unroll > 1 or repeats == 1
            apply = jax.checkpoint(apply, policy=REMAT_POLICIES[self.remat], prevent_cse=laid_out)

        def fold(x):
            return x.reshape(repeats, cycle, *x.shape[1:])

        def unfold(x):
            return x.reshape(self.depth, *x.shape[2:])

        def body(hidden, inputs):
            layers, state, given = inputs
            outputs = []
            for i, layer in enumerate(layers):
                hidden, *output = apply(layer, hidden, *jax.tree.map(lambda x, i=i: x[i], (state, given)))
                hidden = constrain(hidden, BATCH)
                outputs.append(output)
            return hidden, jax.tree.map(lambda *x: jnp.stack(x), *outputs)

        inputs = (list(self.layers), *jax.tree.map(fold, (state, given)))
        hidden, outputs = jax.lax.scan(body, constrain(hidden, BATCH), inputs, unroll=max(1, self.unroll // cycle))
        return hidden, *jax.tree.map(unfold, outputs)

    def init_state(self, make: Callable[[Any], Any]) -> Any:
        """`make(layer)` for every layer, along a leading depth axis; it must be of one shape for all of them."""
        return jax.tree.map(lambda x: jnp.repeat(x[None], self.depth, axis=0), make(self.layers[0]))

    def map(self, function: Callable[[Any], Any]) -> Any:
        """`function(layer)` of every layer, along a leading depth axis."""
        values = [jax.vmap(function)(layer) for layer in self.layers]
        return jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(self.depth, *x[0].shape[1:]), *values)

    def unstack(self) -> "Unstacked":
        """The same layers, each on its own."""
        cycle = len(self.layers)
        return Unstacked(
            [jax.tree.map(lambda x, i=i: x[i // cycle], self.layers[i % cycle]) for i in range(self.depth)]
        )


class Unstacked(nnx.Module):
    """The layers of a `Stack` one by one, with the same call: for decoding, where a scan would copy every weight out
    of the stack for each token. `state` is a tuple with one entry a layer, so that it is updated in place."""

    def __init__(self, layers: Sequence[nnx.Module]):
        self.layers, self.depth = nnx.List(layers), len(layers)

    def __call__(self, apply: Apply, hidden: Array, state: Any = None, given: Any = None) -> tuple[Array, Any, Any]:
        states, captured = [], []
        for i, layer in enumerate(self.layers):
            layer_state = None if state is None else state[i]
            hidden, layer_state, kept = apply(layer, hidden, layer_state, jax.tree.map(lambda x, i=i: x[i], given))
            states.append(layer_state)
            captured.append(kept)
        return hidden, tuple(states), jax.tree.map(lambda *x: jnp.stack(x), *captured)

    def init_state(self, make: Callable[[Any], Any]) -> Any:
        """`make(layer)` for every layer, as a tuple."""
        return tuple(make(layer) for layer in self.layers)

    def map(self, function: Callable[[Any], Any]) -> Any:
        """`function(layer)` of every layer, as a tuple."""
        return tuple(function(layer) for layer in self.layers)


def unstack(model: Any) -> Any:
    """`model` with every `Stack` in it replaced by its layers one by one; the model itself is not changed.

    Call it under `jax.jit`, once before a loop that decodes token by token.
    """
    return jax.tree.map(lambda x: x.unstack() if isinstance(x, Stack) else x, model, is_leaf=_is_stack)


def stacked_mask(model: Any) -> Any:
    """A tree like `model` with True for each parameter that has a leading depth axis: those inside a `Stack`."""
    return jax.tree.map(
        lambda x: jax.tree.map(lambda _: True, x) if isinstance(x, Stack) else False, model, is_leaf=_is_stack
    )


def _is_stack(x: Any) -> bool:
    return isinstance(x, Stack)
