"""Metrics, each computed by the library that the field quotes: scikit-learn, SciPy, seqeval."""

import importlib
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
    the second), Matthews' correlation."""
    sklearn = need("sklearn.metrics")
    metrics = {
        "accuracy": sklearn.accuracy_score(labels, predicted),
        "micro_f1": sklearn.f1_score(labels, predicted, average="micro", zero_division=0.0),
        "macro_f1": sklearn.f1_score(labels, predicted, average="macro", zero_division=0.0),
        "matthews": sklearn.matthews_corrcoef(labels, predicted),
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
