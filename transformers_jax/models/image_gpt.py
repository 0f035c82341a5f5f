"""Image GPT: the GPT decoder over the pixels of small pictures, each one token of a palette, in reading order.

Chen et al. 2020, "Generative Pretraining from Pixels". Numbers equal those of Hugging Face's ImageGPT.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from transformers_jax.models.base import Size, as_size
from transformers_jax.models.gpt import GPT, DecoderConfig
from transformers_jax.nn.pooling import Pooling
from transformers_jax.nn.positions import resize_positions


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageGPTConfig(DecoderConfig):
    """Sizes and numbers of an Image GPT. An impossible combination is a ValueError when it is built."""

    image_size: Size = 32
    """Size of the pictures in pixels: height and width, or one number for both. Each pixel is a token."""
    channels: int = 3
    """Colour channels of the pictures: 3, or 1 for grey ones."""
    clusters: int = 512
    """Colours of the palette."""
    activation: str = "gelu_quick"
    """Activation of the MLP: gelu, gelu_tanh, gelu_quick (the published models'), relu, silu or tanh."""

    norm_type: ClassVar[str] = "rms"  # a layer norm that does not subtract the mean and adds nothing
    pooling: ClassVar[Pooling] = "mean"
    tie_embeddings: ClassVar[bool] = False
    eos_id: ClassVar[None] = None
    pad_id: ClassVar[None] = None
    RESIZABLE: ClassVar[tuple[str, ...]] = ("image_size",)

    def __post_init__(self):
        super().__post_init__()
        self.check_sizes("image_size")
        if self.channels not in (1, 3):
            raise ValueError(f"channels={self.channels} must be 1 (grey) or 3")
        if self.clusters < 2:
            raise ValueError(f"clusters={self.clusters} must be at least 2")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of pixels."""
        return as_size(self.image_size)

    @property
    def places(self) -> int:
        """One for each pixel that is predicted: the first belongs to the start token, the last to the pixel before the
        last one."""
        return self.grid[0] * self.grid[1]

    @property
    def vocab_size(self) -> int:
        """The colours, and the start token."""
        return self.clusters + 1

    @property
    def predicted_tokens(self) -> int:
        """The colours."""
        return self.clusters

    @property
    def bos_id(self) -> int:
        """The start token, which follows the colours."""
        return self.clusters

    @property
    def max_length(self) -> int:
        """The start token and every pixel: what generation writes at most."""
        return self.places + 1

    def check_vocabulary(self) -> int:
        """`vocab_size`."""
        return self.vocab_size

    def build(self, *, rngs: nnx.Rngs) -> "ImageGPT":
        """A model of this configuration, without a head."""
        return ImageGPT(self, rngs=rngs)

    def flops_per_token(self, length: int) -> float:
        """Those of the layers, and 6 per weight of the output layer."""
        return self.layer_flops_per_token(length) + 6.0 * self.dim * self.clusters

    def carry_over(self, parameters: Mapping[str, Any], old: Any) -> dict[str, Any]:
        """With positions resized from pictures of the configuration `old` to this one's: they are those of the pixels
        to be predicted, a whole grid."""
        resized = dict(parameters)
        for name in resized:
            if name.rpartition("backbone.")[2] == "positions.embedding" and old.grid != self.grid:
                resized[name] = resize_positions(resized[name], old.grid, self.grid)
        return resized

    @classmethod
    def small(cls, **changes: Any) -> "ImageGPTConfig":
        """iGPT-S: 76 M parameters."""
        return cls._sized(changes, dim=512, depth=24, heads=8)

    @classmethod
    def medium(cls, **changes: Any) -> "ImageGPTConfig":
        """iGPT-M: 455 M parameters."""
        return cls._sized(changes, dim=1024, depth=36, heads=8)

    @classmethod
    def large(cls, **changes: Any) -> "ImageGPTConfig":
        """iGPT-L: 1.4 B parameters."""
        return cls._sized(changes, dim=1536, depth=48, heads=16)

    @classmethod
    def xl(cls, **changes: Any) -> "ImageGPTConfig":
        """iGPT-XL, for pictures of 64 x 64: 6.8 B parameters. It was not released, and the paper does not give its
        heads; 32 are as wide as those of the large one."""
        return cls._sized(changes, image_size=64, dim=3072, depth=60, heads=32)


class ImageGPT(GPT):
    """The GPT decoder over pixels: `input_ids` are the start token (`config.bos_id`) and then colours of the palette,
    row by row; `LanguageModel(ImageGPT(config, rngs=rngs))` gives logits of the colours.

    At every place the next pixel is predicted, so the last pixel of a picture is never read.
    """

    config: ImageGPTConfig

    def __init__(self, config: ImageGPTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
