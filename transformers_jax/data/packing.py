"""Several short texts in one row, which do not see one another: less padding for the same computation."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import grain
import numpy as np

from transformers_jax.data.encoding import Template
from transformers_jax.data.pipeline import IGNORED_LABEL, Ragged
from transformers_jax.data.tokenizers import Tokenizer


def pack(lengths: Sequence[int] | np.ndarray, room: int, *, most: int | None = None) -> list[list[int]]:
    """Which texts share a row of `room` tokens: for each row the numbers of its texts, at most `most`, in order.

    The longest text comes first, each into the fullest row that still holds it (best fit, decreasing). Rows stand in
    the order of their first texts. ValueError for a text that is longer than a row, or empty.
    """
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= room:
        raise ValueError(f"texts of {lengths.min()} to {lengths.max()} tokens do not fit into rows of {room}")
    open_rows: dict[int, list[list[int]]] = {}
    spaces: list[int] = []  # that open rows have, each once, ascending
    rows: list[list[int]] = []

    def add(row: list[int], space: int) -> None:
        if space not in open_rows:
            open_rows[space] = []
            bisect.insort(spaces, space)
        open_rows[space].append(row)

    for text in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[text])
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            row, space = [], room
            rows.append(row)
        else:
            space = spaces[place]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[place]
        row.append(text)
        if space > length and len(row) != most:
            add(row, space - length)
    return sorted(sorted(row) for row in rows)


@dataclass(frozen=True, eq=False)
class Packed:
    """Texts packed into rows of equal length. `dataset[i]` has the arrays that `frame` gives for each text of the row,
    one after the other and filled up, and `segment_ids`, which count them from 0; padding is a segment of its own.
    Arrays that `text_padding` names have one value a text: they are stacked and filled up to `most` texts, and so is
    `texts`, the segment of each (-1 where there is none). All others are the first text's."""

    frame: Callable[[int], Mapping[str, np.ndarray]]
    rows: list[list[int]]
    length: int
    padding: Mapping[str, int]
    share_of_padding: float
    text_padding: Mapping[str, float]
    most: int | None

    @classmethod
    def of(
        cls,
        frame: Callable[[int], Mapping[str, np.ndarray]],
        lengths: Sequence[int] | np.ndarray,
        length: int,
        padding: Mapping[str, int],
        text_padding: Mapping[str, float] | None = None,
    ) -> "Packed":
        """Texts of these lengths in rows of `length` tokens; with arrays of one value a text, at most
        `texts_in_row(length)` in each."""
        most = None if text_padding is None else texts_in_row(length)
        rows = pack(lengths, length, most=most)
        share = 1 - float(np.sum(lengths)) / max(1, len(rows) * length)
        return cls(frame, rows, length, padding, share, text_padding or {}, most)

    @property
    def dataset(self) -> grain.MapDataset:
        return grain.MapDataset.source(self)

    @property
    def tokens_in_row(self) -> int:
        """How many there are on average, without padding."""
        return round(self.length * (1 - self.share_of_padding))

    @property
    def fact(self) -> str:
        """A line for the summary."""
        texts = sum(map(len, self.rows))
        return f"{texts:,} texts in {len(self.rows):,} rows of {self.length:,}, {self.share_of_padding:.1%} padding"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        texts = [self.frame(text) for text in self.rows[index]]
        row = {name: values for name, values in texts[0].items() if name not in self.padding}
        for name, filler in self.text_padding.items():
            values = np.stack([text[name] for text in texts])
            row[name] = _filled(values, self.most or len(texts), filler)
        for name, filler in self.padding.items():
            values = np.concatenate([text[name] for text in texts]).astype(np.int32)
            row[name] = _filled(values, self.length, filler)
        sizes = [len(text["input_ids"]) for text in texts]
        numbers = np.arange(len(texts) + 1, dtype=np.int32)
        if self.most is not None:
            row["texts"] = _filled(numbers[:-1], self.most, -1)
        return row | {"segment_ids": np.repeat(numbers, [*sizes, self.length - sum(sizes)])}


def texts_in_row(length: int) -> int:
    """How many texts share a row of `length` tokens at most where each has a label: one for eight tokens."""
    return max(1, length // 8)


def _filled(values: np.ndarray, size: int, filler: float) -> np.ndarray:
    """`values` with `filler` after them, up to `size`."""
    return np.concatenate([values, np.full((size - len(values), *values.shape[1:]), filler, values.dtype)])


def pack_ragged(texts: Ragged, text_padding: Mapping[str, float] | None = None) -> Packed:
    """Encoded texts in rows as long as the longest that there may be; `text_padding` is that of `Packed`."""

    def frame(index: int) -> Mapping[str, np.ndarray]:
        example = texts.dataset[index]
        assert example is not None  # nothing is filtered out
        return example

    return Packed.of(frame, texts.lengths, texts.max_length, texts.padding, text_padding)


def packed_documents(tokens: np.ndarray, separator: int, length: int) -> Packed:
    """The documents of a corpus for next-token prediction: `input_ids` begin with the separator, `labels` end with it.
    What is longer than `length` is cut; every token is a label once."""
    documents = _documents(tokens, separator)
    pieces = _cut(documents[:, 1] - documents[:, 0] + 1, length)

    def frame(index: int) -> dict[str, np.ndarray]:
        document, offset, size = pieces[index]
        start, stop = documents[document]
        # One place further than in the corpus: the separator in front is the first.
        text = tokens[start + max(offset - 1, 0) : min(start + offset + size, stop)]
        front, end = offset == 0, start + offset + size > stop
        whole = np.pad(text.astype(np.int32), (int(front), int(end)), constant_values=separator)
        return {"input_ids": whole[:-1], "labels": whole[1:]}

    return Packed.of(frame, pieces[:, 2], length, {"input_ids": separator, "labels": IGNORED_LABEL})


def packed_texts(tokens: np.ndarray, tokenizer: Tokenizer, separator: int, length: int) -> Packed:
    """The documents of a corpus, each framed with the tokenizer's special tokens; longer ones are cut."""
    template = Template.of(tokenizer)
    documents = _documents(tokens, separator)
    pieces = _cut(documents[:, 1] - documents[:, 0], template.room(length))

    def frame(index: int) -> dict[str, np.ndarray]:
        document, offset, size = pieces[index]
        start = documents[document, 0] + offset
        return {"input_ids": template.fill(tokens[start : start + size])["input_ids"]}

    return Packed.of(frame, pieces[:, 2] + template.size, length, {"input_ids": tokenizer.pad_id or 0})


def _documents(tokens: np.ndarray, separator: int) -> np.ndarray:
    """(documents, 2): where each that is not empty starts and stops."""
    stops = np.append(np.flatnonzero(np.asarray(tokens) == separator), len(tokens))
    starts = np.append(0, stops[:-1] + 1)
    return np.stack([starts, stops], axis=1)[stops > starts]


def _cut(sizes: np.ndarray, room: int) -> np.ndarray:
    """(pieces, 3): of which document each piece is, where it starts in it, and its size."""
    counts = -(-sizes // room)
    document = np.repeat(np.arange(len(sizes)), counts)
    offset = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * room
    return np.stack([document, offset, np.minimum(room, sizes[document] - offset)], axis=1)
