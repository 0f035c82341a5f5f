"""Palettes: which colours k-means finds, pixels to tokens and back, and the file that carries them."""

import json

import numpy as np
import pytest

from transformers_jax.data import ImageProcessor, Palette

PRIMARY = Palette(((-1.0, -1.0, -1.0), (1.0, -1.0, -1.0), (-1.0, 1.0, -1.0), (0.5, 0.5, 1.0)))
PROCESSOR = ImageProcessor((3, 5), resize=(3, 5), palette=PRIMARY)
GREY = ImageProcessor(
    (2, 3), channels=1, resize=(2, 3), mean=(0.25,), std=(0.5,), palette=Palette(((-0.5,), (0.3,), (1.5,)))
)


def pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)


def test_clusters_that_are_far_apart_are_found_from_dark_to_bright():
    rng = np.random.default_rng(0)
    centres = np.array([[0.8, 0.9, 0.7], [-0.9, -0.8, -0.9], [0.5, -0.7, -0.6]])
    colours = np.concatenate([centre + rng.normal(0, 0.01, (50, 3)) for centre in centres])
    palette = Palette.train(rng.permutation(colours), 3)
    means = [colours[start : start + 50].mean(axis=0) for start in (50, 100, 0)]
    np.testing.assert_allclose(palette.clusters, means, atol=6e-5)


def test_a_colour_counts_as_often_as_it_occurs_and_the_palette_is_the_same_every_time():
    many = np.repeat([[[10], [12], [200]]], 4, axis=0).astype(np.uint8)
    many[0, 2] = 210
    processor = ImageProcessor((1, 1), channels=1, resize=(1, 1), mean=(0.0,), std=(1.0,)).with_palette(many, 2)
    assert processor.palette is not None
    np.testing.assert_allclose(processor.palette.clusters, [[11 / 255], [202.5 / 255]], atol=6e-5)
    noise = pixels(4000, 3)
    first, second = (ImageProcessor((1, 1), resize=(1, 1)).with_palette(noise, 20) for _ in range(2))
    assert first == second and first.fingerprint == second.fingerprint != PROCESSOR.fingerprint


def test_the_nearest_colour_by_brute_force():
    image = pixels(2, 3, 5, 3)
    found = PROCESSOR.ids(image)
    assert found.shape == (2, 15) and found.dtype == np.int32
    for one, ids in zip(image, found, strict=True):
        for pixel, number in zip(one.reshape(-1, 3), ids, strict=True):
            distances = [sum((pixel / 127.5 - 1 - np.array(colour)) ** 2) for colour in PRIMARY.clusters]
            assert number == np.argmin(distances)


def test_tokens_become_the_pixels_of_their_colours():
    colours = np.array([[0, 0, 0], [255, 0, 0], [0, 255, 0], [191, 191, 255]], np.uint8)
    ids = np.random.default_rng(1).integers(0, 4, (2, 15))
    image = PROCESSOR.pixels(ids)
    np.testing.assert_array_equal(image, colours[ids].reshape(2, 3, 5, 3))
    np.testing.assert_array_equal(PROCESSOR.ids(image), ids)
    np.testing.assert_array_equal(GREY.pixels(np.array([0, 1, 2, 0, 1, 2]))[..., 0], [[0, 102, 255]] * 2)


@pytest.mark.parametrize("processor", [PROCESSOR, GREY], ids=["colour", "grey"])
def test_the_file_carries_the_palette(tmp_path, processor):
    processor.save(tmp_path)
    assert ImageProcessor.load(tmp_path) == processor
    content = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert content["image_processor_type"] == "ImageGPTImageProcessor" and content["do_color_quantize"] is True
    assert {len(colour) for colour in content["clusters"]} == {3}


def test_a_published_file(tmp_path):
    """The fields of openai/imagegpt-small's."""
    content = {"clusters": [[0.0, 0.1, -0.9], [-0.5, 0.25, 1.0]], "do_normalize": True, "do_resize": True}
    content |= {"feature_extractor_type": "ImageGPTFeatureExtractor", "resample": 2, "size": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    processor = ImageProcessor.load(tmp_path)
    assert processor == ImageProcessor(
        (32, 32), resize=(32, 32), palette=Palette(((0.0, 0.1, -0.9), (-0.5, 0.25, 1.0)))
    )
    assert processor.resized((16, 8)).palette == processor.palette
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content | {"do_color_quantize": False}))
    assert ImageProcessor.load(tmp_path).palette is None


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda: Palette(((1.0,),)), "a palette needs at least 2 colours of 1 or 3 channels each, but clusters has 1"),
        (lambda: Palette(((1.0,), (1.0, 2.0, 3.0))), "has 2 of 1, 3 channels"),
        (lambda: Palette(((1.0,), (float("nan"),))), "must be finite"),
        (lambda: Palette.train(np.zeros((9, 3)), 2), "a palette of 2 colours needs as many, but the pictures have 1"),
        (lambda: PRIMARY.colours(np.array([0, 4])), "ids hold 4 but the palette has the colours 0 to 3"),
        (lambda: PROCESSOR.pixels(np.full(15, -1)), "ids hold -1 but the palette has the colours 0 to 3"),
        (
            lambda: PROCESSOR.pixels(np.zeros(14, int)),
            r"ids of shape \(14,\) are not those of pictures of 3 x 5",
        ),
        (lambda: PROCESSOR.ids(pixels(5, 3, 3)), r"shape \(5, 3, 3\); a picture is uint8 of .* \(3, 5, 3\)"),
        (lambda: PROCESSOR.ids(pixels(3, 5, 1)), r"shape \(3, 5, 1\); a picture is uint8 of .* \(3, 5, 3\)"),
        (lambda: PROCESSOR.ids(pixels(3, 5, 3) / 255), "pixels are float64"),
        (lambda: ImageProcessor((3, 5), resize=(3, 5)).ids(pixels(3, 5, 3)), "there is no palette"),
        (lambda: ImageProcessor((3, 5), resize=(3, 5)).pixels(np.zeros(15, int)), "there is no palette"),
        (lambda: ImageProcessor((2, 2), resize=(2, 2), palette=GREY.palette), "palette has 1 channels, but pictures 3"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(action, message):
    with pytest.raises(ValueError, match=message) as error:
        action()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        ([[0.0, 1.0], [0.0, 0.0]], "a list of colours of 3 numbers each is needed"),
        ("many", "clusters is 'many'; a list of colours"),
        ([[0.0, 1.0, 1.0]], "a palette needs at least 2 colours"),
    ],
)
def test_a_file_with_a_palette_that_is_none(tmp_path, clusters, message):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ImageGPTImageProcessor", "clusters": clusters})
    )
    with pytest.raises(ValueError, match=message):
        ImageProcessor.load(tmp_path)
