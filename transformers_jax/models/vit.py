"""The Vision Transformer, and DeiT, which has one more token: image encoders over patches with pre-norm layers.

Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words"; Touvron et al. 2021, "Training data-efficient image
transformers". Numbers equal those of Hugging Face's models.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from transformers_jax.models.base import ImageConfig, TransformerConfig, as_size, check_pixels, drop_path_rates
from transformers_jax.models.output import ModelOutput, check_capture
from transformers_jax.nn import (
    AttentionPooling,
    LayerNorm,
    LearnedPositions,
    Linear,
    PatchEmbedding,
    Resampling,
    Stack,
    dropout,
    normal_init,
    resize_positions,
    sinusoidal_grid,
)
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.patch import grid_size
from transformers_jax.nn.positions import check_resampling

ImagePooling = Literal["class_token", "mean", "attention"]
ImagePositions = Literal["learned", "sinusoidal"]


@dataclasses.dataclass(frozen=True)
class ViTConfig(ImageConfig, TransformerConfig):
    """Sizes and numbers of a ViT. An impossible combination is a ValueError when it is built."""

    norm_epsilon: float = 1e-6
    """Added to the variance in layer norms."""
    class_token: bool = True
    """A learned token in front of the patches."""
    pooling: ImagePooling = "class_token"
    """What stands for an image: the class token, the mean over the patches, or attention by a learned query."""
    positions: ImagePositions = "learned"
    """Positions of the patches: learned, one for each place (and for the tokens in front), or fixed sines in 2-D."""
    position_resampling: Resampling = "bicubic"
    """How learned positions are resized to images of another size: bicubic (Hugging Face), bicubic_antialias (timm),
    bilinear, corners (Google's ViT)."""
    distillation_token: bool = False
    """DeiT's second learned token, after the class token."""
    distillation_head: bool = False
    """Under an image classifier: an output layer for the distillation token, too."""
    pooler: bool = False
    """Pass `pooled` through a dense layer and tanh, as transformers' model without a head has it."""

    def __post_init__(self):
        super().__post_init__()
        for name, choices in (("pooling", ImagePooling), ("positions", ImagePositions)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(choices))}")
        check_resampling(self.position_resampling)
        if not self.class_token and (self.pooling == "class_token" or self.distillation_token):
            what = "distillation_token=True" if self.distillation_token else "pooling='class_token'"
            raise ValueError(f"{what} needs class_token=True")
        if self.distillation_head and not self.distillation_token:
            raise ValueError("distillation_head=True needs distillation_token=True")
        if self.positions == "sinusoidal" and (self.dim % 4 or self.dim < 8):
            raise ValueError(f"positions='sinusoidal' needs a dim that 4 divides, of at least 8, not dim={self.dim}")

    def build(self, *, rngs: nnx.Rngs) -> "ViT":
        """A model of this configuration, without a head."""
        return ViT(self, rngs=rngs)

    def for_head(self, head: type | None) -> "ViTConfig":
        """Without the pooler, which no head reads."""
        return self if head is None else dataclasses.replace(self, pooler=False)

    @property
    def longest(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """The number of tokens in front of the patches."""
        return int(self.class_token) + int(self.distillation_token)

    def flops_per_token(self, length: int) -> float:
        """Those of the layers."""
        return self.layer_flops_per_token(length)

    def flops_per_example(self, items: int = 1) -> float:
        """Those of `items` images of `image_size`."""
        patches, patch = self.grid[0] * self.grid[1], as_size(self.patch_size)
        tokens = patches + self.prefix
        embedding = 6.0 * patches * patch[0] * patch[1] * self.channels * self.dim
        return items * (self.layer_flops_per_token(tokens) * tokens + embedding)

    def carry_over(self, parameters: Mapping[str, Any], old: Any) -> dict[str, Any]:
        """With learned positions resized from the grid of the configuration `old` to this one's."""
        resized = dict(parameters)
        for name in resized:
            if name.rpartition("backbone.")[2] == "positions.embedding" and old.grid != self.grid:
                resized[name] = resize_positions(
                    resized[name], old.grid, self.grid, prefix=old.prefix, how=self.position_resampling
                )
        return resized

    @classmethod
    def ti16(cls, **changes: Any) -> "ViTConfig":
        """5.7 M parameters under a head for 1,000 classes (this one and s16: Touvron et al. 2021)."""
        return cls._sized(changes, dim=192, depth=12, heads=3)

    @classmethod
    def s16(cls, **changes: Any) -> "ViTConfig":
        """22 M parameters."""
        return cls._sized(changes, dim=384, depth=12, heads=6)

    @classmethod
    def b16(cls, **changes: Any) -> "ViTConfig":
        """87 M parameters."""
        return cls(**changes)

    @classmethod
    def b32(cls, **changes: Any) -> "ViTConfig":
        """88 M parameters."""
        return cls._sized(changes, patch_size=32)

    @classmethod
    def l16(cls, **changes: Any) -> "ViTConfig":
        """304 M parameters."""
        return cls._sized(changes, dim=1024, depth=24, heads=16)

    @classmethod
    def h14(cls, **changes: Any) -> "ViTConfig":
        """632 M parameters."""
        return cls._sized(changes, dim=1280, depth=32, heads=16, patch_size=14)


class ViT(nnx.Module):
    """The ViT encoder: normalised pixels to hidden states; `ImageClassifier(ViT(config, rngs=rngs))` gives logits."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = normal_init(config.init_std)
        options: dict[str, Any] = dict(**config.types, rngs=rngs)
        self.patch_embedding = PatchEmbedding(
            as_size(config.patch_size), config.channels, config.dim, kernel_init=init, **options
        )

        def token(wanted: bool) -> Any:
            if not wanted:
                return nnx.data(None)
            return nnx.Param(init(rngs.params(), (config.dim,), jnp.dtype(config.param_dtype)))

        self.class_token, self.distillation_token = token(config.class_token), token(config.distillation_token)
        self.positions = nnx.data(None)
        if config.positions == "learned":
            places = config.prefix + config.grid[0] * config.grid[1]
            self.positions = LearnedPositions(places, config.dim, embedding_init=init, **options)
        cycle = config.cycle(config.read_patterns("patterns", config.depth, decodes=False), norm="pre")
        self.stack = Stack(cycle, config.depth, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.norm = LayerNorm(config.dim, epsilon=config.norm_epsilon, **options)
        self.attention_pooling = nnx.data(None)
        if config.pooling == "attention":
            self.attention_pooling = AttentionPooling(
                config.dim,
                config.heads,
                config.mlp_dim or 4 * config.dim,
                activation=config.activation,
                norm_epsilon=config.norm_epsilon,
                implementation=config.attention,
                kernel_init=init,
                **options,
            )
        self.pooler = Linear(config.dim, config.dim, kernel_init=init, **options) if config.pooler else nnx.data(None)

    def __call__(
        self,
        pixels: Float[Array, "batch height width channels"],
        *,
        key: PRNGKey | None = None,
        capture: Collection[str] = (),
    ) -> ModelOutput:
        """Hidden states (batch, tokens in front + patches, dim) of normalised `pixels`, and `pooled`.

        Images may have any size that the patch divides: positions are resized to it. `key` turns dropout and stochastic
        depth on. `capture` names what else to return: "hidden_states" and "attention_weights".
        """
        config = self.config
        check_capture(capture)
        check_pixels(pixels)
        grid = grid_size((pixels.shape[1], pixels.shape[2]), as_size(config.patch_size))
        hidden = self.patch_embedding(pixels)
        tokens = [token[...] for token in (self.class_token, self.distillation_token) if token is not None]
        front = jnp.stack(tokens).astype(hidden.dtype) if tokens else jnp.zeros((0, config.dim), hidden.dtype)
        places = self._places(grid).astype(hidden.dtype)
        front = jnp.broadcast_to(front + places[: config.prefix], (len(hidden), config.prefix, config.dim))
        hidden = jnp.concatenate([front, hidden + places[config.prefix :]], axis=1)

        embedding_key, stack_key = (None, None) if key is None else jax.random.split(key)
        hidden = dropout(hidden, config.dropout, embedding_key)

        def apply(layer, hidden, _, given):
            layer_key, rate = (None, None) if given is None else given
            output = layer(hidden, drop_path_rate=0.0 if rate is None else rate, key=layer_key, capture=capture)
            return output.hidden, None, (hidden if "hidden_states" in capture else None, output.attention_weights)

        given = None
        if stack_key is not None:
            rates = drop_path_rates(config.stochastic_depth, config.depth)
            given = jax.random.split(stack_key, config.depth), None if rates is None else jnp.asarray(rates)
        hidden, _, kept = self.stack(apply, hidden, None, given)
        hidden = self.norm(hidden)
        return ModelOutput(hidden, self._pool(hidden), hidden_states=kept[0], attention_weights=kept[1])

    def features(
        self, pixels: Float[Array, "batch height width channels"], *, key: PRNGKey | None = None
    ) -> Float[Array, "batch rows columns dim"]:
        """The hidden states of the patches, laid out as they lie in the image."""
        rows, columns = grid_size((pixels.shape[1], pixels.shape[2]), as_size(self.config.patch_size))
        hidden = self(pixels, key=key).hidden[:, self.config.prefix :]
        return hidden.reshape(len(hidden), rows, columns, self.config.dim)

    def _places(self, grid: tuple[int, int]) -> Array:
        """(prefix + patches, dim): what is added to each token."""
        config = self.config
        if self.positions is None:
            return jnp.pad(sinusoidal_grid(*grid, config.dim), ((config.prefix, 0), (0, 0)))
        how = config.position_resampling
        return resize_positions(self.positions.table(), config.grid, grid, prefix=config.prefix, how=how)

    def _pool(self, hidden: Float[Array, "batch length dim"]) -> Float[Array, "batch dim"]:
        match self.config.pooling:
            case "class_token":
                pooled = hidden[:, 0]
            case "mean":
                pooled = jnp.mean(hidden[:, self.config.prefix :], axis=1, dtype=jnp.float32).astype(hidden.dtype)
            case "attention":
                assert self.attention_pooling is not None
                pooled = self.attention_pooling(hidden)
        return pooled if self.pooler is None else jnp.tanh(self.pooler(pooled))
