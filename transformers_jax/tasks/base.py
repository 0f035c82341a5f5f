"""What a task is: one objective, from examples to loss, metrics and predictions."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import grain
import jax
import numpy as np
from flax import nnx

from transformers_jax.data import (
    IGNORED_LABEL,
    Data,
    LabelledData,
    LabelledTextData,
    Ragged,
    Tokenizer,
    TranslationData,
    evaluation_batches,
)
from transformers_jax.data.labelled import warn_once

T = TypeVar("T")
R = TypeVar("R")

Row = Mapping[str, np.ndarray]
"""What a model says of one example: arrays without a batch axis, filled up as the example was in its batch."""

LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte", "bits_per_pixel", "mean_squared_error")
"""Metrics of which less is better; of all others more."""


@dataclass(frozen=True)
class Examples:
    """Data made ready for a task: examples are dicts of NumPy arrays without a batch axis.

    `processor` turns raw inputs into arrays and travels with the checkpoint (a tokenizer, or an image processor): it
    has a `fingerprint` and `save(directory)`. `fingerprint` identifies the data and its processing; `facts` are lines
    for the summary at the start; `labels` are the names of the classes, `items_per_example` what one example counts for
    in rates, in `item`s (its tokens, or one image); `extra` is what the task needs to finish its metrics (bytes of the
    held-out text, the right answers) and for its report.
    """

    train: grain.MapDataset | Ragged | None
    validation: grain.MapDataset | Ragged
    processor: Any
    fingerprint: str
    items_per_example: int
    item: str = "tokens"
    labels: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Features:
    """Raw inputs made ready for a model. `extra` is what the task needs to turn the model's rows into predictions."""

    dataset: grain.MapDataset | Ragged
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Base of the tasks. A task is settings and pure functions."""

    head: ClassVar[type[nnx.Module] | None]
    """The head of the models of this task; None: the bare model."""
    data: ClassVar[type[Data] | None]
    """The kind of data it reads; None: it only predicts."""

    @property
    def metric(self) -> str:
        """The metric that decides which checkpoint is the best."""
        return "loss"

    def prepare(
        self, data: Any, config: Any, processor: Any = None, *, seed: int = 0, training: bool = True
    ) -> Examples:
        """Read `data` into examples for a model of `config`.

        `processor`, and labels in `config`, are used instead of new ones when given: the ones of a checkpoint. `seed`
        decides what is random in the training examples. Without `training` only the held-out part is needed, and
        `train` may be None.
        """
        raise NotImplementedError

    def configure(self, config: Any, examples: Examples) -> Any:
        """`config` completed by what the data decides (size of the vocabulary, labels), or a ValueError."""
        return with_tokenizer(config, examples.processor)

    def build(self, config: Any, *, rngs: nnx.Rngs) -> Any:
        """The model with this task's head."""
        head: Any = self.head
        return head(config.for_head(head).build(rngs=rngs), rngs=rngs)

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The loss of a batch as (sum, weight)."""
        raise NotImplementedError

    def abstract_batch(self, config: Any, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What `loss` takes, without values: a batch of the longest examples there can be for a model of `config`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its batches look like")

    def evaluate(self, model: Any, batch: Any) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        """Sums and weights over a batch, and arrays with a row for each example: `finish` makes metrics of them."""
        raise NotImplementedError

    def finish(
        self, totals: Mapping[str, float], rows: Sequence[Row], extra: Mapping[str, Any], config: Any
    ) -> dict[str, float]:
        """Metrics by name, "loss" among them, from the totals and the rows over all held-out examples."""
        raise NotImplementedError

    def report(self, rows: Sequence[Row], extra: Mapping[str, Any], config: Any, directory: Path) -> list[Path]:
        """Write what a person wants to see of an evaluation into `directory`; gives the files."""
        raise ValueError(f"{type(self).__name__} writes no report")

    def scoring_rule(self) -> str | None:
        """What a reader of the metrics has to know, if their names do not say it."""
        return None

    input_columns: ClassVar[tuple[str, ...]] = ("text",)
    """What an input of `predict` consists of where inputs are rows of a table."""

    def input_files(self, name: str) -> list[str] | None:
        """The inputs that `name` stands for where a file is an input itself, as a picture is; None where a file holds
        inputs."""
        return None

    def located(self, value: Any, folder: Path) -> Any:
        """An input that stands in a file in `folder`, whose paths, if it has any, start there."""
        return value

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        """ValueError or FileNotFoundError naming `where` unless `value` is an input that `features` reads; with `full`,
        whatever time it takes to tell."""
        raise ValueError(f"{type(self).__name__} makes no predictions")

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """What `predict` asks a model about; a ValueError names the input that it cannot read."""
        raise ValueError(f"{type(self).__name__} makes no predictions")

    def rows(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """What the model says of each example of a batch of `features`."""
        raise NotImplementedError

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """One JSON-able prediction for each input, in their order."""
        raise NotImplementedError

    def predict_one(self, model: Any, value: Any, processor: Any) -> dict[str, Any]:
        """What `model` says of a single input."""
        features = self.features([value], processor, model.config)
        (batch,) = evaluation_batches(features.dataset, batch_size=1)
        batch.pop("example")
        rows = jax.tree.map(lambda array: np.asarray(array)[0], jax.jit(self.rows)(model, batch))
        (prediction,) = self.predictions([rows], features, model.config)
        return prediction

    def sample(self, model: Any, processor: Any, *, seed: int = 0) -> str | None:
        """Something the model made, for a person to look at after training; None if there is nothing to show."""
        return None


@runtime_checkable
class Vocabulary(Protocol):
    """What a model's configuration takes over from a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    @property
    def pad_id(self) -> int | None: ...


def with_tokenizer(config: Any, tokenizer: Vocabulary, **changes: Any) -> Any:
    """`config` with the tokenizer's vocabulary and special ids; ValueError if the vocabulary is too small for it."""
    size, limit = tokenizer.vocab_size, config.vocab_size
    if limit is not None and size > limit:
        raise ValueError(
            f"the tokenizer has {size} tokens but model.vocab_size is {limit}; "
            f"raise it, or set it to None to take the tokenizer's"
        )
    ids = dict(bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
    return replace(config, vocab_size=size if limit is None else limit, **ids, **changes)


def make_tokenizer(data: LabelledTextData, texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that labelled data names: one trained on `texts`, or one from a file."""
    if data.tokenizer == "wordpiece":
        return Tokenizer.train_wordpiece(texts, vocab_size=data.vocab_size, lowercase=data.lowercase)
    return Tokenizer.load(data.tokenizer)


def tokenizer_fact(data: LabelledTextData | TranslationData, tokenizer: Tokenizer, *, given: bool) -> str:
    """The tokenizer in a line: `given` is that of a checkpoint, not the one that the data names."""
    return f"{tokenizer.vocab_size:,} tokens, " + ("of the checkpoint" if given else data.tokenizer)


def fingerprint(content: Any) -> str:
    """SHA-256 of JSON-able content."""
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode("utf-8", "surrogatepass")).hexdigest()


def usable(
    data: LabelledData, examples: Sequence[T], convert: Callable[[T], R], *, noun: str
) -> tuple[list[T], list[R]]:
    """The examples that `convert` takes, and what it makes of them.

    Where it raises ValueError, which names the place, the example is left out with `data.skip_bad`, and how many were
    is logged; otherwise the first error ends it. None left is an error, too.
    """
    kept, converted, errors = [], [], []
    for example in examples:
        try:
            converted.append(convert(example))
        except ValueError as error:
            if not data.skip_bad:
                raise ValueError(f"{error}; data.skip_bad leaves such {noun} out") from None
            errors.append(str(error))
        else:
            kept.append(example)
    if errors:
        warn_once(f"{len(errors):,} of {len(examples):,} {noun} skipped; the first: {errors[0]}")
        if not kept:
            raise ValueError(f"{data.source}: no {noun} can be used; the first: {errors[0]}")
    return kept, converted


def model_inputs(config: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of a batch that go into the model: ids, mask, which text of a packed row they are of, and, where the
    model tells segments apart, their types."""
    names = ["input_ids", "attention_mask", "segment_ids"]
    if getattr(config, "token_types", 0) > 1:
        names.append("token_type_ids")
    return {name: batch[name] for name in names if name in batch}


def abstract_arrays(batch_size: int, **shapes: Sequence[int]) -> dict[str, jax.ShapeDtypeStruct]:
    """int32 arrays without values, each with a first axis of `batch_size`."""
    return {name: jax.ShapeDtypeStruct((batch_size, *shape), np.int32) for name, shape in shapes.items()}


def abstract_texts(batch_size: int, length: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """What a batch of `ragged` texts of this length, or of packed rows, holds beside labels."""
    mask = "segment_ids" if packed else "attention_mask"
    return abstract_arrays(batch_size, input_ids=[length], token_type_ids=[length], **{mask: [length]})


def text_length(length: int | None, config: Any, name: str = "task.length") -> int:
    """`length`, or the longest that the model takes."""
    if length is None:
        return config.max_length
    if not 1 <= length <= config.max_length:
        raise ValueError(
            f"{name}={length} must be between 1 and model.max_length={config.max_length} (which is a checkpoint's, if "
            "the model starts from one, unless model.resize_positions is set)"
        )
    return length


def ragged(
    examples: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, max_length: int, *, token_labels: bool = False
) -> Ragged:
    """A dataset of encoded texts: dicts with `input_ids`, `token_type_ids` and whatever else the task adds.

    With `token_labels` the `labels` have one value a token, and are filled up with -100.
    """
    padding = {"input_ids": tokenizer.pad_id or 0, "token_type_ids": 0}
    if token_labels:
        padding["labels"] = IGNORED_LABEL
    lengths = np.array([len(example["input_ids"]) for example in examples], np.int32)
    return Ragged(grain.MapDataset.source(examples), lengths, max_length, padding)
