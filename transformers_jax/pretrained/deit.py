"""DeiT of transformers: ViT with a distillation token, and a classifier that may read it."""

import dataclasses
from typing import Any

from transformers_jax.data.image_processor import IMAGENET_MEAN, IMAGENET_STD
from transformers_jax.models import ImageClassifier, ViT, ViTConfig
from transformers_jax.pretrained import vit
from transformers_jax.pretrained.rules import Family, linear


def read_config(fields: dict[str, Any]) -> ViTConfig:
    """Our configuration for the fields of a config.json, of which it takes out those that it knows."""
    config = dataclasses.replace(vit.read_config(fields), distillation_token=True)
    if config.channels != len(IMAGENET_MEAN):
        return config
    return dataclasses.replace(config, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD)


DEIT = Family(
    model_type="deit",
    prefix="deit.",
    backbone=ViT,
    rules=vit.rules,
    architectures=(
        vit.architecture("DeiTModel"),
        vit.architecture(
            "DeiTForImageClassification",
            ImageClassifier,
            rules=linear("classifier", "head"),
            fits=lambda config: not config.distillation_head,
        ),
        vit.architecture(
            "DeiTForImageClassificationWithTeacher",
            ImageClassifier,
            distillation_head=True,
            rules=(*linear("cls_classifier", "head"), *linear("distillation_classifier", "distillation_head")),
            fits=lambda config: config.distillation_head,
        ),
    ),
    read_config=read_config,
    write_config=vit.write_config,
    spare=vit.SPARE,
    fits=lambda config: config.distillation_token,
    fixed=vit.fixed,
)
