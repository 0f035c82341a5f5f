"""Entities: labels on first pieces, every word scored and tagged, offsets into the text, and that it learns."""

import dataclasses
import json
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tasks import CONFIG, Lookup, tokenizer_of, training, whole_words

from transformers_jax.data import EntityData, Tokenizer
from transformers_jax.evaluation import make_evaluate
from transformers_jax.loading import evaluate, load
from transformers_jax.models import TokenClassifier
from transformers_jax.running import run
from transformers_jax.tasks import TokenClassification, task_of
from transformers_jax.tasks.token_classification import entity_spans
from transformers_jax.training.mesh import MeshConfig, make_mesh

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
WORDS = ("the", "in", "anna", "smith", "new", "york", "paris", "##is")


def write(path, sentences):
    """A column file of `word/TAG word/TAG` sentences."""
    blocks = ["\n".join(" ".join(word.rsplit("/", 1)) for word in sentence.split()) for sentence in sentences]
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return str(path)


def data_of(tmp_path, train, held_out=None, **fields):
    fields = {"tokenizer": whole_words(tmp_path, *WORDS)} | fields
    held_out = train if held_out is None else held_out
    source, validation_source = write(tmp_path / "train.conll", train), write(tmp_path / "dev.conll", held_out)
    return EntityData(source=source, validation_source=validation_source, **fields)


def tagger(labels=LABELS, **tags):
    """A model that always gives a word of WORDS the same tag, and O to others, nine times as probable as all else."""
    table = np.zeros((5 + len(WORDS), len(labels)))
    chosen = [tags.get(word, "O") for word in WORDS]
    table[np.arange(5 + len(WORDS)), [labels.index(tag) for tag in ["O"] * 5 + chosen]] = math.log(
        9 * (len(labels) - 1)
    )
    config = dataclasses.replace(CONFIG, vocab_size=len(table), labels=labels)
    return Lookup(table, config)


TAGGER = dict(anna="B-PER", smith="I-PER", new="B-LOC", york="I-LOC", paris="B-LOC")


def scores(task, model, data, processor, *, devices=1, batch_size=2):
    examples = task.prepare(data, model.config, processor, training=False)
    mesh = make_mesh(MeshConfig(devices=devices))
    return make_evaluate(task, examples, mesh, batch_size, config=task.configure(model.config, examples))(model)


# --- what is trained on


def test_labels_are_o_and_both_tags_of_every_type_whatever_occurs(tmp_path):
    data = data_of(tmp_path, ["paris/B-LOC", "anna/B-PER smith/I-PER", "the/O"])
    examples = TokenClassification().prepare(data, CONFIG)
    assert examples.labels == LABELS
    assert TokenClassification().configure(CONFIG, examples).labels == LABELS
    assert examples.facts["entities"] == "LOC 1, PER 1 to train on"
    assert "conlleval" in examples.facts["scores"]
    assert "strict" in TokenClassification(scoring="strict").prepare(data, CONFIG).facts["scores"]


def test_the_first_piece_of_a_word_has_its_label(tmp_path):
    # "newis" and "annais" have two pieces each, U+200B none.
    data = data_of(tmp_path, ["the/O newis/B-LOC \u200b/I-LOC york/I-LOC annais/B-PER smith/I-PER"])
    dataset = TokenClassification(length=8).prepare(data, CONFIG).train
    np.testing.assert_array_equal(dataset.dataset[0]["input_ids"], [2, 5, 9, 12, 10, 7, 12, 3])
    np.testing.assert_array_equal(dataset.dataset[0]["labels"], [-100, 0, 1, -100, 2, 3, -100, -100])
    batch = dataset.collate([dataset.dataset[0]], 10)
    np.testing.assert_array_equal(batch["labels"][0, 8:], [-100, -100])


def test_the_loss_is_the_mean_over_labelled_pieces():
    model = tagger(**TAGGER)
    ids = jnp.array([[2, 7, 12, 3], [2, 5, 3, 0]])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids != 0) * 1,
        "labels": jnp.array([[-100, 3, -100, -100], [-100, 4, *[-100] * 2]]),
    }
    loss, weight = TokenClassification().loss(model, batch)
    assert float(weight) == 2
    assert float(loss) == pytest.approx(-math.log(0.9) - math.log(0.1 / 4))
    smooth, _ = TokenClassification(label_smoothing=0.5).loss(model, batch)
    # Of each target half is spread over the five.
    spread = -(math.log(0.9) + 4 * math.log(0.025)) / 5
    assert float(smooth) == pytest.approx(0.5 * float(loss) + 0.5 * 2 * spread)


def test_balanced_weights_make_each_tag_count_the_same(tmp_path):
    task = TokenClassification(class_weights="balanced")
    dataset = task.prepare(data_of(tmp_path, ["the/O in/O the/O paris/B-LOC", "anna/B-PER smith/I-PER"]), CONFIG).train
    weights = dataset.dataset[0]["class_weights"]
    np.testing.assert_allclose(weights, [6 / (5 * 3), 6 / 5, 0, 6 / 5, 6 / 5], rtol=1e-6)  # there is no I-LOC
    batch = jax.tree.map(jnp.asarray, dataset.collate([dataset.dataset[0], dataset.dataset[1]], 8))
    loss, weight = task.loss(Lookup(np.zeros((13, 5)), dataclasses.replace(CONFIG, labels=LABELS)), batch)
    assert float(weight) == pytest.approx(4 * 6 / 5) and float(loss) == pytest.approx(4 * 6 / 5 * math.log(5))


@pytest.mark.parametrize(
    ("train", "held_out", "labels", "message"),
    [
        (["the/O"], ["the/O"], (), "train.conll: all words to train on have the tag 'O'; there is nothing to learn"),
        (["anna/B-PER"], ["the/O in/O", "paris/B-LOC"], (), "dev.conll, line 4: the label 'B-LOC' is none of those"),
        (["anna/B-PER"], ["anna/B-PER"], LABELS, "no entity to train on is a 'LOC' of the checkpoint; set task.new_h"),
        (["anna/B-PER"], ["anna/B-PER"], ("LABEL_0", "LABEL_1"), "is none of those the model has: LABEL_0, LABEL_1"),
    ],
)
def test_tags_that_cannot_be_learned_are_errors(tmp_path, train, held_out, labels, message):
    config, task = dataclasses.replace(CONFIG, labels=labels), TokenClassification()
    with pytest.raises(ValueError, match=message):
        task.prepare(data_of(tmp_path, train, held_out), config, training=labels != ("LABEL_0", "LABEL_1"))


def test_smoothing_is_a_share():
    with pytest.raises(ValueError, match=r"task.label_smoothing=-0.1 must be at least 0 and below 1"):
        TokenClassification(label_smoothing=-0.1)


# --- scores


def test_words_beyond_the_limit_count_as_missed(tmp_path, caplog):
    data = data_of(tmp_path, ["anna/B-PER the/O in/O the/O in/O paris/B-LOC"])
    model, processor = tagger(**TAGGER), tokenizer_of(tmp_path, *WORDS)
    with caplog.at_level(logging.WARNING):
        found = scores(TokenClassification(length=7), model, data, processor)
    assert (found["precision"], found["recall"], found["f1"]) == (1.0, 0.5, pytest.approx(2 / 3))
    assert found["accuracy"] == pytest.approx(5 / 6) and found["words"] == 6
    assert "1 of 6 held-out words are beyond the limit of 7 tokens; they are scored as O" in caplog.text
    caplog.clear()
    assert scores(TokenClassification(length=8), model, data, processor)["f1"] == 1.0
    assert not caplog.records


def test_the_rule_is_in_the_names_of_the_scores(tmp_path):
    data = data_of(tmp_path, ["anna/B-PER smith/I-PER"])
    model, processor = tagger(**TAGGER | {"anna": "I-PER"}), tokenizer_of(tmp_path, *WORDS)
    default, strict = TokenClassification(), TokenClassification(scoring="strict")
    found = scores(default, model, data, processor)
    assert found[default.metric] == found["f1/PER"] == 1.0 and default.metric == "f1"
    found = scores(strict, model, data, processor)
    assert found[strict.metric] == found["strict_f1/PER"] == 0.0 and strict.metric == "strict_f1"
    assert "f1" not in found


def test_without_entities_scores_are_zero(tmp_path, recwarn):
    found = scores(TokenClassification(), tagger(), data_of(tmp_path, ["the/O"]), tokenizer_of(tmp_path, *WORDS))
    assert (found["precision"], found["recall"], found["f1"], found["accuracy"]) == (0, 0, 0, 1)
    assert not [warning for warning in recwarn if "division" in str(warning.message)]


@pytest.mark.parametrize(
    ("labels", "tags"),
    [
        (LABELS[::-1], TAGGER),  # by name, not by place
        (("o", "b-loc", "i-loc", "b-per", "i-per"), {word: tag.lower() for word, tag in TAGGER.items()}),
        (("O", "I-PER", "I-LOC"), {word: "I" + tag[1:] for word, tag in TAGGER.items()}),  # IOB1
        (
            ("O", *(prefix + kind for prefix in "BIES" for kind in ("-PER", "-LOC"))),
            dict(anna="B-PER", smith="E-PER", new="B-LOC", york="E-LOC", paris="S-LOC"),
        ),
    ],
)
@pytest.mark.parametrize("scoring", ["default", "strict"])
def test_a_checkpoints_tags_are_read_in_its_order_spelling_and_notation(tmp_path, labels, tags, scoring):
    data = data_of(tmp_path, ["anna/B-PER smith/I-PER in/O new/B-LOC york/I-LOC the/O", "paris/B-LOC the/O"])
    tags = {"the": labels[labels.index("o" if "o" in labels else "O")]} | tags
    table = tagger(
        labels if "O" in labels else ("O", *labels[1:]), **{k: "O" if v == "o" else v for k, v in tags.items()}
    )
    model = Lookup(table.table[...], dataclasses.replace(table.config, labels=labels))
    task = TokenClassification(scoring=scoring)
    found = scores(task, model, data, tokenizer_of(tmp_path, *WORDS))
    assert found[task.metric] == 1.0 and found["loss"] == pytest.approx(-math.log(0.9), rel=1e-5)


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_every_sentence_counts_once_on_any_number_of_devices(tmp_path, devices):
    # Eight right, then two wrong ones, of different lengths.
    sentences = ["the/O " * (i % 3) + "anna/B-PER" for i in range(8)] + ["the/O the/O the/O the/O in/B-PER"] * 2
    found = scores(
        TokenClassification(),
        tagger(**TAGGER),
        data_of(tmp_path, ["paris/B-LOC", *sentences][1:]),
        tokenizer_of(tmp_path, *WORDS),
        devices=devices,
        batch_size=max(4, devices),
    )
    assert (found["precision"], found["recall"], found["words"]) == (1.0, 0.8, 7 + 8 + 10)
    assert found["loss"] == pytest.approx((-math.log(0.9) * 23 - math.log(0.025) * 2) / 25)


# --- predictions


def predict(model, inputs, processor, **fields):
    task = TokenClassification(**fields)
    features = task.features(inputs, processor, model.config)
    rows = [
        {name: np.asarray(array[0]) for name, array in task.rows(model, example).items()}
        for example in (
            {name: jnp.asarray(array)[None] for name, array in features.dataset.dataset[i].items()}
            for i in range(len(features.dataset))
        )
    ]
    return task.predictions(rows, features, model.config)


def test_entities_have_characters_words_and_scores(tmp_path):
    processor = tokenizer_of(tmp_path, *WORDS)
    text = "  The Anna  Smith, in Ánna New\tYork."
    (found,) = predict(tagger(**TAGGER), [text], processor)
    assert found["words"] == ["The", "Anna", "Smith", ",", "in", "Ánna", "New", "York", "."]
    assert found["tags"] == ["O", "B-PER", "I-PER", "O", "O", "B-PER", "B-LOC", "I-LOC", "O"]
    assert found["entities"] == [
        {"type": "PER", "text": "Anna  Smith", "start": 6, "end": 17, "score": 0.9, "first_word": 1, "last_word": 2},
        {"type": "PER", "text": "Ánna", "start": 22, "end": 26, "score": 0.9, "first_word": 5, "last_word": 5},
        {"type": "LOC", "text": "New\tYork", "start": 27, "end": 35, "score": 0.9, "first_word": 6, "last_word": 7},
    ]
    json.dumps(found)
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in found["entities"])


def test_words_stay_the_words_they_are(tmp_path):
    processor, model = tokenizer_of(tmp_path, *WORDS), tagger(**TAGGER)
    words = ["in", "New", "York", "\u200b", "paris"]
    for value in (words, tuple(words), {"words": words}):
        (found,) = predict(model, [value], processor)
        assert found["words"] == words and found["tags"] == ["O", "B-LOC", "I-LOC", "O", "B-LOC"]
        assert [(one["text"], one["start"], one["end"]) for one in found["entities"]] == [
            ("New York", 3, 11),
            ("paris", 14, 19),
        ]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from([*WORDS[:7], "newis", "parisisisis", "annaisisisisisisisis", "\u200b"]), min_size=1, max_size=40
    ),
    st.integers(3, 12),
)
def test_every_word_is_tagged_however_long_the_text(tmp_path, words, length):
    model, processor = tagger(**TAGGER), tokenizer_of(tmp_path, *WORDS)
    if not "".join(words).strip("\u200b"):
        words = [*words, "anna"]
    (found,) = predict(model, [words], processor, length=length)
    whole = {"newis": "B-LOC", "parisisisis": "B-LOC", "annaisisisisisisisis": "B-PER"} | TAGGER
    assert found["tags"] == [whole.get(word, "O") for word in words]


def test_parts_overlap_where_a_word_would_be_cut(tmp_path):
    task, processor = TokenClassification(length=6), tokenizer_of(tmp_path, *WORDS)
    features = task.features([["the", "in", "the", "newis", "york"]], processor, CONFIG)
    # Four pieces of text fit: "newis" is there for context, and begins the next part.
    np.testing.assert_array_equal(features.dataset.dataset[0]["input_ids"], [2, 5, 6, 5, 9, 3])
    np.testing.assert_array_equal(features.dataset.dataset[1]["input_ids"], [2, 9, 12, 10, 3])
    assert [(start, len(first)) for _, start, first in features.extra["parts"]] == [(0, 3), (3, 2)]


def test_a_text_without_words_has_no_entities(tmp_path):
    (found,) = predict(tagger(**TAGGER), ["\u200b"], tokenizer_of(tmp_path, *WORDS))
    assert found == {"entities": [], "words": [], "tags": []}


def test_byte_level_words_in_parts(tmp_path):
    texts = ["the cat sat in new york with anna"] * 3
    processor = Tokenizer.train_bpe(texts, vocab_size=300)
    words = texts[0].split() * 4
    config = dataclasses.replace(CONFIG, labels=("O", "B-X", "I-X"))
    features = TokenClassification(length=9).features([words], processor, config)
    covered = [start + i for _, start, first in features.extra["parts"] for i in range(len(first)) if first[i] >= 0]
    assert covered == list(range(len(words)))


@pytest.mark.parametrize("value", [7, {"txt": "a"}, " ", [], [1, 2], {"words": "anna"}])
def test_inputs_that_are_no_text_are_named(tmp_path, value):
    with pytest.raises(ValueError, match="input 1 is"):
        TokenClassification().features(["anna", value], tokenizer_of(tmp_path, *WORDS), CONFIG)


def test_spans_are_conllevals():
    assert entity_spans(["I-A", "I-A", "B-A", "I-B", "O", "I-B", "B-C"]) == [
        *(("A", 0, 1), ("A", 2, 2), ("B", 3, 3), ("B", 5, 5), ("C", 6, 6)),
    ]
    assert entity_spans(["S-A", "B-A", "E-A", "I-A"]) == [("A", 0, 0), ("A", 1, 2), ("A", 3, 3)]


# --- learning


def travels(count, seed):
    """People with one name or two, and places of one word or two."""
    random = np.random.default_rng(seed)
    names = ["Anna/B-PER", "Omar/B-PER", "Anna/B-PER Hill/I-PER", "Omar/B-PER Ross/I-PER"]
    names += ["Paris/B-LOC", "Oslo/B-LOC", "New/B-LOC York/I-LOC", "New/B-LOC Delhi/I-LOC"]
    sentences = []
    for _ in range(count):
        words = []
        for _ in range(random.integers(1, 4)):
            words += [
                f"{word}/O" for word in random.choice(["we", "saw", "today", "old", "new"], random.integers(1, 3))
            ]
            words += random.choice(names).split()
        sentences.append(" ".join(words))
    return sentences


def test_a_run_learns_is_loaded_evaluates_and_predicts(tmp_path):
    data = data_of(tmp_path, travels(300, seed=1), travels(80, seed=2), tokenizer="wordpiece")
    result = run(training(TokenClassification(), data, steps=60, learning_rate=1e-2), tmp_path / "run")
    assert result.evaluation["eval/f1"] > 0.95 and result.evaluation["eval/f1/PER"] > 0.9
    loaded = load(tmp_path / "run")
    assert loaded.labels == LABELS and isinstance(loaded.model, TokenClassifier)
    assert isinstance(task_of(loaded.model), TokenClassification)
    assert evaluate(loaded)["f1"] == pytest.approx(result.evaluation["eval/f1"])
    text = "we saw Omar Hill today in New York"
    short, long = loaded.predict([text, " ".join([text] * 12)])
    assert [(one["type"], one["text"]) for one in short["entities"]] == [("PER", "Omar Hill"), ("LOC", "New York")]
    assert len(long["words"]) == 12 * 8 and len(long["entities"]) == 24
