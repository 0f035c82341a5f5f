"""Settings, nested frozen dataclasses, as plain data that JSON can hold, and back."""

import dataclasses
import importlib
from typing import Any


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


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted names."""
    if not isinstance(data, dict):
        return {prefix: data}
    pieces = (flat(value, f"{prefix}.{name}" if prefix else name) for name, value in data.items())
    return {name: value for piece in pieces for name, value in piece.items()}
