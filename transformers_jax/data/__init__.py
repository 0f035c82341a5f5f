"""Where examples come from: text and labelled data, tokenizers, corpora on disk, and the pipeline of batches."""

from transformers_jax.data.augmentation import Augmentation
from transformers_jax.data.base import Data
from transformers_jax.data.classification import ClassificationData, LabelledText, read_classification
from transformers_jax.data.conll import EntityData, TaggedSentence, read_entities
from transformers_jax.data.corpus import Corpus, TextData, document_end, prepare_corpus, separator_id
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
from transformers_jax.data.image_files import check_image, decode_image
from transformers_jax.data.image_processor import ImageProcessor
from transformers_jax.data.images import ImageData, ImageSet, read_images
from transformers_jax.data.labelled import LabelledData, LabelledTextData
from transformers_jax.data.masking import Masking, SentencePairs, masked_tokens, text_blocks
from transformers_jax.data.packing import Packed, pack, pack_ragged, packed_documents, packed_texts, texts_in_row
from transformers_jax.data.palette import Palette
from transformers_jax.data.parallel import SentencePair, TranslationData, read_pairs
from transformers_jax.data.pipeline import (
    IGNORED_LABEL,
    Ragged,
    evaluation_batches,
    evaluation_blocks,
    token_blocks,
    token_budget,
    training_batches,
)
from transformers_jax.data.squad import Question, SpanData, read_questions
from transformers_jax.data.tables import Row, read_rows
from transformers_jax.data.text_sources import TextSource, open_text
from transformers_jax.data.tokenizers import Pieces, TextStream, Tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Augmentation",
    "ClassificationData",
    "Corpus",
    "Data",
    "EncodedWords",
    "EntityData",
    "ImageData",
    "ImageProcessor",
    "ImageSet",
    "LabelledData",
    "LabelledText",
    "LabelledTextData",
    "Masking",
    "Packed",
    "Palette",
    "Pieces",
    "Question",
    "Ragged",
    "Row",
    "SentencePair",
    "SentencePairs",
    "SpanData",
    "TaggedSentence",
    "Template",
    "TextData",
    "TextSource",
    "TextStream",
    "Tokenizer",
    "TranslationData",
    "Window",
    "char_span",
    "check_image",
    "decode_image",
    "document_end",
    "encode_texts",
    "encode_windows",
    "encode_words",
    "evaluation_batches",
    "evaluation_blocks",
    "masked_tokens",
    "open_text",
    "pack",
    "pack_ragged",
    "packed_documents",
    "packed_texts",
    "prepare_corpus",
    "read_classification",
    "read_entities",
    "read_images",
    "read_pairs",
    "read_questions",
    "read_rows",
    "separator_id",
    "split_words",
    "text_blocks",
    "texts_in_row",
    "token_blocks",
    "token_budget",
    "token_span",
    "training_batches",
]
