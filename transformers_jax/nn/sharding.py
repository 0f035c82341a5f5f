"""Hints for XLA where arrays lie on a mesh of devices. Without a mesh in sight they do nothing."""

import math

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

BATCH = ("data", "fsdp")
"""The mesh axes that examples are spread over."""
TENSOR = "tensor"
"""The mesh axis that heads, the inside of MLPs and the vocabulary are spread over."""


def constrain(x: Array, *axes: str | tuple[str, ...] | None) -> Array:
    """`x`, laid out so that its first dimensions are spread over these mesh axes and all others are whole.

    The mesh is the one in sight (`jax.set_mesh`, or `training.mesh.on_mesh`). An axis that the mesh lacks, that is
    manual (inside `jax.shard_map`) or that does not divide the dimension is left out. The gradient is laid out in the
    same way.

    XLA finds most layouts by itself. It has to be told where a parameter that is spread over `fsdp` meets an
    activation: otherwise it spreads the activation's features instead of its examples, and computes every example on
    every device.
    """
    if _usable().keys().isdisjoint((*BATCH, TENSOR)):
        return x
    spec = PartitionSpec(*(fitting_axes(axis, size) or None for size, axis in zip(x.shape, axes, strict=False)))
    return jax.lax.with_sharding_constraint(x, spec)


def fitting_axes(axis: str | tuple[str, ...] | None, size: int) -> tuple[str, ...]:
    """Those of the mesh axes `axis` that `constrain` spreads a dimension of `size` over."""
    usable = _usable()
    kept: tuple[str, ...] = ()
    for name in (axis,) if isinstance(axis, str) else axis or ():
        if name in usable and size % math.prod(usable[other] for other in (*kept, name)) == 0:
            kept = (*kept, name)
    return kept


def axis_size(name: str) -> int:
    """How many devices a mesh axis has that `constrain` would use; 1 without it."""
    return _usable().get(name, 1)


def _usable() -> dict[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in axes if size > 1 and kind == AxisType.Auto}
