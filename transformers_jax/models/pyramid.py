"""What the image models share whose maps become smaller and wider from stage to stage: Swin, DaViT."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from transformers_jax.models.base import ImageConfig, Size, as_size, check_pixels, drop_path_rates
from transformers_jax.nn import Stack, pad_to_windows
from transformers_jax.nn.dropout import PRNGKey
from transformers_jax.nn.patch import check_channels, show_size


@dataclass(frozen=True, kw_only=True)
class PyramidConfig(ImageConfig):
    """What the configurations of pyramids share. `dims`, `depths` and `heads` have one number for each stage; from one
    stage to the next, height and width of the map are halved (rounded up). An impossible combination is a ValueError
    when it is built."""

    dims: tuple[int, ...] = (96, 192, 384, 768)
    """Width of the hidden states in each stage."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    """Number of layers in each stage."""
    heads: tuple[int, ...] = (3, 6, 12, 24)
    """Attention heads in each stage; they divide its width."""
    mlp_ratio: float = 4.0
    """Width inside the MLP, in widths of the hidden states."""
    window: Size = 7
    """Size of the windows inside which is attended, in places of the map: height and width, or one number for both."""
    patch_size: Size = 4
    """Size of the patches that are the first tokens, in pixels. Images that it does not divide are padded."""

    RESIZABLE: ClassVar[tuple[str, ...]] = (*ImageConfig.RESIZABLE, "window")

    def __post_init__(self):
        stages = {name: len(getattr(self, name)) for name in ("dims", "depths", "heads")}
        if len(set(stages.values())) > 1 or not self.dims:
            counts = ", ".join(f"{name} {count}" for name, count in stages.items())
            raise ValueError(f"dims, depths and heads need a number for each stage, but have {counts}")
        for name in stages:
            if not all(isinstance(x, int) and x >= 1 for x in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be whole numbers of at least 1")
        for stage, (dim, heads) in enumerate(zip(self.dims, self.heads, strict=True)):
            if dim % heads:
                raise ValueError(
                    f"in stage {stage} the width is no multiple of the heads: dims={self.dims}, heads={self.heads}, "
                    f"and {heads} does not divide {dim}"
                )
        self.check_sizes("window", unit="places of the map")
        if not self.mlp_ratio > 0 or min(self.mlp_dim(stage) for stage in range(len(self.dims))) < 1:
            raise ValueError(f"mlp_ratio={self.mlp_ratio} leaves nothing inside the MLP")
        super().__post_init__()

    @property
    def dim(self) -> int:
        """The width of the last stage, which heads read."""
        return self.dims[-1]

    @property
    def depth(self) -> int:
        """Layers of all stages."""
        return sum(self.depths)

    def mlp_dim(self, stage: int) -> int:
        """Width inside the MLP of a stage."""
        return int(self.dims[stage] * self.mlp_ratio)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the first stage's map of an image of `image_size`."""
        return self.maps()[0]

    def maps(self, image_size: Size | None = None) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each stage's map, of images of `image_size` pixels or those of the configuration.
        ValueError for an image smaller than a patch."""
        size = as_size(self.image_size if image_size is None else image_size)
        patch = as_size(self.patch_size)
        if size[0] < patch[0] or size[1] < patch[1]:
            raise ValueError(f"an image of {show_size(size)} pixels has no patch of {show_size(patch)}")
        maps = [(-(-size[0] // patch[0]), -(-size[1] // patch[1]))]
        for _ in self.dims[1:]:
            maps.append((-(-maps[-1][0] // 2), -(-maps[-1][1] // 2)))
        return tuple(maps)

    def flops_per_token(self, length: int) -> float:
        """ValueError: what a pyramid computes goes by the image, not by tokens."""
        raise ValueError(f"{type(self).__name__} counts operations per image, with flops_per_example()")


def pad_pixels(
    config: PyramidConfig, pixels: Float[Array, "batch height width channels"]
) -> Float[Array, "batch padded_height padded_width channels"]:
    """Normalised pixels with zeros at the bottom and at the right, so that patches divide them. ValueError for whole
    numbers, another number of channels than the model's, or an image smaller than a patch."""
    check_pixels(pixels)
    check_channels(pixels, config.channels)
    config.maps((pixels.shape[1], pixels.shape[2]))
    return pad_to_windows(pixels, as_size(config.patch_size))


def given_of_stages(config: PyramidConfig, key: PRNGKey | None) -> list[Any]:
    """What the `Stack` of each stage takes as `given`: a key and the stochastic depth's rate of each of its layers
    (the rate is None where no layer is skipped); None without a key. The rates rise over the layers of all stages."""
    if key is None:
        return [None] * len(config.depths)
    keys, rates = jax.random.split(key, config.depth), drop_path_rates(config.stochastic_depth, config.depth)
    given, first = [], 0
    for depth in config.depths:
        part = slice(first, first + depth)
        given.append((keys[part], None if rates is None else jnp.asarray(rates[part])))
        first += depth
    return given


def run_layers(stack: Stack, x: Float[Array, "batch height width dim"], given: Any) -> Array:
    """The map after all layers of a stage, `given` being its part of `given_of_stages`."""

    def apply(layer, x, _, given):
        key, rate = (None, None) if given is None else given
        return layer(x, drop_path_rate=0.0 if rate is None else rate, key=key), None, None

    return stack(apply, x, None, given)[0]


def mean_of_map(x: Float[Array, "batch height width dim"]) -> Float[Array, "batch dim"]:
    """The mean over all places, computed in float32."""
    return jnp.mean(x, axis=(1, 2), dtype=jnp.float32).astype(x.dtype)
