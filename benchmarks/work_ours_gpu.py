"""The work of the GPU benchmark, done by transformers_jax: see work_ours.py. `model` is a part of the configuration."""

from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from work_ours import (
    BERT_OPTIMIZER,
    GPT2_OPTIMIZER,
    NO_DROPOUT,
    VIT_OPTIMIZER,
    ImageLabels,
    Run,
    bert_batch,
    decode,
    train,
    training,
    versions,
    vit_batch,
    vit_config,
)

from transformers_jax.generation import Sampling, generate
from transformers_jax.models import GPT, BertConfig, GPTConfig, LanguageModel
from transformers_jax.tasks import MaskedLM
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
    return forward(module, jax.random.randint(jax.random.key(0), (batch, length), 0, module.config.vocab_size))


def forward(module: Any, *inputs: Any, **named: Any) -> tuple[Run, str]:
    logits_of = jax.jit(lambda module, *inputs, **named: module(*inputs, **named).logits)
    inputs, named = jax.tree.map(jax.numpy.asarray, (inputs, named))

    def run(iterations: int) -> None:
        logits = [logits_of(module, *inputs, **named) for _ in range(iterations)][-1]
        logits.block_until_ready()

    return run, device()


def gpu_generate(batch: int, prompt: int, new: int, model: dict[str, Any]) -> tuple[Run, str]:
    search = partial(generate, max_new_tokens=new, sampling=Sampling(temperature=0.0))
    return decode(search, batch, prompt, bfloat16_model(model))[0], device()


def gpu_bert_train(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    config = BertConfig(**model, dropout=0.0, attention_dropout=0.0, dtype="bfloat16")
    create, step, rows = training(config, BERT_OPTIMIZER, 1000, MaskedLM())
    examples = put_batch(bert_batch(batch, length), rows)
    return train(create, step, iter(lambda: examples, None)), device()


def gpu_bert_forward(batch: int, length: int, model: dict[str, Any]) -> tuple[Run, str]:
    config = BertConfig(**model, dtype="bfloat16", param_dtype="bfloat16")
    module = jax.jit(lambda: MaskedLM().build(config, rngs=nnx.Rngs(0)))()
    examples = bert_batch(batch, length)
    return forward(module, **{name: examples[name] for name in ("input_ids", "token_type_ids", "attention_mask")})


def gpu_vit_train(batch: int, model: dict[str, Any]) -> tuple[Run, str]:
    create, step, rows = training(vit_config(**model, dtype="bfloat16"), VIT_OPTIMIZER, 1000, ImageLabels())
    examples = put_batch(vit_batch(batch), rows)
    return train(create, step, iter(lambda: examples, None)), device()


def gpu_vit_forward(batch: int, model: dict[str, Any]) -> tuple[Run, str]:
    config = vit_config(**model, dtype="bfloat16", param_dtype="bfloat16")
    module = jax.jit(lambda: ImageLabels().build(config, rngs=nnx.Rngs(0)))()
    return forward(module, vit_batch(batch)["pixels"])


def device() -> str:
    return jax.devices()[0].device_kind


WORK = {
    "gpu_train": gpu_train,
    "gpu_forward": gpu_forward,
    "gpu_generate_1": gpu_generate,
    "gpu_generate_64": gpu_generate,
    "gpu_bert_train": gpu_bert_train,
    "gpu_bert_forward": gpu_bert_forward,
    "gpu_vit_train": gpu_vit_train,
    "gpu_vit_forward": gpu_vit_forward,
}
WARM_UP = {name: 5 for name in WORK if not name.startswith("gpu_generate")}
