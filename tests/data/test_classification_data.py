"""Texts keep their labels, the held-out part is always the same one, and what cannot be used is named or counted."""

import json
import logging
from collections import Counter

import pytest

from transformers_jax.data import ClassificationData, read_classification


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(source, part="all", labels=True, **options):
    return read_classification(ClassificationData(source=str(source), **options), part=part, labels=labels)


def labels_of(path, content, **options):
    return [example.label for example in read(write(path, content), **options)]


def numbers(tmp_path, count):
    return write(tmp_path / "n.tsv", "".join(f"text {i}\t{i % 3}\n" for i in range(count)))


def test_sst2(shared_data):
    data = ClassificationData(
        source=f"{shared_data}/sst2/train.tsv",
        validation_source=f"{shared_data}/sst2/dev.tsv",
        text_column="0",
        label_column="1",
    )
    train, validation = (read_classification(data, part=part) for part in ("train", "validation"))
    # The published sizes of SST-2 without phrases (Socher et al. 2013): 6,920 and 872.
    assert Counter(example.label for example in train) == {"1": 3610, "0": 3310}
    assert Counter(example.label for example in validation) == {"1": 444, "0": 428}
    assert validation[0].text == "one long string of cliches"
    assert validation[-1].where.endswith("dev.tsv, line 872")


def test_cola(shared_data):
    # The published sizes (Warstadt et al. 2019).
    for name, count in (("in_domain_train", 8551), ("in_domain_dev", 527), ("out_of_domain_dev", 516)):
        examples = read(shared_data / f"cola/{name}.tsv", text_column="3", label_column="1")
        assert len(examples) == count
        assert {example.label for example in examples} == {"0", "1"}


def test_pairs_of_glue(shared_data):
    samples = shared_data / "hf_fixtures/tests_samples"
    tsv = read(samples / "MRPC/dev.tsv", text_column="#1 String", pair_column="#2 String", label_column="Quality")
    table = read(samples / "MRPC/dev.csv", text_column="sentence1", pair_column="sentence2")
    assert [(example.text, example.pair) for example in tsv] == [(example.text, example.pair) for example in table]
    assert [("not_equivalent", "equivalent")[int(str(example.label))] for example in tsv] == [e.label for e in table]
    similar = read(samples / "STS-B/dev.tsv", text_column="sentence1", pair_column="sentence2", label_column="score")
    assert [example.label for example in similar[:4]] == ["5.000", "4.750", "5.000", "2.400"]
    assert similar[1].pair == "A child is riding a horse."


def test_labels_as_they_are_written(tmp_path):
    rows = [" good ", 3, 0.5, True, ["b", "a", "b"], [], [1, 2]]
    content = "\n".join(json.dumps({"text": "t", "label": label}) for label in rows)
    assert labels_of(tmp_path / "a.jsonl", content) == ["good", 3, 0.5, "True", ["b", "a"], [], ["1", "2"]]
    content = 'text,label\nx,a|b\nx,"a, b"\nx,\nx,a| a |\n'
    assert labels_of(tmp_path / "a.csv", content, label_separator="|") == [["a", "b"], ["a, b"], [], ["a"]]


def test_labels_can_be_left_unread(tmp_path):
    path = write(tmp_path / "a.csv", "text\nhello\n")
    (example,) = read(path, labels=False)
    assert (example.text, example.pair, example.label) == ("hello", None, None)
    with pytest.raises(ValueError, match="no column 'label'"):
        read(path)


def test_the_held_out_part_is_random_and_always_the_same(tmp_path):
    path = numbers(tmp_path, 200)
    options = {"text_column": "0", "label_column": "1", "validation_fraction": 0.25}
    everything = read(path, "all", **options)
    train, validation = read(path, "train", **options), read(path, "validation", **options)
    assert (len(train), len(validation)) == (150, 50)
    assert sorted((*train, *validation), key=everything.index) == everything
    for part in (train, validation):
        assert part == sorted(part, key=everything.index)
    assert validation not in (everything[-50:], everything[:50])
    assert validation == read(path, "validation", **options)
    # Fixed for good: a run that continues with a newer version must not train on what was held out.
    assert [everything.index(example) for example in validation[:6]] == [9, 17, 21, 25, 28, 29]


def test_a_validation_source_leaves_the_source_whole(tmp_path):
    path = numbers(tmp_path, 5)
    other = write(tmp_path / "v.tsv", "held out\t1\n")
    options = {"text_column": "0", "label_column": "1", "validation_source": str(other)}
    assert read(path, "train", **options) == read(path, "all", **options)
    assert [example.text for example in read(path, "validation", **options)] == ["held out"]


@pytest.mark.parametrize("count, fraction, purpose", [(1, 0.1, "train"), (3, 0.9, "train"), (4, 1e-9, "evaluate")])
def test_an_empty_part_is_an_error(tmp_path, count, fraction, purpose):
    for part in ("train", "validation"):
        with pytest.raises(ValueError, match=rf"{fraction} of {count} rows leaves none to {purpose} on; change it or"):
            read(numbers(tmp_path, count), part, text_column="0", label_column="1", validation_fraction=fraction)


BAD_ROWS = [
    ('{"text": "", "label": "a"}', "'text' is empty"),
    ('{"text": " \\t", "label": "a"}', "'text' is empty"),
    ('{"text": null, "label": "a"}', "'text' is empty"),
    ('{"text": 5, "label": "a"}', "'text' holds a int \\(5\\), not text"),
    ('{"text": "t", "label": ""}', "'label' is empty"),
    ('{"text": "t", "label": null}', "'label' is empty"),
    ('{"text": "t", "label": NaN}', "'label' holds nan, which is no label"),
    ('{"text": "t", "label": {"a": 1}}', "'label' holds {'a': 1}, which is no label"),
    ('{"text": "t", "label": [["a"]]}', "'label' holds \\['a'\\], which is no label"),
    ('{"text": "t"}', "no column 'label'"),
    ('{"text": "t", ', "not a JSON object"),
]


@pytest.mark.parametrize("row, message", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, row, message):
    good = '{"text": "t", "label": "a"}\n'
    path = write(tmp_path / "a.jsonl", good + row + "\n" + good)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
        read(path)
    assert [example.where[-6:] for example in read(path, skip_bad=True)] == ["line 1", "line 3"]


def test_skipped_rows_are_counted_once(tmp_path, caplog):
    good = '{"text": "t", "label": "a"}\n' * 20
    path = write(tmp_path / "a.jsonl", good + "".join(row + "\n" for row, _ in BAD_ROWS))
    with caplog.at_level(logging.WARNING):
        assert len(read(path, "train", skip_bad=True)) == 18
        assert len(read(path, "validation", skip_bad=True)) == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"11 of 31 rows skipped; the first: {path}, line 21: 'text' is empty"
    ]


def test_nothing_left_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no rows can be used \(all 2 were skipped; the first: .*line 2: 'text'"):
        read(write(tmp_path / "a.csv", "text,label\n ,a\n ,b\n"), skip_bad=True)
    with pytest.raises(ValueError, match=r"no rows can be used \(there are none\)"):
        read(write(tmp_path / "b.csv", "text,label\n"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": " "}, "source is empty"),
        ({"validation_source": ""}, "validation_source is empty"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0; it must be above 0 and below 1"),
        ({"validation_fraction": float("nan")}, "validation_fraction is nan"),
        ({"tokenizer": ""}, "tokenizer is empty"),
        ({"vocab_size": 5}, "vocab_size is 5; wordpiece needs at least 16"),
        ({"text_column": ""}, "must not be empty"),
        ({"label_column": "text"}, "must differ, but are text, text"),
        ({"label_separator": ""}, "label_separator is empty"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ClassificationData(**{"source": "a.csv", **options})


def test_tfds_labels_are_names(prepare_tfds):
    import tensorflow_datasets as tfds

    features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(names=["neg", "pos"])}
    examples = [{"text": f"t{i}", "label": i % 2} for i in range(4)]
    source = prepare_tfds("SentimentForTest", features, {"train": examples})
    assert {example.text: example.label for example in read(source)} == {
        "t0": "neg",
        "t1": "pos",
        "t2": "neg",
        "t3": "pos",
    }
    with tfds.testing.mock_data(num_examples=3):
        assert {example.label for example in read("tfds:imdb_reviews")} <= {"neg", "pos"}
