"""An experiment: a task, a model, data and training put together; running one, and loading what it made."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformers_jax.data import Data, Tokenizer, evaluation_batches, training_batches
from transformers_jax.models import ModelConfig
from transformers_jax.nn import stacked_mask
from transformers_jax.pretrained import find_directory, from_pretrained
from transformers_jax.tasks import Examples, LanguageModeling, Task
from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import Progress, TrainingConfig, train
from transformers_jax.training.mesh import (
    MeshConfig,
    batch_sharding,
    check_batch,
    make_mesh,
    put_batch,
    sharding_of,
    shardings,
)
from transformers_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from transformers_jax.training.paths import named_leaves, with_leaves
from transformers_jax.training.settings import flat, from_data, to_data
from transformers_jax.training.state import TrainState, count_parameters
from transformers_jax.training.step import make_train_step

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


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
    """A run or Hugging Face checkpoint to start from: its weights, tokenizer and sizes replace those of the config."""
    seed: int = 0
    """Decides initial weights, the order of the examples, and dropout."""

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


# What may differ when a run is continued: it changes how the numbers are computed, not which.
CHANGEABLE = (
    "mesh",
    "initial_checkpoint",
    "model.remat",
    "model.unroll",
    "model.attention",
    "task.sample_prompt",
    "task.sample_tokens",
    "task.sample_temperature",
    *(f"training.{field.name}" for field in dataclasses.fields(TrainingConfig) if field.name not in ("batch_size",)),
)


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
    """
    workdir = Path(workdir).absolute()
    with _alone_in(workdir):
        return _run(experiment, workdir)


def _run(experiment: Experiment, workdir: Path) -> RunResult:
    task, training = experiment.task, experiment.training
    mesh = make_mesh(experiment.mesh)
    check_batch(training.batch_size, training.accumulation, mesh)

    checkpointer = Checkpointer(workdir / "checkpoints")
    begun = _description_of_run(checkpointer)
    initial, config, processor = None, experiment.model, None
    if experiment.initial_checkpoint is not None:
        if begun is None:
            initial = load(experiment.initial_checkpoint, mesh=mesh)
            config, processor = initial.model.config, initial.processor
        else:  # all that is needed of it is in the run by now
            config, processor = (
                from_data(begun["experiment"]["model"], ModelConfig),
                Tokenizer.load(workdir / "tokenizer"),
            )
        config = config.with_run_fields(experiment.model)
    examples = task.prepare(experiment.data, config, processor)
    config = task.configure(config, examples.processor)
    experiment = dataclasses.replace(experiment, model=config)
    schedule = make_schedule(experiment.optimizer, training.steps)

    def build() -> Any:
        return task.build(config, rngs=nnx.Rngs(experiment.seed))

    model = jax.eval_shape(build)
    optimizer = make_optimizer(experiment.optimizer, training.steps, model, stacked=stacked_mask(model))

    def create(model: Any = None) -> TrainState:
        return TrainState.create(build() if model is None else model, optimizer)

    abstract = jax.eval_shape(create)
    placed = shardings(abstract, mesh)

    description = describe(experiment, examples)
    changes = [] if begun is None else _check_same_run(begun, description, workdir)
    logger = MetricsLogger(workdir, total_steps=training.steps)
    restored = checkpointer.restore_latest(_abstract_with(abstract, placed))
    if restored is None:
        start, meta = 0, {}
        model = None if initial is None else _same_parameters(model, initial.model)
        state = jax.jit(create, out_shardings=placed)(model)
    else:
        start, state, meta = restored
    _write_atomically(workdir / "experiment.json", json.dumps(description, indent=1) + "\n")
    examples.processor.save(workdir / "tokenizer")
    logger.truncate(start)
    logger.print_summary(_summary(experiment, examples, mesh, state.model, start, workdir))
    for change in changes:
        logger.print(f"changed since the run began: {change}")
    if start >= training.steps:
        logger.print(f"nothing to train: the run has made {start} of {training.steps} steps")

    step = jax.jit(
        make_train_step(
            task.loss, optimizer, schedule=schedule, seed=experiment.seed, accumulation=training.accumulation
        ),
        out_shardings=(placed, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
    assert examples.train is not None  # it was asked for
    host_batches = training_batches(
        examples.train,
        batch_size=training.batch_size,
        seed=experiment.seed,
        start_step=start,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        num_threads=training.data_workers,
        prefetch=training.prefetch,
    )
    rows = batch_sharding(mesh)
    result = train(
        state,
        step,
        (put_batch(batch, rows) for batch in host_batches),
        config=training,
        start_step=start,
        progress=Progress(**meta["progress"]) if "progress" in meta else None,
        evaluate=make_evaluate(task, examples, mesh, training.batch_size),
        checkpointer=checkpointer,
        logger=logger,
        meta={"description": description},
        items_per_step=training.batch_size * task.items_per_example(config),
    )
    checkpointer.close()
    logger.close()
    sample = None
    if result.ended != "interrupted":
        sample = task.sample(result.state.model, examples.processor, seed=experiment.seed)
    return RunResult(result.state, result.ended, result.evaluation, sample)


def evaluate(loaded: Loaded, data: Data | None = None, *, batch_size: int = 8) -> dict[str, float]:
    """Metrics of a loaded model over the held-out part of `data`, or of what its run was trained on."""
    given = True
    if data is None:
        if loaded.experiment is None:
            raise ValueError("a Hugging Face checkpoint has no held-out data of its own; name some")
        data = loaded.experiment.data
        given = False
    examples = loaded.task.prepare(data, loaded.model.config, loaded.processor, training=False)
    if not given and examples.fingerprint != loaded.data_fingerprint:
        # Its held-out part may be text that the model was trained on.
        raise ValueError(f"{FINGERPRINTS['data']}; name the text to evaluate on")
    return make_evaluate(loaded.task, examples, make_mesh(MeshConfig(data=1)), batch_size)(loaded.model)


def make_evaluate(task: Task, examples: Examples, mesh: Mesh, batch_size: int) -> Callable[[Any], dict[str, float]]:
    """A function from a model to its metrics over all of `examples.validation`, each example counted once."""
    step, rows = jax.jit(task.metric_sums), batch_sharding(mesh)

    def evaluate(model: Any) -> dict[str, float]:
        totals: dict[str, float] = {}
        batches = evaluation_batches(
            examples.validation,
            batch_size=batch_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
        )
        pending: list[dict[str, jax.Array]] = []

        def settle(leave: int) -> None:
            while len(pending) > leave:
                for name, value in pending.pop(0).items():
                    totals[name] = totals.get(name, 0.0) + float(value)

        for batch in batches:
            pending.append(step(model, put_batch(batch, rows)))
            settle(leave=2)
        settle(leave=0)
        return task.finish(totals, examples.extra)

    return evaluate


def describe(experiment: Experiment, examples: Examples) -> dict[str, Any]:
    """A run as data: its settings, and fingerprints of what they cannot show."""
    return {
        "experiment": to_data(experiment),
        "data": examples.fingerprint,
        "processor": examples.processor.fingerprint,
    }


def load(
    directory: str | Path,
    *,
    which: Literal["best", "latest"] | int = "best",
    dtype: str | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """The model in `directory`, with tokenizer and task: a run's working directory, or a Hugging Face checkpoint, which
    may also be a name on the hub.

    `which` picks a run's checkpoint by evaluation, by age or by step. `dtype` computes in another type; `mesh` loads
    onto its devices.
    """
    if (Path(directory) / "experiment.json").exists():
        return _load_run(Path(directory).absolute(), which, dtype, mesh)
    if Path(directory).is_dir() and not (Path(directory) / "config.json").exists():
        raise FileNotFoundError(
            f"{directory} has neither experiment.json (a run) nor config.json (a Hugging Face checkpoint)"
        )
    return _load_pretrained(directory, dtype, mesh)


def _load_run(directory: Path, which: Any, dtype: str | None, mesh: Mesh | None) -> Loaded:
    description = _read_description(directory)
    experiment = from_data(description["experiment"], Experiment)
    config = experiment.model if dtype is None else dataclasses.replace(experiment.model, dtype=dtype)
    model = jax.eval_shape(lambda: experiment.task.build(config, rngs=nnx.Rngs(0)))
    model = _abstract_with(model, shardings(model, make_mesh(MeshConfig(data=1)) if mesh is None else mesh))
    checkpointer = Checkpointer(directory / "checkpoints")
    try:
        step, model, _ = checkpointer.restore(which, model, part="model")
    finally:
        checkpointer.close()
    return Loaded(
        model, Tokenizer.load(directory / "tokenizer"), experiment.task, experiment, step, description["data"]
    )


def _load_pretrained(source: str | Path, dtype: str | None, mesh: Mesh | None) -> Loaded:
    directory = find_directory(source)
    placed = None if mesh is None else partial(sharding_of, mesh=mesh)
    model = from_pretrained(directory, shardings=placed, changes=None if dtype is None else {"dtype": dtype})
    return Loaded(model, Tokenizer.load(directory), LanguageModeling())


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


def _read_description(workdir: Path) -> dict[str, Any]:
    path = workdir / "experiment.json"
    try:
        description = json.loads(path.read_text())
        if not isinstance(description["experiment"], dict):
            raise TypeError("its experiment is not an object")
        return description
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); take it from a copy of the run"
        ) from None


def _description_of_run(checkpointer: Checkpointer) -> dict[str, Any] | None:
    """What the newest good checkpoint says of its run; None where no run has begun.

    Checkpoints of which none can be used are a ValueError: starting anew would delete them.
    """
    try:
        return checkpointer.read_meta("latest")[1].get("description")
    except FileNotFoundError:
        if found := checkpointer.found():
            names = ", ".join(path.name for path in found)
            raise ValueError(
                f"{checkpointer.directory} holds {names}, but nothing that can be used; repair it, or move it away to "
                "start from the beginning"
            ) from None
        return None


FINGERPRINTS = {
    "data": "the text, its tokens or its held-out part are not those the run began with",
    "processor": "the tokenizer is not the one the run began with",
}


def _check_same_run(old: dict[str, Any], new: dict[str, Any], workdir: Path) -> list[str]:
    """The harmless differences between two descriptions of a run; ValueError if there are others."""
    old, new = flat(old), flat(new)
    differences = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]

    def harmless(name: str) -> bool:
        # The data's fingerprint says whether the text is the same, wherever it lies.
        names = (*(f"experiment.{changeable}" for changeable in CHANGEABLE), "experiment.data")
        return name in names or name.startswith(tuple(f"{changeable}." for changeable in names))

    def describe(name: str) -> str:
        change = f"{name.removeprefix('experiment.')} {old.get(name)} -> {new.get(name)}"
        return FINGERPRINTS.get(name, change)

    refused = [describe(name) for name in differences if not harmless(name)]
    if refused:
        raise ValueError(
            f"{workdir} holds a run with other settings: {'; '.join(refused)}. "
            f"Use another --workdir, or the settings it was started with"
        )
    return [describe(name) for name in differences]


def _abstract_with(tree: Any, placed: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)


def _same_parameters(model: Any, loaded: Any) -> Any:
    """The parameters of `loaded` in the structure and types of the abstract `model`."""
    parameters = named_leaves(loaded)
    return with_leaves(model, {name: parameters[name].astype(x.dtype) for name, x in named_leaves(model).items()})


def _config_folders() -> list[Path]:
    package = Path(__file__).parent
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]


@contextlib.contextmanager
def _alone_in(workdir: Path) -> Iterator[None]:
    """Hold the working directory: two runs in one would delete each other's checkpoints."""
    if workdir.exists() and not workdir.is_dir():
        raise NotADirectoryError(f"{workdir} is a file; a run needs a directory")
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as file:
        if fcntl is not None and jax.process_index() == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            except BlockingIOError:
                raise ValueError(f"another process is training in {workdir}; use another --workdir") from None
        yield


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _summary(
    experiment: Experiment, examples: Examples, mesh: Mesh, model: Any, start: int, workdir: Path
) -> dict[str, str]:
    training, config = experiment.training, experiment.model
    tokens = training.batch_size * experiment.task.items_per_example(config)
    axes = " x ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    flops = config.flops_per_token(experiment.task.items_per_example(config)) * tokens
    return {
        "run": f"{workdir}, " + (f"continues from step {start}" if start else "from the beginning"),
        "model": f"{type(config).__name__}, {count_parameters(model):,} parameters",
        **examples.facts,
        "steps": f"{training.steps:,} of {training.batch_size} examples, {tokens:,} tokens",
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}" + (f" ({axes})" if axes else ""),
        "precision": f"computes in {config.dtype}, keeps parameters in {config.param_dtype}",
        "FLOPs per step": f"{flops:.3g}",
        "versions": f"jax {jax.__version__}, Python {platform.python_version()}",
    }
