"""BERT of transformers: the bare model (MiniLM's too), the pretraining heads and the classifiers."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers_jax.models import (
    Bert,
    BertConfig,
    MaskedLanguageModel,
    SequenceClassifier,
    SpanPredictor,
    TokenClassifier,
)
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, linear, under

LAYER, STACK = "encoder.layer.{layer}.", "stack.layers.{layer}."

EMBEDDINGS = (
    Rule("embeddings.word_embeddings.weight", "embedding.embedding"),
    Rule("embeddings.position_embeddings.weight", "positions.embedding"),
    *layer_norm("embeddings.LayerNorm", "embedding_norm"),
)
RULES = (
    *EMBEDDINGS,
    Rule("embeddings.token_type_embeddings.weight", "token_types.embedding"),
    *linear(LAYER + "attention.self.query", STACK + "attention.query"),
    *linear(LAYER + "attention.self.key", STACK + "attention.key"),
    *linear(LAYER + "attention.self.value", STACK + "attention.value"),
    *linear(LAYER + "attention.output.dense", STACK + "attention.output"),
    *layer_norm(LAYER + "attention.output.LayerNorm", STACK + "attention_norm"),
    *linear(LAYER + "intermediate.dense", STACK + "mlp.up"),
    *linear(LAYER + "output.dense", STACK + "mlp.down"),
    *layer_norm(LAYER + "output.LayerNorm", STACK + "mlp_norm"),
    *linear("pooler.dense", "pooler"),
)
TOKEN_CLASSIFIER = linear("classifier", "head")
SPAN_PREDICTOR = linear("qa_outputs", "head")

FIELDS = {
    "vocab_size": ("vocab_size", 30522),
    "hidden_size": ("dim", 768),
    "num_hidden_layers": ("depth", 12),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("mlp_dim", 3072),
    "max_position_embeddings": ("max_length", 512),
    "type_vocab_size": ("token_types", 2),
    "layer_norm_eps": ("norm_epsilon", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "classifier_dropout": ("classifier_dropout", None),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
    "bos_token_id": ("bos_id", None),
    "eos_token_id": ("eos_id", None),
    "pad_token_id": ("pad_id", 0),
}

REQUIRED = {"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False}
"""Settings that change the numbers, with the only value that our Bert has."""

UNUSED = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head"),
    "pooler_type",
)
"""Settings of Google's first configurations that no model reads."""

OLD_NAMES = ((r"(^|\.)LayerNorm\.gamma$", r"\1LayerNorm.weight"), (r"(^|\.)LayerNorm\.beta$", r"\1LayerNorm.bias"))
BUFFERS = (r"embeddings\.(position_ids|token_type_ids)",)
POOLER = (r"pooler\.dense\.(weight|bias)",)


def read_config(fields: dict[str, Any]) -> BertConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our Bert cannot follow.
    """
    take_required(fields, REQUIRED)
    for name in UNUSED:
        fields.pop(name, None)
    activation = take_activation(fields, "hidden_act", "gelu")
    return BertConfig(activation=activation, **take_fields(fields, FIELDS))


def write_config(config: BertConfig) -> dict[str, Any]:
    """The fields of config.json that are BERT's own."""
    written = give_fields(config, FIELDS) | {"intermediate_size": config.mlp_dim or 4 * config.dim}
    return {"hidden_act": give_activation(config.activation), **written, **REQUIRED}


def configure(
    config: BertConfig, head: type | None, names: Collection[str], *, next_sentence: bool = False
) -> BertConfig:
    """`config` for a model under `head`; whether a bare one has a pooler is seen from the names in the file."""
    config = dataclasses.replace(config, next_sentence=next_sentence)
    if head is None:
        return dataclasses.replace(config, pooler="pooler.dense.weight" in names)
    return config.for_head(head)


def architecture(name: str, head: Any = None, **own: Any) -> Architecture:
    """A class of transformers on our Bert."""
    own = {"configure": lambda config, names: configure(config, head, names)} | own
    return Architecture(name, head, under(Bert, head), **own)


def read_out(decoder: str, bias: str, *others: Rule) -> dict[str, Any]:
    """`rules` and `copies` of a masked language model with the layer `decoder` and `others`.

    The bias may be in a file as the decoder's and once more as `bias`. With tied embeddings both are one; without,
    transformers reads the decoder's, and the other one has no effect.
    """
    of_decoder = decoder + ".bias"

    def rules(config: BertConfig) -> Sequence[Rule]:
        if config.tie_embeddings:
            return *others, Rule(bias, "bias")
        return *others, Rule(decoder + ".weight", "head.kernel", axes=(1, 0)), Rule(of_decoder, "bias")

    def copies(config: BertConfig) -> Mapping[str, str]:
        if not config.tie_embeddings:
            return {} if bias == of_decoder else {bias: of_decoder}
        twice = {} if bias == of_decoder else {of_decoder: bias}
        return {decoder + ".weight": "embeddings.word_embeddings.weight", **twice}

    return {"rules": rules, "copies": copies}


PREDICTIONS = (
    *linear("cls.predictions.transform.dense", "dense"),
    *layer_norm("cls.predictions.transform.LayerNorm", "norm"),
)
DECODER = ("cls.predictions.decoder", "cls.predictions.bias")


def fixed(config: BertConfig, head: type | None) -> Mapping[str, Any]:
    return {"classifier_activation": None, "pooler": True} if head is SequenceClassifier else {}


BERT = Family(
    model_type="bert",
    prefix="bert.",
    backbone=Bert,
    rules=lambda config: RULES,
    architectures=(
        architecture("BertModel"),
        architecture(
            "BertForMaskedLM",
            MaskedLanguageModel,
            **read_out(*DECODER, *PREDICTIONS),
            fits=lambda config: not config.next_sentence,
        ),
        architecture(
            "BertForPreTraining",
            MaskedLanguageModel,
            **read_out(*DECODER, *PREDICTIONS, *linear("cls.seq_relationship", "next_sentence")),
            configure=lambda config, names: configure(config, MaskedLanguageModel, names, next_sentence=True),
            fits=lambda config: config.next_sentence,
        ),
        architecture("BertForSequenceClassification", SequenceClassifier, rules=linear("classifier", "head")),
        architecture("BertForTokenClassification", TokenClassifier, rules=TOKEN_CLASSIFIER),
        architecture("BertForQuestionAnswering", SpanPredictor, rules=SPAN_PREDICTOR),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=BUFFERS,
    renamed=OLD_NAMES,
    spare=(*POOLER, r"cls\.predictions\.bias"),
    fits=lambda config: config.token_types > 0 and config.position_offset == 0,
    fixed=fixed,
)
