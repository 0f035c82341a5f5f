"""Random changes to the pictures that a model is trained on, with Pillow and NumPy."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from transformers_jax.data.image_processor import ImageProcessor

TRIES = 10
MAX_MAGNITUDE = 30
ERASED_AREA = (0.02, 1 / 3)
ERASED_RATIO = (0.3, 3.3)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """How pictures are changed at random for training. Everything is off by default.

    The order: crop (or what evaluation does), flip, shift, rotate, RandAugment, erasing. What comes into the picture
    from outside is black.
    """

    crop_scale: tuple[float, float] | None = None
    """Cut out a part of the picture with a share of its area between these two (ImageNet: 0.08 1), and resize it. None:
    resize and crop as for evaluation."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """The width of that part divided by its height lies between these two."""
    flip: float = 0.0
    """Mirror left and right with this probability (usually 0.5)."""
    shift: float = 0.0
    """Shift by whole pixels, up to this share of the width and of the height (CIFAR: 0.125, 4 pixels either way)."""
    rotate: float = 0.0
    """Rotate by up to this many degrees either way."""
    rand_augment: int = 0
    """RandAugment: apply this many operations, drawn from 14 (usually 2)."""
    magnitude: float = 9.0
    """The strength of RandAugment's operations, from 0 to 30."""
    erasing: float = 0.0
    """Replace a random rectangle by noise with this probability (usually 0.25)."""

    def __post_init__(self):
        low, high = self.crop_scale or (1.0, 1.0)
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale={self.crop_scale} must be two shares of the area, 0 < smallest <= largest <= 1"
            )
        low, high = self.crop_ratio
        if not 0 < low <= high < math.inf:
            raise ValueError(f"crop_ratio={self.crop_ratio} must be two ratios, 0 < smallest <= largest")
        for name in ("flip", "erasing"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name}={value} must be a probability, from 0 to 1")
        if not 0 <= self.shift < 1:
            raise ValueError(f"shift={self.shift} must be a share of the size, at least 0 and below 1")
        if not 0 <= self.rotate <= 180:
            raise ValueError(f"rotate={self.rotate} must be from 0 to 180 degrees")
        if self.rand_augment < 0:
            raise ValueError(f"rand_augment={self.rand_augment} must be a number of operations, at least 0")
        if not 0 <= self.magnitude <= MAX_MAGNITUDE:
            raise ValueError(f"magnitude={self.magnitude} must be from 0 to {MAX_MAGNITUDE}")

    def __call__(self, image: Image.Image, processor: ImageProcessor, rng: np.random.Generator) -> np.ndarray:
        """(height, width, channels) uint8 of the processor's size; `image` has mode RGB or L."""
        flipped = self.flip > 0 and rng.random() < self.flip
        if self.crop_scale is not None:
            height, width = processor.size
            resampling = Image.Resampling[processor.resampling.upper()]
            image = image.crop(self._box(image, rng)).resize((width, height), resampling)
        elif flipped or self.shift or self.rotate or self.rand_augment:
            array = processor(image)
            image = Image.fromarray(array if array.shape[2] == 3 else array[:, :, 0])
        else:
            return self._erased(processor(image), processor, rng)
        if flipped:  # by Pillow: NumPy takes ten times as long to copy what is mirrored
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if self.shift:
            image = _shifted(image, *(_offset(rng, round(self.shift * length)) for length in image.size))
        if self.rotate:
            image = image.rotate(rng.uniform(-self.rotate, self.rotate), Image.Resampling.BILINEAR)
        for number in rng.integers(len(OPERATIONS), size=self.rand_augment):
            sign = 1 if rng.random() < 0.5 else -1
            image = OPERATIONS[number](image, self.magnitude / MAX_MAGNITUDE, sign)
        array = np.array(image)
        return self._erased(array if array.ndim == 3 else array[:, :, None], processor, rng)

    def _box(self, image: Image.Image, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Left, top, right and bottom, as torchvision's RandomResizedCrop defines them (Szegedy et al., 2015)."""
        assert self.crop_scale is not None
        low, high = self.crop_ratio
        for _ in range(TRIES):
            area = image.width * image.height * rng.uniform(*self.crop_scale)
            ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
            width, height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < width <= image.width and 0 < height <= image.height:
                left = int(rng.integers(image.width - width + 1))
                top = int(rng.integers(image.height - height + 1))
                return left, top, left + width, top + height
        # None fits: as much of the centre as the ratios allow.
        ratio = min(max(image.width / image.height, low), high)
        width = min(image.width, max(1, round(image.height * ratio)))
        height = min(image.height, max(1, round(image.width / ratio)))
        left, top = (image.width - width) // 2, (image.height - height) // 2
        return left, top, left + width, top + height

    def _erased(self, array: np.ndarray, processor: ImageProcessor, rng: np.random.Generator) -> np.ndarray:
        """Random erasing (Zhong et al., 2020), with standard normal noise in terms of normalised pixels."""
        if not self.erasing or rng.random() >= self.erasing:
            return array
        height, width, channels = array.shape
        low, high = ERASED_RATIO
        for _ in range(TRIES):
            area = height * width * rng.uniform(*ERASED_AREA)
            ratio = math.exp(rng.uniform(math.log(low), math.log(high)))
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                top, left = rng.integers(height - h + 1), rng.integers(width - w + 1)
                noise = np.asarray(processor.mean) + np.asarray(processor.std) * rng.standard_normal((h, w, channels))
                array = array.copy()  # the processor's may be the image's own memory
                array[top : top + h, left : left + w] = np.clip(np.rint(noise * 255), 0, 255)
                break
        return array


def _offset(rng: np.random.Generator, largest: int) -> int:
    return int(rng.integers(-largest, largest + 1))


def _affine(image: Image.Image, *inverse: float) -> Image.Image:
    """`inverse` maps a position in the result to one in the image."""
    return image.transform(image.size, Image.Transform.AFFINE, inverse, Image.Resampling.BILINEAR)


def _shifted(image: Image.Image, right: int, down: int) -> Image.Image:
    result = Image.new(image.mode, image.size)
    result.paste(image, (right, down))
    return result


# RandAugment (Cubuk et al., 2020), with torchvision's list and ranges. `strength` goes from 0 to 1, `sign` is 1 or -1.


def _identity(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image


def _shear_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, sign * 0.3 * strength, 0, 0, 1, 0)


def _shear_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _affine(image, 1, 0, 0, sign * 0.3 * strength, 1, 0)


def _translate_x(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _shifted(image, sign * int(150 / 331 * image.width * strength), 0)


def _translate_y(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return _shifted(image, 0, sign * int(150 / 331 * image.height * strength))


def _rotate(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return image.rotate(sign * 30 * strength, Image.Resampling.BILINEAR)


def _brightness(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(1 + sign * 0.9 * strength)


def _color(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageEnhance.Color(image).enhance(1 + sign * 0.9 * strength)


def _contrast(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(1 + sign * 0.9 * strength)


def _sharpness(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * strength)


def _posterize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageOps.posterize(image, 8 - round(4 * strength))


def _solarize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageOps.solarize(image, round(255 * (1 - strength)))


def _auto_contrast(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageOps.autocontrast(image)


def _equalize(image: Image.Image, strength: float, sign: int) -> Image.Image:
    return ImageOps.equalize(image)


OPERATIONS: tuple[Callable[[Image.Image, float, int], Image.Image], ...] = (
    _identity,
    _shear_x,
    _shear_y,
    _translate_x,
    _translate_y,
    _rotate,
    _brightness,
    _color,
    _contrast,
    _sharpness,
    _posterize,
    _solarize,
    _auto_contrast,
    _equalize,
)
