"""Every mesh of eight devices computes what one device computes, for every family.

Without a marker a part runs that uses all axes at once; `mesh` and `exhaustive` are the rest of the matrix.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformers_jax.experiment import Experiment
from transformers_jax.generation import Sampling, beam_search, generate
from transformers_jax.models import (
    BertConfig,
    DaViTConfig,
    EncoderDecoderConfig,
    GPTConfig,
    ImageGPTConfig,
    SwinConfig,
    ViTConfig,
)
from transformers_jax.running import make_program
from transformers_jax.tasks import ImageClassification, LanguageModeling, MaskedLM, PixelModeling, Translation
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig, batch_sharding, make_mesh, put_batch
from transformers_jax.training.optimizer import OptimizerConfig
from transformers_jax.training.process import compiled_anew

STEPS, BATCH, LENGTH = 20, 32, 16
SIZES = dict(dim=64, depth=2, heads=8, dropout=0.1, attention_dropout=0.1)
# 65 tokens: no axis divides them.
TEXTS = dict(vocab_size=65, max_length=LENGTH, pad_id=0, eos_id=1, mlp_dropout=0.1, **SIZES)
FAMILIES = {
    "gpt": (LanguageModeling(), GPTConfig(vocab_size=65, max_length=LENGTH, **SIZES)),
    "image gpt": (PixelModeling(), ImageGPTConfig(image_size=4, clusters=64, **SIZES)),
    "bert": (MaskedLM(), BertConfig(vocab_size=65, max_length=LENGTH, **SIZES)),
    "vit": (ImageClassification(), ViTConfig(image_size=16, patch_size=4, labels=tuple("abcdefghij"), **SIZES)),
    "swin": (
        ImageClassification(),
        SwinConfig(
            image_size=16,
            patch_size=2,
            window=3,
            dims=(64, 128),
            depths=(2, 1),
            heads=(8, 8),
            stochastic_depth=0.1,
            labels=tuple("abcdefghij"),
        ),
    ),
    "davit": (
        ImageClassification(),
        DaViTConfig(
            image_size=16,
            patch_size=2,
            window=3,
            dims=(64, 128),
            depths=(2, 1),
            heads=(8, 8),
            stochastic_depth=0.1,
            labels=tuple("abcdefghij"),
        ),
    ),
    "translation": (Translation(), EncoderDecoderConfig(**TEXTS, logits_bias=True)),
    "t5": (
        Translation(),
        EncoderDecoderConfig.t5_small(**TEXTS, relative_per_layer=True, gated=True, target_vocab_size=67),
    ),
}
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=3) if np.prod(shape) == 8]


def batch_of(family, number):
    rng = np.random.default_rng(number)
    if family in ("vit", "swin", "davit"):
        return {
            "pixels": rng.integers(0, 256, (BATCH, 16, 16, 3)).astype(np.uint8),
            "labels": rng.integers(0, 10, BATCH).astype(np.int32),
        }
    ids = rng.integers(0, 65, (BATCH, LENGTH)).astype(np.int32)
    if family == "image gpt":
        return {"input_ids": ids, "labels": np.minimum(ids[:, ::-1], 63)}
    if family == "gpt":
        labels = rng.integers(0, 65, (BATCH, LENGTH)).astype(np.int32)
        labels[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (BATCH, 1))] = -100
        return {"input_ids": ids, "labels": labels}
    if family in ("translation", "t5"):
        lengths = rng.integers(1, LENGTH + 1, (2, BATCH, 1))
        labels = rng.integers(0, 65, (BATCH, LENGTH - 3)).astype(np.int32)
        labels[np.arange(LENGTH - 3) >= lengths[1]] = -100
        return {"input_ids": ids, "attention_mask": (np.arange(LENGTH) < lengths[0]).astype(np.int32), "labels": labels}
    kept = (np.arange(LENGTH) < rng.integers(8, LENGTH + 1, (BATCH, 1))).astype(np.int32)
    masked = np.tile(np.arange(0, 8, 2, dtype=np.int32), (BATCH, 1))
    return {
        "input_ids": ids,
        "attention_mask": kept,
        "masked_positions": masked,
        "labels": np.take_along_axis(ids, masked, axis=1),
    }


def experiment_of(family, *, accumulation=1, dropout=True):
    task, model = FAMILIES[family]
    if not dropout:
        rates = ("dropout", "attention_dropout", "embedding_dropout", "mlp_dropout", "stochastic_depth")
        model = dataclasses.replace(model, **{name: 0.0 for name in rates if hasattr(model, name)})
    return Experiment(
        task=task,
        model=model,
        data=task.data(source="unused"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5),
        training=TrainingConfig(steps=STEPS, batch_size=BATCH, accumulation=accumulation),
    )


def losses_on(mesh, family, **settings):
    program = make_program(experiment_of(family, **settings), mesh)
    state = jax.jit(program.create, out_shardings=program.placed)()
    step, losses = program.jit_step(), []
    for number in range(STEPS):
        state, metrics = step(state, put_batch(batch_of(family, number), batch_sharding(mesh)))
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1
    return losses


@pytest.fixture(scope="module")
def on_one_device():
    known = {}

    def losses(family, **settings):
        key = family, *settings.items()
        if key not in known:
            known[key] = losses_on(make_mesh(MeshConfig(devices=1)), family, **settings)
        return known[key]

    return losses


PYRAMIDS = ("swin", "davit")
WHOLE = [family for family in FAMILIES if family not in (*PYRAMIDS, "image gpt")]
FAR = pytest.mark.exhaustive


def marks_of(family, shape):
    """What families share is spread by the same rules: all axes at once, and the tensor axis alone, which cuts what
    each family has of its own, show the rest."""
    if shape == (2, 2, 2):
        return []
    return pytest.mark.mesh if shape == (1, 1, 8) or (family == "gpt" and max(shape) == 8) else FAR


LAYOUTS = [
    pytest.param(family, shape, marks=marks_of(family, shape), id=f"{family}-{shape}")
    for family in FAMILIES
    for shape in SHAPES
    if shape == (2, 2, 2) or family in WHOLE or (family in PYRAMIDS and max(shape) == 8)
]
ACCUMULATED = [
    pytest.param(family, shape, marks=pytest.mark.mesh if family == "gpt" and shape == (2, 2, 2) else FAR)
    for family in WHOLE
    for shape in [(8, 1, 1), (1, 8, 1), (2, 2, 2)]
]


@pytest.mark.parametrize(("family", "shape"), LAYOUTS)
def test_every_mesh_of_eight_devices_gives_the_losses_of_one(family, shape, on_one_device, capfd):
    with compiled_anew():
        losses = losses_on(make_mesh(MeshConfig(*shape)), family)
    np.testing.assert_allclose(losses, on_one_device(family), rtol=1e-5)
    assert losses[-1] != losses[0]
    assert "rematerialization" not in capfd.readouterr().err


@pytest.mark.parametrize(("family", "shape"), ACCUMULATED)
def test_accumulation_on_a_mesh_gives_the_losses_of_one_device(family, shape, on_one_device):
    expected = on_one_device(family, dropout=False)
    losses = losses_on(make_mesh(MeshConfig(*shape)), family, dropout=False, accumulation=4)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=pytest.mark.mesh if family == "gpt" else FAR) for family in (*WHOLE, *PYRAMIDS)],
)
def test_pmap_gives_the_losses_of_one_device(family, on_one_device):
    program = make_program(experiment_of(family, dropout=False), make_mesh(MeshConfig(devices=1)), axis_name="devices")
    step = jax.pmap(program.step, axis_name="devices", donate_argnums=0)
    state = jax.tree.map(lambda x: np.stack([x] * 8), jax.jit(program.create)())
    losses = []
    for number in range(STEPS):
        parts = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch_of(family, number))
        state, metrics = step(state, parts)
        losses.append(float(metrics["loss"][0]))
    np.testing.assert_allclose(losses, on_one_device(family, dropout=False), rtol=1e-5)


@pytest.mark.parametrize("family", ["gpt", "translation", "t5"])
@pytest.mark.parametrize("mesh", [MeshConfig(tensor=2, devices=2), MeshConfig(data=2, fsdp=2, tensor=2)], ids=str)
def test_generation_on_a_mesh_writes_the_tokens_of_one_device(family, mesh):
    experiment = experiment_of(family, dropout=False)
    prompts = np.random.default_rng(0).integers(0, 65, (4, 5)).astype(np.int32)
    written = []
    for layout in (MeshConfig(devices=1), mesh):
        program = make_program(experiment, make_mesh(layout))
        model, start = jax.jit(program.build, out_shardings=program.placed.model)(), prompts
        if family != "gpt":
            model = jax.jit(lambda model: model.condition(jnp.asarray(prompts)))(model)
            start = np.zeros((4, 1), np.int32)
        greedy = generate(model, start, max_new_tokens=8, sampling=Sampling(temperature=0))
        beams = beam_search(model, start, beams=3, max_new_tokens=8)
        written.append((np.asarray(greedy.tokens), np.asarray(beams.tokens)))
    np.testing.assert_array_equal(written[1][0], written[0][0])
    np.testing.assert_array_equal(written[1][1], written[0][1])
