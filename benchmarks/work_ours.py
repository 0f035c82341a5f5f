"""The work of the CPU benchmark, done by transformers_jax.

Every entry of WORK takes the row's sizes and returns `(run, note)`: `run(n)` does the work n times and returns when it
is done.
"""

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flax
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from transformers_jax.data import token_blocks, training_batches
from transformers_jax.experiment import load_config
from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import (
    GPT,
    BertConfig,
    EncoderDecoderConfig,
    GPTConfig,
    ImageClassifier,
    LanguageModel,
    ViTConfig,
)
from transformers_jax.nn import stacked_mask
from transformers_jax.pretrained import save_pretrained
from transformers_jax.tasks import LanguageModeling, MaskedLM, Task, Translation
from transformers_jax.training.mesh import batch_sharding, one_device, put_batch, shardings
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from transformers_jax.training.process import prepare_process
from transformers_jax.training.state import TrainState
from transformers_jax.training.step import make_train_step

Run = Callable[[int], None]
NO_DROPOUT = dict(dropout=0.0, attention_dropout=0.0, embedding_dropout=0.0)
BERT_OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="linear", weight_decay=0.01, clip_norm=1.0)
VIT_OPTIMIZER = BERT_OPTIMIZER
GPT2_OPTIMIZER = OptimizerConfig(learning_rate=6e-4, beta2=0.95, weight_decay=0.1, clip_norm=1.0)


prepare_process()  # as the commands do


def versions(threads: int) -> str:
    return f"jax {jax.__version__}, flax {flax.__version__}"


def gpt2() -> LanguageModel:
    return jax.jit(lambda: LanguageModel(GPT(GPTConfig.gpt2(), rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0)))()


def training(
    config: Any, optimizer_config: OptimizerConfig, steps: int, task: Task | None = None
) -> tuple[Any, Any, NamedSharding]:
    """The first state, the step to compile and where batches go: what `experiment.run` does, on one device."""
    task, mesh = task or LanguageModeling(), one_device()

    def build() -> Any:
        return task.build(config, rngs=nnx.Rngs(0))

    model = jax.eval_shape(build)
    optimizer = make_optimizer(optimizer_config, steps, model, stacked=stacked_mask(model))

    def create() -> TrainState:
        return TrainState.create(build(), optimizer)

    placed = shardings(jax.eval_shape(create), mesh)
    step = jax.jit(
        make_train_step(task.loss, optimizer, schedule=make_schedule(optimizer_config, steps)),
        out_shardings=(placed, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    return jax.jit(create, out_shardings=placed), step, batch_sharding(mesh)


def train(create: Any, step: Any, batches: Any) -> Run:
    """Steps as the loop does them: metrics are read two steps later, so that the device never waits for the host."""
    state, pending = create(), deque()

    def run(iterations: int) -> None:
        nonlocal state
        for _ in range(iterations):
            state, metrics = step(state, next(batches))
            pending.append(metrics)
            while len(pending) > 2:
                {name: float(value) for name, value in pending.popleft().items()}
        jax.block_until_ready(state)

    return run


def gpt_train() -> tuple[Run, str]:
    experiment = load_config("gpt_shakespeare_char_cpu")
    settings = experiment.training
    config = dataclasses.replace(experiment.model, vocab_size=65)
    create, step, rows = training(config, experiment.optimizer, settings.steps)
    tokens = np.random.default_rng(0).integers(65, size=1_000_000, dtype=np.uint16)
    batches = training_batches(
        token_blocks(tokens, config.max_length, sampling=experiment.task.sampling),
        batch_size=settings.batch_size,
        seed=0,
        num_threads=settings.data_workers,
        prefetch=settings.prefetch,
    )
    return train(create, step, (put_batch(batch, rows) for batch in batches)), "training_batches"


def gpt2_batch(batch: int, length: int) -> dict[str, np.ndarray]:
    crops = np.random.default_rng(0).integers(50257, size=(batch, length + 1), dtype=np.int32)
    return {"input_ids": crops[:, :-1], "labels": crops[:, 1:]}


def gpt2_train(batch: int, length: int) -> tuple[Run, str]:
    create, step, rows = training(GPTConfig.gpt2(**NO_DROPOUT), GPT2_OPTIMIZER, 1000)
    examples = gpt2_batch(batch, length)
    return train(create, step, iter(lambda: put_batch(examples, rows), None)), ""


def gpt2_compile(batch: int, length: int) -> tuple[Run, str]:
    jax.config.update("jax_enable_compilation_cache", False)
    create, step, _ = training(GPTConfig.gpt2(**NO_DROPOUT), GPT2_OPTIMIZER, 1000)
    state, examples = jax.eval_shape(create), gpt2_batch(batch, length)

    def run(iterations: int) -> None:
        for _ in range(iterations):
            jax.clear_caches()
            step.lower(state, examples).compile()

    return run, "stacked layers, scanned"


def gpt2_forward(batch: int, length: int) -> tuple[Run, str]:
    model = gpt2()
    forward = jax.jit(lambda model, input_ids: model(input_ids).logits)
    input_ids = jax.numpy.asarray(gpt2_batch(batch, length)["input_ids"])

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model, input_ids).block_until_ready()

    return run, ""


def gpt2_generate(batch: int, prompt: int, new: int) -> tuple[Run, str]:
    return decode(partial(generate, max_new_tokens=new, sampling=Sampling(temperature=0.0)), batch, prompt)


def gpt2_beam(batch: int, prompt: int, new: int, beams: int) -> tuple[Run, str]:
    return decode(partial(beam_search, max_new_tokens=new, beams=beams), batch, prompt)


def bert_batch(batch: int, length: int) -> dict[str, np.ndarray]:
    """Rows of `length / 2` to `length` tokens, 15 % of the places masked."""
    rng = np.random.default_rng(0)
    real = np.linspace(length // 2, length, batch).astype(int)
    masked = round(0.15 * length)
    return {
        "input_ids": rng.integers(30522, size=(batch, length), dtype=np.int32),
        "token_type_ids": np.zeros((batch, length), np.int32),
        "attention_mask": (np.arange(length) < real[:, None]).astype(np.int32),
        "masked_positions": np.stack([np.sort(rng.permutation(length // 2)[:masked]) for _ in real]).astype(np.int32),
        "labels": rng.integers(30522, size=(batch, masked), dtype=np.int32),
    }


def bert_forward(batch: int, length: int) -> tuple[Run, str]:
    config = BertConfig.base()
    model = jax.jit(lambda: MaskedLM().build(config, rngs=nnx.Rngs(0)))()
    forward = jax.jit(lambda model, **inputs: model(**inputs).logits)
    examples = bert_batch(batch, length)
    inputs = {name: jax.numpy.asarray(examples[name]) for name in ("input_ids", "token_type_ids", "attention_mask")}

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model, **inputs).block_until_ready()

    return run, ""


def bert_train(batch: int, length: int, dropout: float = 0.0) -> tuple[Run, str]:
    config = BertConfig.base(dropout=dropout, attention_dropout=dropout)
    create, step, rows = training(config, BERT_OPTIMIZER, 1000, MaskedLM())
    examples = bert_batch(batch, length)
    return train(create, step, iter(lambda: put_batch(examples, rows), None)), ""


class ImageLabels(Task):
    """Cross-entropy of a classifier over pixels that are normalised already."""

    head = ImageClassifier

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["pixels"], key=key).logits, batch["labels"]
        )
        return jax.numpy.sum(losses), jax.numpy.asarray(len(losses))


def vit_config(**fields: Any) -> ViTConfig:
    return ViTConfig(labels=tuple(str(i) for i in range(1000)), **fields)


def vit_batch(batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((batch, 224, 224, 3), np.float32)
    return {"pixels": pixels, "labels": rng.integers(1000, size=batch, dtype=np.int32)}


def vit_forward(batch: int, **sizes: int) -> tuple[Run, str]:
    config = vit_config(**sizes)
    model = jax.jit(lambda: ImageLabels().build(config, rngs=nnx.Rngs(0)))()
    forward = jax.jit(lambda model, pixels: model(pixels).logits)
    pixels = jax.numpy.asarray(vit_batch(batch)["pixels"])

    def run(iterations: int) -> None:
        for _ in range(iterations):
            forward(model, pixels).block_until_ready()

    return run, ""


def vit_train(batch: int, **sizes: int) -> tuple[Run, str]:
    create, step, rows = training(vit_config(**sizes), VIT_OPTIMIZER, 1000, ImageLabels())
    examples = vit_batch(batch)
    return train(create, step, iter(lambda: put_batch(examples, rows), None)), ""


def translation_config(**changes: Any) -> EncoderDecoderConfig:
    return EncoderDecoderConfig.marian(vocab_size=37_000, pad_id=36_999, **changes)


def translation_batch(batch: int, length: int) -> dict[str, np.ndarray]:
    """Full rows; transformers and the task both give the mask of them."""
    source, target = np.random.default_rng(0).integers(36_000, size=(2, batch, length), dtype=np.int32)
    return {"input_ids": source, "attention_mask": np.ones_like(source), "labels": target}


def translation_train(batch: int, length: int, dropout: float = 0.0) -> tuple[Run, str]:
    task = Translation(label_smoothing=0.0)
    create, step, rows = training(translation_config(dropout=dropout), BERT_OPTIMIZER, 1000, task)
    examples = translation_batch(batch, length)
    return train(create, step, iter(lambda: put_batch(examples, rows), None)), ""


def translation_beam(batch: int, length: int, beams: int, checkpoint: str) -> tuple[Run, str]:
    # Scores of such weights are far enough apart for the same texts on both sides. No token ends one.
    config = translation_config(eos_id=None, init_std=0.1)
    model = jax.jit(lambda: Translation().build(config, rngs=nnx.Rngs(0)))()
    save_pretrained(model, checkpoint)
    condition = jax.jit(lambda model, input_ids, attention_mask: model.condition(input_ids, attention_mask))
    inputs = translation_batch(batch, length)
    prompts = np.full((batch, 1), config.start, np.int32)

    def translate() -> Any:
        conditioned = condition(model, inputs["input_ids"], inputs["attention_mask"])
        return beam_search(conditioned, prompts, beams=beams, max_new_tokens=length)

    np.savez(Path(checkpoint) / "texts.npz", source=inputs["input_ids"], target=translate().tokens[:, 0])

    def run(iterations: int) -> None:
        for _ in range(iterations):
            jax.block_until_ready(translate())

    return run, ""


def decode(search: Callable[..., Any], batch: int, prompt: int, model: Any = None) -> tuple[Run, str]:
    model = gpt2() if model is None else model
    input_ids = gpt2_batch(batch, prompt)["input_ids"] % model.config.vocab_size

    def run(iterations: int) -> None:
        for _ in range(iterations):
            jax.block_until_ready(search(model, input_ids))

    return run, ""


WORK = {
    "gpt_train": gpt_train,
    "gpt2_forward": gpt2_forward,
    "gpt2_generate": gpt2_generate,
    "gpt2_beam": gpt2_beam,
    "gpt2_train": gpt2_train,
    "gpt2_compile": gpt2_compile,
    "bert_forward": bert_forward,
    "bert_train": bert_train,
    "vit_forward": vit_forward,
    "vit_train": vit_train,
    "translation_train": translation_train,
    "translation_beam": translation_beam,
}
WARM_UP = {"gpt_train": 20, "gpt2_compile": 1}
