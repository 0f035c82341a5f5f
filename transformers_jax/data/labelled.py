"""What all labelled data has in common: its settings, bad examples, and the part that is held out."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from transformers_jax.data.base import Data
from transformers_jax.data.tables import raise_bad

Part = Literal["train", "validation", "all"]
Example = TypeVar("Example")

HELD_OUT_SEED = 0


@dataclasses.dataclass(frozen=True)
class LabelledData(Data):
    """Labelled examples, and which of them are held out."""

    # The comments are the help texts of the command line.

    # What to read: a file, a glob such as 'parts/*.jsonl', a directory, or tfds:NAME[/CONFIG][:SPLIT] for a TensorFlow
    # Datasets set. Several, separated by commas, are read one after the other.
    source: str

    # Examples to evaluate on, written like the source. Unset: a part of the source is held out.
    validation_source: str | None = None

    # The share of the source that is held out if there is no validation source. It does not depend on the seed.
    validation_fraction: float = 0.1

    # Leave out examples that are broken, and say how many. Otherwise the first one ends the run.
    skip_bad: bool = False

    def __post_init__(self):
        if not self.source.strip():
            raise ValueError("source is empty; name a file, a glob, a directory or tfds:NAME")
        if self.validation_source is not None and not self.validation_source.strip():
            raise ValueError("validation_source is empty; name a file, or leave it unset")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; it must be above 0 and below 1")


@dataclasses.dataclass(frozen=True)
class LabelledTextData(LabelledData):
    """Labelled texts, and their tokenizer."""

    # The comments are the help texts of the command line.

    # 'wordpiece' (trained on the text to train on), or the path of an existing tokenizer: a tokenizer.json or
    # vocab.txt, or a directory with one.
    tokenizer: str = "wordpiece"

    # The number of tokens that 'wordpiece' learns. Other tokenizers have their own.
    vocab_size: int = 8000

    # Whether 'wordpiece' ignores case and accents. Other tokenizers have their own rule.
    lowercase: bool = True

    def __post_init__(self):
        super().__post_init__()
        if not self.tokenizer.strip():
            raise ValueError("tokenizer is empty; use wordpiece or the path of one")
        if self.tokenizer == "wordpiece" and self.vocab_size < 16:
            raise ValueError(f"vocab_size is {self.vocab_size}; wordpiece needs at least 16")


class BadExamples:
    """What to do with a bad example, given the message about it: raise, or count."""

    def __init__(self, *, skip: bool):
        self.skipped = 0
        self.first = ""
        self._skip = skip

    def __call__(self, message: str) -> None:
        if not self._skip:
            raise_bad(message)
        self.skipped += 1
        self.first = self.first or message


def read_part(
    data: LabelledData,
    read: Callable[[str, BadExamples], list[Example]],
    *,
    part: Part,
    noun: str,
    group: Callable[[Example], Hashable] | None = None,
) -> list[Example]:
    """The examples that `read` finds in one part of the data: everything in `source` ("all"), what of it is to train
    on, or what is to evaluate on.

    Without a validation source, `validation_fraction` of the examples are held out at random, the same ones whatever
    the seed of a run; both parts keep the order of the files. With `group` (an article, say), the last groups are held
    out instead, `int(groups * (1 - validation_fraction))` remain, and no group is in both parts.

    Says once how many examples were skipped. Raises `ValueError` if a part is empty.
    """
    use_validation = part == "validation" and data.validation_source is not None
    source = str(data.validation_source if use_validation else data.source)
    bad = BadExamples(skip=data.skip_bad)
    examples = read(source, bad)
    if not examples:
        why = f"all {bad.skipped} were skipped; the first: {bad.first}" if bad.skipped else "there are none"
        raise ValueError(f"{source}: no {noun} can be used ({why})")
    if bad.skipped:
        warn_once(f"{bad.skipped:,} of {bad.skipped + len(examples):,} {noun} skipped; the first: {bad.first}")
    if part == "all" or data.validation_source is not None:
        return examples
    held_out = _held_out(examples, data.validation_fraction, group)
    chosen = [example for example, out in zip(examples, held_out, strict=True) if out == (part == "validation")]
    if held_out.all() or not held_out.any():
        of = f"{len(examples)} {noun}" if group is None else f"{len(set(map(group, examples)))} groups of {noun}"
        raise ValueError(
            f"{source}: a validation_fraction of {data.validation_fraction} of {of} leaves none to "
            f"{'train' if held_out.all() else 'evaluate'} on; change it or set validation_source"
        )
    return chosen


def _held_out(examples: Sequence[Any], fraction: float, group: Callable[[Any], Hashable] | None) -> np.ndarray:
    if group is None:
        # RandomState's stream, unlike default_rng's, is promised never to change.
        order = np.random.RandomState(HELD_OUT_SEED).permutation(len(examples))
        places = np.argsort(order)
    else:
        order = {}
        places = np.array([order.setdefault(group(example), len(order)) for example in examples])
    count = len(order)
    return places >= int(round(count * (1 - fraction), 6))  # 10 x (1 - 0.9) is a little less than 1


@functools.cache  # the parts of a source are read one by one
def warn_once(message: str) -> None:
    """Log a warning, but each text a single time."""
    logging.getLogger(__name__).warning("%s", message)
