"""Answer spans: targets in windows, the best valid pair by brute force, answers as slices of the context, learning."""

import dataclasses
import itertools
import json
import logging
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_tasks import CONFIG, Lookup, tokenizer_of, training, whole_words

from transformers_jax.data import SpanData, Tokenizer, char_span, encode_windows
from transformers_jax.evaluation import make_evaluate
from transformers_jax.loading import evaluate, load
from transformers_jax.models import SpanPredictor
from transformers_jax.running import run
from transformers_jax.tasks import SpanExtraction, task_of
from transformers_jax.training.mesh import MeshConfig, make_mesh

WORDS = ("when", "where", "the", "cafe", "in", "zurich", "opened", "1995", "red", "blue", "##s", ".")


def question(number, text, context, *answers):
    """A row of a table; an answer is a text, or a text and where it starts."""
    pairs = [answer if isinstance(answer, tuple) else (answer, context.index(answer)) for answer in answers]
    answers = {"text": [text for text, _ in pairs], "answer_start": [start for _, start in pairs]}
    return {"id": f"q{number}", "title": str(number), "question": text, "context": context, "answers": answers}


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def data_of(tmp_path, train, held_out=None, **fields):
    fields = {"tokenizer": whole_words(tmp_path, *WORDS)} | fields
    held_out = train if held_out is None else held_out
    source = write(tmp_path / "train.jsonl", train)
    return SpanData(source=source, validation_source=write(tmp_path / "dev.jsonl", held_out), **fields)


CONTEXT = "  The café in Zürich opened in 1995."
ROW = question(0, "When?", CONTEXT, ("1995", 31))


# --- what is trained on


def test_a_window_is_trained_on_the_answer_only_if_it_holds_all_of_it(tmp_path):
    # 7 of the 8 tokens of the context fit, and the last 3 of them again.
    row = question(0, "when", "the cafe in zurich opened in 1995 .", "zurich opened", "the cafe")
    other = question(1, "when", "the cafe in zurich opened in 1995 .", "1995 .")
    dataset = SpanExtraction(length=11, overlap=3).prepare(data_of(tmp_path, [row, other]), CONFIG).train
    rows = [dataset.dataset[i] for i in range(len(dataset))]
    np.testing.assert_array_equal(rows[0]["input_ids"], [2, 5, 3, 7, 8, 9, 10, 11, 9, 12, 3])
    np.testing.assert_array_equal(rows[1]["input_ids"], [2, 5, 3, 11, 9, 12, 16, 3])
    np.testing.assert_array_equal([row["labels"] for row in rows], [[6, 7], [0, 0], [0, 0], [5, 6]])
    np.testing.assert_array_equal(rows[0]["token_type_ids"], [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1])


def test_answers_that_no_window_holds_are_counted(tmp_path, caplog):
    rows = [question(0, "when", "the cafe in zurich opened", "cafe in zurich"), question(1, "when", "the cafe", "cafe")]
    task = SpanExtraction(length=6, overlap=0)
    with caplog.at_level(logging.WARNING):
        examples = task.prepare(data_of(tmp_path, rows), CONFIG)
    assert "1 of 2 answers to train on are in no window as a whole" in caplog.text
    assert examples.facts["answers"] == "1 to train on, 0 questions without one"
    with pytest.raises(ValueError, match=r"no answer to train on fits into a window of 6 tokens; raise task.length"):
        task.prepare(data_of(tmp_path, rows[:1]), CONFIG)


def test_the_loss_is_the_mean_of_start_and_end_over_windows():
    logits = np.array([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
    model = Lookup(logits, dataclasses.replace(CONFIG, vocab_size=3))
    ids = jnp.array([[0, 1, 2], [2, 0, 1], [1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": ids * 0 + 1, "labels": jnp.array([[1, 2], [0, 0], [-100, -100]])}
    loss, windows = SpanExtraction().loss(model, batch)
    starts, ends = (np.log(np.exp(logits[:, i]).sum()) for i in (0, 1))
    expected = (starts - 2) + (ends - 3) + (starts - 1) + (ends - 3)
    assert (float(loss), float(windows)) == (pytest.approx(expected / 2), 2.0)


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (
            [ROW, question(1, "Where?", "The café.")],
            {},
            r"line 2.*: the question has no answer; set task.no_answer",
        ),
        (
            [ROW, question(1, "when " * 9, "in 1995", "1995")],
            {"length": 16, "overlap": 4},
            r"line 2.*has 9 tokens, but th.*8",
        ),
        ([ROW], {"length": 16, "overlap": 12}, r"task.length=16, task.overlap=12: .* cannot overlap by 12"),
        ([ROW], {"length": 16, "overlap": -1}, r"task.overlap=-1"),
        ([ROW], {"length": 3, "overlap": 0}, r"leaves no room for text"),
        ([ROW], {"length": 49}, r"task.length=49 must be between 1 and model.max_length=48"),
        (
            [question(0, "When?", CONTEXT, ("1995", 30))],
            {},
            r"line 1.* the answer '1995' is not at its answer_start 30",
        ),
        ([question(0, "When?", CONTEXT, ("1996", 31))], {}, r"line 1.* the answer '1996' .* does not occur"),
    ],
)
def test_what_cannot_be_trained_on_is_an_error_with_question_and_value(tmp_path, rows, fields, message):
    with pytest.raises(ValueError, match=message):
        SpanExtraction(**fields).prepare(data_of(tmp_path, rows), CONFIG)


def test_length_and_overlap_follow_the_model():
    assert SpanExtraction()._sizes(dataclasses.replace(CONFIG, max_length=512)) == (384, 128)
    assert SpanExtraction()._sizes(CONFIG) == (48, 16)
    assert SpanExtraction(length=30, overlap=0)._sizes(CONFIG) == (30, 0)
    with pytest.raises(ValueError, match=r"task.best=0 must be at least 1"):
        SpanExtraction(best=0)


# --- the best pair


def best_text(tokenizer, context, logits, *, text="when", **fields):
    """The answer to one question in one window, and its score."""
    (window,) = encode_windows(tokenizer, [text], [context], max_length=40, overlap=5)
    full = np.full((40, 2), 50.0, np.float32)  # the padding
    full[: len(window.inputs["input_ids"])] = 0
    for place, (start, end) in logits.items():
        full[place] = start, end
    (found,) = SpanExtraction(**fields).candidates([full], [window], 1)
    return context[slice(*found.spans[0])], float(found.scores[0])


def test_the_best_pair_is_in_the_context_and_in_order(tmp_path):
    tokenizer = tokenizer_of(tmp_path, *WORDS)
    # [CLS] when [SEP] the cafe in zurich opened in 1995 . [SEP]
    logits = {1: (9, 9), 4: (5, 0), 6: (0, 5), 9: (4, 4)}
    assert best_text(tokenizer, CONTEXT, logits) == ("café in Zürich", 10.0)
    assert best_text(tokenizer, CONTEXT, logits, max_answer_tokens=2) == ("1995", 8.0)
    # The end before the start, the separators and [CLS].
    assert best_text(tokenizer, CONTEXT, {0: (9, 9), 2: (9, 9), 11: (9, 9), 9: (5, 0), 4: (0, 5)})[1] == 5.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_candidates_are_those_of_brute_force(tmp_path, data):
    tokenizer = tokenizer_of(tmp_path, *WORDS)
    contexts = [" ".join(data.draw(st.lists(st.sampled_from(WORDS[2:11]), min_size=1, max_size=30))) for _ in range(2)]
    reach, best = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    length = data.draw(st.sampled_from([12, 20]))
    windows = encode_windows(tokenizer, ["when", "where the"], contexts, max_length=length, overlap=4)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = [random.normal(0, 3, (length, 2)).astype(np.float32) for _ in windows]
    task = SpanExtraction(best=best, max_answer_tokens=reach)
    for number, found in enumerate(task.candidates(logits, windows, 2)):
        every = {}
        for window, scores in zip(windows, logits, strict=True):
            places = range(window.context_start, window.context_end)
            for first, last in itertools.product(places, places) if window.example == number else []:
                if first <= last < first + reach:
                    score = float(scores[first, 0] + scores[last, 1])
                    span = char_span(window, first, last)
                    every[span] = max(score, every.get(span, -np.inf))
        ranked = sorted(every, key=lambda span: -every[span])[:best]
        # A window gives its own best pairs, so that spans in several windows may leave fewer different ones.
        assert found.spans == ranked[: len(found.spans)]
        assert found.spans and (len(found.spans) == len(ranked) or len(windows) > 2)
        np.testing.assert_allclose(found.scores, [every[span] for span in found.spans], rtol=1e-6)
        nulls = [scores[0].sum() for window, scores in zip(windows, logits, strict=True) if window.example == number]
        assert found.null_score == pytest.approx(float(min(nulls)), rel=1e-6)


@pytest.mark.parametrize("kind", ["words", "unknown", "bytes"])
def test_gold_answers_come_back_as_exact_slices(tmp_path, kind):
    if kind == "words":
        tokenizer, context, golds = tokenizer_of(tmp_path, *WORDS), CONTEXT, [("café in Zürich", 6), ("1995", 31)]
    elif kind == "unknown":
        context = "他说“苏黎世”很美。"
        tokenizer, golds = tokenizer_of(tmp_path, *WORDS, "他", "很"), [("“苏黎世”", 2), ("苏黎世", 3), ("很", 7)]
    else:
        context = " Anna lives in Amsterdam — 東京"
        tokenizer = Tokenizer.train_bpe([context] * 3, vocab_size=300)
        golds = [("Amsterdam", 15), ("Anna", 1), ("東京", 27), ("in Amsterdam", 12)]
    config = dataclasses.replace(CONFIG, max_length=128)
    row = question(0, "when", context, *golds)
    tokenizer.save(tmp_path / "tokenizer")
    task = SpanExtraction(length=100, overlap=4)
    for gold in golds:
        rows = [row | {"answers": {"text": [gold[0]], "answer_start": [gold[1]]}}]
        examples = task.prepare(data_of(tmp_path, rows, tokenizer=str(tmp_path / "tokenizer")), config)
        start, end = examples.train.dataset[0]["labels"]
        logits = np.zeros((100, 2), np.float32)
        logits[start, 0] = logits[end, 1] = 5
        features = task.features([(row["question"], context)], tokenizer, config)
        (answer,) = task.predictions([{"logits": logits}], features, config)
        assert (answer["answer"], answer["start"], answer["end"]) == (gold[0], gold[1], gold[1] + len(gold[0]))


# --- scores


def reader(*, blue=4.0):
    """A model for which an answer begins and ends at a colour, and "when" and position 0 are of no interest."""
    table = np.zeros((5 + len(WORDS), 2))
    table[5 + WORDS.index("red")] = 4.0
    table[5 + WORDS.index("blue")] = blue
    return Lookup(table, dataclasses.replace(CONFIG, vocab_size=len(table)))


def scores(task, rows, tmp_path, *, devices=1, batch_size=4):
    model, processor = reader(blue=3.0), tokenizer_of(tmp_path, *WORDS)
    examples = task.prepare(data_of(tmp_path, rows), model.config, processor, training=False)
    mesh = make_mesh(MeshConfig(devices=devices))
    return make_evaluate(task, examples, mesh, batch_size, config=task.configure(model.config, examples))(model)


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_every_question_counts_once_on_any_number_of_devices(tmp_path, devices):
    # Eight right, then two wrong ones, of one window each and of three.
    rows = [question(i, "when", "the " * (i % 2 * 15) + "red in 1995", "red") for i in range(8)]
    rows += [question(i, "when", "the " * 15 + "red in 1995", "1995") for i in (8, 9)]
    found = scores(SpanExtraction(length=12, overlap=3), rows, tmp_path, devices=devices, batch_size=max(4, devices))
    assert (found["exact_match"], found["f1"], found["questions"]) == (0.8, 0.8, 10)
    assert math.isfinite(found["loss"])


def test_padding_does_not_change_the_loss(tmp_path):
    """Windows of 8 to 30 tokens, alone or filled up to their neighbours' length."""
    rows = [question(i, "when", "the " * (2 + 4 * i) + "red in 1995", "red") for i in range(6)]
    task = SpanExtraction(length=32, overlap=3)
    losses = [scores(task, rows, tmp_path, batch_size=size)["loss"] for size in (1, 2, 6)]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)


def test_unanswerable_questions(tmp_path):
    rows = [
        question(0, "when", "the red cafe", "red"),
        question(1, "when", "cafe in zurich"),
        question(2, "when", "the blue cafe"),
    ]
    # Position 0 scores 0, red 8, blue 6, and any other word 0, which is not less.
    task = SpanExtraction(length=12, overlap=3, no_answer=True, no_answer_threshold=-0.5)
    found = scores(task, rows, tmp_path)
    assert found["f1"] == pytest.approx(2 / 3) and found["has_answer_f1"] == 1.0 and found["no_answer_accuracy"] == 0.5
    assert (found["best_f1"], found["best_f1_threshold"]) == (1.0, -8.0)
    strict = scores(dataclasses.replace(task, no_answer_threshold=0.0), rows, tmp_path)
    assert strict["no_answer_accuracy"] == 0.0
    with pytest.raises(ValueError, match=r"line 2: the question has no answer; set task.no_answer"):
        scores(SpanExtraction(length=12, overlap=3), rows, tmp_path)  # it would count as wrong, whatever is said


# --- predictions


def predictions(task, model, processor, inputs):
    features = task.features(inputs, processor, model.config)
    rows = []
    for i in range(len(features.dataset)):
        example = {name: jnp.asarray(array)[None] for name, array in features.dataset.dataset[i].items()}
        rows.append({name: np.asarray(array[0]) for name, array in task.rows(model, example).items()})
    return task.predictions(rows, features, model.config)


def test_predictions_have_places_probabilities_and_alternatives(tmp_path):
    context = "The RED café, in 1995, the blue."
    task, processor = SpanExtraction(length=20, overlap=3, max_answer_tokens=1, best=5), tokenizer_of(tmp_path, *WORDS)
    (found,) = predictions(task, reader(), processor, [{"question": "when", "context": context}])
    likely, other = math.exp(8) / (2 * math.exp(8) + 3), 1 / (2 * math.exp(8) + 3)
    assert (found["answer"], found["start"], found["end"]) == ("RED", 4, 7)
    assert found["score"] == pytest.approx(likely, abs=1e-6)
    assert [one["answer"] for one in found["alternatives"]] == ["blue", "The", "café"]
    assert [one["score"] for one in found["alternatives"]] == pytest.approx([likely, other, other], abs=1e-6)
    json.dumps(found)


def test_no_answer_is_one_of_the_candidates(tmp_path):
    processor, inputs = tokenizer_of(tmp_path, *WORDS), [("when", "the red"), ("when", "the cafe")]
    task = SpanExtraction(length=20, overlap=3, no_answer=True, max_answer_tokens=1)
    table = np.array(reader().table[...])
    table[2] = 2.0  # [CLS]
    model = Lookup(table, reader().config)
    red, none = predictions(task, model, processor, inputs)
    total = math.exp(8) + math.exp(4) + 1
    assert red["answer"] == "red" and red["score"] == pytest.approx(math.exp(8) / total, abs=1e-6)
    assert red["alternatives"][0] == {
        **{"answer": "", "start": None, "end": None},
        "score": pytest.approx(math.exp(4) / total, abs=1e-6),
    }
    assert (none["answer"], none["start"], none["end"]) == ("", None, None)
    assert none["score"] == pytest.approx(math.exp(4) / (math.exp(4) + 2), abs=1e-6)
    lenient = dataclasses.replace(task, no_answer_threshold=4.5)
    assert predictions(lenient, model, processor, inputs)[1]["answer"] == "the"
    assert predictions(dataclasses.replace(task, no_answer=False), model, processor, inputs)[1]["answer"] == "the"


def test_a_long_context_is_searched_to_its_end(tmp_path):
    context = "the cafe in zurich . " * 20 + "red"
    (found,) = predictions(
        SpanExtraction(length=16, overlap=4), reader(), tokenizer_of(tmp_path, *WORDS), [("when", context)]
    )
    assert (found["answer"], found["start"]) == ("red", len(context) - 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("when", "input 1 is 'when', not"),
        ({"question": "when"}, "input 1 is"),
        (("when", " "), "input 1: the context is empty"),
        ({"question": "", "context": "a", "id": "q7"}, "input 1, question q7: the question is empty"),
        (("when " * 50, "the"), "input 1: the question has 50 tokens"),
    ],
)
def test_inputs_that_are_no_question_are_named(tmp_path, value, message):
    with pytest.raises(ValueError, match=message):
        SpanExtraction().features([("when", "the"), value], tokenizer_of(tmp_path, *WORDS), CONFIG)


# --- learning


def colours(count, seed, *, unanswerable=False):
    """What has the colour is always the same word; where it stands is not."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        words = list(random.choice(["the", "cafe", "in", "zurich", "opened", "old"], random.integers(3, 50)))
        none = unanswerable and i % 3 == 0
        answer = str(random.choice(["red", "dark blue"]))
        place = random.integers(len(words))
        context = " ".join([*words[:place], *([] if none else [answer]), *words[place:]])
        rows.append(question(i, "which colour", context, *([] if none else [answer])))
    return rows


def test_a_run_learns_is_loaded_evaluates_and_predicts(tmp_path):
    data = data_of(
        tmp_path,
        colours(200, seed=1, unanswerable=True),
        colours(60, seed=2, unanswerable=True),
        tokenizer="wordpiece",
    )
    task = SpanExtraction(length=24, overlap=8, no_answer=True)
    result = run(training(task, data, steps=100, learning_rate=1e-2), tmp_path / "run")
    assert result.evaluation["eval/f1"] > 0.95 and result.evaluation["eval/no_answer_accuracy"] > 0.95
    loaded = load(tmp_path / "run")
    assert isinstance(loaded.model, SpanPredictor) and isinstance(task_of(loaded.model), SpanExtraction)
    assert evaluate(loaded)["f1"] == pytest.approx(result.evaluation["eval/f1"])
    context = "the old cafe opened in zurich " * 9 + "Dark  Blue the cafe"
    answer, none = loaded.predict([("which colour", context), {"question": "which colour", "context": "the old cafe"}])
    assert answer["answer"] == context[answer["start"] : answer["end"]] == "Dark  Blue"
    assert (none["answer"], none["start"]) == ("", None)
