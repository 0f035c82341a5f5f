"""Attention patterns: which key a query may look at, by their places in the sequence.

A pattern is a small frozen dataclass. Its `allows` is the definition; what `may_meet` says of whole blocks lets
`attend` leave out what is not allowed. Patterns combine with `&` (both allow) and `|` (either allows), and are written
the same way in configurations: `parse_pattern("local(128) & causal | global(4)")`.
"""

import ast
import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

Places = Int[Array | np.ndarray, "*#places"]
Allowed = Bool[Array | np.ndarray, "*#places"]

LARGEST = 2**31 - 1
"""Indices are 32-bit integers."""
MOST_DRAWN = 1 << 14
"""Blocks of a random pattern: what is drawn is a matrix of them."""
LONGEST_TEXT = 1000
"""Of an expression, in characters."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of places, each an arithmetic progression: `first` (one for each block), then every `step`-th, `size` of
    them."""

    first: np.ndarray
    size: int
    step: int = 1

    @property
    def last(self) -> np.ndarray:
        return self.first + self.step * (self.size - 1)


class Pattern:
    """Base of the patterns; a subclass defines `allows`, and `may_meet` to be computed cheaply."""

    def allows(self, query: Places, key: Places) -> Allowed:
        """True where the query at index `query` may look at the key at index `key`: arrays of JAX, or of NumPy."""
        raise NotImplementedError(f"{type(self).__name__} does not define allows()")

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        """(query blocks, key blocks) bool: False only where no query of a block may look at any key of the other."""
        return np.ones((len(queries.first), len(keys.first)), bool)

    @property
    def steps(self) -> frozenset[int]:
        """Distances whose multiples matter: places so far apart are best computed side by side."""
        return frozenset()

    @property
    def causal(self) -> bool:
        """Whether no query sees what comes after it."""
        return False

    @property
    def relative(self) -> bool:
        """Whether only the distance counts, not the places themselves."""
        return True

    @property
    def reach(self) -> int | None:
        """How many places back a query looks at most; None: to the first."""
        return None

    @property
    def longest(self) -> int | None:
        """The longest sequence that the pattern is defined for; None: any."""
        return None

    def check(self, length: int) -> None:
        """ValueError if the pattern makes no sense in a sequence of `length`."""

    def keys_seen(self, length: int) -> float:
        """How many keys a query of a sequence of `length` sees on average, from a sample of 64. All of them with
        `Causal`, as is the custom in counts of operations."""
        if self in (Full(), Causal()):
            return length
        queries = np.unique(np.linspace(0, length - 1, 64).astype(int))
        seen = self.allows(queries[:, None], np.arange(length)[None, :])
        return float(np.sum(np.broadcast_to(seen, (len(queries), length)))) / len(queries)

    def mask(
        self,
        query_length: int,
        key_length: int,
        *,
        offset: int | Int[Array, ""] = 0,
        places: Int[Array, "batch k"] | None = None,
    ) -> Bool[Array, "*batch q k"]:
        """The dense mask of `query_length` queries, the first of which stands at index `offset` of the keys.

        `places` says where each key stands in its sequence, if that is not its index: texts with padding in front, or
        several in a row. Then each row of the batch has a mask of its own."""
        if places is None or self.relative:
            allowed = self.allows(jnp.arange(query_length)[:, None] + offset, jnp.arange(key_length)[None, :])
            return jnp.broadcast_to(allowed, (query_length, key_length))
        of_queries = jax.lax.dynamic_slice_in_dim(places, offset, query_length, axis=1)
        allowed = self.allows(of_queries[:, :, None], places[:, None, :])
        return jnp.broadcast_to(allowed, (len(places), query_length, key_length))

    def __and__(self, other: "Pattern") -> "Pattern":
        return Both(self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return Either(self, other)

    def __str__(self) -> str:
        """As `parse_pattern` reads it."""
        values = [(field, getattr(self, field.name)) for field in (fields(self) if is_dataclass(self) else ())]
        given = [f"{field.name}={value}" for field, value in values if value != field.default]
        return type(self).__name__.lower() + (f"({', '.join(given)})" if given else "")


@dataclass(frozen=True)
class Full(Pattern):
    """Every query looks at every key."""

    def allows(self, query: Places, key: Places) -> Allowed:
        return (query == query) | (key == key)


@dataclass(frozen=True)
class Causal(Pattern):
    """A query looks at itself and at what came before."""

    def allows(self, query: Places, key: Places) -> Allowed:
        return key <= query

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        return keys.first[None, :] <= queries.last[:, None]

    @property
    def causal(self) -> bool:
        return True


@dataclass(frozen=True)
class Local(Pattern):
    """A query looks at keys at most `window` steps away on either side, a step being `dilation` places.

    `Local(window) & Causal()` looks at itself and the `window` places before it (Child et al. 2019's banded layers).
    """

    window: int
    dilation: int = 1

    def __post_init__(self):
        _check_numbers(self, "window", "dilation")
        if self.window * self.dilation > LARGEST:
            raise ValueError(f"{self} looks further than {LARGEST:,} places")

    def allows(self, query: Places, key: Places) -> Allowed:
        distance = abs(query - key)
        return (distance <= self.window * self.dilation) & (distance % self.dilation == 0)

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        reach = self.window * self.dilation
        near = queries.first[:, None] - keys.last[None, :] <= reach
        near &= keys.first[None, :] - queries.last[:, None] <= reach
        return near & _same_remainder(queries, keys, self.dilation)

    @property
    def steps(self) -> frozenset[int]:
        return frozenset({self.dilation} - {1})

    @property
    def reach(self) -> int | None:
        return self.window * self.dilation

    def check(self, length: int) -> None:
        if self.dilation >= length > 1:
            raise ValueError(f"{self}: among {length} places a query would see nothing but itself")


@dataclass(frozen=True)
class Strided(Pattern):
    """A query looks at every `stride`-th key, counted from itself (Child et al. 2019, the second of its two heads)."""

    stride: int

    def __post_init__(self):
        _check_numbers(self, "stride")

    def allows(self, query: Places, key: Places) -> Allowed:
        return (query - key) % self.stride == 0

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        return _same_remainder(queries, keys, self.stride)

    @property
    def steps(self) -> frozenset[int]:
        return frozenset({self.stride} - {1})

    def check(self, length: int) -> None:
        if self.stride >= length > 1:
            raise ValueError(f"{self}: among {length} places a query would see nothing but itself")


@dataclass(frozen=True)
class Global(Pattern):
    """The places `tokens` (a number stands for the first ones) look at everything, and everything looks at them
    (Beltagy et al. 2020, Longformer)."""

    tokens: int | tuple[int, ...]

    def __post_init__(self):
        if isinstance(self.tokens, int):
            _check_numbers(self, "tokens")
        elif not self.tokens or not all(0 <= place <= LARGEST for place in self.tokens):
            raise ValueError(f"{self}: tokens must be a number of at least 1, or places from 0 to {LARGEST:,}")
        elif len(set(self.tokens)) < len(self.tokens):
            raise ValueError(f"{self}: tokens names a place twice")

    @property
    def last(self) -> int:
        """The last of the places."""
        return self.tokens - 1 if isinstance(self.tokens, int) else max(self.tokens)

    def allows(self, query: Places, key: Places) -> Allowed:
        return self._among(query) | self._among(key)

    def _among(self, index: Places) -> Allowed:
        if isinstance(self.tokens, int):
            return index < self.tokens
        return functools.reduce(operator.or_, [index == place for place in self.tokens])

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        def held(blocks: Blocks) -> np.ndarray:
            if isinstance(self.tokens, int):
                return blocks.first < self.tokens
            away = np.array(self.tokens) - blocks.first[:, None]
            return np.any((away >= 0) & (away < blocks.step * blocks.size) & (away % blocks.step == 0), axis=1)

        return held(queries)[:, None] | held(keys)[None, :]

    @property
    def relative(self) -> bool:
        return False

    def check(self, length: int) -> None:
        if self.last >= length:
            raise ValueError(f"{self}: place {self.last} is outside of a sequence of {length}")


@dataclass(frozen=True)
class Random(Pattern):
    """Each block of `block` queries looks at `blocks` blocks of keys, drawn once for sequences of `length` (Zaheer et
    al. 2020, BigBird)."""

    blocks: int
    length: int
    block: int = 64
    seed: int = 0

    def __post_init__(self):
        _check_numbers(self, "blocks", "length", "block")
        count = -(-self.length // self.block)
        if self.blocks > count:
            raise ValueError(f"{self}: there are only {count} blocks to draw from")
        if count > MOST_DRAWN:
            raise ValueError(f"{self}: {count:,} blocks are more than {MOST_DRAWN:,}; make block larger")

    def allows(self, query: Places, key: Places) -> Allowed:
        blocks = query // self.block, key // self.block
        return _drawn(self)[blocks] if isinstance(query, np.ndarray) else jnp.asarray(_drawn(self))[blocks]

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        drawn = _drawn(self)
        sums = np.pad(np.cumsum(np.cumsum(drawn, axis=0), axis=1), ((1, 0), (1, 0)))
        rows, columns = (
            np.minimum([x.first // self.block, x.last // self.block + 1], len(drawn)) for x in (queries, keys)
        )
        return np.diff(np.diff(sums[rows][:, :, columns], axis=0)[0], axis=1)[:, 0] > 0

    @property
    def relative(self) -> bool:
        return False

    @property
    def longest(self) -> int | None:
        return self.length

    def check(self, length: int) -> None:
        if length > self.length:
            raise ValueError(f"{self}: it was not drawn for a sequence of {length}")


@functools.lru_cache(maxsize=16)
def _drawn(pattern: Random) -> np.ndarray:
    """(query blocks, key blocks) bool."""
    count = -(-pattern.length // pattern.block)
    random = np.random.default_rng(pattern.seed)
    drawn = np.zeros((count, count), bool)
    for row in drawn:
        row[random.choice(count, pattern.blocks, replace=False)] = True
    return drawn


@dataclass(frozen=True)
class _Pair(Pattern):
    """Two patterns, combined."""

    first: Pattern
    second: Pattern

    @property
    def steps(self) -> frozenset[int]:
        return self.first.steps | self.second.steps

    @property
    def relative(self) -> bool:
        return self.first.relative and self.second.relative

    @property
    def longest(self) -> int | None:
        return min((part.longest for part in (self.first, self.second) if part.longest is not None), default=None)

    def check(self, length: int) -> None:
        self.first.check(length)
        self.second.check(length)


@dataclass(frozen=True)
class Both(_Pair):
    """What `first` and `second` both allow."""

    def allows(self, query: Places, key: Places) -> Allowed:
        return self.first.allows(query, key) & self.second.allows(query, key)

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        return self.first.may_meet(queries, keys) & self.second.may_meet(queries, keys)

    @property
    def causal(self) -> bool:
        return self.first.causal or self.second.causal

    @property
    def reach(self) -> int | None:
        return min((part.reach for part in (self.first, self.second) if part.reach is not None), default=None)

    def __str__(self) -> str:
        first = f"({self.first})" if isinstance(self.first, Either) else str(self.first)
        return f"{first} & " + (f"({self.second})" if isinstance(self.second, Both | Either) else str(self.second))


@dataclass(frozen=True)
class Either(_Pair):
    """What `first` or `second` allows."""

    def allows(self, query: Places, key: Places) -> Allowed:
        return self.first.allows(query, key) | self.second.allows(query, key)

    def may_meet(self, queries: Blocks, keys: Blocks) -> np.ndarray:
        return self.first.may_meet(queries, keys) | self.second.may_meet(queries, keys)

    @property
    def causal(self) -> bool:
        return self.first.causal and self.second.causal

    @property
    def reach(self) -> int | None:
        if self.first.reach is None or self.second.reach is None:
            return None
        return max(self.first.reach, self.second.reach)

    def __str__(self) -> str:
        return f"{self.first} | " + (f"({self.second})" if isinstance(self.second, Either) else str(self.second))


PATTERNS: dict[str, Callable[..., Pattern]] = {
    kind.__name__.lower(): kind for kind in (Full, Causal, Local, Strided, Global, Random)
}
"""The simple patterns by the names that `parse_pattern` knows."""


def parse_pattern(text: str) -> Pattern:
    """The pattern of an expression such as "causal & local(128)" or "local(64) | global(2)"; & binds more closely.

    ValueError says what is wrong with it.
    """
    try:
        if len(text) > LONGEST_TEXT:
            raise _Unknown(f"it has {len(text):,} characters, more than {LONGEST_TEXT:,}")
        capital = re.sub(r"\bglobal\b", "Global", text.strip())  # the small word means something to Python
        return _read(ast.parse(capital, mode="eval").body)
    except (SyntaxError, TypeError, _Unknown) as error:
        detail = error if isinstance(error, TypeError | _Unknown) else "it is not an expression"
        raise ValueError(
            f"{text!r:.80} is no attention pattern: {detail!s:.120}; there are {', '.join(PATTERNS)}, with numbers in "
            "brackets, combined by & and |"
        ) from None


class _Unknown(Exception):
    """A part of an expression that means nothing here."""


def _read(node: ast.expr) -> Pattern:
    match node:
        case ast.BinOp(left, ast.BitAnd() | ast.BitOr() as sign, right):
            combine = Both if isinstance(sign, ast.BitAnd) else Either
            return combine(_read(left), _read(right))
        case ast.Name(name) if name.lower() in PATTERNS:
            return PATTERNS[name.lower()]()
        case ast.Call(ast.Name(name), values, keywords) if name.lower() in PATTERNS:
            named = {str(keyword.arg): _number(keyword.value) for keyword in keywords}
            if len(named) < len(keywords):
                raise _Unknown(f"{ast.unparse(node)} gives a number twice")
            return PATTERNS[name.lower()](*map(_number, values), **named)
    raise _Unknown(f"{ast.unparse(node)} is unknown")


def _number(node: ast.expr) -> int | tuple[int, ...]:
    match node:
        case ast.Constant(int() as number) if not isinstance(number, bool):
            return number
        case ast.Tuple(elements) if not any(isinstance(element, ast.Tuple) for element in elements):
            return tuple(number for number in map(_number, elements) if isinstance(number, int))
    raise _Unknown(f"{ast.unparse(node)} is no whole number")


def _check_numbers(pattern: Pattern, *names: str) -> None:
    """ValueError unless each of these fields is a whole number that indices can be compared with."""
    for name in names:
        value = getattr(pattern, name)
        if not isinstance(value, int) or not 1 <= value <= LARGEST:
            raise ValueError(f"{pattern}: {name} must be a whole number from 1 to {LARGEST:,}")


def _same_remainder(queries: Blocks, keys: Blocks, divisor: int) -> np.ndarray:
    """Where two blocks may hold places that differ by a multiple of `divisor`."""
    if queries.step % divisor or keys.step % divisor:  # a block holds places of several remainders
        return np.ones((len(queries.first), len(keys.first)), bool)
    return (queries.first[:, None] - keys.first[None, :]) % divisor == 0
