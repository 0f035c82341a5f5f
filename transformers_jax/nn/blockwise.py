"""Attention by blocks: what a pattern does not allow is not computed, and no call holds all scores at once.

Queries and keys are cut into blocks. For each block of queries the blocks of keys that its pattern may meet are
gathered, and `attend` computes their exact attention, a few blocks at a time; the backward pass computes them again.
Time grows with the number of pairs of blocks that meet (the length times the window for local patterns), memory with
the length. Where only every n-th place counts (dilation, strides), places are first ordered by their remainder.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from transformers_jax.nn.patterns import Blocks, Causal, Full, Pattern

BLOCKS = (128, 256, 512)
"""Sizes of blocks to choose from: smaller ones follow a pattern more closely, larger ones make better products."""
ROW_COST = 128
"""What a block of queries costs beside its scores, in keys a query."""
SCORES_AT_ONCE = 1 << 24
"""How many scores are held at a time: 64 MiB of them."""
MOST_GROUPS = 4


@dataclass(frozen=True)
class Group:
    """Blocks of queries that meet about equally many blocks of keys."""

    rows: np.ndarray
    """(rows,) the blocks of queries."""
    table: np.ndarray
    """(rows, most) the blocks of keys that each meets; -1 where there is none."""


@dataclass(frozen=True)
class Plan:
    """How a pattern is computed for one length."""

    step: int
    """Places that are computed side by side are so far apart."""
    queries: np.ndarray
    """(blocks, size) the place of each query; -1 for none."""
    keys: np.ndarray
    """(blocks, size) the place of each key; -1 for none."""
    groups: tuple[Group, ...]

    @property
    def cost(self) -> float:
        """Scores to compute, and what blocks cost beside them."""
        size = self.queries.shape[1]
        return sum(group.table.size * size**2 + len(group.rows) * size * ROW_COST for group in self.groups)


@functools.lru_cache(maxsize=256)
def plan(pattern: Pattern, query_length: int, key_length: int, block: int | None = None) -> Plan:
    """The cheapest plan there is: over the sizes of blocks (unless `block` is given), and the orders of places that
    the pattern's steps suggest."""
    sizes = BLOCKS if block is None else (block,)
    plans = [
        _plan(pattern, query_length, key_length, size, step) for size in sizes for step in (1, *sorted(pattern.steps))
    ]
    return min(plans, key=lambda plan: plan.cost)


def _plan(pattern: Pattern, query_length: int, key_length: int, size: int, step: int) -> Plan:
    queries, keys = (_order(length, size, step) for length in (query_length, key_length))
    meets = pattern.may_meet(Blocks(queries[:, 0], size, step), Blocks(keys[:, 0], size, step))
    counts = meets.sum(axis=1)
    groups, left = [], np.flatnonzero(counts)
    while len(left):
        most = counts[left].max()
        last = len(groups) == MOST_GROUPS - 1
        chosen = left if last else left[counts[left] * 2 > most]
        table = np.full((len(chosen), most), -1)
        for row, blocks in zip(table, meets[chosen], strict=True):
            found = np.flatnonzero(blocks)
            row[: len(found)] = found
        groups.append(Group(chosen, table))
        left = np.setdiff1d(left, chosen)
    return Plan(step, queries, keys, tuple(groups))


def _order(length: int, size: int, step: int) -> np.ndarray:
    """(blocks, size): the places from 0 on, those that are `step` apart together; -1 fills up the last block of each
    remainder."""
    rows = []
    for first in range(min(step, length)):
        places = np.arange(first, length, step)
        filled = np.pad(places, (0, -len(places) % size), constant_values=-1)
        rows.append(filled.reshape(-1, size))
    return np.concatenate(rows)


def attend_by_blocks(
    attend: Callable[..., Array],
    query: Float[Array, "batch q heads head_dim"],
    key: Float[Array, "batch k kv_heads head_dim"],
    value: Float[Array, "batch k kv_heads value_dim"],
    *,
    mask: Array | None,
    bias: Array | None,
    segment_ids: Int[Array, "batch k"] | None,
    pattern: Pattern,
    places: Int[Array, "batch k"] | None = None,
    dropout_key: jax.Array | None,
    block: int | None = None,
) -> Float[Array, "batch q heads value_dim"]:
    """What `attend` computes for the whole, by calls of `attend(query, key, value, mask=, bias=, dropout_key=)` for
    parts of it. The first query stands at index 0 of the keys.

    Where `places` turn out not to be the indices, all that the pattern might allow anywhere is computed."""
    if 0 in (*query.shape[:3], key.shape[1]):  # nobody looks, or there is nothing to look at
        return jnp.zeros((*query.shape[:3], value.shape[-1]), value.dtype)
    arrays = query, key, value, mask, bias, segment_ids, dropout_key
    by_index = partial(_by_index, attend, pattern=pattern, block=block)
    if places is None or pattern.relative:
        return by_index(arrays, None)
    indices = jnp.broadcast_to(jnp.arange(key.shape[1]), places.shape)
    return jax.lax.cond(
        jnp.all(places == indices),
        lambda arrays, places: by_index(arrays, None),
        lambda arrays, places: by_index(arrays, places),
        arrays,
        places,
    )


def _by_index(
    attend: Callable[..., Array], arrays: Any, places: Array | None, *, pattern: Pattern, block: int | None
) -> Array:
    query, key, value, mask, bias, segment_ids, dropout_key = arrays
    batch, query_length = query.shape[:2]
    planned = pattern if places is None else Causal() if pattern.causal else Full()
    plan_ = plan(planned, query_length, key.shape[1], block)
    size = plan_.queries.shape[1]
    queries, keys = np.maximum(plan_.queries, 0), np.maximum(plan_.keys, 0)

    def cut(x: Array, places: np.ndarray) -> Array:
        """(batch, blocks, size, ...)"""
        if plan_.step == 1:
            filled = jnp.pad(x, [(0, 0), (0, places.size - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
            return filled.reshape(batch, *places.shape, *x.shape[2:])
        return jnp.take(x, places, axis=1)

    query, key, value = cut(query, queries), cut(key, keys), cut(value, keys)
    segments = None if segment_ids is None else (cut(segment_ids, queries), cut(segment_ids, keys))

    def part(x: Array, rows: Array, table: Array) -> Array:
        """The scores' mask or bias (batch or 1, heads or 1, q or 1, k or 1) of some rows: (batch * rows, heads or 1,
        size or 1, most * size or 1)."""
        q = jnp.asarray(queries)[rows] if x.shape[2] > 1 else jnp.zeros((len(rows), 1), int)
        k = jnp.asarray(keys)[table].reshape(len(rows), -1) if x.shape[3] > 1 else jnp.zeros((len(rows), 1), int)
        found = x[:, :, q[:, :, None], k[:, None, :]]  # (batch or 1, heads or 1, rows, size or 1, most * size or 1)
        found = jnp.broadcast_to(found, (batch, *found.shape[1:]))
        return jnp.swapaxes(found, 1, 2).reshape(-1, found.shape[1], *found.shape[3:])

    @jax.checkpoint
    def rows_of(arrays, rows: Array, table: Array) -> Array:
        query, key, value, segments, mask, bias = arrays
        met, table = table >= 0, jnp.maximum(table, 0)
        count, most = table.shape
        of_queries, of_keys = jnp.asarray(plan_.queries)[rows], jnp.asarray(plan_.keys)[table].reshape(count, -1)
        there = (of_keys >= 0) & jnp.repeat(met, size, axis=1)
        if places is not None:
            of_queries, of_keys = (places[:, jnp.maximum(x, 0)] for x in (of_queries, of_keys))
        allowed = pattern.allows(of_queries[..., :, None], of_keys[..., None, :]) & there[:, None, :]
        allowed = jnp.broadcast_to(allowed, (batch, count, size, most * size))
        if segments is not None:
            theirs = segments[1][:, table].reshape(batch, count, 1, -1)
            allowed &= segments[0][:, rows][..., None] == theirs
        allowed = allowed.reshape(-1, 1, *allowed.shape[2:])
        if mask is not None:
            allowed &= part(mask, rows, table)
        mixed = attend(
            query[:, rows].reshape(-1, *query.shape[2:]),
            key[:, table].reshape(batch * count, -1, *key.shape[3:]),
            value[:, table].reshape(batch * count, -1, *value.shape[3:]),
            mask=allowed,
            bias=None if bias is None else part(bias, rows, table),
            dropout_key=None if dropout_key is None else jax.random.fold_in(dropout_key, rows[0]),
        )
        return mixed.reshape(batch, count, *mixed.shape[1:])

    arrays = query, key, value, segments, mask, bias
    heads, outputs, order = query.shape[3], [], []
    for group in plan_.groups:
        together = max(1, SCORES_AT_ONCE // (batch * heads * size**2 * group.table.shape[1]))
        calls = -(-len(group.rows) // together)
        together = -(-len(group.rows) // calls)
        fill = (0, calls * together - len(group.rows))
        rows = np.pad(group.rows, fill, mode="edge").reshape(calls, together)
        table = np.pad(group.table, (fill, (0, 0)), mode="edge").reshape(calls, together, -1)
        if calls == 1:
            outputs.append(rows_of(arrays, jnp.asarray(rows[0]), jnp.asarray(table[0])))
        else:
            _, found = jax.lax.scan(lambda _, x: (None, rows_of(arrays, *x)), None, (rows, table))
            outputs.append(jnp.moveaxis(found, 0, 1).reshape(batch, -1, *found.shape[3:]))
        order.append(rows.reshape(-1))
    if not outputs:  # a pattern that allows nothing here
        return jnp.zeros((batch, query_length, heads, value.shape[-1]), value.dtype)
    found = jnp.concatenate(outputs, axis=1).reshape(batch, -1, heads, value.shape[-1])
    return _in_order(found, plan_.queries[np.concatenate(order)].reshape(-1), query_length)


def _in_order(found: Array, places: np.ndarray, length: int) -> Array:
    """(batch, length, ...) of what was found for `places`, -1 for none; zeros where nothing was."""
    if np.array_equal(places[:length], np.arange(length)):
        return found[:, :length]
    where = np.full(length, len(places))
    where[places[places >= 0]] = np.flatnonzero(places >= 0)
    return jnp.take(found, where, axis=1, mode="fill", fill_value=0)
