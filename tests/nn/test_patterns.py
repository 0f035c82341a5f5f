"""Attention patterns against their definitions, place by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.nn import Causal, Full, Global, Local, Random, Strided, parse_pattern
from transformers_jax.nn.patterns import Blocks

LENGTHS = ((1, 7), (4, 4), (5, 9), (6, 2))


def simple(pattern, query: int, key: int) -> bool:
    """May the query at `query` look at the key at `key`? Word by word as the docstrings say."""
    if isinstance(pattern, Full):
        return True
    if isinstance(pattern, Causal):
        return key == query or key < query
    if isinstance(pattern, Strided):
        return key in range(query % pattern.stride, 100, pattern.stride)
    if isinstance(pattern, Global):
        places = range(pattern.tokens) if isinstance(pattern.tokens, int) else pattern.tokens
        return query in places or key in places
    steps = [query + i * pattern.dilation for i in range(-pattern.window, pattern.window + 1)]
    return key in steps


patterns = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.builds(Local, st.integers(1, 4), dilation=st.integers(1, 3)),
    st.builds(Strided, st.integers(1, 4)),
    st.builds(Global, st.one_of(st.integers(1, 3), st.just((2, 7)))),
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
    banded = Local(2) & Causal() | Local(1)
    assert banded == (Local(2) & Causal() | Local(1)) and hash(banded) == hash(Local(2) & Causal() | Local(1))
    assert Local(2) != Local(3) and Causal() != Full()
    jitted = jax.jit(lambda pattern: pattern.mask(3, 3), static_argnums=0)
    np.testing.assert_array_equal(jitted(Local(1) & Causal()), [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    jitted(Local(1) & Causal())
    assert jitted._cache_size() == 1


@pytest.mark.parametrize(("window", "dilation"), [(0, 1), (2, 0)])
def test_impossible_windows_are_refused(window, dilation):
    with pytest.raises(ValueError, match="must be a whole number from 1 to"):
        Local(window, dilation)


def combined(first, second, both):
    return first & second if both else first | second


@settings(max_examples=80, deadline=None)
@given(
    first=st.one_of(patterns, st.builds(Random, st.integers(1, 3), st.just(40), st.integers(3, 9), st.integers(0, 3))),
    second=patterns,
    both=st.booleans(),
    size=st.integers(1, 6),
    step=st.integers(1, 4),
)
def test_blocks_that_never_meet_allow_nothing(first, second, both, size, step):
    """And the other properties say of the whole mask what they promise."""
    pattern, length = combined(first, second, both), 36
    mask = np.asarray(pattern.mask(length, length))
    starts = np.array([i for i in range(length) if i + step * (size - 1) < length])
    meets = pattern.may_meet(Blocks(starts, size, step), Blocks(starts, size, step))
    places = starts[:, None] + step * np.arange(size)
    allowed = mask[places[:, None, :, None], places[None, :, None, :]].any(axis=(2, 3))
    assert not (allowed & ~meets).any()
    above = np.triu(np.ones((length, length), bool), 1)
    if pattern.causal:
        assert not (mask & above).any()
    if pattern.reach is not None:
        queries, keys = np.nonzero(mask)
        assert (queries - keys <= pattern.reach).all()
    if pattern.relative:
        np.testing.assert_array_equal(mask[1:, 1:], mask[:-1, :-1])
    if pattern not in (Full(), Causal()):
        assert abs(pattern.keys_seen(length) - mask.sum() / length) < 1e-6
    indices = np.arange(length)
    np.testing.assert_array_equal(
        np.broadcast_to(pattern.allows(indices[:, None], indices[None]), mask.shape), mask
    )  # in NumPy, too


@given(first=patterns, second=patterns, third=patterns, both=st.booleans(), again=st.booleans())
def test_text_is_read_as_it_is_written(first, second, third, both, again):
    for pattern in (
        combined(combined(first, second, both), third, again),
        combined(first, combined(second, third, both), again),
    ):
        assert parse_pattern(str(pattern)) == pattern


def test_text_follows_the_precedence_of_python():
    assert parse_pattern("local(4) & causal | global(2)") == (Local(4) & Causal()) | Global(2)
    assert parse_pattern(" local(4, dilation=2) & (CAUSAL | global((3, 9))) ") == Local(4, 2) & (
        Causal() | Global((3, 9))
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is not an expression"),
        ("local(4", "it is not an expression"),
        ("locl(4)", "locl(4) is unknown"),
        ("local", "argument: 'window'"),
        ("local(4, 5, 6)", "positional arguments"),
        ("local(True)", "True is no whole number"),
        ("local(4.5)", "4.5 is no whole number"),
        ("local(-3)", "-3 is no whole number"),
        ("global((1, 'a'))", "'a' is no whole number"),
        ("causal and local(3)", "is unknown"),
        ("__import__('os')", "is unknown"),
        ("causal + local(3)", "is unknown"),
        ("global((1, (2, 3)))", "is no whole number"),
        ("local(window=3, window=4)", "gives a number twice"),
        ("causal & " * 3000 + "causal", "more than 1,000"),
    ],
)
def test_other_text_is_refused(text, said):
    with pytest.raises(ValueError) as error:
        parse_pattern(text)
    assert said in str(error.value) and "there are full, causal, local" in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Local(3_000_000_000), "window must be a whole number from 1 to 2,147,483,647"),
        (lambda: Local(2**20, 2**12), "looks further than 2,147,483,647 places"),
        (lambda: Strided(0), "strided(stride=0): stride must be a whole number from 1"),
        (lambda: Global(0), "global(tokens=0): tokens must be a whole number from 1"),
        (lambda: Global(()), "tokens must be a number of at least 1, or places from 0"),
        (lambda: Global((1, 1)), "global(tokens=(1, 1)): tokens names a place twice"),
        (lambda: Global((-1,)), "global(tokens=(-1,)): tokens must be a number of at least 1, or places from 0"),
        (lambda: Global(10**12), "tokens must be a whole number from 1"),
        (lambda: Global(2_000_000_000).check(9), "place 1999999999 is outside of a sequence of 9"),
        (lambda: Random(0, 10), "blocks must be a whole number from 1"),
        (lambda: Random(1, 1_000_000, block=1), "1,000,000 blocks are more than 16,384; make block larger"),
        (lambda: Random(3, 10, block=5), "there are only 2 blocks to draw from"),
        (lambda: (Local(2, dilation=9) | Causal()).check(9), "among 9 places a query would see nothing but itself"),
        (lambda: Strided(9).check(9), "among 9 places a query would see nothing but itself"),
        (lambda: Global((2, 9)).check(9), "place 9 is outside of a sequence of 9"),
        (lambda: (Causal() & Random(1, 9, block=3)).check(10), "it was not drawn for a sequence of 10"),
    ],
)
def test_what_makes_no_sense_is_refused(make, said):
    with pytest.raises(ValueError) as error:
        make()
    assert said in str(error.value)


def test_random_blocks_are_drawn_once():
    pattern = Random(3, 64, block=4, seed=1)
    mask = np.asarray(pattern.mask(64, 64))
    blocks = mask.reshape(16, 4, 16, 4)
    assert (blocks.all(axis=(1, 3)) == blocks.any(axis=(1, 3))).all()
    assert (blocks.any(axis=(1, 3)).sum(axis=1) == 3).all()
    np.testing.assert_array_equal(Random(3, 64, block=4, seed=1).mask(64, 64), mask)
    assert (np.asarray(Random(3, 64, block=4, seed=2).mask(64, 64)) != mask).any()
