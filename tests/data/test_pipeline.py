"""Every batch is a function of seed and step, whoever reads it, from wherever the run begins."""

import itertools
from collections import Counter

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import (
    IGNORED_LABEL,
    Ragged,
    evaluation_batches,
    evaluation_blocks,
    token_blocks,
    training_batches,
)


def take(iterator, count):
    return [{name: np.asarray(value) for name, value in batch.items()} for batch in itertools.islice(iterator, count)]


def same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


# Blocks


@pytest.mark.parametrize("counts, blocks, left", [([100, 50, 7], 1, 29), ([300, 90, 12], 3, 18)])
def test_blocks_run_through_document_borders(counts, blocks, left):
    """CASES T07: the remainder of one document is carried into the next; what is left at the end is dropped."""
    tokens = np.arange(sum(counts), dtype=np.uint16)
    dataset = token_blocks(tokens, 128)
    assert (len(dataset), sum(counts) - blocks * 128) == (blocks, left)
    for i in range(blocks):
        np.testing.assert_array_equal(dataset[i]["input_ids"], np.arange(i * 128, (i + 1) * 128))
        np.testing.assert_array_equal(dataset[i]["labels"], np.arange(i * 128, (i + 1) * 128) + 1)


def test_a_text_shorter_than_a_block_is_an_error_with_both_numbers():
    for sampling in ("blocks", "windows"):
        with pytest.raises(ValueError, match="the text has 50 tokens, but blocks of 128 need at least 129"):
            token_blocks(np.zeros(50, np.uint16), 128, sampling=sampling)


@pytest.mark.parametrize("tokens, windows", [(7, None), (8, None), (9, 1), (10, 2), (100, 92)])
def test_windows_start_wherever_input_and_label_fit(tokens, windows):
    ids = np.arange(tokens, dtype=np.uint16)
    if windows is None:
        with pytest.raises(ValueError, match=f"the text has {tokens} tokens, but blocks of 8 need at least 9"):
            token_blocks(ids, 8, sampling="windows")
        return
    dataset = token_blocks(ids, 8, sampling="windows")
    assert len(dataset) == windows
    for start in range(windows):
        np.testing.assert_array_equal(dataset[start]["input_ids"], np.arange(start, start + 8))
        np.testing.assert_array_equal(dataset[start]["labels"], np.arange(start + 1, start + 9))


@settings(max_examples=60, deadline=None)
@given(count=st.integers(2, 60), length=st.integers(1, 20))
def test_evaluation_counts_every_token_but_the_first_once(count, length):
    ids = np.arange(count, dtype=np.uint16)
    dataset = evaluation_blocks(ids, length)
    examples = [dataset[i] for i in range(len(dataset))]
    assert all(value.shape == (length,) and value.dtype == np.int32 for row in examples for value in row.values())
    labels = np.concatenate([row["labels"] for row in examples])
    inputs = np.concatenate([row["input_ids"] for row in examples])
    counted = labels != IGNORED_LABEL
    np.testing.assert_array_equal(labels[counted], ids[1:])
    np.testing.assert_array_equal(inputs[counted], ids[:-1])
    assert IGNORED_LABEL not in inputs  # it would read a wrong row of an embedding


def test_ids_of_two_and_four_bytes_keep_their_values():
    for dtype, largest in ((np.uint16, 65_535), (np.uint32, 200_000)):
        example = token_blocks(np.full(9, largest, dtype), 8)[0]
        assert example["labels"].dtype == np.int32 and (example["labels"] == largest).all()


# Training batches


TOKENS = np.arange(1, 400, dtype=np.uint16)


@pytest.mark.parametrize("sampling", ["blocks", "windows"])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_the_same_global_batches(sampling, processes):
    dataset = token_blocks(TOKENS, 7, sampling=sampling)
    whole = take(training_batches(dataset, batch_size=8, seed=3), 30)
    parts = [
        take(training_batches(dataset, batch_size=8, seed=3, process_index=i, process_count=processes), 30)
        for i in range(processes)
    ]
    joined = [
        {name: np.concatenate([part[step][name] for part in parts]) for name in ("input_ids", "labels")}
        for step in range(30)
    ]
    same(joined, whole)
    assert whole[0]["input_ids"].shape == (8, 7)


@pytest.mark.parametrize("step", [1, 7, 13, 29])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_goes_on_exactly_where_it_stopped(step, processes):
    """57 blocks, batches of 8: the epochs end within batches (CASES K01)."""
    dataset = token_blocks(TOKENS, 7)
    options = {"batch_size": 8, "seed": 5, "process_index": processes - 1, "process_count": processes}
    whole = take(training_batches(dataset, **options), 35)
    same(take(training_batches(dataset, start_step=step, **options), 35 - step), whole[step:])
    for threads, prefetch in ((0, 1), (4, 3)):
        other = training_batches(dataset, start_step=step, num_threads=threads, prefetch=prefetch, **options)
        same(take(other, 35 - step), whole[step:])


def test_a_distant_step_is_reached_at_once():
    dataset = token_blocks(TOKENS, 7)
    options = {"batch_size": 8, "seed": 0}
    (batch,) = take(training_batches(dataset, start_step=10**9, **options), 1)
    same([batch], take(training_batches(dataset, start_step=10**9 - 1, **options), 2)[1:])


def test_every_epoch_has_every_example_once_in_another_order():
    dataset = token_blocks(TOKENS, 7)
    rows = [row for batch in take(training_batches(dataset, batch_size=8, seed=1), 22) for row in batch["input_ids"]]
    starts = [int(row[0]) for row in rows]
    epochs = [starts[i * 56 : (i + 1) * 56] for i in range(3)]
    assert len(dataset) == 56
    assert all(sorted(epoch) == list(range(1, 393, 7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    another = take(training_batches(dataset, batch_size=8, seed=2), 14)
    assert [int(row[0]) for batch in another for row in batch["input_ids"]][:56] not in epochs
    assert [int(row[0]) for batch in another for row in batch["input_ids"]][56:] not in epochs


def test_fewer_examples_than_a_batch_are_repeated():
    dataset = token_blocks(np.arange(10, dtype=np.uint16), 8)
    (batch,) = take(training_batches(dataset, batch_size=4, seed=0), 1)
    np.testing.assert_array_equal(batch["input_ids"], [np.arange(8)] * 4)


def test_large_datasets_are_mixed_like_independent_draws():
    """The mean position of a batch of 12 has the variance 1 / (12 * 12) of uniform draws; grain's own shuffle has 1.6
    times as much here. 3,000 batches: a standard deviation of 2.6 %."""
    count = 1_003_790
    dataset = grain.MapDataset.range(count).map(lambda i: {"position": np.float64(i / count)})
    batches = take(training_batches(dataset, batch_size=12, seed=0), 3000)
    variance = np.var([batch["position"].mean() for batch in batches]) * 12 * 12
    assert abs(variance - 1) < 0.12


def test_random_transformations_differ_between_epochs_and_repeat_after_a_restart():
    def noisy(example, rng):
        return {"index": example, "noise": rng.random()}

    dataset = grain.MapDataset.range(6).seed(11).random_map(noisy)
    whole = take(training_batches(dataset, batch_size=6, seed=0), 4)
    assert len({float(noise) for batch in whole for noise in batch["noise"]}) == 24
    same(take(training_batches(dataset, batch_size=6, seed=0, start_step=2), 2), whole[2:])


# Evaluation batches


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 29, 57, 58, 65])
def test_evaluation_gives_every_example_once_in_order_and_one_shape(processes, count):
    ids = np.arange(count, dtype=np.uint16)
    dataset = evaluation_blocks(ids, 7)
    parts = [
        list(evaluation_batches(dataset, batch_size=4, process_index=i, process_count=processes))
        for i in range(processes)
    ]
    assert {len(part) for part in parts} == {-(-len(dataset) // 4)}
    assert {batch["labels"].shape for part in parts for batch in part} == {(4 // processes, 7)}
    labels = np.concatenate([batch["labels"] for step in zip(*parts, strict=True) for batch in step]).ravel()
    np.testing.assert_array_equal(labels[labels != IGNORED_LABEL], ids[1:])


def test_what_fills_up_the_last_batch_is_read_once():
    read = []
    dataset = grain.MapDataset.range(5).map(lambda i: read.append(int(i)) or {"number": np.int32(i)})
    *_, last = evaluation_batches(dataset, batch_size=16)
    assert last["example"].tolist() == [0, 1, 2, 3, 4] + [-1] * 11
    assert last["number"].tolist() == [0, 1, 2, 3, 4] + [0] * 11
    assert sorted(read) == [0, 0, 1, 2, 3, 4]


# Examples of different lengths

LENGTHS = np.random.default_rng(0).integers(1, 61, size=101)


def ragged(lengths=LENGTHS, **arrays):
    """Example i holds its number i + 1 `lengths[i]` times."""

    def example(i):
        ids = np.full(lengths[i], i + 1, np.int32)
        return {"input_ids": ids, "labels": ids, "number": np.int32(i)} | {k: v(i) for k, v in arrays.items()}

    dataset = grain.MapDataset.range(len(lengths)).map(example)
    return Ragged(dataset, np.asarray(lengths), max_length=64, padding={"input_ids": 0, "labels": IGNORED_LABEL})


def test_ragged_rows_are_filled_up_to_a_bucket_and_masked():
    for batch in take(training_batches(ragged(), batch_size=8, seed=0), 20):
        length = batch["input_ids"].shape[1]
        longest = max(LENGTHS[number] for number in batch["number"])
        assert length in (16, 24, 32, 48, 64) and longest <= length < max(17, 1.5 * longest + 1)
        for number, ids, labels, mask in zip(
            *(batch[k] for k in ("number", "input_ids", "labels", "attention_mask")), strict=True
        ):
            real = LENGTHS[number]
            np.testing.assert_array_equal(ids, [number + 1] * real + [0] * (length - real))
            np.testing.assert_array_equal(labels, [number + 1] * real + [IGNORED_LABEL] * (length - real))
            np.testing.assert_array_equal(mask, [1] * real + [0] * (length - real))


def test_ragged_epochs_have_every_example_once():
    """Groups of 16 batches cross the epochs' borders: after any whole number of groups, no example is ahead by two."""
    batches = take(training_batches(ragged(), batch_size=8, seed=3), 16 * 12)
    for groups in range(1, 13):
        seen = Counter(int(i) for batch in batches[: 16 * groups] for i in batch["number"])
        counts = [seen[i] for i in range(101)]
        assert max(counts) - min(counts) <= 1 and sum(counts) == 128 * groups


def test_ragged_rows_of_a_batch_have_similar_lengths():
    batches = take(training_batches(ragged(), batch_size=8, seed=0), 64)
    filled = sum(batch["attention_mask"].size for batch in batches) / sum(b["attention_mask"].sum() for b in batches)
    assert filled < 1.35  # 2.0 when rows meet at random
    as_drawn = take(training_batches(ragged(), batch_size=8, seed=0, group_by_length=1), 12)
    in_order = take(
        training_batches(ragged().dataset.map(lambda row: {"number": row["number"]}), batch_size=8, seed=0), 12
    )
    for batch, expected in zip(as_drawn, in_order, strict=True):
        assert sorted(batch["number"]) == sorted(expected["number"])


@pytest.mark.parametrize("step", [1, 15, 16, 40])
def test_ragged_batches_are_a_function_of_seed_and_step(step):
    whole = take(training_batches(ragged(), batch_size=8, seed=7), 60)
    same(
        take(training_batches(ragged(), batch_size=8, seed=7, start_step=step, num_threads=3), 60 - step), whole[step:]
    )
    parts = [
        take(training_batches(ragged(), batch_size=8, seed=7, start_step=step, process_index=i, process_count=4), 9)
        for i in range(4)
    ]
    joined = [{name: np.concatenate([part[i][name] for part in parts]) for name in whole[0]} for i in range(9)]
    same(joined, whole[step : step + 9])
    other = take(training_batches(ragged(), batch_size=8, seed=8), 60)
    assert not any(np.array_equal(a["number"], b["number"]) for a, b in zip(whole, other, strict=True))


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 10, 101])
def test_ragged_evaluation_counts_every_example_once(count, processes):
    data = ragged(LENGTHS[:count], score=lambda i: np.float32(i), labels=lambda i: np.float32(i))
    data = Ragged(data.dataset, data.lengths, data.max_length, {"input_ids": 0})
    parts = [
        list(evaluation_batches(data, batch_size=4, process_index=i, process_count=processes)) for i in range(processes)
    ]
    assert {len(part) for part in parts} == {-(-count // 4)}
    numbers = np.concatenate([batch["example"] for step in zip(*parts, strict=True) for batch in step])
    labels = np.concatenate([batch["labels"] for step in zip(*parts, strict=True) for batch in step])
    assert sorted(numbers[numbers >= 0]) == list(range(count))
    np.testing.assert_array_equal(labels[numbers >= 0], numbers[numbers >= 0])
    assert np.isnan(labels[numbers < 0]).all()


def test_wrong_lengths_are_refused():
    dataset = grain.MapDataset.range(2).map(lambda i: {"input_ids": np.zeros(i, np.int32)})
    with pytest.raises(ValueError, match="there are 3 lengths for 2 examples"):
        Ragged(dataset, np.array([1, 2, 3]), max_length=8, padding={"input_ids": 0})
    for lengths in ([0, 1], [1, 9]):
        with pytest.raises(ValueError, match=f"lengths must be 1 to 8, not {lengths[0]} to {lengths[1]}"):
            Ragged(dataset, np.array(lengths), max_length=8, padding={"input_ids": 0})


# Bad input


def test_impossible_batches_are_refused():
    dataset = token_blocks(TOKENS, 7)
    for options, message in [
        ({"batch_size": 8, "process_count": 3}, "batch_size 8 must be a positive multiple of the 3 processes"),
        ({"batch_size": 0}, "batch_size 0 must be a positive multiple"),
        ({"batch_size": 8, "process_index": 2, "process_count": 2}, "process_index 2 must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            training_batches(dataset, seed=0, **options)
        with pytest.raises(ValueError, match=message):
            evaluation_batches(dataset, **options)
    with pytest.raises(ValueError, match="seed -1 and start_step 0 must not be negative"):
        training_batches(dataset, batch_size=8, seed=-1)
    with pytest.raises(ValueError, match="the dataset is empty"):
        evaluation_batches(grain.MapDataset.range(0), batch_size=2)
    with pytest.raises(ValueError, match="the block length is 0"):
        token_blocks(TOKENS, 0)
    with pytest.raises(ValueError, match="the held-out text has 1 tokens, but at least 2 are needed"):
        evaluation_blocks(TOKENS[:1], 4)
