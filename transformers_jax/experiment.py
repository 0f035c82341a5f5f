"""An experiment: a task, a model, data and training put together; running one, and loading what it made."""

import dataclasses
import functools
import importlib.util
import json
import logging
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformers_jax.data import Data, ImageProcessor, Tokenizer, evaluation_batches, token_budget, training_batches
from transformers_jax.models import ModelConfig
from transformers_jax.nn import stacked_mask
from transformers_jax.pretrained import find_directory, from_pretrained, load_image_processor, save_pretrained
from transformers_jax.runs import (
    FINGERPRINTS,
    alone_in,
    check_same_examples,
    check_same_run,
    check_same_start,
    describe,
    description_of_run,
    read_description,
    write_atomically,
)
from transformers_jax.tasks import LOWER_IS_BETTER, Examples, Task, task_of
from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.chips import chip_of
from transformers_jax.training.distributed import (
    compiled_together,
    exchange,
    first,
    in_turn,
    note_saved,
    share_of_batch,
    whole,
)
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import Progress, StepWork, TrainingConfig, train
from transformers_jax.training.mesh import (
    AnyMesh,
    MeshConfig,
    batch_sharding,
    check_batch,
    make_mesh,
    on_mesh,
    one_device,
    put_batch,
    sharding_of,
    shardings,
)
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule, trained_part
from transformers_jax.training.paths import named_leaves, with_leaves
from transformers_jax.training.settings import check_types, from_data, to_data
from transformers_jax.training.state import TrainState, count_parameters
from transformers_jax.training.step import make_train_step

logger = logging.getLogger("transformers_jax")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a training run. Each field can be set from the command line."""

    task: Task
    model: ModelConfig
    data: Data
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    initial_checkpoint: str | None = None
    """A run or Hugging Face checkpoint to start from: its weights, tokenizer and sizes replace those of the config. A
    head of the task's kind goes on, for the same labels (or task.new_head starts another); otherwise a new one starts.
    """
    seed: int = 0
    """Decides initial weights, the order of the examples, and dropout."""

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


TASK_FILE = "transformers_jax_task.json"
"""Beside a converted checkpoint: the settings of its task, which transformers' files have no place for."""

LARGEST_SAMPLED = 1 << 32
"""Bytes of a model that many processes gather in process 0 to show a sample of what it makes; `generate` and `predict`
show it of a larger one."""

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
        return _over_all(lambda model, batch: ({}, rows(model, batch)), one_device())


@dataclass(frozen=True)
class RunResult:
    """The trained `state`, why training `ended`, the last `evaluation`, and a `sample` of what the model makes."""

    state: TrainState
    ended: str
    evaluation: Mapping[str, float]
    sample: str | None


def run(experiment: Experiment, workdir: str | Path) -> RunResult:
    """Train, or continue the training that `workdir` holds.

    A run is continued from its newest good checkpoint, bit for bit. Settings, data or tokenizer other than those it was
    started with are a ValueError that lists the differences, except for what `CHANGEABLE` names.

    Many processes (`training.distributed.together`) call it alike and share `workdir`. Process 0 writes and prints, and
    only its result has a `sample`.
    """
    workdir = Path(workdir).absolute()
    check_same_start(experiment)
    with alone_in(workdir):
        return _run(experiment, workdir)


def _run(experiment: Experiment, workdir: Path) -> RunResult:
    task, mesh = experiment.task, make_mesh(experiment.mesh)
    check_batch(experiment.training.batch_size, experiment.training.accumulation, mesh)
    if experiment.training.eval_batch_size is not None:
        check_batch(experiment.training.eval_batch_size, 1, mesh, name="eval_batch_size")

    metric, checkpointer = _checkpoints(experiment, workdir)
    begun = description_of_run(checkpointer)
    if begun is not None:  # with the settings that are newer than the run
        begun = begun | {"experiment": to_data(from_data(begun["experiment"], Experiment))}
    initial, config, processor = None, experiment.model, None
    if experiment.initial_checkpoint is not None:
        if begun is None:
            initial = load(experiment.initial_checkpoint, mesh=mesh)
            config, processor = initial.model.config, initial.processor
            if not _goes_on(initial, task):
                config = dataclasses.replace(config, labels=(), problem_type=None)
        else:  # all that is needed of it is in the run by now
            config = from_data(begun["experiment"]["model"], ModelConfig)
            processor = _processor_of_run(workdir)
        config = config.with_run_fields(experiment.model)
    examples = in_turn(lambda: task.prepare(experiment.data, config, processor, seed=experiment.seed))
    assert examples.train is not None  # it was asked for
    check_same_examples(examples)
    config = task.configure(config, examples)
    training = experiment.training
    training = training.resolved(len(examples.train), batches=_batches_of_an_epoch(training, examples.train))
    experiment = dataclasses.replace(experiment, model=config, training=training)
    program = make_program(experiment, mesh)
    model, placed = program.model, program.placed

    description = describe(experiment, examples)
    changes = [] if begun is None else check_same_run(begun, description, workdir)
    logger = MetricsLogger(workdir, total_steps=training.steps)
    restored = checkpointer.restore_latest(_abstract_with(program.state, placed))
    if restored is None:
        start, meta = 0, {}
        if initial is not None:
            state = compiled_together(jax.jit(program.create, out_shardings=placed))(
                _continue_from(initial, model, program.build, mesh, same_head=_goes_on(initial, task))
            )
            del initial  # its weights
        else:
            state = compiled_together(jax.jit(program.create, out_shardings=placed))()
    else:
        start, state, meta = restored
        note_saved(start)
    write_atomically(workdir / "experiment.json", json.dumps(description, indent=1) + "\n")
    if jax.process_index() == 0:
        examples.processor.save(workdir / PROCESSOR_FOLDERS[type(examples.processor)])
    logger.truncate(start)
    work = _work(experiment, examples, mesh)
    logger.print_summary(_summary(experiment, examples, mesh, work, state.model, start, workdir))
    for change in changes:
        logger.print(f"changed since the run began: {change}")
    if start >= training.steps:
        logger.print(f"nothing to train: the run has made {start} of {training.steps} steps")

    part, parts = share_of_batch(mesh)
    host_batches = training_batches(
        examples.train,
        batch_size=training.batch_size,
        seed=experiment.seed,
        start_step=start,
        process_index=part,
        process_count=parts,
        num_threads=training.data_workers,
        prefetch=training.prefetch,
        processes=training.data_processes,
        group_by_length=training.group_by_length,
        batch_tokens=training.batch_tokens,
    )
    rows = batch_sharding(mesh)
    result = train(
        state,
        compiled_together(program.jit_step()),
        (put_batch(batch, rows) for batch in host_batches),
        config=training,
        start_step=start,
        progress=Progress(**meta["progress"]) if "progress" in meta else None,
        evaluate=make_evaluate(
            task,
            examples,
            mesh,
            training.eval_batch_size or training.batch_size,
            config=config,
            num_threads=training.data_workers,
            processes=training.data_processes,
        ),
        metric=metric,
        maximize=metric not in LOWER_IS_BETTER,
        checkpointer=checkpointer,
        logger=logger,
        meta={"description": description},
        work=work,
    )
    checkpointer.close()
    logger.close()
    sample = None
    if result.ended != "interrupted" and (model := _on_one_device(result.state.averaged)) is not None:
        sample = task.sample(model, examples.processor, seed=experiment.seed)
    return RunResult(result.state, result.ended, result.evaluation, sample)


@dataclass(frozen=True)
class Program:
    """What a run computes, by its settings and mesh alone. Nothing is built yet: `model` and `state` are abstract."""

    build: Callable[[], Any]
    """The model with its head."""
    create: Callable[..., TrainState]
    """The first state, of a new model or of the one given."""
    step: Callable[[TrainState, Any], tuple[TrainState, Any]]
    """One update, `step(state, batch) -> (state, metrics)`."""
    model: Any
    state: Any
    placed: Any
    """Where each array of the state lies."""
    mesh: AnyMesh

    def jit_step(self) -> Any:
        """The step to be compiled once: it keeps the state where it lies, and overwrites the one it is given."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        return jax.jit(on_mesh(self.step, self.mesh), out_shardings=(self.placed, whole), donate_argnums=0)


def make_program(experiment: Experiment, mesh: AnyMesh, *, axis_name: str | None = None) -> Program:
    """The program of an experiment whose model is configured (`Task.configure`) and whose training is in steps. With
    `axis_name` its step is to run under `jax.pmap` or `jax.shard_map` over that axis."""
    task, config, training = experiment.task, experiment.model, experiment.training

    def build() -> Any:
        return task.build(config, rngs=nnx.Rngs(experiment.seed))

    model = jax.eval_shape(build)
    stacked = stacked_mask(model)
    optimizer = make_optimizer(experiment.optimizer, training.steps, model, stacked=stacked)

    def create(model: Any = None) -> TrainState:
        ema = training.ema is not None
        return TrainState.create(build() if model is None else model, optimizer, ema=ema)

    step = make_train_step(
        task.loss,
        optimizer,
        schedule=make_schedule(experiment.optimizer, training.steps),
        seed=experiment.seed,
        accumulation=training.accumulation,
        axis_name=axis_name,
        ema=training.ema,
        trained=trained_part(experiment.optimizer, model, stacked=stacked),
    )
    state = jax.eval_shape(create)
    return Program(build, create, step, model, state, shardings(state, mesh), mesh)


def run_seeds(experiment: Experiment, workdir: str | Path, seeds: Sequence[int]) -> dict[str, Any]:
    """`run` with each of `seeds`, in `workdir/seed-N`; what was interrupted is continued, what is done is not repeated.

    Gives `{"seeds": [...], "eval/NAME": {"mean", "std", "values"}}` of the last evaluations (the sample standard
    deviation, None for one seed), and writes it to `workdir/seeds.json`.
    """
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds {list(seeds)} must be different numbers, at least one")
    workdir = Path(workdir).absolute()
    last: list[dict[str, float]] = []
    for seed in seeds:
        directory = workdir / f"seed-{seed}"
        if run(dataclasses.replace(experiment, seed=seed), directory).ended == "interrupted":
            raise KeyboardInterrupt
        last.append(first(functools.partial(_last_evaluation, directory)))
    summary: dict[str, Any] = {"seeds": list(seeds)}
    for name in (name for name in last[0] if name.startswith("eval/")):
        values = [line[name] for line in last]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[name] = {"mean": statistics.mean(values), "std": deviation, "values": values}
    write_atomically(workdir / "seeds.json", json.dumps(summary, indent=1) + "\n")
    return summary


def _last_evaluation(directory: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if any(name.startswith("eval/") for name in line)][-1]


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
    over = _over_all(loaded.task.evaluate, one_device())
    totals, rows = over(loaded.model, examples.validation, batch_size)
    if report is not None:
        loaded.task.report(rows, examples.extra, config, Path(report))
    return loaded.task.finish(totals, rows, examples.extra, config)


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
    over = _over_all(task.evaluate, mesh, num_threads=num_threads, processes=processes)

    def evaluate(model: Any) -> dict[str, float]:
        totals, rows = over(model, examples.validation, batch_size)
        metrics = task.finish(totals, rows, examples.extra, config)
        if jax.process_count() == 1:
            return metrics
        return exchange({name: float(value) for name, value in metrics.items()})[0]  # they decide what all do next

    return evaluate


def _over_all(
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


def _on_one_device(model: Any) -> Any:
    """A model that lies over many processes, for process 0 alone; None in the others, and where it is too large."""
    if jax.process_count() == 1:
        return model
    if sum(leaf.nbytes for leaf in jax.tree.leaves(model)) > LARGEST_SAMPLED:
        return None
    model = jax.tree.map(whole, model)
    return jax.device_put(model, jax.local_devices()[0]) if jax.process_index() == 0 else None


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
    model = _abstract_with(model, shardings(model, one_device() if mesh is None else mesh))
    _, checkpointer = _checkpoints(experiment, directory)
    try:
        part = "model" if experiment.training.ema is None else "ema"
        step, model, _ = checkpointer.restore(which, model, part=part)
    finally:
        checkpointer.close()
    return Loaded(model, _processor_of_run(directory), experiment.task, experiment, step, description["data"])


def _processor_of_run(directory: Path) -> Any:
    for kind, folder in PROCESSOR_FOLDERS.items():
        if (directory / folder).is_dir():
            return kind.load(directory / folder)
    raise FileNotFoundError(f"{directory} has none of {', '.join(PROCESSOR_FOLDERS.values())}; copy the whole run")


def _checkpoints(experiment: Experiment, workdir: Path) -> tuple[str, Checkpointer]:
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


def load_config(name: str) -> Experiment:
    """The experiment of a config file: a path, or the name of a config that comes with the package."""
    path = Path(name)
    if not path.is_file():
        known = {file.stem: file for folder in _config_folders() for file in sorted(folder.glob("*.py"))}
        if path.stem not in known or path.parent != Path("."):
            raise FileNotFoundError(f"no config {name!r}; give a path, or one of {', '.join(known)}")
        path = known[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        experiment = module.experiment() if hasattr(module, "experiment") else None
    except Exception as error:  # whatever the file does wrong
        raise ValueError(f"config {path}: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{path} must define a function experiment() that returns an Experiment")
    return experiment


def _abstract_with(tree: Any, placed: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)


def _goes_on(initial: Loaded, task: Task) -> bool:
    """Whether the head of a checkpoint is what a task starts from."""
    return type(initial.model) is task.head and not getattr(task, "new_head", False)


def _continue_from(initial: Loaded, model: Any, build: Callable[[], Any], mesh: Mesh, *, same_head: bool) -> Any:
    """The abstract `model` with the parameters of a checkpoint in its types, and new ones where its head is another.

    What is new and what is left out is logged; it can only be the head, and the pooler below it.
    """
    held = model.config.carry_over(named_leaves(initial.model), initial.model.config)
    if not hasattr(initial.model, "backbone"):
        held = {f"backbone.{name}": leaf for name, leaf in held.items()}
    wanted = named_leaves(model)

    def of_head(name: str) -> bool:
        return not name.startswith("backbone.") or name.startswith("backbone.pooler.")

    if not same_head:
        held = {name: leaf for name, leaf in held.items() if name.startswith("backbone.")}
    new = [name for name in wanted if name not in held]
    left = [name for name in held if name not in wanted]
    wrong = [name for name in (*new, *left) if not of_head(name)] + [
        f"{name} {held[name].shape} -> {leaf.shape}"
        for name, leaf in wanted.items()
        if name in held and held[name].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(f"the checkpoint does not fit the model in {', '.join(wrong)}")
    fresh = {}
    if new:
        logger.warning("new parameters, not in the checkpoint: %s", ", ".join(new))
        placed = {name: sharding_of(name, wanted[name], mesh) for name in new}
        fresh = jax.jit(lambda: {name: named_leaves(build())[name] for name in new}, out_shardings=placed)()
    if left:
        logger.warning("parameters of the checkpoint that are left out: %s", ", ".join(left))
    return with_leaves(
        model, {name: (fresh if name in fresh else held)[name].astype(leaf.dtype) for name, leaf in wanted.items()}
    )


def _config_folders() -> list[Path]:
    package = Path(__file__).parent
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


def _batches_of_an_epoch(training: TrainingConfig, dataset: Any) -> int | None:
    """Of batches that hold so many tokens; None where they have so many examples."""
    if training.batch_tokens is None:
        return None
    return token_budget(dataset, batch_size=training.batch_size, batch_tokens=training.batch_tokens).batches


def _work(experiment: Experiment, examples: Examples, mesh: Mesh) -> StepWork:
    training, config = experiment.training, experiment.model
    chip, peak_flops = chip_of(mesh.devices.flat[0]), training.peak_flops
    if peak_flops is None and chip is not None and config.dtype in (*chip.flops, "float32"):
        peak_flops = chip.peak(config.dtype)
    batches = _batches_of_an_epoch(training, examples.train)
    each = training.batch_size if batches is None or examples.train is None else len(examples.train) / batches
    return StepWork(
        items=round(each * examples.items_per_example),
        item=examples.item,
        flops=config.flops_per_example(examples.items_per_example) * each,
        devices=mesh.size,
        peak_flops=peak_flops,
    )


def _summary(
    experiment: Experiment, examples: Examples, mesh: Mesh, work: StepWork, model: Any, start: int, workdir: Path
) -> dict[str, str]:
    training, config = experiment.training, experiment.model
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    return {
        "run": f"{workdir}, " + (f"continues from step {start}" if start else "from the beginning"),
        "model": f"{type(config).__name__}, {count_parameters(model):,} parameters",
        **examples.facts,
        "steps": f"{training.steps:,} of {(work.items or 0) / examples.items_per_example:.0f} examples"
        + (f", {work.items:,} {work.item}" if examples.items_per_example > 1 else ""),
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}" + (f" ({axes})" if axes else ""),
        "precision": f"computes in {config.dtype}, keeps parameters in {config.param_dtype}",
        "FLOPs per step": f"{work.flops:.3g}"
        + (f"; a device does at most {work.peak_flops:.4g} a second" if work.peak_flops else ""),
        "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
    }
