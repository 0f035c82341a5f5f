"""Running an experiment: training from its settings, or from where it was interrupted."""

import dataclasses
import functools
import json
import logging
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformers_jax.data import token_budget, training_batches
from transformers_jax.evaluation import make_evaluate
from transformers_jax.experiment import Experiment
from transformers_jax.loading import PROCESSOR_FOLDERS, Loaded, checkpoints_of, load, processor_of_run
from transformers_jax.models import ModelConfig
from transformers_jax.nn import stacked_mask
from transformers_jax.runs import (
    alone_in,
    check_same_examples,
    check_same_run,
    check_same_start,
    describe,
    description_of_run,
    write_atomically,
)
from transformers_jax.tasks import LOWER_IS_BETTER, Examples, Task
from transformers_jax.training.chips import chip_of
from transformers_jax.training.distributed import compiled_together, first, in_turn, note_saved, share_of_batch, whole
from transformers_jax.training.logging import MetricsLogger
from transformers_jax.training.loop import Progress, StepWork, TrainingConfig, train
from transformers_jax.training.mesh import (
    AnyMesh,
    abstract_on,
    batch_sharding,
    check_batch,
    make_mesh,
    on_mesh,
    put_batch,
    sharding_of,
    shardings,
)
from transformers_jax.training.optimizer import make_optimizer, make_schedule, trained_part
from transformers_jax.training.paths import named_leaves, with_leaves
from transformers_jax.training.settings import from_data, to_data
from transformers_jax.training.state import TrainState, count_parameters
from transformers_jax.training.step import make_train_step

logger = logging.getLogger("transformers_jax")

LARGEST_SAMPLED = 1 << 32
"""Bytes of a model that many processes gather in process 0 to show a sample of what it makes; `generate` and `predict`
show it of a larger one."""


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

    metric, checkpointer = checkpoints_of(experiment, workdir)
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
            processor = processor_of_run(workdir)
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
    restored = checkpointer.restore_latest(abstract_on(program.state, placed))
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


def _on_one_device(model: Any) -> Any:
    """A model that lies over many processes, for process 0 alone; None in the others, and where it is too large."""
    if jax.process_count() == 1:
        return model
    if sum(leaf.nbytes for leaf in jax.tree.leaves(model)) > LARGEST_SAMPLED:
        return None
    model = jax.tree.map(whole, model)
    return jax.device_put(model, jax.local_devices()[0]) if jax.process_index() == 0 else None


def _goes_on(initial: Loaded, task: Task) -> bool:
    """Whether the head of a checkpoint is what a task starts from."""
    return type(initial.model) is task.head and not getattr(task, "new_head", False)


def _continue_from(initial: Loaded, model: Any, build: Callable[[], Any], mesh: Mesh, *, same_head: bool) -> Any:
    """The abstract `model` with the parameters of a checkpoint in its types, and new ones where its head is another.

    What is new and what is left out is logged; it can only be the head, and the pooler below it.
    """
    before = named_leaves(initial.model)
    held = model.config.carry_over(before, initial.model.config)
    if resized := [f"{name} {before[name].shape} -> {x.shape}" for name, x in held.items() if x is not before[name]]:
        logger.warning("resized: %s", ", ".join(resized))
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
