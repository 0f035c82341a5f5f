"""From the tensors of a Hugging Face checkpoint to our parameters and back, by one table of rules a family.

A family's table is read in both directions. Layer l of a checkpoint is row `l // cycle` of the parameters of
`stack.layers.{l % cycle}`, where the cycle's length is read off the model, so a rule with `{layer}` stands for all
layers. Families with several stacks (the stages of Swin) make their rules in a loop over the stages.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding

from transformers_jax.pretrained.files import FLOATS, TensorFiles

logger = logging.getLogger("transformers_jax.pretrained")

LAYER = "{layer}"


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where one tensor of a checkpoint lives in our model, in both directions.

    `theirs` is the tensor's name without the family's prefix, `ours` the path of the parameter. `{layer}` in `theirs`
    is the layer's number; in `ours` it is the place in the stack's cycle (without it, the path names one place of the
    cycle, and `{layer}` counts the cycles). Several paths in `ours` share a fused tensor: they lie in it side by side
    along `axis`, as wide as the parameters are. `axes` is the order in which ours takes the tensor's axes: (1, 0) is a
    transposition. `shape` is the tensor's shape when ours holds the permuted values in another shape: a convolution's
    (dim, channels, height, width) with axes (2, 3, 1, 0) as a kernel (height * width * channels, dim).
    """

    theirs: str
    ours: str | tuple[str, ...]
    axes: tuple[int, ...] | None = None
    axis: int = -1
    shape: tuple[int, ...] | None = None

    def shape_of_theirs(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a parameter's values have in the file."""
        if self.shape is not None:
            return self.shape
        return ours if self.axes is None else tuple(int(ours[i]) for i in np.argsort(self.axes))

    def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        return (tensor if self.axes is None else tensor.transpose(self.axes)).reshape(shape)

    def to_theirs(self, parameter: np.ndarray) -> np.ndarray:
        if self.axes is None:
            return parameter.reshape(self.shape_of_theirs(parameter.shape))
        permuted = parameter.shape if self.shape is None else tuple(self.shape[i] for i in self.axes)
        return parameter.reshape(permuted).transpose(np.argsort(self.axes))


def linear(theirs: str, ours: str) -> tuple[Rule, Rule]:
    """The rules of a dense layer that PyTorch stores as (out, in)."""
    return Rule(theirs + ".weight", ours + ".kernel", axes=(1, 0)), Rule(theirs + ".bias", ours + ".bias")


def layer_norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
    return Rule(theirs + ".weight", ours + ".scale"), Rule(theirs + ".bias", ours + ".bias")


def under(backbone: Any, head: Any) -> Callable[[Any, nnx.Rngs], nnx.Module]:
    """What builds `backbone` under `head`, or alone if that is None."""

    def build(config: Any, rngs: nnx.Rngs) -> nnx.Module:
        bare = backbone(config, rngs=rngs)
        return bare if head is None else head(bare, rngs=rngs)

    return build


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class of transformers: a family's backbone, alone or under one of our heads.

    `build(config, rngs)` makes the model; `rules`, or `rules(config)`, are those of the head's own tensors (names
    without prefix, paths from the model's root). `copies(config)` names tensors that a file may hold a second time
    under another name, such as a tied output layer: they must equal the tensor they copy, and are not written.
    `configure(config, names)` turns what config.json says into the configuration of this class's model, for a file
    that holds tensors of these names; `fits(config)` tells whether a model with this head is of this class, where
    several have the head.
    """

    name: str
    head: type[nnx.Module] | None
    build: Callable[[Any, nnx.Rngs], nnx.Module]
    rules: Sequence[Rule] | Callable[[Any], Sequence[Rule]] = ()
    copies: Callable[[Any], Mapping[str, str]] = lambda config: {}
    configure: Callable[[Any, Collection[str]], Any] = lambda config, names: config
    fits: Callable[[Any], bool] = lambda config: True

    def rules_for(self, config: Any) -> Sequence[Rule]:
        return self.rules(config) if callable(self.rules) else self.rules

    def names(self, config: Any) -> frozenset[str]:
        """The names of the head's own tensors."""
        return frozenset(rule.theirs for rule in self.rules_for(config))

    def held_by(self, names: Collection[str], config: Any) -> bool:
        """Whether a file with tensors of these names holds all of the head."""
        found = {original for copy, original in self.copies(config).items() if copy in names} | set(names)
        return self.names(config) <= found


@dataclasses.dataclass(frozen=True)
class Family:
    """All that the engine has to know of a model family.

    `rules(config)` is the backbone's table, with paths from the backbone; a rule whose parameters the model does not
    have does not apply. `prefix` stands before the backbone's names in checkpoints with a head. `ignored` are regular
    expressions of tensors without information (masks, position ids), `renamed` pairs of regular expression and
    replacement for names from older files, `spare` regular expressions of tensors that files hold or lack whatever
    their head (a pooler): left out by a model without them, new with a new head; all see names without prefix. The
    first architecture is the bare backbone. `read_config` takes the fields it knows out of a config.json's,
    `write_config` gives them back. `fits(config)` tells whether a model of the backbone is one of this family, where
    several have the backbone; `fixed(config, head)` names what its classes compute whatever config.json says. `library`
    is whose files these are: timm's config.json has a form of its own, which becomes this one outside of the engine.
    """

    model_type: str
    prefix: str
    backbone: type[nnx.Module]
    rules: Callable[[Any], Sequence[Rule]]
    architectures: tuple[Architecture, ...]
    read_config: Callable[[dict[str, Any]], Any]
    write_config: Callable[[Any], dict[str, Any]]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    spare: tuple[str, ...] = ()
    fits: Callable[[Any], bool] = lambda config: True
    fixed: Callable[[Any, type | None], Mapping[str, Any]] = lambda config, head: {}
    library: Literal["transformers", "timm"] = "transformers"

    def architecture(self, name: str) -> Architecture:
        for architecture in self.architectures:
            if architecture.name == name:
                return architecture
        names = ", ".join(architecture.name for architecture in self.architectures)
        raise ValueError(f"architecture {name} is not supported for {self.model_type}; there are {names}")

    def of_head(self, head: type) -> list[Architecture]:
        """The architectures with this head, or the bare one for the class of the backbone."""
        wanted = None if head is self.backbone else head
        found = [architecture for architecture in self.architectures if architecture.head is wanted]
        if not found:
            heads = {architecture.head or self.backbone: None for architecture in self.architectures}
            names = ", ".join(known.__name__ for known in heads)
            raise ValueError(f"there is no {head.__name__} for {self.model_type}; there are {names}")
        return found

    def canonical(self, name: str) -> str:
        """A tensor's name without the prefix and as newer files write it."""
        name = name.removeprefix(self.prefix)
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def names(self, files: TensorFiles) -> set[str]:
        return {self.canonical(name) for name in files.shapes}


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


@dataclasses.dataclass(frozen=True)
class Part:
    """What one tensor holds of one parameter: `index` is the row of a stacked parameter, `start` to `stop` the place
    in a fused tensor along its rule's axis."""

    path: str
    index: int | None
    start: int = 0
    stop: int | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as a rule and a model say it must be in the file."""

    name: str
    shape: tuple[int, ...]
    rule: Rule
    parts: tuple[Part, ...]


Shardings = Callable[[str, jax.ShapeDtypeStruct], Sharding | None] | Any
"""Where parameters go: one Sharding, a pytree of them whose paths are the parameters', or a function of path and
`jax.ShapeDtypeStruct`."""


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by dotted path; a parameter's is that of its `nnx.Param`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in leaves
    }


def expand(rules: Sequence[Rule], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """The tensors that `rules` stand for in a model with parameters of these shapes."""
    for rule in rules:
        paths = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        if LAYER not in rule.theirs:
            places = [(rule.theirs, paths, None)]
        elif LAYER in paths[0]:
            stack = paths[0].split(LAYER)[0]
            cycle = len({path[len(stack) :].split(".")[0] for path in shapes if path.startswith(stack)})
            repeats = max((shape[0] for path, shape in shapes.items() if path.startswith(stack)), default=0)
            places = [
                (
                    rule.theirs.replace(LAYER, str(layer)),
                    tuple(path.replace(LAYER, str(layer % cycle)) for path in paths),
                    layer // cycle,
                )
                for layer in range(cycle * repeats)
            ]
        else:
            repeats = shapes[paths[0]][0] if paths[0] in shapes else 0
            places = [(rule.theirs.replace(LAYER, str(layer)), paths, layer) for layer in range(repeats)]
        for name, paths, index in places:
            if any(path in shapes for path in paths):
                yield _tensor(name, rule, paths, index, shapes)


def _tensor(
    name: str, rule: Rule, paths: tuple[str, ...], index: int | None, shapes: Mapping[str, tuple[int, ...]]
) -> Tensor:
    of_parts = [rule.shape_of_theirs(shapes[path] if index is None else shapes[path][1:]) for path in paths]
    if len(paths) == 1:
        return Tensor(name, of_parts[0], rule, (Part(paths[0], index),))
    ends = np.cumsum([shape[rule.axis] for shape in of_parts]).tolist()
    parts = (Part(path, index, start, stop) for path, start, stop in zip(paths, [0, *ends], ends, strict=False))
    fused = list(of_parts[0])
    fused[rule.axis] = ends[-1]
    return Tensor(name, tuple(fused), rule, tuple(parts))


def rules_of(family: Family, architecture: Architecture, config: Any) -> list[tuple[Rule, str]]:
    """The whole table of a model, with paths from the model's root, and the prefix of each rule's tensor."""
    if architecture.head is None:
        return [(rule, "") for rule in family.rules(config)]

    def under_head(rule: Rule) -> Rule:
        ours = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
        return dataclasses.replace(rule, ours=tuple("backbone." + path for path in ours))

    return [(under_head(rule), family.prefix) for rule in family.rules(config)] + [
        (rule, "") for rule in architecture.rules_for(config)
    ]


def choose_architecture(
    family: Family,
    config: Any,
    files: TensorFiles,
    *,
    asked: str | type | None = None,
    named: str | None = None,
    fits: Callable[[Architecture], bool] = lambda architecture: True,
) -> Architecture:
    """The architecture that is `asked` for, by its name or as a class of ours, or the one that the files hold.

    What config.json has `named` counts, but for one thing: where the files hold all of a class that has more of the
    same head, it is that one, as in BERT's own checkpoints, which say BertForMaskedLM and hold a BertForPreTraining.
    Of several with the class that is asked for, it is the one that `fits`, and holds most of what the files do.
    """
    held = family.names(files)

    def widest(options: Sequence[Architecture]) -> Architecture:
        whole = [architecture for architecture in options if architecture.held_by(held, config)]
        return max(whole or options[:1], key=lambda architecture: len(architecture.names(config)))

    if isinstance(asked, str):
        return family.architecture(asked)
    if asked is not None:
        options = family.of_head(asked)
        return widest([architecture for architecture in options if fits(architecture)] or options)
    if named is not None:
        first = family.architecture(named)
        wider = (other for other in family.architectures if other.names(config) > first.names(config))
        return widest([first, *(other for other in wider if other.head is first.head)])

    fitting = [
        architecture
        for architecture in family.architectures[1:]
        if held & (architecture.names(config) | set(architecture.copies(config)))
    ]
    whole = [architecture for architecture in fitting if architecture.held_by(held, config)]
    most = [one for one in whole if not any(one.names(config) < other.names(config) for other in whole)] or fitting
    if len(most) == 1:
        return most[0]
    if not fitting and not any(family.prefix and name.startswith(family.prefix) for name in files.shapes):
        return family.architectures[0]
    names = ", ".join(architecture.name for architecture in family.architectures)
    raise ValueError(
        f"config.json names no architecture and the tensors do not tell; pass architecture=, one of {names}"
    )


def stored_type(files: TensorFiles) -> str:
    """The name of the type that holds every floating-point tensor of the files exactly; float64 becomes float32."""
    types = [jnp.dtype(FLOATS[kind]) for kind in set(files.types.values()) if kind in FLOATS]
    widest = jnp.result_type(*types) if types else jnp.dtype(jnp.float32)
    return "float32" if widest == jnp.float64 else widest.name


@dataclasses.dataclass(frozen=True)
class Account:
    """Where each parameter comes from: (what the table says, the part of it, its name in the files) by path; the paths
    that start fresh; and the names in the files that are left out."""

    sources: dict[str, list[tuple[Tensor, Part, str]]]
    new: tuple[str, ...]
    unused: tuple[str, ...]


def account(
    family: Family,
    architecture: Architecture,
    config: Any,
    files: TensorFiles,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    *,
    choose_head: bool = False,
    new_head: bool = False,
    stored: Architecture | None = None,
) -> Account:
    """Match every tensor of the files with every parameter; ValueError with the list of all that do not match.

    `stored` is the architecture that the files say they hold: what another head than its own calls by the same name is
    not the same thing.
    """
    shapes = {path: leaf.shape for path, leaf in parameters.items()}
    table = [
        (tensor, prefix) for rule, prefix in rules_of(family, architecture, config) for tensor in expand([rule], shapes)
    ]
    head_names = architecture.names(config)
    foreign = frozenset()
    if stored is not None and stored.head is not architecture.head:
        foreign = stored.names(config) & head_names
    copies = architecture.copies(config)
    prefixed = bool(family.prefix) and any(name.startswith(family.prefix) for name in files.shapes)
    problems: list[str] = []

    held: dict[str, str] = {}  # by the name without prefix
    for name in sorted(files.shapes):
        canonical = family.canonical(name)
        if _matches(canonical, family.ignored):
            continue
        if canonical in held:
            problems.append(f"twice: {held[canonical]} and {name} are the same tensor")
        held[canonical] = name
    for copy, original in copies.items():
        if copy in held and original not in held:  # a file may keep either name of a shared tensor
            held[original] = held.pop(copy)

    sources: dict[str, list[tuple[Tensor, Part, str]]] = {path: [] for path in parameters}
    new: set[str] = set()
    used: dict[str, str] = {}
    unused: list[str] = []
    for tensor, prefix in table:
        name = None if tensor.name in foreign else held.get(tensor.name)
        renewable = tensor.name in head_names or _matches(tensor.name, family.spare)
        fitting = name is not None and files.shapes[name] == tensor.shape
        if renewable and new_head and not fitting:
            new.update(part.path for part in tensor.parts)
            if name is not None:
                unused.append(held.pop(tensor.name))
            continue
        hint = "; pass new_head=True to start it afresh" if tensor.name in head_names else ""
        if name is None:
            problems.append(f"missing: {prefix if prefixed else ''}{tensor.name} {_show(tensor.shape)}{hint}")
            continue
        used[tensor.name] = held.pop(tensor.name)
        if not fitting:
            shapes_differ = f"{_show(files.shapes[name])} in the file, {_show(tensor.shape)} in the model"
            problems.append(f"wrong shape: {name} is {shapes_differ}{hint}")
        if files.types[name] not in FLOATS:
            problems.append(f"wrong type: {name} is {files.types[name]}, not one of {', '.join(FLOATS)}")
        for part in tensor.parts:
            sources[part.path].append((tensor, part, name))
    covered = {part.path for tensor, _ in table for part in tensor.parts}
    for path in parameters:
        if path not in covered and new_head and architecture.head is not None and not path.startswith("backbone."):
            new.add(path)  # of a head that transformers does not have so
        elif path not in covered:
            problems.append(f"no rule: parameter {path} {_show(shapes[path])}")

    elsewhere = _names_elsewhere(family, architecture, config, shapes)
    for canonical, name in held.items():
        if canonical in copies:
            original = used.get(copies[canonical])
            if original is None or np.array_equal(files.read(name), files.read(original)):
                continue
            if not _matches(canonical, family.spare):
                problems.append(f"not a copy: {name} differs from {original}, but config.json ties them")
                continue
        known = _matches(canonical, elsewhere)
        chosen = choose_head and (known or (prefixed and not name.startswith(family.prefix)))
        if chosen or _matches(canonical, family.spare):
            unused.append(name)
        else:
            hint = f"; pass architecture={architecture.name!r} to leave out other heads" if known else ""
            problems.append(f"unexpected: {name} {_show(files.shapes[name])}{hint}")
    if problems:
        raise ValueError("\n  ".join([f"{files.directory} does not fit {architecture.name}:", *sorted(problems)]))
    return Account(sources, tuple(sorted(new)), tuple(sorted(unused)))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _names_elsewhere(
    family: Family, architecture: Architecture, config: Any, shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Patterns of the tensors that the family's table knows but this architecture does not have."""
    names = [rule.theirs for rule, _ in rules_of(family, architecture, config) if not any(expand([rule], shapes))]
    for other in family.architectures:
        names += [*other.copies(config), *other.names(config)]
    return [re.escape(name).replace(re.escape(LAYER), r"\d+") for name in names]


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
                    value, resized[path] = np.asarray(after), f"{path} {_show(before.shape)} to {_show(after.shape)}"
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
            raise ValueError(f"{path} {_show(parameters[path].shape)} cannot be laid out so: {error}") from None
    return by_path


def _show(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
