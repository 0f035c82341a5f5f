"""Image classification: the loss by its formula, classes by name, every picture once, from training to files again."""

import csv
import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

import transformers_jax
import transformers_jax.running
from transformers_jax.cli import main
from transformers_jax.data import Augmentation, ImageData, ImageProcessor
from transformers_jax.evaluation import make_evaluate
from transformers_jax.experiment import Experiment
from transformers_jax.inputs import read_inputs
from transformers_jax.loading import evaluate, load
from transformers_jax.models import ImageClassifier, Swin, SwinConfig, ViT, ViTConfig
from transformers_jax.models.output import ModelOutput
from transformers_jax.nn import resize_positions
from transformers_jax.running import run
from transformers_jax.tasks import ImageClassification
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig, make_mesh, one_device
from transformers_jax.training.optimizer import OptimizerConfig

CONFIG = ViTConfig(image_size=8, patch_size=4, dim=16, depth=2, heads=2)
COLOURS = {"blue": (30, 40, 200), "green": (20, 190, 60), "red": (210, 30, 20)}


class Says(nnx.Module):
    """A model that finds the row of its table in the first pixel's red, and says that."""

    def __init__(self, table, config):
        self.table, self.config = nnx.Param(jnp.asarray(table, jnp.float32)), config

    def __call__(self, pixels, *, key=None):
        row = jnp.round((pixels[:, 0, 0, 0] * 0.5 + 0.5) * 255).astype(int)
        return ModelOutput(pixels[:, 0], logits=self.table[...][row])


def told(task, logits, labels):
    """The loss of a model that says `logits` for pictures with `labels`, as (sum, weight)."""
    config = dataclasses.replace(CONFIG, labels=tuple("abcdefgh"[: np.shape(logits)[1]]))
    pixels = np.zeros((len(labels), 8, 8, 3), np.uint8)
    pixels[:, 0, 0, 0] = np.arange(len(labels))
    batch = {"pixels": jnp.asarray(pixels), "labels": jnp.asarray(labels, jnp.int32)}
    return tuple(map(float, task.loss(Says(logits, config), batch)))


def paint(folder, counts, *, size=(10, 12), seed=0):
    """Class folders of pictures in the colour of their class, with noise."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            noise = rng.normal(0, 25, (*size, 3)) + COLOURS[name]
            Image.fromarray(noise.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.png")
    return folder


def experiment(source, **fields):
    changes = dict(
        task=ImageClassification(augmentation=Augmentation(crop_scale=(0.5, 1.0), flip=0.5), mixup=0.1),
        model=CONFIG,
        data=ImageData(source=str(source), validation_fraction=0.25),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        training=TrainingConfig(steps=30, batch_size=8, log_every=1, eval_every=15, checkpoint_every=10),
        mesh=MeshConfig(devices=1),
    )
    return Experiment(**(changes | fields))


# --- the loss


def test_cross_entropy_skips_what_has_no_label():
    loss, weight = told(ImageClassification(), [[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]], [2, 1, -100])
    first = math.log(1 + math.exp(-1) + math.exp(-2))
    second = 3 + math.log(1 + 2 * math.exp(-3))
    assert (loss, weight) == (pytest.approx(first + second), 2.0)


def test_smoothing_spreads_a_share_over_all_classes():
    loss, weight = told(ImageClassification(label_smoothing=0.3), [[0.0, 0.0, math.log(2)]], [2])
    # Probabilities 1/4, 1/4, 1/2 against the targets 0.1, 0.1, 0.8.
    assert (loss, weight) == (pytest.approx(0.2 * math.log(4) + 0.8 * math.log(2)), 1.0)


def test_mixing_is_for_training_only_and_decided_by_the_key():
    task = ImageClassification(mixup=1.0)
    config = dataclasses.replace(CONFIG, labels=("a", "b"))
    model = ImageClassifier(ViT(config, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    model.head.kernel[...] = jax.random.normal(jax.random.key(0), model.head.kernel.shape)
    pixels = jax.random.randint(jax.random.key(1), (4, 8, 8, 3), 0, 256).astype(jnp.uint8)
    batch = {"pixels": pixels, "labels": jnp.array([0, 1, 0, 1])}
    loss = jax.jit(lambda key: task.loss(model, batch, key=key)[0])
    assert float(loss(jax.random.key(2))) == float(loss(jax.random.key(2))) != float(loss(jax.random.key(3)))
    plain = ImageClassification().loss(model, batch)[0]
    assert float(task.loss(model, batch)[0]) == pytest.approx(float(plain), abs=1e-6)


# --- what is counted


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_every_picture_counts_once(devices, tmp_path):
    # Eight right, then two wrong, in batches of eight: the mean of the batches' means would be 0.5.
    for number in range(10):
        (tmp_path / "ab"[number >= 5]).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "ab"[number >= 5] / f"{number}.png")
    data = ImageData(source=str(tmp_path), validation_source=str(tmp_path))
    task = ImageClassification()
    examples = task.prepare(data, CONFIG)
    config = task.configure(CONFIG, examples)
    answers = np.zeros((256, 2))
    answers[np.arange(10), [0, 0, 0, 0, 0, 1, 1, 1, 0, 0]] = 5.0
    mesh = make_mesh(MeshConfig(devices=devices))
    metrics = make_evaluate(task, examples, mesh, 8, config=config)(Says(answers, config))
    assert metrics["accuracy"] == pytest.approx(0.8)
    assert metrics["examples"] == 10
    right, wrong = math.log(1 + math.exp(-5)), 5 + math.log(1 + math.exp(-5))
    assert metrics["loss"] == pytest.approx((8 * right + 2 * wrong) / 10, rel=1e-5)


def test_top_5_counts_the_five_likeliest():
    config = dataclasses.replace(CONFIG, labels=tuple("abcdefg"))
    rows = [
        {"labels": np.array(label), "classes": np.array([0, 1, 2, 3, 4]), "probabilities": np.ones(5) / 7}
        for label in (0, 4, 5, 6)
    ]
    metrics = ImageClassification().finish({"loss": 4.0, "examples": 4.0}, rows, {}, config)
    assert (metrics["accuracy"], metrics["top5_accuracy"]) == (0.25, 0.5)


def test_classes_are_those_of_training_in_every_split(tmp_path):
    paint(tmp_path / "train", {"blue": 5, "green": 1, "red": 3})
    paint(tmp_path / "val", {"blue": 2, "red": 2})
    (tmp_path / "val" / "green").mkdir()
    (tmp_path / "val" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "val" / "notes.txt").write_text("stray")
    task = ImageClassification()
    examples = task.prepare(ImageData(source=str(tmp_path)), CONFIG)
    assert examples.labels == ("blue", "green", "red")
    assert [int(examples.validation[i]["labels"]) for i in range(len(examples.validation))] == [0, 0, 2, 2]
    config = task.configure(CONFIG, examples)
    answers = np.zeros((256, 3))
    metrics = make_evaluate(task, examples, one_device(), 4, config=config)(Says(answers, config))
    assert all(math.isfinite(value) for value in metrics.values())

    paint(tmp_path / "val", {"blue": 1})
    (tmp_path / "val" / "blue").rename(tmp_path / "val" / "violet")
    with pytest.raises(ValueError, match=r"violet.*'violet' is none of those the model has: blue, green, red"):
        task.prepare(ImageData(source=str(tmp_path)), CONFIG)
    with pytest.raises(ValueError, match=r"'green' is none of those .*: blue, red; task.new_head starts a head"):
        task.prepare(ImageData(source=str(tmp_path)), dataclasses.replace(CONFIG, labels=("blue", "red")))


def test_numbered_classes_are_in_the_order_of_their_numbers(tmp_path):
    for number in range(12):
        (tmp_path / str(number)).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / str(number) / "0.png")
    examples = ImageClassification().prepare(
        ImageData(source=str(tmp_path), validation_source=str(tmp_path)), CONFIG
    )  # fmt: skip
    assert examples.labels == tuple(map(str, range(12)))


def test_what_does_not_fit_is_an_error(tmp_path):
    paint(tmp_path, {"blue": 3})
    data = ImageData(source=str(tmp_path), validation_source=str(tmp_path))
    with pytest.raises(ValueError, match="all examples have the label 'blue'"):
        ImageClassification().prepare(data, CONFIG)
    paint(tmp_path, {"red": 3})
    with pytest.raises(ValueError, match=r"image of 9 x 9 pixels .* patches of 4 x 4"):
        task = ImageClassification(image_size=9)
        task.configure(CONFIG, task.prepare(data, CONFIG))
    with pytest.raises(ValueError, match=r"mixup=-1.* must not be negative"):
        ImageClassification(mixup=-1.0)
    with pytest.raises(ValueError, match="crop_fraction=0"):
        ImageClassification(crop_fraction=0.0)


# --- from a folder to predictions


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    paint(folder / "pictures", {"blue": 24, "green": 16, "red": 20})
    run(experiment(folder / "pictures"), folder / "run")
    return folder


def test_a_run_learns_and_is_evaluated_and_asked(trained, tmp_path):
    loaded = load(trained / "run")
    assert loaded.labels == ("blue", "green", "red")
    metrics = evaluate(loaded, report=tmp_path)
    last = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    best = max(line["eval/accuracy"] for line in last if "eval/accuracy" in line)
    assert metrics["accuracy"] == best > 0.9
    assert metrics["examples"] == 15
    with (tmp_path / "confusion_matrix.csv").open() as file:
        header, *table = csv.reader(file)
    assert header[1:] == ["blue", "green", "red"]
    matrix = np.array([[int(x) for x in row[1:]] for row in table])
    assert matrix.sum(1).tolist() == [6, 4, 5]
    assert np.trace(matrix) == round(metrics["accuracy"] * 15)
    lines = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert sum(line["true"] == line["label"] for line in lines) == np.trace(matrix)
    assert all(line["image"].endswith(".png") for line in lines)

    picture = Image.new("RGB", (30, 20), COLOURS["green"])
    picture.save(tmp_path / "one picture.png")
    by_path, by_picture, by_array, by_bytes = loaded.predict(
        [
            str(tmp_path / "one picture.png"),
            picture,
            np.asarray(picture),
            {"image": (tmp_path / "one picture.png").read_bytes()},
        ]
    )
    assert by_path.pop("image") == str(tmp_path / "one picture.png")
    assert by_path == by_picture == by_array == by_bytes
    for single in (np.asarray(picture), b"bytes", str(tmp_path / "one picture.png")):
        with pytest.raises(ValueError, match="a list of inputs; put the single one into brackets"):
            loaded.predict(single)
    with pytest.raises(ValueError, match=r"^input 0 is Array.*, not a picture or .*$"):
        loaded.predict([jnp.zeros((30, 20, 3))])
    assert by_path["label"] == "green" and set(by_path["probabilities"]) == {"blue", "green", "red"}
    assert sum(by_path["probabilities"].values()) == pytest.approx(1, abs=1e-5)


def test_the_mistakes_are_on_a_sheet(trained, tmp_path):
    paint(tmp_path / "wrong", {"blue": 3, "red": 2})
    (tmp_path / "wrong" / "blue").rename(tmp_path / "wrong" / "green")  # what is blue is called green
    loaded = load(trained / "run")
    metrics = evaluate(loaded, ImageData(source=str(tmp_path / "wrong"), validation_source=str(tmp_path / "wrong")),
                       report=tmp_path / "report")  # fmt: skip
    assert metrics["accuracy"] == pytest.approx(2 / 5)
    with Image.open(tmp_path / "report" / "mistakes.png") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).reshape(-1, 3).astype(int)
    # Three thumbnails of 128 pixels, nearly square, in blue.
    blue = (np.abs(pixels - COLOURS["blue"]).max(1) < 110) & (pixels[:, 2] > 110)
    assert 3 * 128 * 100 < blue.sum() < 3 * 128 * 128


def test_a_report_that_cannot_be_written_is_known_before_the_work(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ImageClassification, "evaluate", None)
    (tmp_path / "file").write_text("")
    for place, message in (("file", "File exists"), ("file/report", "Not a directory")):
        with pytest.raises(SystemExit) as ended:
            main(["evaluate", "--checkpoint", str(trained / "run"), "--report", str(tmp_path / place)])
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"error: {tmp_path / place}: {message}\n"


def test_converted_it_says_the_same_and_transformers_files_are_there(trained, tmp_path):
    loaded = load(trained / "run")
    loaded.save_pretrained(tmp_path / "hf")
    assert {"config.json", "model.safetensors", "preprocessor_config.json"} <= {
        path.name for path in (tmp_path / "hf").iterdir()
    }
    again = load(tmp_path / "hf")
    assert again.labels == loaded.labels
    assert again.model.config.image_mean == loaded.model.config.image_mean
    paths = [str(path) for path in sorted((trained / "pictures").rglob("*.png"))[::7]]
    for one, other in zip(loaded.predict(paths), again.predict(paths), strict=True):
        assert one["label"] == other["label"]
        assert one["probability"] == pytest.approx(other["probability"], abs=1e-5)


def test_fine_tuning_a_swin_with_larger_windows_resizes_its_tables_and_says_so(tmp_path, caplog):
    paint(tmp_path / "pictures", {"blue": 12, "red": 12})
    sizes: dict = dict(image_size=8, patch_size=2, window=2, dims=(8, 16), depths=(2, 2), heads=(2, 2), init_std=0.5)
    old = SwinConfig(**sizes, labels=("a", "b", "c"))
    model = ImageClassifier(Swin(old, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1))
    processor = ImageProcessor.default_of("swin", 8)
    transformers_jax.save_pretrained(model, tmp_path / "hf", processor=processor)
    tuned = experiment(
        tmp_path / "pictures",
        task=ImageClassification(image_size=(16, 12), new_head=True),
        model=SwinConfig.tiny(resize_window=3),
        initial_checkpoint=str(tmp_path / "hf"),
        optimizer=OptimizerConfig(learning_rate=0.0),
        training=TrainingConfig(steps=1, batch_size=8),
    )
    state = run(tuned, tmp_path / "run").state
    (told,) = [record.message for record in caplog.records if record.message.startswith("resized: ")]
    assert "stages.1.stack.layers.1.relative.embedding (1, 9, 2) -> (1, 25, 2)" in told and told.count("->") == 4
    config = state.model.config
    assert (config.window, config.resize_window, config.image_size, config.dims) == (3, None, (16, 12), (8, 16))
    tables = [one.backbone.stages[1].stack.layers[1].relative.embedding[...][0] for one in (model, state.model)]
    expected = resize_positions(tables[0], (3, 3), (5, 5), how="bicubic")
    np.testing.assert_allclose(tables[1], expected, atol=1e-6)
    assert np.isfinite(load(tmp_path / "run").predict([str(tmp_path / "pictures/red/0.png")])[0]["probability"])


def test_fine_tuning_at_a_higher_resolution_resizes_positions_and_starts_a_head_of_zeros(trained, tmp_path):
    paint(tmp_path / "pictures", {"blue": 12, "red": 12})
    task = ImageClassification(image_size=(16, 12), new_head=True)
    tuned = experiment(
        tmp_path / "pictures",
        task=task,
        initial_checkpoint=str(trained / "run"),
        optimizer=OptimizerConfig(learning_rate=0.0),
        training=TrainingConfig(steps=1, batch_size=8),
    )
    state = run(tuned, tmp_path / "run").state
    old = load(trained / "run").model.backbone
    assert state.model.config.grid == (4, 3)
    assert state.model.config.labels == ("blue", "red")
    assert np.all(np.asarray(state.model.head.kernel[...]) == 0)
    pixels = jax.random.normal(jax.random.key(0), (2, 16, 12, 3))
    np.testing.assert_allclose(state.model.backbone(pixels).hidden, old(pixels).hidden, atol=1e-5)


def test_the_command_line_trains_evaluates_predicts_and_converts(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paint(tmp_path / "pictures", {"blue": 10, "red": 10}, size=(20, 20))
    sizes = "--model.dim 16 --model.depth 1 --model.heads 2 --model.patch-size 4 --model.image-size 8"

    def say(command):
        with pytest.raises(SystemExit) as ended:
            main(command.split())
        output = capsys.readouterr()
        assert ended.value.code == 0, output.err
        return output.out

    say(
        f"train --config vit_finetune_folder --workdir run --data.source pictures {sizes} --training.steps 3 "
        "--training.batch-size 8 --training.data-processes 0 --task.image-size 8 --mesh.devices 1"
    )
    scored = json.loads(say("evaluate --checkpoint run --report seen"))
    assert 0 <= scored["accuracy"] <= 1 and scored["examples"] == 2
    scored = json.loads(say("evaluate --checkpoint run --data pictures"))
    assert scored["examples"] == 20
    lines = [json.loads(line) for line in say("predict --checkpoint run --input pictures/red").splitlines()]
    assert [line["image"] for line in lines] == sorted(f"pictures/red/{i}.png" for i in range(10))
    (tmp_path / "pictures" / "list.txt").write_text("red/3.png\nblue/1.png\n")
    some = [json.loads(line) for line in say("predict --checkpoint run --input pictures/list.txt").splitlines()]
    assert some[0]["probabilities"] == lines[3]["probabilities"]
    say("convert --checkpoint run --output hf")
    again = [json.loads(line) for line in say("predict --checkpoint hf --input pictures/red/3.png").splitlines()]
    assert again[0]["probability"] == pytest.approx(lines[3]["probability"], abs=1e-5)
    bare = transformers_jax.from_pretrained("hf", architecture=ViT)
    transformers_jax.save_pretrained(bare, "bare", processor=load("hf").processor)
    (embedded,) = [
        json.loads(line) for line in say("predict --checkpoint bare --input pictures/red/3.png").splitlines()
    ]
    assert len(embedded["embedding"]) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task.image-size 8.5", "task.image-size: no type matching {None}|INT|{INT INT} could be instantiated from"),
        ("--task.image-size 8 8 8", "could be instantiated from ['8', '8', '8'] (transformers-jax train --help"),
        ("--task.image-size 0", "task.image_size=0 must be at least 1 pixel"),
        ("--task.image-size 8 -4", "task.image_size=(8, -4) must be at least 1 pixel"),
        ("--task.image-size 9", "an image of 9 x 9 pixels (height x width) cannot be cut into patches of 2 x 2"),
    ],
)
def test_sizes_that_are_none_are_named_in_one_line(options, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(f"train --config vit_digits --mesh.devices 1 --workdir {tmp_path} {options}".split())
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line and len(line) < 250


def test_a_broken_picture_is_named_before_training_or_counted(tmp_path):
    paint(tmp_path / "pictures", {"blue": 6, "red": 6})
    broken = tmp_path / "pictures" / "red" / "2.png"
    broken.write_bytes(broken.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"red/2\.png"):
        run(experiment(tmp_path / "pictures"), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())
    data = ImageData(source=str(tmp_path / "pictures"), validation_source=str(tmp_path / "pictures"), skip_bad=True)
    examples = ImageClassification().prepare(data, CONFIG)
    assert [int(examples.validation[i]["labels"]) for i in range(11)] == [0] * 6 + [1] * 5


def test_inputs_that_are_no_pictures_are_named_or_counted(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load(trained / "run")
    (tmp_path / ".hidden").mkdir()
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8))
    picture.save(".hidden/good.png")
    whole = (tmp_path / ".hidden/good.png").read_bytes()
    half = len(whole) // 2
    (tmp_path / "damaged.png").write_bytes(whole[:half] + bytes(64) + whole[half + 64 :])  # begins and ends well
    Image.new("RGB", (1, 60_000)).save("long.png")  # 480,000 x 8 pixels once resized
    for bad, message in {
        '{"image": 0}': r"line 1 is \{.image.: 0\}, not a picture",  # a number would be a file descriptor
        '["damaged.png"]': "line 1 is .*, not a picture",
        '{"image": "none.png"}': r"line 1 \(none\.png\): no such image file; --skip-bad",
    }.items():
        (tmp_path / "bad.jsonl").write_text(f'{bad}\n{{"image": ".hidden/good.png"}}\n')
        with pytest.raises(ValueError, match=message):
            read_inputs(loaded, "bad.jsonl", skip_bad=False)
        assert len(read_inputs(loaded, "bad.jsonl", skip_bad=True)) == 1
    # What is hidden is left out of a directory, but found by its name.
    with pytest.raises(FileNotFoundError, match="no picture in the directory"):
        read_inputs(loaded, str(trained / "run"), skip_bad=False)
    assert len(read_inputs(loaded, str(tmp_path / ".hidden"), skip_bad=False)) == 1
    assert len(read_inputs(loaded, ".hidden/good.png", skip_bad=False)) == 1
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000_000)
    assert len(read_inputs(loaded, str(tmp_path), skip_bad=False)) == 2
    with pytest.raises(ValueError, match=r"damaged\.png: not a whole image"):
        loaded.predict(["damaged.png"])
    with pytest.raises(ValueError, match=r"long\.png: an image of 1 x 60000 pixels, too long"):
        loaded.predict(["long.png"])
    with pytest.raises(ValueError, match="holds no input"):
        read_inputs(loaded, str(tmp_path), skip_bad=True)


def test_settings_of_the_task_apply_to_predictions_and_have_types(trained):
    directory, path = trained / "run", str(trained / "pictures" / "red" / "0.png")
    larger = load(directory, settings={"image_size": (16, 12)})
    assert larger.task.features([path], larger.processor, larger.model.config).dataset[0]["pixels"].shape == (16, 12, 3)
    assert load(directory, settings={"mixup": 1, "image_size": None}).task.mixup == 1
    for setting, message in {
        ("mixup", "a"): "mixup='a' is a str; float is needed",
        ("image_size", 8.5): r"image_size=8.5 is a float; int \| tuple\[int, int\] \| None is needed",
        ("image_size", (8, 8, 8)): "image_size=.* is a tuple",
        ("new_head", 1): "new_head=1 is a int; bool is needed",
        ("label_smoothing", True): "is a bool; float is needed",
        ("resampling", "sharp"): "resampling='sharp' is a str; .*'bilinear'",
        ("augmentation", 2): "augmentation=2 is a int; Augmentation is needed",
    }.items():
        with pytest.raises(ValueError, match=message):
            load(directory, settings=dict([setting]))


# --- stopping changes nothing


@pytest.mark.slow
def test_interrupted_with_augmentation_and_mixing_it_ends_the_same(trained, tmp_path, monkeypatch):
    task = ImageClassification(
        augmentation=Augmentation(crop_scale=(0.4, 1.0), flip=0.5, rand_augment=2, erasing=0.5), mixup=0.5, cutmix=1.0
    )
    whole = experiment(
        trained / "pictures",
        task=task,
        model=dataclasses.replace(CONFIG, stochastic_depth=0.3, dropout=0.1),
        training=TrainingConfig(steps=12, batch_size=8, log_every=1, checkpoint_every=4, ema=0.9),
    )
    first = run(whole, tmp_path / "whole").state

    train = transformers_jax.running.train
    monkeypatch.setattr(
        transformers_jax.running,
        "train",
        lambda *given, config, **rest: train(*given, config=dataclasses.replace(config, steps=7), **rest),
    )
    run(whole, tmp_path / "parts")
    monkeypatch.undo()
    more = dataclasses.replace(whole.training, data_workers=3, data_processes=2)
    second = run(dataclasses.replace(whole, training=more), tmp_path / "parts").state
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)
