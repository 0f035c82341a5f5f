"""What is hidden from a masked language model: the shares, the words, the pairs, and what every epoch changes."""

import itertools

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_jax.data import (
    IGNORED_LABEL,
    Masking,
    SentencePairs,
    Tokenizer,
    masked_tokens,
    text_blocks,
    training_batches,
)

PAD, UNK, CLS, SEP, MASK = range(5)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """`[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, `[MASK]`, 500 words and 500 pieces that go on with one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    words = [f"w{i}" for i in range(500)]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *("##" + word for word in words)]
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    return Tokenizer.load(folder)


def rows(count=2000, *, real=100, length=128, seed=0):
    """(count, length) ids: `[CLS]`, `real` tokens, `[SEP]`, padding."""
    ids = np.full((count, length), PAD, np.int32)
    ids[:, 0], ids[:, real + 1] = CLS, SEP
    ids[:, 1 : real + 1] = np.random.default_rng(seed).integers(5, 1005, (count, real))
    return ids


def masked(ids, masking, seed=0):
    dataset = grain.MapDataset.source([{"input_ids": row} for row in ids]).random_map(masking, seed=seed)
    return [dataset[i] for i in range(len(ids))]


def take(dataset, steps, **options):
    batches = training_batches(dataset, batch_size=4, seed=3, **options)
    return [{k: np.asarray(v) for k, v in batch.items()} for batch in itertools.islice(batches, steps)]


def same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


# Tokens


@pytest.mark.parametrize("seed", [0, 1])
def test_shares(tokenizer, seed):
    ids = rows()
    examples = masked(ids, Masking(tokenizer, slots=19), seed)
    chosen = total = 0
    kinds = np.zeros(3)
    for original, example in zip(ids, examples, strict=True):
        labels, places = example["labels"], example["masked_positions"]
        count = int((labels >= 0).sum())
        assert count == 15  # 0.15 of 100 exactly
        assert (labels[count:] == IGNORED_LABEL).all() and (places[count:] == 0).all()
        places = places[:count]
        assert (np.diff(places) > 0).all() and places[0] >= 1 and places[-1] <= 100  # neither specials nor padding
        np.testing.assert_array_equal(labels[:count], original[places])
        untouched = np.ones(128, bool)
        untouched[places] = False
        np.testing.assert_array_equal(example["input_ids"][untouched], original[untouched])
        new = example["input_ids"][places]
        assert (new >= MASK).all()  # no other special token takes a place
        kinds += [(new == MASK).sum(), ((new != MASK) & (new != labels[:count])).sum(), (new == labels[:count]).sum()]
        chosen, total = chosen + count, total + 100
    assert chosen / total == pytest.approx(0.15, abs=0.003)
    np.testing.assert_allclose(kinds / chosen, [0.8, 0.1, 0.1], atol=0.01)


def test_every_place_and_every_ordinary_token_has_its_turn(tokenizer):
    examples = masked(rows(), Masking(tokenizer, slots=15, mask_share=0.0, random_share=1.0))
    places = np.concatenate([example["masked_positions"] for example in examples])
    counts = np.bincount(places, minlength=102)[1:101]
    assert counts.min() > 200 and counts.max() < 400  # 300 of each expected, standard deviation 16
    new = np.concatenate([example["input_ids"][example["masked_positions"]] for example in examples])
    assert set(range(5, 1005)) == set(new.tolist())


def test_other_shares(tokenizer):
    for mask_share, random_share, expected in [(1.0, 0.0, [1, 0]), (0.0, 0.0, [0, 1]), (0.5, 0.0, [0.5, 0.5])]:
        masking = Masking(tokenizer, slots=15, mask_share=mask_share, random_share=random_share)
        examples = masked(rows(400), masking)
        new = np.concatenate([example["input_ids"][example["masked_positions"]] for example in examples])
        labels = np.concatenate([example["labels"] for example in examples])
        np.testing.assert_allclose([(new == MASK).mean(), (new == labels).mean()], expected, atol=0.03)


def test_rates_0_and_1_and_a_single_token(tokenizer):
    ids = rows(20)
    for example, original in zip(masked(ids, Masking(tokenizer, slots=1, rate=0.0)), ids, strict=True):
        assert (example["labels"] == IGNORED_LABEL).all()
        np.testing.assert_array_equal(example["input_ids"], original)
    for example, original in zip(masked(ids, Masking(tokenizer, slots=100, rate=1.0)), ids, strict=True):
        np.testing.assert_array_equal(example["masked_positions"], np.arange(1, 101))
        np.testing.assert_array_equal(example["labels"], original[1:101])
    for example in masked(rows(20, real=1), Masking(tokenizer, slots=19)):
        assert example["masked_positions"][0] == 1 and (example["labels"] >= 0).sum() == 1
    for example in masked(rows(3, real=0), Masking(tokenizer, slots=19)):
        assert (example["labels"] == IGNORED_LABEL).all()


@pytest.mark.parametrize(
    "rate, eligible, count",
    [(0.15, 126, 19), (0.15, 100, 15), (0.15, 1, 1), (0.15, 0, 0), (0.0, 100, 0), (1.0, 7, 7), (0.01, 20, 1)],
)
def test_number_of_tokens(rate, eligible, count):
    assert masked_tokens(rate, eligible) == count


def test_the_attention_mask_decides_what_is_padding(tokenizer):
    ids = np.arange(5, 15).astype(np.int32)
    mask = (np.arange(10) < 4).astype(np.int32)
    masking = Masking(tokenizer, slots=10, rate=1.0)
    example = masking({"input_ids": ids, "attention_mask": mask}, np.random.default_rng(0))
    np.testing.assert_array_equal(example["masked_positions"][:5], [0, 1, 2, 3, 0])
    np.testing.assert_array_equal(example["labels"][:5], [5, 6, 7, 8, IGNORED_LABEL])


# Words


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    separators=st.sets(st.integers(0, 39), max_size=3),
    rate=st.floats(0.05, 1.0),
    seed=st.integers(0, 99),
)
def test_whole_words(tokenizer, words, separators, rate, seed):
    ids, groups = [CLS], []
    for i, size in enumerate(words):
        if i in separators:
            ids.append(SEP)
        groups.append(range(len(ids), len(ids) + size))
        ids += [5 + i, *(505 + i for _ in range(size - 1))]
    ids = np.array([*ids, SEP, PAD, PAD], np.int32)
    count = masked_tokens(rate, sum(words))
    example = Masking(tokenizer, slots=count, rate=rate, whole_words=True)(
        {"input_ids": ids}, np.random.default_rng(seed)
    )
    chosen = set(example["masked_positions"][example["labels"] >= 0].tolist())
    assert all(chosen.isdisjoint(group) or chosen.issuperset(group) for group in groups)
    assert chosen <= {place for group in groups for place in group}
    left = [len(group) for group in groups if chosen.isdisjoint(group)]
    assert len(chosen) <= count and (not left or len(chosen) + min(left) > count)  # none more would have fitted


def test_a_word_larger_than_the_number_of_tokens_stays_whole(tokenizer):
    ids = np.array([CLS, 5, 505, 506, SEP], np.int32)  # "un", "##aff", "##able"
    masking = Masking(tokenizer, slots=1, whole_words=True)
    assert (masking({"input_ids": ids}, np.random.default_rng(0))["labels"] == IGNORED_LABEL).all()
    masking = Masking(tokenizer, slots=3, rate=1.0, whole_words=True, mask_share=1.0, random_share=0.0)
    assert masking({"input_ids": ids}, np.random.default_rng(0))["input_ids"].tolist() == [CLS, MASK, MASK, MASK, SEP]


def test_pieces_of_a_word_are_apart_after_a_separator(tokenizer):
    ids = np.array([CLS, 5, SEP, 505, SEP], np.int32)
    masking = Masking(tokenizer, slots=1, rate=0.5, whole_words=True)
    counts = [(masking({"input_ids": ids}, np.random.default_rng(i))["labels"] >= 0).sum() for i in range(20)]
    assert set(counts) == {1}


# Blocks


@pytest.mark.parametrize(
    "tokens, length, counts",
    [(157, 130, [128, 29]), (402, 130, [128, 128, 128, 18]), (50, 128, [50]), (126, 128, [126]), (127, 128, [126, 1])],
)
def test_every_token_is_in_one_block(tokenizer, tokens, length, counts):
    corpus = np.random.default_rng(0).integers(5, 1005, tokens).astype(np.uint16)
    blocks = text_blocks(corpus, tokenizer, length)
    assert len(blocks) == len(counts)
    seen = []
    for i, count in enumerate(counts):
        block = blocks[i]
        assert block["input_ids"].shape == block["attention_mask"].shape == (length,)
        assert block["input_ids"].dtype == block["attention_mask"].dtype == np.int32
        np.testing.assert_array_equal(block["attention_mask"], np.arange(length) < count + 2)
        assert block["input_ids"][0] == CLS and block["input_ids"][count + 1] == SEP
        assert (block["input_ids"][count + 2 :] == PAD).all()
        seen += block["input_ids"][1 : count + 1].tolist()
    assert seen == corpus.tolist()


def test_masks_are_new_every_epoch_and_a_function_of_the_seed(tokenizer):
    corpus = np.random.default_rng(0).integers(5, 1005, 12 * 30).astype(np.uint16)
    masking = Masking(tokenizer, slots=5)

    def dataset(seed):
        return text_blocks(corpus, tokenizer, 32).random_map(masking, seed=seed)

    whole = take(dataset(0), 9)  # three epochs of 12 blocks
    by_text = {}
    for batch in whole:
        for ids, places, labels in zip(batch["input_ids"], batch["masked_positions"], batch["labels"], strict=True):
            original = ids.copy()
            original[places] = labels
            by_text.setdefault(original.tobytes(), []).append(places.tobytes())
    assert len(by_text) == 12 and all(len(set(places)) == 3 for places in by_text.values())
    same(take(dataset(0), 9), whole)
    same(take(dataset(0), 4, start_step=5, num_threads=3), whole[5:])
    parts = [take(dataset(0), 9, process_index=i, process_count=2) for i in range(2)]
    same([{k: np.concatenate([one[k], two[k]]) for k in one} for one, two in zip(*parts, strict=True)], whole)
    other = take(dataset(1), 9)
    assert all((a["masked_positions"] != b["masked_positions"]).any() for a, b in zip(whole, other, strict=True))


# Pairs


def documents(*sizes):
    """A corpus whose document number d has the tokens 100 * d + 5, 100 * d + 6, ..."""
    parts = [np.arange(100 * d + 5, 100 * d + 5 + size) for d, size in enumerate(sizes)]
    return np.concatenate([x for part in parts for x in (part, [SEP])][:-1]).astype(np.uint16)


def segments(example):
    """The two segments of a pair."""
    ids, types, mask = (example[name] for name in ("input_ids", "token_type_ids", "attention_mask"))
    real = mask.sum()
    first_end = int(np.flatnonzero(ids == SEP)[0])
    assert ids[0] == CLS and ids[real - 1] == SEP and (ids[real:] == PAD).all() and not mask[real:].any()
    np.testing.assert_array_equal(types, (np.arange(len(ids)) > first_end) & (np.arange(len(ids)) < real))
    return ids[1:first_end].tolist(), ids[first_end + 1 : real - 1].tolist()


def test_pairs_follow_one_another_or_come_from_another_document(tokenizer):
    corpus = documents(60, 1, 21, 90, 0, 2)
    pairs = SentencePairs(corpus, tokenizer, 24)
    random, cuts = [], set()
    for epoch in range(60):
        seen = set()
        for i in range(len(pairs)):
            example = pairs.draw(i + epoch * len(pairs), np.random.default_rng([epoch, i]))
            first, second = segments(example)
            assert first and second and len(first) + len(second) <= 21
            seen.update(first)
            label = int(example["next_sentence_label"])
            assert np.diff(first).tolist() == [1] * (len(first) - 1)
            assert np.diff(second).tolist() == [1] * (len(second) - 1)
            if label:
                assert {token // 100 for token in second}.isdisjoint({token // 100 for token in first})
            else:
                assert second[0] == first[-1] + 1
                seen.update(second)
            random.append(label)
            cuts.add((i, len(first)))
        assert 106 not in seen and 105 not in seen  # a document of one token
    assert np.mean(random) == pytest.approx(0.5, abs=0.06)  # 600 pairs
    assert len(cuts) > 100
    assert len(pairs) == 3 + 1 + 5 + 1 and pairs.first_piece.tolist() == [0, 3, 4, 9, 10]


def test_documents_are_cut_into_pieces_without_loss(tokenizer):
    corpus = documents(60, 21, 90, 2)
    pairs = SentencePairs(corpus, tokenizer, 24)
    seen = {}
    for i in range(len(pairs)):
        for seed in itertools.count():
            example = pairs.draw(i, np.random.default_rng(seed))
            if example["next_sentence_label"] == 0:
                seen[i] = [*segments(example)[0], *segments(example)[1]]
                break
    assert sorted(token for piece in seen.values() for token in piece) == [i for i in corpus.tolist() if i != SEP]
    assert max(map(len, seen.values())) - min(len(seen[i]) for i in range(3)) <= 1


def test_too_few_documents_are_refused(tokenizer):
    for corpus in (documents(60), documents(60, 1), documents(0, 60)):
        with pytest.raises(ValueError, match="needs two documents of two tokens at least, but the held-out text has 1"):
            SentencePairs(corpus, tokenizer, 24, name="held-out text")
    with pytest.raises(ValueError, match="length 5 leaves no room for two segments beside 3 special tokens"):
        SentencePairs(documents(60, 60), tokenizer, 5)
    with pytest.raises(ValueError, match="leaves no room for text"):
        text_blocks(documents(60), tokenizer, 2)


def test_tokenizers_that_cannot_mask_are_refused(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="the tokenizer has no mask token"):
        Masking(Tokenizer.byte(), slots=1)
    byte = Tokenizer.byte()
    byte.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"mask_token": "<mask>"}')
    Masking(Tokenizer.load(tmp_path), slots=1)
    with pytest.raises(ValueError, match="only WordPiece tokenizers tell where words begin"):
        Masking(Tokenizer.load(tmp_path), slots=1, whole_words=True)
    with pytest.raises(ValueError, match="15 tokens are to be masked, but there are 14 slots"):
        masked(rows(1), Masking(tokenizer, slots=14))
