"""GPT-2 of transformers: the bare model, the language model and the classifiers."""

from collections.abc import Mapping
from typing import Any

from transformers_jax.models import (
    GPT,
    GPTConfig,
    LanguageModel,
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
from transformers_jax.pretrained.rules import Architecture, Family, Rule, linear, under

STACK = "stack.layers.{layer}."

RULES = (
    Rule("wte.weight", "embedding.embedding"),
    Rule("wpe.weight", "positions.embedding"),
    Rule("h.{layer}.ln_1.weight", STACK + "attention_norm.scale"),
    Rule("h.{layer}.ln_1.bias", STACK + "attention_norm.bias"),
    # GPT-2 stores dense kernels as (in, out), as we do.
    Rule(
        "h.{layer}.attn.c_attn.weight",
        (STACK + "attention.query.kernel", STACK + "attention.key.kernel", STACK + "attention.value.kernel"),
    ),
    Rule(
        "h.{layer}.attn.c_attn.bias",
        (STACK + "attention.query.bias", STACK + "attention.key.bias", STACK + "attention.value.bias"),
    ),
    Rule("h.{layer}.attn.c_proj.weight", STACK + "attention.output.kernel"),
    Rule("h.{layer}.attn.c_proj.bias", STACK + "attention.output.bias"),
    Rule("h.{layer}.ln_2.weight", STACK + "mlp_norm.scale"),
    Rule("h.{layer}.ln_2.bias", STACK + "mlp_norm.bias"),
    Rule("h.{layer}.mlp.c_fc.weight", STACK + "mlp.up.kernel"),
    Rule("h.{layer}.mlp.c_fc.bias", STACK + "mlp.up.bias"),
    Rule("h.{layer}.mlp.c_proj.weight", STACK + "mlp.down.kernel"),
    Rule("h.{layer}.mlp.c_proj.bias", STACK + "mlp.down.bias"),
    Rule("ln_f.weight", "norm.scale"),
    Rule("ln_f.bias", "norm.bias"),
)

FIELDS = {
    "vocab_size": ("vocab_size", 50257),
    "n_positions": ("max_length", 1024),
    "n_embd": ("dim", 768),
    "n_layer": ("depth", 12),
    "n_head": ("heads", 12),
    "n_inner": ("mlp_dim", None),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "embd_pdrop": ("embedding_dropout", 0.1),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", True),
    "bos_token_id": ("bos_id", 50256),
    "eos_token_id": ("eos_id", 50256),
    "pad_token_id": ("pad_id", None),
}

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
"""Settings that change the numbers, with the only value that our GPT has."""

UNUSED = (
    "reorder_and_upcast_attn",  # scores are in float32 here whatever the type, which is what it asks for
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
)
"""Settings that change nothing in the architectures below."""


def read_config(fields: dict[str, Any]) -> GPTConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our GPT cannot follow.
    """
    for alias, name in ALIASES.items():
        if alias in fields:
            fields[name] = fields.pop(alias)
    take_required(fields, REQUIRED)
    activation = take_activation(fields, "activation_function", "gelu_new")
    classifier_dropout = fields.pop("classifier_dropout", None)
    values = take_fields(fields, FIELDS)
    if (found := fields.pop("n_ctx", values["max_length"])) != values["max_length"]:
        raise ValueError(f"config.json sets n_ctx to {found}, but n_positions to {values['max_length']}")
    for name in UNUSED:
        fields.pop(name, None)
    return GPTConfig(activation=activation, classifier_dropout=classifier_dropout, **values)


def write_config(config: GPTConfig) -> dict[str, Any]:
    """The fields of config.json that are GPT-2's own."""
    optional = {} if config.classifier_dropout is None else {"classifier_dropout": config.classifier_dropout}
    activation = give_activation(config.activation)
    return {"activation_function": activation, **give_fields(config, FIELDS), **REQUIRED, **optional}


def tied(config: GPTConfig) -> Mapping[str, str]:
    return {"lm_head.weight": "wte.weight"} if config.tie_embeddings else {}


GPT2 = Family(
    model_type="gpt2",
    prefix="transformer.",
    backbone=GPT,
    rules=lambda config: RULES,
    architectures=(
        Architecture("GPT2Model", None, under(GPT, None)),
        Architecture(
            "GPT2LMHeadModel",
            LanguageModel,
            under(GPT, LanguageModel),
            rules=(Rule("lm_head.weight", "head.kernel", axes=(1, 0)),),
            copies=tied,
        ),
        Architecture(
            "GPT2ForSequenceClassification",
            SequenceClassifier,
            under(GPT, SequenceClassifier),
            rules=(Rule("score.weight", "head.kernel", axes=(1, 0)),),
        ),
        Architecture(
            "GPT2ForTokenClassification",
            TokenClassifier,
            under(GPT, TokenClassifier),
            rules=linear("classifier", "head"),
        ),
        Architecture(
            "GPT2ForQuestionAnswering", SpanPredictor, under(GPT, SpanPredictor), rules=linear("qa_outputs", "head")
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    fixed=lambda config, head: {"positions": "learned"},
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)
