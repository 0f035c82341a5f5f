"""What the configurations of all families share."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

DTYPES = ("float32", "bfloat16", "float16")
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True)
class ModelConfig:
    """Base of the model configurations: experiments annotate their `model` field with it.

    A subclass adds its fields and defines `build` and `flops_per_token`.
    """

    dtype: str = field(default="float32", kw_only=True)
    """Type of the computation: float32 or bfloat16."""
    param_dtype: str = field(default="float32", kw_only=True)
    """Type in which parameters are stored."""

    labels: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of what a classifier tells apart, in the order of its logits; a training run takes them from its data."""
    problem_type: ProblemType | None = field(default=None, kw_only=True)
    """What a sequence classifier's logits mean, in transformers' words; a training run takes it from its task."""
    classifier_dropout: float | None = field(default=None, kw_only=True)
    """Dropout before a classifier's output layer. None: that of the model."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = ("dtype", "param_dtype", "classifier_dropout")
    """Fields that a training chooses anew when it starts from a checkpoint; the others are the checkpoint's."""

    def build(self, *, rngs: Any) -> Any:
        """The model of this configuration, without a head."""
        raise NotImplementedError(f"{type(self).__name__} does not define build()")

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a forward and backward pass for one token in a sequence of `length`."""
        raise NotImplementedError(f"{type(self).__name__} does not define flops_per_token()")

    def for_head(self, head: type | None) -> Any:
        """This configuration as a model under `head` (a class of `models.heads`, None for the bare model) needs it."""
        return self

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

    def check_common(self) -> None:
        """ValueError unless the fields of this base class make sense."""
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(DTYPES)}")
        if self.problem_type not in (None, *get_args(ProblemType)):
            raise ValueError(f"problem_type={self.problem_type!r} is not one of {', '.join(get_args(ProblemType))}")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError(f"labels={self.labels} holds a name twice")
        if self.classifier_dropout is not None:
            self.check_rates("classifier_dropout")
