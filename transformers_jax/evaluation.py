"""Metrics of a model over a whole set, each example counted once."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from transformers_jax.data import evaluation_batches
from transformers_jax.models import ModelConfig
from transformers_jax.tasks import Examples, Task
from transformers_jax.training.distributed import compiled_together, exchange, share_of_batch, whole
from transformers_jax.training.mesh import batch_sharding, on_mesh, put_batch


def make_evaluate(
    task: Task,
    examples: Examples,
    mesh: Mesh,
    batch_size: int,
    *,
    config: ModelConfig,
    num_threads: int = 1,
    processes: int = 0,
) -> Callable[[Any], dict[str, float]]:
    """A function from a model to its metrics over all of `examples.validation`, each example counted once."""
    over = over_all(task.evaluate, mesh, num_threads=num_threads, processes=processes)

    def evaluate(model: Any) -> dict[str, float]:
        totals, rows = over(model, examples.validation, batch_size)
        metrics = task.finish(totals, rows, examples.extra, config)
        if jax.process_count() == 1:
            return metrics
        return exchange({name: float(value) for name, value in metrics.items()})[0]  # they decide what all do next

    return evaluate


def over_all(
    function: Callable[[Any, Any], tuple[dict[str, Any], dict[str, Any]]],
    mesh: Mesh,
    *,
    num_threads: int = 1,
    processes: int = 0,
) -> Callable[..., Any]:
    """From `function(model, batch) -> (sums, arrays with a row for each example)` to `(model, dataset, batch_size) ->
    (totals, rows in the order of the examples)`, compiled once a shape."""
    step, spread = compiled_together(jax.jit(on_mesh(function, mesh))), batch_sharding(mesh)

    def over(model: Any, dataset: Any, batch_size: int) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
        totals: dict[str, float] = {}
        rows: list[Any] = [None] * len(dataset)
        pending: list[Any] = []

        def settle(leave: int) -> None:
            while len(pending) > leave:
                (sums, arrays), numbers = pending.pop(0)
                for name, value in sums.items():
                    totals[name] = totals.get(name, 0.0) + float(value)
                arrays = {name: whole(array) for name, array in arrays.items()}
                for place, number in enumerate(whole(numbers)):
                    if number >= 0:
                        rows[number] = {name: np.asarray(array[place]) for name, array in arrays.items()}

        part, parts = share_of_batch(mesh)
        mine = dict(process_index=part, process_count=parts)
        ahead = dict(num_threads=num_threads, processes=processes)
        for batch in evaluation_batches(dataset, batch_size=batch_size, **mine, **ahead):
            batch = put_batch(batch, spread)
            numbers = batch.pop("example")
            pending.append((step(model, batch), numbers))
            settle(leave=2)
        settle(leave=0)
        return totals, rows

    return over
