"""DaViT: attention inside windows, then attention among channels, over maps that become smaller and wider from stage to
stage.

Ding et al. 2022, "DaViT: Dual Attention Vision Transformers". Numbers equal those of timm's model, whose files hold the
published weights, and with `florence2_base` those of the image encoder of Florence-2.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from flax import nnx
from jaxtyping import Array, Float

from transformers_jax.models.base import as_size
from transformers_jax.models.output import PYRAMID_CAPTURES, ModelOutput, check_capture
from transformers_jax.models.pyramid import PyramidConfig, given_of_stages, mean_of_map, pad_pixels, run_layers
from transformers_jax.nn import (
    MLP,
    DepthwiseConvolution,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    Stack,
    attend,
    drop_path,
    dropout,
    from_windows,
    normal_init,
    pad_to_windows,
    split_key,
    to_windows,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.kernels import Implementation
from transformers_jax.nn.sharding import BATCH, TENSOR, constrain

ChannelScale = Literal["channels", "places"]


@dataclass(frozen=True, kw_only=True)
class DaViTConfig(PyramidConfig):
    """Sizes and numbers of a DaViT. An impossible combination is a ValueError when it is built.

    A layer, in the words of `depths`, is a pair of blocks: the first attends inside windows, with `heads`, the second
    among the channels of each of as many groups.
    """

    depths: tuple[int, ...] = (1, 1, 3, 1)
    """Pairs of blocks in each stage."""
    channel_scale: ChannelScale = "channels"
    """What scores between channels are divided by the square root of: how many channels a group has (DaViT), or how
    many places the map has (Florence-2)."""
    downsampling: int = 2
    """Side of the kernel that halves the map between stages: 2 (DaViT), 3 (Florence-2)."""

    def __post_init__(self):
        super().__post_init__()
        if self.channel_scale not in get_args(ChannelScale):
            choices = ", ".join(get_args(ChannelScale))
            raise ValueError(f"channel_scale={self.channel_scale!r} is not one of {choices}")
        if self.downsampling not in (2, 3):
            raise ValueError(f"downsampling={self.downsampling} must be 2 or 3")

    def build(self, *, rngs: nnx.Rngs) -> "DaViT":
        """A model of this configuration, without a head."""
        return DaViT(self, rngs=rngs)

    def kernel(self, stage: int) -> tuple[int, int]:
        """Height and width of the kernel that makes the map of a stage; the first stage's reaches over a patch's
        neighbours."""
        if stage > 0:
            return self.downsampling, self.downsampling
        height, width = as_size(self.patch_size)
        return 2 * height - 1, 2 * width - 1

    def flops_per_example(self, items: int = 1) -> float:
        """Floating-point operations of a forward and backward pass for `items` images of `image_size`: 6 per weight of
        a product and place, and for attention 12 * width per place of the map and place of a window, or channel of a
        group. Places that fill up windows count in attention."""
        window, total, inner = as_size(self.window), 0.0, self.channels
        for stage, (dim, pairs, size) in enumerate(zip(self.dims, self.depths, self.maps(), strict=True)):
            places, kernel = size[0] * size[1], self.kernel(stage)
            filled = (size[0] + -size[0] % window[0]) * (size[1] + -size[1] % window[1])
            inside_windows = filled * (6 * 4 * dim**2 + 12 * dim * window[0] * window[1])
            among_channels = places * (6 * 4 * dim**2 + 12 * dim * dim // self.heads[stage])
            rest = 2 * 6.0 * places * dim * (2 * self.mlp_dim(stage) + 2 * 9)
            total += pairs * (inside_windows + among_channels + rest)
            total += 6.0 * places * kernel[0] * kernel[1] * inner * dim
            inner = dim
        return items * total

    @classmethod
    def tiny(cls, **changes: Any) -> "DaViTConfig":
        """28.4 M parameters under a head for 1,000 classes (the sizes are the paper's and timm's)."""
        return cls._sized(changes, stochastic_depth=0.1)

    @classmethod
    def small(cls, **changes: Any) -> "DaViTConfig":
        """49.7 M parameters."""
        return cls._sized(changes, depths=(1, 1, 9, 1), stochastic_depth=0.2)

    @classmethod
    def base(cls, **changes: Any) -> "DaViTConfig":
        """88.0 M parameters."""
        sizes: dict[str, Any] = dict(dims=(128, 256, 512, 1024), depths=(1, 1, 9, 1), heads=(4, 8, 16, 32))
        return cls._sized(changes, **sizes, stochastic_depth=0.4)

    @classmethod
    def large(cls, **changes: Any) -> "DaViTConfig":
        """197 M parameters."""
        return cls._sized(changes, dims=(192, 384, 768, 1536), depths=(1, 1, 9, 1), heads=(6, 12, 24, 48))

    @classmethod
    def huge(cls, **changes: Any) -> "DaViTConfig":
        """349 M parameters."""
        return cls._sized(changes, dims=(256, 512, 1024, 2048), depths=(1, 1, 9, 1), heads=(8, 16, 32, 64))

    @classmethod
    def giant(cls, **changes: Any) -> "DaViTConfig":
        """1.4 B parameters."""
        return cls._sized(changes, dims=(384, 768, 1536, 3072), depths=(1, 1, 12, 3), heads=(12, 24, 48, 96))

    @classmethod
    def florence2_base(cls, **changes: Any) -> "DaViTConfig":
        """The image encoder of Florence-2 base (Xiao et al. 2023): 90 M parameters without a head."""
        return cls.base(**(FLORENCE2 | changes))

    @classmethod
    def florence2_large(cls, **changes: Any) -> "DaViTConfig":
        """That of Florence-2 large, of the sizes of `huge`: 361 M parameters without a head."""
        return cls.huge(**(FLORENCE2 | changes))


FLORENCE2: dict[str, Any] = dict(
    image_size=768, window=12, channel_scale="places", downsampling=3, stochastic_depth=0.0
)  # fmt: skip


class ChannelAttention(nnx.Module):
    """Attention with channels as tokens (Ding et al. 2022, equation 3): in each group of channels, each one is mixed
    from all of them by how much they agree over all places of the map. Its cost grows with the places, and their number
    may be any. `scale` is that of `attend`; None is one over the square root of the number of places."""

    def __init__(self, config: DaViTConfig, dim: int, groups: int, *, rngs: nnx.Rngs):
        self.groups, self.dropout = groups, config.attention_dropout
        self.implementation: Implementation | None = config.attention
        self.scale = (dim // groups) ** -0.5 if config.channel_scale == "channels" else None
        linear = partial(Linear, dim, dim, kernel_init=normal_init(config.init_std), **config.types, rngs=rngs)
        self.query, self.key, self.value, self.output = linear(), linear(), linear(), linear()

    def __call__(
        self, hidden: Float[Array, "batch places dim"], *, key: PRNGKey | None = None
    ) -> Float[Array, "batch places dim"]:
        def channels(linear: Linear) -> Array:
            x = linear(hidden).reshape(*hidden.shape[:2], self.groups, -1)
            return constrain(x, BATCH, None, TENSOR).transpose(0, 3, 2, 1)

        mixed = attend(
            channels(self.query),
            channels(self.key),
            channels(self.value),
            scale=self.scale,
            dropout_rate=self.dropout,
            dropout_key=key,
            implementation=self.implementation,
        )
        return constrain(self.output(mixed.transpose(0, 3, 2, 1).reshape(hidden.shape)), BATCH)


class DaViTBlock(nnx.Module):
    """Attention and an MLP, each after a norm and with a residual connection; in front of each, a depthwise
    convolution that is added tells where a place lies. A block either attends inside windows, or among channels where
    `window` is None."""

    def __init__(self, config: DaViTConfig, stage: int, *, window: tuple[int, int] | None, rngs: nnx.Rngs):
        dim, heads, init = config.dims[stage], config.heads[stage], normal_init(config.init_std)
        self.window, self.dropout = window, config.dropout
        types: dict[str, Any] = dict(**config.types, rngs=rngs)
        self.attention_position = DepthwiseConvolution(dim, kernel_init=init, **types)
        self.attention_norm = LayerNorm(dim, epsilon=config.norm_epsilon, **types)
        if window is None:
            self.attention = ChannelAttention(config, dim, heads, rngs=rngs)
        else:
            self.attention = MultiHeadAttention(
                dim,
                heads,
                dropout=config.attention_dropout,
                implementation=config.attention,
                kernel_init=init,
                **types,
            )
        self.mlp_position = DepthwiseConvolution(dim, kernel_init=init, **types)
        self.mlp_norm = LayerNorm(dim, epsilon=config.norm_epsilon, **types)
        self.mlp = MLP(dim, config.mlp_dim(stage), activation=config.activation, kernel_init=init, **types)

    def __call__(
        self,
        x: Float[Array, "batch height width dim"],
        *,
        drop_path_rate: float | Float[Array, ""] = 0.0,
        key: PRNGKey | None = None,
    ) -> Float[Array, "batch height width dim"]:
        """The map after this block; `drop_path_rate` is how often an example skips a part of it in training."""
        keys = split_key(key, 5)
        x = x + self.attention_position(x)
        change = dropout(self._attend(self.attention_norm(x), keys[0]), self.dropout, keys[1])
        x = x + drop_path(change, drop_path_rate, keys[2])
        x = x + self.mlp_position(x)
        change = dropout(self.mlp(self.mlp_norm(x)), self.dropout, keys[3])
        return x + drop_path(change, drop_path_rate, keys[4])

    def _attend(self, x: Array, key: PRNGKey | None) -> Array:
        batch, height, width, dim = x.shape
        if isinstance(self.attention, ChannelAttention):
            return self.attention(x.reshape(batch, height * width, dim), key=key).reshape(x.shape)
        assert self.window is not None
        # What fills up a window is looked at like any place, as in the original.
        x = pad_to_windows(x, self.window)
        size = x.shape[1], x.shape[2]
        hidden = self.attention(to_windows(x, self.window), key=key).hidden
        return from_windows(hidden, self.window, size)[:, :height, :width]


class DaViTLayer(nnx.Module):
    """A block with windows, and one with channels."""

    def __init__(self, config: DaViTConfig, stage: int, *, rngs: nnx.Rngs):
        self.spatial = DaViTBlock(config, stage, window=as_size(config.window), rngs=rngs)
        self.channel = DaViTBlock(config, stage, window=None, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "batch height width dim"],
        *,
        drop_path_rate: float | Float[Array, ""] = 0.0,
        key: PRNGKey | None = None,
    ) -> Float[Array, "batch height width dim"]:
        keys = split_key(key, 2)
        x = self.spatial(x, drop_path_rate=drop_path_rate, key=keys[0])
        return self.channel(x, drop_path_rate=drop_path_rate, key=keys[1])


class DaViTStage(nnx.Module):
    """Layers on a map of one size, after the convolution that makes it: of pixels, with a norm after it; of the stage
    before, with a norm in front."""

    def __init__(self, config: DaViTConfig, stage: int, *, rngs: nnx.Rngs):
        inner, dim, kernel = (config.channels, *config.dims)[stage], config.dims[stage], config.kernel(stage)
        self.first = stage == 0
        self.stride = as_size(config.patch_size if self.first else 2)
        self.projection = nnx.Conv(
            inner,
            dim,
            kernel,
            strides=self.stride,
            padding=[((side - 1) // 2, (side - 1) // 2) for side in kernel],
            kernel_init=normal_init(config.init_std),
            **config.types,
            rngs=rngs,
        )
        self.norm = LayerNorm(dim if self.first else inner, epsilon=config.norm_epsilon, **config.types, rngs=rngs)
        self.stack = Stack(
            partial(DaViTLayer, config, stage),
            config.depths[stage],
            remat=config.remat,
            unroll=config.unroll,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "batch height width dim"], given: Any) -> Float[Array, "batch rows columns new"]:
        x = x if self.first else self.norm(x)
        x = constrain(self.projection(pad_to_windows(x, self.stride)), BATCH)
        x = self.norm(x) if self.first else x
        return run_layers(self.stack, x, given)


class DaViT(nnx.Module):
    """The DaViT encoder: normalised pixels to hidden states; `ImageClassifier(DaViT(config, rngs=rngs))` gives
    logits."""

    def __init__(self, config: DaViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.stages = nnx.List([DaViTStage(config, stage, rngs=rngs) for stage in range(len(config.dims))])
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **config.types, rngs=rngs)

    def __call__(
        self,
        pixels: Float[Array, "batch height width channels"],
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states (batch, rows * columns, dim) of normalised `pixels`: the last stage's map, in reading order;
        and `pooled`, the norm of their mean.

        Images may have any size of at least a patch. `key` turns dropout and stochastic depth on. `capture` may name
        "stages": the map that each stage gives out.
        """
        check_capture(capture, PYRAMID_CAPTURES)
        x, maps = pad_pixels(self.config, pixels), []
        for stage, given in zip(self.stages, given_of_stages(self.config, key), strict=True):
            x = stage(x, given)
            maps.append(x)
        hidden = x.reshape(len(x), -1, x.shape[-1])
        return ModelOutput(hidden, self.norm(mean_of_map(x)), stages=tuple(maps) if "stages" in capture else None)

    def features(
        self, pixels: Float[Array, "batch height width channels"], *, key: PRNGKey | None = None
    ) -> Float[Array, "batch rows columns dim"]:
        """The map of the last stage."""
        stages = self(pixels, key=key, capture=("stages",)).stages
        assert stages is not None
        return stages[-1]
