"""Text classification: the loss by its formulas, labels by their names, every example once, and that it learns."""

import dataclasses
import json
import math

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_tasks import CONFIG, Lookup, tokenizer_of, training, whole_words

from transformers_jax.data import ClassificationData
from transformers_jax.evaluation import make_evaluate
from transformers_jax.loading import evaluate, load
from transformers_jax.running import run
from transformers_jax.tasks import TextClassification
from transformers_jax.tasks.base import Features
from transformers_jax.training.mesh import MeshConfig, make_mesh, one_device


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def told(task, logits, labels, **fields):
    """The loss of a model that says `logits` for texts with `labels`, as (sum, weight)."""
    names = tuple(f"class {i}" for i in range(np.shape(logits)[1]))
    config = dataclasses.replace(CONFIG, vocab_size=len(logits) + 1, labels=names, problem_type=task.problem)
    ids = np.stack([np.zeros(len(logits), np.int32), 1 + np.arange(len(logits), dtype=np.int32)], axis=1)
    table = np.concatenate([np.full((1, len(names)), 99.0), logits])
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": np.asarray(labels), **fields}
    return tuple(map(float, task.loss(Lookup(table, config, pooled=True), jax.tree.map(jnp.asarray, batch))))


# --- the loss


def test_cross_entropy_skips_what_has_no_label():
    loss, weight = told(TextClassification(), [[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [9.0, 9.0, 9.0]], [2, 1, -100])
    first = math.log(1 + math.exp(-1) + math.exp(-2))
    second = 3 + math.log(1 + 2 * math.exp(-3))
    assert (loss, weight) == (pytest.approx(first + second), 2.0)


def test_smoothing_spreads_a_share_over_all_classes():
    loss, weight = told(TextClassification(label_smoothing=0.3), [[0.0, 0.0, math.log(2)]], [2])
    # Probabilities 1/4, 1/4, 1/2 against the targets 0.1, 0.1, 0.8.
    assert (loss, weight) == (pytest.approx(0.2 * math.log(4) + 0.8 * math.log(2)), 1.0)


def test_class_weights_scale_loss_and_weight():
    logits, labels, weight = [[0.0, 1.0], [2.0, 0.0]], [0, 1], np.array([0.5, 3.0], np.float32)
    each = [math.log(1 + math.exp(1)), math.log(1 + math.exp(2))]
    loss, total = told(TextClassification(), logits, labels, weight=weight)
    assert (loss, total) == (pytest.approx(0.5 * each[0] + 3 * each[1]), 3.5)


def test_several_labels_are_as_many_questions_of_yes_or_no():
    task = TextClassification(problem="multi_label_classification")
    logits, labels = [[0.0, 2.0], [-1.0, 5.0], [7.0, 7.0]], np.array([[1, 1], [0, 0], [-100, -100]])
    each = [math.log(2), math.log(1 + math.exp(-2)), math.log(1 + math.exp(-1)), math.log(1 + math.exp(5))]
    assert told(task, logits, labels) == (pytest.approx(sum(each) / 2), 2.0)


def test_regression_is_squared_error_and_skips_nan():
    task = TextClassification(problem="regression")
    assert told(task, [[1.5], [0.0], [4.0]], np.array([1.0, np.nan, 2.0], np.float32)) == (pytest.approx(4.25), 2.0)
    model = Lookup(
        [[0.0], [1.0]], dataclasses.replace(CONFIG, labels=("score",), problem_type="regression"), pooled=True
    )
    batch = {
        "input_ids": jnp.ones((1, 2), int),
        "attention_mask": jnp.ones((1, 2), int),
        "labels": jnp.array([jnp.nan]),
    }
    gradients = jax.grad(lambda model: task.loss(model, batch)[0])(model)
    assert np.all(np.asarray(gradients.table[...]) == 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_smoothing": 1.0}, "task.label_smoothing=1.0 must be at least 0 and below 1"),
        ({"problem": "regression", "label_smoothing": 0.1}, "no meaning for regression"),
        ({"problem": "regression", "class_weights": "balanced"}, "no meaning for regression"),
        ({"problem": "multi_label_classification", "class_weights": "balanced"}, "no meaning for multi_label"),
    ],
)
def test_settings_without_meaning_are_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        TextClassification(**fields)


def test_balanced_weights_make_each_class_count_the_same(tmp_path):
    rows = [{"text": "good" if i % 4 else "bad", "label": "pos" if i % 4 else "neg"} for i in range(20)]
    data = ClassificationData(
        source=write(tmp_path / "a.jsonl", rows),
        validation_source=write(tmp_path / "b.jsonl", rows[:2]),
        tokenizer=whole_words(tmp_path, "good", "bad"),
    )
    train = TextClassification(class_weights="balanced").prepare(data, CONFIG).train
    sums = {0: 0.0, 1: 0.0}
    for i in range(20):
        example = train.dataset[i]
        sums[int(example["labels"])] += float(example["weight"])
    assert sums == pytest.approx({0: 10, 1: 10})


# --- labels

NLI = ("contradiction", "neutral", "entailment")


def nli_model(names=NLI):
    """Says the class that the text itself names: ids 5, 6, 7 are the words of NLI."""
    table = np.zeros((8, 3))
    for i, name in enumerate(NLI):
        table[5 + i, names.index(name)] = 9.0
    return Lookup(table, dataclasses.replace(CONFIG, vocab_size=8, labels=names), pooled=True)


def accuracy(model, tmp_path, labels, **fields):
    """Of a model on texts that name their class."""
    texts = NLI if len(labels) == 3 else [label.lower() for label in labels]
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    path = write(tmp_path / "nli.jsonl", rows)
    task = TextClassification(**fields)
    data = ClassificationData(source=path, validation_source=path)
    examples = task.prepare(data, model.config, tokenizer_of(tmp_path, *NLI), training=False)
    run = make_evaluate(task, examples, one_device(), 2, config=task.configure(model.config, examples))
    return run(model)["accuracy"]


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0)])
def test_a_checkpoints_labels_are_found_by_name_whatever_the_order(tmp_path, order):
    model = nli_model(tuple(NLI[i] for i in order))
    assert accuracy(model, tmp_path, NLI) == 1.0
    assert accuracy(model, tmp_path, NLI[::-1] * 2) == 1.0
    assert accuracy(model, tmp_path, [name.upper() for name in NLI]) == 1.0


def test_numbers_match_a_checkpoint_only_if_its_labels_say_nothing(tmp_path):
    model = nli_model()
    with pytest.raises(ValueError, match=r"nli.jsonl, line 1: the label '0' is none of those the model has: contra"):
        accuracy(model, tmp_path, ["0", "1", "2"])
    nameless = dataclasses.replace(model.config, labels=("LABEL_0", "LABEL_1", "LABEL_2"))
    assert accuracy(Lookup(model.table[...], nameless, pooled=True), tmp_path, [0, 1, 2]) == 1.0


def test_a_label_that_the_checkpoint_lacks_is_an_error_with_line_and_names(tmp_path):
    with pytest.raises(ValueError, match=r"line 2: the label 'maybe' is none of those the model has: contradiction, n"):
        accuracy(nli_model(), tmp_path, ["neutral", "maybe", "neutral"])


def prepare(tmp_path, train, held_out, config=CONFIG, **fields):
    tokenizer = whole_words(tmp_path, "good", "bad")
    data = ClassificationData(
        source=write(tmp_path / "train.jsonl", [{"text": "good", "label": label} for label in train]),
        validation_source=write(tmp_path / "dev.jsonl", [{"text": "bad", "label": label} for label in held_out]),
        tokenizer=tokenizer,
    )
    task = TextClassification(**fields)
    examples = task.prepare(data, config)
    return task.configure(config, examples), examples


@pytest.mark.parametrize(
    ("train", "held_out", "labels", "message"),
    [
        (["a", "b"], ["c"], (), r"dev.jsonl, line 1: the label 'c' is none of those the model has: a, b"),
        (["a", "a"], ["a"], (), r"train.jsonl: all examples have the label 'a'; there is nothing to learn"),
        (
            ["a", "b"],
            ["a"],
            ("a", "b", "c"),
            r"no example to train on has the label 'c' of the checkpoint; set task.new",
        ),
        (
            ["a", ["a", "b"]],
            ["a"],
            ("a", "b"),
            r"train.jsonl, line 2: several labels \(a, b\) need task.problem=multi_l",
        ),
    ],
)
def test_labels_that_cannot_be_learned_are_errors(tmp_path, train, held_out, labels, message):
    with pytest.raises(ValueError, match=message):
        prepare(tmp_path, train, held_out, dataclasses.replace(CONFIG, labels=labels))


def test_a_text_with_several_names_each(tmp_path):
    config, examples = prepare(
        tmp_path, [["b", "a"], [], ["c"]], [["a"]], problem="multi_label_classification"
    )  # fmt: skip
    assert config.labels == ("a", "b", "c") and config.problem_type == "multi_label_classification"
    np.testing.assert_array_equal(
        [examples.train.dataset[i]["labels"] for i in range(3)], [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    )


def test_numbers_to_predict(tmp_path):
    config, examples = prepare(tmp_path, ["1.5", 2, -3e2], [0], problem="regression")
    assert config.labels == ("score",)
    assert [float(examples.train.dataset[i]["labels"]) for i in range(3)] == [1.5, 2.0, -300.0]
    with pytest.raises(ValueError, match=r"train.jsonl, line 2: the label 'much' is not a number"):
        prepare(tmp_path, ["1", "much"], [0], problem="regression")


@pytest.mark.parametrize("label", ["nan", "inf", "1e999", "-inf"])
def test_what_is_no_finite_number_is_not_learned(tmp_path, label):
    with pytest.raises(ValueError, match=f"train.jsonl, line 2: the label '{label}' is not a number"):
        prepare(tmp_path, ["1", label], [0], problem="regression")


def test_a_single_logit_of_unknown_kind_is_a_number(tmp_path):
    """A checkpoint of transformers with one label and no problem_type, as for STS-B."""
    config = dataclasses.replace(CONFIG, labels=("LABEL_0",))
    with pytest.raises(ValueError, match=r"is for regression but task.problem is single.*set it to regression"):
        prepare(tmp_path, [1.5, 2.5], [0.5], config)
    assert prepare(tmp_path, [1.5, 2.5], [0.5], config, problem="regression")[0].labels == ("LABEL_0",)


def test_whole_numbers_are_one_label_however_they_are_written(tmp_path):
    config, _ = prepare(tmp_path, [1, "1", 1.0, 0], [0])
    assert config.labels == ("0", "1")


def test_rows_with_unknown_labels_are_skipped_when_asked(tmp_path):
    data = ClassificationData(
        source=write(tmp_path / "a.jsonl", [{"text": "x", "label": label} for label in "ab"]),
        validation_source=write(tmp_path / "b.jsonl", [{"text": "x", "label": label} for label in "acb"]),
        tokenizer=whole_words(tmp_path, "x"),
        skip_bad=True,
    )
    assert len(TextClassification().prepare(data, CONFIG).validation) == 2
    with pytest.raises(ValueError, match=r"b.jsonl, line 2: the label 'c' is none of those.*data.skip_bad"):
        TextClassification().prepare(dataclasses.replace(data, skip_bad=False), CONFIG)


def test_a_classifier_of_another_kind_is_refused(tmp_path):
    config = dataclasses.replace(CONFIG, labels=("a", "b"), problem_type="multi_label_classification")
    with pytest.raises(
        ValueError, match=r"is for multi_label_classification but task.problem is single.*task.new_head"
    ):
        prepare(tmp_path, [["a"], ["b"]], [["a"]], config)


# --- evaluation


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_every_example_counts_once_on_any_number_of_devices(tmp_path, devices):
    # Eight right, then two wrong ones, of different lengths.
    rows = [{"text": "good " + "x " * (i % 3), "label": "pos"} for i in range(8)]
    rows += [{"text": "bad bad bad bad", "label": "pos"}] * 2
    path = write(tmp_path / "ten.jsonl", rows)
    tokenizer = tokenizer_of(tmp_path, "good", "bad", "x")
    table = np.zeros((8, 2))
    table[5, 1] = table[6, 0] = 2.0
    config = dataclasses.replace(CONFIG, vocab_size=8, labels=("neg", "pos"))
    model, task = Lookup(table, config, pooled=True), TextClassification()
    examples = task.prepare(ClassificationData(source=path, validation_source=path), config, tokenizer, training=False)
    config = task.configure(config, examples)
    found = make_evaluate(task, examples, make_mesh(MeshConfig(devices=devices)), max(4, devices), config=config)(model)
    assert found["examples"] == 10 and found["accuracy"] == 0.8
    assert found["loss"] == pytest.approx(math.log(1 + math.exp(-2)) + 0.2 * 2)
    one = dataclasses.replace(examples, validation=task.features(["bad"], tokenizer, config).dataset)
    with pytest.raises(KeyError):  # without labels there is nothing to evaluate
        make_evaluate(task, one, one_device(), 4, config=config)(model)


# --- predictions


def predictions(problem, labels, logits):
    task = TextClassification(problem=problem)
    config = dataclasses.replace(CONFIG, labels=labels, problem_type=problem)
    rows = [{"logits": np.array(row, np.float32)} for row in logits]
    return task.predictions(rows, Features(grain.MapDataset.source(rows)), config)


def test_predictions_are_labels_with_probabilities():
    found = predictions("single_label_classification", ("neg", "pos"), [[0.0, math.log(3)], [500.0, -500.0]])
    assert found[0] == {"label": "pos", "probability": 0.75, "probabilities": {"neg": 0.25, "pos": 0.75}}
    assert found[1] == {"label": "neg", "probability": 1.0, "probabilities": {"neg": 1.0, "pos": 0.0}}
    several = predictions("multi_label_classification", ("a", "b"), [[0.1, math.log(3)], [-9.0, -9.0]])
    assert several[0]["labels"] == ["a", "b"] and several[0]["probabilities"]["b"] == 0.75
    assert several[1]["labels"] == []
    assert predictions("regression", ("score",), [[2.5]]) == [{"score": 2.5}]


@pytest.mark.parametrize(
    ("value", "message"),
    [(7, "input 1 is 7, not a text"), ({"txt": "a"}, "input 1 is"), (" ", "input 1 is empty"), (("a",), "input 1 is")],
)
def test_inputs_that_are_no_text_are_named(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        TextClassification().features(["good", value], tokenizer_of(tmp_path, "good"), CONFIG)


# --- learning


def sentiment(count, seed):
    """Which of "good" and "bad" occurs decides."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        words = list(random.choice(["the", "film", "was", "plot", "very", "long"], random.integers(2, 12)))
        label = ["neg", "pos"][random.integers(2)]
        words.insert(random.integers(len(words) + 1), "good" if label == "pos" else "bad")
        rows.append({"text": " ".join(words), "label": label})
    return rows


def test_a_run_learns_is_loaded_evaluates_and_predicts(tmp_path):
    data = ClassificationData(
        source=write(tmp_path / "train.jsonl", sentiment(400, seed=1)),
        validation_source=write(tmp_path / "dev.jsonl", sentiment(100, seed=2)),
    )
    result = run(training(TextClassification(), data), tmp_path / "run")
    assert result.evaluation["eval/accuracy"] > 0.95
    loaded = load(tmp_path / "run")
    assert loaded.labels == ("neg", "pos")
    assert evaluate(loaded)["accuracy"] == pytest.approx(result.evaluation["eval/accuracy"])
    answers = loaded.predict(["the film was very good", {"text": "bad plot"}, "a good very long film " * 5])
    assert [answer["label"] for answer in answers] == ["pos", "neg", "pos"]
