"""Batches by tokens: every example once an epoch, in the fewest shapes, whatever the processes and restarts."""

import pickle
from collections import Counter

import grain
import numpy as np
import pytest

from transformers_jax.data import IGNORED_LABEL, Ragged, training_batches
from transformers_jax.data.token_budget import NOBODY, TokenBudget


def ragged(lengths, max_length=64):
    examples = [
        {"input_ids": np.full(n, i, np.int32), "labels": np.full(n, i, np.int32)} for i, n in enumerate(lengths)
    ]
    padding = {"input_ids": 0, "labels": IGNORED_LABEL}
    return Ragged(grain.MapDataset.source(examples), np.asarray(lengths, np.int32), max_length, padding)


def lengths_of(count, seed=0):
    return np.minimum(1 + np.random.default_rng(seed).geometric(1 / 14, count), 64)


@pytest.mark.parametrize("count", [1, 7, 100, 1003])
def test_every_example_once_an_epoch_and_never_more_than_the_tokens(count):
    lengths = lengths_of(count)
    budget = TokenBudget(lengths, (16, 24, 32, 48, 64), batch_size=4, batch_tokens=512)
    for epoch in range(3):
        seen, shapes = Counter(), set()
        for number in range(epoch * budget.batches, (epoch + 1) * budget.batches):
            of, length, examples = budget[number]
            real = examples[examples != NOBODY]
            assert of == epoch and len(real) and (lengths[real] <= length).all()
            assert len(examples) % 4 == 0 and len(examples) * length <= 512 < (len(examples) + 4) * length
            seen.update(real.tolist())
            shapes.add((length, len(examples)))
        assert seen == Counter(range(count))
        assert len(shapes) == len({length for length, _ in shapes}) <= 5


def test_little_is_filled_up():
    lengths = lengths_of(5000)
    budget = TokenBudget(lengths, (16, 24, 32, 48, 64), batch_size=8, batch_tokens=2048)
    places = sum(length * len(examples) for _, length, examples in map(budget.__getitem__, range(budget.batches)))
    exact = sum(next(bucket for bucket in (16, 24, 32, 48, 64) if bucket >= n) for n in lengths)
    assert places <= 1.03 * exact  # what rounding lengths up costs anyway
    partial = [examples for _, _, examples in map(budget.__getitem__, range(budget.batches)) if NOBODY in examples]
    assert len(partial) <= 1


def test_epochs_and_seeds_have_their_own_order():
    orders = set()
    for seed in (0, 1):
        budget = TokenBudget(lengths_of(200), (16, 32, 64), batch_size=4, batch_tokens=512, seed=seed)
        for epoch in (0, 1):
            numbers = range(epoch * budget.batches, (epoch + 1) * budget.batches)
            orders.add(tuple(np.concatenate([budget[number][2] for number in numbers]).tolist()))
    assert len(orders) == 4


def batches(lengths, count, **settings):
    options = dict(batch_size=4, batch_tokens=256, seed=3, num_threads=0) | settings
    stream = training_batches(ragged(lengths), **options)
    return [next(stream) for _ in range(count)]


def same(left, right):
    assert all(a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a) for a, b in zip(left, right, strict=True))


def test_a_batch_follows_from_its_number():
    lengths = lengths_of(100)
    expected = batches(lengths, 40)
    same(batches(lengths, 15, start_step=25), expected[25:])
    same(batches(lengths, 40, num_threads=2), expected)
    same(batches(lengths, 10, processes=1), expected[:10])
    parts = [batches(lengths, 40, process_index=i, process_count=4) for i in range(4)]
    joined = [{k: np.concatenate([part[n][k] for part in parts]) for k in expected[n]} for n in range(40)]
    same(joined, expected)


def test_rows_that_fill_up_the_last_batch_do_not_count():
    (batch,) = batches([5, 6, 7], 1)
    assert batch["input_ids"].shape == (16, 16)
    counted = batch["labels"] >= 0
    assert sorted(counted.sum(axis=1).tolist()) == [0] * 13 + [5, 6, 7]


def test_a_budget_goes_to_another_process():
    budget = TokenBudget(lengths_of(50), (16, 32, 64), batch_size=2, batch_tokens=256)
    copy = pickle.loads(pickle.dumps(budget))
    assert all((budget[n][2] == copy[n][2]).all() for n in range(20))


def test_what_cannot_be_cut():
    with pytest.raises(ValueError, match="batch_tokens=100 do not hold batch_size=4 examples of 64 tokens"):
        TokenBudget(np.array([60]), (16, 64), batch_size=4, batch_tokens=100)
    with pytest.raises(ValueError, match="all of these have the same length"):
        training_batches(grain.MapDataset.range(4), batch_size=2, batch_tokens=64, seed=0)
