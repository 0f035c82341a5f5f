"""Pixel modelling: predict the next pixel of a picture, whose colours are those of a palette (Chen et al. 2020)."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8

from transformers_jax.data import Augmentation, ImageData, ImageProcessor, ImageSet, read_images
from transformers_jax.data.image_examples import AugmentImage, ImageExamples, PrepareImage
from transformers_jax.data.image_processor import Resampling
from transformers_jax.generation import Sampling, generate
from transformers_jax.generation.decode import DEFAULT
from transformers_jax.models import ImageGPTConfig, LanguageModel
from transformers_jax.models.base import Size, as_size
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.tasks.base import Examples, Features, Row, abstract_arrays, fingerprint
from transformers_jax.tasks.image_task import ImageTask
from transformers_jax.tasks.language_modeling import cross_entropy

SAMPLED = 2000
"""Pictures of which a palette is made, and the histograms that a model is compared with."""
SAMPLED_PIXELS = 200_000
"""Pixels of them that k-means sees."""


@dataclass(frozen=True)
class PixelModeling(ImageTask):
    """Train an Image GPT on pictures; each pixel of held-out ones is scored once."""

    image_size: Size | None = None
    """Size of the pictures in pixels, height and width or one number for both. None: the checkpoint's, or the model's.
    Positions of a checkpoint are resized to it."""
    resampling: Resampling = "bilinear"
    """Without a checkpoint, the filter that resizes pictures: nearest, bilinear, bicubic, box, hamming, lanczos."""
    augmentation: Augmentation = Augmentation()
    """What is done to each picture before a model is trained on it."""

    head: ClassVar = LanguageModel
    data: ClassVar = ImageData

    def __post_init__(self):
        if self.image_size is not None and min(as_size(self.image_size)) < 1:
            raise ValueError(f"task.image_size={self.image_size} must be at least 1 pixel")

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        """Without a processor, a palette of `config.clusters` colours is made of the pictures to train on."""
        if not isinstance(data, ImageData):
            raise ValueError(f"pixel modelling reads ImageData, not {type(data).__name__}")
        check_config(config)
        size = as_size(config.image_size if self.image_size is None else self.image_size)
        train, held_out = (read_images(data, part=part, channels=config.channels) for part in ("train", "validation"))
        given = processor is not None
        if processor is None:
            half = (0.5,) * config.channels
            processor = ImageProcessor(
                size, channels=config.channels, resize=size, resampling=self.resampling, mean=half, std=half
            )
            processor = processor.with_palette(_some_pixels(train, processor), config.clusters)
        elif self.image_size is not None:
            processor = processor.resized(size)
        colours = check_palette(processor)
        facts = {
            "pictures": f"{data.source}: {len(train):,} to train on, {len(held_out):,} held out",
            "processor": processor.describe() + (", of the checkpoint" if given else ""),
        }
        if training:
            loss = histogram_loss(_some_ids(train, processor), _some_ids(held_out, processor), colours)
            facts["histogram"] = f"a loss of {loss:.4f} nats a pixel, by how often each place has each colour"
        to_ids = ToIds(processor)
        pictures = grain.MapDataset.source(_examples(train)).random_map(
            AugmentImage(self.augmentation, processor), seed=seed
        )
        return Examples(
            train=pictures.map(to_ids) if training else None,
            validation=grain.MapDataset.source(_examples(held_out)).map(PrepareImage(processor)).map(to_ids),
            processor=processor,
            fingerprint=fingerprint([train.fingerprint, held_out.fingerprint]),
            items_per_example=math.prod(processor.size),
            item="pixels",
            facts=facts,
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        check_config(config)
        processor = examples.processor
        size = getattr(processor, "size", config.grid)  # a plan has no pictures
        palette = getattr(processor, "palette", None)
        if palette is not None and len(palette) != config.clusters:
            raise ValueError(
                f"the palette has {len(palette)} colours but model.clusters is {config.clusters}; they must be equal"
            )
        if self.image_size is not None:
            size = as_size(self.image_size)
        return config if size == config.grid else dataclasses.replace(config, image_size=size)

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = config.places
        return abstract_arrays(batch_size, input_ids=[length], labels=[length])

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats, as (sum, number of pixels)."""
        return cross_entropy(model(batch["input_ids"], key=key).logits, batch["labels"])

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        loss, pixels = self.loss(model, batch)
        return {"loss": loss, "pixels": pixels}, {}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss in nats a pixel, the same in bits, and the number of pixels."""
        loss = totals["loss"] / totals["pixels"]
        return {"loss": loss, "bits_per_pixel": loss / math.log(2), "pixels": totals["pixels"]}

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Those of every `ImageTask`, as colours."""
        check_config(config)
        if self.image_size is not None:
            processor = processor.resized(as_size(self.image_size))
        check_palette(processor)
        features = super().features(inputs, processor, config)
        assert isinstance(features.dataset, grain.MapDataset)  # pictures are no texts of unlike length
        return Features(features.dataset.map(ToIds(processor)), extra=features.extra)

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        logits = model(batch["input_ids"]).logits
        return {"loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean(axis=-1)}

    def prediction(self, row: Row, config: Any) -> dict[str, Any]:
        """`{"loss": nats a pixel, "bits_per_pixel"}`: how likely the picture is."""
        return {"loss": float(row["loss"]), "bits_per_pixel": float(row["loss"]) / math.log(2)}


@dataclass(frozen=True)
class PixelEmbedding(PixelModeling):
    """Predicts only: the mean hidden state of a picture, at a chosen depth of an Image GPT."""

    layer: int | None = None
    """After how many layers: 0 is the embeddings, the model's depth what the output layer reads. None: half of them,
    where Chen et al. find the best features."""

    head: ClassVar = None
    data: ClassVar = None

    def prepare(self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True) -> Any:
        raise ValueError("embeddings can only be asked for; PixelModeling trains")

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        (vectors,) = pooled_features(model, batch["input_ids"], [self.layer]).values()
        return {"embedding": vectors}

    def prediction(self, row: Row, config: Any) -> dict[str, Any]:
        """`{"embedding": [...]}`."""
        return {"embedding": row["embedding"].tolist()}


def pooled_features(
    model: Any, input_ids: Int[Array, "batch length"], layers: Collection[int | None]
) -> dict[int, Float[Array, "batch dim"]]:
    """The mean over all places of the hidden states after each of `layers` (see `PixelEmbedding.layer`), in float32.

    ValueError for a layer that the model does not have.
    """
    depth = model.config.depth
    wanted = [depth // 2 if layer is None else layer for layer in layers]
    for layer in wanted:
        if not 0 <= layer <= depth:
            raise ValueError(f"layer={layer} must be between 0 and the model's depth of {depth}")
    output = model(input_ids, capture=("hidden_states",))
    # transformers' order: the input of each layer, and the last layer's output after the norm.
    return {
        layer: jnp.mean((output.hidden if layer == depth else output.hidden_states[layer]).astype(jnp.float32), axis=1)
        for layer in wanted
    }


def sample_pictures(
    model: Any,
    processor: ImageProcessor,
    *,
    count: int,
    sampling: Sampling = DEFAULT,
    key: PRNGKey | None = None,
    batch_size: int = 64,
) -> UInt8[np.ndarray, "count height width channels"]:
    """Pictures that the language model of pixels makes from nothing. Raises what `generate` raises."""
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    nothing = np.zeros((count, 0), np.int32)
    return _continued(model, processor, nothing, sampling=sampling, key=key, batch_size=batch_size)


def complete_pictures(
    model: Any,
    processor: ImageProcessor,
    pixels: UInt8[np.ndarray, "pictures height width channels"],
    *,
    given: float = 0.5,
    samples: int = 4,
    sampling: Sampling = DEFAULT,
    key: PRNGKey | None = None,
    batch_size: int = 64,
) -> UInt8[np.ndarray, "pictures samples height width channels"]:
    """Several completions of each picture, of which the upper part `given`, a share of its rows, is kept.

    The kept pixels are there in the colours of the palette. `pixels` are the processor's. ValueError for a share that
    keeps no row or all of them, and for pictures of another size.
    """
    rows = rows_given(given, processor.size[0])
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    check_palette(processor)
    known = processor.ids(pixels)[:, : rows * processor.size[1]]
    repeated = np.repeat(known, samples, axis=0)
    made = _continued(model, processor, repeated, sampling=sampling, key=key, batch_size=batch_size)
    return made.reshape(len(pixels), samples, *made.shape[1:])


def rows_given(given: float, height: int) -> int:
    """The number of rows that a share of `height` rows is; ValueError for none or all."""
    rows = round(given * height)
    if not 1 <= rows < height:
        raise ValueError(
            f"given={given} of {height} rows keeps {max(0, min(rows, height))} of them; at least one must be given and "
            "one made"
        )
    return rows


def _continued(
    model: Any, processor: ImageProcessor, known: np.ndarray, *, sampling: Sampling, key: Any, batch_size: int
) -> np.ndarray:
    """Whole pictures of the first colours `known` (pictures, pixels). Each draws with a key of its own place."""
    config = model.config
    check_config(config)
    colours = check_palette(processor)
    if colours != config.clusters or processor.size != config.grid:
        raise ValueError(
            f"the processor makes pictures of {processor.size} in {colours} colours, but the model knows {config.grid} "
            f"in {config.clusters}"
        )
    start = np.full((len(known), 1), config.bos_id, np.int32)
    prompts, written = np.concatenate([start, known], axis=1), []
    for first in range(0, len(prompts), batch_size):
        part = None if key is None else jax.random.fold_in(key, first)
        rows = prompts[first : first + batch_size]
        new = config.places - known.shape[1]
        tokens = generate(model, rows, max_new_tokens=new, sampling=sampling, key=part).tokens
        written.append(np.concatenate([rows[:, 1:], tokens], axis=1))
    return processor.pixels(np.concatenate(written))


def histogram_loss(train: np.ndarray, held_out: np.ndarray, colours: int) -> float:
    """The mean cross-entropy in nats of the colours `held_out` (pictures, pixels) when each place has the shares that
    its colours have in `train`, each counted once more than it occurs: what no look at other pixels gives."""
    places = np.arange(train.shape[1])
    numbers = (places * colours + train).ravel()
    counts = np.bincount(numbers, minlength=len(places) * colours).reshape(-1, colours) + 1.0
    log_shares = np.log(counts / counts.sum(axis=-1, keepdims=True))
    return float(-log_shares[places, held_out].mean())


def check_config(config: Any) -> None:
    """ValueError unless this is an Image GPT's."""
    if not isinstance(config, ImageGPTConfig):
        raise ValueError(f"pixel modelling needs an Image GPT, not a {type(config).__name__}")


def check_palette(processor: ImageProcessor) -> int:
    """The number of colours; ValueError without a palette."""
    if processor.palette is None:
        raise ValueError(
            "the image processor has no palette (clusters in preprocessor_config.json); take the one that belongs to "
            "the model"
        )
    return len(processor.palette)


@dataclass(frozen=True)
class ToIds:
    """Pixels to what the model reads, the start token and then colours, and what it is to predict."""

    processor: ImageProcessor

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        assert self.processor.palette is not None  # it was looked at
        ids, start = self.processor.ids(example["pixels"]), len(self.processor.palette)
        return {"input_ids": np.concatenate([[start], ids[:-1]], dtype=np.int32), "labels": ids}


def _examples(images: ImageSet) -> ImageExamples:
    """All of them; their classes do not matter."""
    return ImageExamples(images, range(len(images)), [0] * len(images))


def _some_of(images: ImageSet, processor: ImageProcessor) -> np.ndarray:
    """The prepared pixels of up to `SAMPLED` pictures, evenly spread over all, the same ones every time."""
    chosen = np.unique(np.linspace(0, len(images) - 1, min(SAMPLED, len(images))).round().astype(int))
    examples, prepare = _examples(images), PrepareImage(processor)
    return np.stack([prepare(examples[i])["pixels"] for i in chosen.tolist()])


def _some_pixels(images: ImageSet, processor: ImageProcessor) -> np.ndarray:
    pixels = _some_of(images, processor).reshape(-1, processor.channels)
    step = -(-len(pixels) // SAMPLED_PIXELS)
    # RandomState's stream, unlike default_rng's, is promised never to change.
    return pixels[np.random.RandomState(0).permutation(len(pixels))[: len(pixels) // step]]


def _some_ids(images: ImageSet, processor: ImageProcessor) -> np.ndarray:
    return processor.ids(_some_of(images, processor))
