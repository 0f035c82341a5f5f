"""Examples for masked language models: blocks or pairs of text, of which some tokens are hidden."""

import grain
import numpy as np

from transformers_jax.data.corpus import separator_id
from transformers_jax.data.encoding import Inputs, Template
from transformers_jax.data.pipeline import IGNORED_LABEL
from transformers_jax.data.tokenizers import Tokenizer


class Masking:
    """Hides tokens of an example as BERT's own script does (Devlin et al. 2019, section 3.1 and appendix A.1).

    Of the tokens that are neither special nor padding, `masked_tokens(rate, their number)` are chosen. Each of them
    becomes the mask token with probability `mask_share`, another token (any that is not special) with `random_share`,
    and else stays. With `whole_words`, words are taken in random order, each with all its pieces, but for those that
    have more than are still to be chosen: then there may be fewer in the end.

    `slots` is the number of places in `masked_positions` and `labels`: as many as are chosen of the longest example.
    Raises `ValueError` for a tokenizer without a mask token, or with `whole_words` one that does not mark the pieces
    inside words.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        slots: int,
        rate: float = 0.15,
        mask_share: float = 0.8,
        random_share: float = 0.1,
        whole_words: bool = False,
    ):
        if tokenizer.mask_id is None:
            raise ValueError(
                "the tokenizer has no mask token, which a masked language model needs; use data.tokenizer=wordpiece, "
                "or that of a BERT or RoBERTa"
            )
        if whole_words and tokenizer.word_starts is None:
            raise ValueError("only WordPiece tokenizers tell where words begin; turn task.whole_word off")
        self.mask_id, self.slots, self.rate = tokenizer.mask_id, slots, rate
        self.mask_share, self.random_share = mask_share, random_share
        self.word_starts = tokenizer.word_starts if whole_words else None
        self.special = np.zeros(tokenizer.vocab_size, bool)
        self.special[list(tokenizer.special_ids)] = True
        self.ordinary = np.flatnonzero(~self.special)

    def __call__(self, example: Inputs, rng: np.random.Generator) -> Inputs:
        """`example` with tokens of its `input_ids` hidden, and with `masked_positions` and `labels`, `(slots,)` int32:
        where the chosen tokens are, in order, and what they were. Unused slots have position 0 and label -100."""
        ids = example["input_ids"].copy()
        eligible = ~self.special[ids]
        if "attention_mask" in example:
            eligible &= example["attention_mask"] != 0
        chosen = np.sort(self._choose(ids, np.flatnonzero(eligible), rng))
        if len(chosen) > self.slots:
            raise ValueError(f"{len(chosen)} tokens are to be masked, but there are {self.slots} slots for them")
        positions = np.zeros(self.slots, np.int32)
        labels = np.full(self.slots, IGNORED_LABEL, np.int32)
        positions[: len(chosen)], labels[: len(chosen)] = chosen, ids[chosen]
        draws, others = rng.random(len(chosen)), rng.integers(len(self.ordinary), size=len(chosen))
        ids[chosen[draws < self.mask_share]] = self.mask_id
        random = (draws >= self.mask_share) & (draws < self.mask_share + self.random_share)
        ids[chosen[random]] = self.ordinary[others[random]]
        return example | {"input_ids": ids, "masked_positions": positions, "labels": labels}

    def _choose(self, ids: np.ndarray, eligible: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        count = masked_tokens(self.rate, len(eligible))
        if self.word_starts is None:
            return rng.choice(eligible, count, replace=False)
        # A special token between two pieces parts them, as does the beginning of the text.
        begins = self.word_starts[ids[eligible[1:]]] | (np.diff(eligible) > 1)
        words = np.split(eligible, np.flatnonzero(begins) + 1)
        chosen = []
        for i in rng.permutation(len(words)):
            if len(chosen) + len(words[i]) <= count:
                chosen.extend(words[i])
            if len(chosen) == count:
                break
        return np.array(chosen, np.int64)


def masked_tokens(rate: float, eligible: int) -> int:
    """How many of `eligible` tokens are chosen: their share, rounded, and one at least unless the rate is 0."""
    return min(eligible, max(1, round(rate * eligible))) if rate > 0 else 0


def text_blocks(tokens: np.ndarray, tokenizer: Tokenizer, length: int) -> grain.MapDataset:
    """Examples `{"input_ids", "attention_mask"}`, `(length,)` int32: the tokens of a corpus cut into blocks, through
    document borders, each framed with the tokenizer's special tokens.

    Every token is in one block; the last block is filled up with padding. Raises `ValueError` if `length` leaves no
    room for text.
    """
    return grain.MapDataset.source(_Blocks(np.asarray(tokens), tokenizer, length))


class _Blocks:
    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, length: int):
        self.tokens, self.length, self.pad_id = tokens, length, tokenizer.pad_id or 0
        self.template = Template.of(tokenizer)
        self.room = self.template.room(length)

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.room)

    def __getitem__(self, index: int) -> Inputs:
        inputs = self.template.fill(self.tokens[index * self.room : (index + 1) * self.room])
        return _padded(inputs["input_ids"], self.length, self.pad_id)


class SentencePairs:
    """Pairs of segments for BERT's second objective: is the second the continuation of the first, or from elsewhere?

    `len(pairs)` pieces: every document is cut into as few pieces as fit into `length`, equally long but for one token.
    `pairs.draw(i, rng)` cuts piece i in two at a random place, and with probability one half puts as many tokens from
    a random place of another document (all of it, if it is shorter) in place of the second part. So each token of the
    corpus is in one piece, and seen in at least half of the epochs on average; a document of one token is left out.

    Raises `ValueError` with fewer than two documents of two tokens, or where `length` leaves no room for two segments.
    """

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, length: int, *, name: str = "text"):
        self.tokens, self.length, self.pad_id = np.asarray(tokens), length, tokenizer.pad_id or 0
        self.template = Template.of(tokenizer, texts=2)
        room = self.template.room(length)
        if room < 3:
            raise ValueError(f"length {length} leaves no room for two segments beside {self.template.size} special "
                             "tokens; raise it")  # fmt: skip
        between = separator_id(tokenizer)
        borders = np.flatnonzero(self.tokens == between) if between is not None else np.zeros(0, np.int64)
        starts = np.concatenate([[0], borders + 1])
        ends = np.concatenate([borders, [len(self.tokens)]])
        long_enough = ends - starts >= 2
        self.starts, self.ends = starts[long_enough], ends[long_enough]
        if len(self.starts) < 2:
            raise ValueError(
                f"the next-sentence objective needs two documents of two tokens at least, but the {name} has "
                f"{len(self.starts)}; use a source with a document a row or a file, or turn task.next_sentence off"
            )
        self.first_piece = np.concatenate([[0], np.cumsum(-(-(self.ends - self.starts) // room))])

    def __len__(self) -> int:
        return int(self.first_piece[-1])

    def draw(self, index: int, rng: np.random.Generator) -> Inputs:
        """`{"input_ids", "token_type_ids", "attention_mask"}`, `(length,)` int32, and `next_sentence_label`: 0 if the
        second segment follows the first, 1 if it is random."""
        index = int(index) % len(self)
        document = int(np.searchsorted(self.first_piece, index, side="right")) - 1
        pieces = self.first_piece[document + 1] - self.first_piece[document]
        size = self.ends[document] - self.starts[document]
        start, end = (self.starts[document] + size * (index - self.first_piece[document] + i) // pieces for i in (0, 1))
        cut = int(rng.integers(start + 1, end))
        first, second = self.tokens[start:cut], self.tokens[cut:end]
        random = rng.random() < 0.5
        if random:
            other = (document + int(rng.integers(1, len(self.starts)))) % len(self.starts)
            last_start = max(self.starts[other], self.ends[other] - len(second))
            begin = int(rng.integers(self.starts[other], last_start + 1))
            second = self.tokens[begin : min(begin + len(second), self.ends[other])]
        inputs = self.template.fill(first, second)
        types = np.zeros(self.length, np.int32)
        types[: len(inputs["token_type_ids"])] = inputs["token_type_ids"]
        padded = _padded(inputs["input_ids"], self.length, self.pad_id)
        return padded | {"token_type_ids": types, "next_sentence_label": np.array(int(random), np.int32)}


def _padded(ids: np.ndarray, length: int, pad_id: int) -> Inputs:
    input_ids = np.full(length, pad_id, np.int32)
    input_ids[: len(ids)] = ids
    return {"input_ids": input_ids, "attention_mask": (np.arange(length) < len(ids)).astype(np.int32)}
