"""Random changes to pictures: their distributions, their strengths, and what they leave alone."""

import math
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from scipy import stats

from transformers_jax.data.augmentation import OPERATIONS, Augmentation
from transformers_jax.data.image_processor import ImageProcessor

NAMES = [
    *("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "auto_contrast", "equalize"),
]


def picture(height=40, width=56, mode="RGB", seed=0):
    """Smooth colours with some noise, so that every operation changes something."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:height, :width]
    channels = [40 + 150 * rows / height, 30 + 170 * columns / width, 60 + 90 * (rows + columns) / (height + width)]
    noisy = np.stack(channels, axis=-1) + rng.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(noisy, 5, 250).astype(np.uint8)).convert(mode)


def processor(height=24, width=24, channels=3, **options):
    options = {"resize": (height, width), "resampling": "bicubic"} | options
    numbers = {"mean": (0.5, 0.4, 0.3)[:channels], "std": (0.25, 0.2, 0.1)[:channels]}
    return ImageProcessor((height, width), channels=channels, **(options | numbers))


def as_it_is(height, width, channels=3):
    return processor(height, width, channels, resize=None, crop=True)


class Spy(Image.Image):
    """An image without pixels, which remembers what is cut out of it."""

    def __init__(self, width, height):
        super().__init__()
        self._mode, self._size, self.boxes = "RGB", (width, height), []

    def crop(self, box=None):
        self.boxes.append(box)
        return Image.new("RGB", (4, 4))


def boxes(augmentation, width, height, count):
    spy, rng = Spy(width, height), np.random.default_rng(1)
    for _ in range(count):
        augmentation(spy, processor(4, 4), rng)
    left, top, right, bottom = np.array(spy.boxes).T
    assert (left >= 0).all() and (top >= 0).all() and (right <= width).all() and (bottom <= height).all()
    return left, top, right - left, bottom - top


# Nothing, and everything


@pytest.mark.parametrize("mode, channels", [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("options", [{}, {"resize": 30, "crop": True}])
def test_without_settings_it_is_the_processor(mode, channels, options):
    ours = processor(24, 20, channels, **({"resize": (24, 20)} | options))
    image = picture(mode=mode)
    np.testing.assert_array_equal(Augmentation()(image, ours, np.random.default_rng(0)), ours(image))


EVERYTHING = Augmentation(
    crop_scale=(0.1, 1.0), flip=0.5, shift=0.2, rotate=15, rand_augment=2, magnitude=20, erasing=0.5
)


@pytest.mark.parametrize("mode, channels", [("RGB", 3), ("L", 1)])
@pytest.mark.parametrize("size", [(8, 8), (1, 30), (90, 31)])
def test_any_picture_gives_whole_arrays_that_the_generator_alone_decides(mode, channels, size):
    image, ours = picture(*size, mode), processor(12, 17, channels)
    before = np.array(image)
    seen = set()
    for seed in range(40):
        one, two = (EVERYTHING(image, ours, np.random.default_rng(seed)) for _ in range(2))
        assert one.shape == (12, 17, channels) and one.dtype == np.uint8
        np.testing.assert_array_equal(one, two)
        seen.add(one.tobytes())
    assert len(seen) == 40
    np.testing.assert_array_equal(np.array(image), before)


# Random resized crop: torchvision's definition


def test_crops_have_areas_and_ratios_of_the_published_distributions():
    """In a square of 1000 nothing with at most half of the area and ratios of 3/4 to 4/3 is too long: no second tries,
    so areas are uniform, ratios log-uniform, and both independent."""
    _, _, width, height = boxes(Augmentation(crop_scale=(0.08, 0.5)), 1000, 1000, 4000)
    areas, ratios = width * height / 1e6, width / height
    assert stats.kstest(areas, stats.uniform(0.08, 0.42).cdf).pvalue > 1e-3
    assert stats.kstest(np.log(ratios), stats.uniform(-math.log(4 / 3), 2 * math.log(4 / 3)).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(areas, np.log(ratios))[0, 1]) < 0.05


def test_crops_lie_anywhere():
    left, top, width, height = boxes(Augmentation(crop_scale=(0.1, 0.1), crop_ratio=(1, 1)), 300, 200, 4000)
    assert {*width} == {77} and {*height} == {77}  # sqrt(6000) = 77.46
    for place, free in ((left, 300 - 77), (top, 200 - 77)):
        assert {*place} == set(range(free + 1))
        assert stats.chisquare(np.bincount(place, minlength=free + 1)).pvalue > 1e-3


@pytest.mark.parametrize("size, box", [((400, 20), (187, 0, 27, 20)), ((20, 400), (0, 187, 20, 27))])
def test_where_no_crop_fits_the_centre_is_taken(size, box):
    """All of the area of a strip is too long for 4/3: as much of the middle as that allows, 20 x 27."""
    found = np.array(boxes(Augmentation(crop_scale=(1.0, 1.0)), *size, 3)).T
    np.testing.assert_allclose(found, [box] * 3, atol=1)
    assert sorted(found[0][2:]) == [20, 27]


def test_the_whole_picture_is_a_crop_too():
    image, ours = picture(48, 48), processor(24, 24)
    got = Augmentation(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0))(image, ours, np.random.default_rng(0))
    np.testing.assert_array_equal(got, ours(image))


@pytest.mark.parametrize("name", ["bilinear", "bicubic", "lanczos"])
def test_crops_are_resized_with_the_processors_filter(name):
    image, ours = picture(64, 80), processor(24, 20, resampling=name)
    augmentation = Augmentation(crop_scale=(0.3, 0.6))
    spy = Spy(80, 64)
    augmentation(spy, ours, np.random.default_rng(5))
    expected = image.crop(spy.boxes[0]).resize((20, 24), Image.Resampling[name.upper()])
    np.testing.assert_array_equal(augmentation(image, ours, np.random.default_rng(5)), np.array(expected))


# Flip, shift, rotate


def test_flips_mirror_as_often_as_they_should():
    image, ours = picture(16, 20), as_it_is(16, 20)
    plain, count = np.array(image), 0
    for seed in range(1000):
        got = Augmentation(flip=0.3)(image, ours, np.random.default_rng(seed))
        flipped = np.array_equal(got, plain[:, ::-1])
        assert flipped or np.array_equal(got, plain)
        count += flipped
    assert stats.binomtest(count, 1000, 0.3).pvalue > 1e-3


def test_shifts_are_those_of_pad_and_crop():
    """CIFAR's recipe: 4 black pixels around 32 x 32, then one of the 81 crops of that size, each as likely."""
    image = picture(32, 32)
    padded = np.pad(np.array(image), [(4, 4), (4, 4), (0, 0)])
    crops = {padded[i : i + 32, j : j + 32].tobytes(): (i, j) for i in range(9) for j in range(9)}
    rng, counts = np.random.default_rng(0), np.zeros((9, 9), int)
    for _ in range(81 * 40):
        counts[crops[Augmentation(shift=0.125)(image, as_it_is(32, 32), rng).tobytes()]] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3


def test_shifts_follow_each_side():
    image = Image.new("L", (30, 10), 255)
    corners = set()
    for seed in range(300):
        got = Augmentation(shift=0.1)(image, as_it_is(10, 30, 1), np.random.default_rng(seed))[:, :, 0]
        corners.add((int((got == 255).any(0).sum()), int((got == 255).any(1).sum())))
    assert corners == {(30 - i, 10 - j) for i in range(4) for j in range(2)}


def test_rotations_are_by_any_angle_up_to_the_limit_either_way():
    """A bright wedge on the right: the angle of its centre of mass is that of the rotation."""
    line = np.zeros((41, 41), np.uint8)
    line[19:22, 21:38] = 255
    image, rows = Image.fromarray(line), np.arange(41)[:, None] - 20
    angles = []
    for seed in range(300):
        got = Augmentation(rotate=20)(image, as_it_is(41, 41, 1), np.random.default_rng(seed))[:, :, 0].astype(float)
        angles.append(math.degrees(math.atan2(-(got * rows).sum(), (got * rows.T).sum())))
    assert -20.5 < min(angles) < -18 and 18 < max(angles) < 20.5
    assert stats.kstest(angles, stats.uniform(-20, 40).cdf).pvalue > 1e-3


# RandAugment


def operation(name, image, strength, sign=1):
    return np.array(OPERATIONS[NAMES.index(name)](image, strength, sign))


def test_the_operations_are_those_of_the_paper():
    assert len(OPERATIONS) == 14 and [op.__name__[1:] for op in OPERATIONS] == NAMES


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("magnitude", [0, 9, 15, 30])
@pytest.mark.parametrize("sign", [1, -1])
def test_strengths_are_torchvisions(mode, magnitude, sign):
    """Its documented space of 31 magnitudes: enhancements by up to 0.9, rotation 30 degrees, shear 0.3, translation
    150/331 of the side, posterising down to 4 bits, solarising from 255 down to 0. Each with Pillow itself."""
    image = picture(mode=mode)
    strength = magnitude / 30
    factor = 1 + sign * 0.9 * magnitude / 30
    expected = {
        "identity": image,
        "brightness": ImageEnhance.Brightness(image).enhance(factor),
        "color": ImageEnhance.Color(image).enhance(factor),
        "contrast": ImageEnhance.Contrast(image).enhance(factor),
        "sharpness": ImageEnhance.Sharpness(image).enhance(factor),
        "posterize": ImageOps.posterize(image, {0: 8, 9: 7, 15: 6, 30: 4}[magnitude]),
        "solarize": ImageOps.solarize(image, {0: 255, 9: 178, 15: 128, 30: 0}[magnitude]),
        "auto_contrast": ImageOps.autocontrast(image),
        "equalize": ImageOps.equalize(image),
        "rotate": image.rotate(sign * magnitude, Image.Resampling.BILINEAR),
    }
    for name, result in expected.items():
        np.testing.assert_array_equal(operation(name, image, strength, sign), np.array(result), err_msg=name)
    plain = np.array(image)
    right, down = (int(Fraction(150, 331) * side * magnitude / 30) for side in image.size)
    moved = np.zeros_like(plain)
    moved[:, right:] = plain[:, : image.width - right]
    result = operation("translate_x", image, strength, 1)
    np.testing.assert_array_equal(result, moved)
    moved = np.zeros_like(plain)
    moved[: image.height - down] = plain[down:]
    np.testing.assert_array_equal(operation("translate_y", image, strength, -1), moved)


@pytest.mark.parametrize("sign", [1, -1])
def test_shears_move_rows_and_columns_in_proportion(sign):
    """A vertical line under a horizontal shear of 0.3 leans by 0.3 pixels a row; and the other way round."""
    line = np.zeros((40, 60), np.uint8)
    line[:, 30] = 200
    leaning = operation("shear_x", Image.fromarray(line), 1.0, sign).astype(float)
    centres = (leaning * np.arange(60)).sum(1) / leaning.sum(1)
    np.testing.assert_allclose(np.diff(centres), -sign * 0.3, atol=0.05)
    upright = operation("shear_y", Image.fromarray(line.T), 1.0, sign).T.astype(float)
    np.testing.assert_array_equal(upright, leaning)


def test_operations_are_drawn_alike_and_signs_half_of_the_time():
    """With a magnitude whose results all differ, each result names its operation and sign."""
    image, ours = picture(24, 32), as_it_is(24, 32)
    names = {}
    for number, name in enumerate(NAMES):
        for sign in (1, -1):
            names.setdefault(np.array(OPERATIONS[number](image, 0.5, sign)).tobytes(), (name, sign))
    assert len(names) == 14 + 9  # nine of them have a sign
    counts = dict.fromkeys(NAMES, 0)
    positive = signed = 0
    rng = np.random.default_rng(3)
    for _ in range(2800):
        name, sign = names[Augmentation(rand_augment=1, magnitude=15)(image, ours, rng).tobytes()]
        counts[name] += 1
        if NAMES.index(name) in range(1, 10):
            signed, positive = signed + 1, positive + (sign == 1)
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3
    assert stats.binomtest(positive, signed, 0.5).pvalue > 1e-3


def test_several_operations_follow_one_another():
    image, ours = picture(24, 32), as_it_is(24, 32)
    two = {
        np.array(second(first(image, 0.5, s), 0.5, t)).tobytes()
        for first in OPERATIONS
        for second in OPERATIONS
        for s in (1, -1)
        for t in (1, -1)
    }
    rng = np.random.default_rng(0)
    results = [Augmentation(rand_augment=2, magnitude=15)(image, ours, rng).tobytes() for _ in range(100)]
    assert set(results) <= two and len(set(results)) > 60


# Random erasing


def test_erased_rectangles_have_the_published_size_and_shape():
    """Area 0.02 to 1/3 and ratio 0.3 to 3.3 of the paper, up to rounding; as often as asked for."""
    image, ours = Image.new("RGB", (120, 120), (255, 0, 255)), as_it_is(120, 120)
    plain, areas, ratios, erased = np.array(image), [], [], 0
    for seed in range(600):
        got = Augmentation(erasing=0.4)(image, ours, np.random.default_rng(seed))
        changed = (got != plain).any(-1)
        if not changed.any():
            continue
        erased += 1
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        height, width = np.ptp(rows) + 1, np.ptp(columns) + 1
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.95  # noise may hit the colour
        areas.append(height * width / 120**2)
        ratios.append(height / width)
    assert stats.binomtest(erased, 600, 0.4).pvalue > 1e-3
    assert min(areas) > 0.018 and max(areas) < 0.345 and min(ratios) > 0.28 and max(ratios) < 3.5
    assert stats.kstest(areas, stats.uniform(0.02, 1 / 3 - 0.02).cdf).pvalue > 1e-3
    low, high = math.log(0.3), math.log(3.3)
    assert stats.kstest(np.log(ratios), stats.uniform(low, high - low).cdf).pvalue > 1e-3


@pytest.mark.parametrize("mode, channels", [("RGB", 3), ("L", 1)])
def test_what_is_erased_is_noise_around_the_mean_of_normalised_pixels(mode, channels):
    image, ours = Image.new(mode, (200, 200)), as_it_is(200, 200, channels)
    values = []
    for seed in range(40):
        got = Augmentation(erasing=1.0)(image, ours, np.random.default_rng(seed))
        rows, columns = np.flatnonzero(got.any((1, 2))), np.flatnonzero(got.any((0, 2)))
        values.append(got[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].reshape(-1, channels))
    values = np.concatenate(values) / 255
    for channel in range(channels):  # of a normal distribution that is cut off at 0 and 1
        mean, std = ours.mean[channel], ours.std[channel]
        expected = stats.norm(mean, std)
        assert abs(np.median(values[:, channel]) - mean) < 0.005
        for share in (0.1, 0.25, 0.75, 0.9):
            assert abs(np.quantile(values[:, channel], share) - max(0, expected.ppf(share))) < 0.005


# Settings


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"crop_scale": (0.0, 1.0)},
            r"crop_scale=\(0.0, 1.0\) must be two shares of the area, 0 < smallest <= largest <= 1",
        ),
        ({"crop_scale": (0.5, 0.2)}, r"crop_scale=\(0.5, 0.2\)"),
        ({"crop_scale": (0.5, 1.5)}, r"crop_scale=\(0.5, 1.5\)"),
        ({"crop_ratio": (0.0, 1.0)}, r"crop_ratio=\(0.0, 1.0\) must be two ratios"),
        ({"crop_ratio": (1.0, math.inf)}, r"crop_ratio=\(1.0, inf\)"),
        ({"flip": 1.5}, "flip=1.5 must be a probability, from 0 to 1"),
        ({"erasing": -0.1}, "erasing=-0.1 must be a probability, from 0 to 1"),
        ({"flip": math.nan}, "flip=nan"),
        ({"shift": 1.0}, "shift=1.0 must be a share of the size"),
        ({"rotate": 200.0}, "rotate=200.0 must be from 0 to 180 degrees"),
        ({"rand_augment": -1}, "rand_augment=-1 must be a number of operations"),
        ({"magnitude": 31.0}, "magnitude=31.0 must be from 0 to 30"),
    ],
)
def test_impossible_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Augmentation(**settings)
