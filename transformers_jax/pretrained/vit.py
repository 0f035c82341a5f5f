"""ViT of transformers: the bare model and the image classifier; DeiT's tables are built from these."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from transformers_jax.models import ImageClassifier, ViT, ViTConfig
from transformers_jax.models.base import Size, as_size
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, linear, under

LAYER, STACK = "encoder.layer.{layer}.", "stack.layers.{layer}."

LAYERS = (
    *layer_norm(LAYER + "layernorm_before", STACK + "attention_norm"),
    *linear(LAYER + "attention.attention.query", STACK + "attention.query"),
    *linear(LAYER + "attention.attention.key", STACK + "attention.key"),
    *linear(LAYER + "attention.attention.value", STACK + "attention.value"),
    *linear(LAYER + "attention.output.dense", STACK + "attention.output"),
    *layer_norm(LAYER + "layernorm_after", STACK + "mlp_norm"),
    *linear(LAYER + "intermediate.dense", STACK + "mlp.up"),
    *linear(LAYER + "output.dense", STACK + "mlp.down"),
    *layer_norm("layernorm", "norm"),
    *linear("pooler.dense", "pooler"),
)

FIELDS = {
    "hidden_size": ("dim", 768),
    "num_hidden_layers": ("depth", 12),
    "num_attention_heads": ("heads", 12),
    "intermediate_size": ("mlp_dim", 3072),
    "layer_norm_eps": ("norm_epsilon", 1e-12),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "initializer_range": ("init_std", 0.02),
    "num_channels": ("channels", 3),
}
SIZES = {"image_size": 224, "patch_size": 16}

REQUIRED = {"qkv_bias": True, "pooler_act": "tanh"}
"""Settings that change the numbers, with the only value that our ViT has."""

SPARE = (r"embeddings\.mask_token", r"pooler\.dense\.(weight|bias)")
FIXED: dict[str, Any] = {"pooling": "class_token", "positions": "learned", "position_resampling": "bicubic"}


def rules(config: ViTConfig) -> tuple[Rule, ...]:
    """The backbone's table. Its convolution, tokens and positions have axes in the file that ours have not."""
    (height, width), dim = as_size(config.patch_size), config.dim
    kernel, positions = (dim, config.channels, height, width), (1, config.prefix + config.grid[0] * config.grid[1], dim)
    patches = "embeddings.patch_embeddings.projection"
    return (
        Rule("embeddings.cls_token", "class_token", shape=(1, 1, dim)),
        Rule("embeddings.distillation_token", "distillation_token", shape=(1, 1, dim)),
        Rule("embeddings.position_embeddings", "positions.embedding", shape=positions),
        Rule(patches + ".weight", "patch_embedding.projection.kernel", axes=(2, 3, 1, 0), shape=kernel),
        Rule(patches + ".bias", "patch_embedding.projection.bias"),
        *LAYERS,
    )


def read_config(fields: dict[str, Any]) -> ViTConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our ViT cannot follow.
    """
    fields.pop("encoder_stride", None)  # of the decoder that fills in masked patches
    width = fields.pop("pooler_output_size", None) or fields.get("hidden_size", FIELDS["hidden_size"][1])
    take_required(fields, REQUIRED)
    activation = take_activation(fields, "hidden_act", "gelu")
    sizes: dict[str, Any] = {name: simplest(fields.pop(name, default)) for name, default in SIZES.items()}
    config = ViTConfig(activation=activation, **take_fields(fields, FIELDS), **sizes)
    if width != config.dim:
        raise ValueError(f"config.json sets pooler_output_size to {width}; only hidden_size {config.dim} is supported")
    return config


def write_config(config: ViTConfig) -> dict[str, Any]:
    """The fields of config.json that are ViT's own."""
    written = give_fields(config, FIELDS) | {"intermediate_size": config.mlp_dim or 4 * config.dim}
    sizes = {name: simplest(getattr(config, name)) for name in SIZES}
    return {"hidden_act": give_activation(config.activation), **written, **sizes, **REQUIRED}


def simplest(size: Any) -> Size:
    """One number for a square, tuple or list: transformers resizes positions only for patches of one number."""
    size = tuple(size) if isinstance(size, list) else size
    return size[0] if isinstance(size, tuple) and len(size) == 2 and size[0] == size[1] else size


def configure(
    config: ViTConfig, head: type | None, names: Collection[str], *, distillation_head: bool = False
) -> ViTConfig:
    """`config` for a model under `head`; whether a bare one has a pooler is seen from the names in the file."""
    pooler = head is None and "pooler.dense.weight" in names
    return dataclasses.replace(config, pooler=pooler, distillation_head=distillation_head)


def architecture(name: str, head: Any = None, *, distillation_head: bool = False, **own: Any) -> Architecture:
    """A class of transformers on our ViT."""
    return Architecture(
        name,
        head,
        under(ViT, head),
        configure=lambda config, names: configure(config, head, names, distillation_head=distillation_head),
        **own,
    )


def fixed(config: ViTConfig, head: type | None) -> Mapping[str, Any]:
    return FIXED


VIT = Family(
    model_type="vit",
    prefix="vit.",
    backbone=ViT,
    rules=rules,
    architectures=(
        architecture("ViTModel"),
        architecture("ViTForImageClassification", ImageClassifier, rules=linear("classifier", "head")),
    ),
    read_config=read_config,
    write_config=write_config,
    spare=SPARE,
    fits=lambda config: config.class_token and not config.distillation_token,
    fixed=fixed,
)
