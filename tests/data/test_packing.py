"""Several texts in one row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import pack, packed_documents


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=60), room=st.integers(20, 40))
def test_every_text_is_in_one_row_that_holds_it(lengths, room):
    rows = pack(lengths, room)
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    assert all(sum(lengths[text] for text in row) <= room for row in rows)
    # No more than 11/9 of what is needed, and 1 (best fit decreasing).
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // room) + 1 + max(0, sum(2 * n > room for n in lengths))
    assert pack(lengths, room) == rows
    half_empty = [row for row in rows if sum(lengths[text] for text in row) * 2 <= room]
    assert len(half_empty) <= 1  # two of them would be one


def test_the_fullest_row_that_holds_a_text_gets_it():
    assert pack([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert pack([6, 5, 4, 3, 2], 10, most=2) == [[0, 2], [1, 3], [4]]
    with pytest.raises(ValueError, match="texts of 3 to 11 tokens do not fit into rows of 10"):
        pack([3, 11], 10)
    with pytest.raises(ValueError, match="texts of 0 to 3"):
        pack([3, 0], 10)


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 25), min_size=1, max_size=12), length=st.integers(2, 12))
def test_every_token_of_a_document_is_a_label_once(sizes, length):
    """And its inputs are what precedes it: the separator, then the document."""
    documents, count = [], 1
    for size in sizes:
        documents.append(np.arange(count, count + size))
        count += size
    tokens = np.concatenate([part for document in documents for part in (document, [0])][:-1]).astype(np.uint16)
    packed = packed_documents(tokens, 0, length)
    pairs = []
    for row in packed.dataset:
        real = row["labels"] != -100
        assert all(row[name].shape == (length,) for name in ("input_ids", "labels", "segment_ids"))
        assert (np.diff(row["segment_ids"]) >= 0).all() and (
            row["segment_ids"][~real] > row["segment_ids"][real].max()
        ).all()
        for segment in np.unique(row["segment_ids"][real]):
            there = row["segment_ids"] == segment
            np.testing.assert_array_equal(row["input_ids"][there][1:], row["labels"][there][:-1])
        pairs += zip(row["input_ids"][real].tolist(), row["labels"][real].tolist(), strict=True)
    expected = []
    for document in documents:
        if len(document):
            expected += zip([0, *document.tolist()], [*document.tolist(), 0], strict=True)
    assert sorted(pairs) == sorted(expected)
    if pairs:
        assert packed.share_of_padding == pytest.approx(1 - len(pairs) / (len(packed) * length))
