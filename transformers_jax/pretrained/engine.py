"""From the tensors of a Hugging Face checkpoint to our parameters and back, by one table of rules a family."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from transformers_jax.pretrained.files import FLOATS, TensorFiles
from transformers_jax.pretrained.matching import account, show_shape
from transformers_jax.pretrained.rules import Architecture, Family, Part, Tensor, expand, rules_of

logger = logging.getLogger("transformers_jax.pretrained")


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model and an account of how it was read: paths of its parameters that the file did not hold and that start
    fresh (`new`), tensors of the file that this model does not have and that were left out (`unused`), and paths of the
    parameters that were resized (`resized`), such as positions for images of another size."""

    model: Any
    architecture: str
    new: tuple[str, ...]
    unused: tuple[str, ...]
    resized: tuple[str, ...] = ()


Shardings = Callable[[str, jax.ShapeDtypeStruct], Sharding | None] | Any
"""Where parameters go: one Sharding, a pytree of them whose paths are the parameters', or a function of path and
`jax.ShapeDtypeStruct`."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by dotted path; a parameter's is that of its `nnx.Param`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in leaves
    }


def stored_type(files: TensorFiles) -> str:
    """The name of the type that holds every floating-point tensor of the files exactly; float64 becomes float32."""
    types = [jnp.dtype(FLOATS[kind]) for kind in set(files.types.values()) if kind in FLOATS]
    widest = jnp.result_type(*types) if types else jnp.dtype(jnp.float32)
    return "float32" if widest == jnp.float64 else widest.name


def load(
    family: Family,
    architecture: Architecture,
    config: Any,
    files: TensorFiles,
    *,
    held: Any = None,
    shardings: Shardings = None,
    choose_head: bool = False,
    new_head: bool = False,
    stored: Architecture | None = None,
    rngs: nnx.Rngs | None = None,
) -> Loaded:
    """Build the model out of the files, one parameter at a time, each placed before the next is read.

    Strict, see `account`. `choose_head` leaves out tensors of heads other than `architecture`'s; `new_head` lets a head
    that the files do not hold, or not in this shape, start afresh, with `rngs`. `held` is the configuration that the
    files follow where `config` is of another size: it carries the parameters over.
    """
    held = config if held is None else held
    abstract = jax.eval_shape(lambda: architecture.build(config, nnx.Rngs(0)))
    parameters = named_leaves(abstract)
    placed = _shardings_by_path(shardings, parameters)
    in_files = parameters
    if held != config:
        in_files = named_leaves(jax.eval_shape(lambda: architecture.build(held, nnx.Rngs(0))))
    plan = account(
        family, architecture, held, files, in_files, choose_head=choose_head, new_head=new_head, stored=stored
    )

    values: dict[str, jax.Array] = {}
    if plan.new:
        key = (nnx.Rngs(0) if rngs is None else rngs).params()

        def start(key: jax.Array) -> dict[str, jax.Array]:
            built = named_leaves(architecture.build(config, nnx.Rngs(key)))
            return {path: built[path] for path in plan.new}  # what is not returned is not computed

        fresh = jax.jit(start)(key)
        values = {
            path: value if placed[path] is None else jax.device_put(value, placed[path])
            for path, value in fresh.items()
        }
        logger.warning("new parameters, not in the checkpoint: %s", ", ".join(plan.new))
    if plan.unused:
        logger.warning("tensors that %s does not have, left out: %s", architecture.name, ", ".join(plan.unused))
    resized = {}
    for path, leaf in in_files.items():
        if path not in values:
            value = _assemble(files, plan.sources[path], leaf)
            if held != config:
                before = jnp.asarray(value)
                after = config.carry_over({path: before}, held)[path]
                if after is not before:
                    value, resized[path] = (
                        np.asarray(after),
                        f"{path} {show_shape(before.shape)} to {show_shape(after.shape)}",
                    )
            values[path] = _place(value, placed[path])
    if resized:
        logger.warning("resized: %s", ", ".join(resized.values()))
    model = jax.tree.unflatten(jax.tree.structure(abstract), [values[path] for path in parameters])
    return Loaded(model, architecture.name, plan.new, plan.unused, tuple(resized))


def export(
    family: Family, architecture: Architecture, model: Any
) -> tuple[dict[str, int], Callable[[str], np.ndarray]]:
    """The tensors of a checkpoint of `model`: their sizes in bytes by name, and a function that computes one."""
    parameters = named_leaves(model)
    shapes = {path: leaf.shape for path, leaf in parameters.items()}
    tensors = {
        prefix + tensor.name: tensor
        for rule, prefix in rules_of(family, architecture, model.config)
        for tensor in expand([rule], shapes)
    }
    left = set(parameters) - {part.path for tensor in tensors.values() for part in tensor.parts}
    if left:
        raise ValueError(f"{architecture.name} has no place for the parameters {', '.join(sorted(left))}")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        parts = [
            parameters[part.path]
            if part.index is None
            else jax.lax.dynamic_index_in_dim(parameters[part.path], part.index, keepdims=False)
            for part in tensor.parts
        ]
        values = [tensor.rule.to_theirs(np.asarray(part)) for part in parts]
        return values[0] if len(values) == 1 else np.concatenate(values, axis=tensor.rule.axis)

    def size(tensor: Tensor) -> int:
        return int(np.prod(tensor.shape)) * parameters[tensor.parts[0].path].dtype.itemsize

    return {name: size(tensor) for name, tensor in tensors.items()}, read


def _assemble(
    files: TensorFiles, sources: Sequence[tuple[Tensor, Part, str]], leaf: jax.ShapeDtypeStruct
) -> np.ndarray:
    value = np.empty(leaf.shape, leaf.dtype)
    for tensor, part, name in sources:
        read = files.read(name, axis=tensor.rule.axis, start=part.start, stop=part.stop)
        shape = leaf.shape if part.index is None else leaf.shape[1:]
        value[... if part.index is None else part.index] = tensor.rule.to_ours(read, shape)
    return value


def _place(value: np.ndarray, sharding: Sharding | None) -> jax.Array:
    if sharding is None:
        placed = jax.device_put(value)
    else:
        placed = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    return jax.block_until_ready(placed)  # else the host keeps what is still on its way to the device


def _shardings_by_path(
    shardings: Shardings, parameters: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Sharding | None]:
    by_path: dict[str, Any]
    if shardings is None or isinstance(shardings, Sharding):
        by_path = {path: shardings for path in parameters}
    elif callable(shardings) and not isinstance(shardings, nnx.Module):
        choose: Any = shardings
        by_path = {path: choose(path, leaf) for path, leaf in parameters.items()}
    else:
        by_path = named_leaves(shardings)
        if different := sorted(set(parameters) ^ set(by_path)):
            raise ValueError(f"shardings and parameters differ in {', '.join(different)}")
    for path, sharding in by_path.items():
        try:
            if sharding is not None:
                sharding.shard_shape(parameters[path].shape)
        except ValueError as error:  # an axis of the mesh that does not divide the parameter's
            raise ValueError(f"{path} {show_shape(parameters[path].shape)} cannot be laid out so: {error}") from None
    return by_path
