"""Model families, each composed of the blocks in `transformers_jax.nn`."""

from transformers_jax.models.base import ImageConfig, ModelConfig, ProblemType
from transformers_jax.models.bert import Bert, BertConfig
from transformers_jax.models.davit import DaViT, DaViTConfig
from transformers_jax.models.encoder_decoder import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.models.gpt import GPT, GPTConfig
from transformers_jax.models.heads import (
    ImageClassifier,
    LanguageModel,
    MaskedLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from transformers_jax.models.image_gpt import ImageGPT, ImageGPTConfig
from transformers_jax.models.output import Cache, ModelOutput
from transformers_jax.models.recurrent_seq2seq import RecurrentSeq2Seq, RecurrentSeq2SeqConfig
from transformers_jax.models.swin import Swin, SwinConfig
from transformers_jax.models.vit import ViT, ViTConfig

__all__ = [
    "GPT",
    "Bert",
    "BertConfig",
    "Cache",
    "DaViT",
    "DaViTConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "GPTConfig",
    "ImageClassifier",
    "ImageConfig",
    "ImageGPT",
    "ImageGPTConfig",
    "LanguageModel",
    "MaskedLanguageModel",
    "ModelConfig",
    "ModelOutput",
    "ProblemType",
    "RecurrentSeq2Seq",
    "RecurrentSeq2SeqConfig",
    "Seq2SeqLanguageModel",
    "SequenceClassifier",
    "SpanPredictor",
    "Swin",
    "SwinConfig",
    "TokenClassifier",
    "ViT",
    "ViTConfig",
]
