"""Sentences and their translations, from aligned files, tables and TFDS sets."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers_jax.data.files import ROWS, decode_lines, find_files, kind_of, read_bytes, split_specification
from transformers_jax.data.labelled import BadExamples, LabelledData, Part, read_part
from transformers_jax.data.tables import read_rows

PLAIN = (".txt",)
"""Files of lines that a directory is searched for."""


@dataclasses.dataclass(frozen=True)
class TranslationData(LabelledData):
    """Sentences with their translations: two aligned files, a table (.tsv, .csv, .jsonl, .json, .parquet) or a TFDS
    set."""

    # The comments are the help texts of the command line.

    # The file whose line N translates line N of the source; .gz is unpacked. Unset: the source is a table or a TFDS set
    # that holds both sides.
    target: str | None = None

    # The target of the validation source.
    validation_target: str | None = None

    # The column (or TFDS feature, such as de) of the text to translate. translation.de is the part de of a column that
    # holds both.
    source_column: str = "source"

    # The column of its translation.
    target_column: str = "target"

    # 'bpe' or 'unigram' (trained on both sides of the text to train on), or the path of an existing tokenizer.
    tokenizer: str = "bpe"

    # The number of tokens that 'bpe' or 'unigram' learns. Other tokenizers have their own.
    vocab_size: int = 8000

    def __post_init__(self):
        super().__post_init__()
        for name in ("target", "validation_target", "source_column", "target_column", "tokenizer"):
            if getattr(self, name) is not None and not getattr(self, name).strip():
                raise ValueError(f"{name} is empty")
        if self.source_column == self.target_column:
            raise ValueError(f"source_column and target_column must differ, but are both {self.source_column}")
        if self.validation_target is not None and self.validation_source is None:
            raise ValueError(f"validation_target={self.validation_target} needs a validation_source")
        if self.target is not None and self.validation_source is not None and self.validation_target is None:
            raise ValueError(
                f"validation_source={self.validation_source} needs a validation_target, as the source has a target"
            )
        if self.vocab_size < 16:
            raise ValueError(f"vocab_size is {self.vocab_size}; it must be at least 16")


@dataclasses.dataclass(frozen=True, slots=True)
class SentencePair:
    """A sentence and its translation."""

    source: str
    target: str


def read_pairs(data: TranslationData, *, part: Part) -> list[SentencePair]:
    """Read one part of the data: "train", "validation", or "all" of `source`.

    Without a validation source, a random `validation_fraction` of the pairs is held out, the same ones for every seed;
    both parts keep the order of the file. White space around a sentence does not belong to it.

    Raises `ValueError` in one line that names file and line for a pair that cannot be used (one side is empty, or not
    readable); with `data.skip_bad` such pairs are left out, and how many is logged. Aligned files with different
    numbers of lines are always an error, and so are a missing column and a part without pairs.
    """

    def read(source: str, bad: BadExamples) -> list[SentencePair]:
        held_out = part == "validation" and data.validation_source is not None
        target = data.validation_target if held_out else data.target
        sides = _columns(source, data, bad) if target is None else _aligned(source, target, bad)
        pairs = []
        for where, texts in sides:
            texts = [text.strip() if isinstance(text, str) else text for text in texts]
            if wrong := [name for name, text in zip(("source", "target"), texts, strict=True) if not text]:
                bad(f"{where}: the {' and the '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} empty")
            elif wrong := [text for text in texts if not isinstance(text, str)]:
                bad(f"{where}: {wrong[0]!r:.60} is not a text")
            else:
                pairs.append(SentencePair(*texts))
        return pairs

    return read_part(data, read, part=part, noun="pairs of sentences")


def _aligned(source: str, target: str, bad: BadExamples) -> Iterator[tuple[str, list[str]]]:
    """Lines with the same number, of files that are taken in turn."""
    sides = [
        [file for one in split_specification(side) for file in find_files(one, PLAIN)] for side in (source, target)
    ]
    if len(sides[0]) != len(sides[1]):
        raise ValueError(f"{source} are {len(sides[0])} files, but {target} {len(sides[1])}; they are taken in pairs")
    for paths in zip(*sides, strict=True):
        (sources, count), (targets, target_count) = (_lines(path, bad) for path in paths)
        if count != target_count:
            shared = sorted(sources.keys() & targets.keys())
            lone = next((number for number in shared if bool(sources[number]) != bool(targets[number])), None)
            hint = "" if lone is None else f", and line {lone:,} is the first that is empty on one side alone"
            raise ValueError(
                f"{paths[0]} has {count:,} lines, but {paths[1]} {target_count:,}: line "
                f"{min(count, target_count) + 1:,} is the first without a counterpart{hint}"
            )
        for number, text in sources.items():
            if number in targets:
                yield f"{paths[0]}, line {number}", [text, targets[number]]


def _lines(path: Path, bad: BadExamples) -> tuple[dict[int, str], int]:
    """The readable lines of a file by their numbers, and how many lines it has."""
    counter = itertools.count()

    def counted(lines: Iterator[bytes]) -> Iterator[bytes]:
        for line in lines:
            next(counter)
            yield line

    lines = {number: text.strip() for number, text in decode_lines(path, counted(read_bytes(path, iter)), bad)}
    return lines, next(counter)


def _columns(source: str, data: TranslationData, bad: BadExamples) -> Iterator[tuple[str, list[Any]]]:
    """The two columns of a table, or two parts of one."""
    for path in map(Path, split_specification(source)):
        if path.expanduser().is_file() and kind_of(path) not in ROWS:
            raise ValueError(f"{path} is not a table; name the file with its translations, too (target)")
    whole, part = {}, {}
    for setting in ("source_column", "target_column"):
        name = getattr(data, setting)
        column, dot, rest = name.partition(".")
        whole[setting], part[setting] = (column, rest) if dot else (name, None)
    for row in read_rows(source, whole, bad=bad):
        try:
            yield row.where, [_part(value, key) for value, key in zip(row.values, part.values(), strict=True)]
        except KeyError as error:
            bad(f"{row.where}: {error.args[0]}")


def _part(value: Any, key: str | None) -> Any:
    """What a column holds under `key`, if it has several; KeyError where that is not there."""
    if key is None:
        return value
    if not isinstance(value, dict) or key not in value:
        known = ", ".join(value) if isinstance(value, dict) else f"a {type(value).__name__}"
        raise KeyError(f"no {key!r} in that column; there are {known}")
    return value[key]
