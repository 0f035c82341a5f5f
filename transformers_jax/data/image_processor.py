"""What evaluation does to a picture before a model sees it, as Hugging Face's `preprocessor_config.json` says it."""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from transformers_jax.data.palette import Palette

FILE = "preprocessor_config.json"

Resampling = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """Resizing, cropping and normalising; `processor(image)` does the first two, on 8-bit pixels.

    The order is that of transformers' image processors, and so are the pixels (of those that use Pillow).
    """

    size: tuple[int, int]
    """(height, width) of what it gives."""
    _: dataclasses.KW_ONLY
    channels: int = 3
    resize: tuple[int, int] | int | None = None
    """To this (height, width), or so that the shorter side has this length, or not at all."""
    crop: bool = False
    """Cut `size` out of the centre of the resized picture; a side that is shorter gets black borders."""
    resampling: Resampling = "bilinear"
    mean: tuple[float, ...] = HALF
    std: tuple[float, ...] = HALF
    """Of each channel, for pixels from 0 to 1."""
    palette: Palette | None = None
    """The colours whose numbers a model reads in place of pixels, if it does (Image GPT)."""

    def __post_init__(self):
        sides = (*self.size, *(self.resize if isinstance(self.resize, tuple) else (self.resize or 1,)))
        if min(sides) < 1:
            raise ValueError(f"size is {self.size} and resize {self.resize}; all lengths must be at least 1")
        if self.channels not in (1, 3):
            raise ValueError(f"channels is {self.channels}; it must be 1 (grey) or 3 (RGB)")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(
                f"mean has {len(self.mean)} and std {len(self.std)} numbers, but there are {self.channels} channels"
            )
        if not all(map(math.isfinite, self.mean)) or not all(0 < value < math.inf for value in self.std):
            raise ValueError(f"mean {self.mean} must be finite and std {self.std} above 0")
        if self.resampling.upper() not in Image.Resampling.__members__:
            raise ValueError(f"resampling is {self.resampling!r}; known are {', '.join(_names())}")
        if not self.crop and self.resize != self.size:
            raise ValueError(f"without crop, resize must be the size {self.size}, but it is {self.resize}")
        if self.palette is not None and self.palette.channels != self.channels:
            raise ValueError(f"the palette has {self.palette.channels} channels, but pictures {self.channels}")

    @classmethod
    def standard(
        cls,
        size: int | tuple[int, int],
        *,
        channels: int = 3,
        mean: Sequence[float] = HALF,
        std: Sequence[float] = HALF,
        crop_fraction: float = 0.875,
        resampling: Resampling = "bicubic",
    ) -> "ImageProcessor":
        """The centre of a picture: its shorter side is resized to the longer side of `size` divided by
        `crop_fraction`, then `size` is cut out. One number of mean and std serves all channels."""
        if not 0 < crop_fraction <= 1:
            raise ValueError(f"crop_fraction is {crop_fraction}; it must be above 0 and at most 1")
        size = (size, size) if isinstance(size, int) else size
        return cls(
            size,
            channels=channels,
            resize=round(max(size) / crop_fraction),
            crop=True,
            resampling=resampling,
            mean=_spread(mean, channels),
            std=_spread(std, channels),
        )

    @classmethod
    def default_of(cls, model_type: str, size: int | tuple[int, int], channels: int = 3) -> "ImageProcessor":
        """What the published checkpoints of a kind do, for one that comes without the file.

        "vit": resized to `size` whatever the shape, bilinear, to values from -1 to 1 (Google's). "deit": the shorter
        side resized to 256 for each 224 of `size`, bicubic, the centre cut out, ImageNet's mean and std (Facebook's).
        "swin": as "vit", but bicubic, and ImageNet's mean and std (Microsoft's).
        """
        size = (size, size) if isinstance(size, int) else size
        if model_type == "vit":
            half = _spread(HALF, channels)
            return cls(size, channels=channels, resize=size, resampling="bilinear", mean=half, std=half)
        if model_type == "deit":
            return cls.standard(size, channels=channels, mean=IMAGENET_MEAN, std=IMAGENET_STD, crop_fraction=224 / 256)
        if model_type == "swin":
            mean, std = _spread(IMAGENET_MEAN, channels), _spread(IMAGENET_STD, channels)
            return cls(size, channels=channels, resize=size, resampling="bicubic", mean=mean, std=std)
        raise ValueError(f"no image processor is known for a {model_type!r}; there are vit, deit and swin")

    def __call__(self, image: Image.Image) -> np.ndarray:
        """uint8 pixels (height, width, channels) of `size`; `image` is RGB, or L for one channel."""
        wanted = "L" if self.channels == 1 else "RGB"
        if image.mode != wanted:
            raise ValueError(f"an image of mode {image.mode} for {self.channels} channels; decode_image gives {wanted}")
        if self.resize is not None:
            height, width = self._sides(image.height, image.width)
            image = image.resize((width, height), Image.Resampling[self.resampling.upper()])
        pixels = np.asarray(image).reshape(image.height, image.width, self.channels)
        return _centre(pixels, self.size) if self.crop else pixels

    def _sides(self, height: int, width: int) -> tuple[int, int]:
        if isinstance(self.resize, tuple):
            return self.resize
        assert self.resize is not None
        longer = int(self.resize * max(height, width) / min(height, width))
        if longer * self.resize > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(
                f"an image of {width} x {height} pixels, too long to resize its shorter side to {self.resize} "
                f"({longer:,} x {self.resize} pixels are more than PIL.Image.MAX_IMAGE_PIXELS)"
            )
        return (longer, self.resize) if width <= height else (self.resize, longer)

    def normalise(self, pixels: np.ndarray) -> np.ndarray:
        """(pixels / 255 - mean) / std of uint8 pixels (..., channels), as float32."""
        scaled = (pixels.astype(np.float64) * (1 / 255)).astype(np.float32)
        return (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)

    def ids(self, pixels: np.ndarray) -> np.ndarray:
        """The colours of uint8 pixels (..., height, width, channels) of `size`: int32 (..., height * width), row by
        row. ValueError for pictures of another size, or without a palette."""
        wanted = (*self.size, self.channels)
        if pixels.shape[-3:] != wanted or pixels.dtype != np.uint8:
            raise ValueError(
                f"pixels are {pixels.dtype} of shape {pixels.shape}; a picture is uint8 of (height, width, channels) "
                f"{wanted}"
            )
        return self._palette.ids(self.normalise(pixels)).reshape(*pixels.shape[:-3], -1)

    def pixels(self, ids: np.ndarray) -> np.ndarray:
        """The uint8 pixels (..., height, width, channels) of colours (..., height * width). ValueError for another
        number of them, an id outside the palette, or without a palette."""
        ids, (height, width) = np.asarray(ids), self.size
        if ids.shape[-1:] != (height * width,):
            raise ValueError(f"ids of shape {ids.shape} are not those of pictures of {height} x {width} pixels")
        colours = self._palette.colours(ids) * np.array(self.std) + np.array(self.mean)
        whole = np.clip(np.rint(colours * 255), 0, 255).astype(np.uint8)
        return whole.reshape(*ids.shape[:-1], height, width, self.channels)

    def with_palette(self, pixels: np.ndarray, size: int) -> "ImageProcessor":
        """This processor with a palette of `size` colours, trained on uint8 `pixels` (..., channels)."""
        colours, counts = np.unique(pixels.reshape(-1, self.channels), axis=0, return_counts=True)
        return dataclasses.replace(self, palette=Palette.train(self.normalise(colours), size, weights=counts))

    @property
    def _palette(self) -> Palette:
        if self.palette is None:
            raise ValueError(f"there is no palette; {FILE} has none (clusters), or the processor is not an Image GPT's")
        return self.palette

    def resized(self, size: int | tuple[int, int]) -> "ImageProcessor":
        """The same for another size: what is cropped is cropped in the same proportion."""
        size = (size, size) if isinstance(size, int) else size
        scales = [new / old for new, old in zip(size, self.size, strict=True)]
        resize = self.resize
        if isinstance(resize, tuple):
            resize = (round(resize[0] * scales[0]), round(resize[1] * scales[1]))
        elif resize is not None:
            resize = round(resize * max(size) / max(self.size))
        return dataclasses.replace(self, size=size, resize=resize)

    def describe(self) -> str:
        """`224 x 224: shorter side to 256 (bicubic), centre; mean 0.485 0.456 0.406, std 0.229 0.224 0.225`."""
        if isinstance(self.resize, tuple):
            steps = [f"resized to {self.resize[0]} x {self.resize[1]} ({self.resampling})"]
        else:
            steps = [] if self.resize is None else [f"shorter side to {self.resize} ({self.resampling})"]
        steps += ["centre"] if self.crop else []
        mean, std = (" ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        colours = "" if self.palette is None else f"; {len(self.palette)} colours"
        return f"{self.size[0]} x {self.size[1]}: {', '.join(steps)}; mean {mean}, std {std}{colours}"

    @property
    def fingerprint(self) -> str:
        """Differs between processors that give other numbers."""
        settings = dataclasses.astuple(self)
        settings = settings[:-1] if self.palette is None else settings  # as of runs that are older than palettes
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    # Hugging Face's file

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write `preprocessor_config.json`, which transformers' classes for ViT, DeiT and (with a palette) ImageGPT
        read to the same effect; but they put a transparent picture on white, and the last one must be given RGB."""
        height, width = self.size
        content: dict[str, Any] = {
            "image_processor_type": "DeiTImageProcessor" if self.crop else "ViTImageProcessor",
            "do_resize": self.resize is not None,
            "size": {"height": height, "width": width},
            "resample": int(Image.Resampling[self.resampling.upper()]),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        if isinstance(self.resize, tuple):
            content["size"] = {"height": self.resize[0], "width": self.resize[1]}
        elif self.resize is not None:
            content["size"] = {"shortest_edge": self.resize}
        if self.crop:
            content |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
        if self.palette is not None:
            # transformers quantises three channels only, to which a grey picture has equal ones.
            grey = 3 if self.channels == 1 else 1
            content |= {
                "image_processor_type": "ImageGPTImageProcessor",
                "do_color_quantize": True,
                "clusters": [list(colour) * grey for colour in self.palette.clusters],
                "image_mean": list(self.mean) * grey,
                "image_std": list(self.std) * grey,
                "num_channels": self.channels,
            }
        if self.channels == 3:
            content["do_convert_rgb"] = True
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, directory: str | os.PathLike[str], *, channels: int = 3) -> "ImageProcessor":
        """Read `preprocessor_config.json`, or such a file by its own name.

        As transformers does: what is missing in it is as in the class that it names (ViT, DeiT, BiT, ConvNeXT or
        ImageGPT; ViT if none). `channels` counts where mean and std are single numbers. Raises `FileNotFoundError`
        without the file, and `ValueError` that names the setting for one that would give other numbers.
        """
        path = Path(directory)
        path = path / FILE if path.is_dir() else path
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no {path.name} in {path.parent}") from None
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} does not hold a JSON object")
        try:
            return _from_settings(content, channels)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def _names() -> list[str]:
    return [member.name.lower() for member in Image.Resampling]


def _spread(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """A number for each channel, where one serves all; of RGB's for a grey picture, the mean."""
    if len(values) == 1 or (channels == 1 and len(values) == 3):
        return (float(np.mean(values)),) * channels
    return tuple(map(float, values))


def _centre(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The centre, in zeros where it is too small; an odd pixel is cut at the end, or filled in at the start."""
    for axis, wanted in enumerate(size):
        length = pixels.shape[axis]
        if length >= wanted:
            start = (length - wanted) // 2
            pixels = pixels[start : start + wanted] if axis == 0 else pixels[:, start : start + wanted]
        else:
            before = -((length - wanted) // 2)
            border = [(0, 0)] * pixels.ndim
            border[axis] = (before, wanted - length - before)
            pixels = np.pad(pixels, border)
    return pixels


# The settings of a family where its file is silent, and what an int as size means: both sides, or the shorter one.
_SQUARE, _SHORTER = "both sides", "the shorter side"
_KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "ViT": ({"size": 224, "resample": 2, "image_mean": HALF, "image_std": HALF}, _SQUARE),
    "DeiT": (
        {"size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3, "image_mean": HALF, "image_std": HALF},
        _SQUARE,
    ),
    "Bit": (
        {"size": 224, "crop_size": 224, "do_center_crop": True, "resample": 3}
        | {"image_mean": CLIP_MEAN, "image_std": CLIP_STD},
        _SHORTER,
    ),
    "ImageGPT": ({"size": 256, "resample": 2, "image_mean": HALF, "image_std": HALF}, _SQUARE),
    "ConvNext": ({"size": 384, "crop_pct": 224 / 256, "resample": 3, "image_mean": HALF, "image_std": HALF}, _SHORTER),
}
_ENDINGS = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor")
_WITHOUT_EFFECT = frozenset(
    (
        *("do_convert_rgb", "default_to_square", "processor_class", "auto_map", "_valid_processor_keys", "data_format"),
        *("input_data_format", "device", "return_tensors", "disable_grouping", "image_seq_length", "num_channels"),
    )
)


def _from_settings(content: dict[str, Any], channels: int) -> ImageProcessor:
    settings = {name: value for name, value in content.items() if value is not None and name not in _WITHOUT_EFFECT}
    names = [str(settings.pop(name)) for name in ("image_processor_type", "feature_extractor_type") if name in settings]
    kind = names[0] if names else "ViTImageProcessor"
    family = next((kind.removesuffix(ending) for ending in _ENDINGS if kind.endswith(ending)), kind)
    if family not in _KINDS:
        known = ", ".join(f"{name}ImageProcessor" for name in _KINDS)
        raise ValueError(f"image_processor_type is {kind!r}, of which nothing is known; known are {known}")
    defaults, int_means = _KINDS[family]
    if isinstance(content.get("default_to_square"), bool):
        int_means = _SQUARE if content["default_to_square"] else _SHORTER
    settings = defaults | settings

    palette = None
    if family == "ImageGPT":
        channels = content.get("num_channels", channels)
        palette = _clusters(settings.pop("clusters", None), channels)
        palette = palette if _flag(settings, "do_color_quantize", True) else None

    do_resize, do_crop = _flag(settings, "do_resize", True), _flag(settings, "do_center_crop", False)
    if not _flag(settings, "do_rescale", True):
        raise ValueError("do_rescale is false, but models are given pixels from 0 to 1 before they are normalised")
    factor = settings.pop("rescale_factor", 1 / 255)
    if not isinstance(factor, (int, float)) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise ValueError(f"rescale_factor is {factor!r}, not 1/255; other scales are not supported")
    mean, std = settings.pop("image_mean"), settings.pop("image_std")
    if not _flag(settings, "do_normalize", True):
        mean, std = 0.0, 1.0
    means, stds = _numbers("image_mean", mean, channels), _numbers("image_std", std, channels)
    if family == "ImageGPT":
        means, stds = _spread(means, channels), _spread(stds, channels)
    channels = len(means)

    crop_fraction = settings.pop("crop_pct", None)
    resize = _side("size", settings.pop("size"), int_means) if do_resize else None
    settings.pop("size", None)
    crop_size = settings.pop("crop_size", None)
    size = _side("crop_size", crop_size, _SQUARE) if do_crop else resize
    if family == "ConvNext":
        if do_crop or not isinstance(resize, int):
            raise ValueError("a ConvNextImageProcessor needs a size of shortest_edge and no do_center_crop")
        # Below 384 it cuts out the centre; from there on it resizes both sides.
        size, do_crop = (resize, resize), resize < 384
        resize = int(resize / float(crop_fraction)) if do_crop else size
    if not isinstance(size, tuple):
        raise ValueError(
            "the size of the result depends on the picture; do_center_crop with a crop_size, or a size of height and "
            "width is needed"
        )
    resample = settings.pop("resample")
    if resample not in list(Image.Resampling):
        raise ValueError(f"resample is {resample!r}; it must be 0 to 5, one of Pillow's filters")
    if _flag(settings, "do_pad", False):
        raise ValueError("do_pad is true, which is not supported")
    settings.pop("pad_size", None)
    unknown = {name: value for name, value in settings.items() if not (name.startswith("do_") and value is False)}
    if unknown:
        name, value = min(unknown.items())
        raise ValueError(f"the setting {name} = {value!r:.60} is not known, and may change the pixels")
    resampling: Any = Image.Resampling(resample).name.lower()
    return ImageProcessor(
        size,
        channels=channels,
        resize=resize,
        crop=do_crop,
        resampling=resampling,
        mean=means,
        std=stds,
        palette=palette,
    )


def _flag(settings: dict[str, Any], name: str, default: bool) -> bool:
    value = settings.pop(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def _numbers(name: str, value: Any, channels: int) -> tuple[float, ...]:
    values = [value] * channels if isinstance(value, (int, float)) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(item, (int, float)) for item in values):
        raise ValueError(f"{name} is {value!r:.60}; a number for each channel is needed")
    return tuple(map(float, values))


def _clusters(value: Any, channels: int) -> Palette | None:
    """The colours of ImageGPT's file; those of grey pictures stand there with three equal channels."""
    if value is None:
        return None
    try:
        clusters = np.array(value, np.float64)
    except (ValueError, TypeError):
        clusters = np.array(0.0)
    if clusters.ndim != 2 or clusters.shape[1] not in (channels, 3):
        raise ValueError(f"clusters is {value!r:.60}; a list of colours of {channels} numbers each is needed")
    if clusters.shape[1] != channels:
        if (clusters != clusters[:, :1]).any():
            raise ValueError(f"clusters are colours, but pictures have {channels} channel")
        clusters = clusters[:, :1]
    return Palette(tuple(tuple(map(float, colour)) for colour in clusters))


def _side(name: str, value: Any, int_means: str) -> tuple[int, int] | int:
    """A size as {"height", "width"}, {"shortest_edge"}, [height, width], or one number."""
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
        if set(value) == {"height", "width"}:
            value = [value["height"], value["width"]]
        elif set(value) == {"shortest_edge"}:
            value, int_means = value["shortest_edge"], _SHORTER
    if isinstance(value, int) and not isinstance(value, bool):
        return value if int_means == _SHORTER else (value, value)
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(item, int) for item in value):
        return value[0], value[1]
    raise ValueError(f"{name} is {value!r}; a number, height and width, or shortest_edge is needed")
