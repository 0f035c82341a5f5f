"""What a family says of its checkpoints: a table of rules, its architectures, and what the rules stand for in a model.

A table is read in both directions. Layer l of a checkpoint is row `l // cycle` of the parameters of
`stack.layers.{l % cycle}`, where the cycle's length is read off the model, so a rule with `{layer}` stands for all
layers. Families with several stacks (the stages of Swin) make their rules in a loop over the stages.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from flax import nnx

from transformers_jax.pretrained.files import TensorFiles

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
