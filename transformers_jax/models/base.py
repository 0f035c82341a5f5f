"""What the configurations of all families share."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Base of the model configurations: experiments annotate their `model` field with it.

    A subclass adds its fields and defines `build` and `flops_per_token`.
    """

    dtype: str = field(default="float32", kw_only=True)
    """Type of the computation: float32 or bfloat16."""
    param_dtype: str = field(default="float32", kw_only=True)
    """Type in which parameters are stored."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = ("dtype", "param_dtype")
    """Fields that a training chooses anew when it starts from a checkpoint; the others are the checkpoint's."""

    def build(self, *, rngs: Any) -> Any:
        """The model of this configuration, without a head."""
        raise NotImplementedError(f"{type(self).__name__} does not define build()")

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a forward and backward pass for one token in a sequence of `length`."""
        raise NotImplementedError(f"{type(self).__name__} does not define flops_per_token()")

    def with_run_fields(self, chosen: Any) -> Any:
        """This configuration with the `RUN_FIELDS` of another one of its kind."""
        if type(chosen) is not type(self):
            raise ValueError(
                f"the checkpoint holds a {type(self).__name__}, but the experiment has a {type(chosen).__name__}"
            )
        return replace(self, **{name: getattr(chosen, name) for name in self.RUN_FIELDS})

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
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
