"""The command `plan`: whether a run fits its devices and how long it takes, before there are any."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from transformers_jax.arguments import experiment_named, parse
from transformers_jax.experiment import Experiment
from transformers_jax.models.base import LayersConfig
from transformers_jax.planning.compiled import MOST_DEVICES, Compiled, compile_step
from transformers_jax.planning.plan import GB, Plan, abstract_mesh, make_plan, remedies
from transformers_jax.training.chips import Chip, find_chip
from transformers_jax.training.logging import format_duration

TIGHT = 0.9
"""Beyond this share of a chip's memory a run may fail: XLA and NCCL keep some for themselves."""


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Say what a training run needs: memory, FLOPs, communication, time. It needs neither its devices nor its data.

    Every field of the config can be changed from here, as for `train`: --mesh.fsdp 64 --model.remat full
    """

    config: str
    """A config file (configs/*.py), or the name of one that comes with the package."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    chip: str = "h100"
    """The kind of device: a100, h100, h200, b200, v4, v5e, v5p, v6e, ..."""
    utilisation: float = 0.4
    """The share of the chip's peak that its matrix products reach, what is computed twice to save memory included."""
    devices: int | None = None
    """How many there are. Unset: as many as the mesh makes."""
    labels: int = 2
    """Classes that the data has, for a classifier whose config does not name them."""
    compile: bool = True
    """Also compile the step for simulated devices (CPU), at most 256, to see what XLA makes of it."""
    json: str | None = None
    """A file to write the numbers into; - writes them to standard output instead of the tables."""
    debug: bool = False
    """Show the whole traceback of an error."""


def plan_command(arguments: list[str]) -> int:
    name, experiment = experiment_named(arguments, "plan")
    command = parse(PlanCommand, arguments, "plan", PlanCommand(config=name, experiment=experiment))
    experiment, chip = command.experiment, find_chip(command.chip)
    if not 0 < command.utilisation <= 1:
        raise ValueError(f"--utilisation {command.utilisation} must be above 0 and at most 1")
    if command.labels < 1:
        raise ValueError(f"--labels {command.labels} must be at least 1")
    mesh = abstract_mesh(experiment.mesh, command.devices)
    _simulate(mesh.size)
    plan = make_plan(experiment, mesh, chip, labels=command.labels)
    fits = plan.memory.total <= chip.memory
    changes = [] if fits else remedies(experiment, mesh, chip, labels=command.labels)
    compiled = compile_step(experiment, mesh, labels=command.labels) if command.compile else None
    numbers = as_data(plan, chip, experiment, command.utilisation)
    numbers["changes"] = [{"change": change, "total_bytes": after.memory.total} for change, after in changes]
    numbers["compiled"] = None if compiled is None else dataclasses.asdict(compiled)
    if command.json == "-":
        print(json.dumps(numbers))
        return 0
    if command.json is not None:
        Path(command.json).write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    _show(numbers, plan, chip, experiment, changes, compiled)
    return 0


def as_data(plan: Plan, chip: Chip, experiment: Experiment, utilisation: float) -> dict[str, Any]:
    """A plan as JSON holds it: bytes of one device, everything else of a step over all devices."""
    dtype = experiment.model.dtype
    seconds = plan.seconds(chip, dtype, utilisation)
    memory = dataclasses.asdict(plan.memory) | {"total": plan.memory.total}
    return {
        "chip": chip.name,
        "parameters": plan.parameters,
        "devices": plan.devices,
        "mesh": dict(plan.mesh),
        "memory": memory,
        "chip_memory": chip.memory,
        "fits": plan.memory.total <= chip.memory,
        "fused_attention": plan.fused_attention,
        "flops": dataclasses.asdict(plan.flops),
        "model_flops": plan.model_flops,
        "communication": [dataclasses.asdict(axis) for axis in plan.traffic],
        "utilisation": utilisation,
        "mfu": plan.model_flops / (seconds * plan.devices * chip.peak(dtype)),
        "seconds_per_step": seconds,
        f"{plan.item}_per_second": plan.items / seconds,
        f"{plan.item}_per_step": plan.items,
        "steps": plan.steps,
        "days": None if plan.steps is None else plan.steps * seconds / 86400,
        "notes": list(plan.notes),
    }


def _simulate(devices: int) -> None:
    """As many CPU devices as the mesh has, unless JAX has started already: nothing runs on them."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", min(devices, MOST_DEVICES))
        jax.config.update("jax_platforms", "cpu")


def _show(
    numbers: dict[str, Any],
    plan: Plan,
    chip: Chip,
    experiment: Experiment,
    changes: list[tuple[str, Plan]],
    compiled: Compiled | None,
) -> None:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=160)
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()

    def row(name: str, value: str, about: str = "") -> None:
        table.add_row(name, value, about)

    memory, training = plan.memory, experiment.training
    row("parameters", f"{plan.parameters / GB:,.4g} B", f"{plan.parameters:,}")
    row("devices", f"{plan.devices:,}", f"{chip.name} ({axes})")
    for part, about in (
        ("parameters", experiment.model.param_dtype),
        ("gradients", ""),
        ("optimizer", experiment.optimizer.name),
        ("average", "moving average of the parameters"),
        ("activations", _about_activations(plan, experiment)),
    ):
        if size := getattr(memory, part):
            row(f"  {part}", f"{size / GB:,.3f} GB", about)
    row("memory a device", f"{memory.total / GB:,.1f} GB", f"of {chip.memory / GB:.1f} GB")
    flops = plan.flops
    row(
        "FLOPs a step",
        f"{flops.products:.4g}",
        f"in matrix products, {flops.other:.3g} others; the model's formulas need {plan.model_flops:.4g}",
    )
    for axis in plan.traffic:
        kinds = ", ".join(f"{kind.replace('_', '-')} {size / GB:,.3g} GB" for kind, size in axis.sent.items())
        row(
            f"  {axis.axis} sends",
            f"{axis.seconds:,.3g} s",
            f"{kinds} a device, at {(axis.bandwidth or 0) / GB:.4g} GB/s",
        )
    seconds = numbers["seconds_per_step"]
    slow = [axis.axis for axis in plan.traffic if axis.seconds == seconds]
    how = f"at {numbers['utilisation']:.0%} of {chip.peak(experiment.model.dtype):.4g} FLOP/s"
    how = f"as long as {slow[0]} takes to send" if slow else how
    rate = numbers[f"{plan.item}_per_second"]
    row(
        "a step",
        f"{seconds:,.3g} s",
        f"{how} (MFU {numbers['mfu']:.1%}): {plan.items:,} {plan.item}, {rate:,.0f} a second",
    )
    if plan.steps is None:
        row("the run", "?", f"{training.epochs} epochs: --training.steps says how many steps")
    else:
        row(
            "the run",
            f"{numbers['days']:,.3g} days" if numbers["days"] >= 1 else format_duration(86400 * numbers["days"]),
            f"{plan.steps:,} steps, {plan.items * plan.steps:.3g} {plan.item}",
        )
    console.print(table)
    for note in plan.notes:
        console.print(f"note: {note}")
    total, limit = memory.total / GB, chip.memory / GB
    if numbers["fits"]:
        tight = ", but it is tight" if total > TIGHT * limit else ""
        console.print(f"fits{tight}: {total:,.1f} GB a device of {limit:.1f} GB")
    else:
        console.print(f"does not fit: {total:,.1f} GB a device of {limit:.1f} GB")
        for change, after in changes:
            console.print(f"  fits with {change}: {after.memory.total / GB:,.1f} GB")
        if not changes:
            console.print("  none of the changes that are tried makes it fit, not all of them together either")
    if compiled is not None:
        _show_compiled(console, compiled)


def _about_activations(plan: Plan, experiment: Experiment) -> str:
    if not isinstance(experiment.model, LayersConfig):
        return "at their most"
    kept = f"remat {experiment.model.remat}"
    return f"at their most; {kept}, " + ("a fused kernel for attention" if plan.fused_attention else "whole scores")


def _show_compiled(console: Console, compiled: Compiled) -> None:
    axes = " x ".join(f"{axis} {size}" for axis, size in compiled.mesh.items())
    kinds = ", ".join(f"{count} {kind}" for kind, count in compiled.collectives.items()) or "none"
    console.print(
        f"compiled in {compiled.seconds:.0f} s for simulated devices ({axes}, {compiled.batch_size} examples): "
        f"{compiled.arguments / GB:,.3f} GB of arguments and {compiled.temporary / GB:,.3f} GB of temporary arrays a "
        "device, with the scores of attention, and with the CPU's float32 in place of bfloat16"
    )
    console.print(f"collectives, those of a loop once: {kinds}")
    if compiled.warnings:
        for warning in compiled.warnings:
            console.print(f"XLA: {warning}", markup=False)
    else:
        console.print("XLA reports no involuntary full rematerialization")
