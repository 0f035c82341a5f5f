"""Which architecture a checkpoint holds, and which of its tensors goes to which parameter: all or an error that lists
what does not match."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformers_jax.pretrained.files import FLOATS, TensorFiles
from transformers_jax.pretrained.rules import LAYER, Architecture, Family, Part, Tensor, expand, rules_of


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
            problems.append(f"missing: {prefix if prefixed else ''}{tensor.name} {show_shape(tensor.shape)}{hint}")
            continue
        used[tensor.name] = held.pop(tensor.name)
        if not fitting:
            shapes_differ = f"{show_shape(files.shapes[name])} in the file, {show_shape(tensor.shape)} in the model"
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
            problems.append(f"no rule: parameter {path} {show_shape(shapes[path])}")

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
            problems.append(f"unexpected: {name} {show_shape(files.shapes[name])}{hint}")
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


def show_shape(shape: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"
