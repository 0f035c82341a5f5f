"""Image GPT from pictures to pictures: what it is trained on, what it is scored by, what it draws, what it knows."""

import dataclasses
import json
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from transformers_jax.cli import _main as run_command
from transformers_jax.data import Augmentation, ImageData, ImageProcessor
from transformers_jax.experiment import Experiment
from transformers_jax.generation import Sampling
from transformers_jax.loading import evaluate, load
from transformers_jax.models import GPTConfig, ImageGPTConfig
from transformers_jax.running import run
from transformers_jax.tasks import (
    PixelEmbedding,
    PixelModeling,
    complete_pictures,
    pooled_features,
    sample_pictures,
)
from transformers_jax.tasks.pixel_modeling import histogram_loss
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig
from transformers_jax.training.optimizer import OptimizerConfig

CONFIG = ImageGPTConfig(
    image_size=(4, 5),
    clusters=2,
    dim=16,
    depth=2,
    heads=2,
    dropout=0.0,
    attention_dropout=0.0,
    embedding_dropout=0.0,
    init_std=0.1,
)
DARK, BRIGHT = (20, 10, 30), (230, 240, 210)


def paint(folder, *, count=60, seed=0):
    """Pictures whose columns are of one colour each: what is below a pixel can be known, what is beside it cannot."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        columns = rng.integers(0, 2, 5)
        name = "dark" if columns.sum() < 3 else "bright"
        pixels = np.where(columns[None, :, None], BRIGHT, DARK) + rng.integers(-9, 10, (4, 5, 3))
        (folder / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return paint(tmp_path_factory.mktemp("pictures"))


def experiment(source, **fields):
    changes = dict(
        task=PixelModeling(),
        model=CONFIG,
        data=ImageData(source=str(source), validation_fraction=0.25),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_fraction=0.1),
        training=TrainingConfig(steps=150, batch_size=8, log_every=20, eval_every=150, checkpoint_every=50),
        mesh=MeshConfig(devices=1),
    )
    return Experiment(**(changes | fields))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, pictures):
    workdir = tmp_path_factory.mktemp("run")
    return workdir, run(experiment(pictures), workdir)


@pytest.fixture(scope="module")
def loaded(trained):
    return load(trained[0])


# --- examples


def test_each_pixel_is_predicted_from_the_start_token_and_those_before_it(pictures):
    examples = PixelModeling().prepare(experiment(pictures).data, CONFIG)
    row, processor = examples.validation[0], examples.processor
    assert row["labels"].shape == row["input_ids"].shape == (20,) and set(row) == {"input_ids", "labels"}
    assert row["input_ids"][0] == CONFIG.bos_id
    np.testing.assert_array_equal(row["input_ids"][1:], row["labels"][:-1])
    assert len(examples.validation) == 15 and examples.items_per_example == 20
    np.testing.assert_allclose(processor.palette.clusters, np.array([DARK, BRIGHT]) / 127.5 - 1, atol=0.02)
    bright = row["labels"].reshape(4, 5)
    assert (bright == bright[0]).all()  # a picture of columns


def test_pictures_are_resized_to_the_size_of_the_model_and_changed_for_training(pictures):
    task = PixelModeling(image_size=(3, 2), augmentation=Augmentation(flip=1.0))
    examples = task.prepare(experiment(pictures).data, CONFIG)
    assert examples.processor.size == (3, 2) and examples.validation[0]["labels"].shape == (6,)
    assert task.configure(CONFIG, examples).image_size == (3, 2)
    plain = PixelModeling(image_size=(3, 2)).prepare(experiment(pictures).data, CONFIG)
    mirrored, straight = (
        np.array([e.train[i]["labels"] for i in range(20)]).reshape(-1, 3, 2) for e in (examples, plain)
    )
    np.testing.assert_array_equal(mirrored, straight[:, :, ::-1])
    assert (mirrored != straight).any()


def test_a_histogram_of_each_place_by_its_formula():
    train, held_out = np.array([[0, 1], [0, 2], [0, 2]]), np.array([[0, 2], [1, 2]])
    shares = [4 / 6, 3 / 6, 1 / 6, 3 / 6]  # each colour counted once more
    assert histogram_loss(train, held_out, 3) == pytest.approx(-np.mean(np.log(shares)))


# --- training


def test_a_run_learns_what_a_histogram_cannot(trained, pictures):
    _, result = trained
    facts = PixelModeling().prepare(experiment(pictures).data, CONFIG).facts
    histogram = float(facts["histogram"].split("loss of ")[1].split()[0])
    assert result.evaluation["eval/loss"] < 0.6 * histogram
    assert result.evaluation["eval/pixels"] == 15 * 20
    assert result.evaluation["eval/bits_per_pixel"] == pytest.approx(result.evaluation["eval/loss"] / math.log(2))


def test_a_run_that_was_interrupted_gives_the_numbers_of_one_that_was_not(tmp_path, trained, pictures, monkeypatch):
    original = MetricsLogger.log

    def log(self, step, values):
        original(self, step, values)
        if step == 20 and "loss" in values:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsLogger, "log", log)
    assert run(experiment(pictures), tmp_path / "run").ended == "interrupted"
    monkeypatch.undo()
    result, whole = run(experiment(pictures), tmp_path / "run"), trained[1]
    assert result.evaluation == whole.evaluation
    for ours, theirs in zip(jax.tree.leaves(result.state.model), jax.tree.leaves(whole.state.model), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_evaluation_repeats_what_training_measured(loaded, trained):
    metrics = evaluate(loaded, batch_size=4)
    assert metrics["loss"] == pytest.approx(trained[1].evaluation["eval/loss"], rel=1e-5) and metrics["pixels"] == 300


def test_the_checkpoints_palette_goes_on(tmp_path, trained, loaded, tmp_path_factory):
    other = paint(tmp_path_factory.mktemp("other"), seed=1)
    more = experiment(other, initial_checkpoint=str(trained[0]), training=TrainingConfig(steps=1, batch_size=8))
    run(more, tmp_path / "run")
    assert load(tmp_path / "run").processor == loaded.processor
    resized = dataclasses.replace(more, task=PixelModeling(image_size=(2, 3)))
    run(resized, tmp_path / "resized")
    model = load(tmp_path / "resized").model
    assert model.config.image_size == (2, 3) and model.backbone.positions.embedding.shape == (6, 16)


def test_hugging_face_files_and_back(tmp_path, loaded):
    loaded.save_pretrained(tmp_path / "hf")
    back = load(tmp_path / "hf")
    assert back.processor == loaded.processor and back.task == loaded.task
    assert back.model.config.image_size == (4, 5)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 20)))
    np.testing.assert_array_equal(back.model(ids).logits, loaded.model(ids).logits)
    (tmp_path / "hf/preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no preprocessor_config\.json"):
        load(tmp_path / "hf")


# --- pictures


def test_samples_are_pictures_in_the_colours_of_the_palette_and_of_their_seed(loaded):
    made = sample_pictures(loaded.model, loaded.processor, count=5, key=jax.random.key(0), batch_size=2)
    assert made.shape == (5, 4, 5, 3) and made.dtype == np.uint8
    np.testing.assert_array_equal(loaded.processor.pixels(loaded.processor.ids(made)), made)
    assert len(np.unique(made, axis=0)) > 1
    again, other = (
        sample_pictures(loaded.model, loaded.processor, count=5, key=jax.random.key(seed), batch_size=2)
        for seed in (0, 1)
    )
    np.testing.assert_array_equal(again, made)
    assert (other != made).any()


def test_completions_keep_what_is_given_and_differ(loaded):
    rng = np.random.default_rng(0)
    pixels = np.where(rng.integers(0, 2, (3, 1, 5, 1)), BRIGHT, DARK).repeat(4, axis=1).astype(np.uint8)
    whole = loaded.processor.pixels(loaded.processor.ids(pixels))
    made = complete_pictures(loaded.model, loaded.processor, pixels, samples=4, key=jax.random.key(0))
    assert made.shape == (3, 4, 4, 5, 3)
    np.testing.assert_array_equal(made[:, :, :2], whole[:, None, :2].repeat(4, axis=1))
    assert len(np.unique(made[0], axis=0)) > 1
    # It has learnt that columns have one colour.
    sure = complete_pictures(loaded.model, loaded.processor, pixels, samples=1, sampling=Sampling(temperature=0))
    bright = sure[:, 0].mean(axis=-1) > 128
    assert (bright == bright[:, :1]).mean() > 0.9


def test_the_likelihood_of_a_picture(loaded, pictures):
    held = [Image.fromarray(np.full((4, 5, 3), colour, np.uint8)) for colour in (DARK, BRIGHT)]
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (4, 5, 3)).astype(np.uint8))
    plain, _, odd = (found["loss"] for found in loaded.predict([*held, noise]))
    assert plain < odd
    row = loaded.task.features([held[0]], loaded.processor, CONFIG).dataset[0]
    log_probs = jax.nn.log_softmax(loaded.model(jnp.asarray(row["input_ids"][None])).logits[0])
    assert plain == pytest.approx(-float(log_probs[np.arange(20), row["labels"]].mean()), rel=1e-4)


# --- features


def test_features_are_the_means_of_transformers_hidden_states(loaded):
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 20)))
    output = loaded.model(ids, capture=("hidden_states",))
    found = pooled_features(loaded.model, ids, [0, None, 2])
    assert list(found) == [0, 1, 2]
    for layer, states in enumerate((*output.hidden_states, output.hidden)):
        np.testing.assert_allclose(found[layer], states.mean(axis=1), rtol=1e-5, atol=1e-6)
    picture = Image.fromarray(np.full((4, 5, 3), DARK, np.uint8))
    asked = dataclasses.replace(loaded, task=PixelEmbedding(layer=2))
    (row,) = asked.predict([picture])
    input_ids = loaded.task.features([picture], loaded.processor, CONFIG).dataset[0]["input_ids"]
    np.testing.assert_allclose(
        row["embedding"], pooled_features(loaded.model, jnp.asarray(input_ids[None]), [2])[2][0], rtol=1e-5
    )


# --- commands


def fails(capsys, *arguments):
    """The one line of a command that fails with exit code 2."""
    assert run_command(list(map(str, arguments))) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    return lines[0]


def test_draw_writes_a_grid_of_samples(tmp_path, trained):
    command = ["draw", "--checkpoint", str(trained[0]), "--scale", "2", "--samples", "11"]
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    for file in files:
        assert run_command([*command, "--output", str(file)]) == 0
    sheet = np.asarray(Image.open(files[0]))
    assert sheet.shape == (4 + 2 * (8 + 4), 4 + 8 * (10 + 4), 3)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert (sheet[:4] == 255).all() and (sheet[16:24, 4 + 3 * 14 :] == 255).all()  # 11 of 16 places


def test_draw_completes_pictures_in_a_row_each(tmp_path, trained, loaded, pictures):
    command = ["draw", "--checkpoint", str(trained[0]), "--input", str(pictures / "dark"), "--samples", "3"]
    assert run_command([*command, "--given", "0.75", "--scale", "1", "--output", str(tmp_path / "c.png")]) == 0
    sheet = np.asarray(Image.open(tmp_path / "c.png"))
    count = len(list((pictures / "dark").iterdir()))
    assert sheet.shape == (4 + count * 8, 4 + 5 * 9, 3)
    whole, given, *completed = (sheet[4:8, 4 + 9 * i : 9 + 9 * i] for i in range(5))
    first = sorted((pictures / "dark").iterdir())[0]
    pixels = loaded.processor(Image.open(first))
    np.testing.assert_array_equal(whole, loaded.processor.pixels(loaded.processor.ids(pixels)))
    assert (given[3] == 128).all()
    for one in (given, *completed):
        np.testing.assert_array_equal(one[:3], whole[:3])


def test_probe_finds_what_the_pictures_are(trained, capsys):
    assert run_command(["probe", "--checkpoint", str(trained[0]), "--layers", "0", "1"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["layer"] for line in lines] == [0, 1] and lines[0]["examples"] == 15
    assert lines[0]["train_accuracy"] > 0.9  # how many columns are bright is in the mean of the embeddings


def test_mistakes_are_one_line(tmp_path, trained, pictures, capsys):
    draw = ["draw", "--checkpoint", trained[0], "--output", tmp_path / "x.png"]
    assert "--output x.jpg must be a PNG" in fails(capsys, *draw[:3], "--output", "x.jpg")
    assert "there is no directory" in fails(capsys, *draw[:3], "--output", tmp_path / "no/x.png")
    for given in ("0", "1", "0.99", "-1"):
        line = fails(capsys, *draw, "--input", pictures, f"--given={given}")
        assert "of 4 rows keeps" in line and "at least one must be given and one made" in line
    assert "is no picture" in fails(capsys, *draw, "--input", tmp_path / "none")
    assert "layer=3 must be between 0 and the model's depth of 2" in fails(
        capsys, "probe", "--checkpoint", trained[0], "--layers", 3
    )
    assert "does not write text; `draw` makes its pictures" in fails(
        capsys, "generate", "--checkpoint", trained[0], "--prompt", "x"
    )


def test_what_does_not_fit_is_said_before_any_work(loaded, pictures):
    data = experiment(pictures).data
    with pytest.raises(ValueError, match="pixel modelling needs an Image GPT, not a GPTConfig"):
        PixelModeling().prepare(data, GPTConfig())
    with pytest.raises(ValueError, match="a palette of 9999 colours needs as many, but the pictures have"):
        PixelModeling().prepare(data, dataclasses.replace(CONFIG, clusters=9999))
    examples = PixelModeling().prepare(data, CONFIG)
    with pytest.raises(ValueError, match=r"the palette has 2 colours but model\.clusters is 3"):
        PixelModeling().configure(dataclasses.replace(CONFIG, clusters=3), examples)
    bare = ImageProcessor((4, 5), resize=(4, 5))
    with pytest.raises(ValueError, match="the image processor has no palette"):
        sample_pictures(loaded.model, bare, count=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="the image processor has no palette"):
        PixelModeling().prepare(data, CONFIG, bare)
    with pytest.raises(ValueError, match=r"makes pictures of \(2, 3\) in 2 colours, but the model knows \(4, 5\)"):
        sample_pictures(loaded.model, loaded.processor.resized((2, 3)), count=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match="a picture is uint8 of"):
        complete_pictures(loaded.model, loaded.processor, np.zeros((1, 5, 4, 3), np.uint8), key=jax.random.key(0))
    with pytest.raises(ValueError, match="samples=0 must be at least 1"):
        complete_pictures(loaded.model, loaded.processor, np.zeros((1, 4, 5, 3), np.uint8), samples=0)
