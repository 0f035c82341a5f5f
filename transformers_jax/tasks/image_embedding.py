"""Image embeddings: one vector for each picture, of a model without a head."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from transformers_jax.tasks.base import Row
from transformers_jax.tasks.image_classification import normalised
from transformers_jax.tasks.image_task import ImageTask


@dataclass(frozen=True)
class ImageEmbedding(ImageTask):
    """Predicts only: `pooled` of a picture, as the model has it."""

    normalize: bool = False
    """Scale the vectors to length 1, so that products are cosines."""

    head: ClassVar = None
    data: ClassVar = None

    def prepare(self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True) -> Any:
        raise ValueError("a model without a head can only be asked for embeddings; choose a task with one")

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        vectors = model(normalised(batch["pixels"], model.config)).pooled.astype(jnp.float32)
        if self.normalize:
            vectors /= jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return {"embedding": vectors}

    def prediction(self, row: Row, config: Any) -> dict[str, Any]:
        """`{"embedding": [...]}`."""
        return {"embedding": row["embedding"].tolist()}
