"""Class labels: numbers for their names, by the names alone."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

NUMBER = re.compile(r"[+-]?\d+")


@dataclass(frozen=True)
class LabelNames:
    """The classes of a model in the order of its logits, found by name whatever the order in a file.

    A name that differs in case only is found too, if no two classes do. Names that say nothing, LABEL_0, LABEL_1, ...
    (transformers' defaults), are also found by their number.
    """

    names: tuple[str, ...]
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        numbers = {name: i for i, name in enumerate(self.names)}
        lowered = Counter(name.casefold() for name in self.names)
        numbers = {name.casefold(): i for name, i in numbers.items() if lowered[name.casefold()] == 1} | numbers
        if all(name == f"LABEL_{i}" for i, name in enumerate(self.names)):
            numbers |= {str(i): i for i in range(len(self.names))}
        object.__setattr__(self, "_numbers", numbers)

    @classmethod
    def of(cls, found: Iterable[str]) -> "LabelNames":
        """Those that occur, sorted: whole numbers by value, everything else by character."""
        names = set(found)
        if all(NUMBER.fullmatch(name) for name in names):
            return cls(tuple(sorted(names, key=lambda name: (int(name), name))))
        return cls(tuple(sorted(names)))

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: str, where: str) -> int:
        """The class called `name`; ValueError naming `where` it stands if there is none."""
        number = self._numbers.get(name, self._numbers.get(name.casefold()))
        if number is None:
            known = ", ".join(self.names[:20]) + (", ..." if len(self.names) > 20 else "")
            raise ValueError(f"{where}: the label {name!r} is none of those the model has: {known}")
        return number

    def check_all_occur(self, numbers: Iterable[int], source: str) -> None:
        """ValueError if a class has no example, or if there is only one class."""
        if len(self.names) < 2:
            only = ", ".join(self.names)
            raise ValueError(f"{source}: all examples have the label {only!r}; there is nothing to learn")
        counts = Counter(numbers)
        if missing := [name for i, name in enumerate(self.names) if not counts[i]]:
            raise ValueError(
                f"{source}: no example to train on has the label {', '.join(map(repr, missing))} of the checkpoint; "
                "set task.new_head to start a head for the labels of the data"
            )


def show_counts(names: LabelNames, numbers: Iterable[int]) -> str:
    """`2 classes: neg 3,310, pos 3,610`."""
    counts = Counter(numbers)
    shown = ", ".join(f"{name} {counts[i]:,}" for i, name in enumerate(names.names[:10]))
    return f"{len(names)} classes: {shown}" + (", ..." if len(names) > 10 else "")


def class_weights(setting: str, names: LabelNames, numbers: Sequence[int]) -> np.ndarray:
    """A weight for each class: "balanced" (examples / (classes * examples of the class), as scikit-learn's; 0 for a
    class without any), or "NAME=WEIGHT,..." with 1 for the others."""
    if setting == "balanced":
        counts = np.bincount(numbers, minlength=len(names))
        weights = len(numbers) / (len(names) * np.maximum(counts, 1))
        return np.where(counts > 0, weights, 0.0).astype(np.float32)
    weights = np.ones(len(names), np.float32)
    for part in setting.split(","):
        name, equals, value = part.rpartition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if not equals or not 0 <= weight < float("inf"):
            raise ValueError(f"task.class_weights: {part!r} is not NAME=WEIGHT with a weight of 0 or more")
        weights[names.number(name.strip(), "task.class_weights")] = weight
    if not weights.any():
        raise ValueError(f"task.class_weights={setting!r} leaves no class to learn")
    return weights
