"""What the families' config.json files have in common: fields by name, activations, labels."""

from collections.abc import Mapping
from typing import Any

from transformers_jax.models import ImageClassifier, ModelConfig, SequenceClassifier, TokenClassifier

CLASSIFIERS = (SequenceClassifier, TokenClassifier, ImageClassifier)
"""Heads with a logit for each label."""

Fields = Mapping[str, tuple[str, Any]]
"""config.json's fields, ours, and the value that transformers gives a missing one."""

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "gelu_quick",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python": "gelu",
    "swish": "silu",
}
"""transformers' names and ours; of several for one function the first is written."""


def take_fields(fields: dict[str, Any], names: Fields) -> dict[str, Any]:
    """Our fields, taken out of config.json's."""
    values = {ours: fields.pop(theirs, default) for theirs, (ours, default) in names.items()}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def give_fields(config: ModelConfig, names: Fields) -> dict[str, Any]:
    """config.json's fields for ours."""
    return {theirs: getattr(config, ours) for theirs, (ours, _) in names.items()}


def take_activation(fields: dict[str, Any], name: str, default: str) -> str:
    activation = fields.pop(name, default)
    if activation not in ACTIVATIONS:
        raise ValueError(f"config.json sets {name} to {activation!r}; there are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def give_activation(activation: str) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def take_required(fields: dict[str, Any], required: Mapping[str, Any]) -> None:
    """Take out settings that change the numbers; ValueError unless they have the only value that our model has."""
    for name, value in required.items():
        if (found := fields.pop(name, value)) != value:
            raise ValueError(f"config.json sets {name} to {found}; only {value} is supported")


def take_labels(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of what a classifier tells apart. Without `id2label` and `label2id` they are LABEL_0, LABEL_1, as
    transformers has it, or as many as `num_labels` says."""
    by_id, by_name = fields.get("id2label"), fields.get("label2id")
    if not by_id and by_name:
        by_id = {number: name for name, number in by_name.items()}
    if not by_id:
        count = fields.get("num_labels", fields.get("_num_labels"))
        return tuple(f"LABEL_{i}" for i in range(2 if count is None else count))
    try:
        names = {int(number): str(name) for number, name in by_id.items()}
    except (ValueError, TypeError):
        names = {}
    if sorted(names) != list(range(len(by_id))):
        raise ValueError(f"id2label must number the labels 0 to {len(by_id) - 1}, but has {', '.join(map(str, by_id))}")
    return tuple(names[number] for number in range(len(names)))


def give_labels(config: Any, head: type | None) -> dict[str, Any]:
    """The fields of config.json that say what a classifier's logits mean."""
    if head not in CLASSIFIERS:
        return {}
    by_id = {str(number): name for number, name in enumerate(config.labels)}
    by_name = {name: number for number, name in enumerate(config.labels)}
    problem_type = {"problem_type": config.problem_type} if config.problem_type else {}
    return {"id2label": by_id, "label2id": by_name, **problem_type}
