"""Questions about a text, with the spans of the text that answer them."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers_jax.data.files import find_files, kind_of, read_lines, split_specification
from transformers_jax.data.labelled import BadExamples, LabelledTextData, Part, read_part
from transformers_jax.data.tables import Row, TfdsSet, file_rows, load_json

KINDS = (".json", ".jsonl", ".ndjson", ".parquet")
COLUMNS = {name: name for name in ("id", "question", "context", "answers")}
OPTIONAL = ("title", "is_impossible")


@dataclasses.dataclass(frozen=True)
class SpanData(LabelledTextData):
    """Questions with answers in a text: SQuAD's .json (1.1 or 2.0), tables (.jsonl, .json, .parquet) with the columns
    id, question, context and answers (of lists text and answer_start), or a TFDS set like tfds:squad."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a text."""

    id: str
    question: str
    context: str
    answers: list[tuple[str, int]]
    """Each accepted text and where it starts in the context; empty if the context does not answer the question."""
    where: str
    """`dev.json, article 3, paragraph 2, question 5737...`, for errors."""


def read_questions(data: SpanData, *, part: Part) -> list[Question]:
    """Read one part of the data: "train", "validation", or "all" of `source`.

    Without a validation source, the last articles are held out: `int(articles * (1 - validation_fraction))` are to
    train on. The rows of a table belong to the article named in `title`, or to the one that is their context.

    A question without answers is unanswerable; `is_impossible`, where it is given, has to agree. `plausible_answers`
    are not read. Contexts stay as they are, since answers are given by their position (in characters).

    Raises `ValueError` in one line with file, question and value for an answer that is not where it is said to be, an
    empty question, context or answer, an id that occurs twice, and a missing key. With `data.skip_bad`, such questions
    are left out and how many is logged. No question left is always an error, and so is a file that is not JSON.
    """

    def read(source: str, bad: BadExamples) -> list[tuple[Any, Question]]:
        questions, seen = [], {}
        for article, where, item in _read_source(source, bad):
            try:
                question = _question(item, where)
                if question.id in seen:
                    raise ValueError(f"the id {question.id!r} is that of {seen[question.id]}, too")
            except ValueError as error:
                bad(f"{where}: {error}")
                continue
            seen[question.id] = where
            questions.append((article, question))
        return questions

    found = read_part(data, read, part=part, noun="questions", group=lambda pair: pair[0])
    return [question for _, question in found]


Item = tuple[Any, str, dict[str, Any]]
"""The article it belongs to, where it is, and a question with its context."""


def _read_source(specification: str, bad: BadExamples) -> Iterator[Item]:
    files: list[Path] = []
    for part in split_specification(specification):
        if part.startswith("tfds:"):
            yield from _rows(TfdsSet(part, COLUMNS, optional=OPTIONAL).rows(bad))
            continue
        new = [path for path in find_files(part, KINDS) if path not in files]
        files.extend(new)
        for path in new:
            if kind_of(path) == ".json" and not _is_table(path):
                yield from _squad(path, bad)
            elif kind_of(path) in KINDS:
                yield from _rows(file_rows(path, COLUMNS, optional=OPTIONAL, bad=bad))
            else:
                raise ValueError(f"{path}: answer spans are read from {', '.join(KINDS)} and tfds:NAME")


def _rows(rows: Iterator[Row]) -> Iterator[Item]:
    for row in rows:
        item = dict(zip((*COLUMNS, *OPTIONAL), row.values, strict=True))
        article = item["title"] if isinstance(item["title"], str) and item["title"] else item["context"]
        yield str(article), row.where, item


def _is_table(path: Path) -> bool:
    """Whether a .json file is a list of rows or has one a line, and is not SQuAD's single object."""
    for _, line in read_lines(path, lambda message: None):
        if line.lstrip().startswith("["):
            return True
        if line.strip():
            try:
                first = json.loads(line)
            except ValueError:
                return False
            return isinstance(first, dict) and "data" not in first
    return False


def _squad(path: Path, bad: BadExamples) -> Iterator[Item]:
    whole = load_json(path)
    articles = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(articles, list):
        raise ValueError(f"{path}: neither SQuAD's object with a list 'data' nor an object with a question a line")
    for a, article in enumerate(articles, 1):
        where = f"{path}, article {a}"
        if isinstance(article, dict) and "question" in article:  # rows inside 'data', as in Hugging Face's examples
            yield article.get("title") or article.get("context"), f"{path}, item {a}", article
            continue
        for p, paragraph in enumerate(_list(article, "paragraphs", where, bad), 1):
            place = f"{where}, paragraph {p}"
            for q, question in enumerate(_list(paragraph, "qas", place, bad), 1):
                if not isinstance(question, dict):
                    bad(f"{place}, question {q}: an object is needed, not {question!r:.60}")
                    continue
                item = question | {"context": paragraph.get("context")}
                yield (str(path), a), f"{place}, question {question.get('id', q)}", item


def _list(item: Any, key: str, where: str, bad: BadExamples) -> list[Any]:
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, list):
        bad(f"{where}: no list {key!r}")
        return []
    return value


def _question(item: dict[str, Any], where: str) -> Question:
    texts = {}
    for key in ("id", "question", "context"):
        value = item.get(key)
        value = str(value) if key == "id" and isinstance(value, int) else value
        if value is None:
            raise ValueError(f"no {key!r}")
        if not isinstance(value, str):
            raise ValueError(f"{key!r} is {value!r:.60}, not text")
        if not value.strip():
            raise ValueError(f"{key!r} is empty")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can write but no tokenizer reads
            raise ValueError(f"{key!r} is not valid Unicode ({error.reason})") from None
        texts[key] = value
    answers = [_answer(text, start, texts["context"]) for text, start in _pairs(item.get("answers"))]
    impossible = item.get("is_impossible")
    if impossible is not None and bool(impossible) == bool(answers):
        raise ValueError(f"'is_impossible' is {impossible}, but there are {len(answers)} answers")
    return Question(**texts, answers=answers, where=where)


def _pairs(answers: Any) -> list[tuple[Any, Any]]:
    if isinstance(answers, dict):  # of lists, as in tables
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(answers, list) and all(isinstance(answer, dict) for answer in answers):
        return [(answer.get("text"), answer.get("answer_start")) for answer in answers]
    if answers is None:
        raise ValueError("no 'answers'")
    raise ValueError(f"'answers' is {answers!r:.80}; a text and an answer_start are needed each")


def _answer(text: Any, start: Any, context: str) -> tuple[str, int]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the answer {text!r:.60} is empty or not text")
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"the answer_start of {text!r:.60} is {start!r:.60}, not a number")
    if start >= 0 and context.startswith(text, start):
        return text, start
    found = [match.start() for match in re.finditer(f"(?={re.escape(text)})", context)]
    if not found:
        raise ValueError(f"the answer {text!r:.60} (answer_start {start}) does not occur in its context")
    there = f"{context[start : start + len(text)]!r:.60} is" if 0 <= start < len(context) else "there is nothing"
    places = ", ".join(map(str, found[:5])) + (", ..." if len(found) > 5 else "")
    raise ValueError(f"the answer {text!r:.60} is not at its answer_start {start}, where {there}, but at {places}")
