"""Devices as a mesh, and one table that says how each parameter lies on it."""

import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformers_jax.training.paths import parameter_name

AXES = ("data", "fsdp", "tensor")
AnyMesh = Mesh | AbstractMesh
"""Devices, or only how many there are of them: enough to say what lies where."""
BATCH_SPEC = PartitionSpec(("data", "fsdp"))

SHARDING_RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"(embedding|positions)\.embedding$", ("tensor", "fsdp")),
    (r"patch_embedding\.projection\.kernel$", (None, "fsdp")),
    (r"attention\.(query|key|value)\.kernel$", ("fsdp", "tensor")),
    (r"attention\.(query|key|value)\.bias$", ("tensor",)),
    (r"attention\.output\.kernel$", ("tensor", "fsdp")),
    (r"mlp\.up\.kernel$", ("fsdp", "tensor")),
    (r"mlp\.up\.bias$", ("tensor",)),
    (r"mlp\.down\.kernel$", ("tensor", "fsdp")),
    (r"head\.kernel$", ("fsdp", "tensor")),
)
"""Parameter path -> mesh axes of its last dimensions: the split of Shoeybi et al. 2019 (Megatron-LM) over `tensor`,
the other matrix dimension over `fsdp`. A leading depth axis, and whatever no rule names, is on every device whole."""


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are arranged. The product of the axes is the number of devices used."""

    data: int = -1
    """Devices that each take a part of the batch and hold all parameters. -1: all that the other axes leave."""
    fsdp: int = 1
    """Devices that each take a part of the batch and hold a part of the parameters."""
    tensor: int = 1
    """Devices that share the heads and the MLP of one batch."""


def make_mesh(config: MeshConfig = MeshConfig(), devices: list[Any] | None = None) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor` over `devices` (default: all)."""
    devices = jax.devices() if devices is None else devices
    rest = config.fsdp * config.tensor
    if min(config.fsdp, config.tensor) < 1 or config.data < -1 or config.data == 0:
        raise ValueError(f"mesh axes must be at least 1 (data may be -1), not {config}")
    data = len(devices) // rest if config.data == -1 else config.data
    if data * rest > len(devices) or data == 0:
        raise ValueError(
            f"a mesh of data={config.data}, fsdp={config.fsdp}, tensor={config.tensor} needs at least "
            f"{max(data, 1) * rest} devices; there are {len(devices)}"
        )
    used = np.asarray(devices[: data * rest]).reshape(data, config.fsdp, config.tensor)
    return Mesh(used, AXES, axis_types=(AxisType.Auto,) * 3)


def shardings(tree: Any, mesh: AnyMesh) -> Any:
    """A `NamedSharding` for each array of `tree` (a model, or a whole training state) by `SHARDING_RULES`."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: sharding_of(parameter_name(path), leaf, mesh), tree)


def sharding_of(name: str, leaf: Any, mesh: AnyMesh) -> NamedSharding:
    """Where the array `leaf` called `name` lies. A dimension that its axis does not divide stays whole on every device,
    which is logged once."""
    axes = next((axes for pattern, axes in SHARDING_RULES if re.search(pattern, name)), ())
    if len(axes) > len(leaf.shape):  # optimizers keep smaller things under a parameter's name, too
        axes = ()
    axes = (None,) * (len(leaf.shape) - len(axes)) + axes
    axes = [_dividing(name, mesh, size, axis) for size, axis in zip(leaf.shape, axes, strict=True)]
    return NamedSharding(mesh, PartitionSpec(*axes))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Examples are spread over `data` and `fsdp`."""
    return NamedSharding(mesh, BATCH_SPEC)


def check_batch(batch_size: int, accumulation: int, mesh: AnyMesh) -> None:
    """ValueError unless every micro-batch has the same number of examples on each device."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * accumulation
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"batch_size={batch_size} is not a multiple of {parts} = data {mesh.shape['data']} x fsdp "
            f"{mesh.shape['fsdp']} x accumulation {accumulation}"
        )


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
    """The global arrays of a batch of which this process holds its own rows."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def _dividing(name: str, mesh: AnyMesh, size: int, axis: str | None) -> str | None:
    if axis is None or mesh.shape[axis] == 1:
        return None
    if size % mesh.shape[axis]:
        _log_whole(name, size, axis, mesh.shape[axis])
        return None
    return axis


@cache
def _log_whole(name: str, size: int, axis: str, count: int) -> None:
    logging.getLogger(__name__).warning(
        "%s: a dimension of %d is not divisible by %s=%d and stays whole on each device", name, size, axis, count
    )
