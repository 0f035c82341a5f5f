"""AdamW, SGD and the schedules against PyTorch and transformers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule

torch = pytest.importorskip("torch")


def values(optimizer, schedule, count):
    seen = []
    for _ in range(count):
        seen.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(("name", "final"), [("linear", 0.0), ("cosine", 0.0), ("cosine", 0.1), ("inverse_sqrt", 0.0),
                                             ("constant", 0.0), ("warmup_stable_decay", 0.1)])  # fmt: skip
@pytest.mark.parametrize("warmup", [0, 7, 40])
def test_schedules_equal_those_of_transformers(name, warmup, final):
    transformers = pytest.importorskip("transformers")
    total = 40
    decay = 0 if warmup == total else 10
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    o = transformers.optimization
    reference = {
        "constant": lambda: o.get_constant_schedule_with_warmup(sgd, warmup),
        "linear": lambda: o.get_linear_schedule_with_warmup(sgd, warmup, total),
        "cosine": lambda: (
            o.get_cosine_with_min_lr_schedule_with_warmup(sgd, warmup, total, min_lr_rate=final)
            if final
            else o.get_cosine_schedule_with_warmup(sgd, warmup, total)
        ),
        "inverse_sqrt": lambda: o.get_inverse_sqrt_schedule(sgd, warmup),
        "warmup_stable_decay": lambda: o.get_wsd_schedule(
            sgd, warmup, decay, num_stable_steps=total - warmup - decay, decay_type="linear", min_lr_ratio=final
        ),
    }[name]()
    config = OptimizerConfig(
        schedule=name, learning_rate=0.3, warmup_steps=warmup, final_fraction=final, decay_fraction=decay / total
    )
    ours = make_schedule(config, total)
    expected = values(sgd, reference, total)
    if name == "warmup_stable_decay":
        # transformers starts its warm-up at the minimum, we start at 0.
        expected[:warmup] = [0.3 * step / warmup for step in range(warmup)]
    np.testing.assert_allclose([float(ours(step)) for step in range(total)], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("clip_norm", [None, 0.7])
def test_ten_updates_equal_those_of_pytorch(name, clip_norm):
    random = np.random.default_rng(0)
    shapes = {"kernel": (5, 7), "bias": (7,), "embedding": (11, 5), "scale": (5,)}
    start = {key: random.normal(size=shape).astype("float32") for key, shape in shapes.items()}
    grads = [{key: random.normal(size=shape).astype("float32") for key, shape in shapes.items()} for _ in range(10)]
    decay = 0.1 if name == "adamw" else 0.0  # PyTorch's SGD has coupled decay only
    config = OptimizerConfig(
        name=name, learning_rate=0.02, schedule="linear", warmup_steps=3, beta2=0.95, weight_decay=decay,
        clip_norm=clip_norm,
    )  # fmt: skip
    optimizer = make_optimizer(config, 10, start)
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)

    theirs = {key: torch.nn.Parameter(torch.tensor(value)) for key, value in start.items()}
    groups = [
        {"params": [theirs["kernel"], theirs["embedding"]], "weight_decay": decay},
        {"params": [theirs["bias"], theirs["scale"]], "weight_decay": 0.0},
    ]
    if name == "adamw":
        reference = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    else:
        reference = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    rate = torch.optim.lr_scheduler.LambdaLR(reference, lambda n: n / 3 if n < 3 else (10 - n) / 7)

    for grad in grads:
        updates, state = optimizer.update(jax.tree.map(jnp.asarray, grad), state, params)
        params = optax.apply_updates(params, updates)
        for key, value in grad.items():
            theirs[key].grad = torch.tensor(value)
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(theirs.values(), clip_norm)
        reference.step()
        rate.step()
    for key, value in theirs.items():
        np.testing.assert_allclose(params[key], value.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("total", [10, 60, 1000])
def test_the_usual_finetuning_schedule_equals_that_of_transformers(total):
    transformers = pytest.importorskip("transformers")
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=5e-5)
    warmup = math.ceil(0.1 * total)  # as its Trainer counts, which rounds up; equal for these totals
    reference = transformers.get_linear_schedule_with_warmup(sgd, warmup, total)
    ours = make_schedule(OptimizerConfig(schedule="linear", learning_rate=5e-5, warmup_fraction=0.1), total)
    np.testing.assert_allclose(
        [float(ours(n)) for n in range(total)], values(sgd, reference, total), rtol=1e-5, atol=1e-10
    )
    formula = [5e-5 * (n / warmup if n < warmup else (total - n) / (total - warmup)) for n in range(total)]
    np.testing.assert_allclose([float(ours(n)) for n in range(total)], formula, rtol=1e-5, atol=1e-10)


DEPTH, CYCLE = 4, 2


def stacked_layers():
    """Shapes around a stack of four layers, every other one of a kind; and each row's name, layer and place in it."""
    shapes = {
        "backbone.embedding.embedding": (11, 5),
        "backbone.embedding_norm.scale": (5,),
        "backbone.stack.layers.0.up.kernel": (2, 5, 7),
        "backbone.stack.layers.0.up.bias": (2, 7),
        "backbone.stack.layers.1.up.kernel": (2, 5, 7),
        "backbone.stack.layers.1.up.bias": (2, 7),
        "backbone.norm.scale": (5,),
        "head.kernel": (5, 3),
    }
    pieces = []
    for name in shapes:
        if ".layers." in name:
            pieces += [(name, row * CYCLE + int(name.split(".")[3]), row) for row in range(DEPTH // CYCLE)]
        else:
            pieces.append((name, -1 if "embedding" in name else DEPTH, slice(None)))
    return shapes, pieces


@pytest.mark.parametrize("layer_decay", [1.0, 0.65])
@pytest.mark.parametrize("frozen_layers", [None, 0, 1, 3, 4])
@pytest.mark.parametrize("frozen", [(), ("bias$",)])
def test_layer_decay_and_frozen_layers_equal_parameter_groups_of_pytorch(layer_decay, frozen_layers, frozen):
    random = np.random.default_rng(0)
    shapes, pieces = stacked_layers()
    start = {name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    grads = [{name: random.normal(size=shape).astype("float32") for name, shape in shapes.items()} for _ in range(6)]
    config = OptimizerConfig(
        learning_rate=0.02, schedule="linear", weight_decay=0.1, clip_norm=0.7, layer_decay=layer_decay,
        frozen=frozen, frozen_layers=frozen_layers,
    )  # fmt: skip
    optimizer = make_optimizer(config, 6, start, stacked={name: ".stack." in name for name in start})
    params = jax.tree.map(jnp.asarray, start)
    state = optimizer.init(params)

    theirs, groups = [], []
    for name, layer, row in pieces:
        trains = layer >= (-1 if frozen_layers is None else frozen_layers) and not (frozen and name.endswith("bias"))
        parameter = torch.nn.Parameter(torch.tensor(start[name][row]), requires_grad=trains)
        theirs.append(parameter)
        decay = 0.1 if name.endswith(("kernel", "embedding")) else 0.0
        groups.append({"params": [parameter], "lr": 0.02 * layer_decay ** (DEPTH - layer), "weight_decay": decay})
    reference = torch.optim.AdamW(groups)
    rate = torch.optim.lr_scheduler.LambdaLR(reference, lambda n: (6 - n) / 6)

    update = jax.jit(optimizer.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = optax.apply_updates(params, updates)
        for parameter, (name, _, row) in zip(theirs, pieces, strict=True):
            if parameter.requires_grad:
                parameter.grad = torch.tensor(grad[name][row])
        torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        reference.step()
        rate.step()
    for parameter, (name, layer, row) in zip(theirs, pieces, strict=True):
        ours, expected = np.asarray(params[name][row]), parameter.detach().numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6, err_msg=f"{name} {layer}")
        assert np.array_equal(ours, start[name][row]) == (not parameter.requires_grad), f"{name} {layer}"
