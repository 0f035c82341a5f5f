"""Image embeddings: one vector for each picture, of a model without a head."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from transformers_jax.tasks.base import Features, Row, Task
from transformers_jax.tasks.image_classification import ImageClassification, normalised


@dataclass(frozen=True)
class ImageEmbedding(Task):
    """Predicts only: `pooled` of a picture, as the model has it."""

    normalize: bool = False
    """Scale the vectors to length 1, so that products are cosines."""

    head: ClassVar = None
    data: ClassVar = None
    input_columns: ClassVar[tuple[str, ...]] = ImageClassification.input_columns

    def prepare(self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True) -> Any:
        raise ValueError("a model without a head can only be asked for embeddings; choose a task with one")

    def input_files(self, name: str) -> list[str] | None:
        return ImageClassification().input_files(name)

    def located(self, value: Any, folder: Path) -> Any:
        return ImageClassification().located(value, folder)

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        ImageClassification().check_input(value, processor, where, full=full)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Those of `ImageClassification`."""
        return ImageClassification().features(inputs, processor, config)

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        vectors = model(normalised(batch["pixels"], model.config)).pooled.astype(jnp.float32)
        if self.normalize:
            vectors /= jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return {"embedding": vectors}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"image": its path, if it has one, "embedding": [...]}`."""
        return [
            ({} if name is None else {"image": name}) | {"embedding": row["embedding"].tolist()}
            for name, row in zip(features.extra["names"], rows, strict=True)
        ]
