"""Image classification: one class for a picture."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, UInt8

from transformers_jax.data import (
    Augmentation,
    ImageData,
    ImageProcessor,
    ImageSet,
    read_images,
)
from transformers_jax.data.image_examples import AugmentImage, ImageExamples, PrepareImage
from transformers_jax.data.image_processor import Resampling
from transformers_jax.models import ImageClassifier
from transformers_jax.models.base import ImageConfig, Size, as_size
from transformers_jax.tasks.base import Examples, Features, Row, abstract_arrays, fingerprint, usable
from transformers_jax.tasks.image_task import ImageTask
from transformers_jax.tasks.labels import LabelNames, show_counts
from transformers_jax.tasks.metrics import class_metrics, need
from transformers_jax.tasks.mixing import mix_images
from transformers_jax.tasks.reports import contact_sheet, write_confusion_matrix, write_jsonl

KEPT = 5
"""Classes whose probabilities are kept of each picture."""
ON_SHEET = 48
"""Mistakes on a contact sheet."""


@dataclass(frozen=True)
class ImageClassification(ImageTask):
    """Train a model to name the class of a picture."""

    image_size: Size | None = None
    """Size of the pictures in pixels, height and width or one number for both. None: the checkpoint's, or the model's.
    Learned positions of a checkpoint are resized to it."""
    crop_fraction: float = 1.0
    """Without a checkpoint, evaluation resizes the shorter side to the size divided by this, and keeps the centre."""
    resampling: Resampling = "bilinear"
    """Without a checkpoint, the filter that resizes pictures: nearest, bilinear, bicubic, box, hamming, lanczos."""
    augmentation: Augmentation = Augmentation()
    """What is done to each picture before a model is trained on it."""
    mixup: float = 0.0
    """Mix each picture with another one, and their labels: the share is drawn from Beta(mixup, mixup). 0: off."""
    cutmix: float = 0.0
    """Put a part of another picture into each, and mix their labels: its share is drawn from Beta(cutmix, cutmix). With
    mixup, each batch draws one of the two. 0: off."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes."""
    new_head: bool = False
    """Start a new head for the labels of the data, even if the checkpoint has a classifier."""

    head: ClassVar = ImageClassifier
    data: ClassVar = ImageData

    def __post_init__(self):
        if self.image_size is not None and min(as_size(self.image_size)) < 1:
            raise ValueError(f"task.image_size={self.image_size} must be at least 1 pixel")
        if not 0 < self.crop_fraction <= 1:
            raise ValueError(f"task.crop_fraction={self.crop_fraction} must be above 0 and at most 1")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        for name in ("mixup", "cutmix"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"task.{name}={getattr(self, name)} must not be negative")

    @property
    def metric(self) -> str:
        return "accuracy"

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, ImageData):
            raise ValueError(f"image classification reads ImageData, not {type(data).__name__}")
        if not isinstance(config, ImageConfig):
            raise ValueError(f"image classification needs an image model such as ViT, not a {type(config).__name__}")
        need("sklearn.metrics")
        size = as_size(config.image_size if self.image_size is None else self.image_size)
        given = processor is not None
        if processor is None:
            processor = ImageProcessor.standard(
                size,
                channels=config.channels,
                mean=config.image_mean,
                std=config.image_std,
                crop_fraction=self.crop_fraction,
                resampling=self.resampling,
            )
        elif self.image_size is not None:
            processor = processor.resized(size)
        train, held_out = (read_images(data, part=part, channels=config.channels) for part in ("train", "validation"))
        names = LabelNames(config.labels or LabelNames.of(train.labels).names)
        parts = {}
        for name, images in (("train", train), ("validation", held_out)):

            def target(i: int, images: ImageSet = images) -> int:
                try:
                    return names.number(images.labels[i], images.where(i))
                except ValueError as error:
                    hint = "; task.new_head starts a head for the classes of the data" if config.labels else ""
                    raise ValueError(f"{error}{hint}") from None

            parts[name] = usable(data, range(len(images)), target, noun="pictures")
        indices, targets = parts["train"]
        if training:
            names.check_all_occur(targets, data.source)
        held_out_indices, held_out_targets = parts["validation"]
        pictures = grain.MapDataset.source(ImageExamples(train, indices, targets)).random_map(
            AugmentImage(self.augmentation, processor), seed=seed
        )
        held_out_pictures = grain.MapDataset.source(ImageExamples(held_out, held_out_indices, held_out_targets))
        return Examples(
            train=pictures if training else None,
            validation=held_out_pictures.map(PrepareImage(processor)),
            processor=processor,
            fingerprint=fingerprint([train.fingerprint, held_out.fingerprint]),
            items_per_example=1,
            item="images",
            labels=names.names,
            facts={
                "labels": show_counts(names, targets),
                "pictures": f"{data.source}: {len(indices):,} to train on, {len(held_out_indices):,} held out",
                "processor": processor.describe() + (", of the checkpoint" if given else ""),
            },
            extra={"pictures": held_out_pictures, "where": [held_out.where(i) for i in held_out_indices]},
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        if config.problem_type not in (None, "single_label_classification"):
            raise ValueError(
                f"the checkpoint's classifier is for {config.problem_type}, but this task tells one class; set "
                "task.new_head to start another"
            )
        processor = examples.processor
        size = config.image_size if as_size(config.image_size) == processor.size else processor.size
        return dataclasses.replace(
            config,
            labels=examples.labels,
            problem_type="single_label_classification",
            image_size=size,
            image_mean=processor.mean,
            image_std=processor.std,
        )

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        size = as_size(config.image_size if self.image_size is None else self.image_size)
        pixels = jax.ShapeDtypeStruct((batch_size, *size, config.channels), np.uint8)
        return {"pixels": pixels} | abstract_arrays(batch_size, labels=[])

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy in nats as (sum, number of pictures). A label of -100 does not count. `key` also decides how
        pictures are mixed."""
        labels = batch["labels"]
        pixels = normalised(batch["pixels"], model.config)
        targets = jax.nn.one_hot(labels, len(model.config.labels))
        if key is not None and (self.mixup or self.cutmix):
            mixing_key, key = jax.random.split(key)
            pixels, targets = mix_images(pixels, targets, mixing_key, mixup=self.mixup, cutmix=self.cutmix)
        logits = model(pixels, key=key).logits
        losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, self.label_smoothing))
        counted = labels >= 0
        return jnp.sum(jnp.where(counted, losses, 0.0)), jnp.sum(counted.astype(jnp.float32))

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        logits, labels = model(normalised(batch["pixels"], model.config)).logits, batch["labels"]
        counted = labels >= 0
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        sums = {"loss": jnp.sum(jnp.where(counted, losses, 0.0)), "examples": jnp.sum(counted.astype(jnp.float32))}
        return sums, {**_most_probable(logits), "labels": labels}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss (without smoothing), accuracy (top-1) and the other metrics of classes, top-5 accuracy where there are
        more than five classes, number of pictures."""
        labels, classes = (np.stack([row[name] for row in rows]) for name in ("labels", "classes"))
        metrics = class_metrics(labels, classes[:, 0], config.labels)
        if len(config.labels) > KEPT:
            metrics["top5_accuracy"] = float(np.mean(np.any(classes == labels[:, None], axis=-1)))
        return {"loss": totals["loss"] / totals["examples"], **metrics, "examples": totals["examples"]}

    def report(self, rows: Sequence[Row], extra: Mapping[str, Any], config: Any, directory: Path) -> list[Path]:
        """Writes `predictions.jsonl`, `confusion_matrix.csv` and, if there are any, `mistakes.png`: the most confident
        ones, each with what it is and what the model says."""
        names, files = config.labels, [directory / "predictions.jsonl", directory / "confusion_matrix.csv"]
        lines = [
            {"image": where, "true": names[int(row["labels"])], **_prediction(row, names)}
            for row, where in zip(rows, extra["where"], strict=True)
        ]
        write_jsonl(files[0], lines)
        labels = np.array([row["labels"] for row in rows])
        write_confusion_matrix(files[1], labels, np.array([row["classes"][0] for row in rows]), names)
        wrong = [i for i, line in enumerate(lines) if line["label"] != line["true"]]
        wrong.sort(key=lambda i: -lines[i]["probability"])
        if wrong:
            files.append(directory / "mistakes.png")
            captions = [
                f"{one['true']} > {one['label']} {one['probability']:.0%}" for one in map(lines.__getitem__, wrong)
            ]
            pictures = [extra["pictures"][i]["image"] for i in wrong[:ON_SHEET]]
            contact_sheet(pictures, captions[:ON_SHEET]).save(files[2])
        return files

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Those of every `ImageTask`, in the size of this one."""
        return super().features(
            inputs, processor if self.image_size is None else processor.resized(self.image_size), config
        )

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        return _most_probable(model(normalised(batch["pixels"], model.config)).logits)

    def prediction(self, row: Row, config: Any) -> dict[str, Any]:
        """`{"label", "probability", "probabilities": {label: probability}}`, where the last has the five likeliest."""
        return _prediction(row, config.labels)


def normalised(pixels: UInt8[Array, "batch height width channels"], config: ImageConfig) -> Float[Array, "..."]:
    """What the model takes, of pixels from 0 to 255."""
    mean, std = (np.asarray(value, np.float32) for value in (config.image_mean, config.image_std))
    return ((pixels.astype(jnp.float32) / 255 - mean) / std).astype(jnp.dtype(config.dtype))


def _most_probable(logits: jax.Array) -> dict[str, jax.Array]:
    values, classes = jax.lax.top_k(jax.nn.softmax(logits), min(KEPT, logits.shape[-1]))
    return {"classes": classes, "probabilities": values}


def _prediction(row: Row, names: Sequence[str]) -> dict[str, Any]:
    each = {
        names[int(number)]: round(float(p), 6) for number, p in zip(row["classes"], row["probabilities"], strict=True)
    }
    label = next(iter(each))
    return {"label": label, "probability": each[label], "probabilities": each}
