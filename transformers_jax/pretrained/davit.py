"""DaViT of timm: the bare model and the image classifier, also where it is Florence-2's image encoder."""

from collections.abc import Mapping
from typing import Any

from transformers_jax.models import DaViT, DaViTConfig, ImageClassifier
from transformers_jax.pretrained.configs import give_fields, take_fields, take_required
from transformers_jax.pretrained.rules import Architecture, Family, Rule, layer_norm, linear, under
from transformers_jax.pretrained.vit import simplest

ARCHITECTURES = {
    "davit_tiny": DaViTConfig.tiny(),
    "davit_small": DaViTConfig.small(),
    "davit_base": DaViTConfig.base(),
    "davit_large": DaViTConfig.large(),
    "davit_huge": DaViTConfig.huge(),
    "davit_giant": DaViTConfig.giant(),
    "davit_base_fl": DaViTConfig.florence2_base(),
    "davit_huge_fl": DaViTConfig.florence2_large(),
}
"""timm's functions that make a DaViT, and the sizes that they give it."""

FIELDS = {
    "embed_dims": "dims",
    "depths": "depths",
    "num_heads": "heads",
    "window_size": "window",
    "mlp_ratio": "mlp_ratio",
    "norm_eps": "norm_epsilon",
    "down_kernel_size": "downsampling",
}
REQUIRED: dict[str, Any] = {
    "qkv_bias": True,
    "norm_layer": "layernorm2d",
    "norm_layer_cl": "layernorm",
    "attn_types": ["spatial", "channel"],
    "ffn": True,
    "cpe_act": False,
    "head_norm_first": False,
    "global_pool": "avg",
}
"""Settings that change the numbers, with the only value that our DaViT has."""
WITHOUT_EFFECT = ("drop_rate", "drop_path_rate", "named_blocks")
"""Of training, and of the tensors' names."""

BLOCKS = {"0": "spatial", "1": "channel"}


def convolution(theirs: str, ours: str, shape: tuple[int, ...] | None = None) -> tuple[Rule, Rule]:
    kernel = Rule(theirs + ".weight", ours + ".kernel", axes=(2, 3, 1, 0), shape=shape)
    return kernel, Rule(theirs + ".bias", ours + ".bias")


def rules(config: DaViTConfig) -> tuple[Rule, ...]:
    """The backbone's table. DaViT's channel attention calls keys, values and queries what Florence-2's (and the paper)
    calls queries, keys and values."""
    table = [*layer_norm("head.norm", "norm")]
    fused = {"spatial": ("query", "key", "value"), "channel": ("query", "key", "value")}
    if config.channel_scale == "channels":
        fused["channel"] = ("value", "query", "key")
    for stage, dim in enumerate(config.dims):
        theirs, ours = f"stages.{stage}.downsample." if stage else "stem.", f"stages.{stage}."
        table += [*convolution(theirs + "conv", ours + "projection"), *layer_norm(theirs + "norm", ours + "norm")]
        for place, block in BLOCKS.items():
            theirs = f"stages.{stage}.blocks.{{layer}}.{place}."
            ours = f"stages.{stage}.stack.layers.{{layer}}.{block}."
            parts = [ours + "attention." + part for part in fused[block]]
            table += [
                *convolution(theirs + "cpe1.proj", ours + "attention_position", (dim, 1, 3, 3)),
                *layer_norm(theirs + "norm1", ours + "attention_norm"),
                Rule(theirs + "attn.qkv.weight", tuple(part + ".kernel" for part in parts), axes=(1, 0), axis=0),
                Rule(theirs + "attn.qkv.bias", tuple(part + ".bias" for part in parts), axis=0),
                *linear(theirs + "attn.proj", ours + "attention.output"),
                *convolution(theirs + "cpe2.proj", ours + "mlp_position", (dim, 1, 3, 3)),
                *layer_norm(theirs + "norm2", ours + "mlp_norm"),
                *linear(theirs + "mlp.fc1", ours + "mlp.up"),
                *linear(theirs + "mlp.fc2", ours + "mlp.down"),
            ]
    return tuple(table)


def read_config(fields: dict[str, Any]) -> DaViTConfig:
    """Our configuration for the fields of a config.json (see `pretrained.timm`), of which it takes out those that it
    knows. ValueError names a field whose value our DaViT cannot follow."""
    name = fields.pop("architecture", None)
    if name not in ARCHITECTURES:
        raise ValueError(f"architecture {name!r} of timm is not supported; there are {', '.join(ARCHITECTURES)}")
    sizes = ARCHITECTURES[name]
    take_required(fields, REQUIRED)
    for setting in WITHOUT_EFFECT:
        fields.pop(setting, None)
    ours = take_fields(fields, {theirs: (ours, getattr(sizes, ours)) for theirs, ours in FIELDS.items()})
    second = fields.pop("channel_attn_v2", sizes.channel_scale == "places")
    return DaViTConfig(
        **ours,
        channel_scale="places" if second else "channels",
        channels=fields.pop("num_channels"),
        image_size=simplest(fields.pop("image_size")),
        image_mean=tuple(fields.pop("image_mean")),
        image_std=tuple(fields.pop("image_std")),
    )


def write_config(config: DaViTConfig) -> dict[str, Any]:
    """The fields of config.json that are DaViT's own: a size of timm's, and all in which this one differs from it."""
    names = (name for name in ARCHITECTURES if not name.endswith("_fl"))  # these call their tensors otherwise
    name = max(names, key=lambda name: _shared(ARCHITECTURES[name], config))
    sizes = ARCHITECTURES[name]
    own = {theirs: value for theirs, value in _own(config).items() if value != _own(sizes)[theirs]}
    height, width = (config.image_size,) * 2 if isinstance(config.image_size, int) else config.image_size
    pictures = {"image_mean": config.image_mean, "image_std": config.image_std}
    return {
        "architecture": name,
        "image_size": [height, width],
        "num_channels": config.channels,
        **{name: list(values) * (config.channels if len(values) == 1 else 1) for name, values in pictures.items()},
        **own,
    }


def _own(config: DaViTConfig) -> dict[str, Any]:
    fields = give_fields(config, {theirs: (ours, None) for theirs, ours in FIELDS.items()})
    return fields | {"window_size": simplest(config.window), "channel_attn_v2": config.channel_scale == "places"}


def _shared(sizes: DaViTConfig, config: DaViTConfig) -> int:
    return sum(value == _own(sizes)[name] for name, value in _own(config).items())


def fixed(config: DaViTConfig, head: type | None) -> Mapping[str, Any]:
    return {"patch_size": 4, "activation": "gelu"}


DAVIT = Family(
    model_type="davit",
    library="timm",
    prefix="",
    backbone=DaViT,
    rules=rules,
    architectures=(
        Architecture("davit", None, under(DaViT, None)),
        Architecture(
            "davit with head.fc", ImageClassifier, under(DaViT, ImageClassifier), rules=linear("head.fc", "head")
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    renamed=((r"\.spatial_block\.", ".0."), (r"\.channel_block\.", ".1.")),
    fixed=fixed,
)
