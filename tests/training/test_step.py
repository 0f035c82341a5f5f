"""The training step: the update of a batch does not depend on how the batch is cut, over micro-batches or devices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.nn import stacked_mask
from transformers_jax.tasks import LanguageModeling, cross_entropy
from transformers_jax.training.mesh import MeshConfig, batch_sharding, make_mesh, put_batch, shardings
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, trained_part
from transformers_jax.training.paths import named_leaves
from transformers_jax.training.state import TrainState
from transformers_jax.training.step import make_train_step

CONFIG = GPTConfig(
    vocab_size=48, max_length=12, dim=16, depth=2, heads=2, dropout=0, attention_dropout=0, embedding_dropout=0
)


def build(config=CONFIG):
    return LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))


def batches(count, size=8, length=12, seed=0):
    """Batches whose rows have very different numbers of labels, some none at all."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        labels = rng.integers(0, 48, (size, length)).astype(np.int32)
        labels[np.arange(length) >= rng.integers(0, length + 1, (size, 1))] = -100
        labels[0] = -100
        yield {"input_ids": rng.integers(0, 48, (size, length)).astype(np.int32), "labels": labels}


def linear_loss(weights, batch, *, key):
    """Sum over the scored tokens of (x . w - y)^2 / 2, whose gradient is known."""
    errors = (batch["x"] @ weights - batch["y"]) * batch["scored"]
    return jnp.sum(errors**2) / 2, jnp.sum(batch["scored"])


def run(mesh_config, devices, *, accumulation=1, config=CONFIG, steps=5, optimizer=None, ema=None):
    optimizer = optax.adamw(1e-2) if optimizer is None else optimizer
    mesh = make_mesh(mesh_config, jax.devices()[:devices])

    def create():
        return TrainState.create(build(config), optimizer, ema=ema is not None)

    placed = shardings(jax.eval_shape(create), mesh)
    state = jax.jit(create, out_shardings=placed)()
    step = jax.jit(
        make_train_step(LanguageModeling().loss, optimizer, accumulation=accumulation, ema=ema),
        out_shardings=(placed, None),
        donate_argnums=0,
    )
    losses = []
    for batch in batches(steps):
        state, metrics = step(state, put_batch(batch, batch_sharding(mesh)))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    return losses, state


def test_micro_batches_of_unequal_weight_give_the_update_of_the_whole_batch():
    rng = np.random.default_rng(0)
    scored = np.zeros((2, 100), np.float32)
    scored[0, :10] = 1  # ten tokens in one micro-batch, a hundred in the other
    scored[1, :] = 1
    batch = {
        "x": rng.normal(size=(2, 100, 3)).astype(np.float32),
        "y": rng.normal(size=(2, 100)).astype(np.float32),
        "scored": scored,
    }
    state = TrainState.create(jnp.zeros(3), optax.sgd(1.0))
    x, y = batch["x"][scored == 1].astype(np.float64), batch["y"][scored == 1].astype(np.float64)
    expected = x.T @ y / 110  # minus the mean gradient at zero weights
    for accumulation in (1, 2):
        new, metrics = jax.jit(make_train_step(linear_loss, optax.sgd(1.0), accumulation=accumulation))(state, batch)
        np.testing.assert_allclose(new.model, expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["loss"], np.sum(y**2) / 2 / 110, rtol=1e-6)
        assert metrics["weight"] == 110


def test_a_batch_with_nothing_to_learn_changes_nothing_and_is_not_nan():
    batch = {
        "x": np.ones((2, 4, 3), np.float32),
        "y": np.ones((2, 4), np.float32),
        "scored": np.zeros((2, 4), np.float32),
    }
    for accumulation in (1, 2):
        step = jax.jit(make_train_step(linear_loss, optax.sgd(1.0), accumulation=accumulation))
        new, metrics = step(TrainState.create(jnp.ones(3), optax.sgd(1.0)), batch)
        np.testing.assert_array_equal(new.model, np.ones(3))
        assert metrics["loss"] == 0 and metrics["grad_norm"] == 0


@pytest.mark.parametrize(
    ("mesh", "devices", "accumulation"),
    [
        (MeshConfig(), 2, 1),
        (MeshConfig(), 8, 1),
        (MeshConfig(), 2, 4),
        (MeshConfig(fsdp=8), 8, 1),
        (MeshConfig(data=2, fsdp=2, tensor=2), 8, 2),
    ],
)
def test_losses_are_the_same_on_one_two_and_eight_devices(mesh, devices, accumulation):
    expected, _ = run(MeshConfig(), 1)
    losses, state = run(mesh, devices, accumulation=accumulation)
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    if mesh.fsdp > 1:  # a part of the parameters on each device, built there
        kernel = state.model.backbone.stack.layers[0].mlp.up.kernel[...]
        assert kernel.addressable_shards[0].data.size == kernel.size // (mesh.fsdp * mesh.tensor)


def test_dropout_does_not_depend_on_the_number_of_devices():
    config = GPTConfig(vocab_size=48, max_length=12, dim=16, depth=2, heads=2, dropout=0.2)
    expected, _ = run(MeshConfig(), 1, config=config, steps=3)
    losses, _ = run(MeshConfig(), 8, config=config, steps=3)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_same_step_runs_under_pmap_and_shard_map(accumulation):
    expected, _ = run(MeshConfig(), 1)
    optimizer = optax.adamw(1e-2)
    step = make_train_step(LanguageModeling().loss, optimizer, accumulation=accumulation, axis_name="data")

    mapped = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])
    state = jax.tree.map(lambda x: jnp.stack([x] * 4), TrainState.create(build(), optimizer))
    losses = []
    for batch in batches(5):
        state, metrics = mapped(state, jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch))
        losses.append(float(metrics["loss"][0]))
    np.testing.assert_allclose(losses, expected, atol=1e-5)

    mesh = make_mesh(MeshConfig(), jax.devices()[:4])
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    state, losses = TrainState.create(build(), optimizer), []
    for batch in batches(5):
        state, metrics = sharded(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_inference_runs_under_pmap():
    model = build()
    ids = jnp.asarray(next(batches(1))["input_ids"])
    logits = jax.pmap(lambda model, ids: model(ids).logits, in_axes=(None, 0))(model, ids.reshape(8, 1, -1))
    np.testing.assert_allclose(logits.reshape(8, 12, -1), model(ids).logits, atol=1e-5)


def test_each_step_has_dropout_of_its_own_and_the_same_when_repeated():
    model = build(GPTConfig(vocab_size=48, max_length=12, dim=16, depth=2, heads=2, dropout=0.3))
    optimizer = optax.sgd(0.0)
    step = jax.jit(make_train_step(LanguageModeling().loss, optimizer, seed=3))
    batch, state = next(batches(1)), TrainState.create(model, optimizer)
    second, first_metrics = step(state, batch)
    _, second_metrics = step(second, batch)
    assert float(first_metrics["loss"]) != float(second_metrics["loss"])
    assert float(step(state, batch)[1]["loss"]) == float(first_metrics["loss"])


def test_bfloat16_logits_are_scored_in_float32():
    logits = jax.random.uniform(jax.random.key(42), (8, 100)).astype(jnp.bfloat16)
    labels = jnp.arange(8) * 11
    exact = np.asarray(logits, np.float64)
    expected = np.log(np.exp(exact).sum(-1)) - exact[np.arange(8), labels]
    loss, weight = cross_entropy(logits[:, None], labels[:, None])
    assert loss.dtype == jnp.float32 and weight == 8
    for row in range(8):
        loss, _ = cross_entropy(logits[row : row + 1, None], labels[row : row + 1, None])
        np.testing.assert_allclose(loss, expected[row], atol=1e-5)


def test_the_learning_rate_that_is_reported_is_the_one_used():
    schedule = optax.linear_schedule(0.0, 1.0, 4)
    optimizer = optax.sgd(schedule)
    step = jax.jit(
        make_train_step(lambda model, batch, *, key: (model * 1.0, jnp.ones(())), optimizer, schedule=schedule)
    )
    state = TrainState.create(jnp.zeros(()), optimizer)
    for _ in range(4):
        new, metrics = step(state, {})
        np.testing.assert_allclose(state.model - new.model, metrics["learning_rate"], rtol=1e-6)
        state = new


def test_with_all_layers_frozen_the_norm_is_of_the_rest_and_nothing_else_is_computed():
    config = dataclasses.replace(CONFIG, tie_embeddings=False)
    model, batch = build(config), jax.tree.map(jnp.asarray, next(batches(1)))
    stacked = stacked_mask(model)
    flops, metrics = {}, {}
    for frozen_layers in (None, 2):
        settings = OptimizerConfig(frozen_layers=frozen_layers, learning_rate=0.1)
        optimizer = make_optimizer(settings, 10, model, stacked=stacked)
        trained = trained_part(settings, model, stacked=stacked)
        state = TrainState.create(model, optimizer)
        step = (
            jax.jit(make_train_step(LanguageModeling().loss, optimizer, trained=trained)).lower(state, batch).compile()
        )
        new, metrics[frozen_layers] = step(state, batch)
        flops[frozen_layers] = step.cost_analysis()["flops"]
        before, after = named_leaves(model), named_leaves(new.model)
        moved = {name for name in before if not np.array_equal(before[name], after[name])}
        assert moved == ({"backbone.norm.scale", "backbone.norm.bias", "head.kernel"} if frozen_layers else set(before))
    gradients = jax.grad(lambda model: LanguageModeling().loss(model, batch, key=jax.random.key(0))[0])(model)
    rest = {name: leaf for name, leaf in named_leaves(gradients).items() if name.startswith(("backbone.norm", "head"))}
    expected = optax.global_norm(rest) / metrics[2]["weight"]
    np.testing.assert_allclose(metrics[2]["grad_norm"], expected, rtol=1e-5)
    assert metrics[2]["grad_norm"] < metrics[None]["grad_norm"]
    assert flops[2] < 0.6 * flops[None], flops


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("decay", [0.5, 0.9999])  # the first is reached after 8 updates
def test_the_average_is_that_of_a_loop_in_numpy(decay, accumulation):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4, 5, 3)).astype(np.float32), rng.normal(size=(12, 4, 5)).astype(np.float32)
    optimizer = optax.sgd(0.3)
    step = jax.jit(make_train_step(linear_loss, optimizer, ema=decay, accumulation=accumulation), donate_argnums=0)
    state = TrainState.create(jnp.ones(3), optimizer, ema=True)
    weights, average = np.ones(3), np.ones(3)
    for n in range(12):
        state, _ = step(state, {"x": x[n], "y": y[n], "scored": np.ones((4, 5), np.float32)})
        rows, targets = x[n].reshape(-1, 3).astype(np.float64), y[n].reshape(-1).astype(np.float64)
        weights = weights - 0.3 * rows.T @ (rows @ weights - targets) / 20
        d = min(decay, (1 + n + 1) / (10 + n + 1))
        average = d * average + (1 - d) * weights
        np.testing.assert_allclose(state.model, weights, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state.averaged, average, rtol=1e-5, atol=1e-6)
    assert not np.allclose(weights, average, atol=1e-3)


# With SGD: Adam turns the rounding of a gradient that is zero (that of the keys' bias) into a step.
@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(data=2, fsdp=2, tensor=2)])
def test_the_average_lies_as_the_model_and_does_not_depend_on_the_mesh(mesh):
    _, expected = run(MeshConfig(), 1, ema=0.9, optimizer=optax.sgd(0.5))
    _, state = run(mesh, 8, ema=0.9, optimizer=optax.sgd(0.5))
    model, average = named_leaves(state.model), named_leaves(state.ema)
    for name, leaf in named_leaves(expected.ema).items():
        np.testing.assert_allclose(average[name], leaf, atol=1e-5, err_msg=name)
        assert average[name].sharding == model[name].sharding


def test_the_average_is_the_same_under_pmap_and_shard_map():
    optimizer = optax.sgd(0.5)
    _, expected = run(MeshConfig(), 1, ema=0.9, optimizer=optimizer)
    step = make_train_step(LanguageModeling().loss, optimizer, ema=0.9, axis_name="data")
    mesh = make_mesh(MeshConfig(), jax.devices()[:4])
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec()}
    sharded = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    mapped = jax.pmap(step, axis_name="data", devices=jax.devices()[:4])

    first = TrainState.create(build(), optimizer, ema=True)
    copies = jax.tree.map(lambda x: jnp.stack([x] * 4), first)
    for batch in batches(5):
        first, _ = sharded(first, batch)
        copies, _ = mapped(copies, jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch))
    for want, one, four in zip(*map(jax.tree.leaves, (expected.ema, first.ema, copies.ema)), strict=True):
        np.testing.assert_allclose(one, want, atol=1e-5)
        np.testing.assert_allclose(four, np.stack([want] * 4), atol=1e-5)


def test_the_average_of_what_is_frozen_keeps_its_bits():
    model = build()
    settings = OptimizerConfig(frozen=("mlp",), learning_rate=0.1, weight_decay=0.1)
    optimizer = make_optimizer(settings, 20, model, stacked=stacked_mask(model))
    step = jax.jit(make_train_step(LanguageModeling().loss, optimizer, ema=0.9))
    state = TrainState.create(model, optimizer, ema=True)
    for batch in batches(5):
        state, _ = step(state, batch)
    for name, leaf in named_leaves(state.averaged).items():
        assert np.array_equal(leaf, named_leaves(model)[name]) == ("mlp" in name), name


def test_bfloat16_parameters_are_averaged_in_float32():
    # A thousandth of the difference of 1 lies below the last digit of bfloat16, yet a thousand of them count.
    def still(model, batch, *, key):
        return jnp.sum(model * 0), jnp.ones(())

    optimizer = optax.sgd(0.0)
    state = TrainState.create(jnp.ones(2, jnp.bfloat16), optimizer, ema=True)
    state = state.replace(step=jnp.int32(10**6), model=state.model * 2)
    step = jax.jit(make_train_step(still, optimizer, ema=0.999), donate_argnums=0)
    for _ in range(1000):
        state, _ = step(state, {})
    np.testing.assert_allclose(state.ema, 2 - 0.999**1000, rtol=1e-4)
    assert state.ema.dtype == jnp.float32 and state.averaged.dtype == jnp.bfloat16


def test_a_state_and_its_step_agree_about_the_average():
    optimizer = optax.sgd(0.1)
    for kept, ema in ((True, None), (False, 0.9)):
        with pytest.raises(ValueError, match="has an average"):
            make_train_step(linear_loss, optimizer, ema=ema)(TrainState.create(jnp.ones(3), optimizer, ema=kept), {})
