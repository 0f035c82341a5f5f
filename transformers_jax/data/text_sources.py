"""Documents of text from files, packages and TFDS sets, read in pieces so that a corpus never has to fit in memory."""

import codecs
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from transformers_jax.data.files import (
    ROWS,
    file_identity,
    find_files,
    kind_of,
    not_utf8,
    read_bytes,
    split_specification,
)
from transformers_jax.data.tables import Row, TfdsSet, file_rows, raise_bad

Documents = Iterator[Iterator[str]]
"""One inner iterator a document; joined, its strings are the text of that document."""

PIECE_BYTES = 1 << 18
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
      `.ndjson` and `.json`, one object a line), `.json` with one list of objects (held in memory), `.csv`, `.tsv` (no
      quoting) and `.parquet` hold one document a row in `text_column`, and empty cells are skipped; every other file is
      one document of UTF-8 text, whose newlines stay as they are and whose byte order mark is dropped. All but Parquet
      may be compressed (`.gz`). `text_column` is a name or, for `.csv` and `.tsv` without header, a number.
    - a directory: every file below it named `.txt`, `.text`, `.md`, `.rst` or like the tables above, sorted by path;
      hidden ones are left out.
    - `tfds:name[/config][:version][:split]` (split `train` unless given, slices as in `train[:10%]`): a TensorFlow
      Datasets set, read without TensorFlow; `text_column` names its feature.

    Raises `FileNotFoundError` or `ValueError` in one line; files that turn out not to be UTF-8, or without the column,
    raise `ValueError` naming file and place while they are read.
    """
    parts = split_specification(specification)
    if not parts:
        raise ValueError("the text source is empty; name a file, a glob, builtin:python-docs or tfds:NAME")
    sources, files = [], []
    for part in parts:
        if part.startswith("builtin:"):
            sources.append(_builtin(part))
        elif part.startswith("tfds:"):
            sources.append(_tfds(part, text_column))
        else:
            new = [path for path in find_files(part, TEXTS + ROWS) if path not in files]
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


def _file(path: Path, text_column: str) -> TextSource:
    if kind_of(path) in ROWS:
        rows = partial(file_rows, path, {"text_column": text_column})
        return TextSource(str(path), lambda: _cells(rows(), text_column), partial(file_identity, path))
    return TextSource(str(path), lambda: iter((_pieces(path),)), partial(file_identity, path))


def _cells(rows: Iterator[Row], column: str) -> Documents:
    for row in rows:
        text = row.values[0]
        if isinstance(text, str):
            if text:
                yield iter((text,))
        elif text is not None:
            what = "feature " if row.unit == "example" else ""
            raise ValueError(f"{row.where}: {what}{column!r} holds a {type(text).__name__}, not text")


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    offset, first = 0, True
    # The empty block at the end makes the decoder complain about a character that was cut off.
    for block in itertools.chain(read_bytes(path, lambda file: iter(partial(file.read, PIECE_BYTES), b"")), (b"",)):
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise_bad(not_utf8(path, offset - pending + error.start, error.object[error.start]))
        offset += len(block)
        if first and text:
            first, text = False, text.removeprefix("\ufeff")
        if text:
            yield text


def _tfds(specification: str, text_column: str) -> TextSource:
    source = TfdsSet(specification, {"text_column": text_column})

    def identity() -> list[Any]:
        folder = Path(source.builder.data_dir)
        files = sorted(folder.iterdir()) if folder.is_dir() else []
        return [specification, source.builder.info.full_name, len(source.data), [file_identity(path) for path in files]]

    return TextSource(specification, lambda: _cells(source.rows(raise_bad), text_column), identity)
