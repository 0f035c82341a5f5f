"""Documents of text from files, packages and TFDS sets, read in pieces so that a corpus never has to fit in memory."""

import codecs
import csv
import dataclasses
import glob
import gzip
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

Documents = Iterator[Iterator[str]]
"""One inner iterator a document; joined, its strings are the text of that document."""

PIECE_BYTES = 1 << 18
TABLES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXTS = (".txt", ".text", ".md", ".rst")


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Text that can be read as often as needed, and a cheap way to see whether it is still the same text."""

    name: str
    """The specification it was opened from."""
    documents: Callable[[], Documents]
    """Starts reading from the first document."""
    identity: Callable[[], list[Any]]
    """JSON-able description of the content. For files: path, size, inode and times of modification and status change
    (the last one cannot be set by programs), so that a changed file is noticed without reading it."""


def open_text(specification: str, *, text_column: str = "text") -> TextSource:
    """Open a source of documents.

    `specification` is one of the following, or several of them with commas in between (read in that order):

    - `builtin:python-docs`: the help topics inside CPython, one document a topic, sorted by name. It differs a little
      between Python versions.
    - a file or a glob (`corpus/**/*.txt`; matches are sorted, a file matched twice is read once). `.jsonl` (also
      `.ndjson` and `.json`, one object a line), `.csv`, `.tsv` (no quoting) and `.parquet` hold one document a row in
      `text_column`, and empty cells are skipped; every other file is one document of UTF-8 text, whose newlines stay as
      they are and whose byte order mark is dropped. All but Parquet may be compressed (`.gz`).
    - a directory: every file below it named `.txt`, `.text`, `.md`, `.rst` or like the tables above, sorted by path;
      hidden ones are left out.
    - `tfds:name[/config][:version][:split]` (split `train` unless given, slices as in `train[:10%]`): a TensorFlow
      Datasets set, read without TensorFlow; `text_column` names its feature.

    Raises `FileNotFoundError` or `ValueError` in one line; files that turn out not to be UTF-8, or without the column,
    raise `ValueError` naming file and place while they are read.
    """
    if os.path.exists(os.path.expanduser(specification)):  # a path may hold a comma; a list may be too long for one
        parts = [specification]
    else:
        parts = [part.strip() for part in specification.split(",") if part.strip()]
    if not parts:
        raise ValueError("the text source is empty; name a file, a glob, builtin:python-docs or tfds:NAME")
    sources, files = [], []
    for part in parts:
        if part.startswith("builtin:"):
            sources.append(_builtin(part))
        elif part.startswith("tfds:"):
            sources.append(_tfds(part, text_column))
        else:
            new = [path for path in _find_files(part) if path not in files]
            files.extend(new)
            sources.extend(_file(path, text_column) for path in new)
    return TextSource(
        name=specification,
        documents=lambda: itertools.chain.from_iterable(source.documents() for source in sources),
        identity=lambda: [source.identity() for source in sources],
    )


def _builtin(specification: str) -> TextSource:
    if specification != "builtin:python-docs":
        raise ValueError(f"unknown text source {specification!r}; the only built-in one is builtin:python-docs")
    from pydoc_data.topics import topics

    texts = [topics[name] for name in sorted(topics)]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return TextSource(specification, lambda: (iter((text,)) for text in texts), lambda: [specification, digest])


# Files


def _find_files(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = [
            file
            for file in sorted(path.rglob("*"))
            if file.is_file()
            and _kind(file) in TEXTS + TABLES
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        ]
        if not found:
            raise FileNotFoundError(
                f"no text in the directory {pattern}; it is searched for {', '.join(TEXTS + TABLES)}"
            )
    elif path.exists():
        found = [path]
    elif glob.has_magic(pattern):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if Path(name).is_file()]
        if not found:
            raise FileNotFoundError(f"no file matches {pattern}")
    else:
        raise FileNotFoundError(f"no such text file: {pattern}")
    return [file.resolve() for file in found]


def _kind(path: Path) -> str:
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _file(path: Path, text_column: str) -> TextSource:
    kind = _kind(path)
    if kind == ".parquet":
        rows = partial(_parquet_rows, path, text_column)
    elif kind in (".csv", ".tsv"):
        rows = partial(_csv_rows, path, text_column, tabs=kind == ".tsv")
    elif kind in TABLES:
        rows = partial(_json_rows, path, text_column)
    else:
        return TextSource(str(path), lambda: iter((_pieces(path),)), partial(_file_identity, path))
    return TextSource(str(path), lambda: (iter((text,)) for text in rows()), partial(_file_identity, path))


def _file_identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _read(path: Path, read: Callable[[BinaryIO], Iterator[bytes]]) -> Iterator[bytes]:
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield from read(file)
        return
    try:
        with gzip.open(path) as file:
            yield from read(file)  # pyright: ignore[reportArgumentType]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error})") from None


def _not_utf8(path: Path, offset: int, byte: int) -> NoReturn:
    raise ValueError(
        f"{path}: byte {offset} (0x{byte:02x}) is not valid UTF-8; convert the file first, "
        "for example with `iconv -f latin1 -t utf-8`"
    ) from None


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset, first = 0, True
    # The empty block at the end makes the decoder complain about a character that was cut off.
    for block in itertools.chain(_read(path, lambda file: iter(partial(file.read, PIECE_BYTES), b"")), (b"",)):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            _not_utf8(path, offset - pending + error.start, error.object[error.start])
        offset += len(block)
        if first and text:
            first, text = False, text.removeprefix("\ufeff")
        if text:
            yield text


def _lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends. Splits at newline bytes only, as JSON and CSV need."""
    offset = 0
    for number, line in enumerate(_read(path, iter)):
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            _not_utf8(path, offset + error.start, line[error.start])
        offset += len(line)
        yield text.removeprefix("\ufeff") if number == 0 else text


def _no_column(where: str, column: str, columns: list[str]) -> NoReturn:
    raise ValueError(f"{where}: no column {column!r}; set text_column to one of: {', '.join(columns) or '(none)'}")


def _json_rows(path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a JSON object a line ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: a JSON object is needed, not a {type(row).__name__}")
        if column not in row:
            _no_column(f"{path}, line {number}", column, list(row))
        text = row[column]
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"{path}, line {number}: {column!r} holds a {type(text).__name__}, not text")
        if "\\u" in line:  # only an escape can write half a surrogate pair, which no encoder accepts
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{path}, line {number}: {column!r} is not valid Unicode ({error.reason})") from None
        yield text


def _csv_rows(path: Path, column: str, *, tabs: bool) -> Iterator[str]:
    csv.field_size_limit(2**31 - 1)  # the module's 128 KB is less than a long document
    if tabs:
        reader = csv.reader(_lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        reader = csv.reader(_lines(path), strict=True)
    try:
        header = next(reader, [])
        if column not in header:
            _no_column(str(path), column, header)
        index = header.index(column)
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):  # an unquoted comma would cut the text short
                raise ValueError(
                    f"{path}, line {reader.line_num}: {len(row)} fields, but the header has {len(header)}; "
                    "quote fields that hold the delimiter"
                )
            if row[index]:
                yield row[index]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}") from None


def _parquet_rows(path: Path, column: str) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            schema = file.schema_arrow
            if column not in schema.names:
                _no_column(str(path), column, schema.names)
            kind = schema.field(column).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise ValueError(f"{path}: column {column!r} holds {kind}, not text")
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable Parquet file ({_first_line(error)})") from None


# TensorFlow Datasets


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).strip()


def _tfds(specification: str, text_column: str) -> TextSource:
    match = re.fullmatch(r"tfds:(?P<name>[^:]+(?::\d+\.[\d*]+\.[\d*]+)?)(?::(?P<split>.+))?", specification)
    if match is None:
        raise ValueError(f"cannot read {specification!r}; write tfds:name[/config][:version][:split]")
    name, split = match["name"], match["split"] or "train"
    import tensorflow_datasets as tfds  # half a second, and only wanted here

    try:
        builder = tfds.builder(name)
        features: Any = builder.info.features or {}
        if text_column not in features:  # before anything is downloaded
            _no_column(specification, text_column, list(features))
        data: Any = tfds.data_source(name, split=split)
    except Exception as error:
        if str(error).startswith(specification):
            raise
        reason = _first_line(error).rstrip(".")
        with_tensorflow = "with TensorFlow (`pip install 'transformers-jax[tensorflow]'`)"
        if isinstance(error, ImportError) or (
            isinstance(error, tfds.core.DatasetNotFoundError) and find_spec("tensorflow") is None
        ):
            advice = (
                f"check the name; sets that need TensorFlow (glue, conll2003, wmt) are prepared once {with_tensorflow} "
                f"by `tfds.builder({name!r}).download_and_prepare(file_format='array_record')`"
            )
        elif isinstance(error, NotImplementedError) or "ile format" in reason:
            advice = (
                f"convert the prepared copy once {with_tensorflow} by "
                "`tfds convert_format --dataset_version_dir=DIR --out_file_format=array_record`"
            )
        else:
            advice = (
                "check name and split; without network, prepare the set elsewhere with file_format='array_record' and "
                "point TFDS_DATA_DIR at it"
            )
        raise ValueError(f"{specification}: {reason}; {advice}") from error

    def documents() -> Documents:
        for index in range(len(data)):
            text = data[index][text_column]
            if isinstance(text, bytes):
                try:
                    text = text.decode()
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{specification}: example {index}, byte {error.start} is not valid UTF-8"
                    ) from None
            if not isinstance(text, str):
                raise ValueError(f"{specification}: feature {text_column!r} holds {type(text).__name__}, not text")
            yield iter((text,))

    def identity() -> list[Any]:
        folder = Path(builder.data_dir)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [specification, builder.info.full_name, len(data), [_file_identity(path) for path in files]]

    return TextSource(specification, documents, identity)
