"""Examples of pictures: read, then prepared for evaluation or changed for training. Worker processes do this: it needs
nothing of the models."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transformers_jax.data.augmentation import Augmentation
from transformers_jax.data.image_files import decode_image
from transformers_jax.data.image_processor import ImageProcessor
from transformers_jax.data.images import ImageSet


class ImageExamples:
    """Random access to pictures with their class numbers."""

    def __init__(self, images: ImageSet, indices: Sequence[int], targets: Sequence[int]):
        self.images, self.indices, self.targets = images, np.asarray(indices), np.asarray(targets, np.int32)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = int(self.indices[index])
        image, where = self.images.read(number), self.images.where(number)
        return {"image": image, "where": where, "labels": self.targets[index]}


class Inputs:
    """Random access to pictures that someone asks about; `where` names them in errors."""

    def __init__(self, images: Sequence[Any], channels: int, where: Sequence[str]):
        self.images, self.channels, self.where = images, channels, where

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = decode_image(self.images[index], channels=self.channels, where=self.where[index])
        return {"image": image, "where": self.where[index]}


@dataclass(frozen=True)
class PrepareImage:
    """What evaluation does to a picture."""

    processor: ImageProcessor

    def __call__(self, example: dict[str, Any]) -> dict[str, Any]:
        with _naming(example["where"]):
            pixels = self.processor(example["image"])
        return {"pixels": pixels} | {name: value for name, value in example.items() if name not in ("image", "where")}


@dataclass(frozen=True)
class AugmentImage:
    """What training does to a picture."""

    augmentation: Augmentation
    processor: ImageProcessor

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        with _naming(example["where"]):
            pixels = self.augmentation(example["image"], self.processor, rng)
        return {"pixels": pixels, "labels": example["labels"]}


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """An error about a picture begins with where it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
