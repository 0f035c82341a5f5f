"""Pixels are those of transformers' image processors, and each reads the other's file."""

import json

import numpy as np
import pytest
from PIL import Image

from transformers_jax.data import ImageProcessor

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pil_vit = pytest.importorskip("transformers.models.vit.image_processing_pil_vit")
pil_deit = pytest.importorskip("transformers.models.deit.image_processing_pil_deit")
pil_bit = pytest.importorskip("transformers.models.bit.image_processing_pil_bit")
pil_convnext = pytest.importorskip("transformers.models.convnext.image_processing_pil_convnext")

CLASSES = {
    "ViT": pil_vit.ViTImageProcessorPil,
    "DeiT": pil_deit.DeiTImageProcessorPil,
    "Bit": pil_bit.BitImageProcessorPil,
    "ConvNext": pil_convnext.ConvNextImageProcessorPil,
}
# (width, height): larger and smaller than what comes out, square or not, odd, one pixel.
PICTURES = [(64, 48), (33, 77), (17, 17), (9, 30), (41, 20), (1, 1), (200, 31), (24, 24)]


def picture(width, height, mode="RGB", seed=0):
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, np.uint8))


def assert_equal_pixels(ours, theirs, *, mode="RGB"):
    for width, height in PICTURES:
        image = picture(width, height, mode)
        raw = theirs(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        expected = np.moveaxis(raw, 0, -1)
        pixels = ours(image)
        assert pixels.dtype == np.uint8 and expected.dtype == np.uint8
        np.testing.assert_array_equal(pixels, expected, err_msg=f"{width} x {height}")
        normalised = np.moveaxis(theirs(image, return_tensors="np")["pixel_values"][0], 0, -1)
        np.testing.assert_allclose(ours.normalise(pixels), normalised, rtol=0, atol=1e-6)
        assert ours.normalise(pixels).dtype == np.float32


SETTINGS = [
    ("ViT", {"size": 32}),
    ("ViT", {"size": {"height": 21, "width": 40}, "resample": 3}),
    ("ViT", {"size": [21, 40], "resample": 0}),
    ("ViT", {"size": 30, "do_center_crop": True, "crop_size": 24}),
    ("ViT", {"size": {"shortest_edge": 27}, "do_center_crop": True, "crop_size": {"height": 24, "width": 19}}),
    ("ViT", {"do_resize": False, "do_center_crop": True, "crop_size": 23}),
    ("ViT", {"size": 16, "do_normalize": False}),
    ("ViT", {"size": 16, "image_mean": 0.25, "image_std": 0.75}),
    ("ViT", {"size": 16, "rescale_factor": 0.00392156862745098}),
    ("DeiT", {"size": 36, "crop_size": 31, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}),
    ("DeiT", {"size": {"shortest_edge": 29}, "crop_size": 25, "resample": 1}),
    ("DeiT", {"size": 20, "crop_size": {"height": 33, "width": 15}}),
    ("DeiT", {"size": 32, "do_center_crop": False}),
    ("Bit", {"size": 30, "crop_size": 26}),
    ("Bit", {"size": 30, "crop_size": 26, "do_convert_rgb": None}),
    ("ConvNext", {"size": 40}),
    ("ConvNext", {"size": 40, "crop_pct": 0.9, "resample": 2}),
    ("ConvNext", {"size": {"shortest_edge": 384}}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("key", ["image_processor_type", "feature_extractor_type"])
def test_a_file_means_what_it_means_to_transformers(tmp_path, kind, settings, key):
    ending = "ImageProcessor" if key == "image_processor_type" else "FeatureExtractor"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({key: kind + ending, **settings}))
    assert_equal_pixels(ImageProcessor.load(tmp_path), CLASSES[kind].from_pretrained(tmp_path))


@pytest.mark.parametrize("kind", CLASSES)
def test_what_a_file_does_not_say(tmp_path, kind):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": f"{kind}ImageProcessor"}))
    assert_equal_pixels(ImageProcessor.load(tmp_path), CLASSES[kind].from_pretrained(tmp_path))


@pytest.mark.parametrize("kind", CLASSES)
def test_files_that_transformers_writes(tmp_path, kind):
    theirs = CLASSES[kind]()
    theirs.save_pretrained(tmp_path)
    assert_equal_pixels(ImageProcessor.load(tmp_path), theirs)


PROCESSORS = {
    "vit": ImageProcessor.default_of("vit", 32),
    "deit": ImageProcessor.default_of("deit", 28),
    "not square": ImageProcessor.default_of("vit", (20, 31)),
    "standard": ImageProcessor.standard(24, crop_fraction=0.95, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)),
    "standard, not square": ImageProcessor.standard((24, 16), resampling="lanczos"),
    "crop only": ImageProcessor((25, 14), crop=True),
    "exact, then crop": ImageProcessor((25, 14), resize=(30, 16), crop=True, resampling="box"),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_transformers_reads_the_file_back(tmp_path, name):
    ours = PROCESSORS[name]
    ours.save(tmp_path)
    kind = json.loads((tmp_path / "preprocessor_config.json").read_text())["image_processor_type"]
    theirs = CLASSES[kind.removesuffix("ImageProcessor")].from_pretrained(tmp_path)
    assert_equal_pixels(ours, theirs)
    auto = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert type(auto) is type(theirs)


@pytest.mark.parametrize("model_type", ["vit", "deit"])
def test_grey(tmp_path, model_type):
    ours = ImageProcessor.default_of(model_type, 20, channels=1)
    ours.save(tmp_path)
    theirs = CLASSES["ViT" if model_type == "vit" else "DeiT"].from_pretrained(tmp_path)
    assert_equal_pixels(ours, theirs, mode="L")
