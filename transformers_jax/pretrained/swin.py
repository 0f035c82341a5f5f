"""Swin of transformers: the bare model and the image classifier."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers_jax.data.image_processor import IMAGENET_MEAN, IMAGENET_STD
from transformers_jax.models import ImageClassifier, Swin, SwinConfig
from transformers_jax.models.base import as_size
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, linear, under
from transformers_jax.pretrained.vit import simplest

FIELDS = {
    "depths": ("depths", (2, 2, 6, 2)),
    "num_heads": ("heads", (3, 6, 12, 24)),
    "window_size": ("window", 7),
    "mlp_ratio": ("mlp_ratio", 4.0),
    "layer_norm_eps": ("norm_epsilon", 1e-5),
    "hidden_dropout_prob": ("dropout", 0.0),
    "attention_probs_dropout_prob": ("attention_dropout", 0.0),
    "drop_path_rate": ("stochastic_depth", 0.1),
    "initializer_range": ("init_std", 0.02),
    "num_channels": ("channels", 3),
}
SIZES = {"image_size": 224, "patch_size": 4}
REQUIRED = {"qkv_bias": True, "use_absolute_embeddings": False}
"""Settings that change the numbers, with the only value that our Swin has."""
DERIVED = ("hidden_size", "num_layers", "stage_names", "out_features", "out_indices", "encoder_stride", "path_norm")
"""Fields that follow from others, or say what transformers' backbone and its decoder of patches give out."""


def rules(config: SwinConfig) -> tuple[Rule, ...]:
    """The backbone's table. A patch merging is at the end of a stage in the file, at the start of the next in ours."""
    (height, width), patches = as_size(config.patch_size), "embeddings.patch_embeddings.projection"
    kernel = (config.dims[0], config.channels, height, width)
    table = [
        Rule(patches + ".weight", "patch_embedding.projection.kernel", axes=(2, 3, 1, 0), shape=kernel),
        Rule(patches + ".bias", "patch_embedding.projection.bias"),
        *layer_norm("embeddings.norm", "embedding_norm"),
        *layer_norm("layernorm", "norm"),
    ]
    for stage in range(len(config.dims)):
        theirs, ours = f"encoder.layers.{stage}.blocks.{{layer}}.", f"stages.{stage}.stack.layers.{{layer}}."
        table += [
            *layer_norm(theirs + "layernorm_before", ours + "attention_norm"),
            *linear(theirs + "attention.self.query", ours + "attention.query"),
            *linear(theirs + "attention.self.key", ours + "attention.key"),
            *linear(theirs + "attention.self.value", ours + "attention.value"),
            Rule(theirs + "attention.self.relative_position_bias_table", ours + "relative.embedding"),
            *linear(theirs + "attention.output.dense", ours + "attention.output"),
            *layer_norm(theirs + "layernorm_after", ours + "mlp_norm"),
            *linear(theirs + "intermediate.dense", ours + "mlp.up"),
            *linear(theirs + "output.dense", ours + "mlp.down"),
        ]
        if stage > 0:
            theirs, ours = f"encoder.layers.{stage - 1}.downsample.", f"stages.{stage}.merging."
            reduction = Rule(theirs + "reduction.weight", ours + "reduction.kernel", axes=(1, 0))
            table += [*layer_norm(theirs + "norm", ours + "norm"), reduction]
    return tuple(table)


def read_config(fields: dict[str, Any]) -> SwinConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    ValueError names a field whose value our Swin cannot follow.
    """
    for name in DERIVED:
        fields.pop(name, None)
    take_required(fields, REQUIRED)
    activation = take_activation(fields, "hidden_act", "gelu")
    sizes: dict[str, Any] = {name: simplest(fields.pop(name, default)) for name, default in SIZES.items()}
    ours, width = take_fields(fields, FIELDS), fields.pop("embed_dim", 96)
    dims = tuple(width * 2**stage for stage in range(len(ours["depths"])))
    config = SwinConfig(activation=activation, dims=dims, **ours, **sizes)
    if config.channels != len(IMAGENET_MEAN):
        return config
    return dataclasses.replace(config, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD)


def write_config(config: SwinConfig) -> dict[str, Any]:
    """The fields of config.json that are Swin's own."""
    sizes = {name: simplest(getattr(config, name)) for name in SIZES}
    own = give_fields(config, FIELDS) | {"window_size": simplest(config.window), "embed_dim": config.dims[0]}
    derived = {"num_layers": len(config.dims), "hidden_size": config.dim}
    return {"hidden_act": give_activation(config.activation), **own, **derived, **sizes, **REQUIRED}


def fixed(config: SwinConfig, head: type | None) -> Mapping[str, Any]:
    """Each stage is twice as wide as the one before, and windows are square."""
    dims = tuple(config.dims[0] * 2**stage for stage in range(len(config.dims)))
    return {"dims": dims} | ({} if isinstance(simplest(config.window), int) else {"window": as_size(config.window)[0]})


SWIN = Family(
    model_type="swin",
    prefix="swin.",
    backbone=Swin,
    rules=rules,
    architectures=(
        Architecture("SwinModel", None, under(Swin, None)),
        Architecture(
            "SwinForImageClassification",
            ImageClassifier,
            under(Swin, ImageClassifier),
            rules=linear("classifier", "head"),
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=(r".*\.relative_position_index", r".*\.attn_mask"),
    spare=(r"embeddings\.mask_token",),
    fixed=fixed,
)
