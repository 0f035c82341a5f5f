"""Labels are their names: no order in a file, and no number, ever decides which class is meant."""

import numpy as np
import pytest

from transformers_jax.tasks.labels import LabelNames, class_weights, show_counts


def test_the_order_is_that_of_the_names_not_of_the_file():
    assert LabelNames.of(["neutral", "entailment", "neutral", "contradiction"]).names == (
        *("contradiction", "entailment", "neutral"),
    )
    assert LabelNames.of(["10", "9", "2", "-1"]).names == ("-1", "2", "9", "10")
    assert LabelNames.of(["10", "9", "two"]).names == ("10", "9", "two")
    assert LabelNames.of(["2", "1", "01", "+1"]).names == ("+1", "01", "1", "2")


def test_names_are_found_whatever_their_case_unless_two_differ_by_it_only():
    names = LabelNames(("CONTRADICTION", "Neutral"))
    assert [names.number(name, "here") for name in ("contradiction", "NEUTRAL", "Neutral")] == [0, 1, 1]
    names = LabelNames(("a", "A", "b"))
    assert [names.number(name, "here") for name in ("a", "A", "B")] == [0, 1, 2]
    names = LabelNames(("Yes", "YES"))
    with pytest.raises(ValueError, match=r"'yes' is none of"):
        names.number("yes", "here")


def test_names_that_say_nothing_are_found_by_number_too():
    assert LabelNames(("LABEL_0", "LABEL_1")).number("1", "here") == 1
    with pytest.raises(ValueError, match=r"f.tsv, line 3: the label '1' is none of those the model has: neg, pos"):
        LabelNames(("neg", "pos")).number("1", "f.tsv, line 3")


def test_a_long_list_of_names_is_shortened():
    with pytest.raises(ValueError, match=r"name19, \.\.\.$"):
        LabelNames(tuple(f"name{i}" for i in range(200))).number("x", "here")


def test_every_class_needs_an_example():
    names = LabelNames(("a", "b", "c"))
    names.check_all_occur([0, 2, 1], "f.csv")
    with pytest.raises(
        ValueError, match=r"f.csv: no example to train on has the label 'b' of the checkpoint; set task.n"
    ):
        names.check_all_occur([0, 2, 2], "f.csv")
    with pytest.raises(ValueError, match=r"f.csv: all examples have the label 'a'; there is nothing to learn"):
        LabelNames(("a",)).check_all_occur([0], "f.csv")


def test_balanced_weights_are_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    numbers = np.array([0, 0, 0, 0, 0, 1, 2, 2])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=numbers)
    np.testing.assert_allclose(class_weights("balanced", LabelNames(("a", "b", "c")), numbers.tolist()), expected)
    with_unseen = class_weights("balanced", LabelNames(("a", "b", "c", "d")), numbers.tolist())
    np.testing.assert_allclose(with_unseen, [*(expected * 3 / 4), 0], rtol=1e-6)


def test_weights_by_name():
    names = LabelNames(("O", "B-PER", "a=b"))
    np.testing.assert_allclose(class_weights("O=0.25, a=b=3", names, []), [0.25, 1, 3])
    for wrong in ("O", "O=", "O=x", "O=-1", "O=inf", "O=nan", ""):
        with pytest.raises(ValueError, match=r"task.class_weights: .* is not NAME=WEIGHT with a weight of 0 or more"):
            class_weights(wrong, names, [])
    with pytest.raises(ValueError, match=r"task.class_weights: the label 'B-ORG' is none of"):
        class_weights("B-ORG=2", names, [])


def test_counts_are_shown_by_name():
    assert show_counts(LabelNames(("neg", "pos")), [0] * 3310 + [1]) == "2 classes: neg 3,310, pos 1"


def test_weights_that_leave_nothing_to_learn_are_refused():
    with pytest.raises(ValueError, match="'a=0,b=0' leaves no class to learn"):
        class_weights("a=0,b=0", LabelNames(("a", "b")), [0, 1])
