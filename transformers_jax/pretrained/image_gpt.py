"""ImageGPT of transformers: the bare model, the model of pixels and the image classifier."""

import math
from typing import Any

from transformers_jax.models import ImageGPT, ImageGPTConfig, LanguageModel, SequenceClassifier
from transformers_jax.models.base import Size
from transformers_jax.pretrained.configs import (
    give_activation,
    give_fields,
    take_activation,
    take_fields,
    take_required,
)
from transformers_jax.pretrained.gpt2 import ALIASES, REQUIRED, RULES
from transformers_jax.pretrained.rules import Architecture, Family, Rule, under

FIELDS = {
    "n_embd": ("dim", 512),
    "n_layer": ("depth", 24),
    "n_head": ("heads", 8),
    "n_inner": ("mlp_dim", None),
    "layer_norm_epsilon": ("norm_epsilon", 1e-5),
    "resid_pdrop": ("dropout", 0.1),
    "attn_pdrop": ("attention_dropout", 0.1),
    "embd_pdrop": ("embedding_dropout", 0.1),
    "initializer_range": ("init_std", 0.02),
    "num_channels": ("channels", 3),
}


def read_config(fields: dict[str, Any]) -> ImageGPTConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows.

    transformers knows how many pixels a picture has, but not its shape: it is square, unless `image_size` says it.
    ValueError names a field whose value our Image GPT cannot follow.
    """
    for alias, name in ALIASES.items():
        if alias in fields:
            fields[name] = fields.pop(alias)
    take_required(fields, REQUIRED | {"tie_word_embeddings": False})
    for name in ("reorder_and_upcast_attn", "bos_token_id", "eos_token_id", "pad_token_id"):  # see gpt2.UNUSED
        fields.pop(name, None)
    activation = take_activation(fields, "activation_function", "quick_gelu")
    classifier_dropout = fields.pop("classifier_dropout", None)
    places, clusters = fields.pop("n_positions", 1024), fields.pop("vocab_size", 513) - 1
    image_size = image_size_of(places, fields.pop("image_size", None))
    return ImageGPTConfig(
        image_size=image_size,
        clusters=clusters,
        activation=activation,
        classifier_dropout=classifier_dropout,
        **take_fields(fields, FIELDS),
    )


def image_size_of(places: int, size: Any = None) -> Size:
    """The size of pictures of so many pixels: `size`, as config.json has it, or that of a square."""
    if size is None:
        size = math.isqrt(places)
    height, width = size if isinstance(size, list) else (size, size)
    if height * width != places:
        raise ValueError(
            f"config.json sets n_positions to {places}, but pictures of {height} x {width} have {height * width} "
            'pixels; add "image_size": [height, width]'
        )
    return height if height == width else (height, width)


def write_config(config: ImageGPTConfig) -> dict[str, Any]:
    """The fields of config.json that are ImageGPT's own."""
    optional = {} if config.classifier_dropout is None else {"classifier_dropout": config.classifier_dropout}
    sizes = {"vocab_size": config.vocab_size, "n_positions": config.places, "image_size": config.image_size}
    activation = give_activation(config.activation)
    written = give_fields(config, FIELDS) | REQUIRED
    return {"activation_function": activation, "tie_word_embeddings": False, **sizes, **written, **optional}


IMAGE_GPT = Family(
    model_type="imagegpt",
    prefix="transformer.",
    backbone=ImageGPT,
    rules=lambda config: RULES,
    architectures=(
        Architecture("ImageGPTModel", None, under(ImageGPT, None)),
        Architecture(
            "ImageGPTForCausalImageModeling",
            LanguageModel,
            under(ImageGPT, LanguageModel),
            rules=(Rule("lm_head.weight", "head.kernel", axes=(1, 0)),),
        ),
        Architecture(
            "ImageGPTForImageClassification",
            SequenceClassifier,
            under(ImageGPT, SequenceClassifier),
            rules=(Rule("score.weight", "head.kernel", axes=(1, 0)),),
        ),
    ),
    read_config=read_config,
    write_config=write_config,
    ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
)
