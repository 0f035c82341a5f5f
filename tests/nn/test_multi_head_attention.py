"""`MultiHeadAttention` and `TransformerLayer` without a reference: caches, contexts, randomness."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from transformers_jax.nn import Causal, KVCache, Local, MultiHeadAttention, TransformerLayer, normal_init

WIDE = normal_init(0.4)  # weights large enough for attention to be far from uniform
BATCH, LENGTH, DIM, HEADS = 2, 7, 12, 3


def inputs(length=LENGTH, dim=DIM, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(BATCH, length, dim)), jnp.float32)


@partial(jax.jit, static_argnames="length")
def chunk(module, hidden, mask, cache, index, length):
    hidden = jax.lax.dynamic_slice_in_dim(hidden, index, length, axis=1)
    output = module(hidden, mask=mask, cache=cache, cache_index=index)
    return output.hidden, output.cache


@pytest.mark.parametrize("pattern", [Causal(), Local(2) & Causal()])
@pytest.mark.parametrize("kv_heads", [3, 1])
def test_chunks_through_a_cache_equal_the_whole(pattern, kv_heads):
    """In chunks of any sizes, into a cache that is longer than needed, with padding in front of one row."""
    module = MultiHeadAttention(DIM, HEADS, kv_heads=kv_heads, pattern=pattern, kernel_init=WIDE, rngs=nnx.Rngs(0))
    hidden, real = inputs(), jnp.ones((BATCH, LENGTH), bool).at[1, :2].set(False)
    whole = module(hidden, mask=real[:, None, None]).hidden
    slots = 11
    mask = jnp.pad(real, [(0, 0), (0, slots - LENGTH)])[:, None, None]
    for lengths in ((4, 3), (3, 1, 3), (1,) * 7):
        cache, outputs, index = KVCache.zeros((BATCH, kv_heads, slots, DIM // HEADS)), [], 0
        for length in lengths:
            output, cache = chunk(module, hidden, mask, cache, index, length)
            outputs.append(output)
            index += length
        np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=1e-6)


def test_context_projected_once_equals_context():
    module = MultiHeadAttention(DIM, HEADS, context_dim=5, kernel_init=WIDE, rngs=nnx.Rngs(0))
    hidden, context = inputs(), inputs(9, 5, seed=1)
    mask = jnp.ones((BATCH, 1, 1, 9), bool).at[0, ..., 6:].set(False)
    direct = module(hidden, context=context, mask=mask, capture_weights=True)
    cached = module(hidden, context=module.keys_and_values(context), mask=mask)
    np.testing.assert_allclose(cached.hidden, direct.hidden, atol=1e-6)
    assert direct.cache is None and direct.weights.shape == (BATCH, HEADS, LENGTH, 9)
    assert (np.asarray(direct.weights)[0, ..., 6:] == 0).all()
    changed = module(hidden, context=context.at[0, 6:].add(3.0), mask=mask)
    np.testing.assert_allclose(changed.hidden, direct.hidden, atol=1e-6)  # what is masked does not count


def test_cache_rows_can_be_taken():
    """As beams that continue other beams need it."""
    rng = np.random.default_rng(0)
    cache = KVCache(*(jnp.asarray(rng.normal(size=(3, 2, 5, 4)), jnp.float32) for _ in range(2)))
    rows = np.array([2, 0, 2])
    np.testing.assert_array_equal(cache.take(jnp.asarray(rows)).key, np.asarray(cache.key)[rows])


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="dim=10 is not a multiple of heads=3; change one, or give head_dim"):
        MultiHeadAttention(10, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="heads=3 is not a multiple of kv_heads=2"):
        MultiHeadAttention(12, 3, kv_heads=2, rngs=nnx.Rngs(0))
    module = MultiHeadAttention(10, 3, head_dim=7, rngs=nnx.Rngs(0))
    assert module(inputs(dim=10)).hidden.shape == (BATCH, LENGTH, 10)


@pytest.mark.parametrize("where", ["dropout", "attention_dropout", "mlp_dropout"])
def test_dropout_needs_both_a_rate_and_a_key(where):
    make = partial(TransformerLayer, DIM, HEADS, 20, kernel_init=WIDE, rngs=nnx.Rngs(0))
    layer, plain = make(**{where: 0.5}), TransformerLayer(DIM, HEADS, 20, kernel_init=WIDE, rngs=nnx.Rngs(0))
    layer = jax.tree.unflatten(jax.tree.structure(layer), jax.tree.leaves(plain))
    run = jax.jit(lambda layer, key: layer(inputs(), key=key).hidden)
    certain = run(plain, None)
    np.testing.assert_array_equal(run(layer, None), certain)
    np.testing.assert_array_equal(run(plain, jax.random.key(0)), certain)
    one, two = (run(layer, jax.random.key(i)) for i in range(2))
    np.testing.assert_array_equal(run(layer, jax.random.key(0)), one)
    assert np.mean(np.asarray(one) != certain) > 0.5 and np.mean(np.asarray(one) != two) > 0.5


def test_layer_says_what_is_wrong_with_its_call():
    layer = TransformerLayer(DIM, HEADS, 20, cross_attention=True, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="takes `context` if, and only if, it was built with cross_attention=True"):
        layer(inputs())
    with pytest.raises(ValueError, match="takes `context` if, and only if"):
        TransformerLayer(DIM, HEADS, 20, rngs=nnx.Rngs(0))(inputs(), context=inputs())
