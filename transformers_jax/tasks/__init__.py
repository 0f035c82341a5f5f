"""Tasks: one objective a file, from examples to loss, metrics and predictions."""

from typing import Any

from transformers_jax.models import ImageConfig, ImageGPTConfig
from transformers_jax.tasks.base import LOWER_IS_BETTER, Examples, Features, Task
from transformers_jax.tasks.image_classification import ImageClassification
from transformers_jax.tasks.image_embedding import ImageEmbedding
from transformers_jax.tasks.language_modeling import LanguageModeling, cross_entropy
from transformers_jax.tasks.masked_lm import MaskedLM
from transformers_jax.tasks.pixel_modeling import (
    PixelEmbedding,
    PixelModeling,
    complete_pictures,
    pooled_features,
    sample_pictures,
)
from transformers_jax.tasks.span_extraction import SpanExtraction
from transformers_jax.tasks.text_classification import TextClassification
from transformers_jax.tasks.text_embedding import TextEmbedding
from transformers_jax.tasks.token_classification import TokenClassification
from transformers_jax.tasks.translation import Translation

__all__ = [
    "LOWER_IS_BETTER",
    "Examples",
    "Features",
    "ImageClassification",
    "ImageEmbedding",
    "LanguageModeling",
    "MaskedLM",
    "PixelEmbedding",
    "PixelModeling",
    "SpanExtraction",
    "Task",
    "TextClassification",
    "TextEmbedding",
    "TokenClassification",
    "Translation",
    "complete_pictures",
    "cross_entropy",
    "pooled_features",
    "sample_pictures",
    "task_of",
]

TASKS: tuple[type[Task], ...] = (
    LanguageModeling,
    MaskedLM,
    TextClassification,
    TokenClassification,
    SpanExtraction,
    ImageClassification,
    Translation,
)


def task_of(model: Any) -> Task:
    """The task that the head of a model is for, with its default settings."""
    if isinstance(model.config, ImageGPTConfig):
        if not hasattr(model, "backbone"):
            return PixelEmbedding()
        if type(model) is PixelModeling.head:
            return PixelModeling()
        raise ValueError(f"there is no task for a {type(model).__name__} of an Image GPT; from_pretrained reads it")
    if not hasattr(model, "backbone"):
        return ImageEmbedding() if isinstance(model.config, ImageConfig) else TextEmbedding()
    for task in TASKS:
        if type(model) is task.head:
            return task()
    raise ValueError(f"there is no task for a {type(model).__name__}")
