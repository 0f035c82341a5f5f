"""Tokenizers: characters, bytes, byte-level BPE, WordPiece, sub-words for translation, and the files of existing ones.

The work is done by Hugging Face `tokenizers`, and what is written is its format, so `transformers` reads it. (Marian's
are cut by sentencepiece, as there.) Two things are added: a fast path for characters and bytes, whose ids are a table
look-up, and a promise about special tokens. Text never turns into special tokens: `<|endoftext|>` inside a document is
encoded as the thirteen characters it is, as in GPT-2's own encoder and nanoGPT's data, so that no text can end a
document, `[SEP]` as the pieces `[`, `sep`, `]`, as in BERT's own tokenizer, and T5's `</s>` and `<extra_id_0>` as the
characters they are, as in sentencepiece. (transformers recognises them unless told `split_special_tokens=True`, and
those of T5 even then.) Special ids are added by whoever needs them. The one exception is Marian's: a text for a
multilingual model says with `>>fra<<` in front which language to translate to.
"""

import codecs
import functools
import hashlib
import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
import tokenizers
from tokenizers import decoders, models, processors

from transformers_jax.data import tokenizer_training
from transformers_jax.data.sentencepiece_files import MarianPieces
from transformers_jax.data.tokenizer_files import (
    SOURCE_MODEL,
    TARGET_MODEL,
    TARGET_VOCAB,
    VOCAB,
    read_marian,
    read_tokenizer,
)
from transformers_jax.data.tokenizer_schemes import (
    ANY_CHARACTER,
    BYTE_SYMBOLS,
    SPECIAL_NAMES,
    SYMBOL_BYTES,
    split_lookalikes,
    token_text,
)


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

    Made by `Tokenizer.character`, `Tokenizer.byte`, `Tokenizer.train_bpe`, `Tokenizer.train_wordpiece`,
    `Tokenizer.train_subword` or `Tokenizer.load`. `config` is the content of `tokenizer_config.json`, which names the
    special tokens. A tokenizer that has a first token and a separator, and does not say how a text is framed with them,
    frames it as BERT does. `marian` is a sentencepiece model that cuts the texts; the vocabulary is the backend's then.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: dict[str, Any],
        marian: bytes | None = None,
        target: "Tokenizer | None" = None,
    ):
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
        if isinstance(self.backend.model, models.Unigram):
            special = [t.content for t in self.backend.get_added_tokens_decoder().values() if t.special]
            split_lookalikes(self.backend, special)
        self._layout = json.loads(self.backend.to_str())
        self._vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        self._character_ids = self._character_table()
        self._byte_ids = self._byte_table()
        self._target = target
        self._marian = None
        if marian is not None:
            specials = frozenset(str(self.backend.id_to_token(i)) for i in self.special_ids)
            self._marian = MarianPieces(marian, self._vocab, specials, self.unk_id or 0)

    # Making one

    @classmethod
    def character(cls, text: Iterable[str]) -> "Tokenizer":
        """One id for each different character of `text` (a string or strings), in sorted order, and no other token."""
        backend, config = tokenizer_training.make_character(text)
        return cls(backend, config=config)

    @classmethod
    def byte(cls) -> "Tokenizer":
        """Ids 0 to 255 are the bytes of the text in UTF-8; 256 is `<|endoftext|>`."""
        backend, config = tokenizer_training.make_byte()
        return cls(backend, config=config)

    @classmethod
    def train_bpe(cls, texts: Iterable[str], *, vocab_size: int) -> "Tokenizer":
        """Train GPT-2's byte-level BPE on `texts`: `<|endoftext|>` (id 0), the 256 bytes, then merges by frequency.

        Merges seen once only are not learned, so a small text gives fewer than `vocab_size` tokens.
        """
        backend, config = tokenizer_training.train_bpe(texts, vocab_size=vocab_size)
        return cls(backend, config=config)

    @classmethod
    def train_wordpiece(cls, texts: Iterable[str], *, vocab_size: int, lowercase: bool = True) -> "Tokenizer":
        """Train BERT's WordPiece on `texts`: `[PAD]`, `[UNK]`, `[CLS]`, `[SEP]`, `[MASK]` (ids 0 to 4), then characters
        and pieces by frequency; lower-cased texts lose their accents too, as in BERT.

        Pieces seen once only are not learned, so a small text gives fewer than `vocab_size` tokens; of the characters,
        the most frequent `vocab_size // 4` are. The same texts give the same ids, whatever the machine.
        """
        backend, config = tokenizer_training.train_wordpiece(texts, vocab_size=vocab_size, lowercase=lowercase)
        return cls(backend, config=config)

    @classmethod
    def train_subword(
        cls, texts: Iterable[str], *, vocab_size: int, kind: Literal["bpe", "unigram"] = "bpe"
    ) -> "Tokenizer":
        """Train a vocabulary for translation on `texts` of both languages: `<pad>`, `</s>`, `<unk>` (ids 0 to 2), then
        characters and pieces of words.

        `bpe` merges by frequency (Sennrich et al., 2016); `unigram` keeps the pieces that make the texts most likely
        (Kudo, 2018), and needs the extra `sentencepiece` to train (`ImportError`), not to use. Texts are normalised as
        by sentencepiece: compatible characters are one (NFKC), blanks and control characters of every kind are one
        blank, and none at the ends. Decoding gives the normalised text exactly, with `<unk>` for every run of
        characters that are not in the vocabulary; the most frequent `vocab_size // 4` characters are. A small text
        gives fewer than `vocab_size` tokens. The same texts give the same ids, whatever the machine.
        """
        backend, config = tokenizer_training.train_subword(texts, vocab_size=vocab_size, kind=kind)
        return cls(backend, config=config)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a directory, or one of its files: Marian's `source.spm`, `target.spm` and `vocab.json`, else
        `tokenizer.json`, else `vocab.json` with `merges.txt`, else GPT-2's original `encoder.json` with `vocab.bpe`,
        else WordPiece's `vocab.txt` (any other `*.txt` that is named), else T5's `spiece.model` (any other `*.model`).

        Special tokens are those named in `tokenizer_config.json` (else `special_tokens_map.json`) beside it; named ones
        missing from the vocabulary are added at its end, as transformers does. What these files do not name is called
        as in BERT, RoBERTa, GPT-2 or T5: the one that `tokenizer_class` says, or whose special tokens the vocabulary
        has. The configuration also decides on `do_lower_case` (BERT's default: yes), `strip_accents`,
        `tokenize_chinese_chars`, an `add_prefix_space` that is true, T5's `extra_ids` (100) and Marian's
        `separate_vocabs`, whose targets have a `target_vocab.json`.

        Of T5's and Marian's, ids and decoded texts are those of transformers (`T5Tokenizer`, which has no bytes for
        unknown characters, and `MarianTokenizer`): a text that begins with `>>` is taken for a language up to its first
        `<<`, and is unknown where the vocabulary does not have it. sentencepiece models need the extra `sentencepiece`.
        Raises `FileNotFoundError`, `ValueError` or `ImportError`.
        """
        path = Path(path).expanduser()
        if not path.exists():
            raise FileNotFoundError(
                f"no tokenizer at {path}; name a directory or file, or: character, byte, bpe, wordpiece, unigram"
            )
        if path.name != SOURCE_MODEL and not (path / SOURCE_MODEL).is_file():
            backend, config = read_tokenizer(path)
            return cls(backend, config=config)
        source, other, *models = read_marian(path if path.is_dir() else path.parent)
        target, source = (
            cls(backend, config=config, marian=model)
            for (backend, config), model in zip((other or source, source), reversed(models), strict=True)
        )
        source._target = target
        return source

    def save(self, directory: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, and `vocab.json` and `merges.txt` of a byte-level BPE or
        `vocab.txt` of a WordPiece. Of Marian's, the files that `load` names, with `tokenizer_config.json`.

        `Tokenizer.load` and transformers' `AutoTokenizer` read the directory.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _write_json(directory / "tokenizer_config.json", self.config, sort_keys=True)
        if self._marian is not None:
            target = self.target._marian
            assert target is not None
            for name, side in ((SOURCE_MODEL, self._marian), (TARGET_MODEL, target)):
                (directory / name).write_bytes(side.model)
            _write_json(directory / VOCAB, self._vocab)
            if self.config.get("separate_vocabs"):
                _write_json(directory / TARGET_VOCAB, self.target._vocab)
            return
        (directory / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
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
        if self._marian is not None:
            return self._marian.encode(texts)
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
        if self._marian is not None:
            encoded = [self._marian.encode_with_offsets(text) for text in texts]
        else:
            encodings = self.backend.encode_batch(list(texts), add_special_tokens=False)
            encoded = [(encoding.ids, encoding.offsets) for encoding in encodings]
        return [
            Pieces(np.array(ids, np.int32), _exact_offsets(text, offsets))
            for text, (ids, offsets) in zip(texts, encoded, strict=True)
        ]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text of `ids`, special tokens included. Bytes that are not UTF-8 give U+FFFD; ids without a token nothing."""
        if self._marian is not None:
            return self._marian.decode(map(int, ids))
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

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of what a translation is into: itself, unless the target has a model of its own (Marian's)."""
        return self._target or self

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
        if self._marian is not None:
            special += [hashlib.sha256(self._marian.model).hexdigest()]
            special += [] if self._target is None else [self._target.fingerprint]
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
        kind = self._layout["model"]["type"] if self._marian is None else "Marian"
        return f"Tokenizer({kind}, vocab_size={self.vocab_size}, eos_id={self.eos_id})"

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
        token = token_text(self.config.get(name))
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
            self._stream = None if tokenizer._marian else decoders.DecodeStream(skip_special_tokens=False)

    def push(self, token_id: SupportsIndex) -> str:
        """The text that became certain with this id: often a word, sometimes nothing."""
        if self._bytes is not None:
            return self._bytes.decode(self._tokenizer.token_bytes(int(token_id)))
        self._ids.append(int(token_id))
        if self._stream is not None:
            text = self._stream.step(self._tokenizer.backend, int(token_id)) or ""
        else:
            whole = self._tokenizer.decode(self._ids)
            text = "" if whole.endswith("\ufffd") else whole[len(self._text) :]
        self._text += text
        return text

    def finish(self) -> str:
        """What is left when no id follows: U+FFFD for a character that never became whole."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._tokenizer.decode(self._ids)[len(self._text) :]


def _write_json(path: Path, content: dict[str, Any], *, sort_keys: bool = False) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False, sort_keys=sort_keys)
    path.write_text(text + "\n", encoding="utf-8")


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
