"""Tasks: one objective a file, from examples to loss, metrics and predictions."""

from transformers_jax.tasks.base import Examples, Task
from transformers_jax.tasks.language_modeling import LanguageModeling, cross_entropy

__all__ = ["Examples", "LanguageModeling", "Task", "cross_entropy"]
