"""DistilBERT of transformers: BERT without token types and pooler, and names of its own."""

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
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
)
from transformers_jax.pretrained.rules import Family, layer_norm, linear

LAYER, STACK = "transformer.layer.{layer}.", "stack.layers.{layer}."

RULES = (
    *bert.EMBEDDINGS,
    *linear(LAYER + "attention.q_lin", STACK + "attention.query"),
    *linear(LAYER + "attention.k_lin", STACK + "attention.key"),
    *linear(LAYER + "attention.v_lin", STACK + "attention.value"),
    *linear(LAYER + "attention.out_lin", STACK + "attention.output"),
    *layer_norm(LAYER + "sa_layer_norm", STACK + "attention_norm"),
    *linear(LAYER + "ffn.lin1", STACK + "mlp.up"),
    *linear(LAYER + "ffn.lin2", STACK + "mlp.down"),
    *layer_norm(LAYER + "output_layer_norm", STACK + "mlp_norm"),
)

FIELDS = {
    "vocab_size": ("vocab_size", 30522),
    "dim": ("dim", 768),
    "n_layers": ("depth", 6),
    "n_heads": ("heads", 12),
    "hidden_dim": ("mlp_dim", 3072),
    "max_position_embeddings": ("max_length", 512),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
    "seq_classif_dropout": ("classifier_dropout", 0.2),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
    "bos_token_id": ("bos_id", None),
    "eos_token_id": ("eos_id", None),
    "pad_token_id": ("pad_id", 0),
}

ALIASES = {"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}

UNUSED = (
    "sinusoidal_pos_embds",  # how the position table was initialised; the file holds it either way
    "tie_weights_",
    "qa_dropout",  # our span predictor has no dropout of its own
)

FIXED: dict[str, Any] = {"norm_epsilon": 1e-12, "pooler": False}


def read_config(fields: dict[str, Any]) -> BertConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows."""
    for alias, name in ALIASES.items():
        if alias in fields:
            fields[name] = fields.pop(alias)
    for name in UNUSED:
        fields.pop(name, None)
    activation = take_activation(fields, "activation", "gelu")
    values = take_fields(fields, FIELDS)
    return BertConfig(activation=activation, token_types=0, classifier_activation="relu", **FIXED, **values)


def write_config(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that are DistilBERT's own."""
    dropout = config.dropout if config.classifier_dropout is None else config.classifier_dropout
    written = {"hidden_dim": config.mlp_dim or 4 * config.dim, "seq_classif_dropout": dropout}
    return {"activation": give_activation(config.activation), **give_fields(config, FIELDS), **written}


def configure_token_classifier(config: BertConfig, names: Any) -> BertConfig:
    # seq_classif_dropout is a sequence classifier's only.
    return bert.configure(dataclasses.replace(config, classifier_dropout=None), TokenClassifier, names)


def fixed(config: BertConfig, head: type | None) -> Mapping[str, Any]:
    if head is MaskedLanguageModel:
        return FIXED | {"next_sentence": False}
    if head is SequenceClassifier:
        return FIXED | {"classifier_activation": "relu", "pooling": "first"}
    return FIXED


DISTILBERT = Family(
    model_type="distilbert",
    prefix="distilbert.",
    backbone=Bert,
    rules=lambda config: RULES,
    architectures=(
        bert.architecture("DistilBertModel"),
        bert.architecture(
            "DistilBertForMaskedLM",
            MaskedLanguageModel,
            **bert.read_out(
                "vocab_projector",
                "vocab_projector.bias",
                *linear("vocab_transform", "dense"),
                *layer_norm("vocab_layer_norm", "norm"),
            ),
        ),
        bert.architecture(
            "DistilBertForSequenceClassification",
            SequenceClassifier,
            rules=(*linear("pre_classifier", "dense"), *linear("classifier", "head")),
        ),
        bert.architecture(
            "DistilBertForTokenClassification",
            TokenClassifier,
            rules=bert.TOKEN_CLASSIFIER,
            configure=configure_token_classifier,
        ),
        bert.architecture("DistilBertForQuestionAnswering", SpanPredictor, rules=bert.SPAN_PREDICTOR),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=bert.BUFFERS,
    renamed=bert.OLD_NAMES,
    fits=lambda config: config.token_types == 0 and config.position_offset == 0,
    fixed=fixed,
)
