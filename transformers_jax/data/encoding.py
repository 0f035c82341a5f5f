"""Labelled text as model inputs: framed with special tokens, cut to a length, aligned with words or characters.

Every function gives dictionaries of int32 arrays without a batch axis, `input_ids` and `token_type_ids`. Nothing is
padded here. Text that looks like a special token is text (see `tokenizers`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from tokenizers import Regex, decoders, pre_tokenizers

from transformers_jax.data.tokenizers import Pieces, Tokenizer

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Template:
    """How a tokenizer frames one text, or a pair, with special tokens: BERT's `[CLS] a [SEP]` and `[CLS] a [SEP] b
    [SEP]`, RoBERTa's `<s> a </s></s> b </s>`, GPT-2's none."""

    specials: tuple[np.ndarray, ...]
    """Special ids before each text, and after the last one."""
    special_types: tuple[np.ndarray, ...]
    """Their token types."""
    text_types: tuple[int, ...]
    """The token type of each text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, texts: Literal[1, 2] = 1) -> "Template":
        """What the tokenizer's own post-processor does, found by trying it."""
        if tokenizer.backend.post_processor is None:
            none = (np.zeros(0, np.int32),) * (texts + 1)
            return cls(none, none, (0,) * texts)
        for probe in itertools.chain(["a"], tokenizer.backend.get_vocab()):
            if tokenizer.encode(probe):
                break
        else:
            raise ValueError(f"no text has an id in {tokenizer}")
        encoding = tokenizer.backend.encode(probe, probe if texts == 2 else None)
        ids, types = np.array(encoding.ids, np.int32), np.array(encoding.type_ids, np.int32)
        text_of = np.array([-1 if text is None else text for text in encoding.sequence_ids])
        cuts, text_types = [0], []
        for text in range(texts):
            places = np.flatnonzero(text_of == text)
            cuts += [places[0], places[-1] + 1]
            text_types.append(int(types[places[0]]))
        runs = [slice(start, end) for start, end in zip(cuts[::2], [*cuts[1::2], len(ids)], strict=True)]
        return cls(tuple(ids[run] for run in runs), tuple(types[run] for run in runs), tuple(text_types))

    @property
    def size(self) -> int:
        """The number of special tokens."""
        return sum(map(len, self.specials))

    def fill(self, *texts: np.ndarray) -> Inputs:
        """The inputs of texts given as ids."""
        ids, types = [self.specials[0]], [self.special_types[0]]
        for i, text in enumerate(texts):
            ids += [text.astype(np.int32), self.specials[i + 1]]
            types += [np.full(len(text), self.text_types[i], np.int32), self.special_types[i + 1]]
        return {"input_ids": np.concatenate(ids), "token_type_ids": np.concatenate(types)}

    def room(self, max_length: int) -> int:
        """The number of text tokens that fit. Raises `ValueError` if there are none."""
        if max_length <= self.size:
            raise ValueError(
                f"max_length {max_length} leaves no room for text beside {self.size} special tokens; raise it"
            )
        return max_length - self.size


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int
) -> list[Inputs]:
    """Inputs of texts, or of each text with the second text beside it in `pairs`, of at most `max_length` tokens.

    Texts lose tokens at their end; of a pair the longer one does, until both are equally long (transformers'
    `truncation=True`).
    """
    template = Template.of(tokenizer, texts=1 if pairs is None else 2)
    room = template.room(max_length)
    first = tokenizer.encode_arrays(texts)
    if pairs is None:
        return [template.fill(ids[:room]) for ids in first]
    if len(pairs) != len(texts):
        raise ValueError(f"there are {len(texts)} texts, but {len(pairs)} second ones")
    inputs = []
    for a, b in zip(first, tokenizer.encode_arrays(pairs), strict=True):
        shorter = min(len(a), len(b), room // 2)
        keep_a, keep_b = (room - shorter, shorter) if len(a) > len(b) else (shorter, room - shorter)
        inputs.append(template.fill(a[:keep_a], b[:keep_b]))
    return inputs


@dataclass(frozen=True, eq=False)
class EncodedWords:
    """A sentence of words as model inputs."""

    inputs: Inputs
    first: np.ndarray
    """`(words,)` int32: the position of each word's first piece in `input_ids`; -1 for words beyond the length limit
    and words without a piece (nothing but characters that the tokenizer drops)."""


def encode_words(tokenizer: Tokenizer, sentences: Sequence[Sequence[str]], *, max_length: int) -> list[EncodedWords]:
    """Inputs of sentences that are split into words already, of at most `max_length` tokens.

    Every word has pieces of its own. Byte-level vocabularies see a space before all words but the first (before that
    too if the tokenizer adds one to every text), as in running text.
    """
    template = Template.of(tokenizer)
    room, begin = template.room(max_length), len(template.specials[0])
    # Adding nothing where the tokenizer does it itself, or where blanks are nothing.
    spaced = isinstance(tokenizer.backend.decoder, decoders.ByteLevel) and tokenizer.encode("a") != tokenizer.encode(
        " a"
    )

    def spelled(word: str, index: int) -> str:
        if not word.strip():
            return ""  # a blank is no word, though byte-level vocabularies have a token for it
        return " " + word if spaced and index else word

    words = [[spelled(word, i) for i, word in enumerate(sentence)] for sentence in sentences]
    encoded = []
    encodings = tokenizer.backend.encode_batch(words, is_pretokenized=True, add_special_tokens=False)
    for sentence, encoding in zip(words, encodings, strict=True):
        first = np.full(len(sentence), -1, np.int32)
        indices, positions = np.unique(np.array(encoding.word_ids[:room], np.int32), return_index=True)
        first[indices] = positions + begin
        encoded.append(EncodedWords(template.fill(np.array(encoding.ids[:room], np.int32)), first))
    return encoded


@dataclass(frozen=True, eq=False)
class Window:
    """A question with a stretch of its context as model inputs."""

    inputs: Inputs
    example: int
    """Index of the question."""
    context: Pieces
    """All pieces of the context."""
    first_token: int
    """Index among them of the first one in this window."""
    context_start: int
    """Position of that one in `input_ids`."""
    context_end: int
    """Position after the last token of the context."""

    @property
    def offsets(self) -> np.ndarray:
        """`(context_end - context_start, 2)`: where the tokens of the window begin and end in the context's text."""
        return self.context.offsets[self.first_token : self.first_token + self.context_end - self.context_start]


def encode_windows(
    tokenizer: Tokenizer, questions: Sequence[str], contexts: Sequence[str], *, max_length: int, overlap: int
) -> list[Window]:
    """Each question with its context, in as many windows of at most `max_length` tokens as the context needs.

    Neighbouring windows share `overlap` tokens of the context: transformers' `stride`. The original BERT's
    `doc_stride` is instead the step from one window to the next, which is the room for the context minus the overlap.
    Every token of the context is in some window, and so is every stretch of at most `overlap` + 1 tokens as a whole.
    The last window ends with the context. Questions are never cut: one that leaves less than `overlap` + 1 tokens for
    the context raises `ValueError`, as does an overlap with which no question could.
    """
    if len(questions) != len(contexts):
        raise ValueError(f"there are {len(questions)} questions, but {len(contexts)} contexts")
    template = Template.of(tokenizer, texts=2)
    room = template.room(max_length)
    limit = room - overlap - 1
    if overlap < 0 or limit < 1:
        raise ValueError(
            f"windows of max_length {max_length} cannot overlap by {overlap} tokens: {template.size} special tokens, "
            "one of a question and a new one of the context need room too; lower it (to 0 at least) or raise max_length"
        )
    texts = {text: i for i, text in enumerate(dict.fromkeys(contexts))}  # a context often has many questions
    pieces = tokenizer.pieces(list(texts))
    windows = []
    for example, (question, text) in enumerate(zip(tokenizer.encode_arrays(questions), contexts, strict=True)):
        if len(question) > limit:
            raise ValueError(
                f"question {example} ({questions[example][:40]!r}) has {len(question)} tokens, but in windows of "
                f"max_length {max_length} with {template.size} special tokens and an overlap of {overlap} there is "
                f"room for {limit}; shorten it, raise max_length or lower the overlap"
            )
        context = pieces[texts[text]]
        size = room - len(question)
        begin = len(template.specials[0]) + len(question) + len(template.specials[1])
        for start in range(0, max(len(context.ids) - overlap, 1), size - overlap):
            ids = context.ids[start : start + size]
            windows.append(Window(template.fill(question, ids), example, context, start, begin, begin + len(ids)))
    return windows


def token_span(window: Window, start_char: int, end_char: int) -> tuple[int, int] | None:
    """Positions in `input_ids` of the first and the last token of `context[start_char:end_char]`, or None if some of
    its tokens are outside the window, or it has none."""
    starts, ends = window.context.offsets.T
    tokens = np.flatnonzero((starts < end_char) & (ends > start_char) & (starts < ends))
    if not len(tokens):
        return None
    first, last = (int(token) - window.first_token + window.context_start for token in tokens[[0, -1]])
    return (first, last) if window.context_start <= first and last < window.context_end else None


def char_span(window: Window, first: int, last: int) -> tuple[int, int]:
    """Where the text of the tokens from position `first` to `last` begins and ends in the context, without blanks at
    either end. Raises `ValueError` for positions that are not the context's, or in the wrong order."""
    if not window.context_start <= first <= last < window.context_end:
        raise ValueError(
            f"tokens {first} to {last} are no stretch of the context, which has the positions {window.context_start} "
            f"to {window.context_end - 1}"
        )
    spans = window.offsets[first - window.context_start : last + 1 - window.context_start]
    full = spans[spans[:, 0] < spans[:, 1]]
    return (int(full[:, 0].min()), int(full[:, 1].max())) if len(full) else (int(spans[0, 0]), int(spans[0, 0]))


# Words as in CoNLL's files and WNUT's: hyphens, apostrophes and the signs inside numbers belong to the word, "'s" is
# one of its own, as are abbreviations with their dots, names with @ or #, and runs of one same sign. Invisible
# characters (\p{Cf}) join letters or are nothing.
_LETTER = r"[\p{L}\p{M}\p{N}_]"
_RUN = rf"{_LETTER}(?:[\p{{L}}\p{{M}}\p{{N}}\p{{Cf}}_]*{_LETTER})?"
_WORD = "|".join(
    [
        rf"['’][sS](?!{_LETTER})",
        rf"\p{{L}}\.(?:\p{{L}}\.)+(?!{_LETTER})",
        rf"(?:(?<!{_LETTER})[@#])?{_RUN}(?:-{_RUN}|['’](?![sS](?!{_LETTER})){_RUN}|(?<=\p{{N}})[.,:/]\p{{N}}+)*",
        r"([^\s\p{Cc}\p{Cf}])\1*\p{M}*",
    ]
)
_SPLIT = pre_tokenizers.Split(Regex(_WORD), "removed", invert=True)


def split_words(text: str) -> list[tuple[int, int]]:
    """Where the words of running text begin and end, split as the files of entity data are.

    Punctuation is a word of its own, blanks and invisible characters are none. `John's e-mail cost $1,500...` gives
    `John`, `'s`, `e-mail`, `cost`, `$`, `1,500`, `...`.
    """
    return [span for _, span in _SPLIT.pre_tokenize_str(text)]
