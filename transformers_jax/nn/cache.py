"""What attention remembers of the tokens seen so far, for generation token by token."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from transformers_jax.nn.patterns import Pattern
from transformers_jax.nn.pytree import pytree_dataclass

Index = int | Int[Array, ""]


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

    def seen(
        self,
        mask: Bool[Array, "#rows #heads 1 #slots"] | None,
        bias: Float[Array, "#rows heads 1 #slots"] | None,
        pattern: Pattern,
        index: Index,
    ) -> tuple[Bool[Array, "batch #heads beams stored"], Float[Array, "#batch heads #beams stored"] | None]:
        """The mask and the bias over what is stored, for the newest tokens of all beams, which stand at `index`, of
        those over each row's own slots; the mask includes the pattern."""
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
        wrote = jnp.repeat(self.owner, beams, axis=-1) == writer
        mine = jnp.pad(wrote, [(0, 0), (prompt, 0)], constant_values=True).reshape(batch, 1, beams, -1)
        mine &= spread(pattern.mask(1, slots, offset=index)[None, None])
        if mask is not None:
            mine = mine & spread(mask)
        return mine, None if bias is None else spread(bias)


def _write(old: Array, new: Array, index: Index) -> Array:
    return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), (0, 0, index, 0))
