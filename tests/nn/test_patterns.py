"""Attention patterns against their definitions, place by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.nn import Causal, Full, Local

LENGTHS = ((1, 7), (4, 4), (5, 9), (6, 2))


def simple(pattern, query: int, key: int) -> bool:
    """May the query at `query` look at the key at `key`? Word by word as the docstrings say."""
    if isinstance(pattern, Full):
        return True
    if isinstance(pattern, Causal):
        return key == query or key < query
    steps = [query + i * pattern.dilation for i in range(-pattern.window, pattern.window + 1)]
    return key in steps


patterns = st.one_of(
    st.just(Full()), st.just(Causal()), st.builds(Local, st.integers(0, 4), dilation=st.integers(1, 3))
)


@settings(max_examples=60, deadline=None)
@given(first=patterns, second=patterns, lengths=st.sampled_from(LENGTHS), offset=st.integers(0, 6))
def test_masks_equal_brute_force(first, second, lengths, offset):
    q, k = lengths
    places = [[(i + offset, j) for j in range(k)] for i in range(q)]
    one, two = ([[simple(p, *place) for place in row] for row in places] for p in (first, second))
    np.testing.assert_array_equal(first.mask(q, k, offset=offset), one)
    np.testing.assert_array_equal((first & second).mask(q, k, offset=offset), np.logical_and(one, two))
    np.testing.assert_array_equal((first | second).mask(q, k, offset=offset), np.logical_or(one, two))


@settings(max_examples=20, deadline=None)
@given(pattern=st.one_of(patterns, st.tuples(patterns, patterns).map(lambda p: p[0] & p[1])), offset=st.integers(0, 5))
def test_a_chunk_of_queries_has_the_rows_of_the_whole(pattern, offset):
    """mask(q, k, offset) == mask(offset + q, k)[offset:], also when the offset is only known while running."""
    whole = pattern.mask(9, 9)
    np.testing.assert_array_equal(pattern.mask(4, 9, offset=offset), whole[offset : offset + 4])
    np.testing.assert_array_equal(pattern.mask(4, 9, offset=jnp.int32(offset)), whole[offset : offset + 4])


def test_patterns_nest_and_compare_by_value():
    """They are static arguments of jitted functions: equal ones must not compile again."""
    banded = Local(2) & Causal() | Local(0)
    assert banded == (Local(2) & Causal() | Local(0)) and hash(banded) == hash(Local(2) & Causal() | Local(0))
    assert Local(2) != Local(3) and Causal() != Full()
    jitted = jax.jit(lambda pattern: pattern.mask(3, 3), static_argnums=0)
    np.testing.assert_array_equal(jitted(Local(1) & Causal()), [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    jitted(Local(1) & Causal())
    assert jitted._cache_size() == 1


@pytest.mark.parametrize(("window", "dilation"), [(-1, 1), (2, 0)])
def test_impossible_windows_are_refused(window, dilation):
    with pytest.raises(ValueError, match=rf"Local\(window={window}, dilation={dilation}\)"):
        Local(window, dilation)
