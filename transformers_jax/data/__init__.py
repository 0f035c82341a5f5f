"""Where examples come from: text sources, tokenizers, corpora on disk, and the pipeline of batches."""

from transformers_jax.data.base import Data
from transformers_jax.data.corpus import Corpus, TextData, prepare_corpus
from transformers_jax.data.pipeline import (
    IGNORED_LABEL,
    evaluation_batches,
    evaluation_blocks,
    token_blocks,
    training_batches,
)
from transformers_jax.data.text_sources import TextSource, open_text
from transformers_jax.data.tokenizers import TextStream, Tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Corpus",
    "Data",
    "TextData",
    "TextSource",
    "TextStream",
    "Tokenizer",
    "evaluation_batches",
    "evaluation_blocks",
    "open_text",
    "prepare_corpus",
    "token_blocks",
    "training_batches",
]
