"""The commands of Image GPT: `draw` makes and completes pictures, `probe` says how much its features know."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from PIL import Image

from transformers_jax.arguments import parse
from transformers_jax.data import ImageData, ImageSet, read_images
from transformers_jax.data.image_examples import Inputs, PrepareImage
from transformers_jax.data.image_files import show_path
from transformers_jax.generation import Sampling
from transformers_jax.loading import Loaded, load
from transformers_jax.models import ImageGPTConfig, LanguageModel
from transformers_jax.tasks import PixelEmbedding, complete_pictures, sample_pictures
from transformers_jax.tasks.metrics import need
from transformers_jax.tasks.pixel_modeling import rows_given

UNSEEN = 128
"""The grey of pixels that are not given."""


@dataclasses.dataclass(frozen=True)
class Draw:
    """Write a picture (PNG) of many that an Image GPT makes: new ones, or with --input a row for each picture: it, what
    is given of it, and its completions."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    output: str
    """The file to write: samples.png."""
    input: str | None = None
    """Pictures to complete: one, a directory of them, or a glob. Unset: new pictures."""
    given: float = 0.5
    """The share of the rows of each picture that is given, from above; the rest is made."""
    samples: int = 8
    """How many new pictures, or how many completions of each."""
    temperature: float = 1.0
    """Below 1: likelier colours; above 1: more daring ones; 0: always the likeliest."""
    top_k: int | None = None
    """Choose among this many likeliest colours only."""
    top_p: float | None = None
    """Choose among the likeliest colours that together have this probability."""
    seed: int = 0
    """The same seed makes the same pictures."""
    scale: int = 4
    """Pixels of the file for each pixel of a picture, along each side."""
    batch_size: int = 64
    """Pictures at a time."""
    which: Literal["best", "latest"] = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type to compute in. Unset: the checkpoint's."""
    debug: bool = False
    """Show the whole traceback of an error."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Train a linear classifier on the mean hidden states of an Image GPT, after each of several layers; prints for
    each a line of JSON with its accuracy on held-out pictures."""

    checkpoint: str
    """A run's working directory, or a Hugging Face checkpoint."""
    data: str | None = None
    """Labelled pictures: class folders, MNIST's files, tfds:NAME. Unset: those of the run."""
    layers: tuple[int, ...] = ()
    """After how many layers: 0 is the embeddings. Unset: all of them."""
    c: float = 1.0
    """The inverse of the penalty on the classifier's weights."""
    batch_size: int = 64
    """Pictures at a time."""
    which: Literal["best", "latest"] = "best"
    """Which checkpoint of a run: the one with the best evaluation, or the latest."""
    debug: bool = False
    """Show the whole traceback of an error."""


def draw_command(arguments: list[str]) -> int:
    command = parse(Draw, arguments, "draw")
    for name in ("samples", "scale", "batch_size"):
        if getattr(command, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least 1")
    output = Path(command.output)
    if output.suffix.lower() != ".png":
        raise ValueError(f"--output {command.output} must be a PNG: give it the ending .png")
    if not output.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no directory {output.absolute().parent} to write to")
    sampling = Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p)
    loaded = load_image_gpt(command.checkpoint, command.which, command.dtype)
    if not isinstance(loaded.model, LanguageModel):
        raise ValueError(f"{command.checkpoint} holds no layer that predicts pixels, which drawing needs")
    settings: Any = dict(sampling=sampling, key=jax.random.key(command.seed), batch_size=command.batch_size)
    if command.input is None:
        made = sample_pictures(loaded.model, loaded.processor, count=command.samples, **settings)
        columns = min(command.samples, 8)
        missing = -len(made) % columns
        made = np.concatenate([made, np.full((missing, *made.shape[1:]), 255, np.uint8)])
        rows = made.reshape(-1, columns, *made.shape[1:])
    else:
        files = loaded.task.input_files(command.input)
        if not files:
            raise FileNotFoundError(f"{command.input} is no picture, no directory of pictures and no glob of some")
        pixels = prepared(loaded, files)
        given = dict(given=command.given, samples=command.samples)
        made = complete_pictures(loaded.model, loaded.processor, pixels, **given, **settings)
        whole = loaded.processor.pixels(loaded.processor.ids(pixels))
        part = whole.copy()
        part[:, rows_given(command.given, pixels.shape[1]) :] = UNSEEN
        rows = np.concatenate([whole[:, None], part[:, None], made], axis=1)
    grid_of(rows, scale=command.scale).save(output)
    print(f"wrote {command.output}")
    return 0


def probe_command(arguments: list[str]) -> int:
    command = parse(Probe, arguments, "probe")
    if not 0 < command.c < float("inf"):
        raise ValueError(f"--c {command.c} must be above 0")
    need("sklearn.linear_model")
    loaded = load_image_gpt(command.checkpoint, command.which)
    data = None if loaded.experiment is None else loaded.experiment.data
    if command.data is not None:
        data = ImageData(source=command.data)
    if not isinstance(data, ImageData):
        raise ValueError("a Hugging Face checkpoint has no data of its own; name some with --data")
    channels = loaded.model.config.channels
    parts = [read_images(data, part=part, channels=channels) for part in ("train", "validation")]
    for layer in command.layers or range(loaded.model.config.depth + 1):
        print(json.dumps(linear_probe(loaded, *parts, layer=layer, c=command.c, batch_size=command.batch_size)))
    return 0


def linear_probe(
    loaded: Loaded, train: ImageSet, held_out: ImageSet, *, layer: int, c: float = 1.0, batch_size: int = 64
) -> dict[str, float]:
    """The accuracy of scikit-learn's logistic regression on the mean hidden states after `layer` layers, each feature
    scaled to variance 1: of the pictures it was trained on, and of held-out ones."""
    linear, pipeline = need("sklearn.linear_model"), need("sklearn.pipeline")
    classifier = pipeline.make_pipeline(
        need("sklearn.preprocessing").StandardScaler(), linear.LogisticRegression(C=c, max_iter=1000)
    )
    asked = dataclasses.replace(loaded, task=PixelEmbedding(layer=layer))

    def features(images: ImageSet) -> np.ndarray:
        pictures = [images.read(i) for i in range(len(images))]
        return np.array([row["embedding"] for row in asked.predict(pictures, batch_size=batch_size)])

    vectors = features(train)
    classifier.fit(vectors, train.labels)
    return {
        "layer": layer,
        "accuracy": float(classifier.score(features(held_out), held_out.labels)),
        "train_accuracy": float(classifier.score(vectors, train.labels)),
        "examples": len(held_out),
    }


def load_image_gpt(checkpoint: str, which: Any = "best", dtype: str | None = None) -> Loaded:
    """The checkpoint; ValueError unless it is an Image GPT's."""
    loaded = load(checkpoint, which=which, dtype=dtype)
    if not isinstance(loaded.model.config, ImageGPTConfig):
        raise ValueError(f"{checkpoint} holds a {type(loaded.model).__name__}, not an Image GPT")
    return loaded


def prepared(loaded: Loaded, pictures: list[Any]) -> np.ndarray:
    """The uint8 pixels (pictures, height, width, channels) of files or pictures, as the processor makes them."""
    where = [show_path(p) if isinstance(p, str) else f"picture {i}" for i, p in enumerate(pictures)]
    inputs, prepare = Inputs(pictures, loaded.processor.channels, where), PrepareImage(loaded.processor)
    return np.stack([prepare(inputs[i])["pixels"] for i in range(len(inputs))])


def grid_of(rows: np.ndarray, *, scale: int = 4, gap: int = 4) -> Image.Image:
    """Pictures (rows, columns, height, width, channels) side by side on white, each pixel `scale` wide and high."""
    rows = rows.repeat(scale, axis=2).repeat(scale, axis=3)
    edges = [(0, 0), (0, 0), (0, gap), (0, gap), (0, 0)]
    padded = np.pad(rows, edges, constant_values=255)
    down, across, height, width, channels = padded.shape
    sheet = padded.swapaxes(1, 2).reshape(down * height, across * width, channels)
    sheet = np.pad(sheet, [(gap, 0), (gap, 0), (0, 0)], constant_values=255)
    return Image.fromarray(sheet if channels == 3 else sheet[..., 0])
