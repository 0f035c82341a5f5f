"""T5 of transformers: encoder-decoders with relative position biases and RMS norms."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers_jax.models import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.pretrained.configs import (
    ACTIVATIONS,
    give_activation,
    give_fields,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.rules import Architecture, Family, Rule, under

SHARED = "shared.weight"


def _kernel(theirs: str, ours: str) -> Rule:
    return Rule(theirs + ".weight", ours + ".kernel", axes=(1, 0))


def _side(side: str) -> tuple[Rule, ...]:
    theirs, ours = f"{side}.block.{{layer}}.layer.", f"{side}.stack.layers.{{layer}}."
    last = 2 if side == "decoder" else 1

    def attention(place: int, name: str, our: str) -> tuple[Rule, ...]:
        parts = (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
        return (
            *(_kernel(f"{theirs}{place}.{name}.{part}", f"{ours}{our}.{whole}") for part, whole in parts),
            Rule(f"{theirs}{place}.layer_norm.weight", f"{ours}{our}_norm.scale"),
        )

    dense = f"{theirs}{last}.DenseReluDense."
    return (
        *attention(0, "SelfAttention", "attention"),
        *(attention(1, "EncDecAttention", "cross_attention") if side == "decoder" else ()),
        _kernel(dense + "wi", ours + "mlp.up"),
        _kernel(dense + "wi_0", ours + "mlp.gate"),
        _kernel(dense + "wi_1", ours + "mlp.up"),
        _kernel(dense + "wo", ours + "mlp.down"),
        Rule(f"{theirs}{last}.layer_norm.weight", ours + "mlp_norm.scale"),
        Rule(f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{side}.relative.embedding"),
        Rule(f"{side}.final_layer_norm.weight", f"{side}.norm.scale"),
    )


RULES = (Rule(SHARED, "embedding.embedding"), *_side("encoder"), *_side("decoder"))


def rules(config: EncoderDecoderConfig) -> Sequence[Rule]:
    absent = (".wi.weight",) if config.gated else (".wi_0.weight", ".wi_1.weight")
    return [rule for rule in RULES if not rule.theirs.endswith(absent)]


FIELDS = {
    "vocab_size": ("vocab_size", 32128),
    "d_model": ("dim", 512),
    "d_kv": ("head_dim", 64),
    "d_ff": ("mlp_dim", 2048),
    "num_layers": ("depth", 6),
    "num_decoder_layers": ("decoder_depth", None),
    "num_heads": ("heads", 8),
    "relative_attention_num_buckets": ("relative_buckets", 32),
    "relative_attention_max_distance": ("relative_max_distance", 128),
    "dropout_rate": ("dropout", 0.1),
    "layer_norm_epsilon": ("norm_epsilon", 1e-6),
    "eos_token_id": ("eos_id", 1),
    "pad_token_id": ("pad_id", 0),
    "bos_token_id": ("bos_id", None),
}

REQUIRED = {"is_encoder_decoder": True, "is_decoder": False}

UNUSED = (
    "initializer_factor",  # of weights that are read
    "n_positions",  # never was a limit
    *("classifier_dropout", "dense_act_fn", "is_gated_act"),  # follow from others
)


def read_config(fields: dict[str, Any]) -> EncoderDecoderConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our model cannot follow.
    """
    take_required(fields, REQUIRED)
    for name in UNUSED:
        fields.pop(name, None)
    projection = fields.pop("feed_forward_proj", "relu")
    gate, _, activation = projection.rpartition("-")
    if gate not in ("", "gated") or activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(
            f"config.json sets feed_forward_proj to {projection!r}; there are {known}, and gated-... of each"
        )
    if projection == "gated-gelu":
        activation = "gelu_new"
    values = take_fields(fields, FIELDS)
    # Files of version 1.1 say that they do not tie embeddings, and mean as well that they do not scale what they read
    # out. Transformers 5 writes the latter, and that they are tied; both go by whether the file has a read-out.
    scaled = fields.pop("scale_decoder_outputs", None)
    tied = fields.pop("tie_word_embeddings", True)
    scaled = tied if scaled is None else scaled
    return EncoderDecoderConfig.t5_small(
        activation=ACTIVATIONS[activation],
        gated=gate == "gated",
        tie_embeddings=scaled,
        scale_logits=scaled,
        start_id=fields.pop("decoder_start_token_id", values["pad_id"]),
        mlp_dropout=values["dropout"],
        attention_dropout=values["dropout"],
        **values,
    )


def write_config(config: EncoderDecoderConfig) -> dict[str, Any]:
    """The fields of config.json that are T5's own."""
    activation = give_activation(config.activation)
    if config.gated:
        activation = "gated-" + ("gelu" if activation == "gelu_new" else activation)
    return {
        **give_fields(config, FIELDS),
        **REQUIRED,
        "feed_forward_proj": activation,
        "d_kv": config.head_size,
        "d_ff": config.mlp_dim or 4 * config.dim,
        "num_decoder_layers": config.decoder_depth or config.depth,
        "tie_word_embeddings": config.scale_logits,
        "scale_decoder_outputs": config.scale_logits,
        "decoder_start_token_id": config.start,
    }


def backbone_copies(config: EncoderDecoderConfig) -> Mapping[str, str]:
    return {"encoder.embed_tokens.weight": SHARED, "decoder.embed_tokens.weight": SHARED}


def copies(config: EncoderDecoderConfig) -> Mapping[str, str]:
    return {**backbone_copies(config), **({"lm_head.weight": SHARED} if config.tie_embeddings else {})}


def head_rules(config: EncoderDecoderConfig) -> Sequence[Rule]:
    return () if config.tie_embeddings else (_kernel("lm_head", "head"),)


def configure(config: EncoderDecoderConfig, names: Collection[str]) -> EncoderDecoderConfig:
    """Whether the read-out is a layer of its own is seen from the file: transformers goes by it, too."""
    return config if "lm_head.weight" in names else dataclasses.replace(config, tie_embeddings=True)


def fits(config: EncoderDecoderConfig) -> bool:
    """Whether transformers' T5 computes what this configuration says."""
    return (
        config.norm == "pre"
        and config.norm_type == "rms"
        and config.positions == "relative"
        and not (config.relative_per_layer or config.embedding_norm or config.use_bias or config.logits_bias)
        and not (config.scale_embedding or config.scale_attention)
        and config.target_vocab_size is None
    )


T5 = Family(
    model_type="t5",
    prefix="",
    backbone=EncoderDecoder,
    rules=rules,
    architectures=(
        Architecture("T5Model", None, under(EncoderDecoder, None), copies=backbone_copies),
        Architecture(
            "T5ForConditionalGeneration",
            Seq2SeqLanguageModel,
            under(EncoderDecoder, Seq2SeqLanguageModel),
            rules=head_rules,
            copies=copies,
            configure=configure,
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    # An old file of the first models holds one that no model reads.
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    fits=fits,
)
