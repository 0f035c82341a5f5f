"""Training pictures mixed with one another: mixup and CutMix, on the device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray


def mix_images(
    pixels: Float[Array, "batch height width channels"],
    targets: Float[Array, "batch classes"],
    key: PRNGKeyArray,
    *,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Float[Array, "batch height width channels"], Float[Array, "batch classes"]]:
    """Each picture mixed with the one before it in the batch (the first with the last), and its target alike.

    `mixup` and `cutmix` are the two parameters of the Beta distribution of the share that stays; 0 turns either off.
    mixup (Zhang et al., 2018) averages the pictures, CutMix (Yun et al., 2019) replaces a box. With both, one of them
    is drawn for a whole batch, each half the time. The share is the same for all pictures of a batch, as in both
    papers' code.
    """
    for name, value in {"mixup": mixup, "cutmix": cutmix}.items():
        if not value >= 0:
            raise ValueError(f"{name}={value} must not be negative; 0 turns it off")
    if not mixup and not cutmix:
        return pixels, targets
    choice_key, share_key, box_key = jax.random.split(key, 3)
    use_box = jax.random.bernoulli(choice_key) if mixup and cutmix else jnp.array(not mixup)
    alpha = jnp.where(use_box, cutmix, mixup)
    share = jax.random.beta(share_key, alpha, alpha)
    weight = jnp.broadcast_to(share, pixels.shape[1:3])
    if cutmix:
        outside = ~_box(share, box_key, *pixels.shape[1:3])
        weight = jnp.where(use_box, outside, weight)
        share = jnp.where(use_box, outside.mean(), share)
    weight = weight[:, :, None].astype(pixels.dtype)
    share = share.astype(targets.dtype)
    return (
        weight * pixels + (1 - weight) * jnp.roll(pixels, 1, axis=0),
        share * targets + (1 - share) * jnp.roll(targets, 1, axis=0),
    )


def _box(share: Float[Array, ""], key: PRNGKeyArray, height: int, width: int) -> Bool[Array, "height width"]:
    """A box with 1 - share of the area, its centre anywhere, and cut off at the borders."""

    def inside(key: PRNGKeyArray, length: int) -> Bool[Array, "{length}"]:
        half = jnp.floor(length * jnp.sqrt(1 - share)).astype(int) // 2
        centre = jax.random.randint(key, (), 0, length)
        place = jnp.arange(length)
        return (centre - half <= place) & (place < centre + half)

    rows, columns = jax.random.split(key)
    return inside(rows, height)[:, None] & inside(columns, width)
