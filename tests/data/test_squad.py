"""Every answer is a slice of its context, articles stay whole, and a wrong offset says where the answer is."""

import gzip
import json
import logging
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import Question, SpanData, read_questions

CONTEXT = "  The café in Zürich opened in 1995.\nIn 1995."


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(source, part="all", **options):
    return read_questions(SpanData(source=str(source), **options), part=part)


def asked(id="q1", question="When?", **others):
    return {"id": id, "question": question, "answers": [{"text": "1995", "answer_start": 31}], **others}


def squad(*questions, context=CONTEXT, **top):
    return json.dumps({"data": [{"title": "T", "paragraphs": [{"context": context, "qas": list(questions)}]}], **top})


def test_xquad(shared_data):
    path = shared_data / "xquad/xquad.en.json"
    everything = read(path)
    # The published sizes (Artetxe et al. 2020): 240 paragraphs of 48 articles, 1,190 questions.
    assert len(everything) == 1190
    assert len({question.context for question in everything}) == 240
    for question in everything:
        for text, start in question.answers:
            assert text and question.context[start : start + len(text)] == text
    articles = json.loads(path.read_text())["data"]
    ids = [[qa["id"] for paragraph in a["paragraphs"] for qa in paragraph["qas"]] for a in articles]
    train, validation = (read(path, part, validation_fraction=0.2) for part in ("train", "validation"))
    assert len(articles) == 48
    assert [question.id for question in train] == [one for article in ids[:38] for one in article]
    assert [question.id for question in validation] == [one for article in ids[38:] for one in article]
    assert train + validation == everything


def test_version_2_of_hugging_face_examples(shared_data):
    path = shared_data / "hf_fixtures/tests_samples/SQUAD/sample.json"
    rows = json.loads(path.read_text())["data"]
    questions = read(path)
    assert [question.id for question in questions] == [row["id"] for row in rows]
    expected = [list(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)) for row in rows]
    assert [question.answers for question in questions] == expected
    assert Counter(bool(answers) for answers in expected) == {True: 8, False: 6}
    assert questions[2].where.endswith("sample.json, item 3")


def test_versions_1_and_2(tmp_path):
    several = [{"text": "1995", "answer_start": 31}, {"text": "1995", "answer_start": 40}]
    place = "article 1, paragraph 1, question"
    first = squad(asked(answers=several), asked("q2", " Was? \u2028", answers=[]))
    none = asked("q2", " Was? \u2028", answers=[], is_impossible=True, plausible_answers=several)
    second = squad(asked(answers=several, is_impossible=False), none, version="v2.0")
    for name, content in (
        ("1.json", first),
        ("2.json", second),
        ("pretty.json", json.dumps(json.loads(second), indent=1)),
    ):
        path = write(tmp_path / name, content)
        assert read(path) == [
            Question("q1", "When?", CONTEXT, [("1995", 31), ("1995", 40)], f"{path}, {place} q1"),
            Question("q2", " Was? \u2028", CONTEXT, [], f"{path}, {place} q2"),
        ]
    packed = write(tmp_path / "a.json.gz", gzip.compress(b"\xef\xbb\xbf" + first.encode()))
    assert [question.answers for question in read(packed)] == [[("1995", 31), ("1995", 40)], []]


def test_rows(tmp_path, prepare_tfds):
    import numpy as np
    import tensorflow_datasets as tfds

    common = {"title": "T", "context": CONTEXT}
    rows = [
        {"id": "a", "question": "When?", "answers": {"text": ["1995"], "answer_start": [31]}, **common},
        {"id": "b", "question": "Why?", "answers": {"text": [], "answer_start": []}, **common},
    ]
    expected = [("a", "When?", CONTEXT, [("1995", 31)]), ("b", "Why?", CONTEXT, [])]

    def read_rows(source):
        return sorted((q.id, q.question, q.context, q.answers) for q in read(source))

    lines = "\n".join(map(json.dumps, rows))
    for name, content in (
        ("a.jsonl", lines),
        ("a.json", lines),
        ("b.json", json.dumps(rows)),
        ("a.ndjson", lines + "\n"),
    ):
        assert read_rows(write(tmp_path / name, content)) == expected
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read_rows(tmp_path / "a.parquet") == expected
    assert read(tmp_path / "a.parquet")[1].where == f"{tmp_path}/a.parquet, row 2"
    answers = tfds.features.Sequence({"text": tfds.features.Text(), "answer_start": np.int32})
    features = {"answers": answers, **{name: tfds.features.Text() for name in ("id", "title", "question", "context")}}
    examples = [
        row | {"answers": [{"text": text, "answer_start": start} for text, start in answers]}
        for row, (*_, answers) in zip(rows, expected, strict=True)
    ]
    assert read_rows(prepare_tfds("QuestionsForTest", features, {"train": examples})) == expected


def test_rows_of_one_title_or_context_stay_in_one_part(tmp_path):
    keys = [0, 1, 0, 2, 3, 1, 4, 4]  # the articles of the rows
    for field in ("title", "context"):
        rows = [asked(str(i)) | {"context": CONTEXT, field: CONTEXT + f" {key}"} for i, key in enumerate(keys)]
        path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
        assert [question.id for question in read(path, "train", validation_fraction=0.4)] == list("01235")
        assert [question.id for question in read(path, "validation", validation_fraction=0.4)] == list("467")
    with pytest.raises(ValueError, match=r"0\.9 of 5 groups of questions leaves none to train on"):
        read(path, "train", validation_fraction=0.9)


def test_several_files_and_a_validation_source(tmp_path):
    for name in ("a", "b", "v"):
        write(tmp_path / f"{name}.json", squad(asked(name)))
    options = {"validation_source": f"{tmp_path}/v.json"}
    assert [q.id for q in read(f"{tmp_path}/[ab].json,{tmp_path}/a.json", "train", **options)] == ["a", "b"]
    assert [q.id for q in read(f"{tmp_path}/[ab].json", "validation", **options)] == ["v"]
    # Articles of the same number in two files are two articles.
    assert [q.id for q in read(f"{tmp_path}/[ab].json", "validation", validation_fraction=0.5)] == ["b"]


@settings(max_examples=60, deadline=None)
@given(st.text(min_size=3, max_size=30).filter(str.strip), st.data())
def test_any_span_of_any_text_is_kept(tmp_path_factory, context, data):
    try:
        context.encode()
    except UnicodeEncodeError:
        return
    start = data.draw(st.integers(0, len(context) - 1))
    end = data.draw(st.integers(start + 1, len(context)))
    if not context[start:end].strip():
        return
    path = tmp_path_factory.mktemp("squad") / "a.json"
    answers = [{"text": context[start:end], "answer_start": start}]
    (question,) = read(write(path, squad(asked(answers=answers), context=context)))
    assert question.context == context
    assert question.answers == [(context[start:end], start)]


# Bad input


def answer(text, start):
    return asked("bad", answers=[{"text": text, "answer_start": start}])


@pytest.mark.parametrize(
    "question, message",
    [
        (answer("café in Zürich", 5), "is not at its answer_start 5, where ' café in Züric' is, but at 6"),
        (answer("1995", 32), r"not at its answer_start 32, where '995\.' is, but at 31, 40"),
        (answer("1995", 400), "not at its answer_start 400, where there is nothing, but at 31, 40"),
        (answer("1995", -5), "not at its answer_start -5, where there is nothing, but at 31, 40"),
        (answer("1996", 31), r"the answer '1996' \(answer_start 31\) does not occur in its context"),
        (answer("", 3), "the answer '' is empty or not text"),
        (answer("1995", "31"), "the answer_start of '1995' is '31', not a number"),
        (asked("bad", answers=[{"text": "1995"}]), "the answer_start of '1995' is None"),
        (asked("bad", answers=None), "no 'answers'"),
        (asked("bad", answers="1995"), "'answers' is '1995'; a text and an answer_start are needed each"),
        (asked("bad", answers={"text": ["1995"], "answer_start": []}), "'answers' is {'text'"),
        (asked("bad", question=" "), "'question' is empty"),
        (asked("bad", question=None), "no 'question'"),
        (asked("bad", question=["Who?"]), r"'question' is \['Who\?'\], not text"),
        (asked("bad", question="\ud800?"), "'question' is not valid Unicode"),
        (asked("q1"), "the id 'q1' is that of .*article 1, paragraph 1, question q1, too"),
        (asked("bad", is_impossible=True), "'is_impossible' is True, but there are 1 answers"),
        (asked("bad", answers=[], is_impossible=False), "'is_impossible' is False, but there are 0 answers"),
        ({"question": "Who?", "answers": []}, "no 'id'"),
    ],
)  # fmt: skip
def test_a_bad_question_is_named_or_skipped(tmp_path, caplog, question, message):
    path = write(tmp_path / "a.json", squad(asked(), question, asked("q3")))
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    place = f"{path}, article 1, paragraph 1, question {question.get('id', 2)}: "
    assert str(error.value).startswith(place) and "\n" not in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert [q.id for q in read(path, skip_bad=True)] == ["q1", "q3"]
    assert caplog.records[-1].getMessage() == f"1 of 3 questions skipped; the first: {error.value}"


def test_bad_rows_are_named_too(tmp_path):
    good = json.dumps(asked() | {"context": CONTEXT})
    for row, message in [
        (json.dumps(asked("b")), "no column 'context'; there are: id, question, answers"),
        (json.dumps(asked("b") | {"context": "2024"}), "the answer '1995' .* does not occur in its context"),
        (json.dumps(asked("b") | {"context": None}), "no 'context'"),
        ("{", "not a JSON object a line"),
    ]:
        path = write(tmp_path / "a.jsonl", f"{good}\n{row}\n")
        with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
            read(path)
        assert [q.id for q in read(path, skip_bad=True)] == ["q1"]


@pytest.mark.parametrize(
    "content, message",
    [
        (squad(asked(), context=""), "article 1, paragraph 1, question q1: 'context' is empty"),
        ('{"data": [{"title": "T"}]}', "article 1: no list 'paragraphs'"),
        ('{"data": [7]}', "article 1: no list 'paragraphs'"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "article 1, paragraph 1: no list 'qas'"),
        ('{"data": [{"paragraphs": [{"context": "x", "qas": [7]}]}]}', "question 1: an object is needed, not 7"),
    ],
)
def test_broken_structure_is_named_and_never_passes_as_no_data(tmp_path, content, message):
    path = write(tmp_path / "a.json", content)
    with pytest.raises(ValueError, match=message):
        read(path)
    with pytest.raises(ValueError, match=rf"no questions can be used \(all 1 were skipped; the first: .*{message}"):
        read(path, skip_bad=True)


def test_what_is_no_squad_is_refused(tmp_path):
    for name, content, message in [
        ("a.json", '{"version": "1.1"}', "line 1: no column 'id'; there are: version"),
        ("b.json", '{\n"version": "1.1"}', "neither SQuAD's object with a list 'data' nor"),
        ("c.json", '{"data": [\n', r"c\.json, line 2: not valid JSON"),
        ("d.json", '{"data": []}', r"no questions can be used \(there are none\)"),
        ("e.json", b'{"data": "\xff"}', r"byte 10 \(0xff\), in line 1, is not valid UTF-8"),
        ("a.csv", "id,question\n", r"a\.csv: answer spans are read from \.json"),
    ]:
        with pytest.raises(ValueError, match=message):
            read(write(tmp_path / name, content), skip_bad=True)
    with pytest.raises(ValueError, match="source is empty"):
        SpanData(source=" ")
