"""Tasks: one objective a file, from examples to loss, metrics and predictions."""

from typing import Any

from transformers_jax.tasks.base import LOWER_IS_BETTER, Examples, Features, Task
from transformers_jax.tasks.language_modeling import LanguageModeling, cross_entropy
from transformers_jax.tasks.text_classification import TextClassification

__all__ = [
    "LOWER_IS_BETTER",
    "Examples",
    "Features",
    "LanguageModeling",
    "Task",
    "TextClassification",
    "cross_entropy",
    "task_of",
]

TASKS: tuple[type[Task], ...] = (LanguageModeling, TextClassification)


def task_of(model: Any) -> Task:
    """The task that the head of a model is for, with its default settings."""
    for task in TASKS:
        if type(model) is task.head:
            return task()
    raise ValueError(f"there is no task for a {type(model).__name__}")
