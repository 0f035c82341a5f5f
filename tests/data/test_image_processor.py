"""What a processor does to a picture, and which files it reads; pixels are compared with transformers' elsewhere."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from transformers_jax.data import ImageProcessor


def picture(height, width, mode="RGB"):
    shape = (height, width) if mode == "L" else (height, width, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, np.uint8))


def load(tmp_path, **content):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    return ImageProcessor.load(tmp_path)


def test_defaults_of_published_checkpoints():
    vit = ImageProcessor.default_of("vit", 384)
    assert (vit.size, vit.resize, vit.crop, vit.resampling) == ((384, 384), (384, 384), False, "bilinear")
    assert vit.mean == vit.std == (0.5, 0.5, 0.5)
    deit = ImageProcessor.default_of("deit", 224)
    assert (deit.size, deit.resize, deit.crop, deit.resampling) == ((224, 224), 256, True, "bicubic")
    assert deit.mean == (0.485, 0.456, 0.406) and deit.std == (0.229, 0.224, 0.225)
    assert ImageProcessor.default_of("deit", 384).resize == round(384 * 256 / 224)
    grey = ImageProcessor.default_of("vit", (20, 30), channels=1)
    assert grey(picture(50, 40, "L")).shape == (20, 30, 1)
    swin = ImageProcessor.default_of("swin", (20, 30))
    assert (swin.resize, swin.resampling, swin.crop, swin.mean) == ((20, 30), "bicubic", False, (0.485, 0.456, 0.406))
    with pytest.raises(ValueError, match="no image processor is known for a 'bert'; there are vit, deit and swin"):
        ImageProcessor.default_of("bert", 224)


def test_the_centre_of_a_picture_is_where_it_was():
    array = np.arange(7 * 9 * 3, dtype=np.uint8).reshape(7, 9, 3)
    processor = ImageProcessor((3, 4), crop=True)
    np.testing.assert_array_equal(processor(Image.fromarray(array)), array[2:5, 2:6])
    padded = ImageProcessor((10, 9), crop=True)(Image.fromarray(array))
    np.testing.assert_array_equal(padded[2:9], array)
    assert not padded[:2].any() and not padded[9:].any()


def test_the_standard_processor_keeps_shapes():
    """A square stays a square, wherever the picture is cut."""
    array = np.zeros((90, 120, 3), np.uint8)
    array[30:60, 45:75] = 255
    processor = ImageProcessor.standard(64, crop_fraction=0.8)
    assert processor.resize == 80
    pixels = processor(Image.fromarray(array))
    rows, columns = (pixels[..., 0] > 127).any(1).sum(), (pixels[..., 0] > 127).any(0).sum()
    assert rows == columns and abs(rows - 30 * 80 / 90) < 1
    assert ImageProcessor.standard(32, crop_fraction=1.0)(picture(32, 50)).shape == (32, 32, 3)
    one = ImageProcessor.standard(28, channels=1, mean=(0.1307,), std=(0.3081,))
    assert one.mean == (0.1307,)
    same = ImageProcessor.standard(28, mean=(0.1307,), std=(0.3081,))
    assert same.mean == (0.1307,) * 3
    with pytest.raises(ValueError, match=r"crop_fraction is 1\.5; it must be above 0"):
        ImageProcessor.standard(28, crop_fraction=1.5)


def test_normalised_values():
    processor = ImageProcessor((1, 3), resize=(1, 3), mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 0.25))
    values = processor.normalise(np.array([[[0, 0, 0], [255, 255, 255], [51, 51, 51]]], np.uint8))
    np.testing.assert_allclose(values, [[[0, -1, -4], [1, 1, 0], [0.2, -0.6, -3.2]]], rtol=0, atol=1e-6)
    assert values.dtype == np.float32


def test_another_size_keeps_the_proportion():
    deit = ImageProcessor.default_of("deit", 224)
    assert deit.resized(384) == ImageProcessor.default_of("deit", 384)
    vit = ImageProcessor.default_of("vit", 224)
    assert vit.resized((100, 60)) == ImageProcessor.default_of("vit", (100, 60))
    assert vit.resized(224) == vit
    both = ImageProcessor((20, 30), resize=(40, 60), crop=True)
    assert both.resized((10, 60)).resize == (20, 120)
    assert ImageProcessor((20, 30), crop=True).resized(9) == ImageProcessor((9, 9), crop=True)


def test_in_words():
    assert ImageProcessor.default_of("deit", 224).describe() == (
        "224 x 224: shorter side to 256 (bicubic), centre; mean 0.485 0.456 0.406, std 0.229 0.224 0.225"
    )
    assert ImageProcessor.default_of("vit", (20, 30), channels=1).describe() == (
        "20 x 30: resized to 20 x 30 (bilinear); mean 0.5, std 0.5"
    )


PROCESSORS = [
    ImageProcessor.default_of("vit", 32),
    ImageProcessor.default_of("vit", 32, channels=1),
    ImageProcessor.default_of("deit", (28, 20)),
    ImageProcessor.standard(24, crop_fraction=0.9, resampling="lanczos", mean=(0.1, 0.2, 0.3)),
    ImageProcessor((25, 14), crop=True),
    ImageProcessor((25, 14), resize=(30, 16), crop=True, resampling="box", std=(0.1, 0.2, 0.3)),
]


@pytest.mark.parametrize("processor", PROCESSORS, ids=ImageProcessor.describe)
def test_what_is_saved_is_loaded(tmp_path, processor):
    processor.save(tmp_path / "new" / "folder")
    loaded = ImageProcessor.load(tmp_path / "new" / "folder")
    assert loaded == processor and loaded.fingerprint == processor.fingerprint


def test_the_fingerprint_tells_every_setting():
    base = ImageProcessor((8, 8), resize=(9, 9), crop=True)
    changes = [{"size": (8, 9)}, {"resize": 9}, {"resize": None}, {"resampling": "bicubic"}, {"resize": (8, 8)}]
    changes += [{"mean": (0.5, 0.5, 0.4)}, {"std": (0.5, 0.5, 0.4)}]
    assert len({dataclasses.replace(base, **change).fingerprint for change in [{}, *changes]}) == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rescale_factor": 1 / 127.5}, r"rescale_factor is 0\.0078\d+, not 1/255"),
        ({"do_rescale": False}, "do_rescale is false"),
        ({"do_pad": True}, "do_pad is true"),
        ({"do_flip_channel_order": True}, "the setting do_flip_channel_order = True is not known"),
        ({"offset": True}, "the setting offset = True is not known"),
        ({"size": {"longest_edge": 9}}, r"size is \{'longest_edge': 9\}; a number, height and width"),
        ({"size": {"shortest_edge": 9}}, "the size of the result depends on the picture; do_center_crop"),
        ({"size": {"shortest_edge": 9, "longest_edge": 12}}, "size is"),
        ({"do_resize": False}, "the size of the result depends on the picture"),
        ({"do_center_crop": True}, "crop_size is None"),
        ({"size": "224"}, "size is '224'"),
        ({"size": 0}, r"size is \(0, 0\)"),
        ({"resample": 9}, "resample is 9; it must be 0 to 5"),
        ({"do_resize": "yes"}, "do_resize is 'yes'; it must be true or false"),
        ({"image_std": [0.5, 0.5]}, "mean has 3 and std 2 numbers"),
        ({"image_mean": ["a"] * 3}, "image_mean is"),
        ({"image_std": [0.5, 0.5, 0]}, "must be finite and std"),
        (
            {"image_processor_type": "CLIPImageProcessor"},
            "image_processor_type is 'CLIPImageProcessor', of which nothing",
        ),
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "known are ViTImageProcessor, DeiTImageProcessor"),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"height": 9, "width": 9}},
            "needs a size of shortest",
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_settings_that_mean_other_numbers_are_errors(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path, **{"size": 32, **settings})
    assert str(caught.value).startswith(f"{tmp_path}/preprocessor_config.json: ")


def test_settings_without_effect_are_no_errors(tmp_path):
    expected = ImageProcessor.default_of("vit", 32)
    plain = {"size": 32, "do_convert_rgb": True, "processor_class": "X", "data_format": "channels_first"}
    plain |= {
        "do_flip_channel_order": False,
        "do_pad": None,
        "pad_size": None,
        "do_center_crop": None,
        "crop_size": None,
        "default_to_square": True,
    }
    assert load(tmp_path, **plain) == expected
    assert load(tmp_path, **plain, image_processor_type="ViTImageProcessorFast") == expected
    one = {"size": 32, "image_mean": 0.5, "image_std": 0.5}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(one))
    assert ImageProcessor.load(tmp_path, channels=1) == ImageProcessor.default_of("vit", 32, channels=1)
    assert ImageProcessor.load(tmp_path / "preprocessor_config.json") == expected


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"there is no preprocessor_config.json in {tmp_path}"):
        ImageProcessor.load(tmp_path)
    for content, message in (("{", "is not JSON"), ("[1]", "does not hold a JSON object")):
        (tmp_path / "preprocessor_config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            ImageProcessor.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 3)}, "all lengths must be at least 1"),
        ({"resize": (3, 0)}, "all lengths must be at least 1"),
        ({"channels": 4}, "channels is 4; it must be 1"),
        ({"channels": 1}, "mean has 3 and std 3 numbers, but there are 1 channels"),
        ({"crop": False}, r"without crop, resize must be the size \(8, 8\), but it is None"),
        ({"crop": False, "resize": 8}, "without crop, resize must be the size"),
    ],
)
def test_impossible_processors(options, message):
    with pytest.raises(ValueError, match=message):
        ImageProcessor(**{"size": (8, 8), "crop": True, **options})


def test_pictures_that_do_not_fit():
    with pytest.raises(ValueError, match="an image of mode L for 3 channels; decode_image gives RGB"):
        ImageProcessor((8, 8), crop=True)(picture(9, 9, "L"))
    with pytest.raises(ValueError, match=r"an image of 1 x 5000 pixels, too long .* \(1,280,000 x 256 pixels are more"):
        ImageProcessor.default_of("deit", 224)(picture(5000, 1))
