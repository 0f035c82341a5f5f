"""Model families, each composed of the blocks in `transformers_jax.nn`."""

from transformers_jax.models.base import ModelConfig
from transformers_jax.models.gpt import GPT, GPTConfig
from transformers_jax.models.heads import LanguageModel
from transformers_jax.models.output import Cache, ModelOutput

__all__ = ["GPT", "Cache", "GPTConfig", "LanguageModel", "ModelConfig", "ModelOutput"]
