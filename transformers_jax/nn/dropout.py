"""Dropout with the randomness passed in."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

PRNGKey = Key[Array, ""] | UInt32[Array, "2"]


def dropout(x: Float[Array, "*shape"], rate: float, key: PRNGKey | None) -> Float[Array, "*shape"]:
    """Zero each element with probability `rate` and divide the others by 1 - rate (Srivastava et al. 2014).

    `key=None` means deterministic: x comes back unchanged.
    """
    if key is None or rate == 0.0:
        return x
    if rate >= 1.0:
        return jnp.zeros_like(x)
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0)


def drop_path(
    x: Float[Array, "batch *shape"], rate: float | Float[Array, ""], key: PRNGKey | None
) -> Float[Array, "batch *shape"]:
    """Zero whole examples with probability `rate` and divide the others by 1 - rate: stochastic depth (Huang et al.
    2016), for the change that a part of a layer makes. `rate`, below 1, may be traced. `key=None` means deterministic.
    """
    if key is None or (isinstance(rate, float) and rate == 0.0):
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, (x.shape[0],) + (1,) * (x.ndim - 1))
    return jnp.where(keep, x / jnp.asarray(1.0 - rate, x.dtype), 0)


def split_key(key: PRNGKey | None, count: int) -> tuple[PRNGKey | None, ...]:
    """`count` independent keys, or as many Nones when there is no randomness."""
    return (None,) * count if key is None else tuple(jax.random.split(key, count))
