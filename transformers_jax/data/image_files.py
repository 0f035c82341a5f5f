"""Encoded images, decoded to the same 8-bit picture every time, and checks that find broken files early."""

import contextlib
import functools
import io
import os
import re
import threading
import warnings
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from transformers_jax.data.files import first_line

FORMATS = ("JPEG", "MPO", "PNG", "GIF", "WEBP", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF")
"""Pillow's formats that are read. Others need other programs (EPS) or are recognised in any bytes (TGA)."""

SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".gif", ".webp", ".bmp", ".dib", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".j2k", ".avif"),
)
"""Suffixes, in lower case, of the files in a directory that are taken to be images."""

ImageSource = str | os.PathLike[str] | bytes | np.ndarray | Image.Image
EncodedFile = io.BytesIO | io.BufferedReader

GREY = {127, 128}  # what libjpeg fills in, also where CMYK is stored inverted

ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(source: ImageSource, *, channels: int = 3, where: str | None = None) -> Image.Image:
    """The picture in a file, in the bytes of one, in an array or in an image: RGB, or L (grey) for one channel.

    An array is uint8, uint16 or bool, of shape (height, width) or (height, width, 1, 3 or 4). The picture is turned
    upright by its EXIF orientation. Of an animation it is the first frame. Transparency is dropped, which leaves the
    colour that is stored under it. 16-bit grey is divided by 257 and rounded, so that white stays white (Pillow's
    `convert` clips at 255); of 16-bit colour, Pillow keeps the upper 8 bits. Grey from colour is Pillow's L, the luma
    of ITU-R 601.

    Anything that is not a whole image of 8 or 16 bits is a `ValueError` in one line that begins with `where` (the path,
    unless given): an empty, truncated or renamed file, no pixels, more pixels than `PIL.Image.MAX_IMAGE_PIXELS`,
    floating-point or 32-bit values. A missing file is a `FileNotFoundError`.
    """
    if channels not in (1, 3):
        raise ValueError(f"channels is {channels}; images are read with 1 (grey) or 3 (RGB)")
    is_path = isinstance(source, (str, os.PathLike))
    where = where or (show_path(os.fspath(source)) if is_path else "image")
    with _one_line(where), _quiet:
        if isinstance(source, Image.Image):
            return _finish(source, channels)
        if isinstance(source, np.ndarray):
            return _finish(_from_array(source), channels)
        with _open_file(source) as file, _open(file) as image:
            # Pillow lets go of a JPEG's file once it is loaded, and what is loaded here is nobody else's.
            return _finish(_load(image, file), channels, copy=image.format != "JPEG")


def check_image(source: ImageSource, *, channels: int = 3, where: str | None = None, full: bool = False) -> None:
    """Raise what `decode_image` would raise; unless `full`, without decoding, by the header and the end of the data.

    Data whose end looks cut off, or of a format without a certain end, are decoded to decide. What the quick check
    cannot see is damage between the header and the end.
    """
    if full or not isinstance(source, (str, os.PathLike, bytes)):
        decode_image(source, channels=channels, where=where)
        return
    where = where or (show_path(os.fspath(source)) if isinstance(source, (str, os.PathLike)) else "image")
    with _one_line(where), _quiet, _open_file(source) as file, _open(file) as image:
        if image.mode == "F" or not _looks_whole(file, image.format):
            _finish(_load(image, file), channels)


def show_path(path: str) -> str:
    """A path as it is written in messages of one line."""
    return path if path.isprintable() else repr(path)


@contextlib.contextmanager
def _one_line(where: str) -> Iterator[None]:
    """Whatever Pillow raises for a bad file, and it has many types for that, as an error of one line."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # other packages set it, and it fills what is missing with grey
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{where}: no such image file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{where}: not an image of a known format ({', '.join(_formats())})") from None
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        raise ValueError(f"{where}: {_too_many(int(pixels[0]) if pixels else 0)}") from None
    except _Refused as error:
        raise ValueError(f"{where}: {error}") from None
    except OSError as error:
        if error.errno is not None:
            raise ValueError(f"{where}: cannot be read ({error.strerror or first_line(error)})") from None
        raise ValueError(f"{where}: not a whole image ({first_line(error)})") from None
    except Exception as error:
        raise ValueError(f"{where}: not a whole image ({first_line(error)})") from None


class _Refused(Exception):
    """An image that can be decoded but not used."""


def _too_many(pixels: int) -> str:
    limit = Image.MAX_IMAGE_PIXELS
    return (
        f"{pixels:,} pixels are more than the limit of {limit or 0:,}, which guards against decompression bombs; "
        "make the image smaller, or raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"
    )


class _Quiet:
    """Pillow's warnings ignored while any thread is inside; `warnings.catch_warnings` alone is not for threads."""

    def __init__(self):
        self._lock, self._inside = threading.Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
                warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._caught.__exit__(None, None, None)


_quiet = _Quiet()


@functools.cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF is younger than the oldest Pillow allowed


def _open_file(source: str | os.PathLike[str] | bytes) -> EncodedFile:
    if isinstance(source, bytes):
        if not source:
            raise _Refused("no image but 0 bytes")
        return io.BytesIO(source)
    file = open(source, "rb")  # noqa: SIM115
    if os.fstat(file.fileno()).st_size == 0:
        file.close()
        raise _Refused("the file is empty")
    return file


def _open(file: EncodedFile) -> Image.Image:
    image = Image.open(file, formats=_formats())
    try:
        _check_size(image)
    except _Refused:
        image.close()
        raise
    return image


def _check_size(image: Image.Image) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise _Refused(f"an image of {width} x {height} pixels is empty")
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        raise _Refused(_too_many(width * height))


def _looks_whole(file: EncodedFile, image_format: str | None) -> bool:
    """Whether the data end as a whole file of the format does; False where nothing can be told."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 256, 0))
    end = file.read()
    file.seek(0)
    start = file.read(12)
    file.seek(0)
    if image_format in ("JPEG", "MPO"):
        return end.rstrip(b"\0").endswith(b"\xff\xd9")
    if image_format == "PNG":
        return b"IEND\xaeB`\x82" in end
    if image_format == "GIF":
        return end.rstrip(b"\0").endswith(b";")
    if image_format == "WEBP":
        return size >= 8 + int.from_bytes(start[4:8], "little")
    return False


def _load(image: Image.Image, file: EncodedFile) -> Image.Image:
    """Decode all of it, also where Pillow would not notice: in a JPEG that was cut, then closed by an end marker (if it
    is progressive, only what is missing of the first of its passes)."""
    image.load()
    width, height = image.size
    corner = image.getpixel((width - 1, height - 1))
    if image.format in ("JPEG", "MPO") and GREY.issuperset(corner if isinstance(corner, tuple) else (corner,)):
        # Bytes put in before the end marker only change a picture whose data go on until there.
        file.seek(0)
        data = file.read()
        end = data.rfind(b"\xff\xd9")
        with Image.open(io.BytesIO(data[:end] + bytes(range(255)) + data[end:]), formats=_formats()) as longer:
            if longer.tobytes() != image.tobytes():
                raise _Refused("not a whole image (its data end early, and the rest would be grey)")
    return image


def _from_array(array: np.ndarray) -> Image.Image:
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3, 4))):
        raise _Refused(f"an array of shape {array.shape}; (height, width) or (height, width, 1, 3 or 4) is needed")
    if not array.size:
        raise _Refused(f"an array of shape {array.shape} is empty")
    if array.dtype == np.bool_:
        array = array * np.uint8(255)
    elif array.dtype == np.uint16:
        array = _to_8_bits(array)
    elif array.dtype != np.uint8:
        raise _Refused(f"an array of type {array.dtype}; convert it to uint8 (0 to 255) or uint16 (0 to 65535)")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(np.ascontiguousarray(array))


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _finish(image: Image.Image, channels: int, *, copy: bool = True) -> Image.Image:
    """Upright and in the mode wanted; with `copy`, never the image itself."""
    _check_size(image)
    image.load()
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except Exception:  # damaged EXIF around a good picture
        orientation = 1
    if image.mode == "F":
        raise _Refused("floating-point pixels have no range that is known; convert the image to 8 or 16 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise _Refused(
                f"pixels from {values.min()} to {values.max()} are not 16-bit (0 to 65535); convert the image to 8 bits"
            )
        image = Image.fromarray(_to_8_bits(values))
    if image.mode in ("RGBa", "La"):  # alpha is multiplied in
        image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
    grey = image.mode in ("1", "L", "LA")
    if channels == 1 and not grey:
        image = image.convert("RGB")
    wanted = "L" if channels == 1 else "RGB"
    if copy or image.mode != wanted:
        image = image.convert(wanted)
    image.info.clear()  # comments, profiles and EXIF would travel to the workers and back
    method = UPRIGHT.get(orientation)
    return image if method is None else image.transpose(method)
