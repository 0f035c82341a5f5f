"""What the configurations of all families share."""

from dataclasses import dataclass, fields

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Base of the model configurations: experiments annotate their `model` field with it.

    A subclass adds its fields, `build(rngs=...)`, which makes the model without a head, and `flops_per_token(length)`.
    """

    def check_positive(self, *names: str) -> None:
        """ValueError unless each of these fields is at least 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def check_rates(self, *names: str) -> None:
        """ValueError unless each of these fields is in [0, 1)."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")

    def check_types(self) -> None:
        """ValueError unless `dtype` and `param_dtype` are types that models compute and store in."""
        for field in fields(self):
            if field.name in ("dtype", "param_dtype") and getattr(self, field.name) not in DTYPES:
                raise ValueError(f"{field.name}={getattr(self, field.name)!r} is not one of {', '.join(DTYPES)}")
