"""Metrics, each computed by the library that the field quotes: scikit-learn, SciPy, seqeval, sacreBLEU."""

import importlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np


def need(library: str) -> Any:
    """An optional library, or an ImportError that says how to install it."""
    try:
        return importlib.import_module(library)
    except ImportError:
        raise ImportError(
            f"the metrics of this task need {library.partition('.')[0]}; install the extra `metrics`: "
            "pip install 'transformers-jax[metrics]'"
        ) from None


def class_metrics(labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Of class numbers: accuracy, F1 (micro; macro over the classes that occur in either; of two classes also that of
    the second), Matthews' correlation (0 where there is only one class)."""
    sklearn = need("sklearn.metrics")
    metrics = {
        "accuracy": sklearn.accuracy_score(labels, predicted),
        "micro_f1": sklearn.f1_score(labels, predicted, average="micro", zero_division=0.0),
        "macro_f1": sklearn.f1_score(labels, predicted, average="macro", zero_division=0.0),
        "matthews": sklearn.matthews_corrcoef(labels, predicted) if len({*labels, *predicted}) > 1 else 0.0,
    }
    if len(names) == 2:
        metrics["f1"] = sklearn.f1_score(labels, predicted, pos_label=1, zero_division=0.0)
    return {name: float(value) for name, value in metrics.items()}


def multi_label_metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Of (examples, classes) zeros and ones: accuracy (all classes of an example right), micro and macro F1."""
    sklearn = need("sklearn.metrics")
    return {
        "accuracy": float(sklearn.accuracy_score(labels, predicted)),
        "micro_f1": float(sklearn.f1_score(labels, predicted, average="micro", zero_division=0.0)),
        "macro_f1": float(sklearn.f1_score(labels, predicted, average="macro", zero_division=0.0)),
    }


def regression_metrics(labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation (NaN where one side is constant), mean squared error."""
    stats = need("scipy.stats")
    metrics = {"mean_squared_error": float(np.mean((labels - predicted) ** 2))}
    constant = len(labels) < 2 or np.ptp(labels) == 0 or np.ptp(predicted) == 0
    for name, function in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        metrics[name] = float("nan") if constant else float(function(labels, predicted).statistic)
    return metrics


ENTITY_RULES = {
    "default": "seqeval's default mode: I-X without a beginning begins an entity, as conlleval has it",
    "strict": "seqeval's strict mode, IOB2: an entity begins with B-X",
}
"""What the scores of entities mean, by `TokenClassification.scoring`."""


def entity_metrics(
    tags: Sequence[list[str]], predicted: Sequence[list[str]], *, strict: bool = False
) -> dict[str, float]:
    """Of the words' tags in IOB2, sentence by sentence: precision, recall and F1 of the entities, and the F1 of each
    type as `f1/TYPE`, by the rule in `ENTITY_RULES`; the names of strict scores begin with `strict_`. Also accuracy,
    the share of words with the right tag. What is undefined, without entities, is 0. ValueError for different lengths.
    """
    for i, (one, other) in enumerate(zip(tags, predicted, strict=True)):
        if len(one) != len(other):
            raise ValueError(f"sentence {i} has {len(one)} tags, but {len(other)} predicted ones")
    seqeval = need("seqeval.metrics")
    rule = {"mode": "strict", "scheme": need("seqeval.scheme").IOB2} if strict else {}
    report = {"micro avg": {"precision": 0.0, "recall": 0.0, "f1-score": 0.0}}  # without entities seqeval says NaN
    begins = ("B-",) if strict else ("B-", "I-", "E-", "S-")
    if any(tag.startswith(begins) for part in (tags, predicted) for sentence in part for tag in sentence):
        report = seqeval.classification_report(tags, predicted, output_dict=True, zero_division=0, **rule)
    scores = {"precision": report["micro avg"]["precision"], "recall": report["micro avg"]["recall"]}
    scores["f1"] = report["micro avg"]["f1-score"]
    types = (name for name in report if name not in ("micro avg", "macro avg", "weighted avg"))
    scores |= {f"f1/{name}": report[name]["f1-score"] for name in types}
    prefix = "strict_" if strict else ""
    accuracy = seqeval.accuracy_score(tags, predicted) if any(tags) else 0.0
    return {prefix + name: float(value) for name, value in scores.items()} | {"accuracy": float(accuracy)}


ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_metrics(answers: Sequence[Sequence[str]], predicted: Sequence[str]) -> dict[str, float]:
    """Exact match and F1 of words, as shares of 1 where the official script of SQuAD 1.1 says percent.

    Each predicted text has the score of the accepted answer that it fits best; a question without any scores 0.
    """
    exact = [max((_exact(answer, text) for answer in its), default=0.0) for its, text in _pairs(answers, predicted)]
    f1 = [max((_word_f1(answer, text) for answer in its), default=0.0) for its, text in _pairs(answers, predicted)]
    return {"exact_match": _mean(exact), "f1": _mean(f1)}


def squad_v2_metrics(
    answers: Sequence[Sequence[str]], predicted: Sequence[str], null_scores: Sequence[float], *, threshold: float = 0.0
) -> dict[str, float]:
    """What the official script of SQuAD 2.0 gives, as shares of 1.

    `predicted` are the texts of the best spans, and a question is held to have none where its null score is above the
    threshold. `exact_match` and `f1` of all questions, `has_answer_...` of those with an answer, `no_answer_accuracy`
    of those without; `best_exact_match` and `best_f1` with the thresholds on these very questions that make them
    largest, and these as `..._threshold` (0 if it is best to answer none).
    """
    scores: dict[str, list[float]] = {"exact_match": [], "f1": []}
    possible = []
    for its, text in _pairs(answers, predicted):
        accepted = [answer for answer in its if _normal(answer)]  # an answer of articles and signs is none
        possible.append(bool(its))
        for name, score in (("exact_match", _exact), ("f1", _word_f1_or_none)):
            scores[name].append(max(score(answer, text) for answer in accepted or [""]))
    has_answer, nulls = np.array(possible, bool), np.asarray(null_scores, np.float64)
    metrics, best = {}, {}
    for name, values in scores.items():
        found = np.where(nulls > threshold, ~has_answer, values)
        metrics[name] = _mean(found)
        if has_answer.any():
            metrics[f"has_answer_{name}"] = _mean(found[has_answer])
        if name == "exact_match" and not has_answer.all():
            metrics["no_answer_accuracy"] = _mean(found[~has_answer])
        best |= _best_threshold(name, np.array(values), nulls, has_answer, np.array([bool(t) for t in predicted]))
    return metrics | best


def _best_threshold(
    name: str, scores: np.ndarray, nulls: np.ndarray, has_answer: np.ndarray, answered: np.ndarray
) -> dict[str, float]:
    """The largest mean score there is over all thresholds. Raising it past a question's null score turns that question
    from "none" into its text: this wins the score of the text, or loses the point of a question that has none."""
    order = np.argsort(nulls, kind="stable")
    changes = np.where(has_answer, scores, -answered.astype(np.float64))[order]
    totals = np.concatenate([[np.sum(~has_answer)], np.sum(~has_answer) + np.cumsum(changes)])
    place = int(np.argmax(totals))
    threshold = float(nulls[order][place - 1]) if place else 0.0
    return {f"best_{name}": float(totals[place] / len(scores)), f"best_{name}_threshold": threshold}


def _pairs(answers: Sequence[Sequence[str]], predicted: Sequence[str]) -> list[tuple[Sequence[str], str]]:
    return list(zip(answers, predicted, strict=True))


def _mean(values: Sequence[float] | np.ndarray) -> float:
    # Added up one by one, as the script does; `sum` of newer Pythons is more exact.
    return float(np.cumsum(np.asarray(values, np.float64))[-1] / len(values))


def _normal(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no articles, single blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def _exact(answer: str, text: str) -> float:
    return float(_normal(answer) == _normal(text))


def _word_f1(answer: str, text: str) -> float:
    """Of the words that two texts have in common, counted as often as they occur in both."""
    words, found = _normal(answer).split(), _normal(text).split()
    common = (Counter(words) & Counter(found)).total()
    if not common:
        return 0.0
    precision, recall = common / len(found), common / len(words)
    return 2 * precision * recall / (precision + recall)


def _word_f1_or_none(answer: str, text: str) -> float:
    """In SQuAD 2.0 nothing is equal to nothing."""
    return _word_f1(answer, text) if _normal(answer) and _normal(text) else _exact(answer, text)


def translation_metrics(written: Sequence[str], references: Sequence[str], tokenize: str | None) -> dict[str, float]:
    """sacreBLEU's BLEU and chrF of a whole set, 0 to 100. `tokenize` is BLEU's tokenizer of words; None: 13a.

    ValueError for a name that sacreBLEU does not know.
    """
    bleu, chrf = _translation_scorers(tokenize)
    return {
        "bleu": bleu.corpus_score(written, [references]).score,
        "chrf": chrf.corpus_score(written, [references]).score,
    }


def translation_rule(tokenize: str | None) -> str:
    """sacreBLEU's signatures of both."""
    signatures = []
    for scorer in _translation_scorers(tokenize):
        name = scorer.corpus_score([""], [[""]]).name  # and now it knows how many references a sentence has
        signatures.append(f"{name} {scorer.get_signature().format()}")
    return "sacreBLEU: " + ", ".join(signatures)


def _translation_scorers(tokenize: str | None) -> tuple[Any, Any]:
    metrics = need("sacrebleu.metrics")
    known = sorted(metrics.BLEU.TOKENIZERS)
    if tokenize is not None and tokenize not in known:
        raise ValueError(f"task.bleu_tokenize={tokenize!r} is none of sacreBLEU's: {', '.join(known)}")
    return metrics.BLEU(tokenize=tokenize), metrics.CHRF()
