"""Tokenizers: characters, bytes, byte-level BPE, WordPiece, and the files of an existing one.

The work is done by Hugging Face `tokenizers`, and what is written is its format, so `transformers` reads it. Two things
are added: a fast path for characters and bytes, whose ids are a table look-up, and a promise about special tokens. Text
never turns into special tokens: `<|endoftext|>` inside a document is encoded as the thirteen characters it is, as in
GPT-2's own encoder and nanoGPT's data, so that no text can end a document, and `[SEP]` as the pieces `[`, `sep`, `]`,
as in BERT's own tokenizer. (transformers recognises them unless told `split_special_tokens=True`.) Special ids are
added by whoever needs them.
"""

import codecs
import functools
import hashlib
import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ANY_CHARACTER = r"[\s\S]"
FILE_SETS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("vocab.txt",))
# What a tokenizer of this class calls its special tokens where its configuration does not say.
BERT, ROBERTA, GPT2 = "BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer"
SPECIAL_TOKENS = {
    BERT: {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
    },
    ROBERTA: {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "cls_token": "<s>",
        "sep_token": "</s>",
    },
    GPT2: {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT},
}


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    symbols = [chr(byte) if chr(byte).isprintable() and not chr(byte).isspace() else "" for byte in range(256)]
    extra = iter(range(256, 512))
    return [symbol or chr(next(extra)) for symbol in symbols]


BYTE_SYMBOLS = _byte_symbols()
SYMBOL_BYTES = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a text, without special tokens."""

    ids: np.ndarray
    """`(pieces,)` int32."""
    offsets: np.ndarray
    """`(pieces, 2)` int32: where each piece begins and ends in the text, in characters, without blanks at either end.
    A piece of blanks alone is empty. The pieces of one character that is cut into bytes all have its place."""


class Tokenizer:
    """Text to ids and back.

    Made by `Tokenizer.character`, `Tokenizer.byte`, `Tokenizer.train_bpe`, `Tokenizer.train_wordpiece` or
    `Tokenizer.load`. `config` is the content of `tokenizer_config.json`, which names the special tokens. A tokenizer
    that has a first token and a separator, and does not say how a text is framed with them, frames it as BERT does.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, config: dict[str, Any]):
        # A copy, because the settings below would change the caller's tokenizer. Truncation and padding are sometimes
        # saved in tokenizer.json and would silently cut or lengthen texts.
        self.backend: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(backend.to_str())
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.config = dict(config)
        if self.backend.post_processor is None and self.cls_id is not None and self.sep_id is not None:
            cls, sep = (str(self.backend.id_to_token(i)) for i in (self.cls_id, self.sep_id))
            self.backend.post_processor = processors.TemplateProcessing(
                single=f"{cls}:0 $A:0 {sep}:0",
                pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
                special_tokens=[(cls, self.cls_id), (sep, self.sep_id)],
            )
        self._layout = json.loads(self.backend.to_str())
        self._vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        self._character_ids = self._character_table()
        self._byte_ids = self._byte_table()

    # Making one

    @classmethod
    def character(cls, text: Iterable[str]) -> "Tokenizer":
        """One id for each different character of `text` (a string or strings), in sorted order, and no other token."""
        characters = sorted(set(text) if isinstance(text, str) else set(itertools.chain.from_iterable(text)))
        if not characters:
            raise ValueError("a character tokenizer needs at least one character of text")
        # Without an unknown token in the vocabulary this model refuses other characters; a BPE would drop them.
        backend = tokenizers.Tokenizer(
            models.WordLevel(vocab={character: i for i, character in enumerate(characters)}, unk_token="<unk>")
        )
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(ANY_CHARACTER), "isolated")
        backend.decoder = decoders.Fuse()
        return cls(backend, config={"tokenizer_class": "PreTrainedTokenizerFast"})

    @classmethod
    def byte(cls) -> "Tokenizer":
        """Ids 0 to 255 are the bytes of the text in UTF-8; 256 is `<|endoftext|>`."""
        vocab = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)} | {END_OF_TEXT: 256}
        return cls(_byte_level(models.BPE(vocab=vocab, merges=[])), config=_gpt2_config())

    @classmethod
    def train_bpe(cls, texts: Iterable[str], *, vocab_size: int) -> "Tokenizer":
        """Train GPT-2's byte-level BPE on `texts`: `<|endoftext|>` (id 0), the 256 bytes, then merges by frequency.

        Merges seen once only are not learned, so a small text gives fewer than `vocab_size` tokens.
        """
        if vocab_size < 257:
            raise ValueError(f"vocab_size is {vocab_size}, but 256 bytes and {END_OF_TEXT} need at least 257")
        backend = _byte_level(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend, config=_gpt2_config())

    @classmethod
    def train_wordpiece(cls, texts: Iterable[str], *, vocab_size: int, lowercase: bool = True) -> "Tokenizer":
        """Train BERT's WordPiece on `texts`: `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, `[MASK]` (ids 0 to 4), then characters
        and pieces by frequency; lower-cased texts lose their accents too, as in BERT.

        Pieces seen once only are not learned, so a small text gives fewer than `vocab_size` tokens; of the characters,
        the most frequent `vocab_size // 4` are. The same texts give the same ids, whatever the machine.
        """
        if vocab_size < 16:
            raise ValueError(
                f"vocab_size is {vocab_size}, but five special tokens and some characters need at least 16"
            )
        specials = list(SPECIAL_TOKENS[BERT].values())
        config = {"do_lower_case": lowercase, "strip_accents": None, "tokenize_chinese_chars": True}
        backend = _wordpiece(models.WordPiece(unk_token="[UNK]"), config)
        texts = texts if isinstance(texts, Sequence) else list(texts)
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(backend.normalizer.normalize_str(text))
        characters = sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[: vocab_size // 4]
        if not characters:
            raise ValueError("a WordPiece tokenizer needs at least one character of text")

        def train(vocab_size: int, first: list[str]) -> list[str]:
            trainer = trainers.WordPieceTrainer(
                vocab_size=vocab_size,
                min_frequency=2,
                special_tokens=first,
                initial_alphabet=sorted(characters),
                limit_alphabet=len(characters),
                show_progress=False,
            )
            backend.train_from_iterator(texts, trainer)
            vocab = backend.get_vocab()
            return sorted(vocab, key=lambda token: vocab[token])

        # The trainer meets words in random order and numbers the characters inside them as it goes, and these numbers
        # decide between equally frequent pieces: it is told their order, which a training without pieces shows.
        inside = sorted(token for token in train(0, specials) if len(token) == 3 and token.startswith("##"))
        vocab = {token: i for i, token in enumerate(train(vocab_size, specials + inside))}
        backend = _wordpiece(models.WordPiece(vocab=vocab, unk_token="[UNK]"), config)
        config = {"tokenizer_class": BERT} | config | SPECIAL_TOKENS[BERT]
        _add_special_tokens(backend, config)
        return cls(backend, config=config)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a directory, or one of its files: `tokenizer.json`, else `vocab.json` with `merges.txt`, else GPT-2's
        original `encoder.json` with `vocab.bpe`, else WordPiece's `vocab.txt` (any other `*.txt` that is named).

        Special tokens are those named in `tokenizer_config.json` (else `special_tokens_map.json`) beside it; named ones
        missing from the vocabulary are added at its end, as transformers does. What these files do not name is called
        as in BERT, RoBERTa or GPT-2: the one that `tokenizer_class` says, or whose special tokens the vocabulary has.
        The configuration also decides on `do_lower_case` (BERT's default: yes), `strip_accents`,
        `tokenize_chinese_chars` and an `add_prefix_space` that is true. Raises `FileNotFoundError` or `ValueError`.
        """
        path = Path(path).expanduser()
        if not path.exists():
            raise FileNotFoundError(
                f"no tokenizer at {path}; name a directory or file, or: character, byte, bpe, wordpiece"
            )
        directory = path if path.is_dir() else path.parent
        set_of = {name: names for names in FILE_SETS for name in names}
        if path.is_dir():
            file, sets = directory / "tokenizer.json", FILE_SETS
        elif path.suffix == ".txt" or path.name in set_of:
            file, sets = None, (set_of.get(path.name, (path.name,)),)
        else:
            file, sets = path, ()
        config = _read_json(directory / "special_tokens_map.json") | _read_json(directory / "tokenizer_config.json")
        if file is not None and file.is_file():
            try:
                backend = tokenizers.Tokenizer.from_file(str(file))
            except Exception as error:
                raise ValueError(f"{file} is not a tokenizer.json of Hugging Face tokenizers ({error})") from None
            _follow_config(backend, config)
        else:
            for names in sets:
                if all((directory / name).is_file() for name in names):
                    break
            else:
                wanted = " or ".join(["tokenizer.json"] * path.is_dir() + [" + ".join(names) for names in sets])
                raise FileNotFoundError(f"no tokenizer in {directory}: {wanted} is needed")
            backend = _read_files([directory / name for name in names], config)
            file = None
        family, special_names = _special_names(backend, config)
        config = special_names | config
        _add_special_tokens(backend, config)
        ends = [(token, backend.token_to_id(token) or 0) for token in _named(config, "sep_token", "cls_token")]
        if family == ROBERTA and len(ends) == 2 and isinstance(backend.post_processor, processors.ByteLevel | None):
            adds = bool(config.get("add_prefix_space", False))
            backend.post_processor = processors.RobertaProcessing(ends[0], ends[1], add_prefix_space=adds)
        default_class = "PreTrainedTokenizerFast"
        if file is None:
            is_wordpiece = isinstance(backend.model, models.WordPiece)
            default_class = BERT if is_wordpiece else ROBERTA if family == ROBERTA else GPT2
        return cls(backend, config={"tokenizer_class": default_class} | config)

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, and `vocab.json` and `merges.txt` of a byte-level BPE or
        `vocab.txt` of a WordPiece.

        `Tokenizer.load` and transformers' `AutoTokenizer` read the directory.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        config = json.dumps(self.config, indent=2, ensure_ascii=False, sort_keys=True)
        (directory / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
        kind = self._layout["model"]["type"]
        if kind == "WordPiece" or (kind == "BPE" and self._is_byte_level):
            self.backend.model.save(str(directory))

    # Using one

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with no special tokens added or recognised. A character tokenizer raises `ValueError` for a
        character it does not have."""
        return self.encode_arrays([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts at once, on all cores where the model is worth it."""
        return [ids.tolist() for ids in self.encode_arrays(texts)]

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode_batch` with one-dimensional integer arrays as results, for large amounts of text."""
        if self._character_ids is not None:
            return [self._encode_characters(text) for text in texts]
        if (table := self._byte_ids) is not None:
            return [table[np.frombuffer(text.encode(), np.uint8)] for text in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def pieces(self, texts: Sequence[str]) -> list[Pieces]:
        """`encode` of many texts at once, with the place of each piece in its text."""
        if self._character_ids is not None:
            places = (np.arange(len(text), dtype=np.int32) for text in texts)
            return [
                Pieces(self._encode_characters(text), np.stack([place, place + 1], axis=1))
                for text, place in zip(texts, places, strict=True)
            ]
        encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [
            Pieces(np.array(encoding.ids, np.int32), _exact_offsets(text, encoding.offsets))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids`, special tokens included. Bytes that are not UTF-8 give U+FFFD; ids without a token nothing."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def stream(self) -> "TextStream":
        """Decode ids one at a time: see `TextStream`."""
        return TextStream(self)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text that one id stands for (of tokenizers that lose information: of its decoded text)."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level and token not in self._added_tokens:
            return bytes(SYMBOL_BYTES[symbol] for symbol in token)
        return self.decode([token_id]).encode()

    # What it is

    @functools.cached_property
    def vocab_size(self) -> int:
        """The number of ids, special tokens included: one more than the largest id."""
        return max(self._vocab.values()) + 1

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text, if there is one."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text, if there is one."""
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token, if there is one (GPT-2 has none)."""
        return self._special_id("pad_token")

    @property
    def unk_id(self) -> int | None:
        """Id that stands for what the vocabulary does not have, if there is one."""
        return self._special_id("unk_token")

    @property
    def cls_id(self) -> int | None:
        """Id of the token whose output stands for the whole text (`[CLS]`, RoBERTa's `<s>`), if there is one."""
        return self._special_id("cls_token")

    @property
    def sep_id(self) -> int | None:
        """Id of the token after each text (`[SEP]`, RoBERTa's `</s>`), if there is one."""
        return self._special_id("sep_token")

    @property
    def mask_id(self) -> int | None:
        """Id of the token that hides another one, if there is one."""
        return self._special_id("mask_token")

    @functools.cached_property
    def special_ids(self) -> tuple[int, ...]:
        """The ids that stand for no piece of text: those named above, and other tokens that are marked as special."""
        marked = {token["id"] for token in self._layout["added_tokens"] if token["special"]}
        named = (self._special_id(name) for name in SPECIAL_NAMES)
        return tuple(sorted(marked.union(i for i in named if i is not None)))

    @functools.cached_property
    def word_starts(self) -> np.ndarray | None:
        """`(vocab_size,)` bool: whether a word begins with this token, or goes on with it (WordPiece's `##ing`). None
        where tokens do not tell."""
        prefix = self._layout["model"].get("continuing_subword_prefix")
        if not prefix:
            return None
        starts = np.ones(self.vocab_size, bool)
        starts[[token_id for token, token_id in self._vocab.items() if token.startswith(prefix)]] = False
        return starts

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the ids. Equal fingerprints: equal ids for every text."""
        # Empty settings are left out: newer versions of the library write more of them for the same tokenizer.
        parts = [
            _without_empty(self._layout[part]) for part in ("added_tokens", "normalizer", "pre_tokenizer", "decoder")
        ]
        model = {name: value for name, value in self._layout["model"].items() if value or name == "vocab"}
        special = [self.bos_id, self.eos_id, self.pad_id]
        # Tokenizers without these keep the fingerprint that they had before these counted.
        if (more := [self.cls_id, self.sep_id, self.mask_id]) != [None] * 3:
            special += more
        content = json.dumps([*parts, model, *special], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @functools.cached_property
    def cuts(self) -> Literal["anywhere", "words", "nowhere"]:
        """Where a text may be cut without changing its ids: between any two characters, before a space or newline that
        follows another character (neither GPT-2's pattern nor a word of BERT's reaches across that; see `split_text`),
        or not at all."""
        if self._character_ids is not None or self._byte_ids is not None:
            return "anywhere"
        return "words" if self._is_plain_byte_level_bpe or self._is_plain_wordpiece else "nowhere"

    def __repr__(self) -> str:
        return f"Tokenizer({self._layout['model']['type']}, vocab_size={self.vocab_size}, eos_id={self.eos_id})"

    # Private

    @property
    def _is_byte_level(self) -> bool:
        return (self._layout["decoder"] or {}).get("type") == "ByteLevel"

    @property
    def _is_plain_byte_level_bpe(self) -> bool:
        """GPT-2's scheme and nothing else that could look across a word's border."""
        before = self._layout["pre_tokenizer"] or {}
        return (
            self._is_byte_level
            and self._layout["model"]["type"] == "BPE"
            and self._layout["normalizer"] is None
            and before.get("type") == "ByteLevel"
            and before.get("use_regex", True)
            and not before.get("add_prefix_space")
            and all(token["special"] for token in self._layout["added_tokens"])
        )

    @property
    def _is_plain_wordpiece(self) -> bool:
        """BERT's scheme and nothing else that could look across a word's border."""
        layout = self._layout
        return (
            layout["model"]["type"] == "WordPiece"
            and (layout["normalizer"] or {}).get("type") == "BertNormalizer"
            and (layout["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer"
            and all(token["special"] for token in layout["added_tokens"])
        )

    @functools.cached_property
    def _added_tokens(self) -> set[str]:
        return {token["content"] for token in self._layout["added_tokens"]}

    def _special_id(self, name: str) -> int | None:
        token = _token_text(self.config.get(name))
        return None if token is None else self.backend.token_to_id(token)

    def _character_table(self) -> np.ndarray | None:
        """Ids by code point, -1 where there is none, if this is what `character` makes."""
        vocab = self._layout["model"].get("vocab")
        if (
            self._layout["model"]["type"] != "WordLevel"
            or (self._layout["pre_tokenizer"] or {}).get("pattern") != {"Regex": ANY_CHARACTER}
            or self._layout["normalizer"] is not None
            or self._layout["added_tokens"]
            or any(len(token) != 1 for token in vocab)
        ):
            return None
        table = np.full(max(map(ord, vocab)) + 2, -1, np.int32)  # one more: all larger code points are read there
        for token, token_id in vocab.items():
            table[ord(token)] = token_id
        return table

    def _byte_table(self) -> np.ndarray | None:
        """Ids by byte, if this is what `byte` makes."""
        if not self._is_plain_byte_level_bpe or self._layout["model"]["merges"]:
            return None
        if not all(symbol in self._vocab for symbol in BYTE_SYMBOLS):
            return None
        return np.array([self._vocab[symbol] for symbol in BYTE_SYMBOLS], np.int32)

    def _encode_characters(self, text: str) -> np.ndarray:
        table = self._character_ids
        assert table is not None
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = table[np.minimum(points, len(table) - 1)]
        if len(ids) and ids.min() < 0:
            position = int((ids < 0).argmax())
            raise ValueError(
                f"the character {text[position]!r} (U+{ord(text[position]):04X}) at position {position} is not one of "
                f"the {self.vocab_size} characters of this tokenizer; remove it, or use tokenizer byte or bpe"
            )
        return ids


class TextStream:
    """Decodes ids as they come, and gives out whole characters only.

    `"".join([stream.push(i) for i in ids] + [stream.finish()])` is `tokenizer.decode(ids)`.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        if tokenizer._is_byte_level or tokenizer._character_ids is not None:
            self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        else:  # the text of a token depends on its neighbours
            self._bytes = None
            self._ids: list[int] = []
            self._text = ""
            self._stream = decoders.DecodeStream(skip_special_tokens=False)

    def push(self, token_id: SupportsIndex) -> str:
        """The text that became certain with this id: often a word, sometimes nothing."""
        if self._bytes is not None:
            return self._bytes.decode(self._tokenizer.token_bytes(int(token_id)))
        self._ids.append(int(token_id))
        text = self._stream.step(self._tokenizer.backend, int(token_id)) or ""
        self._text += text
        return text

    def finish(self) -> str:
        """What is left when no id follows: U+FFFD for a character that never became whole."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._ids)[len(self._text) :]


_LAST_CUT = re.compile(r"(?s:.*)[!-~\w](?=[ \n])")


def split_text(pieces: Iterable[str], *, size: int, cuts: Literal["anywhere", "words", "nowhere"]) -> Iterator[str]:
    """Regroup the pieces of one document into chunks of about `size` characters that can be encoded one by one.

    The ids of the chunks, one after the other, are the ids of the document; `cuts` is that of the tokenizer. With
    `words`, chunks begin at a space or newline that follows a letter, digit or ASCII sign; text without one is one
    chunk.
    """
    held: list[str] = []
    length = 0
    for long_piece in pieces:
        for start in range(0, len(long_piece), size):
            piece = long_piece[start : start + size]
            if cuts == "anywhere":
                yield piece
                continue
            length += len(piece)
            before = held[-1][-1:] if held else ""  # the cut may be right at the border of two pieces
            match = _LAST_CUT.match(before + piece) if cuts == "words" and length >= size else None
            held.append(piece)
            if match:
                cut = match.end() - len(before)
                held[-1] = piece[:cut]
                yield "".join(held)
                held = [piece[cut:]]
                length = len(held[0])
    if length:
        yield "".join(held)


def _byte_level(model: models.Model, *, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return backend


def _gpt2_config() -> dict[str, Any]:
    names = ("bos_token", "eos_token", "unk_token")
    return {"tokenizer_class": GPT2, "add_prefix_space": False} | dict.fromkeys(names, END_OF_TEXT)


def _wordpiece(model: models.Model, config: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _follow_config(backend, config)
    return backend


def _follow_config(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """The configuration wins over tokenizer.json, as in transformers."""
    normalizer, splitter = backend.normalizer, backend.pre_tokenizer
    if isinstance(normalizer, normalizers.BertNormalizer):
        backend.normalizer = normalizers.BertNormalizer(
            clean_text=normalizer.clean_text,
            handle_chinese_chars=config.get("tokenize_chinese_chars", normalizer.handle_chinese_chars),
            strip_accents=config.get("strip_accents", normalizer.strip_accents),
            lowercase=config.get("do_lower_case", normalizer.lowercase),
        )
    if isinstance(splitter, pre_tokenizers.ByteLevel) and config.get("add_prefix_space"):
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=splitter.use_regex)
    if isinstance(backend.model, models.WordPiece) and backend.decoder is None:
        backend.decoder = decoders.WordPiece(prefix="##")


def _read_files(files: Sequence[Path], config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of `vocab.txt`, or of a vocabulary and its merges."""
    if len(files) == 2:
        vocab, merges = files
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:
            raise ValueError(f"{vocab} and {merges.name} are not the files of a BPE ({error})") from None
        return _byte_level(model, add_prefix_space=bool(config.get("add_prefix_space", False)))
    (vocab,) = files
    unknown = _token_text(config.get("unk_token")) or "[UNK]"
    try:
        model = models.WordPiece.from_file(str(vocab), unk_token=unknown)
    except Exception as error:
        raise ValueError(f"{vocab} is not the vocabulary of a WordPiece tokenizer ({error})") from None
    if model.token_to_id(unknown) is None:
        raise ValueError(f"{vocab} is not the vocabulary of a WordPiece tokenizer: no line of it is {unknown}")
    return _wordpiece(model, config)


def _special_names(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Whose conventions the tokenizer follows, and the names of special tokens that follow from them."""
    family = str(config.get("tokenizer_class")).removesuffix("Fast")
    family = BERT if family in ("DistilBertTokenizer", "ElectraTokenizer") else family
    if family in (BERT, ROBERTA):
        return family, SPECIAL_TOKENS[family]
    if not any(name in config for name in SPECIAL_NAMES):
        for family, names in SPECIAL_TOKENS.items():
            if all(backend.token_to_id(token) is not None for token in names.values()):
                return family, names
    return None, {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _token_text(token: Any) -> str | None:
    """`tokenizer_config.json` names a token by its text or by a description that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def _named(config: dict[str, Any], *names: str) -> list[str]:
    return [token for token in (_token_text(config.get(name)) for name in names) if token]


def _add_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    described = config.get("added_tokens_decoder") or {}
    names = [_token_text(described[token_id]) for token_id in sorted(described, key=int)]
    special = {_token_text(token) for token in described.values() if token.get("special", True)}
    names += _named(config, *SPECIAL_NAMES)
    special.update(_named(config, *SPECIAL_NAMES))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in dict.fromkeys(name for name in names if name and name not in known):
        if token in special:
            backend.add_special_tokens([AddedToken(token, normalized=False)])
        elif backend.token_to_id(token) is None:
            backend.add_tokens([AddedToken(token, normalized=False)])


def _exact_offsets(text: str, offsets: list[tuple[int, int]]) -> np.ndarray:
    """Offsets without blanks, which byte-level pieces begin with, and with the accents that WordPiece strips."""
    exact = np.array(offsets, np.int32).reshape(-1, 2)
    for i, (start, end) in enumerate(offsets):
        if start < end and (text[start].isspace() or text[end - 1].isspace()):
            piece = text[start:end]
            end = start + len(piece.rstrip())
            exact[i] = min(start + len(piece) - len(piece.lstrip()), end), end
        if end < len(text) and text[end] > "\u02ff" and unicodedata.category(text[end]) == "Mn":
            following = offsets[i + 1][0] if i + 1 < len(offsets) else len(text)
            while end < following and unicodedata.category(text[end]) == "Mn":
                end += 1
            exact[i, 1] = max(end, exact[i, 1])
    return exact


def _without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_empty(v) for k, v in value.items() if v is not None and v is not False and v != ""}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value
