"""What attention remembers of the tokens seen so far, for generation token by token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.patterns import Full, Pattern
from transformers_jax.nn.pytree import pytree_dataclass

Index = int | Int[Array, ""]


@dataclass(frozen=True)
class View:
    """What queries may see of the keys: arguments of `attend`, of the same names."""

    mask: Bool[Array, "#rows #heads #q #k"] | None = None
    bias: Float[Array, "#rows #heads #q #k"] | None = None
    pattern: Pattern = Full()
    query_offset: Index = 0
    places: Int[Array, "rows k"] | None = None

    def allowed(self, q: int, k: int) -> Bool[Array, "#rows 1 q k"]:
        """What the pattern allows `q` queries among `k` keys."""
        mask = self.pattern.mask(q, k, offset=self.query_offset, places=self.places)
        return mask[None, None] if mask.ndim == 2 else mask[:, None]


@pytree_dataclass
class KVCache:
    """Keys and values of the tokens seen so far: each (batch, kv_heads, slots, head_dim).

    The heads come before the slots because the products of attention run over each head: stored like the arguments of
    `attend`, the whole cache would be transposed for every new token, which costs more than attending to it.
    """

    key: Array
    value: Array

    @classmethod
    def zeros(cls, size: tuple[int, int, int, int], dtype: DTypeLike = jnp.float32) -> "KVCache":
        """An empty cache of `size` (batch, kv_heads, slots, head_dim)."""
        return cls(jnp.zeros(size, dtype), jnp.zeros(size, dtype))

    def read(self, new: "KVCache", view: View) -> tuple["KVCache", "KVCache", View]:
        """The cache after the tokens of `new`, which are the queries; what these attend to; and what they may see of
        it, where `view` is what they may see of all tokens so far."""
        cache = self.write(new, view.query_offset)
        return cache, cache, view

    def write(self, new: "KVCache", index: Index) -> "KVCache":
        """A cache with the keys and values of `new` in the slots from `index` on."""
        return KVCache(_write(self.key, new.key, index), _write(self.value, new.value, index))

    def take(self, rows: Int[Array, "rows"]) -> "KVCache":
        """The cache of the batch rows `rows`, also under a leading depth axis."""
        return KVCache(*(jnp.take(x, rows, axis=-4, mode="clip") for x in (self.key, self.value)))

    def branch(self, beams: int, prompt: int) -> "KVCache":
        """The cache of `beams` rows for each of this one's, which have the first `prompt` slots in common: the only
        ones written so far."""
        batch, _, slots, _ = self.key.shape[-4:]

        def widen(x: Array) -> Array:
            return jnp.pad(x[..., :prompt, :], [(0, 0)] * (x.ndim - 2) + [(0, (slots - prompt) * beams), (0, 0)])

        owner = jnp.zeros((*self.key.shape[:-4], batch * beams, slots - prompt), jnp.int32)
        return BeamKVCache(widen(self.key), widen(self.value), owner)


@pytree_dataclass
class SharedKVCache(KVCache):
    """Keys and values of a context that several consecutive rows look at, such as the beams of one source: choosing
    among these rows leaves it as it is."""

    def take(self, rows: Int[Array, "rows"]) -> "SharedKVCache":
        """Itself."""
        return self

    def branch(self, beams: int, prompt: int) -> "SharedKVCache":
        """Itself."""
        return self


@pytree_dataclass
class BeamKVCache(KVCache):
    """Keys and values of several rows (beams) for each prompt, none of them held twice or ever moved.

    `key` and `value` are (batch, kv_heads, prompt + new * beams, head_dim): the prompt's, then for each further slot
    those that each beam wrote. `owner` (batch * beams, new) says which beam wrote what a row has in such a slot; it is
    all that changes when beams continue other beams. All beams of a prompt look at all slots, under a mask.
    """

    owner: Array

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Prompts, beams of each, and slots that its beams have in common."""
        batch, (rows, new) = self.key.shape[0], self.owner.shape
        return batch, rows // batch, self.key.shape[2] - new * (rows // batch)

    def write(self, new: KVCache, index: Index) -> "BeamKVCache":
        """With the key and value that each row has in the slot `index`, which is behind the prompt's."""
        batch, beams, prompt = self.sizes
        if new.key.shape[2] != 1:
            raise ValueError(f"beams go on by one token at a time, not by {new.key.shape[2]}")

        def write(old: Array, new: Array) -> Array:
            side_by_side = jnp.moveaxis(new.reshape(batch, beams, *new.shape[1:2], -1), 1, 2)
            return _write(old, side_by_side, prompt + (index - prompt) * beams)

        own = jnp.tile(jnp.arange(beams, dtype=jnp.int32), batch)[:, None]
        owner = jax.lax.dynamic_update_slice(self.owner, own, (0, index - prompt))
        return BeamKVCache(write(self.key, new.key), write(self.value, new.value), owner)

    def take(self, rows: Int[Array, "rows"]) -> "BeamKVCache":
        """Each row continues the row `rows` of the same prompt."""
        return BeamKVCache(self.key, self.value, jnp.take(self.owner, rows, axis=-2, mode="clip"))

    def read(self, new: KVCache, view: View) -> tuple[KVCache, KVCache, View]:
        """As of a KVCache, for one token of each row."""
        cache = self.write(new, view.query_offset)
        batch, beams, prompt = self.sizes
        slots = prompt + self.owner.shape[1]

        def spread(x: Array) -> Array:
            """From each row's slots to what is stored, where it is the beams' of one slot that share a value."""
            x = jnp.broadcast_to(x, (*x.shape[:-1], slots))
            x = jnp.concatenate([x[..., :prompt], jnp.repeat(x[..., prompt:], beams, axis=-1)], axis=-1)
            if x.shape[0] == 1:
                return x
            return jnp.swapaxes(x.reshape(batch, beams, x.shape[1], -1), 1, 2)

        writer = jnp.tile(jnp.arange(beams), slots - prompt)
        wrote = jnp.repeat(cache.owner, beams, axis=-1) == writer
        mask = jnp.pad(wrote, [(0, 0), (prompt, 0)], constant_values=True).reshape(batch, 1, beams, -1)
        mask &= spread(view.allowed(1, slots))
        if view.mask is not None:
            mask = mask & spread(view.mask)
        return cache, cache, View(mask, None if view.bias is None else spread(view.bias))


@pytree_dataclass
class RollingKVCache(KVCache):
    """Keys and values of the newest tokens only, for patterns that look back no further: the token at index i is in
    the slot i modulo the number of slots."""

    def read(self, new: KVCache, view: View) -> tuple[KVCache, KVCache, View]:
        index, size, length = view.query_offset, self.key.shape[-2], new.key.shape[-2]
        cache = self.write(new, index)
        if length == 1:
            seen, held = cache, _newest(index + 1, size)
        else:  # what the first of these tokens look at, the last ones may have displaced
            seen = KVCache(*(jnp.concatenate(pair, axis=-2) for pair in zip(_pair(self), _pair(new), strict=True)))
            held = jnp.concatenate([_newest(index, size), index + jnp.arange(length)])

        def held_of(x: Array) -> Array:
            return x if x.shape[-1] == 1 else jnp.take(x, jnp.maximum(held, 0), axis=-1)

        if view.places is None or view.pattern.relative:
            mask = view.pattern.allows((index + jnp.arange(length))[:, None], held[None, :])[None, None]
        else:
            of_queries = jax.lax.dynamic_slice_in_dim(view.places, index, length, axis=1)
            mask = view.pattern.allows(of_queries[:, :, None], held_of(view.places)[:, None, :])[:, None]
        mask = jnp.broadcast_to(mask & (held >= 0), (len(mask), 1, length, len(held)))
        if view.mask is not None:
            mask = mask & held_of(view.mask)
        return cache, seen, View(mask, None if view.bias is None else held_of(view.bias))

    def write(self, new: KVCache, index: Index) -> "RollingKVCache":
        """With the newest tokens of `new`, of which the first has the index `index`."""
        size, length = self.key.shape[-2], new.key.shape[-2]
        kept = min(size, length)
        slots = (index + length - kept + jnp.arange(kept)) % size

        def write(old: Array, new: Array) -> Array:
            return old.at[..., slots, :].set(new[..., length - kept :, :].astype(old.dtype), unique_indices=True)

        return RollingKVCache(write(self.key, new.key), write(self.value, new.value))

    def take(self, rows: Int[Array, "rows"]) -> "RollingKVCache":
        """The cache of the batch rows `rows`, also under a leading depth axis."""
        return RollingKVCache(*(jnp.take(x, rows, axis=-4, mode="clip") for x in _pair(self)))

    def branch(self, beams: int, prompt: int) -> "RollingKVCache":
        """The cache of `beams` rows for each of this one's."""
        return RollingKVCache(*(jnp.repeat(x, beams, axis=-4) for x in _pair(self)))


def _pair(cache: KVCache) -> tuple[Array, Array]:
    return cache.key, cache.value


def _newest(count: Index, size: int) -> Int[Array, "size"]:
    """The index of the token that each slot of a rolling cache holds after `count` tokens; negative: none yet."""
    return count - 1 - (count - 1 - jnp.arange(size)) % size


def _write(old: Array, new: Array, index: Index) -> Array:
    return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, 0, index, 0))
