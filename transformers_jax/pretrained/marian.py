"""Marian of transformers (OPUS-MT's models): encoder-decoders with sinusoidal positions and a bias on the logits."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers_jax.models import EncoderDecoder, EncoderDecoderConfig, Seq2SeqLanguageModel
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, linear, under


def _layer(side: str) -> tuple[Rule, ...]:
    theirs, ours = f"{side}.layers.{{layer}}.", f"{side}.stack.layers.{{layer}}."

    def attention(their: str, our: str, their_norm: str) -> tuple[Rule, ...]:
        return (
            *linear(f"{theirs}{their}.q_proj", f"{ours}{our}.query"),
            *linear(f"{theirs}{their}.k_proj", f"{ours}{our}.key"),
            *linear(f"{theirs}{their}.v_proj", f"{ours}{our}.value"),
            *linear(f"{theirs}{their}.out_proj", f"{ours}{our}.output"),
            *layer_norm(theirs + their_norm, f"{ours}{our}_norm"),
        )

    return (
        *attention("self_attn", "attention", "self_attn_layer_norm"),
        *(attention("encoder_attn", "cross_attention", "encoder_attn_layer_norm") if side == "decoder" else ()),
        *linear(theirs + "fc1", ours + "mlp.up"),
        *linear(theirs + "fc2", ours + "mlp.down"),
        *layer_norm(theirs + "final_layer_norm", ours + "mlp_norm"),
    )


LAYERS = (*_layer("encoder"), *_layer("decoder"))


def rules(config: EncoderDecoderConfig) -> Sequence[Rule]:
    if config.target_vocab_size is None:
        return Rule("shared.weight", "embedding.embedding"), *LAYERS
    return (
        Rule("encoder.embed_tokens.weight", "embedding.embedding"),
        Rule("decoder.embed_tokens.weight", "target_embedding.embedding"),
        *LAYERS,
    )


FIELDS = {
    "vocab_size": ("vocab_size", 58101),
    "max_position_embeddings": ("max_length", 1024),
    "d_model": ("dim", 1024),
    "encoder_layers": ("depth", 12),
    "decoder_layers": ("decoder_depth", 12),
    "encoder_attention_heads": ("heads", 16),
    "encoder_ffn_dim": ("mlp_dim", 4096),
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("mlp_dropout", 0.0),
    "init_std": ("init_std", 0.02),
    "scale_embedding": ("scale_embedding", False),
    "tie_word_embeddings": ("tie_embeddings", True),
    "bos_token_id": ("bos_id", None),
    "eos_token_id": ("eos_id", 0),
    "pad_token_id": ("pad_id", 58100),
}

REQUIRED = {"is_encoder_decoder": True, "is_decoder": False, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}
"""Settings that change the numbers, with the only value that our model has."""

UNUSED = (
    *("add_bias_logits", "add_final_layer_norm", "classif_dropout", "classifier_dropout", "normalize_before"),
    *("normalize_embedding", "num_hidden_layers", "static_position_embeddings", "extra_pos_embeddings"),
)
"""Settings of old files that no Marian model reads."""


def read_config(fields: dict[str, Any]) -> EncoderDecoderConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our model cannot follow.
    """
    take_required(fields, REQUIRED)
    for name in UNUSED:
        fields.pop(name, None)
    activation = take_activation(fields, "activation_function", "gelu")
    values = take_fields(fields, FIELDS)
    for theirs, ours in (("decoder_attention_heads", "heads"), ("decoder_ffn_dim", "mlp_dim")):
        if (found := fields.pop(theirs, values[ours])) != values[ours]:
            raise ValueError(f"config.json sets {theirs} to {found}; only that of the encoder, {values[ours]}, works")
    target = fields.pop("decoder_vocab_size", None) or values["vocab_size"]
    if fields.pop("share_encoder_decoder_embeddings", True):
        if target != values["vocab_size"]:
            raise ValueError(
                f"config.json shares embeddings between vocabularies of {values['vocab_size']} and {target}"
            )
        target = None
    return EncoderDecoderConfig(
        activation=activation,
        interleaved=False,
        logits_bias=True,
        start_id=fields.pop("decoder_start_token_id", values["pad_id"]),
        target_vocab_size=target,
        norm_epsilon=1e-5,
        **values,
    )


def write_config(config: EncoderDecoderConfig) -> dict[str, Any]:
    """The fields of config.json that are Marian's own."""
    mlp_dim = config.mlp_dim or 4 * config.dim
    return {
        "activation_function": give_activation(config.activation),
        **give_fields(config, FIELDS),
        **REQUIRED,
        "decoder_layers": config.decoder_depth or config.depth,
        "encoder_ffn_dim": mlp_dim,
        "decoder_ffn_dim": mlp_dim,
        "decoder_attention_heads": config.heads,
        "share_encoder_decoder_embeddings": config.target_vocab_size is None,
        "decoder_vocab_size": config.target_vocab_size or config.vocab_size,
        "decoder_start_token_id": config.start,
    }


def head_rules(config: EncoderDecoderConfig) -> Sequence[Rule]:
    vocabulary = config.target_vocab_size or config.check_vocabulary()
    bias = (Rule("final_logits_bias", "bias", shape=(1, vocabulary)),) if config.logits_bias else ()
    return bias if config.tie_embeddings else (*bias, Rule("lm_head.weight", "head.kernel", axes=(1, 0)))


def backbone_copies(config: EncoderDecoderConfig) -> Mapping[str, str]:
    if config.target_vocab_size is not None:
        return {}
    return {"encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight"}


def copies(config: EncoderDecoderConfig) -> Mapping[str, str]:
    original = "shared.weight" if config.target_vocab_size is None else "decoder.embed_tokens.weight"
    tied = {"lm_head.weight": original} if config.tie_embeddings else {}
    return {**backbone_copies(config), **tied}


def has_layers(config: EncoderDecoderConfig) -> bool:
    """Whether its layers are Marian's, which are BART's, too."""
    return (
        config.norm == "post"
        and config.norm_type == "layer"
        and config.norm_epsilon == 1e-5
        and not (config.gated or config.scale_logits)
        and config.use_bias
        and config.scale_attention
        and config.head_dim is None
    )


def fits(config: EncoderDecoderConfig) -> bool:
    """Whether transformers' Marian computes what this configuration says."""
    return (
        has_layers(config)
        and config.positions == "sinusoidal"
        and not (config.interleaved or config.embedding_norm)
        and config.logits_bias
    )


MARIAN = Family(
    model_type="marian",
    prefix="model.",
    backbone=EncoderDecoder,
    rules=rules,
    architectures=(
        Architecture("MarianModel", None, under(EncoderDecoder, None), copies=backbone_copies),
        Architecture(
            "MarianMTModel",
            Seq2SeqLanguageModel,
            under(EncoderDecoder, Seq2SeqLanguageModel),
            rules=head_rules,
            copies=copies,
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=(r"(encoder|decoder)\.embed_positions\.weight",),
    fits=fits,
)
