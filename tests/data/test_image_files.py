"""A picture decodes to the same pixels however it is stored, or is refused; never half of it."""

import errno
import gc
import io
import json
import os
import warnings

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from transformers_jax.data import check_image, decode_image

GREY_BITS = (19595, 38470, 7471)  # of ITU-R 601's luma, in 65,536ths, as Pillow documents it
FULL_AND_QUICK = pytest.mark.parametrize("check", [decode_image, check_image, lambda s: check_image(s, full=True)])


def noise(height, width, channels=3, seed=0, dtype=np.uint8):
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def smooth(height=37, width=51):
    """A photo-like picture that lossy formats keep."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 255 // (height + width)], -1).astype(np.uint8)


def encode(image, **options):
    image = Image.fromarray(image) if isinstance(image, np.ndarray) else image
    file = io.BytesIO()
    image.save(file, **options)
    return file.getvalue()


def pixels(source, **options):
    image = decode_image(source, **options)
    assert image.mode == ("L" if options.get("channels") == 1 else "RGB")
    return np.array(image)


def luma(colours):
    return ((colours.astype(np.int64) * GREY_BITS).sum(-1) + 0x8000) >> 16


def test_colour_from_every_kind_of_source(tmp_path):
    array = noise(11, 7)
    data = encode(array, format="PNG")
    path = tmp_path / "a.png"
    path.write_bytes(data)
    for source in (path, str(path), data, array, Image.fromarray(array)):
        np.testing.assert_array_equal(pixels(source), array)
        np.testing.assert_array_equal(pixels(source, channels=1), luma(array))


def test_grey_of_8_and_16_bits_and_bilevel():
    grey = noise(5, 9, 1)
    for source in (grey, grey[..., None], encode(grey, format="PNG"), encode(grey, format="PPM")):
        np.testing.assert_array_equal(pixels(source, channels=1), grey)
        np.testing.assert_array_equal(pixels(source), np.stack([grey] * 3, -1))
    values = noise(5, 9, 1, dtype=np.uint16)
    values[0, :4] = 0, 65535, 128, 129  # 128 / 257 rounds down, 129 / 257 up
    expected = np.rint(values / 257)
    assert expected[0, :4].tolist() == [0, 255, 0, 1]
    for form in ("PNG", "TIFF", "PPM"):
        np.testing.assert_array_equal(pixels(encode(values, format=form), channels=1), expected, err_msg=form)
    big_endian = Image.frombytes("I;16B", (9, 5), values.astype(">u2").tobytes())
    for source in (values, big_endian, Image.fromarray(values.astype(np.int32))):
        np.testing.assert_array_equal(pixels(source), np.stack([expected] * 3, -1))
    bits = noise(5, 9, 1) > 127
    for source in (bits, encode(bits, format="PNG"), encode(bits, format="PPM")):
        np.testing.assert_array_equal(pixels(source, channels=1), bits * 255)
    colours = noise(4, 3, dtype=np.uint16)
    np.testing.assert_array_equal(pixels(colours), np.rint(colours / 257))


def test_transparency_is_dropped():
    array = noise(6, 5, 4)
    array[0, 0, 3] = 0
    np.testing.assert_array_equal(pixels(encode(array, format="PNG")), array[..., :3])
    np.testing.assert_array_equal(pixels(array), array[..., :3])
    grey = Image.merge("LA", [Image.fromarray(noise(6, 5, 1, seed=1)), Image.fromarray(noise(6, 5, 1))])
    np.testing.assert_array_equal(pixels(encode(grey, format="PNG"), channels=1), noise(6, 5, 1, seed=1))


@pytest.mark.parametrize("transparency", [None, 3, bytes(range(200))], ids=["none", "one", "bytes"])
def test_palettes(transparency):
    palette = noise(256, 1)[:, 0]
    numbers = noise(8, 9, 1)
    image = Image.fromarray(numbers)
    image.putpalette(palette.tobytes())
    options = {} if transparency is None else {"transparency": transparency}
    data = encode(image, format="PNG", **options)
    assert Image.open(io.BytesIO(data)).mode == "P"
    np.testing.assert_array_equal(pixels(data), palette[numbers])
    np.testing.assert_array_equal(pixels(data, channels=1), luma(palette[numbers]))
    copy = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(pixels(copy), palette[numbers])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_are_turned_upright(orientation, form):
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if form == "WEBP" else {}
    data = encode(smooth(), format=form, exif=exif, **lossless)
    expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    turned = pixels(data)
    np.testing.assert_array_equal(turned, expected)
    assert turned.shape == ((51, 37, 3) if orientation >= 5 else (37, 51, 3))
    np.testing.assert_array_equal(pixels(decode_image(data)), expected)  # not twice


def test_orientations_by_hand():
    array = noise(3, 4)
    expected = [array, array[:, ::-1], array[::-1, ::-1], array[::-1], array.swapaxes(0, 1)]
    expected += [np.rot90(array, -1), array[::-1, ::-1].swapaxes(0, 1), np.rot90(array)]
    for orientation, picture in enumerate(expected, 1):
        exif = Image.Exif()
        exif[0x0112] = orientation
        np.testing.assert_array_equal(pixels(encode(array, format="PNG", exif=exif)), picture, err_msg=str(orientation))


def test_damaged_exif_does_not_cost_the_picture():
    good = encode(smooth(), format="JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff garbage")
    np.testing.assert_array_equal(pixels(good), pixels(encode(smooth(), format="JPEG")))
    bad_header = encode(smooth(), format="JPEG", exif=b"Exif\0\0neither of the two")
    np.testing.assert_array_equal(pixels(bad_header), pixels(good))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF"])
def test_an_animation_is_its_first_frame(form):
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    data = encode(frames[0], format=form, save_all=True, append_images=frames[1:], **options)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert (pixels(data) == (255, 0, 0)).all()


def test_cmyk():
    for image in (Image.new("CMYK", (4, 4), (0, 0, 0, 0)), Image.new("CMYK", (4, 4), (0, 255, 255, 0))):
        colour = (255, 255, 255) if image.getpixel((0, 0)) == (0, 0, 0, 0) else (255, 0, 0)
        assert np.abs(pixels(encode(image, format="JPEG", quality=95)).astype(int) - colour).max() <= 2
        assert (pixels(encode(image, format="TIFF")) == colour).all()


@pytest.mark.parametrize("mode", ["HSV", "YCbCr", "RGBX", "RGBa", "La", "PA"])
def test_rare_modes(mode):
    image = Image.new(mode, (3, 2))
    assert pixels(image).shape == (2, 3, 3)
    assert pixels(image, channels=1).shape == (2, 3)


REFUSED = {
    "float": (np.zeros((3, 3), np.float32), "an array of type float32; convert it to uint8"),
    "channels first": (np.zeros((3, 8, 8), np.uint8), r"an array of shape \(3, 8, 8\)"),
    "two channels": (np.zeros((8, 8, 2), np.uint8), r"\(8, 8, 2\)"),
    "no pixels": (np.zeros((0, 8, 3), np.uint8), r"shape \(0, 8, 3\) is empty"),
    "no pixels, image": (Image.new("RGB", (0, 3)), "0 x 3 pixels is empty"),
    "F": (Image.new("F", (3, 3)), "floating-point pixels have no range"),
    "F in a file": (encode(Image.new("F", (3, 3)), format="TIFF"), "floating-point pixels have no range"),
    "32 bits": (Image.fromarray(np.full((2, 2), 70_000, np.int32)), "pixels from 70000 to 70000 are not 16-bit"),
    "negative": (Image.fromarray(np.full((2, 2), -1, np.int32)), "pixels from -1 to -1"),
    "no bytes": (b"", "0 bytes"),
    "text": (b"this is a text\n" * 50, "not an image of a known format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image of a known format"),
    "postscript": (encode(smooth(), format="EPS"), "not an image of a known format"),
    "10 bytes": (encode(smooth(), format="JPEG")[:10], "not an image of a known format|not a whole image"),
}


@pytest.mark.parametrize("name", REFUSED)
@FULL_AND_QUICK
def test_what_is_no_image_is_refused_in_one_line(name, check):
    source, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        check(source)
    assert str(caught.value).startswith("image: ")
    assert "\n" not in str(caught.value)


def test_channels_are_one_or_three():
    with pytest.raises(ValueError, match="channels is 4; images are read with 1"):
        decode_image(noise(2, 2), channels=4)


@FULL_AND_QUICK
def test_errors_name_the_file(tmp_path, check):
    for name in ("a b.png", "Zürich 図.png", "-.png", "100%.png"):
        (tmp_path / name).write_bytes(b"nothing")
        with pytest.raises(ValueError, match="not an image of a known format") as caught:
            check(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path}/{name}: ")
    for name in ("two\nlines.png", os.fsdecode(b"latin\xe9.png")):
        path = os.path.join(tmp_path, name)
        with open(path, "wb") as file:
            file.write(encode(noise(3, 3), format="PNG"))
        assert check(path) is None or pixels(path).shape == (3, 3, 3)
        with open(path, "wb") as file:
            file.write(b"nothing")
        with pytest.raises(ValueError, match="not an image of a known format") as caught:
            check(path)
        assert str(caught.value).startswith(repr(path)) and str(caught.value).isprintable()
    (tmp_path / "empty.jpg").touch()
    with pytest.raises(ValueError, match=r"empty\.jpg: the file is empty"):
        check(tmp_path / "empty.jpg")
    with pytest.raises(ValueError, match=r"cannot be read \(Is a directory\)"):
        check(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg: no such image file"):
        check(tmp_path / "missing.jpg")
    with pytest.raises(ValueError, match=r"^line 7: "):
        decode_image(tmp_path / "empty.jpg", where="line 7")


def test_a_file_that_the_system_refuses(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"a\.png: cannot be read \(File name too long\)"):
        decode_image(tmp_path / ("a" * 300 + "a.png"))
    path = tmp_path / "secret.png"
    path.write_bytes(encode(noise(3, 3), format="PNG"))

    def refuse(*args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("builtins.open", refuse)  # root may open everything
    with pytest.raises(ValueError, match=r"secret\.png: cannot be read \(Permission denied\)"):
        decode_image(path)


FORMATS = ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000"]
OPTIONS = {
    "progressive": ("JPEG", {"progressive": True}),
    "interlaced": ("GIF", {"interlace": 1}),
    "lossless": ("WEBP", {"lossless": True}),
    "lzw": ("TIFF", {"compression": "tiff_lzw"}),
    "deflate": ("TIFF", {"compression": "tiff_deflate"}),
    "jpeg in tiff": ("TIFF", {"compression": "jpeg"}),
} | {name: (name, {}) for name in FORMATS}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_cut_file_is_never_half_a_picture(name):
    """Wherever it is cut, it is refused or gives every pixel, and the quick check says so beforehand."""
    form, options = OPTIONS[name]
    data = encode(noise(48, 40) // 4 + smooth(48, 40) // 2, format=form, **options)
    whole = pixels(data)
    check_image(data)
    size = len(data)
    cuts = sorted({*range(1, 60), *range(60, size, max(size // 40, 1)), *range(size - 60, size)})
    refused = 0
    for cut in cuts:
        try:
            decoded = pixels(data[:cut])
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="image"):
                check_image(data[:cut])
        else:
            np.testing.assert_array_equal(decoded, whole, err_msg=f"{cut} of {size} bytes")
            check_image(data[:cut])
    assert refused >= len(cuts) - 25


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{}, {"restart_marker_rows": 1}, {"optimize": True}], ids=str)
def test_a_cut_picture_with_a_new_end_marker_is_refused(mode, options):
    """Pillow alone gives grey for what is missing."""
    image = Image.fromarray(noise(96, 144) // 4 + smooth(96, 144) // 2).convert(mode)
    data = encode(image, format="JPEG", **options)
    start = data.index(b"\xff\xda") + 14
    for share in (0.01, 0.3, 0.5, 0.8, 0.9):
        cut = data[: start + int((len(data) - start) * share)] + b"\xff\xd9"
        with Image.open(io.BytesIO(cut)) as half_grey:
            assert set(np.array(half_grey)[-1, -1].ravel()) <= {127, 128}
        for check in (decode_image, lambda s: check_image(s, full=True)):
            with pytest.raises(ValueError, match="its data end early"):
                check(cut)
    # Pictures that really are grey where they end.
    grey = smooth(64, 80)
    grey[40:] = 128
    for array in (grey, grey[60:], np.full((1, 1, 3), 128, np.uint8)):
        data = encode(Image.fromarray(array).convert(mode), format="JPEG", **options)
        assert decode_image(data).size == (array.shape[1], array.shape[0])


def test_truncated_pictures_stay_refused_if_another_package_allows_them(monkeypatch):
    data = encode(smooth(200, 200), format="JPEG")
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for check in (decode_image, check_image):
        with pytest.raises(ValueError, match="not a whole image"):
            check(data[: len(data) // 2])


def test_padding_after_the_end_is_fine():
    for form in ("JPEG", "PNG", "GIF"):
        data = encode(smooth(), format=form)
        for tail in (b"\0" * 1000, b"camera's notes" * 99):
            np.testing.assert_array_equal(pixels(data + tail), pixels(data))
            check_image(data + tail)


@pytest.mark.parametrize("times", [1.5, 3])
@FULL_AND_QUICK
def test_decompression_bombs(monkeypatch, check, times):
    data = encode(np.zeros((30, 30), np.uint8), format="PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", int(900 / times))
    with pytest.raises(ValueError, match=f"image: 900 pixels are more than the limit of {int(900 / times)}"):
        check(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 900)
    check(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    check(data)


def test_no_warning_comes_through(tmp_path):
    palette = Image.fromarray(noise(8, 9, 1))
    palette.putpalette(noise(256, 1).tobytes())
    sources = [
        encode(palette, format="PNG", transparency=bytes(200)),
        encode(smooth(), format="JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff garbage"),
        encode(smooth(), format="TIFF")[:-40],
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = list(warnings.filters)
        for source in sources:
            for check in (decode_image, check_image):
                try:
                    check(source)
                except ValueError as error:
                    assert "Warning" not in type(error).__name__
        assert list(warnings.filters) == before


def test_no_file_stays_open(tmp_path):
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(encode(noise(9, 9), format="PNG"))
    bad.write_bytes(good.read_bytes()[:150])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for path in [good, bad] * 5:
        for check in (decode_image, check_image):
            try:
                check(path)
            except ValueError:
                assert path == bad
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_callers_image_is_left_alone():
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(io.BytesIO(encode(smooth(), format="JPEG", exif=exif)))
    decoded = decode_image(image)
    assert image.size == (51, 37) and decoded.size == (37, 51)
    plain = Image.fromarray(smooth())
    copy = decode_image(plain)
    copy.putpixel((0, 0), (9, 9, 9))
    assert plain.getpixel((0, 0)) == (0, 0, 0)


# Real pictures


def real_pictures(shared_data):
    folder = shared_data / "pillow_images"
    return folder, json.loads((folder / "MANIFEST.json").read_text())["files"]


def test_real_pictures_load_or_are_refused(shared_data):
    folder, files = real_pictures(shared_data)
    assert len(files) >= 15
    for name, about in files.items():
        if "error" in about:
            for check in (decode_image, check_image):
                with pytest.raises(ValueError, match=f"{name}: not a"):
                    check(folder / name)
            continue
        check_image(folder / name)
        width, height = about["size"]
        shape = (width, height) if (about["orientation"] or 1) >= 5 else (height, width)
        assert pixels(folder / name).shape == (*shape, 3), name
        assert pixels(folder / name, channels=1).shape == shape, name


def test_real_pictures_are_the_same_picture(shared_data):
    """The photo in its many files, compared with an independent computation on each."""
    folder, _ = real_pictures(shared_data)

    def difference(a, b):
        return np.abs(a.astype(float) - b.astype(float)).mean()

    hopper = pixels(folder / "hopper.png")
    np.testing.assert_array_equal(pixels(folder / "hopper.bmp"), pixels(folder / "hopper.png"))
    for name in ("hopper.jpg", "hopper.webp", "hopper.gif"):
        assert difference(pixels(folder / name), hopper) < 12, name
    for name in ("hopper_gray.jpg", "hopper_16bit.pgm"):
        assert difference(pixels(folder / name, channels=1), luma(hopper)) < 6, name
    # 16 bits as they are in the file: a header of text, then big-endian numbers.
    raw = (folder / "hopper_16bit.pgm").read_bytes()
    values = np.frombuffer(raw[-128 * 128 * 2 :], ">u2").reshape(128, 128)
    np.testing.assert_array_equal(pixels(folder / "hopper_16bit.pgm", channels=1), np.rint(values / 257))
    # Stored lying on its side.
    upright = pixels(folder / "hopper_orientation_6.jpg")
    lying = np.array(Image.open(folder / "hopper_orientation_6.jpg"))
    np.testing.assert_array_equal(upright, np.rot90(lying, -1))
    assert difference(upright, hopper) < difference(lying, hopper) / 2
    with Image.open(folder / "pil123rgba.png") as image:
        np.testing.assert_array_equal(pixels(folder / "pil123rgba.png"), np.array(image)[..., :3])
    # Adobe's CMYK: what is stored is inverted, and Pillow has it the right way round: colour times lightness.
    with Image.open(folder / "pil_sample_cmyk.jpg") as image:
        inks = 255 - np.array(image).astype(float)
    expected = inks[..., :3] * inks[..., 3:] / 255
    assert np.abs(pixels(folder / "pil_sample_cmyk.jpg") - expected).max() <= 1.5
