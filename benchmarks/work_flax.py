"""The work of the CPU benchmark, done by the Flax models of transformers 4.57 (gone since version 5): see work_ours.py.

transformers 4.57.6 is installed without its `flax` extra beside jax 0.10 and flax 0.12, which then run its models.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import transformers

Run = Callable[[int], None]
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def versions(threads: int) -> str:
    return f"transformers {transformers.__version__}, jax {jax.__version__}, flax {flax.__version__}"


def gpt2(**changes: Any) -> Any:
    config = transformers.GPT2Config(bos_token_id=None, eos_token_id=None, pad_token_id=0, **changes)
    return transformers.FlaxGPT2LMHeadModel(config, seed=0)


def training(model: Any, learning_rate: float, beta2: float) -> tuple[Any, Any]:
    """The first (parameters, optimizer state), and the step to compile."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            learning_rate, b2=beta2, weight_decay=0.1, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
        ),
    )

    def step(state: Any, input_ids: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        params, optimizer_state = state

        def loss(params: Any) -> jax.Array:
            logits = model(input_ids, params=params, dropout_rng=jax.random.key(0), train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state = (model.params, optimizer.init(model.params))
    return state, jax.jit(step, donate_argnums=0)


def train(state: Any, step: Any, next_crops: Callable[[], np.ndarray]) -> Run:
    def run(iterations: int) -> None:
        nonlocal state
        for _ in range(iterations):
            crops = next_crops()
            state, _ = step(state, crops[:, :-1], crops[:, 1:])
        jax.block_until_ready(state)

    return run


def gpt_train() -> tuple[Run, str]:
    model = gpt2(vocab_size=65, n_positions=64, n_embd=128, n_layer=4, n_head=4, **NO_DROPOUT)
    rng = np.random.default_rng(0)
    tokens = rng.integers(65, size=1_000_000, dtype=np.uint16)

    def next_crops() -> np.ndarray:
        return np.stack([tokens[i : i + 65] for i in rng.integers(len(tokens) - 64, size=12)]).astype(np.int32)

    return train(*training(model, 1e-3, 0.99), next_crops), "optax, jitted and donated"


def gpt2_crops(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(50257, size=(batch, length + 1), dtype=np.int32)


def gpt2_train(batch: int, length: int) -> tuple[Run, str]:
    crops, model = gpt2_crops(batch, length), gpt2(**NO_DROPOUT)
    state, step = training(model, 6e-4, 0.95)
    model._params = jax.eval_shape(lambda: state[0])  # or the donated parameters would stay in memory
    return train(state, step, lambda: crops), "optax, jitted and donated"


def gpt2_compile(batch: int, length: int) -> tuple[Run, str]:
    jax.config.update("jax_enable_compilation_cache", False)
    crops = gpt2_crops(batch, length)
    state, step = training(gpt2(**NO_DROPOUT), 6e-4, 0.95)
    state = jax.eval_shape(lambda: state)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            jax.clear_caches()
            step.lower(state, crops[:, :-1], crops[:, 1:]).compile()

    return run, ""


def gpt2_forward(batch: int, length: int) -> tuple[Run, str]:
    model, input_ids = gpt2(), jnp.asarray(gpt2_crops(batch, length)[:, :-1])
    forward = jax.jit(lambda params, input_ids: model(input_ids, params=params, train=False).logits)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model.params, input_ids).block_until_ready()

    return run, ""


def gpt2_generate(batch: int, prompt: int, new: int, beams: int = 1, jitted: bool = False) -> tuple[Run, str]:
    """As its documentation calls it, which traces the loop anew for every call; `jitted` by the caller, once."""
    model, input_ids = gpt2(), jnp.asarray(gpt2_crops(batch, prompt)[:, :-1])
    mask = jnp.ones_like(input_ids)

    def search(params: Any, input_ids: jax.Array, mask: jax.Array) -> jax.Array:
        return model.generate(
            input_ids,
            attention_mask=mask,
            params=params,
            max_new_tokens=new,
            do_sample=False,
            num_beams=beams,
            pad_token_id=0,
            eos_token_id=model.config.vocab_size,  # it wants a number; no token has this one
        ).sequences

    search = jax.jit(search) if jitted else search

    def run(iterations: int) -> None:
        for _ in range(iterations):
            assert search(model.params, input_ids, mask).block_until_ready().shape == (batch, prompt + new)

    return run, "jitted by the caller" if jitted else "model.generate"


def bert(dropout: float) -> Any:
    config = transformers.BertConfig(hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return transformers.FlaxBertForMaskedLM(config, seed=0)


def bert_batch(batch: int, length: int) -> dict[str, np.ndarray]:
    """Rows of `length / 2` to `length` tokens; labels at 15 % of the places, -100 elsewhere."""
    rng = np.random.default_rng(0)
    real = np.linspace(length // 2, length, batch).astype(int)
    labels = np.full((batch, length), -100, np.int32)
    for row in labels:
        row[rng.permutation(length // 2)[: round(0.15 * length)]] = 7
    return {
        "input_ids": rng.integers(30522, size=(batch, length), dtype=np.int32),
        "attention_mask": (np.arange(length) < real[:, None]).astype(np.int32),
        "labels": labels,
    }


def bert_forward(batch: int, length: int) -> tuple[Run, str]:
    model, inputs = bert(0.0), bert_batch(batch, length)
    del inputs["labels"]
    forward = jax.jit(lambda params, **inputs: model(**inputs, params=params, train=False).logits)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model.params, **inputs).block_until_ready()

    return run, ""


def bert_train(batch: int, length: int, dropout: float = 0.0) -> tuple[Run, str]:
    model, inputs = bert(dropout), bert_batch(batch, length)
    labels = inputs.pop("labels")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, optimizer_state = state

        def loss(params: Any) -> jax.Array:
            logits = model(**inputs, params=params, dropout_rng=key, train=True).logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
            return jnp.sum(losses * (labels >= 0)) / jnp.sum(labels >= 0)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state, step = (model.params, optimizer.init(model.params)), jax.jit(step, donate_argnums=0)
    model._params = jax.eval_shape(lambda: state[0])

    def run(iterations: int) -> None:
        nonlocal state
        for i in range(iterations):
            state, _ = step(state, jax.random.key(i))
        jax.block_until_ready(state)

    return run, "optax, jitted and donated, over all logits"


def vit(dim: int, depth: int, heads: int) -> Any:
    config = transformers.ViTConfig(
        hidden_size=dim,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=4 * dim,
        num_labels=1000,
    )
    return transformers.FlaxViTForImageClassification(config, seed=0)


def vit_batch(batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((batch, 3, 224, 224), np.float32), rng.integers(1000, size=batch, dtype=np.int32)


def vit_forward(batch: int, **sizes: int) -> tuple[Run, str]:
    model, pixels = vit(**sizes), jnp.asarray(vit_batch(batch)[0])
    forward = jax.jit(lambda params, pixels: model(pixels, params=params, train=False).logits)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model.params, pixels).block_until_ready()

    return run, ""


def vit_train(batch: int, **sizes: int) -> tuple[Run, str]:
    model, (pixels, labels) = vit(**sizes), vit_batch(batch)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))

    def step(state: Any, pixels: Any, labels: Any) -> tuple[Any, jax.Array]:
        params, optimizer_state = state

        def loss(params: Any) -> jax.Array:
            logits = model(pixels, params=params, dropout_rng=jax.random.key(0), train=True).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), value

    state, step = (model.params, optimizer.init(model.params)), jax.jit(step, donate_argnums=0)
    model._params = jax.eval_shape(lambda: state[0])

    def run(iterations: int) -> None:
        nonlocal state
        for _ in range(iterations):
            state, _ = step(state, pixels, labels)
        jax.block_until_ready(state)

    return run, "optax, jitted and donated"


WORK = {
    "gpt_train": gpt_train,
    "gpt2_forward": gpt2_forward,
    "gpt2_generate": gpt2_generate,
    "gpt2_generate_jitted": partial(gpt2_generate, jitted=True),
    "gpt2_beam": gpt2_generate,
    "gpt2_beam_jitted": partial(gpt2_generate, jitted=True),
    "gpt2_train": gpt2_train,
    "gpt2_compile": gpt2_compile,
    "bert_forward": bert_forward,
    "bert_train": bert_train,
    "vit_forward": vit_forward,
    "vit_train": vit_train,
}
WARM_UP = {"gpt_train": 20, "gpt2_compile": 1}
