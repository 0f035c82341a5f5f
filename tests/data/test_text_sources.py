"""Documents arrive exactly as they are stored, and what cannot be read says where and what to do."""

import csv
import gzip
import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import open_text, text_sources


def read(source, **options):
    return ["".join(document) for document in open_text(str(source), **options).documents()]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_python_docs_are_the_sorted_topics():
    assert read("builtin:python-docs") == [topics[name] for name in sorted(topics)]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60), size=st.integers(1, 7), packed=st.booleans())
def test_a_file_is_one_document_with_its_newlines(tmp_path_factory, text, size, packed):
    folder = tmp_path_factory.mktemp("text")
    path = write(folder / ("a.txt.gz" if packed else "a.txt"), gzip.compress(text.encode()) if packed else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_sources, "PIECE_BYTES", size)  # characters of several bytes lie across the pieces
        assert read(path) == [text.removeprefix("\ufeff")]


def test_newlines_stay_and_the_byte_order_mark_goes(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\ntwo\rthree\n\xef\xbb\xbf")
    assert read(path) == ["one\r\ntwo\rthree\n\ufeff"]


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 12, 13, 25])
@pytest.mark.parametrize("bad, shift", [(b"\xff.", 0), (b"\xe2\x82", 0), (b"\xe2\x82A", 0), (b"\xc3\xa9\x80", 2)])
def test_text_that_is_not_utf8_names_file_and_byte(tmp_path, monkeypatch, before, bad, shift):
    monkeypatch.setattr(text_sources, "PIECE_BYTES", 12)
    path = write(tmp_path / "bad.txt", b"x" * before + bad)
    with pytest.raises(ValueError, match=rf"bad\.txt: byte {before + shift} \(0x{bad[shift]:02x}\) is not valid UTF-8"):
        read(path)


def test_text_that_is_not_utf8_in_tables_names_file_and_byte(tmp_path):
    path = write(tmp_path / "bad.jsonl", b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl: byte 27 \(0xff\)"):
        read(path)


def test_globs_lists_and_directories(tmp_path):
    for name in ("b.txt", "a.txt", "sub/c.md", "sub/.hidden.txt", ".git/d.txt", "sub/code.py", "sub/10.txt"):
        write(tmp_path / name, name)
    write(tmp_path / "sub/rows.jsonl", '{"text": "row"}')
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "sub/10.txt"]
    assert read(f"{tmp_path}/b.txt, {tmp_path}/*.txt") == ["b.txt", "a.txt"]  # in the given order, none twice
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/10.txt", "sub/c.md", "row"]
    assert read(tmp_path / "sub/code.py") == ["sub/code.py"]
    assert read(f"{tmp_path}/a.txt,builtin:python-docs")[:2] == ["a.txt", topics[min(topics)]]
    assert len(read(",".join(str(write(tmp_path / f"{i:050}.log", "x")) for i in range(100)))) == 100
    write(tmp_path / "with,comma.txt", "comma")
    assert read(tmp_path / "with,comma.txt") == ["comma"]


ROWS = ["plain", 'a "quoted", comma', "two\nlines", "long " * 50_000, "été ", "last"]


def test_tables_give_one_document_a_row(tmp_path):
    lines = [json.dumps({"id": i, "body": row}) for i, row in enumerate(ROWS)]
    write(tmp_path / "a.jsonl", "\n\n".join([*lines, json.dumps({"id": 9, "body": None})]))
    write(tmp_path / "a.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([("id", "body"), *enumerate(ROWS), (9, "")])
    table = pyarrow.table({"id": range(len(ROWS) + 1), "body": [*ROWS, None]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    for name in ("a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet"):
        assert read(tmp_path / name, text_column="body") == ROWS, name
        with pytest.raises(ValueError, match=rf"{name}.*no column 'text'; set text_column to one of: id, body"):
            read(tmp_path / name)
    write(tmp_path / "a.tsv", 'label\ttext\n1\tan "odd quote\n0\tnext\n')
    assert read(tmp_path / "a.tsv") == ['an "odd quote', "next"]
    write(tmp_path / "b.tsv", "1\tfirst\n0\tnext\n")
    assert read(tmp_path / "b.tsv", text_column="1") == ["first", "next"]
    write(tmp_path / "list.json", json.dumps([{"body": row} for row in ROWS], indent=2))
    assert read(tmp_path / "list.json", text_column="body") == ROWS


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", '{"text": "a"}\n{"text": ', r"a\.jsonl, line 2: not a JSON object a line"),
        ("a.json", '["a"]', r"a\.json, line 1: a JSON object is needed, not a list"),
        ("a.jsonl", '{"text": 3}', r"line 1: 'text' holds a int, not text"),
        ("a.jsonl", r'{"text": "\ud800"}', r"line 1: 'text' is not valid Unicode"),
        ("a.csv", 'id,text\n1,"open', r"a\.csv, line 2: unexpected end of data"),
        ("a.tsv", "id\ttext\n1\n", r"a\.tsv, line 2: 1 fields, but the header has 2"),
        ("a.csv", "text\nthis, is cut\n", r"a\.csv, line 2: 2 fields, but the header has 1"),
        ("a.csv", "", r"no column 'text'; set text_column to one of: \(none\)"),
        ("a.parquet", "no parquet", r"a\.parquet: not a readable Parquet file"),
        ("a.txt.gz", "no gzip", r"a\.txt\.gz: not a whole gzip file"),
    ],
)
def test_broken_tables_name_file_and_line(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert "\n" not in str(error.value)


def test_a_cut_off_gzip_file_is_not_a_shorter_text(tmp_path):
    path = write(tmp_path / "a.txt.gz", gzip.compress(bytes(range(32, 127)) * 100)[:-20])
    with pytest.raises(ValueError, match="not a whole gzip file"):
        read(path)


def test_what_is_not_there_is_named(tmp_path):
    for source, message in [
        (tmp_path / "no.txt", "no such text file: .*no.txt"),
        (tmp_path / "*.txt", r"no file matches .*\*\.txt"),
        (tmp_path, r"no text in the directory .*; it is searched for \.txt, "),
    ]:
        with pytest.raises(FileNotFoundError, match=message):
            open_text(str(source))
    with pytest.raises(ValueError, match=r"unknown text source 'builtin:nothing'; .* builtin:python-docs"):
        open_text("builtin:nothing")
    with pytest.raises(ValueError, match="the text source is empty"):
        open_text(" , ")


def test_identity_notices_a_change_of_the_same_length(tmp_path):
    import os

    path = write(tmp_path / "a.txt", "one")
    source, status = open_text(str(path)), path.stat()
    before = source.identity()
    assert source.identity() == before
    write(path, "two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as `cp -p` and `rsync -t` do
    assert source.identity() != before


# TensorFlow Datasets, never from the network


@pytest.fixture(scope="module")
def notes_for_test(prepare_tfds):
    """A prepared TFDS set of two examples a split."""
    import tensorflow_datasets as tfds

    examples = {split: [{"note": f"{split} {i} été", "stars": i} for i in range(2)] for split in ("train", "test")}
    return prepare_tfds("NotesForTest", {"note": tfds.features.Text(), "stars": np.int64}, examples)


def test_tfds_sets_are_read_without_tensorflow(notes_for_test):
    import sys

    train = {"train 0 été", "train 1 été"}
    assert set(read(notes_for_test, text_column="note")) == train
    assert set(read(f"{notes_for_test}:test", text_column="note")) == {"test 0 été", "test 1 été"}
    assert set(read(f"{notes_for_test}:1.0.0:train[:50%]", text_column="note")) < train
    source = open_text(notes_for_test, text_column="note")
    assert source.identity() == open_text(notes_for_test, text_column="note").identity()
    assert "tensorflow" not in sys.modules


def test_tfds_errors_say_what_to_do(notes_for_test):
    for source, column, message in [
        (notes_for_test, "text", "no column 'text'; set text_column to one of: note, stars"),
        (f"{notes_for_test}:validation", "note", "validation.*check name and split"),
        ("tfds:no_such_set_at_all", "text", "no_such_set_at_all not found; check the name"),
        ("tfds:glue/sst2", "sentence", "sets that need TensorFlow .* are prepared once with"),
        ("tfds:", "text", r"write tfds:name\[/config\]"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            open_text(source, text_column=column)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"feature 'stars' holds .*, not text"):
        read(notes_for_test, text_column="stars")


def test_tfds_sets_in_a_format_of_tensorflow_are_to_be_converted(notes_for_test, tmp_path_factory):
    import tensorflow_datasets as tfds

    folder = Path(tfds.builder("notes_for_test").data_dir)
    changed = tmp_path_factory.mktemp("tfds")
    for path in folder.iterdir():  # only the description says which format it is
        target = changed / "notes_for_test/2.0.0" / path.name.replace("array_record", "tfrecord")
        content = path.read_bytes()
        if path.suffix == ".json":
            content = content.replace(b"array_record", b"tfrecord").replace(b"1.0.0", b"2.0.0")
        write(target, content)
    tfds.core.add_data_dir(changed)
    with pytest.raises(ValueError, match=r"File format .*; convert the prepared copy once with TensorFlow"):
        open_text("tfds:notes_for_test:2.0.0", text_column="note")


def test_tfds_text_sets_as_they_are_declared():
    import tensorflow_datasets as tfds

    with tfds.testing.mock_data(num_examples=3):
        assert len(read("tfds:imdb_reviews:train")) == 3
