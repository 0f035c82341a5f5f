"""A training run on paper: what one device holds, what a step computes and sends, and how long it takes."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from transformers_jax.data.token_budget import TokenBudget
from transformers_jax.experiment import Experiment
from transformers_jax.models.base import ImageConfig, TransformerConfig, as_size
from transformers_jax.planning.communication import AxisTraffic, traffic
from transformers_jax.planning.flops import Flops, count_flops
from transformers_jax.planning.memory import peak_bytes, score_shapes
from transformers_jax.planning.program import Spread, read_program
from transformers_jax.running import Program, make_program
from transformers_jax.tasks import Examples
from transformers_jax.training.chips import Chip
from transformers_jax.training.mesh import AXES, AnyMesh, MeshConfig, batch_sharding, check_batch, on_mesh
from transformers_jax.training.state import count_parameters

GB = 1e9
MOST_DEVICES = 1 << 20


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, of the one that holds most. `gradients` are all of them at once; `activations` is what else
    is held when most is."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    batch: int
    activations: int

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


@dataclass(frozen=True)
class Plan:
    """What a run needs. Numbers are those of one step over all devices where no device is named."""

    parameters: int
    mesh: Mapping[str, int]
    memory: Memory
    flops: Flops
    """What is computed, again where it is to save memory."""
    model_flops: float
    """What the formulas of the model need: what the log's utilisation goes by."""
    traffic: tuple[AxisTraffic, ...]
    items: int
    item: str
    steps: int | None
    """None where a run is given in epochs, whose length its data decides."""
    fused_attention: bool = False
    """Attention is one kernel, which holds no scores."""
    notes: tuple[str, ...] = ()
    """What does not lie as the rules say."""

    @property
    def devices(self) -> int:
        return math.prod(self.mesh.values())

    def seconds(self, chip: Chip, dtype: str, utilisation: float) -> float:
        """A step at this share of the chips' peak, or the time that the links need if that is longer."""
        computing = self.flops.products / (self.devices * chip.peak(dtype) * utilisation)
        return max([computing, *(axis.seconds or 0.0 for axis in self.traffic)])


def abstract_mesh(config: MeshConfig, devices: int | None = None) -> AbstractMesh:
    """The mesh of `config` without devices. With data=-1 it has as many as `devices`, or as the other axes make.

    Raises ValueError where the axes do not make the number of devices.
    """
    devices = config.devices if devices is None else devices
    rest = config.fsdp * config.tensor
    if min(config.fsdp, config.tensor) < 1 or config.data < -1 or config.data == 0 or (devices or 1) < 1:
        raise ValueError(f"mesh axes must be at least 1 (data may be -1), not {config} of {devices} devices")
    data = max(1, (devices or rest) // rest) if config.data == -1 else config.data
    if data * rest > MOST_DEVICES:
        raise ValueError(f"a mesh of {data * rest} devices; plans are for at most {MOST_DEVICES}")
    if devices is not None and data * rest != devices:
        raise ValueError(
            f"a mesh of data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not make {devices} "
            f"devices but {data * rest}"
        )
    return AbstractMesh((data, config.fsdp, config.tensor), AXES, axis_types=(AxisType.Auto,) * 3)


def configured(experiment: Experiment, labels: int | None = None) -> Experiment:
    """The experiment with the sizes that a run takes from its data: a vocabulary from the data's settings, and so many
    `labels`. Raises ValueError where the task needs one that is not given."""
    task, config, data = experiment.task, experiment.model, experiment.data
    vocabulary = getattr(config, "vocab_size", None) or getattr(data, "vocab_size", None)
    names = config.labels or tuple(map(str, range(labels or 0)))
    tokenizer = SimpleNamespace(vocab_size=vocabulary, bos_id=None, eos_id=None, pad_id=0)
    processor = tokenizer
    if isinstance(config, ImageConfig):
        size = getattr(task, "image_size", None) or config.image_size
        processor = SimpleNamespace(size=as_size(size), mean=config.image_mean, std=config.image_std)
    elif vocabulary is None:
        raise ValueError("the size of the vocabulary is not known without data; set --model.vocab-size")
    config = task.configure(config, Examples(None, grain.MapDataset.range(1), processor, "", 1, labels=names))
    training = experiment.training
    if training.epochs is not None:
        training = dataclasses.replace(training, epochs=None)
    if training.batch_tokens is not None:  # the longest examples, and as many as there may be of them
        length = task.abstract_batch(config, 1)["input_ids"].shape[1]
        unit = dict(batch_size=training.batch_size, batch_tokens=training.batch_tokens)
        rows = TokenBudget(np.array([length]), [length], **unit).rows[0]
        training = dataclasses.replace(training, batch_size=rows, batch_tokens=None)
    return dataclasses.replace(experiment, model=config, training=training)


def make_plan(experiment: Experiment, mesh: AnyMesh, chip: Chip | None = None, *, labels: int | None = None) -> Plan:
    """The plan of a run on `mesh`, whose devices need not exist."""
    steps = None if experiment.training.epochs is not None else experiment.training.steps
    unknown = getattr(experiment.model, "vocab_size", 0) is None
    experiment = configured(experiment, labels)
    training, sizes = experiment.training, dict(mesh.shape)
    check_batch(training.batch_size, training.accumulation, mesh)
    batch = experiment.task.abstract_batch(experiment.model, training.batch_size)
    with gathered_warnings() as notes:
        program = make_program(experiment, mesh)
    if unknown:
        size = experiment.model.vocab_size  # pyright: ignore[reportAttributeAccessIssue]
        notes.append(f"a vocabulary of {size:,} tokens, as data.vocab_size has it; --model.vocab-size sets another")
    spreads = [_spread(x, sharding.spec) for x, sharding in _placed(program)]
    rows = batch_sharding(mesh)
    spreads += [_spread(x, rows.spec) for x in jax.tree.leaves(batch)]
    read = read_program(on_mesh(program.step, mesh), (program.state, batch), spreads, sizes)
    parameters = _bytes(program.state.model, program.placed.model)
    scores = set()
    if _fused(experiment, chip):
        scores = {shape for shape in score_shapes(read.operations, _head_dim(experiment)) if shape[-1] % 2 == 0}
    peak = peak_bytes(read, fused=scores)
    if experiment.optimizer.clip_norm:
        # Clipping reads all gradients before it changes one: XLA (that of CPUs, which could be looked at) holds both.
        peak = max(peak, 2 * parameters)
    memory = Memory(
        parameters=parameters,
        gradients=parameters,
        optimizer=_bytes(program.state.optimizer, program.placed.optimizer) + 4,  # the step's number
        average=_bytes(program.state.ema, program.placed.ema),
        batch=_bytes(batch, jax.tree.map(lambda _: rows, batch)),
        activations=max(0, peak - parameters),
    )
    pictures = "pixels" in batch
    items = 1 if pictures else batch["input_ids"].shape[1]
    return Plan(
        parameters=count_parameters(program.model),
        mesh=sizes,
        memory=memory,
        flops=count_flops(read.operations),
        model_flops=experiment.model.flops_per_example(items) * training.batch_size,
        traffic=traffic(read.transfers, sizes, chip),
        items=training.batch_size * items,
        item="images" if pictures else "tokens",
        steps=steps,
        fused_attention=bool(scores),
        notes=tuple(notes),
    )


def remedies(
    experiment: Experiment, mesh: AbstractMesh, chip: Chip, *, labels: int | None = None
) -> list[tuple[str, Plan]]:
    """Changes that make a run fit into the chip's memory: each that does alone, in the order of what they cost, or the
    first sum of them that does. Empty where nothing helps."""

    def tried(change: "_Change") -> Plan | None:
        try:
            with gathered_warnings():
                plan = make_plan(change.experiment, change.mesh, chip, labels=labels)
        except ValueError:  # it does not divide
            return None
        return plan if plan.memory.total <= chip.memory else None

    start = _Change(experiment, mesh, "")
    found = []
    for steps in _changes(start):
        fitting = ((step.name, plan) for step in steps if (plan := tried(step)) is not None)
        if (first := next(fitting, None)) is not None:
            found.append(first)
    if found:
        return found
    for change in _together(start):
        if (plan := tried(change)) is not None:
            return [(change.name, plan)]
    return []


@dataclass(frozen=True)
class _Change:
    experiment: Experiment
    mesh: AbstractMesh
    name: str


def _changes(start: _Change) -> list[Iterator[_Change]]:
    """Each kind of change, in steps that go further and further."""
    experiment, mesh = start.experiment, start.mesh
    data, fsdp, tensor = (mesh.shape[axis] for axis in AXES)

    def with_mesh(data: int, fsdp: int, tensor: int) -> _Change:
        new = MeshConfig(data, fsdp, tensor)
        name = f"--mesh.data {data} --mesh.fsdp {fsdp} --mesh.tensor {tensor} (on {data * fsdp * tensor} devices)"
        return _Change(dataclasses.replace(experiment, mesh=new), abstract_mesh(new), name)

    def with_field(part: str, field: str, value: Any) -> Iterator[_Change]:
        old = getattr(experiment, part)
        if getattr(old, field, value) != value:  # not all models have each
            new = dataclasses.replace(experiment, **{part: dataclasses.replace(old, **{field: value})})
            yield _Change(new, mesh, f"--{part}.{field.replace('_', '-')} {value}")

    def more_fsdp() -> Iterator[_Change]:
        for factor in (2, 4, 8, 16):
            taken = math.gcd(factor, data)
            yield with_mesh(data // taken, fsdp * factor, tensor)

    def more_tensor() -> Iterator[_Change]:
        heads = getattr(experiment.model, "heads", 1)
        heads = math.gcd(*heads) if isinstance(heads, tuple) else heads  # of several stages
        for factor in (2, 4, 8):
            if tensor * factor <= 8 and heads % (tensor * factor) == 0:
                taken = math.gcd(factor, data)
                left = math.gcd(factor // taken, fsdp)
                yield with_mesh(data // taken, fsdp // left, tensor * factor)

    def more_accumulation() -> Iterator[_Change]:
        most = experiment.training.batch_size // (data * fsdp)
        for accumulation in range(experiment.training.accumulation + 1, most + 1):
            if most % accumulation == 0:
                yield from with_field("training", "accumulation", accumulation)

    return [
        more_fsdp(),
        more_tensor(),
        with_field("model", "remat", "full"),
        more_accumulation(),
        iter(()) if experiment.optimizer.name == "adafactor" else with_field("optimizer", "moment_dtype", "bfloat16"),
        with_field("model", "dtype", "bfloat16"),
        with_field("model", "param_dtype", "bfloat16"),
    ]


def _together(start: _Change) -> Iterator[_Change]:
    """Changes on top of one another: those that need no more devices first; the parameters' type last."""

    def then(before: _Change, number: int) -> list[_Change]:
        steps = _changes(before)[number]
        return [dataclasses.replace(step, name=f"{before.name} {step.name}".strip()) for step in steps]

    change = start
    for number, more in enumerate((_REMAT, _DTYPE, _MOMENT_DTYPE, _PARAM_DTYPE)):
        changed = then(change, more)
        if not changed and number > 0:
            continue  # it was so already
        change = (changed or [change])[-1]
        tensor = then(change, _TENSOR)
        both = then(dataclasses.replace(tensor[-1], name=change.name), _FSDP) if tensor else []
        for spread in (change, *tensor, *then(change, _FSDP), *both):
            yield from (spread, *then(spread, _ACCUMULATION)[-1:])


_FSDP, _TENSOR, _REMAT, _ACCUMULATION, _MOMENT_DTYPE, _DTYPE, _PARAM_DTYPE = range(7)
"""Where the kinds of change are in `_changes`."""


@contextmanager
def gathered_warnings() -> Iterator[list[str]]:
    """What the sharding rules log is put into a list instead."""
    log, lines = logging.getLogger("transformers_jax.training.mesh"), []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    propagate, log.propagate = log.propagate, False
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.propagate = propagate


def _head_dim(experiment: Experiment) -> int:
    return experiment.model.dim // experiment.model.heads  # pyright: ignore[reportAttributeAccessIssue]


def _fused(experiment: Experiment, chip: Chip | None) -> bool:
    """Whether `nn.attend` will use cuDNN's kernel there, for scores of an even length."""
    config: Any = experiment.model
    return (
        isinstance(config, TransformerConfig)
        and chip is not None
        and "tf32" in chip.flops
        and config.attention in (None, "cudnn")
        and config.dtype in ("bfloat16", "float16")
        and config.attention_dropout == 0
        and _head_dim(experiment) % 8 == 0
        and _head_dim(experiment) <= 128
    )


def _placed(program: Program) -> list[tuple[Any, Any]]:
    return list(zip(jax.tree.leaves(program.state), jax.tree.leaves(program.placed), strict=True))


def _spread(x: Any, spec: Any) -> Spread:
    axes = [(one,) if isinstance(one, str) else tuple(one or ()) for one in spec]
    return tuple(axes + [()] * (len(x.shape) - len(axes)))


def _bytes(tree: Any, placed: Any) -> int:
    """Bytes of the arrays of `tree` on one device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(placed), strict=True)
    return sum(math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize for x, sharding in pairs)
