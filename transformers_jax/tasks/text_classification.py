"""Text classification: one class, several, or a number for a text or a pair of texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformers_jax.data import (
    IGNORED_LABEL,
    ClassificationData,
    LabelledText,
    encode_texts,
    pack_ragged,
    read_classification,
    texts_in_row,
)
from transformers_jax.models import ProblemType, SequenceClassifier
from transformers_jax.tasks.base import (
    Examples,
    Features,
    Row,
    Task,
    abstract_arrays,
    abstract_texts,
    fingerprint,
    make_tokenizer,
    model_inputs,
    ragged,
    text_length,
    tokenizer_fact,
    usable,
    with_tokenizer,
)
from transformers_jax.tasks.labels import LabelNames, class_weights, show_counts
from transformers_jax.tasks.metrics import class_metrics, multi_label_metrics, need, regression_metrics


@dataclass(frozen=True)
class TextClassification(Task):
    """Train a model to name the class of a text (or of a pair), all classes that apply, or a number."""

    problem: ProblemType = "single_label_classification"
    """What a label is: one class, a list of classes that apply (multi_label_classification), a number (regression)."""
    length: int | None = None
    """Longest input in tokens, special ones included; what is longer is cut. None: the longest the model takes."""
    pack: bool = False
    """Train on rows of `length` tokens that hold several texts, which do not see one another."""
    label_smoothing: float = 0.0
    """Share of the target that is spread evenly over all classes."""
    class_weights: str | None = None
    """Weights of the classes in the loss: balanced (each class counts the same in all), or NAME=WEIGHT,NAME=WEIGHT
    (1 for those not named)."""
    new_head: bool = False
    """Start a new head for the labels of the data, even if the checkpoint has a classifier."""

    head: ClassVar = SequenceClassifier
    data: ClassVar = ClassificationData

    def __post_init__(self):
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"task.label_smoothing={self.label_smoothing} must be at least 0 and below 1")
        if self.problem == "regression" and self.label_smoothing:
            raise ValueError("task.label_smoothing has no meaning for regression")
        if self.problem != "single_label_classification" and self.class_weights:
            raise ValueError(f"task.class_weights has no meaning for {self.problem}")

    @property
    def metric(self) -> str:
        best = {"multi_label_classification": "micro_f1", "regression": "spearman"}
        return best.get(self.problem, "accuracy")

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        if not isinstance(data, ClassificationData):
            raise ValueError(f"text classification reads ClassificationData, not {type(data).__name__}")
        need("sklearn.metrics")
        problem = self.problem_of(config)
        length = text_length(self.length, config)
        train, held_out = (read_classification(data, part=part) for part in ("train", "validation"))
        if config.labels:
            names = LabelNames(config.labels)
        elif problem == "regression":
            names = LabelNames(("score",))
        else:
            names = LabelNames.of(name for example in train for name in _names(example))
        if not names.names:
            raise ValueError(f"{data.source}: no example to train on has a label")

        def target(example: LabelledText) -> Any:
            return _target(example, names, problem)

        digest = fingerprint([[(one.text, one.pair, one.label) for one in part] for part in (train, held_out)])
        train, targets = usable(data, train, target, noun="rows")
        held_out, held_out_targets = usable(data, held_out, target, noun="rows")
        tokenizer = processor or make_tokenizer(data, (text for one in train for text in (one.text, one.pair) if text))
        facts = {"labels": names.names[0]} if problem == "regression" else {}
        encoded = []
        if training:
            if problem == "single_label_classification":
                names.check_all_occur(targets, data.source)
                facts = {"labels": show_counts(names, targets)}
            encoded = _encode(tokenizer, train, targets, length)
            if self.class_weights is not None:
                weights = class_weights(self.class_weights, names, targets)
                encoded = [
                    example | {"weight": weights[label]} for example, label in zip(encoded, targets, strict=True)
                ]
        held_out_encoded = _encode(tokenizer, held_out, held_out_targets, length)
        sizes = [len(example["input_ids"]) for example in (*encoded, *held_out_encoded)]
        facts |= {
            "texts": f"{data.source}: {len(train):,} to train on, {len(held_out):,} held out, {np.mean(sizes):.0f} "
            f"tokens on average, {sum(size == length for size in sizes):,} of them at the limit of {length}",
            "tokenizer": tokenizer_fact(data, tokenizer, given=processor is not None),
        }
        tokens = round(float(np.mean(sizes)))
        train_on = ragged(encoded, tokenizer, length) if training else None
        if self.pack and train_on is not None:
            packed = pack_ragged(train_on, self._text_padding(problem))
            train_on, tokens, facts["rows"] = packed.dataset, packed.tokens_in_row, packed.fact
        return Examples(
            train=train_on,
            validation=ragged(held_out_encoded, tokenizer, length),
            processor=tokenizer,
            fingerprint=digest,
            items_per_example=tokens,
            labels=names.names,
            facts=facts,
        )

    def configure(self, config: Any, examples: Examples) -> Any:
        if (problem := self.problem_of(config)) != self.problem:
            raise ValueError(
                f"the checkpoint's classifier is for {problem} but task.problem is {self.problem}; set it to "
                f"{problem}, or task.new_head to start another"
            )
        return with_tokenizer(config, examples.processor, labels=examples.labels, problem_type=self.problem)

    def problem_of(self, config: Any) -> ProblemType:
        """What the model's logits mean: as its checkpoint says, else as this task does."""
        if config.problem_type is None and len(config.labels) == 1:
            return "regression"  # transformers' reading of a single logit
        return config.problem_type or self.problem

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        length = text_length(self.length, config)
        texts = [texts_in_row(length)] if self.pack else []
        labels = [len(config.labels)] if self.problem == "multi_label_classification" else []
        batch = abstract_texts(batch_size, length, packed=self.pack)
        batch |= abstract_arrays(batch_size, labels=[*texts, *labels], **({"texts": texts} if self.pack else {}))
        number = jax.ShapeDtypeStruct((batch_size, *texts), np.float32)
        if self.problem == "regression":
            batch["labels"] = number
        return batch | ({} if self.class_weights is None else {"weight": number})

    def _text_padding(self, problem: ProblemType) -> dict[str, float]:
        """What stands in packed rows for the label, and the weight, of texts that there are not."""
        filler = np.nan if problem == "regression" else IGNORED_LABEL
        return {"labels": filler} | ({} if self.class_weights is None else {"weight": 0.0})

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Cross-entropy (in nats), binary cross-entropy (mean over the classes) or squared error, as (sum, number of
        examples), or with class weights as (weighted sum, sum of weights). Examples whose label is -100 or NaN do not
        count."""
        inputs = model_inputs(model.config, batch)
        if "texts" in batch:
            inputs["texts"] = batch["texts"]
        logits = model(**inputs, key=key).logits
        if "texts" in batch:  # each text of a row like one of its own
            logits = logits.reshape(-1, logits.shape[-1])
            batch = {
                name: batch[name].reshape(len(logits), *batch[name].shape[2:])
                for name in ("labels", "weight")
                if name in batch
            }
        losses, counted = self._losses(model.config, logits, batch["labels"], self.label_smoothing)
        weights = counted * batch.get("weight", 1.0)
        return jnp.sum(losses * weights), jnp.sum(weights)

    def _losses(
        self, config: Any, logits: jax.Array, labels: jax.Array, smoothing: float
    ) -> tuple[jax.Array, jax.Array]:
        """The loss of each example, and whether it counts (1 or 0)."""
        match self.problem_of(config):
            case "regression":
                counted = ~jnp.isnan(labels)
                losses = jnp.square(logits[:, 0] - jnp.where(counted, labels, 0.0))
            case "multi_label_classification":
                counted = labels[:, 0] >= 0
                targets = jnp.maximum(labels, 0) * (1 - smoothing) + smoothing / 2
                losses = jnp.mean(optax.sigmoid_binary_cross_entropy(logits, targets), axis=-1)
            case _:
                counted = labels >= 0
                targets = jax.nn.one_hot(jnp.maximum(labels, 0), logits.shape[-1])
                losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(targets, smoothing))
        return jnp.where(counted, losses, 0.0), counted.astype(jnp.float32)

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        logits = model(**model_inputs(model.config, batch)).logits
        losses, counted = self._losses(model.config, logits, batch["labels"], 0.0)
        sums = {"loss": jnp.sum(losses), "examples": jnp.sum(counted)}
        return sums, {"logits": logits, "labels": batch["labels"]}

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Loss (without smoothing and weights), the metrics of the problem (`tasks.metrics`), number of examples."""
        logits, labels = (np.stack([row[name] for row in rows]) for name in ("logits", "labels"))
        match self.problem_of(config):
            case "regression":
                metrics = regression_metrics(labels, logits[:, 0])
            case "multi_label_classification":
                metrics = multi_label_metrics(labels, logits > 0)
            case _:
                metrics = class_metrics(labels, logits.argmax(-1), config.labels)
        return {"loss": totals["loss"] / totals["examples"], **metrics, "examples": totals["examples"]}

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        _read_input(value, where)

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Texts, or pairs of texts, or dictionaries with "text" and perhaps "pair"."""
        texts = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        length = text_length(self.length, config)
        return Features(ragged(_encode(processor, texts, None, length), processor, length))

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        return {"logits": model(**model_inputs(model.config, batch)).logits}

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"label", "probability", "probabilities": {label: probability}}`; with several labels `{"labels":
        [those above one half], "probabilities"}`; for a number `{"score"}`."""
        logits = np.stack([row["logits"] for row in rows]).astype(np.float64)
        problem = self.problem_of(config)
        if problem == "regression":
            return [{"score": float(score)} for score in logits[:, 0]]
        if problem == "multi_label_classification":
            found = []
            for row in 1 / (1 + np.exp(-logits)):
                each = {label: round(float(p), 6) for label, p in zip(config.labels, row, strict=True)}
                found.append({"labels": [label for label, p in each.items() if p > 0.5], "probabilities": each})
            return found
        exponents = np.exp(logits - logits.max(-1, keepdims=True))
        found = []
        for row in exponents / exponents.sum(-1, keepdims=True):
            each = {label: round(float(p), 6) for label, p in zip(config.labels, row, strict=True)}
            label = config.labels[int(row.argmax())]
            found.append({"label": label, "probability": each[label], "probabilities": each})
        return found


def _names(example: LabelledText) -> list[str]:
    """The names in a label: one, or several."""
    labels = example.label if isinstance(example.label, list) else [example.label]
    return [str(int(one)) if isinstance(one, float) and one.is_integer() else str(one) for one in labels]


def _target(example: LabelledText, names: LabelNames, problem: ProblemType) -> Any:
    """The label as the loss wants it: a class number, a row of zeros and ones, or a number."""
    if problem == "multi_label_classification":
        row = np.zeros(len(names), np.int32)
        row[[names.number(name, example.where) for name in _names(example)]] = 1
        return row
    if isinstance(example.label, list):
        raise ValueError(
            f"{example.where}: several labels ({', '.join(map(str, example.label))}) need "
            "task.problem=multi_label_classification"
        )
    if problem == "single_label_classification":
        (name,) = _names(example)
        return names.number(name, example.where)
    try:
        number = np.float32(float(str(example.label)))
    except ValueError:
        number = np.float32("nan")
    if not np.isfinite(number):
        raise ValueError(f"{example.where}: the label {example.label!r} is not a number that can be learned")
    return number


def _encode(tokenizer: Any, texts: Sequence[LabelledText], targets: Sequence[Any] | None, length: int) -> list[Any]:
    encoded: list[Any] = [None] * len(texts)
    for paired in (False, True):  # each text as it would be alone
        places = [i for i, one in enumerate(texts) if (one.pair is not None) == paired]
        pairs = [texts[i].pair or "" for i in places] if paired else None
        parts = encode_texts(tokenizer, [texts[i].text for i in places], pairs, max_length=length) if places else []
        for i, part in zip(places, parts, strict=True):
            encoded[i] = part
    if targets is None:
        return encoded
    labels = np.asarray(targets)
    labels = labels.astype(np.int32) if labels.dtype == np.int64 else labels
    return [example | {"labels": label} for example, label in zip(encoded, labels, strict=True)]


def _read_input(value: Any, where: str) -> LabelledText:
    match value:
        case str():
            text, pair = value, None
        case {"text": str() as text, "pair": (str() | None) as pair}:
            pass
        case {"text": str() as text} if "pair" not in value:
            pair = None
        case (str() as text, str() as pair):
            pass
        case _:
            raise ValueError(f'{where} is {value!r:.60}, not a text, a pair of texts, or {{"text": ..., "pair": ...}}')
    if not text.strip():
        raise ValueError(f"{where} is empty")
    return LabelledText(text, pair, None, where)
