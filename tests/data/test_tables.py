"""Cells arrive with the type and the place they have in the file, and a broken row costs itself only."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import open_text, read_rows

TEXT_AND_LABEL = {"text_column": "text", "label_column": "label"}
NUMBERS = {"text_column": "0", "label_column": "1"}


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def values(source, columns=TEXT_AND_LABEL, **options):
    return [row.values for row in read_rows(str(source), columns, **options)]


def places(source, columns=TEXT_AND_LABEL, **options):
    return [row.where for row in read_rows(str(source), columns, **options)]


def skipping(source, columns=TEXT_AND_LABEL):
    """The rows that are left, and the messages about the others."""
    messages = []
    return values(source, columns, bad=messages.append), messages


def test_every_kind_of_table_gives_the_same_rows(tmp_path):
    rows = [["plain", "a"], ['a "quoted", comma', "b"], ["two\nlines", "a"], ["été \u2028 \x85", "b"]]
    objects = [{"text": text, "other": None, "label": label} for text, label in rows]
    write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, objects)))
    write(tmp_path / "a.ndjson.gz", gzip.compress("\r\n".join(map(json.dumps, objects)).encode()))
    write(tmp_path / "lines.json", "\n".join(map(json.dumps, objects)))
    write(tmp_path / "list.json", json.dumps(objects))
    write(tmp_path / "pretty.json.gz", gzip.compress(json.dumps(objects, indent=2).encode()))
    for name, ending in (("a.csv", "\n"), ("b.csv", "\r\n")):
        with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
            cells = [["text", "", "label"], *([text, "", label] for text, label in rows)]
            csv.writer(file, lineterminator=ending).writerows(cells)
    table = pyarrow.table({"label": [row[1] for row in rows], "text": [row[0] for row in rows]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    for file in sorted(tmp_path.iterdir()):
        assert values(file) == rows, file.name
    assert values(tmp_path) == rows * 8
    assert values(f"{tmp_path}/*.csv, {tmp_path}/a.csv") == rows * 2  # none twice
    assert values(tmp_path / "a.jsonl", optional=("other", "none")) == [[*row, None, None] for row in rows]
    assert values(tmp_path / "a.parquet", optional=("none", "label")) == [[*row, None, row[1]] for row in rows]
    assert values(tmp_path / "a.csv", optional=("none", "text")) == [[*row, None, row[0]] for row in rows]


def test_rows_say_where_they_are(tmp_path):
    write(tmp_path / "a.csv", 'text,label\n"two\nlines",x\n\nnext,y\n')
    assert places(tmp_path / "a.csv") == [f"{tmp_path}/a.csv, line {line}" for line in (2, 5)]
    write(tmp_path / "a.jsonl", '\n{"text": "a", "label": 1}\n\n{"text": "b", "label": 2.5}')
    assert places(tmp_path / "a.jsonl") == [f"{tmp_path}/a.jsonl, line {line}" for line in (2, 4)]
    write(tmp_path / "a.json", '[\n{"text": "a", "label": 1}]')
    assert places(tmp_path / "a.json") == [f"{tmp_path}/a.json, item 1"]
    table = pyarrow.table({"text": ["a"] * 600, "label": [0] * 600})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert places(tmp_path / "a.parquet") == [f"{tmp_path}/a.parquet, row {row}" for row in range(1, 601)]


def test_columns_by_number_need_no_header(tmp_path):
    write(tmp_path / "sst.tsv", 'a "film\t0\nanother\t1')
    assert values(tmp_path / "sst.tsv", NUMBERS) == [['a "film', "0"], ["another", "1"]]
    # One column alone, which is how a person predicts: the "0" of the first row is its label, not the name of a column.
    assert values(tmp_path / "sst.tsv", {"text_column": "0"}) == [['a "film'], ["another"]]
    write(tmp_path / "cola.tsv", "gj04\t1\t\tThe rope\nks08\t0\t*\tRope the")
    assert values(tmp_path / "cola.tsv", {"t": "-1", "l": "1"}) == [["The rope", "1"], ["Rope the", "0"]]
    with pytest.raises(ValueError, match=r"cola\.tsv: no column '4'; set label_column to one of: 0, 1, 2, 3"):
        values(tmp_path / "cola.tsv", {"text_column": "3", "label_column": "4"})
    with pytest.raises(ValueError, match=r"cola\.tsv: no column 'text'; .*: gj04, 1, , The rope \(or numbers, from 0"):
        values(tmp_path / "cola.tsv")


def test_names_in_a_header_win_over_numbers(tmp_path):
    write(tmp_path / "named.csv", "text,1,0\nhello,one,zero\n")
    assert values(tmp_path / "named.csv", {"t": "text", "l": "1"}) == [["hello", "one"]]
    assert values(tmp_path / "named.csv", {"t": "text", "l": "2"}) == [["hello", "zero"]]  # no name, so a place
    write(tmp_path / "frame.csv", ",0,1\n7,hello,pos\n")  # what pandas writes of a frame without names
    assert values(tmp_path / "frame.csv", NUMBERS) == [["hello", "pos"]]
    write(tmp_path / "numbered.csv", "0,1\nhello,pos\n")
    assert values(tmp_path / "numbered.csv", NUMBERS) == [["hello", "pos"]]


def test_a_column_may_have_several_names(tmp_path):
    write(tmp_path / "a.jsonl", '{"words": 1, "ner": 2}\n{"words": 3, "ner": 4, "tokens": 5}')
    columns = {"word_column": ("tokens", "words"), "tag_column": "ner"}
    assert values(tmp_path / "a.jsonl", columns) == [[1, 2], [3, 4]]  # the first row decides
    with pytest.raises(ValueError, match="no column 'x' or 'y'; set word_column to one of: words, ner"):
        values(tmp_path / "a.jsonl", {"word_column": ("x", "y")})


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), "dictionary", pyarrow.string_view()])
def test_parquet_text_of_every_type(tmp_path, kind):
    column = pyarrow.array(["one", "two", None, "one"])
    column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column, "label": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == [["one", 1], ["two", 2], [None, 3], ["one", 4]]
    texts = ["".join(document) for document in open_text(str(tmp_path / "a.parquet")).documents()]
    assert texts == ["one", "two", "one"]


def test_parquet_class_numbers_become_names_where_hugging_face_left_them(tmp_path):
    label = {"names": ["bad", "good"], "_type": "ClassLabel"}
    features = {
        "text": {"dtype": "string", "_type": "Value"},
        "label": label,
        "tags": {"feature": label, "_type": "List"},
    }
    table = pyarrow.table({"text": ["a", "b", "c"], "label": [1, 0, -1], "tags": [[0, 1], [], [1]]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    columns = {"label_column": "label", "tag_column": "tags"}
    rows, messages = skipping(tmp_path / "a.parquet", columns)
    assert rows == [["good", ["bad", "good"]], ["bad", []]]
    assert messages == [f"{tmp_path}/a.parquet, row 3: class -1, but there are classes 0 to 1"]


AROUND = {
    "a.jsonl": ('{"text": "one", "label": "a"}\n', '\n{"text": "two", "label": "b"}'),
    "a.csv": ("text,label\none,a\n", "\ntwo,b\n"),
    "a.tsv": ("text\tlabel\none\ta\n", "\ntwo\tb\n"),
}


@pytest.mark.parametrize(
    "name, row, message",
    [
        ("a.jsonl", '{"text": ', """line 2: not a JSON object a line .*: '{"text":'"""),
        ("a.jsonl", "[" * 200_000, "line 2: not a JSON object a line"),
        ("a.jsonl", "[1]", "line 2: a JSON object is needed, not a list"),
        ("a.jsonl", '{"label": 0}', "line 2: no column 'text'; set text_column to one of: label"),
        ("a.jsonl", '{"text": "\\ud800", "label": 0}', "line 2: 'text' is not valid Unicode"),
        ("a.jsonl", b'"\xff"', r"byte 31 \(0xff\), in line 2, is not valid UTF-8"),
        ("a.csv", "this, is cut,x", r"line 3: 3 fields, but .* 2; quote .* \('this, is cut,x'\)"),
        ("a.csv", "short", "line 3: 1 fields"),
        ("a.csv", '"open,x', "line 3: unexpected end of data"),
        ("a.csv", '"a "b" c",x', "line 3: ',' expected after"),
        ("a.csv", b"\xe9,x", r"byte 17 \(0xe9\), in line 3, is not valid UTF-8"),
        ("a.csv", b'"three\nl\xe9nes\nhere",x', r"byte 25 \(0xe9\), in line 4, is not valid UTF-8"),
        ("a.tsv", "three\tfields\there", "line 3: 3 fields"),
        ("a.tsv", "old\rmac\tx", "line 3: new-line character"),
    ],
)
def test_one_bad_row_is_an_error_with_its_place_or_skipped(tmp_path, name, row, message):
    before, after = AROUND[name]
    path = write(tmp_path / name, before.encode() + (row if isinstance(row, bytes) else row.encode()) + after.encode())
    with pytest.raises(ValueError, match=message) as error:
        values(path)
    assert str(error.value).startswith(str(path)) and "\n" not in str(error.value)
    rows, messages = skipping(path)
    assert rows == [["one", "a"], ["two", "b"]]
    assert messages == [str(error.value)]


def test_bad_items_and_a_bad_first_row_are_skipped(tmp_path):
    path = write(tmp_path / "a.json", '[{"text": "one", "label": "a"}, 7, {"text": "two"}]')
    rows, messages = skipping(path)
    assert rows == [["one", "a"]]
    assert [message.split(": ")[0] for message in messages] == [f"{path}, item 2", f"{path}, item 3"]
    path = write(tmp_path / "a.jsonl", '{"text": 0}\n{"text": "one", "label": "a"}')
    rows, messages = skipping(path)
    assert rows == [["one", "a"]]
    assert messages == [f"{path}, line 1: no column 'label'; set label_column to one of: text"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text('a",\n é', max_size=6), min_size=2, max_size=2), min_size=1, max_size=8), st.data())
def test_csv_rows_survive_a_broken_neighbour(tmp_path_factory, rows, data):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([["text", "label"], *rows])
    assert values(path) == rows
    at = data.draw(st.integers(0, len(rows)))
    with path.open("w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerows([["text", "label"], *rows[:at]])
        file.write("neither quoted nor whole\n")
        writer.writerows(rows[at:])
    assert skipping(path)[0] == rows


@pytest.mark.parametrize("name, content", [("a.jsonl", '{"x": 1}\n{"y": 2}'), ("a.csv", "x,y\n1,2"), ("a.csv", "")])
def test_a_column_that_a_whole_file_lacks_is_never_skipped(tmp_path, name, content):
    with pytest.raises(ValueError, match=r"no column 'text'; set text_column to one of: (x|\(none\))"):
        skipping(write(tmp_path / name, content))


def test_what_is_no_table_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, error, message in [
        (tmp_path / "none.csv", FileNotFoundError, "no such"),
        (tmp_path / "none*.csv", FileNotFoundError, "no file matches"),
        (tmp_path / "empty", FileNotFoundError, r"it is searched for \.jsonl"),
        (write(tmp_path / "a.txt", "text"), ValueError, r"a\.txt: not a table by its name; known are \.jsonl"),
        (write(tmp_path / "a.parquet", "text"), ValueError, "not a readable Parquet file"),
        (write(tmp_path / "cut.json", '[{"text": "one",\n'), ValueError, r"cut\.json, line 2: not valid JSON"),
        (write(tmp_path / "twice.csv", "text,text,label\n"), ValueError, "2 columns are named 'text'"),
        (write(tmp_path / "a.csv.gz", "text"), ValueError, "not a whole gzip file"),
        (" , ", ValueError, "the source is empty"),
    ]:
        with pytest.raises(error, match=message):
            skipping(source)


@pytest.fixture(scope="module")
def reviews_for_test(prepare_tfds):
    import numpy as np
    import tensorflow_datasets as tfds

    kinds = tfds.features.ClassLabel(names=["bad", "good"])
    features = {
        "text": tfds.features.Text(),
        "label": kinds,
        "stars": np.float32,
        "kinds": tfds.features.Sequence(kinds),
        "spans": tfds.features.Sequence({"text": tfds.features.Text(), "start": np.int32}),
    }
    examples = [
        {"text": "one été", "label": 1, "stars": 0.5, "kinds": [1, 0], "spans": [{"text": "é", "start": 4}]},
        {"text": "two", "label": -1, "stars": 1.5, "kinds": [], "spans": []},
        {"text": b"\xff", "label": 0, "stars": 2, "kinds": [0], "spans": []},
    ]
    return prepare_tfds("ReviewsForTest", features, {"train": examples, "test": examples[:1]})


def test_tfds_values_are_plain_and_classes_have_names(reviews_for_test):
    import sys

    columns = {name: name for name in ("text", "label", "stars", "kinds", "spans")}
    spans = {"text": ["é"], "start": [4]}
    assert values(f"{reviews_for_test}:test", columns) == [["one été", "good", 0.5, ["good", "bad"], spans]]
    assert values(f"{reviews_for_test}:test", {"text": "text"}, optional=("none",)) == [["one été", None]]
    rows, messages = skipping(reviews_for_test)
    assert rows == [["one été", "good"]]
    # A label kept back is -1, which is not the last class. TFDS does not keep the order of the examples.
    problems = sorted(message.split(": ", 1)[1] for message in messages)
    assert problems == ["byte 0 of b'\\xff' is not UTF-8", "class -1, but there are classes 0 to 1"]
    assert all(message.startswith("tfds:reviews_for_test, example ") for message in messages)
    assert "tensorflow" not in sys.modules
    with pytest.raises(ValueError, match="no column 'sentence'; set text_column to one of: text, label, stars"):
        values(reviews_for_test, {"text_column": "sentence"})
    with pytest.raises(ValueError, match=r"sets that need TensorFlow .* are prepared once with"):
        values("tfds:glue/sst2", {"text_column": "sentence"})
