"""Small frozen dataclasses that JAX walks through."""

import dataclasses
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=False)
def pytree_dataclass(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass and a pytree whose children are its fields.

    Unlike `jax.tree_util.register_dataclass`, rebuilding an instance does not call `__init__`: JAX puts placeholders
    into pytrees (tree structures, `in_axes`), and run-time type checks of the fields must not see those.
    """
    cls = dataclasses.dataclass(frozen=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(cls))  # pyright: ignore[reportArgumentType]

    def flatten(instance):
        return tuple((jax.tree_util.GetAttrKey(name), getattr(instance, name)) for name in names), None

    def unflatten(_, children):
        instance = object.__new__(cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls
