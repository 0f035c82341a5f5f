"""Texts, or pairs of texts, with their labels."""

import dataclasses
import math
from typing import Any

from transformers_jax.data.labelled import BadExamples, LabelledTextData, Part, read_part
from transformers_jax.data.tables import Row, read_rows


@dataclasses.dataclass(frozen=True)
class ClassificationData(LabelledTextData):
    """Texts with a label each, in .csv, .tsv, .jsonl, .json or .parquet files or a TFDS set."""

    # The comments are the help texts of the command line.

    # The column (or TFDS feature) that holds the text: its name, or for a .csv or .tsv file without header its number,
    # from 0.
    text_column: str = "text"

    # The column of a second text, for pairs such as premise and hypothesis.
    pair_column: str | None = None

    # The column of the label.
    label_column: str = "label"

    # What separates several labels in one cell, such as '|' or ','. A list in a cell holds several anyway.
    label_separator: str | None = None

    def __post_init__(self):
        super().__post_init__()
        columns = [self.text_column, self.label_column] + ([] if self.pair_column is None else [self.pair_column])
        if not all(columns):
            raise ValueError("text_column, pair_column and label_column must not be empty")
        if len(set(columns)) < len(columns):
            raise ValueError(f"text_column, pair_column and label_column must differ, but are {', '.join(columns)}")
        if self.label_separator == "":
            raise ValueError("label_separator is empty; give a character, or leave it unset")


@dataclasses.dataclass(frozen=True)
class LabelledText:
    """A text, or two, and what is known of them."""

    text: str
    pair: str | None
    label: str | float | int | list[str] | None
    """As it is in the file: a class by its name or number, a number to predict, or a list of all classes that apply.
    None if labels were not read."""
    where: str
    """`reviews.csv, line 7`, for errors."""


def read_classification(data: ClassificationData, *, part: Part, labels: bool = True) -> list[LabelledText]:
    """Read one part of the data: "train", "validation", or "all" of `source`.

    Without a validation source, a random `validation_fraction` of the rows is held out, the same ones for every seed;
    both parts keep the order of the file. Without `labels`, the label column is not read and may be missing.

    Class numbers of TFDS sets become their names. Labels are stripped of white space; a list in a cell, or the parts at
    `label_separator`, give a list of names, which may be empty.

    Raises `ValueError` in one line that names file, line and value for a row that cannot be used: one that is not
    readable (`read_rows`), with an empty text or label, or cells of another type. With `data.skip_bad` such rows are
    left out, and how many is logged. No row left is always an error, and so is a column that a file lacks.
    """
    columns = {"text_column": data.text_column}
    if data.pair_column is not None:
        columns["pair_column"] = data.pair_column
    if labels:
        columns["label_column"] = data.label_column

    def read(source: str, bad: BadExamples) -> list[LabelledText]:
        examples = []
        for row in read_rows(source, columns, bad=bad):
            try:
                examples.append(_example(row, columns, data.label_separator))
            except ValueError as error:
                bad(f"{row.where}: {error}")
        return examples

    return read_part(data, read, part=part, noun="rows")


def _example(row: Row, columns: dict[str, str], separator: str | None) -> LabelledText:
    cells = {setting: (column, value) for (setting, column), value in zip(columns.items(), row.values, strict=True)}
    label = _label(*cells["label_column"], separator) if "label_column" in cells else None
    pair = _text(*cells["pair_column"]) if "pair_column" in cells else None
    return LabelledText(_text(*cells["text_column"]), pair, label, row.where)


def _text(column: str, value: Any) -> str:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{column!r} is empty")
    if not isinstance(value, str):
        raise ValueError(f"{column!r} holds a {type(value).__name__} ({value!r:.60}), not text")
    return value


def _label(column: str, value: Any, separator: str | None) -> str | float | int | list[str]:
    if isinstance(value, str) and separator is not None:
        value = [part for part in value.split(separator) if part.strip()]
    if isinstance(value, list):
        return list(dict.fromkeys(str(_one_label(column, item)) for item in value))
    return _one_label(column, value)


def _one_label(column: str, value: Any) -> str | float | int:
    if isinstance(value, str):
        value = value.strip()
    if value is None or value == "":
        raise ValueError(f"{column!r} is empty")
    if isinstance(value, bool):
        return str(value)
    if not isinstance(value, (str, int, float)) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{column!r} holds {value!r:.60}, which is no label")
    return value
