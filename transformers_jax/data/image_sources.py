"""Where labelled images are: class folders, tables of paths or bytes, TFDS sets, IDX files, scikit-learn's digits."""

import contextlib
import functools
import glob
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from transformers_jax.data.files import ROWS, find_files, kind_of, read_bytes
from transformers_jax.data.image_files import SUFFIXES, ImageSource, show_path
from transformers_jax.data.labelled import BadExamples
from transformers_jax.data.tables import TfdsSet, file_rows

TRAIN, VALIDATION = "train", ("val", "validation", "valid", "test")
"""Folders that hold the parts of a set; of the last, the first that there is."""

PARTS = frozenset((TRAIN, *VALIDATION, "training", "testing", "eval", "evaluation", "dev"))
"""Folders of these names alone, with folders in them, are no classes."""

DIGITS = "builtin:digits"


class Columns(NamedTuple):
    """The columns of a table, or features of a TFDS set."""

    image: str
    label: str


class Places:
    """Where each example is in a table or an array."""

    def __init__(self, source: str, unit: str, numbers: Sequence[int]):
        self._source, self._unit, self._numbers = source, unit, numbers

    def where(self, number: int) -> str:
        """`labels.csv, line 7`."""
        return f"{self._source}, {self._unit} {self._numbers[number]}"


class Images:
    """The images of one source, not decoded, and their labels."""

    labels: list[str]
    identity: bytes
    """A digest of the content that does not depend on where it is stored."""
    quick = True
    """Whether the quick check looks at these."""

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> ImageSource:
        """What `decode_image` decodes."""
        raise NotImplementedError

    def where(self, number: int) -> str:
        """`pets/cat/7.jpg` or `labels.csv, line 7 (7.jpg)`, for errors."""
        raise NotImplementedError

    @property
    def version(self) -> bytes:
        """Like the identity, but also differs once a file was written again."""
        return self.identity


class Files(Images):
    """Paths below a root, packed into few objects: a million of them are cheap to keep and to send to a worker."""

    def __init__(
        self,
        root: str,
        names: Sequence[bytes],
        labels: list[str],
        stats: np.ndarray,  # of each file, size and time
        places: Places | None = None,
    ):
        self.root, self.labels, self._places = root, labels, places
        self._names, self._ends = b"".join(names), np.cumsum([len(name) for name in names], dtype=np.int64)
        sizes, times = stats.reshape(-1, 2).T
        self.identity = digest(self._names, self._ends, sizes)
        self._version = digest(self.identity, times)

    def __getitem__(self, number: int) -> str:
        return os.path.join(self.root, self.name(number))

    def name(self, number: int) -> str:
        """The path from the root on."""
        start = int(self._ends[number - 1]) if number else 0
        return os.fsdecode(self._names[start : int(self._ends[number])])

    def where(self, number: int) -> str:
        if self._places is None:
            return show_path(self[number])
        return f"{self._places.where(number)} ({show_path(self.name(number))})"

    @property
    def version(self) -> bytes:
        return self._version


class Cells(Images):
    """Images that are in memory: arrays, or the bytes of files."""

    def __init__(self, cells: Sequence[bytes] | np.ndarray, labels: list[str], places: Places):
        self.labels, self._cells, self._places = labels, cells, places
        self.quick = not isinstance(cells, np.ndarray)
        self.identity = digest(*([cells] if isinstance(cells, np.ndarray) else map(digest, cells)))

    def __getitem__(self, number: int) -> ImageSource:
        return self._cells[number]

    def where(self, number: int) -> str:
        return self._places.where(number)


class TfdsImages(Images):
    """A TFDS set, whose labels are read at once and whose images are read from the disk when wanted."""

    quick = False  # it would read all of the set a second time

    def __init__(self, specification: str, columns: Columns, bad: BadExamples):
        self._specification, self._columns = specification, columns
        found, self._source = self._open()
        # The image stays out of what is decoded for the labels.
        found.names = [columns.label]
        found.data = _only(found, columns.label)
        self.labels, self._numbers = [], []
        for row in found.rows(bad):
            try:
                self.labels.append(_label(columns.label, row.values[0]))
            except ValueError as error:
                bad(f"{row.where}: {error}")
            else:
                self._numbers.append(row.number)
        about = f"{found.builder.info.full_name}:{found.data.split}:{len(found.data)}"
        self.identity = digest(about.encode(), np.array(self._numbers, np.int64))

    def _open(self) -> tuple[TfdsSet, Any]:
        import tensorflow_datasets as tfds

        image = self._columns.image
        found = TfdsSet(self._specification, {"image_column": image, "label_column": self._columns.label})
        if not isinstance(found.features[image], tfds.features.Image):
            raise ValueError(f"{self._specification}: {image!r} is a {type(found.features[image]).__name__}, no image")
        return found, _only(found, image)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None}  # open files; a worker opens its own

    def __getitem__(self, number: int) -> ImageSource:
        if self._source is None:
            _, self._source = self._open()
        return self._source[self._numbers[number]][self._columns.image]

    def where(self, number: int) -> str:
        return f"{self._specification}, example {self._numbers[number]}"


def _only(found: TfdsSet, name: str) -> Any:
    """The examples with one feature decoded, unless it is an image; images are decoded elsewhere."""
    import tensorflow_datasets as tfds

    builder: Any = found.builder
    nested = (tfds.features.FeaturesDict, tfds.features.Sequence)  # these cannot be skipped
    skipped = {
        key: tfds.decode.SkipDecoding()
        for key, feature in found.features.items()
        if (key != name or isinstance(feature, tfds.features.Image)) and not isinstance(feature, nested)
    }
    return builder.as_data_source(found.data.split, decoders=skipped)


def digest(*parts: bytes | np.ndarray) -> bytes:
    sha256 = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            sha256.update(f"{part.dtype}{part.shape}".encode())
            part = np.ascontiguousarray(part).view(np.uint8).data
        sha256.update(part)
    return sha256.digest()


# Reading


Share = Literal["train", "validation", "whole"]
"""A part that a source has by itself, or the whole of one that has none."""

Found = tuple[Share, Callable[[], Images]]
"""It, and how to read it."""


def open_source(piece: str, columns: Columns, bad: BadExamples, *, for_validation: bool) -> Iterator[Found]:
    path = Path(piece).expanduser()
    if piece.startswith("tfds:"):
        yield "whole", lambda: TfdsImages(piece, columns, bad)
    elif piece.startswith("builtin:"):
        if piece != DIGITS:
            raise ValueError(f"{piece} is not built in; there is {DIGITS}")
        yield "whole", _digits
    elif path.is_dir():
        yield from _directory(path, columns, bad, for_validation=for_validation)
    elif _is_idx(path.name) and path.is_file():
        yield "whole", lambda: _read_idx(path)
    elif path.exists() or glob.has_magic(piece):
        for table in find_files(piece, ROWS):
            yield "whole", functools.partial(_table, table, columns, bad)
    else:
        raise FileNotFoundError(f"no such directory or file of images: {show_path(piece)}")


def _directory(path: Path, columns: Columns, bad: BadExamples, *, for_validation: bool) -> Iterator[Found]:
    with _readable(path), os.scandir(path) as entries:
        shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
        folders = [entry.name for entry in shown if entry.is_dir()]
        files = [entry.name for entry in shown if not entry.is_dir()]
    classes = functools.partial(_class_folders, bad=bad)
    if folders:
        validation = next((name for name in VALIDATION if name in folders), None)
        if TRAIN in folders and (validation or folders == [TRAIN]) and _has_folders(path / TRAIN):
            yield "train" if validation else "whole", lambda: classes(path / TRAIN, empty="raise")
            if validation:
                yield "validation", lambda: classes(path / validation, empty="skip")
        elif PARTS.issuperset(name.casefold() for name in folders) and any(_has_folders(path / n) for n in folders):
            raise ValueError(
                f"{show_path(str(path))}: its folders ({', '.join(folders)}) are called like parts of a set, not like "
                f"classes; rename them to {TRAIN} and {VALIDATION[0]}, or name one as the source and another as the "
                "validation source"
            )
        else:
            yield "whole", lambda: classes(path, empty="skip" if for_validation else "raise")
        return
    idx = [name for name in files if _is_idx(name) and not (name.endswith(".gz") and name[:-3] in files)]
    tables = [name for name in files if kind_of(path / name) in ROWS]
    if not idx and not tables:
        raise ValueError(
            f"{show_path(str(path))}: no folder of a class, no table ({', '.join(ROWS)}) and no IDX file is in it; "
            "images are read from CLASS/IMAGE or train/CLASS/IMAGE"
        )
    for part, name in _by_part(idx or tables):
        yield (
            part,
            functools.partial(_read_idx if idx else functools.partial(_table, columns=columns, bad=bad), path / name),
        )


def _by_part(names: Sequence[str]) -> Iterator[tuple[Share, str]]:
    """The parts that files are, if their names tell a part to train on and one for validation."""
    train = [name for name in names if TRAIN in name]
    others = [name for name in names if TRAIN not in name]
    held_out = next((found for word in ("val", "t10k", "test") if (found := [n for n in others if word in n])), [])
    if not train or not held_out:
        for name in names:
            yield "whole", name
        return
    for name in train:
        yield "train", name
    for name in held_out:
        yield "validation", name


@contextlib.contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{show_path(os.fspath(path))}: cannot be read ({error.strerror})") from None


def _has_folders(path: Path) -> bool:
    with _readable(path), os.scandir(path) as entries:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)


# Class folders


def _class_folders(root: Path, *, bad: BadExamples, empty: Literal["raise", "skip"]) -> Images:
    with _readable(root), os.scandir(root) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not names:
        raise ValueError(
            f"{show_path(str(root))}: there is no folder of a class in it; images are read from CLASS/IMAGE"
        )
    paths: list[bytes] = []
    labels: list[str] = []
    stats, linked = [np.empty((0, 2), np.int64)], False
    for name in names:
        if not name.isprintable():
            raise ValueError(f"{show_path(str(root / name))}: the name of this folder is no name for a class")
        files = sorted(_files_below(str(root), name, bad))
        if not files and empty == "raise":
            raise ValueError(
                f"{root / name}: no image of the class {name!r} is in this folder; "
                "remove the folder, or hide it by a dot before its name"
            )
        paths += [os.fsencode(file.name) for file in files]
        labels += [name] * len(files)
        stats.append(np.array([(file.size, file.time) for file in files], np.int64).reshape(-1, 2))
        linked = linked or any(file.linked for file in files)
    kept = list(_without_duplicates(str(root), paths, labels, bad)) if linked else range(len(paths))
    return Files(str(root), [paths[i] for i in kept], [labels[i] for i in kept], np.concatenate(stats)[kept])


class _File(NamedTuple):
    name: str
    size: int
    time: int
    linked: bool


def _files_below(root: str, folder: str, bad: BadExamples) -> Iterator[_File]:
    """The images in a folder of the root, at any depth."""
    waiting, seen = [(folder, os.path.islink(os.path.join(root, folder)))], set()
    while waiting:
        folder, linked = waiting.pop()
        path = os.path.join(root, folder)
        seen.add(os.path.realpath(path))
        with _readable(path), os.scandir(path) as entries:
            for entry in entries:
                name, link = os.path.join(folder, entry.name), linked or entry.is_symlink()
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if not entry.is_symlink() or os.path.realpath(entry.path) not in seen:  # a circle has no end
                        waiting.append((name, link))
                elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                    if entry.is_file():
                        status = entry.stat()
                        yield _File(name, status.st_size, status.st_mtime_ns, link)
                    else:
                        bad(f"{show_path(entry.path)}: not a file, or a link to none")


def _without_duplicates(root: str, paths: list[bytes], labels: list[str], bad: BadExamples) -> Iterator[int]:
    first: dict[str, int] = {}
    for number, path in enumerate(paths):
        full = os.path.join(root, os.fsdecode(path))
        earlier = first.setdefault(os.path.realpath(full), number)
        if earlier == number:
            yield number
        elif labels[earlier] != labels[number]:
            other = os.path.join(root, os.fsdecode(paths[earlier]))
            bad(f"{show_path(full)}: the same file as {show_path(other)}, but in the folder of another class")


# Tables


def _table(path: Path, columns: Columns, bad: BadExamples) -> Images:
    cells: list[str | bytes] = []
    labels: list[str] = []
    stats: list[tuple[int, int]] = []
    numbers: list[int] = []
    unit, root = "row", path.parent
    for row in file_rows(path, {"image_column": columns.image, "label_column": columns.label}, bad=bad):
        unit = row.unit
        try:
            cell = _cell(columns.image, row.values[0])
            label = _label(columns.label, row.values[1])
            if cells and type(cell) is not type(cells[0]):
                raise ValueError(f"{columns.image!r} holds a path and bytes; they cannot be mixed in a table")
            if isinstance(cell, str):
                status = os.stat(root / cell)
                stats.append((status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            bad(f"{row.where}: no such image file: {show_path(str(root / str(row.values[0])))}")
        except OSError as error:
            bad(f"{row.where}: {show_path(str(row.values[0]))} cannot be read ({error.strerror})")
        except ValueError as error:
            bad(f"{row.where}: {error}")
        else:
            cells.append(cell)
            labels.append(label)
            numbers.append(row.number)
    places = Places(str(path), unit, numbers)
    encoded = [cell for cell in cells if isinstance(cell, bytes)]
    if encoded:
        return Cells(encoded, labels, places)
    names = [os.fsencode(cell) for cell in cells if isinstance(cell, str)]
    return Files(str(root), names, labels, np.array(stats, np.int64), places)


def _cell(column: str, value: Any) -> str | bytes:
    if isinstance(value, dict) and ("bytes" in value or "path" in value):  # an image of Hugging Face's `datasets`
        value = value.get("bytes") or value.get("path")
    if value is None or (isinstance(value, str) and not value.strip()) or value == b"":
        raise ValueError(f"{column!r} is empty")
    if not isinstance(value, (str, bytes)):
        raise ValueError(f"{column!r} holds a {type(value).__name__} ({value!r:.60}), not the path of an image")
    return value


def _label(column: str, value: Any) -> str:
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "":
        raise ValueError(f"{column!r} is empty")
    if not isinstance(value, (str, int)):
        raise ValueError(
            f"{column!r} holds a {type(value).__name__} ({value!r:.60}); one class name or number is needed"
        )
    return str(value)


# Arrays


def _digits() -> Images:
    if find_spec("sklearn") is None:
        raise ValueError(f"{DIGITS} is part of scikit-learn; install it with `pip install 'transformers-jax[metrics]'`")
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    return Cells(pixels, [str(label) for label in digits.target], Places(DIGITS, "image", range(len(pixels))))


IDX = re.compile(r"(?P<before>.*)images(?P<between>[-.]idx)3(?P<after>-ubyte(\.gz)?)")


def _is_idx(name: str) -> bool:
    return IDX.fullmatch(name) is not None


def _read_idx(path: Path) -> Images:
    match = IDX.fullmatch(path.name)
    assert match is not None
    label_path = path.with_name(f"{match['before']}labels{match['between']}1{match['after']}")
    pixels, labels = _idx_array(path, 3), _idx_array(label_path, 1)
    if len(pixels) != len(labels):
        raise ValueError(f"{path} holds {len(pixels):,} images, but {label_path.name} {len(labels):,} labels")
    return Cells(pixels, [str(label) for label in labels.tolist()], Places(str(path), "image", range(len(pixels))))


def _idx_array(path: Path, ndim: int) -> np.ndarray:
    """An array of bytes: a type, the number of axes, their lengths (big-endian), then the values."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}")
    with _readable(path):
        content = b"".join(read_bytes(path, lambda file: iter([file.read()])))
    if content[:4] != bytes([0, 0, 8, ndim]) or len(content) < 4 + 4 * ndim:
        raise ValueError(f"{path}: not an IDX file of bytes with {ndim} axes (it begins with {content[:4].hex()!r})")
    shape = tuple(np.frombuffer(content, ">u4", ndim, offset=4).tolist())
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * ndim)
    if len(values) != math.prod(shape):
        raise ValueError(
            f"{path}: not whole; shape {shape} needs {math.prod(shape):,} bytes, but {len(values):,} follow"
        )
    return values.reshape(shape)
