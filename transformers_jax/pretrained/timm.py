"""timm's config.json and back: what it says beside the arguments of a model is said here as transformers has it.

timm writes the `architecture` (the function that makes the model), `model_args` that differ from its own, the labels,
and in `pretrained_cfg` what to do to pictures.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers_jax.data import ImageProcessor
from transformers_jax.data.image_processor import IMAGENET_MEAN, IMAGENET_STD

CROP = 0.95
"""The part of a resized picture's shorter side that published DaViTs see."""


def is_timm(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is one of timm's."""
    return "architecture" in fields and "model_type" not in fields


def from_timm(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of timm's config.json, with the model's arguments side by side, and model type, sizes and labels as
    transformers names them. ValueError for what is no config.json of timm."""
    pictures, arguments = _pictures(fields), dict(fields.get("model_args") or {})
    size = pictures.get("input_size", (3, 224, 224))
    if not isinstance(size, (list, tuple)) or len(size) != 3:
        raise ValueError(f"config.json sets input_size to {size}; it must be channels, height and width")
    channels = arguments.pop("in_chans", size[0])
    count = fields.get("num_classes", arguments.get("num_classes", pictures.get("num_classes", 1000)))
    arguments.pop("num_classes", None)
    names = fields.get("label_names") or pictures.get("label_names") or pictures.get("labels")
    if names and len(names) != count:
        raise ValueError(f"config.json names {len(names)} labels, but sets num_classes to {count}")
    by_id = names if isinstance(names, Mapping) else {str(number): name for number, name in enumerate(names or ())}
    return (
        arguments
        | {
            "model_type": "davit",  # which knows of what architectures it is
            "architecture": str(fields["architecture"]).partition(".")[0],
            "image_size": list(size[1:]),
            "num_channels": channels,
            "image_mean": pictures.get("mean", IMAGENET_MEAN),
            "image_std": pictures.get("std", IMAGENET_STD),
            "num_labels": count,
            "id2label": dict(by_id),
            "problem_type": fields.get("problem_type"),
        }
    )


def to_timm(fields: Mapping[str, Any], processor: object = None) -> dict[str, Any]:
    """timm's config.json for `fields` as `from_timm` gives them, with what the `processor` does to pictures."""
    own = dict(fields)
    architecture, size, channels = own.pop("architecture"), own.pop("image_size"), own.pop("num_channels")
    names = list(own.pop("id2label", {}).values())
    problem_type = own.pop("problem_type", None)
    pictures = {
        "input_size": [channels, *size],
        "mean": own.pop("image_mean"),
        "std": own.pop("image_std"),
        "num_classes": len(names),
        **_steps(processor),
    }
    for name in ("model_type", "architectures", "dtype", "label2id"):
        own.pop(name, None)
    labels = {} if names == [f"LABEL_{number}" for number in range(len(names))] else {"label_names": names}
    return {
        "architecture": architecture,
        "num_classes": len(names),
        "global_pool": "avg",
        "model_args": own | {"in_chans": channels, "num_classes": len(names)},
        "pretrained_cfg": pictures,
        **labels,
        **({} if problem_type is None else {"problem_type": problem_type}),
    }


def processor_of(fields: Mapping[str, Any]) -> ImageProcessor:
    """What timm's config.json says is done to a picture: its shorter side resized to `size / crop_pct` pixels, rounded
    down, and the centre cut out, or both sides resized ("squash"). ValueError for anything else."""
    pictures, sizes = _pictures(fields), from_timm(fields)
    height, width = sizes["image_size"]
    mode, crop = pictures.get("crop_mode") or "center", pictures.get("crop_pct") or 0.875
    if mode not in ("center", "squash") or (mode == "center" and height != width) or (mode == "squash" and crop != 1):
        raise ValueError(
            f"config.json has crop_mode {mode!r} and crop_pct {crop} for pictures of {height} x {width}; supported are "
            "'center' of squares and 'squash' with crop_pct 1; a preprocessor_config.json beside it comes first"
        )
    resize = (height, width) if mode == "squash" else math.floor(height / crop)
    mean, std = tuple(map(float, sizes["image_mean"])), tuple(map(float, sizes["image_std"]))
    channels: int = sizes["num_channels"]
    return ImageProcessor(
        (height, width),
        channels=channels,
        resize=resize,
        crop=mode == "center",
        resampling=pictures.get("interpolation", "bicubic"),
        mean=mean * channels if len(mean) == 1 else mean,
        std=std * channels if len(std) == 1 else std,
    )


def _pictures(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of older files, all fields are in one place."""
    pictures = fields.get("pretrained_cfg", fields)
    if not isinstance(pictures, Mapping):
        raise ValueError("config.json has a pretrained_cfg that is no object")
    return pictures


def _steps(processor: object) -> dict[str, Any]:
    if not isinstance(processor, ImageProcessor):
        return {"interpolation": "bicubic", "crop_pct": CROP, "crop_mode": "center"}
    if isinstance(processor.resize, int):  # timm rounds down
        crop = processor.size[0] / (processor.resize + 0.5)
        return {"interpolation": processor.resampling, "crop_pct": crop, "crop_mode": "center"}
    return {"interpolation": processor.resampling, "crop_pct": 1.0, "crop_mode": "squash"}
