"""Sentences and entities come out of column files and tables as they went in, whatever the notation."""

import gzip
import json
import logging

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from transformers_jax.data import EntityData, read_entities
from transformers_jax.data.conll import from_iob2, recognise_scheme, to_iob2


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(source, part="all", **options):
    return read_entities(EntityData(source=str(source), **options), part=part)


def pairs(source, **options):
    return [list(zip(sentence.words, sentence.tags, strict=True)) for sentence in read(source, **options)]


def entities(tags):
    """(start, end, type) of IOB2 tags."""
    found = []
    for i, tag in enumerate(tags):
        if tag[0] == "B":
            found.append([i, i + 1, tag[2:]])
        elif tag[0] == "I":
            found[-1][1] = i + 1
    return found


def test_wnut17(shared_data):
    # The sizes in the report of the shared task (Derczynski et al. 2017): posts, tokens, entities.
    for name, sizes in (("wnut17train.conll", (3394, 62730, 1975)), ("emerging.dev.conll", (1009, 15733, 836))):
        sentences = read(shared_data / "wnut17" / name)
        words = sum(len(sentence.words) for sentence in sentences)
        assert (len(sentences), words, sum(len(entities(sentence.tags)) for sentence in sentences)) == sizes
        if name.startswith("wnut17train"):
            assert sentences[0].words[14:17] == ["Empire", "State", "Building"]
            assert sentences[0].tags[14:17] == ["B-location", "I-location", "I-location"]
            assert sentences[0].where.endswith("wnut17train.conll, line 1")


def test_files_of_germeval_and_hugging_face(shared_data):
    samples = shared_data / "hf_fixtures/tests_samples"
    kinds = set((samples / "GermEval/labels.txt").read_text().split())
    for name in ("train", "dev"):
        sentences = read(samples / f"GermEval/{name}.txt")
        blocks = (samples / f"GermEval/{name}.txt").read_text().strip().split("\n\n")
        assert [" ".join(sentence.words) for sentence in sentences] == [
            " ".join(line.split(" ")[0] for line in block.split("\n")) for block in blocks
        ]
        assert {tag for sentence in sentences for tag in sentence.tags} <= kinds
    rows = [json.loads(line) for line in (samples / "conll/sample.json").read_text().splitlines()]
    assert pairs(samples / "conll/sample.json") == [list(zip(r["words"], r["ner"], strict=True)) for r in rows]


EXPECTED = [[("New", "B-LOC"), ("York", "I-LOC"), (".", "O")], [("#", "O"), ("Ada", "B-PER")]]


@pytest.mark.parametrize(
    "content",
    [
        "New\tB-LOC\nYork\tI-LOC\n.\tO\n\n#\tO\nAda\tB-PER\n",
        "New B-LOC\nYork I-LOC\n. O\n\n# O\nAda B-PER",  # no newline at the end
        "\ufeffNew B-LOC\r\nYork I-LOC\r\n. O\r\n\r\n# O\r\nAda B-PER\r\n\r\n\r\n",
        "\n\nNew\tB-LOC\nYork\tI-LOC\n.\tO\n\t\n \t\n#\tO\nAda\tB-PER\n\t",
        "New  NNP   B-LOC\nYork NNP I-LOC \n. . O\n   \n# # O\nAda NNP B-PER\n",
        "-DOCSTART- -X- O\n\nNew NNP B-LOC\nYork NNP I-LOC\n. . O\n-DOCSTART-\n# # O\nAda NNP B-PER",
        "# id 7\n# text = New York .\nNew B-LOC\nYork I-LOC\n. O\n\n# remark\n#\n# O\nAda B-PER\n",
        "# id = 7\n#\nNew\tB-LOC\nYork\tI-LOC\n.\tO\n\n# global.columns = a b\n#\tO\nAda\tB-PER\n",
    ],
)
def test_column_files_in_all_their_dialects(tmp_path, content):
    for name in ("a.conll", "a.txt", "a.tsv", "a.bio.gz", "noname"):
        data = content.encode()
        assert pairs(write(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)) == EXPECTED


def test_words_keep_spaces_in_files_with_tabs_and_odd_spaces_in_any(tmp_path):
    assert pairs(write(tmp_path / "a", "New York\tB-LOC\n")) == [[("New York", "B-LOC")]]
    assert pairs(write(tmp_path / "b", "1\u00a0000 O\n#hash O\n")) == [[("1\u00a0000", "O"), ("#hash", "O")]]
    assert pairs(write(tmp_path / "c", "#hash\tO\n#\tO\n")) == [[("#hash", "O"), ("#", "O")]]


def test_any_columns(tmp_path):
    path = write(tmp_path / "a.conll", "1 New B-LOC x\n2 York I-LOC y\n")
    assert pairs(path, word_column="1", tag_column="2") == [[("New", "B-LOC"), ("York", "I-LOC")]]
    assert pairs(path, word_column="-3", tag_column="-2") == [[("New", "B-LOC"), ("York", "I-LOC")]]
    for word, tag in (("0", "4"), ("-5", "2"), ("1", "-3")):
        with pytest.raises(ValueError, match=rf"line 1: 4 columns .*, too few for a word_column of {word} and"):
            read(path, word_column=word, tag_column=tag)
    with pytest.raises(ValueError, match="word_column is 'tokens', but the columns of this file have numbers"):
        read(path, word_column="tokens")


def test_tables_of_lists(tmp_path, prepare_tfds):
    import tensorflow_datasets as tfds

    words, tags = [[word for word, _ in row] for row in EXPECTED], [[tag for _, tag in row] for row in EXPECTED]
    for names in (("tokens", "tags"), ("words", "ner"), ("tokens", "ner_tags")):
        rows = [dict(zip(names, row, strict=True)) for row in zip(words, tags, strict=True)]
        assert pairs(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))) == EXPECTED
    assert pairs(write(tmp_path / "a.json", json.dumps(rows))) == EXPECTED
    table = pyarrow.table({"text": words, "gold": tags})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert pairs(tmp_path / "a.parquet", word_column="text", tag_column="gold") == EXPECTED
    with pytest.raises(ValueError, match="no column 'tokens' or 'words'; set word_column to one of: text, gold"):
        read(tmp_path / "a.parquet")
    kinds = tfds.features.ClassLabel(names=["O", "B-PER", "B-LOC", "I-LOC"])
    features = {"tokens": tfds.features.Sequence(tfds.features.Text()), "tags": tfds.features.Sequence(kinds)}
    examples = [{"tokens": row, "tags": known} for row, known in zip(words, tags, strict=True)]
    assert sorted(pairs(prepare_tfds("EntitiesForTest", features, {"train": examples}))) == sorted(EXPECTED)


def test_globs_directories_and_parts(tmp_path):
    for i in range(30):
        write(tmp_path / f"{i:02}.conll", f"word{i} O\n")
    write(tmp_path / "README.md", "# no data")
    everything = read(tmp_path)
    assert [sentence.words for sentence in everything] == [[f"word{i}"] for i in range(30)]
    assert read(f"{tmp_path}/*.conll, {tmp_path}/00.conll") == everything
    train, validation = (read(tmp_path, part, validation_fraction=0.3) for part in ("train", "validation"))
    assert (len(train), len(validation)) == (21, 9)
    assert sorted(train + validation, key=lambda sentence: sentence.where) == everything
    with pytest.raises(ValueError, match=r"a\.csv: entities are read from column files"):
        read(write(tmp_path / "a.csv", "word,tag\n"))


# Notations

# What conlleval's rules make of each notation, written by hand.
NOTATIONS = [
    ("iob2", "B-X I-X B-X O B-Y B-X O", "B-X I-X B-X O B-Y B-X O"),
    ("iob1", "I-X I-X B-X O I-Y I-X O", "B-X I-X B-X O B-Y B-X O"),
    ("iobes", "B-X E-X S-X O S-Y S-X O", "B-X I-X B-X O B-Y B-X O"),
    ("iobes", "B-X I-X E-X B-X E-X", "B-X I-X I-X B-X I-X"),
    ("iob2", "O B-X-Y I-X-Y", "O B-X-Y I-X-Y"),  # a type may hold a hyphen
    ("iob2", "O O", "O O"),
]


@pytest.mark.parametrize("scheme, tags, iob2", NOTATIONS)
def test_notations_become_iob2(tmp_path, scheme, tags, iob2):
    path = write(tmp_path / "a.conll", "".join(f"w {tag}\n" for tag in tags.split()))
    for option in ("auto", scheme):
        assert read(path, scheme=option)[0].tags == iob2.split()
    assert recognise_scheme([tags.split()]) == scheme
    assert from_iob2(iob2.split(), scheme) == tags.split()


@st.composite
def iob2_tags(draw):
    tags = []
    for kind, length in draw(
        st.lists(st.tuples(st.sampled_from(["", "X", "Y", "X-Y"]), st.integers(1, 3)), max_size=8)
    ):
        tags += [f"B-{kind}", *[f"I-{kind}"] * (length - 1)] if kind else ["O"] * length
    return tags


@given(st.lists(iob2_tags(), max_size=4), st.sampled_from(["iob1", "iob2", "iobes"]))
@example([["B-X", "B-X"]], "iob1")
def test_every_notation_survives_the_round_trip(sentences, scheme):
    written = [from_iob2(tags, scheme) for tags in sentences]
    assert [to_iob2(tags) for tags in written] == sentences
    # The notation may be ambiguous (no entity, or none of several words), but then it means the same.
    recognised = recognise_scheme(written)
    assert [from_iob2(to_iob2(tags), recognised) for tags in written] == written
    prefixes = {tag[0] for tags in written for tag in tags}
    assert (recognised == "iobes") == bool(prefixes & {"E", "S"})


def test_entities_are_those_of_seqeval():
    sequence_labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    for tags in ("I-X O B-X I-Y I-Y", "B-X I-X B-X E-X I-X S-X I-X", "I-X B-X I-X O I-Y E-Y I-Y", "E-X E-X O S-X"):
        iob2 = to_iob2(tags.split())
        expected = [[start, end + 1, kind] for kind, start, end in sequence_labeling.get_entities(tags.split())]
        assert entities(iob2) == expected, tags


def test_small_mistakes_are_read_and_reported(tmp_path, caplog):
    path = write(tmp_path / "a.conll", "a B-X\nb O\nc I-X\n\nd B-X\ne I-X\n")
    with caplog.at_level(logging.WARNING):
        assert [sentence.tags for sentence in read(path)] == [["B-X", "O", "B-X"], ["B-X", "I-X"]]
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of 2 sentences are read as conlleval would; the first: ")
    assert record.getMessage().endswith("a.conll, line 1: the tag I-X of word 3 ('c') breaks the rules of iob2")
    with pytest.raises(ValueError, match=r"line 1: the tag I-X of word 3 .* rules of iob2; correct it, or set"):
        read(path, scheme="iob2")
    assert len(read(path, scheme="iob2", skip_bad=True)) == 1


# Bad input


@pytest.mark.parametrize(
    "line, message",
    [
        ("lonely", r"line 5: 1 columns, but the first line has 2 \('lonely'\)"),
        ("too many O", "line 5: 3 columns, but the first line has 2"),
        ("word X-PER", "line 5: the tag 'X-PER' of 'word' is none of O, B-TYPE"),
        ("word B-", "line 5: the tag 'B-' of 'word'"),
        ("word b-PER", "line 5: the tag 'b-PER' of 'word'"),
        ("#hash PER", "line 5: the tag 'PER' of '#hash'"),
        (b"caf\xe9 O", r"byte 22 \(0xe9\), in line 5, is not valid UTF-8"),
    ],
)
def test_a_bad_line_is_an_error_with_its_place_or_costs_its_sentence(tmp_path, caplog, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path / "a.conll", b"one O\n\ntwo O\ntwo O\n" + line + b"\nlast\xff O\n\nfour O\n")
    with pytest.raises(ValueError, match=message) as error:
        read(path)
    assert str(error.value).startswith(str(path))
    with caplog.at_level(logging.WARNING):
        assert [sentence.words for sentence in read(path, skip_bad=True)] == [["one"], ["four"]]
    assert caplog.records[-1].getMessage() == f"1 of 3 sentences skipped; the first: {error.value}"


def test_a_bad_first_or_last_line_costs_its_sentence(tmp_path):
    content = b"one O\n\n\xff O\ntwo O\n\nthree O\n\nfour O\n\xff O"
    assert [s.words for s in read(write(tmp_path / "a.conll", content), skip_bad=True)] == [["one"], ["three"]]
    with pytest.raises(ValueError, match="the word with the tag O is empty"):
        read(write(tmp_path / "b.conll", "one\tO\n\tO\n"))


@pytest.mark.parametrize(
    "row, message",
    [
        ('{"tokens": ["a", "b"], "tags": ["O"]}', "2 words, but 1 tags"),
        ('{"tokens": [], "tags": []}', "there are no words"),
        ('{"tokens": ["a"], "tags": [3]}', "3 is a int, not text; tags are needed by their names"),
        ('{"tokens": "a b", "tags": ["O", "O"]}', "a list is needed, not 'a b'"),
        ('{"tokens": ["a"], "tags": ["PER"]}', "the tag 'PER' of 'a' is none of"),
        ('{"tokens": [""], "tags": ["O"]}', "the word with the tag O is empty"),
    ],
)
def test_a_bad_row_is_an_error_with_its_place_or_skipped(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n' + row)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
        read(path)
    assert len(read(path, skip_bad=True)) == 1


@pytest.mark.parametrize("content", ["", "\n\t\n", "-DOCSTART- O\n", "# only\n# remarks\n"])
def test_a_file_without_sentences_is_an_error(tmp_path, content):
    with pytest.raises(ValueError, match=r"a\.conll: no sentences can be used \(there are none\)"):
        read(write(tmp_path / "a.conll", content), skip_bad=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": ""}, "source is empty"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"word_column": "-1"}, r"word_column \('-1'\) and tag_column \('-1'\) must differ"),
        ({"tag_column": ""}, "must differ and not be empty"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EntityData(**{"source": "a.conll", **options})
