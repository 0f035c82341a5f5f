"""Sentences of words with a tag each, from column files and tables, in any of the three notations of entities."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from transformers_jax.data.files import ROWS, find_files, kind_of, read_lines, split_specification
from transformers_jax.data.labelled import BadExamples, LabelledTextData, Part, read_part, warn_once
from transformers_jax.data.tables import Columns, Row, TfdsSet, file_rows, is_number

Scheme = Literal["iob1", "iob2", "iobes"]

COLUMN_FILES = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".txt")
TAG = re.compile(r"O|[BIES]-\S.*")
# What a table's columns are called if nobody says: in TFDS, in Hugging Face's sets, in its examples.
WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "ner")


@dataclasses.dataclass(frozen=True)
class EntityData(LabelledTextData):
    """Sentences of words with entity tags: CoNLL column files, or tables (.jsonl, .json, .parquet, TFDS) with a list of
    words and a list of tags in each row."""

    # The comments are the help texts of the command line.

    # Whether 'wordpiece' ignores case and accents. Case often tells names from other words.
    lowercase: bool = False

    # The column of the words: a number for column files (0 is the first), a name for tables (unset: tokens or words).
    word_column: str = "0"

    # The column of the tags: a number for column files (-1 is the last), a name for tables (unset: tags, ner_tags or
    # ner).
    tag_column: str = "-1"

    # How entities are written. iob2: B-X begins every entity; iob1: B-X only parts neighbours of one type; iobes: E-X
    # ends an entity, and S-X is one of a single word; auto: looks at all tags, and accepts small mistakes.
    scheme: Literal["auto", "iob1", "iob2", "iobes"] = "auto"

    def __post_init__(self):
        super().__post_init__()
        if not self.word_column or not self.tag_column or self.word_column == self.tag_column:
            raise ValueError(
                f"word_column ({self.word_column!r}) and tag_column ({self.tag_column!r}) must differ and not be empty"
            )


@dataclasses.dataclass(frozen=True)
class TaggedSentence:
    """Words and their tags, as many of one as of the other, in IOB2."""

    words: list[str]
    tags: list[str]
    where: str
    """`train.conll, line 7` (its first word), for errors."""


def read_entities(data: EntityData, *, part: Part) -> list[TaggedSentence]:
    """Read one part of the data: "train", "validation", or "all" of `source`.

    Column files hold a word a line with its columns separated by tabs or by spaces (in one file always the same), and
    an empty line, or one of white space, between sentences. Lines of `-DOCSTART-` separate too; lines that begin with
    `#` are comments where they have no tag. Every file that is no table by its name is one, `.tsv` too. Tables
    (`.jsonl`, `.ndjson`, `.json`, `.parquet`, `tfds:NAME`) hold a sentence a row.

    Without a validation source, a random `validation_fraction` of the sentences is held out, the same ones for every
    seed; both parts keep the order of the file.

    Tags arrive in IOB2, whatever the files hold. With the scheme "auto", the notation is recognised by
    `recognise_scheme` and an I-X with nothing to continue begins an entity, as conlleval reads it (a warning counts
    them in IOB2 and IOBES). With another scheme, a tag that breaks its rules makes a bad sentence.

    Raises `ValueError` in one line with file, line and value for a line with too few or too many columns, a tag that is
    none of O, B-X, I-X, S-X and E-X, lists of different lengths and text that is not readable. With `data.skip_bad`,
    such sentences are left out and how many is logged. No sentence left is always an error.
    """

    def read(source: str, bad: BadExamples) -> list[TaggedSentence]:
        sentences = list(_read_source(source, data, bad))
        scheme = recognise_scheme(sentence.tags for sentence in sentences) if data.scheme == "auto" else data.scheme
        normal, odd = [], []
        for sentence in sentences:
            tags = to_iob2(sentence.tags)
            expected = from_iob2(tags, scheme)
            place = next((i for i, tag in enumerate(sentence.tags) if tag != expected[i]), None)
            if place is not None:
                problem = f"{sentence.where}: the tag {sentence.tags[place]} of word {place + 1} "
                problem += f"({sentence.words[place]!r}) breaks the rules of {scheme}"
                if data.scheme != "auto":
                    bad(f"{problem}; correct it, or set scheme to auto")
                    continue
                odd.append(problem)
            normal.append(dataclasses.replace(sentence, tags=tags))
        if odd:
            warn_once(f"{len(odd):,} of {len(sentences):,} sentences are read as conlleval would; the first: {odd[0]}")
        return normal

    return read_part(data, read, part=part, noun="sentences")


# Notations


def recognise_scheme(sentences: Iterable[Sequence[str]]) -> Scheme:
    """The notation of tags: IOBES if any begins with S- or E-; else IOB1 if entities begin with I- and B- is only used
    right after an entity of the same type; else IOB2."""
    begins_with_i, needless_b = False, False
    for tags in sentences:
        for before, tag in itertools.pairwise(("O", *tags)):
            if tag[0] in "SE":
                return "iobes"
            if tag[0] == "I" and before[2:] != tag[2:]:
                begins_with_i = True
            if tag[0] == "B" and before[2:] != tag[2:]:
                needless_b = True
    return "iob1" if begins_with_i and not needless_b else "iob2"


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Tags of any notation in IOB2. An entity begins at B-X and S-X, and at I-X and E-X with no entity of type X before
    it that still goes on."""
    result, open_type = [], None
    for tag in tags:
        prefix, kind = tag[0], tag[2:]
        if prefix == "O":
            result.append("O")
            open_type = None
            continue
        goes_on = prefix in "IE" and open_type == kind
        result.append(("I-" if goes_on else "B-") + kind)
        open_type = None if prefix in "ES" else kind
    return result


def from_iob2(tags: Sequence[str], scheme: Scheme) -> list[str]:
    """Tags in IOB2 in another notation."""
    if scheme == "iob2":
        return list(tags)
    result = []
    for i, tag in enumerate(tags):
        before = tags[i - 1] if i else "O"
        after = tags[i + 1] if i + 1 < len(tags) else "O"
        if tag == "O":
            prefix = "O"
        elif scheme == "iob1":
            prefix = "B" if tag[0] == "B" and before[2:] == tag[2:] else "I"
        else:
            ends = after != "I-" + tag[2:]
            prefix = {("B", False): "B", ("B", True): "S", ("I", False): "I", ("I", True): "E"}[tag[0], ends]
        result.append(prefix + tag[1:])
    return result


# Reading


def _read_source(specification: str, data: EntityData, bad: BadExamples) -> Iterator[TaggedSentence]:
    columns: Columns = {
        "word_column": WORD_COLUMNS if data.word_column == "0" else data.word_column,
        "tag_column": TAG_COLUMNS if data.tag_column == "-1" else data.tag_column,
    }
    files: list[Path] = []
    for part in split_specification(specification):
        if part.startswith("tfds:"):
            yield from _table(TfdsSet(part, columns).rows(bad), bad)
            continue
        new = [path for path in find_files(part, COLUMN_FILES + ROWS) if path not in files]
        files.extend(new)
        for path in new:
            kind = kind_of(path)
            if kind == ".csv":
                raise ValueError(f"{path}: entities are read from column files, .jsonl, .json, .parquet and tfds:NAME")
            if kind in ROWS and kind != ".tsv":
                yield from _table(file_rows(path, columns, bad=bad), bad)
            else:
                yield from _column_file(path, data, bad)


def _table(rows: Iterator[Row], bad: BadExamples) -> Iterator[TaggedSentence]:
    for row in rows:
        try:
            words, tags = (_strings(cell) for cell in row.values)
            if len(words) != len(tags):
                raise ValueError(f"{len(words)} words, but {len(tags)} tags")
            if not words:
                raise ValueError("there are no words")
            for word, tag in zip(words, tags, strict=True):
                _check(word, tag)
            yield TaggedSentence(words, tags, row.where)
        except ValueError as error:
            bad(f"{row.where}: {error}")


def _strings(cell: Any) -> list[str]:
    if not isinstance(cell, list):
        raise ValueError(f"a list is needed, not {cell!r:.60}")
    for item in cell:
        if not isinstance(item, str):
            raise ValueError(f"{item!r:.60} is a {type(item).__name__}, not text; tags are needed by their names")
    return cell


def _check(word: str, tag: str) -> None:
    if not word.strip(" \t"):
        raise ValueError(f"the word with the tag {tag} is empty")
    if not TAG.fullmatch(tag):
        raise ValueError(f"the tag {tag!r} of {word!r} is none of O, B-TYPE, I-TYPE, S-TYPE and E-TYPE")


def _column_file(path: Path, data: EntityData, bad: BadExamples) -> Iterator[TaggedSentence]:
    layout = _layout(path, data)
    words, tags, start, problem = [], [], 0, ""

    def unreadable(message: str) -> None:
        nonlocal problem  # of the sentence that is being read
        problem = problem or message

    for number, line in itertools.chain(read_lines(path, unreadable), [(0, "")]):
        if not line.strip() or line.startswith("-DOCSTART-"):
            if problem:
                bad(problem)
            elif words:
                yield TaggedSentence(words, tags, f"{path}, line {start}")
            words, tags, problem = [], [], ""
            continue
        fields = layout.split(line)
        if layout.is_comment(line, fields):
            continue
        start = start if words else number
        try:
            word, tag = layout.word_and_tag(fields)
            _check(word, tag)
        except ValueError as error:
            problem = problem or f"{path}, line {number}: {error}"
        else:
            words.append(word)
            tags.append(tag)


@dataclasses.dataclass(frozen=True)
class _Layout:
    """What all lines of one column file have in common."""

    tabs: bool
    columns: int
    word: int
    tag: int

    def split(self, line: str) -> list[str]:
        if self.tabs:
            return [field.strip(" ") for field in line.rstrip("\r\n").split("\t")]
        return [field for field in line.strip("\r\n ").split(" ") if field]

    def is_comment(self, line: str, fields: list[str]) -> bool:
        """Whether a line that begins with `#` is a remark, and not the word "#" or a hashtag."""
        if not line.startswith("#"):
            return False
        if self.tabs:
            return len(fields) == 1
        return len(fields) != self.columns or (fields[0] == "#" and not TAG.fullmatch(fields[self.tag]))

    def word_and_tag(self, fields: list[str]) -> tuple[str, str]:
        if len(fields) != self.columns:
            raise ValueError(f"{len(fields)} columns, but the first line has {self.columns} ({' '.join(fields)!r:.60})")
        return fields[self.word], fields[self.tag]


def _layout(path: Path, data: EntityData) -> _Layout:
    """The layout of a file by its first line of a word."""
    for setting, column in (("word_column", data.word_column), ("tag_column", data.tag_column)):
        if not is_number(column):
            raise ValueError(f"{path}: {setting} is {column!r}, but the columns of this file have numbers, from 0")
    hashes = None
    for number, line in read_lines(path, lambda message: None):
        if not line.strip() or line.startswith("-DOCSTART-"):
            continue
        tabs = "\t" in line
        layout = _Layout(tabs, 0, int(data.word_column), int(data.tag_column))
        columns = len(layout.split(line))
        layout = dataclasses.replace(layout, columns=columns)
        if line.startswith("#"):  # a remark is no measure, unless there is nothing else
            hashes = hashes or (layout if tabs else None)
            continue
        inside = range(-columns, columns)
        if layout.word not in inside or layout.tag not in inside or (layout.word - layout.tag) % columns == 0:
            raise ValueError(
                f"{path}, line {number}: {columns} columns ({line.strip()!r:.60}), too few for a word_column of "
                f"{layout.word} and a tag_column of {layout.tag}; columns are separated by tabs, else by spaces"
            )
        return layout
    return hashes or _Layout(True, 0, 0, 0)
