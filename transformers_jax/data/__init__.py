"""Where examples come from: text sources, tokenizers, corpora on disk, and the pipeline of batches."""

from transformers_jax.data.base import Data
from transformers_jax.data.corpus import Corpus, TextData, prepare_corpus
from transformers_jax.data.encoding import (
    EncodedWords,
    Template,
    Window,
    char_span,
    encode_texts,
    encode_windows,
    encode_words,
    split_words,
    token_span,
)
from transformers_jax.data.pipeline import (
    IGNORED_LABEL,
    Ragged,
    evaluation_batches,
    evaluation_blocks,
    token_blocks,
    training_batches,
)
from transformers_jax.data.text_sources import TextSource, open_text
from transformers_jax.data.tokenizers import Pieces, TextStream, Tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Corpus",
    "Data",
    "EncodedWords",
    "Pieces",
    "Ragged",
    "Template",
    "TextData",
    "TextSource",
    "TextStream",
    "Tokenizer",
    "Window",
    "char_span",
    "encode_texts",
    "encode_windows",
    "encode_words",
    "evaluation_batches",
    "evaluation_blocks",
    "open_text",
    "prepare_corpus",
    "split_words",
    "token_blocks",
    "token_span",
    "training_batches",
]
