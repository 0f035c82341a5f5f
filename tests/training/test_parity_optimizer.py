"""AdamW, SGD and the schedules against PyTorch and transformers."""

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
