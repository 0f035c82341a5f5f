"""The work of the GPU benchmark, done by transformers_jax: see work_ours.py. `model` are fields of GPTConfig."""

from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from work_ours import GPT2_OPTIMIZER, NO_DROPOUT, Run, decode, train, training, versions

from transformers_jax.generation import Sampling, generate
from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.training.mesh import put_batch

__all__ = ["WARM_UP", "WORK", "versions"]


def gpu_train(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    config = GPTConfig(**NO_DROPOUT, **model, dtype="bfloat16")
    create, step, rows = training(config, GPT2_OPTIMIZER, 1000)
    crops = np.random.default_rng(0).integers(config.vocab_size, size=(batch, length + 1), dtype=np.int32)
    examples = put_batch({"input_ids": crops[:, :-1], "labels": crops[:, 1:]}, rows)
    return train(create, step, iter(lambda: examples, None)), device()


def bfloat16_model(model: dict[str, Any]) -> LanguageModel:
    config = GPTConfig(**NO_DROPOUT, **model, dtype="bfloat16", param_dtype="bfloat16")
    return jax.jit(lambda: LanguageModel(GPT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)))()


def gpu_forward(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    module = bfloat16_model(model)
    forward = jax.jit(lambda module, input_ids: module(input_ids).logits)
    input_ids = jax.random.randint(jax.random.key(0), (batch, length), 0, module.config.vocab_size)

    def run(iterations: int) -> None:
        logits = [forward(module, input_ids) for _ in range(iterations)][-1]
        logits.block_until_ready()

    return run, device()


def gpu_generate(batch: int, prompt: int, new: int, model: dict[str, Any]) -> tuple[Run, str]:
    search = partial(generate, max_new_tokens=new, sampling=Sampling(temperature=0.0))
    return decode(search, batch, prompt, bfloat16_model(model))[0], device()


def device() -> str:
    return jax.devices()[0].device_kind


WORK = {
    "gpu_train": gpu_train,
    "gpu_forward": gpu_forward,
    "gpu_generate_1": gpu_generate,
    "gpu_generate_64": gpu_generate,
}
WARM_UP = {"gpu_train": 5, "gpu_forward": 5}
