"""The step compiled ahead of time for simulated devices: sharding mistakes show without hardware."""

import contextlib
import dataclasses
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from transformers_jax.experiment import Experiment
from transformers_jax.planning.plan import configured, gathered_warnings
from transformers_jax.running import make_program
from transformers_jax.training.mesh import AXES, AnyMesh, batch_sharding
from transformers_jax.training.process import compiled_anew

MOST_DEVICES = 256
_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


@dataclass(frozen=True)
class Compiled:
    """What XLA says of a step on simulated devices. Bytes are those of one device; `temporary` ones hold gradients and
    activations. A collective inside a loop counts once. `warnings` are what XLA printed of layouts that it could only
    change by copying whole arrays."""

    mesh: Mapping[str, int]
    batch_size: int
    seconds: float
    arguments: int
    temporary: int
    flops: float
    collectives: Mapping[str, int]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def compile_step(experiment: Experiment, mesh: AnyMesh, *, labels: int | None = None) -> Compiled:
    """Compile the training step for `mesh` over this process's devices.

    Where there are fewer, the axes are halved, `data` first, and the batch with them: each device has as much to do as
    before. Layers are one loop, so that the depth does not matter.
    """
    experiment, sizes = configured(experiment, labels), dict(mesh.shape)
    batch_size, devices = experiment.training.batch_size, jax.devices()[:MOST_DEVICES]
    for axis in AXES:
        while np.prod(list(sizes.values())) > len(devices) and sizes[axis] % 2 == 0:
            sizes[axis] //= 2
            batch_size //= 1 if axis == "tensor" else 2
    shape = tuple(sizes.values())
    if np.prod(shape) > len(devices):
        raise ValueError(f"a mesh of {dict(mesh.shape)} cannot be halved to at most {len(devices)} simulated devices")
    used = Mesh(np.asarray(devices[: int(np.prod(shape))]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * 3)
    experiment = dataclasses.replace(
        experiment, training=dataclasses.replace(experiment.training, batch_size=batch_size)
    )
    begin = time.perf_counter()
    with gathered_warnings() as notes, compiled_anew(), _stderr() as printed:
        program = make_program(experiment, used)
        rows = batch_sharding(used)
        batch = experiment.task.abstract_batch(experiment.model, batch_size)
        compiled = (
            program.jit_step()
            .lower(
                _placed(program.state, program.placed),
                jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch),
            )
            .compile()
        )
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    lines = [line for line in printed() if "rematerialization" in line.lower()]
    return Compiled(
        mesh=sizes,
        batch_size=batch_size,
        seconds=time.perf_counter() - begin,
        arguments=memory.argument_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        flops=cost["flops"],
        collectives=dict(sorted(Counter(_COLLECTIVE.findall(compiled.as_text())).items())),
        warnings=tuple(lines),
        notes=tuple(notes),
    )


def _placed(state: Any, placed: Any) -> Any:
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, placed)


@contextlib.contextmanager
def _stderr() -> Iterator[Any]:
    """Catch what is written to the file descriptor of standard error, as XLA does from C++. Gives a function that reads
    its lines afterwards."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()
