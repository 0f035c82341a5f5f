"""Rows with named columns from CSV, TSV, JSON and Parquet files and from TFDS sets, each with the place it is from."""

import collections
import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from transformers_jax.data.files import ROWS, find_files, first_line, kind_of, read_lines, split_specification

Columns = Mapping[str, str | tuple[str, ...]]
"""For each setting that names a column (`text_column`; errors quote it), the name, or names of which one is there. A
setting called like its column stands for a column that cannot be chosen."""


class Row(NamedTuple):
    """The cells that were asked for, in that order, and where they are from."""

    values: list[Any]
    source: str
    unit: str
    number: int

    @property
    def where(self) -> str:
        """`rows.csv, line 7`, for errors."""
        return f"{self.source}, {self.unit} {self.number}"


def raise_bad(message: str) -> None:
    """What to do about a bad row if none is to be skipped."""
    raise ValueError(message) from None


def read_rows(
    specification: str, columns: Columns, *, optional: Sequence[str] = (), bad: Callable[[str], None] = raise_bad
) -> Iterator[Row]:
    """Read the cells of `columns` in every row of a source, then those of `optional` columns, None where missing.

    `specification` is one of the following, or several with commas in between, read in that order:

    - `.csv`, `.tsv` (no quoting), `.jsonl` (also `.ndjson` and `.json`, one object a line), `.json` with one list of
      objects, or `.parquet`; a glob of such files (a file matched twice is read once), or a directory with some. All
      but Parquet may be compressed (`.gz`).
    - `tfds:name[/config][:version][:split]` (split `train` unless given): a TensorFlow Datasets set, read without
      TensorFlow.

    A column of a CSV or TSV file can also be a number: the first column is `0`, the last `-1`. If all columns are
    numbers, the file has no header, unless its first line is `0,1,2,...` itself (after an unnamed index or not). A name
    in the header that looks like a number is a name.

    Class numbers become class names if the source has those (TFDS, and Parquet files of Hugging Face datasets). Other
    cells are as they are stored: text from CSV and TSV, and JSON's types from the rest.

    A row that cannot be read (not UTF-8, not JSON, a wrong number of fields, a column that it alone lacks) goes to
    `bad` as a message with file, line and value; it is left out if `bad` does not raise. A column that a whole file
    lacks is always a `ValueError` that lists those it has.
    """
    parts = split_specification(specification)
    if not parts:
        raise ValueError("the source is empty; name a file, a glob, a directory or tfds:NAME")
    files: list[Path] = []
    for part in parts:
        if part.startswith("tfds:"):
            yield from TfdsSet(part, columns, optional=optional).rows(bad)
            continue
        new = [path for path in find_files(part, ROWS) if path not in files]
        files.extend(new)
        for path in new:
            yield from file_rows(path, columns, optional=optional, bad=bad)


def file_rows(
    path: Path, columns: Columns, *, optional: Sequence[str] = (), bad: Callable[[str], None] = raise_bad
) -> Iterator[Row]:
    """`read_rows` of one file."""
    kind = kind_of(path)
    if kind == ".parquet":
        return _parquet_rows(path, columns, optional, bad)
    if kind in (".csv", ".tsv"):
        return _csv_rows(path, columns, optional, bad, tabs=kind == ".tsv")
    if kind in ROWS:
        return _json_rows(path, columns, optional, bad)
    raise ValueError(f"{path}: not a table by its name; known are {', '.join(ROWS)}, and .gz of all but the last")


def _choose(where: str, columns: Columns, available: Iterable[str], hint: str = "") -> list[str]:
    """The column of each setting. Raises `ValueError` for one that is not there."""
    available = list(available)
    names = []
    for setting, column in columns.items():
        candidates = (column,) if isinstance(column, str) else column
        name = next((candidate for candidate in candidates if candidate in available), None)
        if name is None:
            wanted = " or ".join(map(repr, candidates))
            listed = ", ".join(f"{name:.40}" for name in available) or "(none)"
            way_out = "there are" if setting == column else f"set {setting} to one of"
            raise ValueError(f"{where}: no column {wanted}; {way_out}: {listed}{hint}") from None
        names.append(name)
    return names


# JSON


def _json_rows(path: Path, columns: Columns, optional: Sequence[str], bad: Callable[[str], None]) -> Iterator[Row]:
    chosen, names, missing = columns, None, None
    source = str(path)
    for unit, number, row, escaped in _json_values(path, bad):
        if not isinstance(row, dict):
            bad(f"{path}, {unit} {number}: a JSON object is needed, not a {type(row).__name__}")
            continue
        try:
            values = [row[name] for name in names or _choose("", columns, row)]
        except (KeyError, ValueError):
            try:
                _choose(f"{path}, {unit} {number}", chosen, row)
            except ValueError as error:
                bad(str(error))
                missing = missing or error
            continue
        if names is None:  # from here on, all rows have the same columns
            names = _choose("", columns, row)
            chosen = dict(zip(columns, names, strict=True))
        if escaped:  # only an escape can write half a surrogate pair, which no encoder accepts
            try:
                for name in names:
                    json.dumps(row[name], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                bad(f"{path}, {unit} {number}: {name!r} is not valid Unicode ({error.reason})")
                continue
        if optional:
            values += [row.get(name) for name in optional]
        yield Row(values, source, unit, number)
    if names is None and missing is not None:
        raise missing


def _json_values(path: Path, bad: Callable[[str], None]) -> Iterator[tuple[str, int, Any, bool]]:
    """Each value, a line or an item of the list that the file is, and whether `\\u` occurs in it."""
    if kind_of(path) == ".json" and _starts_a_list(path):
        yield from (("item", number, row, True) for number, row in enumerate(load_json(path), 1))
        return
    for number, line in read_lines(path, bad):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(f"{path}, line {number}: not a JSON object a line ({error}): {line.rstrip()[:60]!r}")
        else:
            yield "line", number, row, "\\u" in line


def _starts_a_list(path: Path) -> bool:
    start = ""
    for _, line in read_lines(path, lambda message: None):
        start += "".join(line[:1000].split())
        if len(start) >= 2:
            break
    return start[:2] in ("[{", "[]")


def load_json(path: Path) -> Any:
    """The value that a whole JSON file holds. Raises `ValueError` with file and line."""
    text = "".join(line for _, line in read_lines(path, raise_bad))
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg})") from None
    except RecursionError as error:
        raise ValueError(f"{path}: not readable as JSON ({error})") from None


# CSV and TSV


def is_number(column: str) -> bool:
    """Whether a column may be meant by its position."""
    return re.fullmatch(r"-?\d+", column, re.ASCII) is not None


def _csv_rows(
    path: Path, columns: Columns, optional: Sequence[str], bad: Callable[[str], None], *, tabs: bool
) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # the module's 128 KB is less than a long document
    records = _Records(path, bad, tabs=tabs)
    _, header = next(records, (0, []))
    numbered = header[1:] if header[:1] == [""] else header
    counts = bool(header) and numbered == [str(i) for i in range(len(numbered))]
    bare = all(isinstance(column, str) and is_number(column) for column in columns.values()) and not counts
    if bare:
        records.again()
    positions = range(-len(header), len(header))
    indices = []
    for setting, column in columns.items():
        if isinstance(column, str) and is_number(column) and (bare or column not in header):
            if int(column) not in positions and header:
                _choose(str(path), {setting: column}, map(str, range(len(header))) if bare else header)
            indices.append(int(column))
            continue
        (name,) = _choose(str(path), {setting: column}, header, " (or numbers, from 0, if this is no header)")
        if header.count(name) > 1:
            raise ValueError(f"{path}: {header.count(name)} columns are named {name!r}, as {setting} says; rename them")
        indices.append(header.index(name))
    extra = [header.index(name) if not bare and name in header else None for name in optional]
    source = str(path)
    for number, record in records:
        if len(record) != len(header):  # an unquoted comma would cut the text short
            records.reject(
                f"{len(record)} fields, but the {'first line' if bare else 'header'} has {len(header)}; "
                "quote fields that hold the delimiter"
            )
            continue
        values = [record[index] for index in indices]
        if extra:
            values += [None if index is None else record[index] for index in extra]
        yield Row(values, source, "line", number)


class _Records(Iterator[tuple[int, list[str]]]):
    """The records of a CSV file with the number of their first line.

    A bad record costs its first line only: an open quote takes in the lines after it, which are read again."""

    def __init__(self, path: Path, bad: Callable[[str], None], *, tabs: bool):
        self._path, self._bad = path, bad
        self._lines = read_lines(path, bad)
        self._again: collections.deque[tuple[int, str]] = collections.deque()
        self._taken: list[tuple[int, str]] = []
        options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tabs else {"strict": True}
        self._open = lambda: csv.reader(self._feed(), **options)
        self._reader = self._open()

    def _feed(self) -> Iterator[str]:
        taken, again = self._taken, self._again
        while True:
            line = again.popleft() if again else next(self._lines, None)
            if line is None:
                return
            taken.append(line)
            yield line[1]

    def __next__(self) -> tuple[int, list[str]]:
        taken = self._taken
        while True:
            taken.clear()
            try:
                record = next(self._reader)
            except csv.Error as error:
                self.reject(str(error))
                continue
            # Lines that were not UTF-8 are counted already; without them, a record of several is not whole.
            if record and (len(taken) == 1 or taken[-1][0] - taken[0][0] == len(taken) - 1):
                return taken[0][0], record

    def again(self) -> None:
        """Give the last record once more."""
        self._again.extendleft(reversed(self._taken))

    def reject(self, problem: str) -> None:
        """The last record is bad."""
        number, line = self._taken[0]
        self._bad(f"{self._path}, line {number}: {problem} ({line.rstrip()[:60]!r})")
        self._again.extendleft(reversed(self._taken[1:]))
        self._reader = self._open()  # the old one may have met the end of the file


# Parquet


def _parquet_rows(path: Path, columns: Columns, optional: Sequence[str], bad: Callable[[str], None]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    source, first = str(path), 1
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
            schema = file.schema_arrow
            names = [*_choose(str(path), columns, schema.names), *optional]
            present = [name for name in dict.fromkeys(names) if name in schema.names]
            classes = _hugging_face_classes(schema.metadata or {})
            classes = {i: classes[name] for i, name in enumerate(names) if name in classes}
            for batch in file.iter_batches(batch_size=256, columns=present):
                absent = [None] * len(batch)
                cells = [batch.column(name).to_pylist() if name in present else absent for name in names]
                for number, values in enumerate(map(list, zip(*cells, strict=True)), first):
                    try:
                        for i, known in classes.items():
                            values[i] = _named(values[i], known)
                    except ValueError as error:
                        bad(f"{source}, row {number}: {error}")
                    else:
                        yield Row(values, source, "row", number)
                first += len(batch)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: not a readable Parquet file ({first_line(error)})") from None


def _hugging_face_classes(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The class names of columns of class numbers, or of lists of them, as `datasets` writes them into its files."""
    classes = {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        for column, feature in features.items():
            while isinstance(feature, dict) and "feature" in feature:
                feature = feature["feature"]
            if isinstance(feature, list) and len(feature) == 1:  # how old versions wrote a list
                feature = feature[0]
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and feature.get("names"):
                classes[column] = feature["names"]
    except (KeyError, ValueError, TypeError, AttributeError):  # another program's metadata
        return {}
    return classes


def _named(value: Any, names: Sequence[str]) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_named(item, names) for item in value]
    if not 0 <= value < len(names):  # -1 marks the examples of a test set whose labels are kept back
        raise ValueError(f"class {value}, but there are classes 0 to {len(names) - 1}")
    return names[value]


# TensorFlow Datasets


class TfdsSet:
    """A TensorFlow Datasets set, opened by `tfds:name[/config][:version][:split]` and read without TensorFlow."""

    def __init__(self, specification: str, columns: Columns, *, optional: Sequence[str] = ()):
        match = re.fullmatch(r"tfds:(?P<name>[^:]+(?::\d+\.[\d*]+\.[\d*]+)?)(?::(?P<split>.+))?", specification)
        if match is None:
            raise ValueError(f"cannot read {specification!r}; write tfds:name[/config][:version][:split]")
        name, split = match["name"], match["split"] or "train"
        import tensorflow_datasets as tfds  # half a second, and only wanted here

        self.specification = specification
        try:
            self.builder = tfds.builder(name)
            self.features: Any = self.builder.info.features or {}
            # Before anything is downloaded.
            self.names = [*_choose(specification, columns, self.features), *optional]
            self.data: Any = tfds.data_source(name, split=split)
        except Exception as error:
            if str(error).startswith(specification):
                raise
            raise ValueError(f"{specification}: {first_line(error).rstrip('.')}; {_advice(name, error)}") from error

    def rows(self, bad: Callable[[str], None]) -> Iterator[Row]:
        """The examples in their order, numbered from 0."""
        for number in range(len(self.data)):
            example = self.data[number]
            try:
                values = [
                    _plain(example[name], self.features[name]) if name in self.features else None for name in self.names
                ]
            except UnicodeDecodeError as error:
                bad(f"{self.specification}, example {number}: byte {error.start} of {error.object!r:.60} is not UTF-8")
            except ValueError as error:
                bad(f"{self.specification}, example {number}: {error}")
            else:
                yield Row(values, self.specification, "example", number)


def _advice(name: str, error: Exception) -> str:
    import tensorflow_datasets as tfds

    with_tensorflow = "with TensorFlow (`pip install 'transformers-jax[tensorflow]'`)"
    if isinstance(error, ImportError) or (
        isinstance(error, tfds.core.DatasetNotFoundError) and find_spec("tensorflow") is None
    ):
        return (
            f"check the name; sets that need TensorFlow (glue, conll2003, wmt) are prepared once {with_tensorflow} "
            f"by `tfds.builder({name!r}).download_and_prepare(file_format='array_record')`"
        )
    if isinstance(error, NotImplementedError) or "ile format" in first_line(error):
        return (
            f"convert the prepared copy once {with_tensorflow} by "
            "`tfds convert_format --dataset_version_dir=DIR --out_file_format=array_record`"
        )
    return (
        "check name and split; without network, prepare the set elsewhere with file_format='array_record' and "
        "point TFDS_DATA_DIR at it"
    )


def _plain(value: Any, feature: Any) -> Any:
    """A decoded value as Python's own types, with the names of classes."""
    if isinstance(value, dict):  # a sequence of dictionaries arrives as a dictionary of sequences
        inner = feature
        while hasattr(inner, "feature"):
            inner = inner.feature
        return {name: _plain(item, inner[name]) for name, item in value.items()}
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return [_plain(item, feature) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.item()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, int) and hasattr(feature, "int2str"):  # a sequence passes on its element's attributes
        if not 0 <= value < feature.num_classes:  # int2str reads -1, a label kept back, as the last class
            raise ValueError(f"class {value}, but there are classes 0 to {feature.num_classes - 1}")
        return feature.int2str(value)
    return value
