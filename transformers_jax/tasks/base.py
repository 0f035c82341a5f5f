"""What a task is: one objective, from examples to loss, metrics and predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grain
import jax
from flax import nnx

from transformers_jax.data import Data


@dataclass(frozen=True)
class Examples:
    """Data made ready for a task: examples are dicts of NumPy arrays without a batch axis.

    `processor` turns raw inputs into arrays and travels with the checkpoint (a tokenizer): it has a `fingerprint` and
    `save(directory)`. `fingerprint` identifies the data and its processing; `facts` are lines for the summary at the
    start; `extra` is what the task needs to finish its metrics (bytes of the held-out text, label names).
    """

    train: grain.MapDataset | None
    validation: grain.MapDataset
    processor: Any
    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """Base of the tasks. A task is settings and pure functions; a subclass defines all of these."""

    def prepare(self, data: Data, config: Any, processor: Any = None, *, training: bool = True) -> Examples:
        """Read `data` into examples for a model of `config`; `processor` is used instead of a new one when given.

        Without `training` only the held-out part is needed, and `train` may be None.
        """
        raise NotImplementedError

    def configure(self, config: Any, processor: Any) -> Any:
        """`config` completed by what the data decides (size of the vocabulary, labels), or a ValueError."""
        raise NotImplementedError

    def build(self, config: Any, *, rngs: nnx.Rngs) -> nnx.Module:
        """The model with this task's head."""
        raise NotImplementedError

    def loss(self, model: Any, batch: Any, *, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """The loss of a batch as (sum, weight)."""
        raise NotImplementedError

    def metric_sums(self, model: Any, batch: Any) -> dict[str, jax.Array]:
        """Sums and weights over a batch, without randomness; `finish` makes metrics of their totals."""
        raise NotImplementedError

    def finish(self, totals: Mapping[str, float], extra: Mapping[str, Any]) -> dict[str, float]:
        """Metrics by name, "loss" among them, from the totals over all held-out data."""
        raise NotImplementedError

    def items_per_example(self, config: Any) -> int:
        """What one example counts for in rates: its tokens."""
        raise NotImplementedError

    def sample(self, model: Any, processor: Any, *, seed: int = 0) -> str | None:
        """Something the model made, for a person to look at after training; None if there is nothing to show."""
        return None
