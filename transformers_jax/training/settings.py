"""Settings, nested frozen dataclasses, as plain data that JSON can hold, and back."""

import dataclasses
import importlib
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def to_data(value: Any) -> Any:
    """Nested dataclasses as plain data; each says its class, so that `from_data` can build it again."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        fields = {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": f"{cls.__module__}:{cls.__qualname__}"} | fields
    if isinstance(value, tuple | list):
        return [to_data(item) for item in value]
    return value


def from_data(data: Any, base: type) -> Any:
    """What `to_data` wrote: an instance of `base` or of a subclass."""
    values = dict(data)
    module, _, name = values.pop("class").partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise ValueError(f"the class {module}:{name} of this run cannot be imported; install what defines it") from None
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ValueError(f"{module}:{name} is not a {base.__name__}")
    known = {field.name: field.type for field in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{name} has no field {', '.join(unknown)}; the run was written by another version")
    for field_name, value in values.items():
        if isinstance(value, dict) and "class" in value:
            values[field_name] = from_data(value, object)
        elif isinstance(value, list):
            values[field_name] = tuple(value)
    return cls(**values)


def check_types(cls: type, values: Mapping[str, Any]) -> None:
    """ValueError for the first value that is not of the type of the field of that name."""
    hints = get_type_hints(cls)
    for name, value in values.items():
        hint = hints[name]
        if not _is_of(value, hint):
            wanted = hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
            raise ValueError(f"{name}={value!r:.60} is a {type(value).__name__}; {wanted} is needed")


def _is_of(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_is_of(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple | list):
            return False
        if arguments[-1] is ...:
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(_is_of, value, arguments))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    if not isinstance(data, dict):
        return {prefix: data}
    pieces = (flat(value, f"{prefix}.{name}" if prefix else name) for name, value in data.items())
    return {name: value for piece in pieces for name, value in piece.items()}
