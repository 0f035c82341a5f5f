"""GPT-2: `GPT2Model` and `GPT2LMHeadModel` of transformers."""

from collections.abc import Mapping
from typing import Any

from transformers_jax.models import GPT, GPTConfig, LanguageModel
from transformers_jax.pretrained.engine import Architecture, Family, Rule

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
"""config.json's fields, ours, and the value that transformers gives a missing one."""

ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}
"""transformers' names and ours; of several for one function the first is written."""

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
    for name, value in REQUIRED.items():
        if (found := fields.pop(name, value)) != value:
            raise ValueError(f"config.json sets {name} to {found}; only {value} is supported")
    activation = fields.pop("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        raise ValueError(f"config.json sets activation_function to {activation!r}; there are {', '.join(ACTIVATIONS)}")
    values = {ours: fields.pop(theirs, default) for theirs, (ours, default) in FIELDS.items()}
    if isinstance(values["eos_id"], list):
        values["eos_id"] = tuple(values["eos_id"])
    if (found := fields.pop("n_ctx", values["max_length"])) != values["max_length"]:
        raise ValueError(f"config.json sets n_ctx to {found}, but n_positions to {values['max_length']}")
    for name in UNUSED:
        fields.pop(name, None)
    return GPTConfig(activation=ACTIVATIONS[activation], **values)


def write_config(config: GPTConfig) -> dict[str, Any]:
    """The fields of config.json that are GPT-2's own."""
    activation = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    values = {theirs: getattr(config, ours) for theirs, (ours, _) in FIELDS.items()}
    return {"activation_function": activation, **values, **REQUIRED}


def tied(config: GPTConfig) -> Mapping[str, str]:
    return {"lm_head.weight": "wte.weight"} if config.tie_embeddings else {}


GPT2 = Family(
    model_type="gpt2",
    prefix="transformer.",
    backbone=GPT,
    rules=lambda config: RULES,
    architectures=(
        Architecture("GPT2Model", None, lambda config, rngs: GPT(config, rngs=rngs)),
        Architecture(
            "GPT2LMHeadModel",
            LanguageModel,
            lambda config, rngs: LanguageModel(GPT(config, rngs=rngs), rngs=rngs),
            rules=(Rule("lm_head.weight", "head.kernel", axes=(1, 0)),),
            copies=tied,
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)
