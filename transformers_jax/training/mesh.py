"""Devices as a mesh, and one table that says how each parameter lies on it."""

import functools
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from transformers_jax.training.paths import named_leaves, parameter_name

AXES = ("data", "fsdp", "tensor")
AnyMesh = Mesh | AbstractMesh
"""Devices, or only how many there are of them: enough to say what lies where."""
BATCH_SPEC = PartitionSpec(("data", "fsdp"))

Axes = tuple[str | None, ...]

SHARDING_RULES: tuple[tuple[str, Axes], ...] = (
    (r"embedding\.embedding$", ("tensor", "fsdp")),
    (r"(positions|token_types)\.embedding$", (None, "fsdp")),
    (r"attention\.(query|key|value)\.kernel$", ("fsdp", "tensor")),
    (r"attention\.(query|key|value)\.bias$", ("tensor",)),
    (r"attention\.output\.kernel$", ("tensor", "fsdp")),
    (r"mlp\.(up|gate)\.kernel$", ("fsdp", "tensor")),
    (r"mlp\.(up|gate)\.bias$", ("tensor",)),
    (r"(mlp\.down|reduction)\.kernel$", ("tensor", "fsdp")),
    (r"(dense_i|dense_h|decoder\.start|decoder\.output)\.kernel$", ("fsdp", "tensor")),
    (r"(head|stages\.\d+\.projection)\.kernel$", ("fsdp", "tensor")),
    (r"_position\.kernel$", ("fsdp",)),
    (r"(projection|pooler|dense|next_sentence)\.kernel$", ("fsdp", None)),
    (r"(bias|scale|_token|attention\.score|attention_pooling\.query|relative\.embedding)$", ()),
)
"""Parameter path -> mesh axes of its last dimensions; the first rule that matches counts. Matrices are split over
`tensor` as in Shoeybi et al. 2019 (Megatron-LM), their other dimension over `fsdp`; a leading depth axis, and what has
no axes here, is whole on every device. The rules name every parameter of every family; one of a model of your own that
no rule names is whole, too, which is logged."""


@dataclass(frozen=True)
class MeshConfig:
    """How the devices are arranged. The product of the axes is the number of devices."""

    data: int = -1
    """Devices that each take a part of the batch and hold all parameters. -1: all that the other axes leave."""
    fsdp: int = 1
    """Devices that each take a part of the batch and hold a part of the parameters."""
    tensor: int = 1
    """Devices that share the heads and the MLP of one batch."""
    devices: int | None = None
    """Use this many of the devices of a single process. None: all of all processes."""


def make_mesh(config: MeshConfig = MeshConfig(), devices: list[Any] | None = None) -> Mesh:
    """A mesh with the axes `data`, `fsdp` and `tensor` over `devices` (default: all, or as many as `config` says)."""
    devices = jax.devices() if devices is None else devices
    if config.devices is not None:
        if not 1 <= config.devices <= len(devices) or jax.process_count() > 1:
            raise ValueError(
                f"mesh.devices={config.devices} of {len(devices)} devices in {jax.process_count()} processes: it takes "
                "a part of the devices of one process"
            )
        devices = devices[: config.devices]
    rest = config.fsdp * config.tensor
    if min(config.fsdp, config.tensor) < 1 or config.data < -1 or config.data == 0:
        raise ValueError(f"mesh axes must be at least 1 (data may be -1), not {config}")
    data = len(devices) // rest if config.data == -1 else config.data
    if data * rest != len(devices):
        raise ValueError(
            f"a mesh of data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} does not make the "
            f"{len(devices)} devices there are; data=-1 takes what fsdp x tensor = {rest} leaves of a multiple of it"
        )
    used = np.asarray(devices).reshape(data, config.fsdp, config.tensor)
    return Mesh(used, AXES, axis_types=(AxisType.Auto,) * 3)


def one_device() -> Mesh:
    """A mesh of this process's first device."""
    return make_mesh(MeshConfig(), jax.local_devices()[:1])


def shardings(tree: Any, mesh: AnyMesh, *, rules: Sequence[tuple[str, Axes]] = SHARDING_RULES) -> Any:
    """A `NamedSharding` for each array of `tree` (a model, or a whole training state) by `rules`.

    Rules beside `SHARDING_RULES` must each match something, and name axes of the mesh: ValueError otherwise.
    """
    _check_rules([rule for rule in rules if rule not in SHARDING_RULES], tree, mesh)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: sharding_of(parameter_name(path), leaf, mesh, rules=rules), tree
    )


def abstract_on(tree: Any, placed: Any) -> Any:
    """The shapes and types of `tree`, each to lie as the tree `placed` of shardings says."""
    return jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, placed)


def sharding_of(
    name: str, leaf: Any, mesh: AnyMesh, *, rules: Sequence[tuple[str, Axes]] = SHARDING_RULES
) -> NamedSharding:
    """Where the array `leaf` called `name` lies.

    An axis that does not divide its dimension (the 50,257 tokens of GPT-2 by 2) moves to another one that it divides,
    so that the array is spread all the same; where there is none, it stays whole. Both are logged once.
    """
    axes = next((axes for pattern, axes in rules if re.search(pattern, name)), None)
    if axes is None and len(leaf.shape) > 1 and mesh.size > mesh.shape.get("data", 1):
        _log(name, "no sharding rule names it: it is whole on every device")
    if axes is None or len(axes) > len(leaf.shape):  # optimizers keep smaller things under a parameter's name, too
        axes = ()
    first = len(leaf.shape) - len(axes)
    parts: list[list[str]] = [[] for _ in leaf.shape]  # the axes that each dimension is spread over

    def divides(axis: str, dimension: int) -> bool:
        return leaf.shape[dimension] % math.prod(mesh.shape[name] for name in (*parts[dimension], axis)) == 0

    for wanted, axis in enumerate(axes, first):
        if axis is None or mesh.shape[axis] == 1:
            continue
        choices = (wanted, *(other for other in range(first, len(leaf.shape)) if other != wanted))
        found = next((dimension for dimension in choices if divides(axis, dimension)), None)
        if found is not None:
            parts[found].append(axis)
        if found != wanted:
            instead = "whole on every device" if found is None else f"spread over its dimension of {leaf.shape[found]}"
            _log(name, f"{leaf.shape[wanted]} is not divisible by {axis}={mesh.shape[axis]}: it is {instead}")
    return NamedSharding(mesh, PartitionSpec(*(tuple(axes) if len(axes) > 1 else (*axes, None)[0] for axes in parts)))


def batch_sharding(mesh: AnyMesh) -> NamedSharding:
    """Examples are spread over `data` and `fsdp`."""
    return NamedSharding(mesh, BATCH_SPEC)


def on_mesh(function: Callable[..., Any], mesh: AnyMesh) -> Callable[..., Any]:
    """`function`, to be compiled: the constraints inside it (`nn.sharding`) see `mesh` while it is traced."""

    @functools.wraps(function)
    def inside(*arguments: Any, **options: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*arguments, **options)

    return inside


def check_batch(batch_size: int, accumulation: int, mesh: AnyMesh, *, name: str = "batch_size") -> None:
    """ValueError unless every micro-batch has the same number of examples on each device."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * accumulation
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"{name}={batch_size} is not a multiple of {parts} = data {mesh.shape['data']} x fsdp "
            f"{mesh.shape['fsdp']} x accumulation {accumulation}"
        )


def put_batch(batch: Any, sharding: NamedSharding) -> Any:
    """The global arrays of a batch of which this process holds its own rows."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def _check_rules(rules: Sequence[tuple[str, Axes]], tree: Any, mesh: AnyMesh) -> None:
    names = list(named_leaves(tree))
    for pattern, axes in rules:
        for axis in axes:
            if axis is not None and axis not in mesh.shape:
                known = ", ".join(mesh.shape)
                raise ValueError(f"the sharding rule {pattern!r} names the axis {axis!r}; the mesh has {known}")
        if not any(re.search(pattern, name) for name in names):
            example = f", such as {names[0]}" if names else ""
            raise ValueError(f"the sharding rule {pattern!r} matches none of the {len(names)} arrays{example}")


def _log(name: str, what: str) -> None:
    if not name.startswith(("optimizer.", "ema.")):  # these lie as their parameters do
        _log_once(f"{name}: {what}")


@cache
def _log_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)
