"""What the configurations of all families share."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from transformers_jax.nn import TransformerLayer, extend_positions, normal_init
from transformers_jax.nn.kernels import Implementation, check_implementation
from transformers_jax.nn.mlp import check_activation
from transformers_jax.nn.patch import grid_size
from transformers_jax.nn.patterns import Causal, Full, Pattern, parse_pattern
from transformers_jax.nn.stack import check_remat

DTYPES = ("float32", "bfloat16", "float16")
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the model configurations: experiments annotate their `model` field with it.

    A subclass adds its fields and defines `build` and `flops_per_token`.
    """

    dtype: str = "float32"
    """Type of the computation: float32 or bfloat16."""
    param_dtype: str = "float32"
    """Type in which parameters are stored."""

    labels: tuple[str, ...] = ()
    """Names of what a classifier tells apart, in the order of its logits; a training run takes them from its data."""
    problem_type: ProblemType | None = None
    """What a sequence classifier's logits mean, in transformers' words; a training run takes it from its task."""
    classifier_dropout: float | None = None
    """Dropout before a classifier's output layer. None: that of the model."""

    classifier_bias: ClassVar[bool] = True
    """Whether a sequence classifier's output layer has a bias."""
    RUN_FIELDS: ClassVar[tuple[str, ...]] = ("dtype", "param_dtype", "classifier_dropout")
    """Fields that a training chooses anew when it starts from a checkpoint; the others are the checkpoint's."""
    RESIZABLE: ClassVar[tuple[str, ...]] = ()
    """Fields of which `carry_over` takes parameters to another value."""

    def build(self, *, rngs: Any) -> Any:
        """The model of this configuration, without a head."""
        raise NotImplementedError(f"{type(self).__name__} does not define build()")

    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of a forward and backward pass for one token in a sequence of `length`."""
        raise NotImplementedError(f"{type(self).__name__} does not define flops_per_token()")

    def flops_per_example(self, items: int) -> float:
        """Those of an example of `items` tokens."""
        return self.flops_per_token(items) * items

    def carry_over(self, parameters: Mapping[str, Any], old: Any) -> dict[str, Any]:
        """Parameters by name of a backbone of the configuration `old`, made to fit this one where it is of another
        size, such as positions of smaller images."""
        return dict(parameters)

    def for_head(self, head: type | None) -> Any:
        """This configuration as a model under `head` (a class of `models.heads`, None for the bare model) needs it."""
        return self

    def with_run_fields(self, chosen: Any) -> Any:
        """This configuration with the `RUN_FIELDS` of another one of its kind."""
        if type(chosen) is not type(self):
            raise ValueError(
                f"the checkpoint holds a {type(self).__name__}, but the experiment has a {type(chosen).__name__}"
            )
        return replace(self, **self.run_changes(chosen))

    def run_changes(self, chosen: Any) -> dict[str, Any]:
        """What `with_run_fields` takes from `chosen`."""
        return {name: getattr(chosen, name) for name in self.RUN_FIELDS}

    @classmethod
    def _sized(cls, changes: dict[str, Any], **sizes: Any) -> Any:
        """A named size, with what the caller wants otherwise."""
        return cls(**(sizes | changes))

    @property
    def types(self) -> dict[str, Any]:
        """`dtype` and `param_dtype` as the blocks take them."""
        return dict(dtype=jnp.dtype(self.dtype), param_dtype=jnp.dtype(self.param_dtype))

    def check_positive(self, *names: str) -> None:
        """ValueError unless each of these fields is at least 1, or None."""
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    def check_sizes(self, *names: str, unit: str = "pixels") -> None:
        """ValueError unless each of these fields is a whole number of at least 1, or two of them."""
        for name in names:
            size = getattr(self, name)
            sides = size if isinstance(size, tuple) and len(size) == 2 else (size,)
            if not all(isinstance(x, int) and x >= 1 for x in sides):
                raise ValueError(f"{name}={size} must be a whole number of {unit}, or two (height, width)")

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


@dataclass(frozen=True, kw_only=True)
class LayersConfig(ModelConfig):
    """What all configurations with Transformer layers share, be they of one width or of several. An impossible
    combination is a ValueError when it is built."""

    activation: str = "gelu"
    """Activation of the MLP: gelu (exact), gelu_tanh (GPT-2's), gelu_quick, relu, silu or tanh."""
    norm_epsilon: float = 1e-5
    """Added to the variance in layer norms."""
    dropout: float = 0.1
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.1
    """Dropout on the attention weights."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""
    remat: str | None = None
    """Recompute layers in the backward pass to save memory: full, dots, dots_no_batch, or None."""
    unroll: int = 1
    """Layers laid out per scan step; the depth of a small model makes it faster on CPU, and slower to compile."""
    attention: Implementation | None = None
    """Force one way of computing attention: plain, blockwise, xla, cudnn or splash. None chooses."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (
        *ModelConfig.RUN_FIELDS,
        *("remat", "unroll", "attention", "dropout", "attention_dropout"),
    )

    def __post_init__(self):
        self.check_common()
        self.check_positive("unroll")
        self.check_rates("dropout", "attention_dropout")
        check_activation(self.activation)
        check_remat(self.remat)
        check_implementation(self.attention)


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(LayersConfig):
    """What all configurations with a stack of equal Transformer layers share."""

    dim: int = 768
    """Width of the hidden states."""
    depth: int = 12
    """Number of layers."""
    heads: int = 12
    """Attention heads; they divide `dim`."""
    mlp_dim: int | None = None
    """Width inside the MLP. None is 4 * dim."""
    patterns: tuple[str, ...] = ()
    """Attention patterns that the layers take in turn, as `nn.parse_pattern` reads them, such as ("causal", "causal &
    local(128)"). Empty: every layer looks at everything, in a decoder at everything before."""

    decodes: ClassVar[bool] = False
    """Whether no token may see what comes after it."""
    PATTERN_FIELDS: ClassVar[tuple[str, ...]] = ("patterns",)
    """Fields that hold attention patterns."""

    def __post_init__(self):
        super().__post_init__()
        self.check_positive("dim", "depth", "heads", "mlp_dim")
        if self.dim % self.heads and getattr(self, "head_dim", None) is None:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}")
        self.read_patterns("patterns", self.depth, decodes=self.decodes)

    @property
    def longest(self) -> int | None:
        """The most tokens of a sequence; None: any number."""
        return None

    def run_changes(self, chosen: Any) -> dict[str, Any]:
        """With the patterns of `chosen`, where it has any: they change no parameter."""
        given = {name: getattr(chosen, name) for name in self.PATTERN_FIELDS if getattr(chosen, name)}
        return super().run_changes(chosen) | given

    def read_patterns(self, name: str, depth: int, *, decodes: bool) -> tuple[Pattern, ...]:
        """The patterns in the field `name` for a stack of `depth` layers; ValueError where they do not fit it, or the
        longest sequence, or let a decoder look ahead."""
        texts = getattr(self, name)
        if not texts:
            return (Causal() if decodes else Full(),)
        if depth % len(texts):
            raise ValueError(f"{name} holds {len(texts)} patterns, which do not divide the depth of {depth} layers")
        try:
            patterns = tuple(parse_pattern(text) for text in texts)
            for pattern in patterns:
                if self.longest is not None:
                    pattern.check(self.longest)
                elif pattern.longest is not None:
                    raise ValueError(f"{pattern}: sequences of any length need patterns of any length")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        for text, pattern in zip(texts, patterns, strict=True):
            if decodes and not pattern.causal:
                raise ValueError(f"{name} holds {text!r}, which lets a decoder look ahead; add & causal")
        return patterns

    def cycle(self, patterns: Sequence[Pattern], **changes: Any) -> list[partial[TransformerLayer]]:
        """What makes the layers that a stack takes in turn, one for each of `patterns`; `changes` as of `layer`."""
        return [self.layer(pattern=pattern, **changes) for pattern in patterns]

    def layer(self, **changes: Any) -> partial[TransformerLayer]:
        """What makes one layer of these sizes, given `rngs`; `changes` are arguments of `TransformerLayer`."""
        settings = dict(
            activation=self.activation,
            implementation=self.attention,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            norm_epsilon=self.norm_epsilon,
            kernel_init=normal_init(self.init_std),
        )
        return partial(
            TransformerLayer, self.dim, self.heads, self.mlp_dim or 4 * self.dim, **settings | self.types | changes
        )

    def layer_flops_per_token(self, length: int) -> float:
        """Floating-point operations of a forward and backward pass through the layers for one token in a sequence of
        `length`: 6 per weight of a matrix product, and 12 * depth * dim * length for attention (Chowdhery et al. 2022,
        appendix B), or less where a pattern lets it see less."""
        weights = self.depth * (4 * self.dim**2 + 2 * self.dim * (self.mlp_dim or 4 * self.dim))
        seen = self.keys_seen("patterns", self.depth, length, decodes=self.decodes)
        return 6.0 * weights + 12.0 * self.dim * seen

    def keys_seen(self, name: str, depth: int, length: int, *, decodes: bool) -> float:
        """How many keys a token of a sequence of `length` sees in `depth` layers with the patterns in the field
        `name`."""
        patterns = self.read_patterns(name, depth, decodes=decodes)
        return depth * sum(pattern.keys_seen(length) for pattern in patterns) / len(patterns)


@dataclass(frozen=True, kw_only=True)
class VocabularyConfig(ModelConfig):
    """What the configurations of models of tokens share, whatever their layers are."""

    vocab_size: int | None = None
    """Number of tokens. None takes the tokenizer's when a training run starts."""
    max_length: int = 512
    """Longest sequence in tokens, special ones and generated ones included."""
    tie_embeddings: bool = True
    """Read tokens out through the token embedding."""
    bos_id: int | None = None
    """Token that starts a text, if there is one; carried in the checkpoint."""
    eos_id: int | tuple[int, ...] | None = None
    """Token, or tokens, that end a text; carried in the checkpoint for generation."""
    pad_id: int | None = None
    """Token that fills up short rows; the attention mask decides what is padding, not this id."""

    @property
    def longest(self) -> int | None:
        return self.max_length

    def check_common(self) -> None:
        super().check_common()
        self.check_positive("vocab_size", "max_length")

    def check_vocabulary(self) -> int:
        """`vocab_size`; a ValueError where it is still None."""
        if self.vocab_size is None:
            raise ValueError("vocab_size is None; give a number (a training run takes its tokenizer's)")
        return self.vocab_size


@dataclass(frozen=True, kw_only=True)
class TextConfig(VocabularyConfig, TransformerConfig):
    """What the configurations of text models share."""

    resize_positions: bool = False
    """Of a training that starts from a checkpoint: take its positions to `max_length` (learned ones begin again after
    the last one). Otherwise the checkpoint's longest sequence stays, and longer ones are refused."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*TransformerConfig.RUN_FIELDS, "resize_positions")
    RESIZABLE: ClassVar[tuple[str, ...]] = ("max_length",)

    def run_changes(self, chosen: Any) -> dict[str, Any]:
        """With the length that positions are to be resized to."""
        return super().run_changes(chosen) | ({"max_length": chosen.max_length} if chosen.resize_positions else {})

    def carry_over(self, parameters: Mapping[str, Any], old: Any) -> dict[str, Any]:
        """With tables of learned positions as long as this configuration's."""
        carried = dict(parameters)
        if self.max_length is not None and old.max_length != self.max_length:
            prefix = getattr(self, "position_offset", 0)
            for name in (name for name in carried if re.search(r"(^|\.)positions\.embedding$", name)):
                carried[name] = extend_positions(carried[name], self.max_length, prefix=prefix)
        return carried


Size = int | tuple[int, int]
"""Of an image or a patch in pixels: (height, width), or one number for both."""


@dataclass(frozen=True, kw_only=True)
class ImageConfig(LayersConfig):
    """What the configurations of image models share."""

    image_size: Size = 224
    """Size of the images that the model is trained on, in pixels: height and width, or one number for both."""
    patch_size: Size = 16
    """Size of the patches that are the first tokens, in pixels."""
    channels: int = 3
    """Colour channels: 3, or 1 for grey images."""
    image_mean: tuple[float, ...] = (0.5,)
    """Subtracted from pixels between 0 and 1: one number for each channel, or for all; the processor's."""
    image_std: tuple[float, ...] = (0.5,)
    """They are then divided by it."""
    stochastic_depth: float = 0.0
    """How often the last layer is skipped in training, for each image; earlier ones in proportion to their depth."""
    dropout: float = 0.0
    """Dropout after attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout on the attention weights."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*LayersConfig.RUN_FIELDS, "stochastic_depth")
    RESIZABLE: ClassVar[tuple[str, ...]] = ("image_size",)

    def __post_init__(self):
        super().__post_init__()
        self.check_sizes("image_size", "patch_size")
        self.check_positive("channels")
        self.check_rates("stochastic_depth")
        for name in ("image_mean", "image_std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ValueError(f"{name}={getattr(self, name)} needs 1 or channels={self.channels} numbers")
        if not all(std > 0 for std in self.image_std):
            raise ValueError(f"image_std={self.image_std} must be above 0")
        try:
            _ = self.grid
        except ValueError as error:
            raise ValueError(f"image_size={self.image_size}, patch_size={self.patch_size}: {error}") from None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size`."""
        return grid_size(as_size(self.image_size), as_size(self.patch_size))


def drop_path_rates(last: float, depth: int) -> np.ndarray | None:
    """How often each of `depth` layers is skipped: 0 for the first, `last` for the last, in a straight line (Huang et
    al. 2016); None where no layer is skipped."""
    return None if last == 0 else np.linspace(0, last, depth, dtype=np.float32)


def check_pixels(pixels: Shaped[Array, "batch height width channels"]) -> None:
    """ValueError unless these are floating-point numbers, as normalised pixels are."""
    if not jnp.issubdtype(pixels.dtype, jnp.floating):
        raise ValueError(f"pixels are {pixels.dtype}; divide them by 255 and normalise them")


def as_size(size: Size) -> tuple[int, int]:
    """(height, width)."""
    return (size, size) if isinstance(size, int) else size
