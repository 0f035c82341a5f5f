"""Pairs of sentences: from aligned files, tables and TFDS sets, and what is said of files that do not fit."""

import gzip
import json

import pytest

from transformers_jax.data import SentencePair, TranslationData, read_pairs


def write(path, *lines, end="\n"):
    path.write_bytes("".join(line + end for line in lines).encode())
    return str(path)


def aligned(tmp_path, sources, targets, **settings):
    source, target = write(tmp_path / "a.de", *sources), write(tmp_path / "a.en", *targets)
    return TranslationData(source=source, target=target, **settings)


def test_aligned_files(tmp_path):
    data = aligned(tmp_path, ["Ein  Hund.", " Zwei "], ["A dog.", "Two"])
    assert read_pairs(data, part="all") == [SentencePair("Ein  Hund.", "A dog."), SentencePair("Zwei", "Two")]


def test_line_ends_byte_order_marks_and_a_missing_last_newline(tmp_path):
    (tmp_path / "a.de").write_bytes("\ufeffEins\r\nZwei\u2028drei".encode())
    write(tmp_path / "a.en", "One", "Two three")
    data = TranslationData(source=str(tmp_path / "a.de"), target=str(tmp_path / "a.en"))
    assert read_pairs(data, part="all") == [SentencePair("Eins", "One"), SentencePair("Zwei\u2028drei", "Two three")]


def test_several_files_on_either_side_some_of_them_packed(tmp_path):
    with gzip.open(tmp_path / "1.de.gz", "wt") as file:
        file.write("eins\n")
    write(tmp_path / "1.en", "one")
    write(tmp_path / "2.de", "zwei")
    write(tmp_path / "2.en", "two")
    data = TranslationData(
        source=f"{tmp_path}/1.de.gz,{tmp_path}/2.de", target=f"{tmp_path}/*.en", validation_fraction=0.5
    )
    assert read_pairs(data, part="all") == [SentencePair("eins", "one"), SentencePair("zwei", "two")]
    parts = [read_pairs(data, part=part) for part in ("train", "validation")]
    assert sorted(pair.source for part in parts for pair in part) == ["eins", "zwei"]
    with pytest.raises(ValueError, match=r"are 1 files, but .*\*.en 2; they are taken in pairs"):
        read_pairs(TranslationData(source=f"{tmp_path}/2.de", target=f"{tmp_path}/*.en"), part="all")


def test_different_numbers_of_lines_are_an_error_with_both(tmp_path):
    data = aligned(tmp_path, ["a", "b", "", "d", "e"], ["A", "B", "D", "E"], skip_bad=True)
    with pytest.raises(ValueError) as error:
        read_pairs(data, part="all")
    assert str(error.value) == (
        f"{tmp_path}/a.de has 5 lines, but {tmp_path}/a.en 4: line 5 is the first without a counterpart, and line 3 is "
        "the first that is empty on one side alone"
    )


def test_lines_that_are_not_text_count_all_the_same(tmp_path, caplog):
    (tmp_path / "a.de").write_bytes(b"eins\nzw\xe9i\ndrei\nvi\xe9r\n")
    target = write(tmp_path / "a.en", "one", "two", "three", "four")
    data = TranslationData(source=str(tmp_path / "a.de"), target=target)
    with pytest.raises(ValueError, match=r"a.de: byte 7 \(0xe9\), in line 2, is not valid UTF-8"):
        read_pairs(data, part="all")
    data = TranslationData(source=data.source, target=target, skip_bad=True)
    assert read_pairs(data, part="all") == [SentencePair("eins", "one"), SentencePair("drei", "three")]
    assert "2 of 4 pairs of sentences skipped" in caplog.text


def test_an_empty_side_is_an_error_or_a_counted_skip(tmp_path, caplog):
    sides = ["eins", "  ", "", "vier"], ["one", "two", "", "four"]
    with pytest.raises(ValueError, match=r"a.de, line 2: the source is empty"):
        read_pairs(aligned(tmp_path, *sides), part="all")
    assert len(read_pairs(aligned(tmp_path, *sides, skip_bad=True), part="all")) == 2
    assert "2 of 4 pairs of sentences skipped; the first:" in caplog.text
    with pytest.raises(ValueError, match=r"no pairs of sentences can be used \(all 2 were skipped"):
        read_pairs(aligned(tmp_path, ["", ""], ["", "x"], skip_bad=True), part="all")
    with pytest.raises(ValueError, match=r"no pairs of sentences can be used \(there are none\)"):
        read_pairs(aligned(tmp_path, [], []), part="all")


def test_tables(tmp_path):
    both = [SentencePair("eins", "one"), SentencePair("zwei, drei", "two, three")]
    tsv = write(tmp_path / "a.tsv", "target\tsource", "one\teins", "two, three\tzwei, drei")
    assert read_pairs(TranslationData(source=tsv), part="all") == both
    bare = write(tmp_path / "b.tsv", "one\teins", "two, three\tzwei, drei")
    assert read_pairs(TranslationData(source=bare, source_column="1", target_column="0"), part="all") == both
    rows = [{"translation": {"de": pair.source, "en": pair.target}} for pair in both]
    jsonl = write(tmp_path / "c.jsonl", *map(json.dumps, rows))
    columns = dict(source_column="translation.de", target_column="translation.en")
    assert read_pairs(TranslationData(source=jsonl, **columns), part="all") == both
    wrong = columns | {"source_column": "translation.fr"}
    with pytest.raises(ValueError, match=r"c.jsonl, line 1: no 'fr' in that column; there are de, en"):
        read_pairs(TranslationData(source=jsonl, **wrong), part="all")
    some = write(tmp_path / "e.jsonl", json.dumps({"translation": {"de": "eins"}}), *map(json.dumps, rows))
    assert read_pairs(TranslationData(source=some, skip_bad=True, **columns), part="all") == both
    with pytest.raises(ValueError, match=r"a.tsv: no column 'de'; set source_column to one of: target, source"):
        read_pairs(TranslationData(source=tsv, source_column="de"), part="all")
    with pytest.raises(ValueError, match=r"d.de is not a table; name the file with its translations, too"):
        read_pairs(TranslationData(source=write(tmp_path / "d.de", "eins")), part="all")


def test_cells_that_are_no_text(tmp_path):
    rows = [{"source": 7, "target": "x"}, {"source": "x", "target": None}]
    data = TranslationData(source=write(tmp_path / "a.jsonl", *map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: 7 is not a text"):
        read_pairs(data, part="all")
    data = TranslationData(source=write(tmp_path / "b.jsonl", json.dumps(rows[1])))
    with pytest.raises(ValueError, match=r"b.jsonl, line 1: the target is empty"):
        read_pairs(data, part="all")


def test_tfds_sets_by_their_languages(prepare_tfds):
    import tensorflow_datasets as tfds

    features = tfds.features.Translation(languages=["de", "en"])
    examples = [{"de": "Ein Hund", "en": "A dog"}, {"de": "Straße", "en": "street"}]
    name = prepare_tfds("PairsForTest", features, {"train": examples, "test": examples[:1]})
    data = TranslationData(source=f"{name}:train", source_column="de", target_column="en")
    assert read_pairs(data, part="all") == [SentencePair("Ein Hund", "A dog"), SentencePair("Straße", "street")]
    with pytest.raises(ValueError, match=r"no column 'fr'; set target_column to one of: de, en"):
        read_pairs(TranslationData(source=name, source_column="de", target_column="fr"), part="all")
    with pytest.raises(ValueError, match=r"tfds:pairs_for_test/xx-yy: .*xx-yy"):
        read_pairs(TranslationData(source=f"{name}/xx-yy", source_column="xx", target_column="yy"), part="all")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(target=" "), "target is empty"),
        (dict(source_column="x", target_column="x"), "source_column and target_column must differ, but are both x"),
        (dict(validation_target="val.en"), "validation_target=val.en needs a validation_source"),
        (dict(target="t.en", validation_source="val.de"), "validation_source=val.de needs a validation_target"),
        (dict(vocab_size=3), "vocab_size is 3; it must be at least 16"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        TranslationData(source="train.de", **settings)
