"""Windows by their definition: which place of a map is where, who may look at whom, and which bias belongs to whom."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.nn import WindowPositionBias, from_windows, pad_to_windows, shifted_mask, to_windows

SIDE = st.integers(1, 4)


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 3), window=st.tuples(SIDE, SIDE), counts=st.tuples(SIDE, SIDE))
def test_a_place_is_in_the_window_of_its_row_and_column(batch, window, counts):
    height, width = window[0] * counts[0], window[1] * counts[1]
    x = np.arange(batch * height * width * 2, dtype=np.float32).reshape(batch, height, width, 2)
    windows = to_windows(jnp.asarray(x), window)
    assert windows.shape == (batch * counts[0] * counts[1], window[0] * window[1], 2)
    for example, row, column in np.ndindex(batch, height, width):
        number = (example * counts[0] + row // window[0]) * counts[1] + column // window[1]
        place = row % window[0] * window[1] + column % window[1]
        np.testing.assert_array_equal(windows[number, place], x[example, row, column])
    np.testing.assert_array_equal(from_windows(windows, window, (height, width)), x)


def test_padding_is_at_the_bottom_and_at_the_right():
    x = jnp.ones((2, 5, 6, 3))
    padded = pad_to_windows(x, (3, 4))
    assert padded.shape == (2, 6, 8, 3)
    np.testing.assert_array_equal(padded[:, :5, :6], x)
    assert float(padded.sum()) == x.size
    assert pad_to_windows(x, (5, 3)) is x


@settings(max_examples=20, deadline=None)
@given(window=st.tuples(SIDE, SIDE), counts=st.tuples(SIDE, SIDE), shift=st.tuples(SIDE, SIDE))
def test_after_a_shift_only_neighbours_look_at_one_another(window, counts, shift):
    """Two places may if they are in one window of a grid that begins at the shift, on the map as it was."""
    shift = (shift[0] % window[0], shift[1] % window[1])
    size = (window[0] * counts[0], window[1] * counts[1])
    mask = np.asarray(shifted_mask(size, window, shift))
    places = np.stack(np.mgrid[: size[0], : size[1]], axis=-1).astype(np.float32)
    rolled = np.roll(places, (-shift[0], -shift[1]), axis=(0, 1))
    windows = np.asarray(to_windows(jnp.asarray(rolled[None]), window)).astype(int)
    for number, inside in enumerate(windows):
        for q, k in np.ndindex(len(inside), len(inside)):
            together = all(
                (inside[q, axis] - shift[axis]) // window[axis] == (inside[k, axis] - shift[axis]) // window[axis]
                for axis in (0, 1)
            )
            assert mask[number, 0, q, k] == together
    assert mask.shape == (counts[0] * counts[1], 1, window[0] * window[1], window[0] * window[1])


def test_a_bias_belongs_to_an_offset_and_a_head():
    """Whatever the size of the window up to the largest, as the original numbers offsets: rows first, from -2 on."""
    bias = WindowPositionBias(2, (3, 4), embedding_init=nnx.initializers.normal(1.0), rngs=nnx.Rngs(0))
    table = np.asarray(bias.embedding[...]).reshape(5, 7, 2)
    for height, width in ((3, 4), (2, 4), (2, 1), (1, 1)):
        values = np.asarray(bias((height, width)))
        assert values.shape == (1, 2, height * width, height * width)
        for i, j, k, m in np.ndindex(height, width, height, width):
            expected = table[i - k + 2, j - m + 3]
            np.testing.assert_array_equal(values[0, :, i * width + j, k * width + m], expected)
    np.testing.assert_array_equal(bias(), bias((3, 4)))


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="a map of 4 x 6 cannot be cut into windows of 3 x 3"):
        to_windows(jnp.zeros((1, 4, 6, 2)), (3, 3))
    with pytest.raises(ValueError, match="a map of 4 x 6 cannot be cut into windows of 4 x 4"):
        from_windows(jnp.zeros((2, 16, 2)), (4, 4), (4, 6))
    with pytest.raises(ValueError, match="a window of 4 x 3 is larger than 3 x 3"):
        WindowPositionBias(1, (3, 3), rngs=nnx.Rngs(0))((4, 3))
