"""Schedules to their formulas, and optimizers that treat stacked layers like separate ones."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, trained_part
from transformers_jax.training.paths import named_leaves, parameter_name, with_leaves

NAMES = ("adamw", "adafactor", "lion", "muon", "sgd")
DEPTH, STEPS = 3, 4


def values(schedule, count):
    return np.array([float(schedule(step)) for step in range(count)])


# --- schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0, 0.25, 0.5, 0.75, 1, 0.8333, 0.6667, 0.5, 0.3333, 0.1667, 0, 0, 0]),
        ("cosine", [0, 0.25, 0.5, 0.75, 1, 0.933, 0.75, 0.5, 0.25, 0.067, 0, 0, 0]),
        ("constant", [0, 0.25, 0.5, 0.75] + [1] * 9),
        ("inverse_sqrt", [0, 0.25, 0.5, 0.75] + [math.sqrt(4 / n) for n in range(4, 11)] + [math.sqrt(0.4)] * 2),
        ("warmup_stable_decay", [0, 0.25, 0.5, 0.75, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0, 0]),
    ],
)
def test_schedule_values_are_those_of_the_formulas(schedule, expected):
    config = OptimizerConfig(schedule=schedule, learning_rate=1.0, warmup_steps=4, decay_fraction=0.4)
    np.testing.assert_allclose(values(make_schedule(config, 10), 13), expected, atol=5e-5)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
@given(
    total=st.integers(1, 60),
    warmup_share=st.floats(0, 1),
    final_fraction=st.sampled_from([0.0, 0.1, 1.0]),
    peak=st.sampled_from([6e-4, 1.0]),
)
@settings(max_examples=20, deadline=None)
def test_schedule_rises_to_the_peak_then_falls_to_the_final_value_and_stays(
    schedule, total, warmup_share, final_fraction, peak
):
    warmup = round(total * warmup_share)
    config = OptimizerConfig(
        schedule=schedule, learning_rate=peak, warmup_steps=warmup, final_fraction=final_fraction, decay_fraction=0.0
    )
    seen = values(make_schedule(config, total), total + 5)
    assert np.isfinite(seen).all()
    np.testing.assert_allclose(seen[:warmup], peak * np.arange(warmup) / max(warmup, 1), rtol=1e-5)
    if warmup < total:
        assert seen[warmup] == pytest.approx(peak)
    assert (np.diff(seen[warmup:]) <= 1e-7 * peak).all()
    assert (seen[warmup:] >= final_fraction * peak * (1 - 1e-5)).all()
    np.testing.assert_array_equal(seen[total:], seen[total])
    if schedule in ("linear", "cosine"):
        assert seen[total] == pytest.approx(final_fraction * peak, abs=1e-7 * peak)


def test_a_schedule_works_under_jit():
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=4), 10)
    steps = jnp.arange(12)
    np.testing.assert_allclose(jax.jit(jax.vmap(schedule))(steps), values(schedule, 12), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
def test_a_run_shorter_than_its_warmup_ends_inside_it(schedule):
    rates = values(make_schedule(OptimizerConfig(schedule=schedule, learning_rate=1.0, warmup_steps=20), 10), 10)
    np.testing.assert_allclose(rates, np.arange(10) / 20, rtol=1e-6)


def test_a_final_decay_is_cut_to_what_the_warmup_leaves():
    config = OptimizerConfig(
        schedule="warmup_stable_decay", learning_rate=1.0, warmup_steps=8, decay_fraction=0.5, final_fraction=0.0
    )
    np.testing.assert_allclose(values(make_schedule(config, 10), 11)[7:], [7 / 8, 1, 0.5, 0], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "inverse_sqrt", "warmup_stable_decay"])
@pytest.mark.parametrize(("total", "fraction", "warmup"), [(94, 0.1, 9), (96, 0.1, 10), (3, 0.1, 0), (20, 1.0, 20)])
def test_a_warmup_may_be_a_share_of_all_updates(schedule, total, fraction, warmup):
    shares = OptimizerConfig(schedule=schedule, warmup_fraction=fraction)
    steps = OptimizerConfig(schedule=schedule, warmup_steps=warmup)
    np.testing.assert_array_equal(
        values(make_schedule(shares, total), total + 3), values(make_schedule(steps, total), total + 3)
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_fraction": 1.5}, "warmup_fraction is 1.5 but must be between 0 and 1"),
        ({"warmup_fraction": 0.1, "warmup_steps": 5}, "warmup_steps=5 and warmup_fraction=0.1 are two lengths"),
        ({"layer_decay": 0.0}, "layer_decay is 0.0 but must be above 0 and at most 1"),
        ({"frozen_layers": -1}, "frozen_layers is -1 but must be 0 or more"),
        ({"frozen": ("embedding", "layers.(")}, r"frozen: 'layers\.\(' is not a regular expression"),
        ({"learning_rate": -1.0}, "learning_rate is -1.0 but must be 0 or more"),
        ({"warmup_steps": -1}, "warmup_steps is -1"),
        ({"beta1": 1.0}, "beta1 is 1.0"),
        ({"final_fraction": 2.0}, "final_fraction is 2.0 but must be between 0 and 1"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0"),
        ({"name": "adafactor", "moment_dtype": "bfloat16"}, "no meaning for adafactor"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


# --- names


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.value = nnx.Linear(6, 10, rngs=rngs)  # the name of a projection and of NNX's own level
        self.down = nnx.Linear(10, 6, rngs=rngs)
        self.norm = nnx.LayerNorm(6, rngs=rngs)


class Model(nnx.Module):
    """Stacked layers of parameters, or the same parameters layer by layer."""

    def __init__(self, rngs, layers=None):
        self.embedding = nnx.Embed(11, 6, rngs=rngs)
        self.gain = nnx.Param(jnp.ones((DEPTH,)))
        self.layers = nnx.List([nnx.vmap(Layer)(rngs.fork(split=DEPTH))] if layers is None else layers)
        self.head = nnx.Linear(6, 11, use_bias=False, rngs=rngs)


def stacked_model():
    model = Model(nnx.Rngs(0))
    keys = jax.random.split(jax.random.key(1), 100)
    named = named_leaves(model)
    return with_leaves(
        model, {n: jax.random.normal(k, v.shape) for k, (n, v) in zip(keys, named.items(), strict=False)}
    )


def stacked_tree(model):
    return with_leaves(model, {name: name.startswith("layers.") for name in named_leaves(model)})


def unstack(tree):
    """The same numbers as a plain dictionary with one entry a layer."""
    separate = {}
    for name, leaf in named_leaves(tree).items():
        if name.startswith("layers."):
            separate |= {name.replace("layers.0", f"layers.{index}"): leaf[index] for index in range(DEPTH)}
        else:
            separate[name] = leaf
    return separate


def test_names_are_the_ones_a_person_would_write():
    names = set(named_leaves(stacked_model()))
    assert names == {
        "embedding.embedding", "gain", "head.kernel",
        "layers.0.value.kernel", "layers.0.value.bias", "layers.0.down.kernel", "layers.0.down.bias",
        "layers.0.norm.scale", "layers.0.norm.bias",
    }  # fmt: skip


def test_a_plain_dictionary_keeps_a_key_called_value():
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path({"a": {"value": 1.0}, "value": [2.0]})[0]]
    assert [parameter_name(path) for path in paths] == ["a.value", "value.0"]


def test_two_leaves_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"same name: a\.b"):
        named_leaves({"a": {"b": 1.0}, "a.b": 2.0})


# --- optimizers


def gradients(model, step):
    keys = jax.random.split(jax.random.key(100 + step), 100)
    named = named_leaves(model)
    return with_leaves(
        model,
        {
            # Layers of very different size, so that mixing them would show.
            n: 10.0 ** (i % 3 - 1) * jax.random.normal(keys[i], v.shape) * _ramp(n, v)
            for i, (n, v) in enumerate(named.items())
        },
    )


def _ramp(name, leaf):
    stacked = name.startswith("layers.")
    return jnp.logspace(-1, 1, DEPTH).reshape(DEPTH, *[1] * (leaf.ndim - 1)) if stacked else 1.0


def run(optimizer, params, gradient_of, steps=STEPS):
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = update(params, state, gradient_of(step))
    return params, state


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_are_updated_exactly_like_separate_ones(name, clip_norm):
    config = OptimizerConfig(
        name=name, learning_rate=0.1, warmup_steps=2, weight_decay=0.3, clip_norm=clip_norm, factor_above=4
    )
    model = stacked_model()
    abstract = jax.eval_shape(lambda: model)
    together = make_optimizer(config, STEPS, abstract, stacked=stacked_tree(abstract))
    separate = make_optimizer(config, STEPS, unstack(model))
    ours, _ = run(together, model, lambda step: gradients(model, step))
    theirs, _ = run(separate, unstack(model), lambda step: unstack(gradients(model, step)))
    for layer, value in unstack(ours).items():
        assert not np.array_equal(value, unstack(model)[layer]), layer
        np.testing.assert_allclose(value, theirs[layer], rtol=2e-5, atol=2e-5, err_msg=layer)


def test_the_plain_optax_optimizers_do_not_keep_that_promise():
    """Why the two above are not just `optax.adafactor` and `optax.contrib.muon`."""
    stacked = {
        "kernel": jax.random.normal(jax.random.key(0), (DEPTH, 6, 10)) * jnp.logspace(-1, 1, DEPTH)[:, None, None]
    }
    separate = {str(index): stacked["kernel"][index] for index in range(DEPTH)}
    for optimizer in (optax.adafactor(0.1, min_dim_size_to_factor=4), optax.contrib.muon(0.1)):
        ours, _ = optimizer.update(stacked, optimizer.init(stacked), stacked)
        theirs, _ = optimizer.update(separate, optimizer.init(separate), separate)
        assert not np.allclose(ours["kernel"][0], theirs["0"], rtol=0.05)


def test_muon_makes_hidden_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    config = OptimizerConfig(name="muon", learning_rate=1.0, schedule="constant", clip_norm=None)
    model = stacked_model()
    zeros = jax.tree.map(jnp.zeros_like, model)
    moved, _ = run(
        make_optimizer(config, 1, model, stacked=stacked_tree(model)), zeros, lambda step: gradients(model, 0), steps=1
    )
    adamw, _ = run(
        make_optimizer(OptimizerConfig(learning_rate=1.0, schedule="constant", clip_norm=None), 1, model),
        zeros, lambda step: gradients(model, 0), steps=1,
    )  # fmt: skip
    for name, value in named_leaves(moved).items():
        if name in ("layers.0.value.kernel", "layers.0.down.kernel"):
            singular = np.linalg.svd(np.asarray(value) / (0.2 * math.sqrt(10)), compute_uv=False)
            assert ((singular > 0.5) & (singular < 1.5)).all(), name
        else:
            np.testing.assert_array_equal(value, named_leaves(adamw)[name])


@pytest.mark.parametrize(
    ("rule", "decaying"),
    [
        ("matrices", {"embedding.embedding", "head.kernel", "layers.0.value.kernel", "layers.0.down.kernel"}),
        ("kernels", {"head.kernel", "layers.0.value.kernel", "layers.0.down.kernel"}),
        ("none", set()),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_decay_goes_by_the_name_of_the_parameter(rule, decaying, name):
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", weight_decay=0.5, decay_rule=rule)
    model = stacked_model()
    optimizer = make_optimizer(config, 10, model, stacked=stacked_tree(model))
    nothing = jax.tree.map(jnp.zeros_like, model)
    moved, _ = run(optimizer, model, lambda step: nothing, steps=1)
    for leaf, before in named_leaves(model).items():
        factor = 0.95 if leaf in decaying else 1.0
        np.testing.assert_allclose(named_leaves(moved)[leaf], factor * before, rtol=1e-6, err_msg=leaf)


def test_all_decays_everything():
    config = OptimizerConfig(name="sgd", learning_rate=0.1, schedule="constant", weight_decay=0.5, decay_rule="all")
    model = stacked_model()
    moved, _ = run(make_optimizer(config, 10, model), model, lambda step: jax.tree.map(jnp.zeros_like, model), steps=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.95 * b, rtol=1e-6), moved, model)


def test_clipping_bounds_the_norm_over_all_parameters():
    config = OptimizerConfig(name="sgd", learning_rate=1.0, schedule="constant", clip_norm=0.25, momentum=0.0)
    model = stacked_model()
    optimizer = make_optimizer(config, 10, model)
    updates, _ = optimizer.update(gradients(model, 0), optimizer.init(model), model)
    assert float(optax.global_norm(updates)) == pytest.approx(0.25, rel=1e-5)
    small = jax.tree.map(lambda g: 1e-4 * g, gradients(model, 0))
    updates, _ = optimizer.update(small, optimizer.init(model), model)
    jax.tree.map(lambda u, g: np.testing.assert_array_equal(u, -g), updates, small)


def test_update_zero_of_a_warmup_changes_nothing():
    model = stacked_model()
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, weight_decay=0.1)
    moved, _ = run(make_optimizer(config, 10, model), model, lambda step: gradients(model, step), steps=1)
    jax.tree.map(np.testing.assert_array_equal, moved, model)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_the_first_moment_can_be_kept_in_bfloat16(name):
    model = stacked_model()
    config = OptimizerConfig(name=name, moment_dtype="bfloat16")
    params, state = run(make_optimizer(config, 10, model), model, lambda step: gradients(model, step), steps=2)
    moments = [leaf for path, leaf in named_leaves(state).items() if ".mu." in path or ".trace." in path]
    assert len(moments) == len(jax.tree.leaves(model))
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", NAMES)
def test_the_state_has_readable_names_and_plain_containers(name):
    model = stacked_model()
    optimizer = make_optimizer(OptimizerConfig(name=name, factor_above=4), 10, model, stacked=stacked_tree(model))
    state = jax.eval_shape(optimizer.init, model)
    kept = [path for path in named_leaves(state) if path.endswith("layers.0.down.kernel")]
    assert kept
    assert not any(
        isinstance(leaf, nnx.Module) for leaf in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Module))
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_sharded_run_with_explicit_shardings_equals_one_device_and_compiles_once(name):
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def placement(leaf):
        axis = next((i for i, size in reversed(list(enumerate(leaf.shape))) if size % 2 == 0), None)
        return everywhere if axis is None else NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    model = stacked_model()
    config = OptimizerConfig(name=name, learning_rate=0.1, factor_above=4)
    optimizer = make_optimizer(config, 10, model, stacked=stacked_tree(model))
    expected, _ = run(optimizer, model, lambda step: gradients(model, step), steps=2)

    model_places = jax.tree.map(placement, model)
    state_places = jax.tree.map(placement, jax.eval_shape(optimizer.init, model))
    params = jax.device_put(model, model_places)
    state = jax.jit(optimizer.init, out_shardings=state_places)(params)

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(update, out_shardings=(model_places, state_places), donate_argnums=(0, 1))
    for step in range(2):
        params, state = update(params, state, jax.device_put(gradients(model, step), model_places))
    assert update._cache_size() == 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), params, expected)


def test_a_scalar_cannot_be_stacked():
    with pytest.raises(ValueError, match="temperature is marked as stacked"):
        make_optimizer(OptimizerConfig(), 10, {"temperature": jnp.zeros(())}, stacked=True)


# --- fine-tuning: layers with rates of their own, and frozen ones

CYCLE = 2
LAYERS = DEPTH * CYCLE


def finetuned_model():
    """Parameters as they are called around a `Stack` of six layers, every other one of a kind."""
    shapes = {
        "head.kernel": (6, 4),
        "head.bias": (4,),
        "pooler.kernel": (6, 6),  # outside the backbone, like the head
        "backbone.embedding.embedding": (11, 6),
        "backbone.embedding_norm.scale": (6,),
        "backbone.positions.embedding": (5, 6),
        "backbone.norm.scale": (6,),  # after the stack
        "backbone.gain": (),
    } | {
        f"backbone.stack.layers.{place}.{name}": (DEPTH, *shape)
        for place in range(CYCLE)
        for name, shape in (("mlp.kernel", (6, 10)), ("mlp.bias", (10,)), ("embedding.kernel", (6, 6)))
    }
    keys = jax.random.split(jax.random.key(3), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def in_stack(model):
    return {name: ".stack." in name for name in model}


def layer_by_layer(tree):
    """The same numbers with one entry a layer, numbered through."""
    separate = {}
    for name, leaf in tree.items():
        if ".stack." in name:
            before, _, after = name.partition(".layers.")
            place, _, rest = after.partition(".")
            separate |= {f"{before}.layers.{r * CYCLE + int(place)}.{rest}": leaf[r] for r in range(DEPTH)}
        else:
            separate[name] = leaf
    return separate


def layer_of(name):
    """By hand: -1 before the stack, LAYERS after it."""
    if ".layers." in name:
        return int(name.split(".")[3])
    before = ("backbone.embedding.embedding", "backbone.embedding_norm.scale", "backbone.positions.embedding")
    return -1 if name in before else LAYERS


def finetuning_gradients(model, step):
    keys = jax.random.split(jax.random.key(50 + step), len(model))
    return {name: jax.random.normal(key, leaf.shape) for key, (name, leaf) in zip(keys, model.items(), strict=True)}


@pytest.mark.parametrize("fields", [{"layer_decay": 0.7}, {"frozen_layers": 3, "layer_decay": 0.5}])
@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_with_rates_or_frozen_rows_equal_separate_ones(name, fields):
    config = OptimizerConfig(
        name=name, learning_rate=0.1, schedule="constant", weight_decay=0.3, clip_norm=0.5, factor_above=4, **fields
    )
    model = finetuned_model()
    together = make_optimizer(config, STEPS, model, stacked=in_stack(model))
    separate = make_optimizer(config, STEPS, layer_by_layer(model))
    ours, _ = run(together, model, lambda step: finetuning_gradients(model, step))
    theirs, _ = run(separate, layer_by_layer(model), lambda step: layer_by_layer(finetuning_gradients(model, step)))
    for layer, value in layer_by_layer(ours).items():
        frozen = layer_of(layer) < fields.get("frozen_layers", -1)
        assert np.array_equal(value, layer_by_layer(model)[layer]) == frozen, layer
        np.testing.assert_allclose(value, theirs[layer], rtol=2e-5, atol=2e-5, err_msg=layer)


@pytest.mark.parametrize("name", NAMES)
def test_layer_decay_scales_the_update_of_each_layer(name):
    model = finetuned_model()

    def moves(layer_decay):
        config = OptimizerConfig(
            name=name, schedule="constant", weight_decay=0.3, factor_above=4, layer_decay=layer_decay
        )
        optimizer = make_optimizer(config, STEPS, model, stacked=in_stack(model))
        state = jax.jit(optimizer.init)(model)
        return layer_by_layer(jax.jit(optimizer.update)(finetuning_gradients(model, 0), state, model)[0])

    full, decayed = moves(1.0), moves(0.8)
    for layer, update in decayed.items():
        np.testing.assert_allclose(update, 0.8 ** (LAYERS - layer_of(layer)) * full[layer], rtol=1e-5, err_msg=layer)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_keeps_its_bits_whatever_its_gradient(name):
    config = OptimizerConfig(
        name=name, learning_rate=0.1, schedule="constant", weight_decay=0.3, decay_rule="all", factor_above=4,
        frozen=(r"stack\.layers\.1\.mlp", "gain$"), frozen_layers=2, layer_decay=0.9,
    )  # fmt: skip
    model = finetuned_model()
    # -0.0 + 0.0 would be 0.0.
    model["backbone.embedding.embedding"] = model["backbone.embedding.embedding"].at[0].set(-0.0)
    model["backbone.stack.layers.0.mlp.bias"] = model["backbone.stack.layers.0.mlp.bias"].at[0].set(-0.0)

    def gradient(step):
        return {
            layer: leaf.at[0].set(jnp.nan) if ".stack.layers.0." in layer else jnp.full_like(leaf, jnp.nan)
            if layer_of(layer) == -1 or "layers.1.mlp" in layer or "gain" in layer else leaf
            for layer, leaf in finetuning_gradients(model, step).items()
        } | {"backbone.stack.layers.1.embedding.kernel": finetuning_gradients(model, step)[
            "backbone.stack.layers.1.embedding.kernel"].at[0].set(jnp.nan)}  # fmt: skip

    moved, _ = run(make_optimizer(config, STEPS, model, stacked=in_stack(model)), model, gradient)
    before = layer_by_layer(model)
    for layer, value in layer_by_layer(moved).items():
        number = layer_of(layer)
        if number < 2 or (number % 2 and number < LAYERS and ".mlp." in layer) or layer == "backbone.gain":
            assert np.asarray(value).tobytes() == np.asarray(before[layer]).tobytes(), layer
        else:
            assert np.isfinite(value).all() and not np.array_equal(value, before[layer]), layer


@pytest.mark.parametrize("name", NAMES)
def test_what_is_frozen_has_no_moments_and_no_part_in_the_norm(name):
    config = OptimizerConfig(name=name, factor_above=4, frozen=("positions",), frozen_layers=0)
    model = finetuned_model()
    optimizer = make_optimizer(config, STEPS, model, stacked=in_stack(model))
    kept = named_leaves(jax.eval_shape(optimizer.init, model))
    assert not any(part in path for path in kept for part in ("backbone.embedding.", "embedding_norm", "positions"))
    assert any(path.endswith("head.kernel") for path in kept)
    trained = trained_part(config, model, stacked=in_stack(model))(model)
    assert set(model) - set(trained) == {layer for layer in model if layer_of(layer) == -1}
    rows = trained_part(OptimizerConfig(frozen_layers=3), model, stacked=in_stack(model))(model)
    np.testing.assert_array_equal(
        rows["backbone.stack.layers.0.mlp.kernel"], model["backbone.stack.layers.0.mlp.kernel"][2:]
    )
    np.testing.assert_array_equal(
        rows["backbone.stack.layers.1.mlp.kernel"], model["backbone.stack.layers.1.mlp.kernel"][1:]
    )


def test_all_layers_may_be_frozen_and_the_head_alone_trained():
    model = finetuned_model()
    trained = trained_part(OptimizerConfig(frozen_layers=LAYERS), model, stacked=in_stack(model))(model)
    assert set(trained) == {"head.kernel", "head.bias", "pooler.kernel", "backbone.norm.scale", "backbone.gain"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"frozen": ("head", "encoder")}, "no parameter's name has 'encoder' in it; there are .*embedding.* more"),
        ({"frozen_layers": 7}, "frozen_layers is 7 but the model has 6 layers"),
        ({"frozen": (".",)}, "all parameters are frozen"),
    ],
)
def test_freezing_what_is_not_there_or_everything_is_an_error(fields, message):
    model = finetuned_model()
    with pytest.raises(ValueError, match=message):
        make_optimizer(OptimizerConfig(**fields), 10, model, stacked=in_stack(model))


def test_rates_by_layer_need_one_stack():
    model = {"encoder.stack.layers.0.kernel": jnp.zeros((2, 3)), "decoder.stack.layers.0.kernel": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match=r"layer_decay needs .* has 2: decoder\.stack, encoder\.stack"):
        make_optimizer(OptimizerConfig(layer_decay=0.9), 10, model, stacked=True)
    make_optimizer(OptimizerConfig(), 10, model, stacked=True)
