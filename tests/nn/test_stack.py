"""`Stack`: equal to a loop over its layers, whatever the settings, and to `unstack` of it."""

import copy
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.nn import Linear, Stack, TransformerLayer, normal_init, stacked_mask, unstack

DIM, DEPTH, BATCH = 5, 6, 3


class Toy(nnx.Module):
    """A layer small enough to compile at once; `sign` is a setting that differs between the layers of a cycle."""

    def __init__(self, dim: int, *, sign: float = 1.0, rngs: nnx.Rngs):
        self.linear = Linear(dim, dim, kernel_init=normal_init(0.5), rngs=rngs)
        self.sign = sign

    def __call__(self, x):
        return x + self.sign * jnp.tanh(self.linear(x))


TOY = partial(Toy, DIM)
CYCLE = (partial(Toy, DIM), partial(Toy, DIM, sign=-0.5))


def apply(layer, hidden, state, given):
    """Uses everything a stack passes on: a state that changes, and what a layer only takes."""
    change = layer(hidden) * (1.0 if given is None else given["rate"])
    total = None if state is None else {"total": state["total"] + change.sum(-1), "calls": state["calls"] + 1}
    return change, total, {"mean": change.mean(), "input": hidden}


def inputs(depth=DEPTH):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(BATCH, DIM)), jnp.float32)
    state = {
        "total": jnp.asarray(rng.normal(size=(depth, BATCH)), jnp.float32),
        "calls": jnp.arange(depth, dtype=jnp.int32),
    }
    given = {"rate": jnp.linspace(0.5, 1.5, depth)}
    return hidden, state, given


def layer_list(stack):
    """The layers one by one, read from the stacked parameters by hand."""
    cycle = len(stack.layers)
    return [jax.tree.map(lambda x, i=i: x[i // cycle], stack.layers[i % cycle]) for i in range(stack.depth)]


def python_loop(stack, hidden, state, given):
    states, kept = [], []
    for i, layer in enumerate(layer_list(stack)):
        row = jax.tree.map(lambda x, i=i: x[i], (state, given))
        hidden, new, captured = apply(layer, hidden, *row)
        states.append(new)
        kept.append(captured)
    return hidden, *(jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (states, kept))


def assert_equal(ours, theirs, atol=1e-6):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, two, atol=atol)


@pytest.mark.parametrize("make", [TOY, CYCLE], ids=["one", "cycle"])
@pytest.mark.parametrize("extras", ["both", "state", "given", "none"])
def test_equals_a_loop(make, extras):
    stack = Stack(make, DEPTH, rngs=nnx.Rngs(0))
    hidden, state, given = inputs()
    state, given = state if extras in ("both", "state") else None, given if extras in ("both", "given") else None
    ours = jax.jit(lambda stack, *x: stack(apply, *x))(stack, hidden, state, given)
    assert_equal(ours, jax.jit(python_loop)(stack, hidden, state, given))


@pytest.mark.parametrize("make", [TOY, CYCLE], ids=["one", "cycle"])
@pytest.mark.parametrize(
    "settings",
    [
        dict(unroll=2),
        dict(unroll=4),  # does not divide the depth
        dict(unroll=50),  # more than there are layers
        dict(remat="full"),
        dict(remat="dots", unroll=3),
        dict(remat="dots_no_batch"),
    ],
    ids=str,
)
def test_remat_and_unroll_change_no_value_and_no_gradient(make, settings):
    def loss(stack, hidden, state, given):
        hidden, state, kept = stack(apply, hidden, state, given)
        return jnp.sum(hidden**2) + jnp.sum(state["total"] ** 2) + kept["mean"].sum(), hidden

    def run(stack):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(stack, *inputs())

    expected, ours = run(Stack(make, DEPTH, rngs=nnx.Rngs(0))), run(Stack(make, DEPTH, **settings, rngs=nnx.Rngs(0)))
    for one, two in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_keeps_less_for_the_backward_pass(policy):
    """What is kept between the passes is counted: without remat also the inside of the layer, per layer."""

    def kept(remat):
        stack = Stack(partial(TransformerLayer, 8, 2, 16), 3, remat=remat, rngs=nnx.Rngs(0))

        def run(stack, x):
            return stack(lambda layer, x, *_: (layer(x).hidden, None, None), x)[0].sum()

        _, residuals = jax.eval_shape(lambda s, x: jax.vjp(run, s, x), stack, jnp.ones((2, 9, 8)))
        return sum(x.size for x in jax.tree.leaves(residuals))

    assert kept(policy) < 0.75 * kept(None)


@pytest.mark.parametrize("make", [TOY, CYCLE], ids=["one", "cycle"])
def test_unstack_changes_no_output(make):
    model = nnx.List([Stack(make, DEPTH, rngs=nnx.Rngs(0)), Linear(DIM, DIM, rngs=nnx.Rngs(1))])
    before = jax.tree.structure(model)
    hidden, state, given = inputs()
    states = tuple(jax.tree.map(lambda x, i=i: x[i], state) for i in range(DEPTH))
    loose = jax.jit(unstack)(model)
    output, new_states, kept = jax.jit(lambda m, *x: m[0](apply, *x))(loose, hidden, states, given)
    expected = model[0](apply, hidden, state, given)
    assert_equal(output, expected[0])
    assert_equal(jax.tree.map(lambda *x: jnp.stack(x), *new_states), expected[1])
    assert_equal(kept, expected[2])
    assert jax.tree.structure(model) == before
    np.testing.assert_array_equal(loose[1].kernel[...], model[1].kernel[...])


def test_init_state_matches_both_forms():
    stack = Stack(TOY, DEPTH, rngs=nnx.Rngs(0))

    def make(layer):
        return {"total": jnp.ones(BATCH), "calls": jnp.int32(0)}

    stacked, loose = stack.init_state(make), stack.unstack().init_state(make)
    assert jax.tree.map(lambda x: x.shape, stacked) == {"total": (DEPTH, BATCH), "calls": (DEPTH,)}
    assert_equal(jax.tree.map(lambda *x: jnp.stack(x), *loose), stacked)


def test_layers_start_different():
    """Each layer draws weights of its own, with the standard deviation asked for."""
    kernel = np.asarray(Stack(partial(Toy, 60), 4, rngs=nnx.Rngs(0)).layers[0].linear.kernel[...])
    assert kernel.shape == (4, 60, 60)
    flat = kernel.reshape(4, -1)
    correlations = np.corrcoef(flat)[np.triu_indices(4, 1)]
    assert np.abs(correlations).max() < 0.07  # standard error 1/60
    np.testing.assert_allclose(flat.std(axis=1), 0.5, rtol=0.05)
    cycle = Stack(CYCLE, 4, rngs=nnx.Rngs(0)).layers
    assert np.abs(cycle[0].linear.kernel[...] - cycle[1].linear.kernel[...]).min() > 0


def test_the_program_does_not_grow_with_depth():
    def size(depth, unroll=1):
        make = partial(TransformerLayer, 6, 2, 10)
        stack = jax.eval_shape(lambda: Stack(make, depth, unroll=unroll, rngs=nnx.Rngs(0)))

        def loss(stack, x):
            return stack(lambda layer, x, *_: (layer(x).hidden, None, None), x)[0].sum()

        return len(str(jax.make_jaxpr(jax.grad(loss))(stack, jnp.ones((1, 3, 6)))).splitlines())

    two = size(2)
    assert abs(size(48) - two) <= 2
    assert two > 50


def test_stacked_mask_names_what_has_a_depth_axis():
    model = nnx.List([Stack(CYCLE, DEPTH, rngs=nnx.Rngs(0)), Linear(DIM, DIM, rngs=nnx.Rngs(1))])
    mask = stacked_mask(model)
    assert jax.tree.structure(mask) == jax.tree.structure(model)
    for (path, stacked), value in zip(jax.tree.leaves_with_path(mask), jax.tree.leaves(model), strict=True):
        assert stacked == ("layers" in jax.tree_util.keystr(path))
        assert not stacked or value.shape[0] == DEPTH // 2
    assert not any(jax.tree.leaves(stacked_mask(unstack(model))))


def test_plain_jax_applies():
    """A model is a pytree: eval_shape, vmap over models, grad, pmap of the inference function."""

    def build(key):
        return Stack(CYCLE, DEPTH, rngs=nnx.Rngs(key))

    def run(stack, x):
        return stack(apply, x)[0]

    hidden, *_ = inputs()
    keys = jax.random.split(jax.random.key(0), 2)
    model = build(keys[0])
    abstract = jax.eval_shape(build, keys[0])
    assert jax.tree.structure(abstract) == jax.tree.structure(model)
    assert jax.eval_shape(run, abstract, hidden).shape == hidden.shape

    ensemble = jax.vmap(build)(keys)
    outputs = jax.jit(jax.vmap(run, in_axes=(0, None)))(ensemble, hidden)
    for key, output in zip(keys, outputs, strict=True):
        np.testing.assert_allclose(output, run(build(key), hidden), atol=1e-6)

    gradients = jax.jit(jax.grad(lambda stack: run(stack, hidden).sum()))(model)
    assert jax.tree.structure(gradients) == jax.tree.structure(model)

    spread = jax.pmap(run, in_axes=(None, 0), devices=jax.devices()[:2])(model, jnp.stack([hidden, 2 * hidden]))
    np.testing.assert_allclose(spread[1], run(model, 2 * hidden), atol=1e-6)


def test_models_built_alike_are_alike_and_survive_copying():
    """Equal tree structures, or a jitted function would compile again for each model."""
    one, two = (Stack([TOY, CYCLE[1]], DEPTH, rngs=nnx.Rngs(seed)) for seed in range(2))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    hidden, *_ = inputs()
    run = jax.jit(lambda stack, x: stack(apply, x)[0])
    expected = run(one, hidden)
    for other in (copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))):
        np.testing.assert_array_equal(run(other, hidden), expected)
    run(two, hidden)
    assert run._cache_size() == 1


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="depth=5 is not a positive multiple of the cycle of 2 layers"):
        Stack(CYCLE, 5, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="depth=0"):
        Stack(TOY, 0, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="unknown remat policy 'some'; there are full, dots, dots_no_batch and None"):
        Stack(TOY, 2, remat="some", rngs=nnx.Rngs(0))
