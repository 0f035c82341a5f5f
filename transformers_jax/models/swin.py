"""The Swin Transformer: attention inside windows, which every second layer shifts, over maps that become smaller and
wider from stage to stage.

Liu et al. 2021, "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows". Numbers equal those of
Hugging Face's model.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from flax.typing import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from transformers_jax.models.base import Size, as_size
from transformers_jax.models.output import PYRAMID_CAPTURES, ModelOutput, check_capture
from transformers_jax.models.pyramid import PyramidConfig, given_of_stages, mean_of_map, pad_pixels, run_layers
from transformers_jax.nn import (
    MLP,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    PatchEmbedding,
    Stack,
    WindowPositionBias,
    drop_path,
    dropout,
    from_windows,
    normal_init,
    pad_to_windows,
    resize_positions,
    shifted_mask,
    split_key,
    to_windows,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.kernels import Implementation

NORM_EPSILON = 1e-5
"""Of the norms between the layers, whatever `norm_epsilon` those of the layers have: so transformers has it."""
_TABLE = re.compile(r"(.*\.)?stages\.\d+\.stack\.layers\.\d+\.relative\.embedding")


@dataclass(frozen=True, kw_only=True)
class SwinConfig(PyramidConfig):
    """Sizes and numbers of a Swin. An impossible combination is a ValueError when it is built."""

    resize_window: Size | None = None
    """Go on from a checkpoint with windows of this size: its tables of position biases are resized. None: its own."""

    RUN_FIELDS: ClassVar[tuple[str, ...]] = (*PyramidConfig.RUN_FIELDS, "resize_window")

    def __post_init__(self):
        super().__post_init__()
        if self.resize_window is not None:
            self.check_sizes("resize_window", unit="places of the map")

    def build(self, *, rngs: nnx.Rngs) -> "Swin":
        """A model of this configuration, without a head."""
        if self.resize_window is not None:
            raise ValueError(f"resize_window={self.resize_window} is for the windows of a checkpoint; set window")
        return Swin(self, rngs=rngs)

    def with_run_fields(self, chosen: Any) -> "SwinConfig":
        """With the windows that `chosen` resizes those of this configuration to."""
        config = super().with_run_fields(chosen)
        window = self.window if config.resize_window is None else config.resize_window
        return replace(config, window=window, resize_window=None)

    def flops_per_example(self, items: int = 1) -> float:
        """Floating-point operations of a forward and backward pass for `items` images of `image_size`: 6 per weight of
        a matrix product and place, and 12 * width * places of a window per place of the map for attention. Places that
        fill up windows count in attention."""
        patch, maps = as_size(self.patch_size), self.maps()
        total = 6.0 * maps[0][0] * maps[0][1] * patch[0] * patch[1] * self.channels * self.dims[0]
        for stage, (dim, depth, size) in enumerate(zip(self.dims, self.depths, maps, strict=True)):
            window, _ = fit_window(as_size(self.window), size, shifted=False)
            places = size[0] * size[1]
            filled = (size[0] + -size[0] % window[0]) * (size[1] + -size[1] % window[1])
            layer = filled * (6 * 4 * dim**2 + 12 * dim * window[0] * window[1])
            total += depth * (layer + 6.0 * places * 2 * dim * self.mlp_dim(stage))
            if stage > 0:
                total += 6.0 * places * 4 * self.dims[stage - 1] * dim
        return items * total

    def carry_over(self, parameters: Mapping[str, Any], old: Any) -> dict[str, Any]:
        """With the tables of position biases resized from windows of the configuration `old` to this one's, as the
        original does it (PyTorch's bicubic): the bias of no offset stays what it was."""
        resized = dict(parameters)
        (height, width), (new_height, new_width) = as_size(old.window), as_size(self.window)
        before, after = (2 * height - 1, 2 * width - 1), (2 * new_height - 1, 2 * new_width - 1)
        if before != after:
            resize = jax.vmap(partial(resize_positions, old=before, new=after))
            for name in filter(_TABLE.fullmatch, resized):
                resized[name] = resize(resized[name])
        return resized

    @classmethod
    def tiny(cls, **changes: Any) -> "SwinConfig":
        """28 M parameters under a head for 1,000 classes."""
        return cls._sized(changes, stochastic_depth=0.2)

    @classmethod
    def small(cls, **changes: Any) -> "SwinConfig":
        """50 M parameters."""
        return cls._sized(changes, depths=(2, 2, 18, 2), stochastic_depth=0.3)

    @classmethod
    def base(cls, **changes: Any) -> "SwinConfig":
        """88 M parameters."""
        sizes: dict[str, Any] = dict(dims=(128, 256, 512, 1024), depths=(2, 2, 18, 2), heads=(4, 8, 16, 32))
        return cls._sized(changes, **sizes, stochastic_depth=0.5)

    @classmethod
    def large(cls, **changes: Any) -> "SwinConfig":
        """197 M parameters."""
        sizes: dict[str, Any] = dict(dims=(192, 384, 768, 1536), depths=(2, 2, 18, 2), heads=(6, 12, 24, 48))
        return cls._sized(changes, **sizes, stochastic_depth=0.2)


def fit_window(
    window: tuple[int, int], size: tuple[int, int], *, shifted: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Window and shift of a layer on a map of `size` (height, width).

    A shift is half a window. On a map that is not larger than the window in one direction nothing is shifted, and no
    side of the window is longer than the map's shorter one, as in the original.
    """
    if size[0] <= window[0] or size[1] <= window[1]:
        shorter = min(size)
        return (min(window[0], shorter), min(window[1], shorter)), (0, 0)
    return window, (window[0] // 2, window[1] // 2) if shifted else (0, 0)


class SwinLayer(nnx.Module):
    """Attention inside windows, and an MLP, each after a norm and with a residual connection (Liu et al. 2021, equation
    3). `shifted`: the windows begin half a window further down and to the right. `dropout` acts on the output of each
    part."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        *,
        window: tuple[int, int],
        shifted: bool,
        activation: str = "gelu",
        implementation: Implementation | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        norm_epsilon: float = 1e-5,
        kernel_init: Initializer,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.window, self.shifted, self.dropout = window, shifted, dropout
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.attention_norm = LayerNorm(dim, epsilon=norm_epsilon, **types)
        self.attention = MultiHeadAttention(
            dim, heads, dropout=attention_dropout, implementation=implementation, kernel_init=kernel_init, **types
        )
        self.relative = WindowPositionBias(
            heads, window, embedding_init=kernel_init, param_dtype=param_dtype, rngs=rngs
        )
        self.mlp_norm = LayerNorm(dim, epsilon=norm_epsilon, **types)
        self.mlp = MLP(dim, mlp_dim, activation=activation, kernel_init=kernel_init, **types)

    def __call__(
        self,
        x: Float[Array, "batch height width dim"],
        *,
        drop_path_rate: float | Float[Array, ""] = 0.0,
        key: PRNGKey | None = None,
    ) -> Float[Array, "batch height width dim"]:
        """The map after this layer; `drop_path_rate` is how often an example skips a part of it in training."""
        keys = split_key(key, 5)
        change = dropout(self._attend(self.attention_norm(x), keys[0]), self.dropout, keys[1])
        x = x + drop_path(change, drop_path_rate, keys[2])
        change = dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[3])
        return x + drop_path(change, drop_path_rate, keys[4])

    def _attend(self, x: Array, key: PRNGKey | None) -> Array:
        batch, height, width, _ = x.shape
        window, shift = fit_window(self.window, (height, width), shifted=self.shifted)
        x = pad_to_windows(x, window)
        size, mask = (x.shape[1], x.shape[2]), None
        if any(shift):
            x = jnp.roll(x, (-shift[0], -shift[1]), axis=(1, 2))
            mask = jnp.tile(shifted_mask(size, window, shift), (batch, 1, 1, 1))
        x = to_windows(x, window)
        x = self.attention(x, mask=mask, bias=self.relative(window), key=key).hidden
        x = from_windows(x, window, size)
        x = jnp.roll(x, shift, axis=(1, 2)) if any(shift) else x
        return x[:, :height, :width]


class PatchMerging(nnx.Module):
    """Four neighbours become one place: side by side (upper left, lower left, upper right, lower right), a norm, and a
    dense layer without a bias. A map of odd size is padded with zeros."""

    def __init__(
        self,
        dim: int,
        new_dim: int,
        *,
        kernel_init: Initializer,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        types: dict[str, Any] = dict(dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.norm = LayerNorm(4 * dim, epsilon=NORM_EPSILON, **types)
        self.reduction = Linear(4 * dim, new_dim, use_bias=False, kernel_init=kernel_init, **types)

    def __call__(self, x: Float[Array, "batch height width dim"]) -> Float[Array, "batch rows columns new_dim"]:
        x = pad_to_windows(x, (2, 2))
        batch, height, width, dim = x.shape
        x = x.reshape(batch, height // 2, 2, width // 2, 2, dim).transpose(0, 1, 3, 4, 2, 5)
        return self.reduction(self.norm(x.reshape(batch, height // 2, width // 2, 4 * dim)))


class SwinStage(nnx.Module):
    """Layers on a map of one size, after the patch merging that makes it (but in the first stage)."""

    def __init__(self, config: SwinConfig, stage: int, *, rngs: nnx.Rngs):
        init, dim, depth = normal_init(config.init_std), config.dims[stage], config.depths[stage]
        self.merging = nnx.data(None)
        if stage > 0:
            self.merging = PatchMerging(config.dims[stage - 1], dim, kernel_init=init, **config.types, rngs=rngs)
        layer = partial(
            SwinLayer,
            dim,
            config.heads[stage],
            config.mlp_dim(stage),
            window=as_size(config.window),
            activation=config.activation,
            implementation=config.attention,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            norm_epsilon=config.norm_epsilon,
            kernel_init=init,
            **config.types,
        )
        # Of an odd number of layers the last is a plain one: such a cycle does not repeat.
        cycle = [partial(layer, shifted=i % 2 == 1) for i in range(depth if depth % 2 else 2)]
        self.stack = Stack(cycle, depth, remat=config.remat, unroll=config.unroll, rngs=rngs)

    def __call__(self, x: Float[Array, "batch height width dim"], given: Any) -> Float[Array, "batch rows columns new"]:
        return run_layers(self.stack, x if self.merging is None else self.merging(x), given)


class Swin(nnx.Module):
    """The Swin encoder: normalised pixels to hidden states; `ImageClassifier(Swin(config, rngs=rngs))` gives logits."""

    def __init__(self, config: SwinConfig, *, rngs: nnx.Rngs):
        self.config = config
        options: dict[str, Any] = dict(**config.types, rngs=rngs)
        self.patch_embedding = PatchEmbedding(
            as_size(config.patch_size),
            config.channels,
            config.dims[0],
            kernel_init=normal_init(config.init_std),
            **options,
        )
        self.embedding_norm = LayerNorm(config.dims[0], epsilon=NORM_EPSILON, **options)
        self.stages = nnx.List([SwinStage(config, stage, rngs=rngs) for stage in range(len(config.dims))])
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **options)

    def __call__(
        self,
        pixels: Float[Array, "batch height width channels"],
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states (batch, rows * columns, dim) of the last stage's map in reading order, and their mean, of
        normalised `pixels`.

        Images may have any size from one patch on. `key` turns dropout and stochastic depth on. `capture` names what
        else to return: "stages", the map that each stage gives out (the last one before the final norm).
        """
        config = self.config
        check_capture(capture, PYRAMID_CAPTURES)
        pixels = pad_pixels(config, pixels)
        rows, columns = config.maps((pixels.shape[1], pixels.shape[2]))[0]
        embedding_key, stack_key = split_key(key, 2)
        hidden = dropout(self.embedding_norm(self.patch_embedding(pixels)), config.dropout, embedding_key)
        hidden, stages = hidden.reshape(len(hidden), rows, columns, -1), []
        for stage, given in zip(self.stages, given_of_stages(config, stack_key), strict=True):
            hidden = stage(hidden, given)
            stages.append(hidden)
        hidden = self.norm(hidden)
        tokens = hidden.reshape(len(hidden), -1, config.dim)
        return ModelOutput(tokens, mean_of_map(hidden), stages=tuple(stages) if "stages" in capture else None)
