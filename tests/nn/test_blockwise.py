"""Attention by blocks equals the dense mask: values and gradients, any lengths, padding, segments, bias, dropout."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.nn import Causal, Full, Global, Local, Random, Strided, attend
from transformers_jax.nn.blockwise import attend_by_blocks, plan

simple = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Local, st.integers(1, 9), dilation=st.integers(1, 4)),
    st.builds(Strided, st.integers(1, 9)),
    st.builds(Global, st.one_of(st.integers(1, 5), st.just((3, 17)))),
    st.builds(Random, st.integers(1, 3), st.just(64), st.sampled_from([5, 8]), st.integers(0, 3)),
)
patterns = st.recursive(
    simple,
    lambda part: st.one_of(st.builds(lambda a, b: a & b, part, part), st.builds(lambda a, b: a | b, part, part)),
    max_leaves=3,
)


def whole(pattern, arrays, mask=None, segments=None, bias=None, places=None):
    """By the definition, dense."""
    seen = dict(pattern=pattern, mask=mask, segment_ids=segments, bias=bias, places=places)
    return attend(*arrays, **seen, implementation="plain")


def by_blocks(pattern, arrays, mask=None, segments=None, bias=None, places=None, block=8):
    parts = dict(mask=mask, segment_ids=segments, bias=bias, pattern=pattern, places=places, dropout_key=None)
    return attend_by_blocks(partial(attend, implementation="plain"), *arrays, **parts, block=block)


def arrays(random, q, k, batch=2, heads=4, kv_heads=2):
    return tuple(
        jnp.asarray(random.normal(size=(batch, length, number, 6)), jnp.float32)
        for length, number in ((q, heads), (k, kv_heads), (k, kv_heads))
    )


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    pattern=patterns,
    lengths=st.tuples(st.integers(1, 45), st.integers(1, 45)),
    padding=st.sampled_from([None, "left", "right", "rows"]),
    segments=st.booleans(),
    bias=st.sampled_from([None, "heads", "whole"]),
    seed=st.integers(0, 99),
)
def test_every_pattern_equals_its_dense_mask(pattern, lengths, padding, segments, bias, seed):
    random = np.random.default_rng(seed)
    q, k = lengths
    q = k if segments else q
    mask = None
    if padding == "rows":
        mask = jnp.asarray(random.random((2, 1, q, k)) < 0.7)
    elif padding is not None:
        real = np.arange(k) < np.array([[k], [random.integers(0, k + 1)]])
        mask = jnp.asarray(real if padding == "right" else real[:, ::-1])[:, None, None, :]
    ids = jnp.asarray(np.sort(random.integers(0, 3, (2, k)))) if segments else None
    added = None
    if bias is not None:
        added = jnp.asarray(random.normal(size=(2, 4, q, k) if bias == "whole" else (1, 4, 1, k)), jnp.float32)
    given = arrays(random, q, k), mask, ids, added
    weigh = jnp.asarray(random.normal(size=(2, q, 4, 6)), jnp.float32)

    def results(function):
        def total(arrays, bias):
            output = function(pattern, arrays, mask, ids, bias)
            return jnp.sum(output * weigh), output

        (_, output), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(given[0], given[3])
        return output, gradients

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), results(by_blocks), results(whole))


@pytest.mark.parametrize(
    ("pattern", "most"),
    [
        (Local(256), 5),
        (Local(256) & Causal(), 3),
        (Local(64, dilation=4), 3),
        (Local(256) | Global(2), 8),
        (Local(256) | Random(3, 16384, block=128), 8),
    ],
)
def test_the_cost_grows_with_the_length_alone(pattern, most):
    """In blocks of keys for a block of queries, both of 128 places."""
    for length in (4096, 16384):
        pairs = sum(group.table.size for group in plan(pattern, length, length, 128).groups)
        assert pairs <= most * length / 128


def test_strides_are_computed_side_by_side():
    """Each of 32 remainders of 16,384 places is a sequence of 512: 4 x 4 blocks, of which half are allowed."""
    made = plan(Strided(32) & Causal(), 16384, 16384, 128)
    assert made.step == 32 and sum(group.table.size for group in made.groups) <= 32 * 12


@pytest.mark.parametrize(
    "pattern", [Global(2) | Local(3), (Global((0, 7)) | Local(3)) & Causal(), Random(2, 64, 8)], ids=str
)
def test_patterns_may_go_by_places(pattern):
    """Padding in front moves the places; a text with it gives what it gives alone."""
    length, padding = 29, 6
    given = arrays(np.random.default_rng(0), length, length)
    real = np.ones((2, length), int)
    real[1, :padding] = 0
    places = jnp.asarray(np.maximum(np.cumsum(real, axis=1) - 1, 0))
    mask = jnp.asarray(real != 0)[:, None, None]
    alone = whole(pattern, tuple(x[1:, padding:] for x in given))
    for function in (whole, by_blocks):
        output = function(pattern, given, mask=mask, places=places)
        np.testing.assert_allclose(output[1:, padding:], alone, atol=1e-5)
        np.testing.assert_allclose(output[:1], whole(pattern, tuple(x[:1] for x in given)), atol=1e-5)
    indices = jnp.broadcast_to(jnp.arange(length), (2, length))
    np.testing.assert_allclose(by_blocks(pattern, given, places=indices), whole(pattern, given), atol=1e-5)


@pytest.mark.parametrize(("batch", "q", "k"), [(0, 9, 9), (2, 0, 9), (2, 9, 0)])
def test_nothing_to_compute(batch, q, k):
    query, key = jnp.ones((batch, q, 2, 4)), jnp.ones((batch, k, 2, 4))
    for implementation in ("plain", "blockwise"):
        output = attend(query, key, key, pattern=Local(3), implementation=implementation)
        assert output.shape == query.shape and not output.any()


def test_random_blocks_end_where_they_were_drawn_for():
    x = jnp.ones((1, 12, 2, 4))
    with pytest.raises(ValueError, match="it was not drawn for 12 keys"):
        attend(x, x, x, pattern=Random(1, 8, block=4) | Local(2))
