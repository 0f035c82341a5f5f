"""Text embeddings: one vector for each text, of a model without a head."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from transformers_jax.data import encode_texts
from transformers_jax.nn import Pooling, pool
from transformers_jax.tasks.base import Features, Row, Task, model_inputs, ragged, text_length


@dataclass(frozen=True)
class TextEmbedding(Task):
    """Predicts only: the pooled hidden states of a text, of length 1, as sentence-transformers' models give them."""

    pooling: Pooling = "mean"
    """What stands for the text: the mean over its tokens, the first, or the last."""
    normalize: bool = True
    """Scale the vectors to length 1, so that products are cosines."""
    length: int | None = None
    """Longest text in tokens, special ones included; what is longer is cut. None: the longest the model takes."""

    head: ClassVar = None
    data: ClassVar = None

    def prepare(self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True) -> Any:
        raise ValueError("a model without a head can only be asked for embeddings; choose a task with one")

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Texts, or dictionaries with "text"."""
        texts = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        length = text_length(self.length, config)
        return Features(ragged(encode_texts(processor, texts, max_length=length), processor, length))

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        hidden = model(**model_inputs(model.config, batch)).hidden
        vectors = pool(hidden, batch["attention_mask"], how=self.pooling).astype(jnp.float32)
        if self.normalize:
            vectors /= jnp.maximum(jnp.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
        return {"embedding": vectors}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"embedding": [...]}`."""
        return [{"embedding": row["embedding"].tolist()} for row in rows]


def _read_input(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'{where} is {value!r:.60}, not a text or {{"text": ...}}')
    return text
