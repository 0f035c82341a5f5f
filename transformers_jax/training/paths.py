"""Readable names for the leaves of a pytree: `backbone.stack.layers.0.mlp.up.kernel`.

Decay rules, the sharding table and checkpoints all speak of parameters by these names, so that none of them depends on
how Flax or optax happen to nest their containers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey


def parameter_name(path: Sequence[Any]) -> str:
    """Join a key path of `jax.tree_util` with dots.

    A `flax.nnx.Variable` is a node of its own whose only child is called `value`; that last level is left out, so a
    module's parameter has the name a person would write: `mlp.up.kernel`, not `mlp.up.kernel.value`.
    """
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return ".".join(_component(key) for key in path)


def named_leaves(tree: Any) -> dict[str, Any]:
    """All leaves of `tree` by name, in the tree's order. Two leaves of one name are a `ValueError`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {parameter_name(path): leaf for path, leaf in leaves}
    if len(named) < len(leaves):
        names = [parameter_name(path) for path, _ in leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"two leaves of the tree have the same name: {', '.join(twice)}; rename one of them")
    return named


def with_leaves(tree: Any, named: Mapping[str, Any]) -> Any:
    """`tree` with each leaf replaced by the one of its name in `named` (the inverse of `named_leaves`)."""
    return jax.tree_util.tree_map_with_path(lambda path, _: named[parameter_name(path)], tree)


def _component(key: Any) -> str:
    match key:
        case GetAttrKey():
            return key.name
        case DictKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case FlattenedIndexKey():
            return str(key.key)
        case _:
            return str(key)
