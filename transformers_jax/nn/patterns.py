"""Attention patterns: which key a query may look at, by their places in the sequence.

A pattern is a small frozen dataclass. Its `allows` is the definition; `attend` may compute the same thing cheaper.
Patterns combine with `&` (both allow) and `|` (either allows).
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Pattern:
    """Base of the patterns; a subclass defines `allows`."""

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        """True where the query at index `query` may look at the key at index `key`."""
        raise NotImplementedError(f"{type(self).__name__} does not define allows()")

    def mask(self, query_length: int, key_length: int, *, offset: int | Int[Array, ""] = 0) -> Bool[Array, "q k"]:
        """The dense mask of `query_length` queries, the first of which stands at index `offset` of the keys."""
        return self.allows(jnp.arange(query_length)[:, None] + offset, jnp.arange(key_length)[None, :])

    def __and__(self, other: "Pattern") -> "Pattern":
        return Both(self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return Either(self, other)


@dataclass(frozen=True)
class Full(Pattern):
    """Every query looks at every key."""

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        return jnp.ones((query.shape[0], key.shape[1]), bool)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query looks at itself and at what came before."""

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        return key <= query


@dataclass(frozen=True)
class Local(Pattern):
    """A query looks at keys at most `window` steps away on either side, a step being `dilation` places.

    `Local(window) & Causal()` looks at itself and the `window` places before it (Child et al. 2019's banded layers).
    """

    window: int
    dilation: int = 1

    def __post_init__(self):
        if self.window < 0 or self.dilation < 1:
            raise ValueError(f"Local(window={self.window}, dilation={self.dilation}): window >= 0 and dilation >= 1")

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        distance = jnp.abs(query - key)
        return (distance <= self.window * self.dilation) & (distance % self.dilation == 0)


@dataclass(frozen=True)
class Both(Pattern):
    """What `first` and `second` both allow."""

    first: Pattern
    second: Pattern

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        return self.first.allows(query, key) & self.second.allows(query, key)


@dataclass(frozen=True)
class Either(Pattern):
    """What `first` or `second` allows."""

    first: Pattern
    second: Pattern

    def allows(self, query: Int[Array, "q 1"], key: Int[Array, "1 k"]) -> Bool[Array, "q k"]:
        return self.first.allows(query, key) | self.second.allows(query, key)
