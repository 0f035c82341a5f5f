"""A trained model with what belongs to it, from a run or a Hugging Face checkpoint."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from transformers_jax.data import Data, ImageProcessor, Tokenizer
from transformers_jax.evaluation import over_all
from transformers_jax.experiment import Experiment
from transformers_jax.pretrained import find_directory, from_pretrained, load_image_processor, save_pretrained
from transformers_jax.runs import FINGERPRINTS, read_description, write_atomically
from transformers_jax.tasks import LOWER_IS_BETTER, Task, task_of
from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.mesh import abstract_on, one_device, sharding_of, shardings
from transformers_jax.training.settings import check_types, from_data, to_data

TASK_FILE = "transformers_jax_task.json"
"""Beside a converted checkpoint: the settings of its task, which transformers' files have no place for."""


PROCESSOR_FOLDERS = {Tokenizer: "tokenizer", ImageProcessor: "image_processor"}
"""Where a run keeps what prepares its inputs."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready for use: the model with its head, what prepares its inputs, its task, and where it is from.

    `experiment`, `step` and `data_fingerprint` (of what it was trained on) are None for a Hugging Face checkpoint.
    """

    model: Any
    processor: Any
    task: Task
    experiment: Experiment | None = None
    step: int | None = None
    data_fingerprint: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes that the model tells apart, in the order of its logits."""
        return self.model.config.labels

    def save_pretrained(self, directory: str | Path) -> None:
        """Write model, processor and task as a Hugging Face checkpoint, which `load` and transformers read."""
        save_pretrained(self.model, directory, processor=self.processor)
        write_atomically(Path(directory) / TASK_FILE, json.dumps(to_data(self.task), indent=1) + "\n")

    def predict(self, inputs: Sequence[Any] | np.ndarray, *, batch_size: int = 32) -> list[dict[str, Any]]:
        """What the model says of each input, as its task writes it: see `predictions` there."""
        picture = isinstance(inputs, np.ndarray) and inputs.ndim == 3 and inputs.shape[2] in (1, 3, 4)
        if picture or isinstance(inputs, str | bytes | Mapping) or not hasattr(inputs, "__len__"):
            raise ValueError("predict takes a list of inputs; put the single one into brackets")
        if len(inputs) == 0:
            return []
        for i, value in enumerate(inputs):
            check_unicode(value, f"input {i}")
        task, config = self.task, self.model.config
        features = task.features(list(inputs), self.processor, config)
        _, rows = self._rows_of(self.model, features.dataset, batch_size)
        return task.predictions(rows, features, config)

    @functools.cached_property  # compiled once for all calls of `predict`
    def _rows_of(self) -> Callable[..., Any]:
        rows = self.task.rows
        return over_all(lambda model, batch: ({}, rows(model, batch)), one_device())


def evaluate(
    loaded: Loaded, data: Data | None = None, *, batch_size: int = 8, report: str | Path | None = None
) -> dict[str, float]:
    """Metrics of a loaded model over the held-out part of `data`, or of what its run was trained on.

    `report` is a directory to write into what the task shows of it: the confusion matrix, the worst mistakes.
    """
    given = True
    if data is None:
        if loaded.experiment is None:
            raise ValueError("a Hugging Face checkpoint has no held-out data of its own; name some")
        data = loaded.experiment.data
        given = False
    config = loaded.model.config
    examples = loaded.task.prepare(data, config, loaded.processor, training=False)
    if report is not None:  # before the work, so that one that cannot be written costs nothing
        if type(loaded.task).report is Task.report:
            raise ValueError(f"{type(loaded.task).__name__} writes no report")
        Path(report).mkdir(parents=True, exist_ok=True)
    if not given and examples.fingerprint != loaded.data_fingerprint:
        # Its held-out part may be text that the model was trained on.
        raise ValueError(f"{FINGERPRINTS['data']}; name the data to evaluate on")
    over = over_all(loaded.task.evaluate, one_device())
    totals, rows = over(loaded.model, examples.validation, batch_size)
    if report is not None:
        loaded.task.report(rows, examples.extra, config, Path(report))
    return loaded.task.finish(totals, rows, examples.extra, config)


def load(
    directory: str | Path,
    *,
    which: Literal["best", "latest"] | int = "best",
    dtype: str | None = None,
    mesh: Mesh | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Loaded:
    """The model in `directory`, with tokenizer and task: a run's working directory, or a Hugging Face checkpoint, which
    may also be a name on the hub.

    `which` picks a run's checkpoint by evaluation, by age or by step. `dtype` computes in another type; `mesh` loads
    onto its devices. `settings` changes fields of the task: `{"no_answer": True}`.
    """
    loaded = _load(directory, which, dtype, mesh)
    if not settings:
        return loaded
    known = [field.name for field in dataclasses.fields(loaded.task)]
    if unknown := sorted(set(settings) - set(known)):
        name = type(loaded.task).__name__
        raise ValueError(f"{name} has no setting {', '.join(unknown)}; there are {', '.join(known) or 'none'}")
    check_types(type(loaded.task), settings)
    return dataclasses.replace(loaded, task=from_data(to_data(loaded.task) | dict(settings), Task))


def check_unicode(value: Any, where: str) -> None:
    """ValueError for a text, or one inside `value`, with half of a surrogate pair, which no tokenizer accepts."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where} is not valid Unicode: {value!r:.60}") from None
    elif isinstance(value, Mapping):
        check_unicode(list(value.values()), where)
    elif isinstance(value, list | tuple):
        for item in value:
            check_unicode(item, where)


def _load(directory: str | Path, which: Any, dtype: str | None, mesh: Mesh | None) -> Loaded:
    if (Path(directory) / "experiment.json").exists():
        return _load_run(Path(directory).absolute(), which, dtype, mesh)
    if Path(directory).is_dir() and not (Path(directory) / "config.json").exists():
        raise FileNotFoundError(
            f"{directory} has neither experiment.json (a run) nor config.json (a Hugging Face checkpoint)"
        )
    return _load_pretrained(directory, dtype, mesh)


def _load_run(directory: Path, which: Any, dtype: str | None, mesh: Mesh | None) -> Loaded:
    description = read_description(directory)
    experiment = from_data(description["experiment"], Experiment)
    config = experiment.model if dtype is None else dataclasses.replace(experiment.model, dtype=dtype)
    model = jax.eval_shape(lambda: experiment.task.build(config, rngs=nnx.Rngs(0)))
    model = abstract_on(model, shardings(model, one_device() if mesh is None else mesh))
    _, checkpointer = checkpoints_of(experiment, directory)
    try:
        part = "model" if experiment.training.ema is None else "ema"
        step, model, _ = checkpointer.restore(which, model, part=part)
    finally:
        checkpointer.close()
    return Loaded(model, processor_of_run(directory), experiment.task, experiment, step, description["data"])


def processor_of_run(directory: Path) -> Any:
    for kind, folder in PROCESSOR_FOLDERS.items():
        if (directory / folder).is_dir():
            return kind.load(directory / folder)
    raise FileNotFoundError(f"{directory} has none of {', '.join(PROCESSOR_FOLDERS.values())}; copy the whole run")


def checkpoints_of(experiment: Experiment, workdir: Path) -> tuple[str, Checkpointer]:
    """The metric that decides which checkpoint of a run is the best, and its checkpoints."""
    metric = experiment.training.metric or experiment.task.metric
    mode = "min" if metric in LOWER_IS_BETTER else "max"
    return metric, Checkpointer(workdir / "checkpoints", best_metric=f"eval/{metric}", best_mode=mode)


def _load_pretrained(source: str | Path, dtype: str | None, mesh: Mesh | None) -> Loaded:
    directory = find_directory(source)
    placed = None if mesh is None else functools.partial(sharding_of, mesh=mesh)
    processor, changes = load_image_processor(directory), {} if dtype is None else {"dtype": dtype}
    if processor is not None and processor.palette is None:
        changes |= {"image_mean": processor.mean, "image_std": processor.std}
    model = from_pretrained(directory, shardings=placed, changes=changes)
    task = task_of(model)
    if (directory / TASK_FILE).is_file():  # written by `convert`
        written = from_data(json.loads((directory / TASK_FILE).read_text()), Task)
        task = written if type(written) is type(task) else task
    return Loaded(model, Tokenizer.load(directory) if processor is None else processor, task)
