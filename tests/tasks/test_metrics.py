"""Metrics equal the scripts that the field quotes, and say something for every input."""

import gzip
import json
import math
import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformers_jax.tasks import metrics
from transformers_jax.tasks.metrics import (
    class_metrics,
    entity_metrics,
    multi_label_metrics,
    need,
    regression_metrics,
    squad_metrics,
    squad_v2_metrics,
)


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- entities


def read_columns(path):
    """Gold and predicted tags of a file for conlleval."""
    blocks = re.split(r"\n\s*\n", path.read_text().strip())
    rows = [[line.split() for line in block.splitlines()] for block in blocks]
    return tuple([[row[column] for row in sentence] for sentence in rows] for column in (1, 2))


@pytest.mark.parametrize("name", ["wnut17_test", "germeval_dev_outer"])
def test_entity_scores_are_those_of_conlleval_and_seqeval(shared_data, name):
    folder = shared_data / "metric_goldens"
    gold, predicted = read_columns(folder / f"conll_{name}.txt")
    found = entity_metrics(gold, predicted)
    expected = json.loads((folder / "seqeval_golden.json").read_text())[name]
    assert [found["precision"], found["recall"], found["f1"]] == expected["default"]
    assert entity_metrics(gold, predicted, strict=True)["strict_f1"] == expected["strict_iob2"]

    report = json.loads((folder / "conlleval_golden.json").read_text())[name]
    shown = [f"{100 * found[metric]:.2f}" for metric in ("accuracy", "precision", "recall", "f1")]
    assert shown == re.findall(r"([\d.]+)(?:%|$)", report.splitlines()[1])
    types = re.findall(r"^ +(\S+): .*FB1: +([\d.]+)", report, re.MULTILINE)
    assert types == [(name[3:], f"{100 * value:.2f}") for name, value in found.items() if name.startswith("f1/")]


def test_an_entity_that_begins_with_i_counts_by_the_default_rule_only():
    default = entity_metrics([["B-PER", "I-PER"]], [["I-PER", "I-PER"]])
    assert default == {"precision": 1, "recall": 1, "f1": 1, "f1/PER": 1, "accuracy": 0.5}
    strict = entity_metrics([["B-PER", "I-PER"]], [["I-PER", "I-PER"]], strict=True)
    assert strict == {
        **{"strict_precision": 0, "strict_recall": 0, "strict_f1": 0, "strict_f1/PER": 0},
        "accuracy": 0.5,
    }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("gold", "predicted", "accuracy"),
    [(["O", "O"], ["O", "O"], 1.0), (["O", "O"], ["I-PER", "O"], 0.5), (["B-X", "O"], ["O", "O"], 0.5), ([], [], 0.0)],
)
def test_without_entities_scores_are_zero_and_nothing_warns(gold, predicted, accuracy, strict):
    found = entity_metrics([gold], [predicted], strict=strict)
    assert found.pop("accuracy") == accuracy
    assert set(found.values()) == {0.0}


def test_one_type_missing_leaves_the_others_alone():
    found = entity_metrics([["B-PER", "O", "B-LOC"]], [["B-PER", "B-ORG", "O"]])
    assert found == {
        **{"precision": 0.5, "recall": 0.5, "f1": 0.5, "accuracy": 1 / 3},
        **{"f1/LOC": 0.0, "f1/ORG": 0.0, "f1/PER": 1.0},
    }


def test_tags_of_different_length_are_an_error_with_the_sentence():
    with pytest.raises(ValueError, match="sentence 1 has 2 tags, but 1 predicted"):
        entity_metrics([["O"], ["O", "O"]], [["O"], ["O"]])


# --- answers


@pytest.mark.parametrize("name", ["perfect", "first_sentence", "noisy", "shifted"])
def test_answer_scores_are_those_of_squads_script(shared_data, name):
    articles = json.loads((shared_data / "xquad" / "xquad.en.json").read_text())["data"]
    questions = [question for article in articles for text in article["paragraphs"] for question in text["qas"]]
    folder = shared_data / "metric_goldens"
    predicted = json.loads(gzip.decompress((folder / "squad_preds_en.json.gz").read_bytes()))[name]
    expected = json.loads((folder / "squad_v1.1_golden.json").read_text())["scores"][f"en/{name}"]
    found = squad_metrics(
        [[answer["text"] for answer in question["answers"]] for question in questions],
        [predicted.get(question["id"], "") for question in questions],  # the script scores a missing one 0
    )
    # Up to the last bit of a float, since the script multiplies by 100 before it divides.
    assert {name: 100 * value for name, value in found.items()} == pytest.approx(expected, rel=1e-15, abs=0)


@pytest.mark.parametrize(
    ("answers", "text", "exact", "f1"),
    [
        (["the  Eiffel Tower."], "Eiffel tower", 1, 1),  # case, punctuation, articles, blanks
        (["Denver Broncos", "Broncos"], "the Broncos!", 1, 1),  # the best of several
        (["a b c d"], "b x c", 0, 2 * (2 / 3) * (2 / 3) / (4 / 3)),
        (["yes yes no"], "yes", 0, 0.5),  # a word counts as often as it occurs in both
        (["cat-like"], "catlike", 1, 1),
        (["1,000"], "1000", 1, 1),
        (["“quoted”"], "quoted", 0, 0),  # only ASCII punctuation
        (["gold"], "", 0, 0),
        ([], "anything", 0, 0),
    ],
)
def test_answers_by_hand(answers, text, exact, f1):
    assert squad_metrics([answers], [text]) == pytest.approx({"exact_match": exact, "f1": f1})


def test_an_answer_of_articles_alone():
    assert squad_metrics([["the"]], ["a"]) == {"exact_match": 1.0, "f1": 0.0}  # as SQuAD 1.1's script has it
    assert squad_v2_metrics([["the"]], ["a"], [-1.0])["f1"] == 1.0  # and 2.0's


def test_unanswerable_questions():
    answers = [["red car"], [], ["blue"], []]
    texts = ["red", "green", "blue", "white"]
    found = squad_v2_metrics(answers, texts, [-3.0, 2.0, 1.0, -1.0])
    # Said to have none: the second (right) and the third (wrong).
    assert found["exact_match"] == 0.25 and found["f1"] == pytest.approx((2 / 3 + 1) / 4)
    assert found["has_answer_exact_match"] == 0.0 and found["has_answer_f1"] == pytest.approx(1 / 3)
    assert found["no_answer_accuracy"] == 0.5
    # By null score: 2/3 won at -3, then 1 lost at -1, then 1 won at 1, then 1 lost at 2.
    assert found["best_f1"] == pytest.approx((2 + 2 / 3) / 4) and found["best_f1_threshold"] == -3.0
    assert found["best_exact_match"] == 0.5 and found["best_exact_match_threshold"] == 0.0
    moved = squad_v2_metrics(answers, texts, [-3.0, 2.0, 1.0, -1.0], threshold=-3.0)
    assert moved["f1"] == found["best_f1"]


def test_only_questions_of_one_kind():
    found = squad_v2_metrics([["x"], ["y"]], ["x", "z"], [0.0, 0.0])
    assert found["exact_match"] == found["has_answer_exact_match"] == 0.5
    assert "no_answer_accuracy" not in found
    found = squad_v2_metrics([[], []], ["x", "z"], [1.0, -1.0])
    assert found["exact_match"] == found["no_answer_accuracy"] == 0.5 and found["best_exact_match"] == 1.0
    assert "has_answer_f1" not in found


@given(
    st.lists(
        st.tuples(st.sampled_from(["a b", "b", None]), st.sampled_from(["b", "b c"]), st.integers(-3, 3)), min_size=1
    )
)
def test_no_threshold_is_better_than_the_best_one(rows):
    gold, texts, nulls = zip(
        *[(["x " + g] if g else [], "x " + text, null + 0.5) for g, text, null in rows], strict=True
    )
    if len(set(nulls)) < len(nulls):  # of equal null scores the script may count some and not others
        nulls = [null + i / 100 for i, null in enumerate(nulls)]
    scores = [squad_v2_metrics(gold, texts, nulls, threshold=threshold) for threshold in [-9.0, *nulls]]
    for name in ("exact_match", "f1"):
        assert scores[0][f"best_{name}"] == pytest.approx(max(score[name] for score in scores))
        if scores[0][f"best_{name}_threshold"] != 0.0:
            at_best = squad_v2_metrics(gold, texts, nulls, threshold=scores[0][f"best_{name}_threshold"])
            assert at_best[name] == pytest.approx(scores[0][f"best_{name}"])


# --- classes and numbers


def test_class_scores_by_their_formulas():
    labels, predicted = np.array([1, 1, 1, 0, 0, 1, 0, 0]), np.array([1, 1, 0, 0, 1, 1, 0, 0])
    true_positives, false_positives, false_negatives, true_negatives = 3, 1, 1, 3
    f1 = 2 * true_positives / (2 * true_positives + false_positives + false_negatives)
    matthews = (true_positives * true_negatives - false_positives * false_negatives) / math.sqrt(4 * 4 * 4 * 4)
    assert class_metrics(labels, predicted, ("neg", "pos")) == pytest.approx(
        {"accuracy": 0.75, "micro_f1": 0.75, "macro_f1": 0.75, "f1": f1, "matthews": matthews}
    )


def test_more_classes_and_one_that_never_occurs():
    found = class_metrics(np.array([0, 1, 2, 2]), np.array([0, 2, 2, 2]), ("a", "b", "c", "d"))
    assert found["accuracy"] == 0.75 and found["macro_f1"] == pytest.approx((1 + 0 + 0.8) / 3)
    assert "f1" not in found
    assert class_metrics(np.array([1, 1]), np.array([1, 1]), ("a", "b"))["matthews"] == 0.0


def test_several_labels():
    labels, predicted = np.array([[1, 0, 1], [0, 1, 0]]), np.array([[1, 0, 1], [0, 1, 1]])
    found = multi_label_metrics(labels, predicted)
    assert found == pytest.approx({"accuracy": 0.5, "micro_f1": 6 / 7, "macro_f1": (1 + 1 + 2 / 3) / 3})
    nothing = multi_label_metrics(np.zeros((2, 3), int), np.zeros((2, 3), int))
    assert nothing == {"accuracy": 1.0, "micro_f1": 0.0, "macro_f1": 0.0}


def test_correlations():
    labels, predicted = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 4.0, 9.0, 16.0])
    found = regression_metrics(labels, predicted)
    assert found["spearman"] == pytest.approx(1.0) and found["pearson"] == pytest.approx(
        np.corrcoef(labels, predicted)[0, 1]
    )
    assert found["mean_squared_error"] == pytest.approx((0 + 4 + 36 + 144) / 4)
    assert math.isnan(regression_metrics(labels, np.ones(4))["pearson"])
    assert math.isnan(regression_metrics(labels[:1], predicted[:1])["spearman"])


def test_a_missing_library_says_what_to_install(monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(metrics.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"seqeval; install the extra `metrics`: pip install"):
        need("seqeval.metrics")
