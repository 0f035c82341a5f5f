"""Labelled images: which there are, which are held out, which are broken; decoded one by one."""

import dataclasses
import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from PIL import Image

from transformers_jax.data.files import split_specification
from transformers_jax.data.image_files import check_image, decode_image
from transformers_jax.data.image_sources import Columns, Found, Images, digest, open_source
from transformers_jax.data.labelled import HELD_OUT_SEED, BadExamples, LabelledData, Part, warn_once

CHUNK, PROGRESS_SECONDS = 256, 10.0
LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ImageData(LabelledData):
    """Images with one label each, and which of them are held out."""

    # The comments are the help texts of the command line.

    # What to read: a directory with a folder for each class, or with train/CLASS and val/CLASS (also validation, valid
    # or test); a table (.csv, .tsv, .jsonl, .json, .parquet) with a column of paths; tfds:NAME[/CONFIG][:SPLIT];
    # builtin:digits; or MNIST's IDX files (a directory). Several, separated by commas, are read one after the other.
    source: str

    # The column of a table, or the TFDS feature, that holds the image: a path from the table's folder on, or its bytes.
    image_column: str = "image"

    # The column of a table, or the TFDS feature, that holds the label.
    label_column: str = "label"

    # How images are checked before training: 'quick' (header and end of every file), 'full' (decode all), or 'none'.
    # Leaving out bad examples (skip-bad) always takes 'full'.
    check: Literal["quick", "full", "none"] = "quick"

    def __post_init__(self):
        super().__post_init__()
        if not self.image_column or not self.label_column:
            raise ValueError("image_column and label_column must not be empty")
        if self.image_column == self.label_column:
            raise ValueError(f"image_column and label_column must differ, but both are {self.image_column}")


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """Labelled images, decoded when they are asked for. It can be pickled, and each process opens its own files."""

    labels: tuple[str, ...]
    """The class name of each example."""
    channels: int
    fingerprint: str
    """Which images and labels these are: of files by name below the source and size, else by content."""
    _sources: tuple[Images, ...]
    _rows: np.ndarray  # the example of the sources, counted through, that each one is

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> Image.Image:
        """The picture, as `decode_image` gives it. Raises `ValueError` or `FileNotFoundError` that names its file."""
        images, number = self._find(index)
        try:
            return decode_image(images[number], channels=self.channels, where=images.where(number))
        except (ValueError, FileNotFoundError) as error:
            message = f"{error}; data.check=full finds this before training, data.skip_bad leaves such images out"
            raise type(error)(message) from None

    def where(self, index: int) -> str:
        """The file, or the place in a table or set, for messages."""
        images, number = self._find(index)
        return images.where(number)

    def _find(self, index: int) -> tuple[Images, int]:
        number = int(self._rows[index])
        for images in self._sources:
            if number < len(images):
                return images, number
            number -= len(images)
        raise IndexError(f"there is no image {index}")


def read_images(data: ImageData, *, part: Part, channels: int = 3) -> ImageSet:
    """Find the images of one part of the data and check them: "train", "validation", or "all" of `source`.

    Classes are the names of the folders directly below a source (or below its `train`), each with the images at any
    depth in it. Hidden files and folders, and files without a suffix of an image, are ignored. Examples are in the
    order of the class names, then of the paths; rows of tables in their order. Links are followed, and a file that
    two links lead to is read once.

    A source that has parts of its own (`train` and `val` folders; tables or IDX files of a directory whose names tell
    `train` and `val`, `t10k` or `test`) gives its own validation part; a `test` beside a `val` is left alone. One
    without is split if there is no other: each class gives its share of `validation_fraction`, the same examples for
    every seed, and keeps at least one to train on. The shares are whole numbers whose sum is that of all examples, by
    largest remainder.

    Raises `ValueError` or `FileNotFoundError` that names the file for the first bad image (see `ImageData.check`), or,
    with `data.skip_bad`, decodes everything, leaves bad ones out, and logs how many.
    """
    bad = BadExamples(skip=data.skip_bad)
    use_validation = part == "validation" and data.validation_source is not None
    specification = str(data.validation_source if use_validation else data.source)
    sources, own = _find_sources(specification, data, part, bad, for_validation=use_validation)
    labels = [label for images in sources for label in images.labels]
    rows = np.arange(len(labels))
    if data.skip_bad:
        broken = _find_broken(sources, rows, channels=channels, full=True, first=False)
        for message in broken.values():
            bad(message)
        rows = rows[~np.isin(rows, list(broken))]
        gone = set(labels).difference(labels[row] for row in rows)
        if gone and len(rows) and part == "train":
            raise ValueError(f"{specification}: no image of the class {min(gone)!r} is whole; the first: {bad.first}")
    if not len(rows):
        why = f"all {bad.skipped} were skipped; the first: {bad.first}" if bad.skipped else "there are none"
        raise ValueError(f"{specification}: no images can be used ({why})")
    if bad.skipped:
        warn_once(f"{bad.skipped:,} of {bad.skipped + len(rows):,} images skipped; the first: {bad.first}")
    if not own and part != "all" and data.validation_source is None:
        held_out = _held_out([labels[row] for row in rows], data.validation_fraction, specification)
        rows = rows[held_out == (part == "validation")]
    if not data.skip_bad and data.check != "none":
        broken = _find_broken(sources, rows, channels=channels, full=data.check == "full", first=True)
        for message in broken.values():
            bad(message)
    chosen = tuple(labels[row] for row in rows)
    identity = digest(*(images.identity for images in sources), rows, json.dumps(chosen).encode())
    return ImageSet(chosen, channels, identity.hex(), tuple(sources), rows)


def _find_sources(
    specification: str, data: ImageData, part: Part, bad: BadExamples, *, for_validation: bool
) -> tuple[list[Images], bool]:
    """What to read for a part, and whether the source itself says which of it is for validation."""
    columns = Columns(data.image_column, data.label_column)
    found: list[Found] = []
    for piece in dict.fromkeys(split_specification(specification)):
        found += open_source(piece, columns, bad, for_validation=for_validation)
    own = any(name == "validation" for name, _ in found)
    if own and part == "validation":
        found = [(name, read) for name, read in found if name == "validation"]
    elif part == "train":
        found = [(name, read) for name, read in found if name != "validation"]
    return [read() for _, read in found], own


# Checks and parts

_FOUND: dict[tuple[bytes, int], dict[int, str]] = {}  # the parts of a source are read one after the other


def _find_broken(
    sources: Sequence[Images], rows: np.ndarray, *, channels: int, full: bool, first: bool
) -> dict[int, str]:
    """The messages about images that cannot be decoded, by row; of the first one only, if so wanted."""
    broken: dict[int, str] = {}
    start = 0
    for images in sources:
        numbers = rows[(rows >= start) & (rows < start + len(images))] - start
        if full or images.quick:
            key = (images.version, channels)
            found = _FOUND.get(key) if full and not first else None
            if found is None:
                found = _check_all(images, numbers, channels=channels, full=full, first=first)
            if full and not first:
                _FOUND[key] = found
            broken |= {start + number: message for number, message in found.items()}
        if first and broken:
            break
        start += len(images)
    return broken


def _check_all(images: Images, numbers: np.ndarray, *, channels: int, full: bool, first: bool) -> dict[int, str]:
    def check(some: np.ndarray) -> dict[int, str]:
        found = {}
        for number in some.tolist():
            try:
                check_image(images[number], channels=channels, where=images.where(number), full=full)
            except (ValueError, FileNotFoundError) as error:
                found[number] = str(error)
                if first:
                    break
        return found

    broken: dict[int, str] = {}
    said = time.monotonic()
    pool = ThreadPoolExecutor()
    try:
        chunks = [numbers[start : start + CHUNK] for start in range(0, len(numbers), CHUNK)]
        for done, found in enumerate(pool.map(check, chunks), 1):
            broken |= found
            if first and broken:
                break
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                LOG.warning("checking images: %s of %s", f"{done * CHUNK:,}", f"{len(numbers):,}")
    finally:
        pool.shutdown(cancel_futures=True)
    return broken


def _held_out(labels: list[str], fraction: float, specification: str) -> np.ndarray:
    """For each example whether it is held out."""
    counts = Counter(labels)
    total = round(len(labels) * fraction)
    # 10 x 0.3 is a little less than 3.
    shares = {label: min(int(round(count * fraction, 6)), count - 1) for label, count in counts.items()}
    by_remainder = sorted(counts, key=lambda label: (shares[label] - counts[label] * fraction, label))
    while sum(shares.values()) < total:
        room = [label for label in by_remainder if shares[label] < counts[label] - 1]
        if not room:
            break
        for label in room[: total - sum(shares.values())]:
            shares[label] += 1
    if not any(shares.values()):
        raise ValueError(
            f"{specification}: a validation_fraction of {fraction} of {len(labels):,} images in {len(counts)} classes "
            "leaves none to evaluate on; change it or set validation_source"
        )
    # RandomState's stream, unlike default_rng's, is promised never to change.
    held_out = np.zeros(len(labels), bool)
    for number in np.random.RandomState(HELD_OUT_SEED).permutation(len(labels)):
        if shares[labels[number]]:
            shares[labels[number]] -= 1
            held_out[number] = True
    return held_out
