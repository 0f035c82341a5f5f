"""RoBERTa of transformers: BERT's layers under another prefix, positions that start behind the padding's row, and
heads of its own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers_jax.models import (
    Bert,
    BertConfig,
    MaskedLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from transformers_jax.pretrained import bert
from transformers_jax.pretrained.rules import Family, layer_norm, linear

DEFAULTS = {"vocab_size": 50265, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
"""Values that transformers gives missing fields, where they are not BERT's."""


def read_config(fields: dict[str, Any]) -> BertConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows."""
    for name, value in DEFAULTS.items():
        fields.setdefault(name, value)
    if fields["pad_token_id"] is None:
        raise ValueError("config.json sets pad_token_id to null, but positions are counted from it")
    offset = fields["pad_token_id"] + 1
    rows = fields.setdefault("max_position_embeddings", 512)
    if rows <= offset:
        raise ValueError(f"config.json sets max_position_embeddings to {rows}, of which the first {offset} are unused")
    fields["max_position_embeddings"] = rows - offset
    return dataclasses.replace(bert.read_config(fields), position_offset=offset, classifier_activation="tanh")


def write_config(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that are RoBERTa's own."""
    rows = config.max_length + config.position_offset
    return bert.write_config(config) | {"max_position_embeddings": rows}


def fixed(config: BertConfig, head: type | None) -> Mapping[str, Any]:
    positions = {"pad_id": config.position_offset - 1}
    if head is MaskedLanguageModel:
        return positions | {"activation": "gelu", "next_sentence": False}  # in the head, whatever the layers have
    if head is SequenceClassifier:
        return positions | {"classifier_activation": "tanh", "pooling": "first", "pooler": False}
    return positions


ROBERTA = Family(
    model_type="roberta",
    prefix="roberta.",
    backbone=Bert,
    rules=lambda config: bert.RULES,
    architectures=(
        bert.architecture("RobertaModel"),
        bert.architecture(
            "RobertaForMaskedLM",
            MaskedLanguageModel,
            **bert.read_out(
                "lm_head.decoder",
                "lm_head.bias",
                *linear("lm_head.dense", "dense"),
                *layer_norm("lm_head.layer_norm", "norm"),
            ),
        ),
        bert.architecture(
            "RobertaForSequenceClassification",
            SequenceClassifier,
            rules=(*linear("classifier.dense", "dense"), *linear("classifier.out_proj", "head")),
        ),
        bert.architecture("RobertaForTokenClassification", TokenClassifier, rules=bert.TOKEN_CLASSIFIER),
        bert.architecture("RobertaForQuestionAnswering", SpanPredictor, rules=bert.SPAN_PREDICTOR),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=bert.BUFFERS,
    renamed=bert.OLD_NAMES,
    spare=(*bert.POOLER, r"lm_head\.bias"),
    fits=lambda config: config.token_types > 0 and config.position_offset > 0,
    fixed=fixed,
)
