"""A text corpus as memory-mapped token ids, prepared once and cached on disk."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from transformers_jax.data.base import Data
from transformers_jax.data.text_cuts import split_text
from transformers_jax.data.text_sources import Documents, TextSource, open_text
from transformers_jax.data.tokenizers import Tokenizer

FORMAT = 2  # of the cache; a change makes old entries invisible
CHUNK_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20  # encoded at once; the library needs about 100 bytes a token for it
LEARNT_CHARACTERS = 100_000_000  # a tokenizer learns from; more text takes minutes and changes little
ABANDONED_SECONDS = 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class TextData(Data):
    """Text to train a language model on, and the tokenizer that turns it into ids."""

    # The comments are the help texts of the command line.

    # What to read: a text file, a glob such as 'corpus/**/*.txt', a directory, or a .jsonl, .csv, .tsv or .parquet file
    # with a text column; tfds:NAME[:SPLIT] for a TensorFlow Datasets set; builtin:python-docs, which needs no download.
    # Several, separated by commas, are read one after the other.
    source: str = "builtin:python-docs"

    # Held-out text to evaluate on, written like the source. Unset: the end of the source is held out.
    validation_source: str | None = None

    # The share of the source, in characters from its end, that is held out if there is no validation source.
    validation_fraction: float = 0.1

    # The column (or TFDS feature) that holds the text, for sources that are tables.
    text_column: str = "text"

    # 'character' (one token a character), 'byte' (one token a byte), 'bpe' or 'wordpiece' (trained on the training
    # text), or the path of an existing tokenizer: a tokenizer.json, BERT's vocab.txt, or a directory with one of these
    # or with GPT-2's vocab.json and merges.txt. Masked language models need 'wordpiece' or a path.
    tokenizer: str = "bpe"

    # The number of tokens that 'bpe' (at least 257) and 'wordpiece' (at least 16) learn. Other tokenizers have their
    # own.
    vocab_size: int = 1024

    # Whether 'wordpiece' ignores case and accents. Other tokenizers have their own rule.
    lowercase: bool = True

    # Where prepared token ids are kept for the next run. Unset: transformers_jax/corpora in $XDG_CACHE_HOME (or
    # in ~/.cache).
    cache_dir: str | None = None

    def __post_init__(self):
        if not self.source.strip():
            raise ValueError("source is empty; name a text file, a glob, tfds:NAME or builtin:python-docs")
        if self.validation_source is not None and not self.validation_source.strip():
            raise ValueError("validation_source is empty; name some text, or leave it unset")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(f"validation_fraction is {self.validation_fraction}; it must be above 0 and below 1")
        if not self.tokenizer.strip():
            raise ValueError("tokenizer is empty; use character, byte, bpe, wordpiece or the path of one")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise ValueError(f"vocab_size is {self.vocab_size}; bpe needs at least 257 (256 bytes and the end of text)")
        if self.tokenizer == "wordpiece" and self.vocab_size < 16:
            raise ValueError(f"vocab_size is {self.vocab_size}; wordpiece needs at least 16 (five are special)")


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of a text, in two parts."""

    train: np.memmap
    """Ids to train on, one-dimensional, uint16 or (vocabularies above 65,536) uint32, read-only."""
    validation: np.memmap
    """Held-out ids, likewise."""
    tokenizer: Tokenizer
    fingerprint: str
    """SHA-256 of the text, the tokenizer and the split: equal for equal ids, wherever the text lies."""
    train_bytes: int
    """Length of the training text in UTF-8."""
    validation_bytes: int
    """Length of the held-out text in UTF-8."""
    validation_first_bytes: int
    """Bytes of the first held-out token, which no model predicts: bits per byte divide by
    `validation_bytes - validation_first_bytes`."""
    from_cache: bool
    """Whether the ids were found on disk."""


def prepare_corpus(data: TextData, *, tokenizer: Tokenizer | None = None) -> Corpus:
    """Tokenise the text of `data`, or find it tokenised, and map the ids into memory.

    The held-out part is `validation_source`, or the last `validation_fraction` of the characters of `source`, cut at
    `int(characters * (1 - validation_fraction))`. Within a part, documents are separated by the tokenizer's end-of-text
    id or, where there is none, by its separator (`separator_id`), if it has either; a single document has none. Empty
    documents are left out. BPE and WordPiece are trained on the training part alone (of more than 100 million
    characters, on as many in evenly spaced chunks); a character tokenizer has the characters of both parts, since it
    could not encode others.

    `tokenizer` replaces the one that `data` names: a run that continues passes the one it saved.

    The text is read a few times and never held in memory. The cache is keyed by the identity of the files (path, size,
    times), the split and the tokenizer's fingerprint; an entry appears whole or not at all, whatever is killed and
    however many processes prepare it at once. Raises `ValueError` or `FileNotFoundError` in one line.
    """
    source = open_text(data.source, text_column=data.text_column)
    held_out = None
    if data.validation_source is not None:
        held_out = open_text(data.validation_source, text_column=data.text_column)
    cache = Path(data.cache_dir).expanduser() if data.cache_dir else _default_cache()
    preparation = _Preparation(data, source, held_out)
    if tokenizer is None:
        tokenizer = _make_tokenizer(preparation, cache / "tokenizers")
    folder = cache / "corpora" / _digest([preparation.identity, tokenizer.fingerprint])
    for from_cache in (True, False, False):  # the last try: another process removed what it found damaged
        corpus = _open_corpus(folder, tokenizer, from_cache=from_cache)
        if corpus is not None:
            return corpus
        with _whole_folder(folder) as temporary:
            _write_corpus(preparation, tokenizer, temporary)
    raise ValueError(f"the token cache {folder} keeps disappearing; choose another cache_dir")


def separator_id(tokenizer: Tokenizer) -> int | None:
    """The id between two documents of a corpus."""
    return tokenizer.sep_id if tokenizer.eos_id is None else tokenizer.eos_id


def document_end(tokenizer: Tokenizer) -> int:
    """`separator_id`; ValueError where there is none, so that documents cannot be told apart."""
    separator = separator_id(tokenizer)
    if separator is None:
        raise ValueError(
            "the tokenizer has no token between documents, so that they cannot be packed; use data.tokenizer=bpe"
        )
    return separator


# Reading


@dataclasses.dataclass(frozen=True)
class _Scan:
    characters: int
    sha256: str
    alphabet: frozenset[str]


class _Preparation:
    """The text of one `TextData`, and what a first reading tells about it."""

    def __init__(self, data: TextData, source: TextSource, held_out: TextSource | None):
        self.data, self.source, self.held_out = data, source, held_out
        self.identity = self._identity()

    def _identity(self) -> list[Any]:
        split = self.data.validation_fraction if self.held_out is None else self.held_out.identity()
        return [FORMAT, self.source.identity(), split, self.data.text_column]

    def check_unchanged(self) -> None:
        if self._identity() != self.identity:
            raise ValueError(f"{self.source.name} changed while it was read; run again when it is complete")

    @functools.cached_property
    def scan(self) -> _Scan:
        return self._scan(self.source)

    @functools.cached_property
    def held_out_scan(self) -> _Scan | None:
        return None if self.held_out is None else self._scan(self.held_out)

    @functools.cached_property
    def cut(self) -> int:
        """The number of characters of the source that train."""
        characters = self.scan.characters
        if self.held_out is not None:
            return characters
        cut = int(characters * (1 - self.data.validation_fraction))
        if not 0 < cut < characters:
            raise ValueError(
                f"{self.source.name} has {characters} characters, too few to hold out "
                f"{self.data.validation_fraction} of them; use more text, or set validation_source"
            )
        return cut

    def train(self) -> Documents:
        return _between(self.source.documents(), 0, self.cut)

    def validation(self) -> Documents:
        if self.held_out is not None:
            return self.held_out.documents()
        return _between(self.source.documents(), self.cut, self.scan.characters)

    def _scan(self, source: TextSource) -> _Scan:
        content = hashlib.sha256()
        characters = 0
        alphabet = np.zeros(0x110000 if self.data.tokenizer == "character" else 0, bool)
        with _progress("reading", None) as advance:
            for document in source.documents():
                for number, piece in enumerate(filter(None, document)):
                    if number == 0:
                        content.update(b"\xff")  # no byte of UTF-8: marks the border of two documents
                    content.update(piece.encode())
                    characters += len(piece)
                    if len(alphabet):
                        alphabet[np.frombuffer(piece.encode("utf-32-le"), np.uint32)] = True
                    advance(len(piece))
        if not characters:
            raise ValueError(f"{source.name} holds no text")
        return _Scan(characters, content.hexdigest(), frozenset(map(chr, np.flatnonzero(alphabet))))


def _between(documents: Documents, start: int, stop: int) -> Documents:
    """The characters from `start` to before `stop`. Documents before are empty; each must be read before the next."""
    position = 0

    def part(document: Iterator[str]) -> Iterator[str]:
        nonlocal position
        for piece in document:
            yield piece[max(start - position, 0) : max(stop - position, 0)]
            position += len(piece)
            if position >= stop:
                return

    for document in documents:
        if position >= stop:
            return
        yield part(document)


# Tokenising


def _make_tokenizer(preparation: _Preparation, cache: Path) -> Tokenizer:
    data = preparation.data
    if data.tokenizer == "byte":
        return Tokenizer.byte()
    settings = {"character": [], "bpe": [data.vocab_size], "wordpiece": [data.vocab_size, data.lowercase]}
    if data.tokenizer not in settings:
        return Tokenizer.load(data.tokenizer)
    folder = cache / _digest([preparation.identity, data.tokenizer, *settings[data.tokenizer]])
    if folder.exists():
        try:
            return Tokenizer.load(folder)
        except (ValueError, OSError):
            _discard(folder)
    if data.tokenizer == "character":
        scans = [scan for scan in (preparation.scan, preparation.held_out_scan) if scan is not None]
        tokenizer = Tokenizer.character(sorted(frozenset().union(*(scan.alphabet for scan in scans))))
    else:
        with _progress("training the tokenizer", preparation.cut) as advance:

            def texts() -> Iterator[str]:
                every = -(-preparation.cut // LEARNT_CHARACTERS)
                number = 0
                for document in preparation.train():
                    for chunk in split_text(document, size=CHUNK_CHARACTERS, cuts="words"):
                        advance(len(chunk))
                        if number % every == 0:
                            yield chunk
                        number += 1

            if data.tokenizer == "bpe":
                tokenizer = Tokenizer.train_bpe(texts(), vocab_size=data.vocab_size)
            else:
                tokenizer = Tokenizer.train_wordpiece(texts(), vocab_size=data.vocab_size, lowercase=data.lowercase)
    with _whole_folder(folder) as temporary:
        tokenizer.save(temporary)
        preparation.check_unchanged()
    return tokenizer


def _write_corpus(preparation: _Preparation, tokenizer: Tokenizer, folder: Path) -> None:
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    scan, held_out = preparation.scan, preparation.held_out_scan
    total = scan.characters + (held_out.characters if held_out else 0)
    sizes = {}
    with _progress("tokenising", total) as advance:
        for part, documents in (("train", preparation.train()), ("validation", preparation.validation())):
            sizes[part] = _write_ids(folder / f"{part}.bin", documents, tokenizer, dtype, advance)
    preparation.check_unchanged()
    first = int(np.fromfile(folder / "validation.bin", dtype, count=1)[0])
    split = preparation.cut if held_out is None else held_out.sha256
    description = {
        "source": preparation.source.name,
        "fingerprint": _digest([scan.sha256, split, tokenizer.fingerprint]),
        "dtype": np.dtype(dtype).name,
        "train_tokens": sizes["train"][0],
        "train_bytes": sizes["train"][1],
        "validation_tokens": sizes["validation"][0],
        "validation_bytes": sizes["validation"][1],
        "validation_first_bytes": len(tokenizer.token_bytes(first)),
    }
    (folder / "corpus.json").write_text(json.dumps(description, indent=2), encoding="utf-8")


def _write_ids(
    path: Path, documents: Documents, tokenizer: Tokenizer, dtype: type, advance: Callable[[int], None]
) -> tuple[int, int]:
    """Write the ids of one part; returns the number of tokens and of bytes of text."""
    tokens = size = 0
    between = separator_id(tokenizer)
    separator = np.array([] if between is None else [between], dtype)
    with path.open("wb") as file:
        for batch in _batches(documents, tokenizer):
            for (begins, text), ids in zip(batch, tokenizer.encode_arrays([text for _, text in batch]), strict=True):
                if begins and tokens:
                    separator.tofile(file)
                    tokens += len(separator)
                ids.astype(dtype).tofile(file)
                tokens += len(ids)
                size += len(text.encode())
                advance(len(text))
    if not tokens:
        raise ValueError(f"the tokenizer makes no token of the {path.stem} text; use another tokenizer")
    return tokens, size


def _batches(documents: Documents, tokenizer: Tokenizer) -> Iterator[list[tuple[bool, str]]]:
    """Chunks that can be tokenised one by one, each with whether it begins a document, many at a time."""
    batch, length = [], 0
    for document in documents:
        for number, chunk in enumerate(split_text(document, size=CHUNK_CHARACTERS, cuts=tokenizer.cuts)):
            batch.append((number == 0, chunk))
            length += len(chunk)
            if length >= BATCH_CHARACTERS:
                yield batch
                batch, length = [], 0
    if batch:
        yield batch


# The cache


def _default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "transformers_jax" / "corpora"


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _open_corpus(folder: Path, tokenizer: Tokenizer, *, from_cache: bool) -> Corpus | None:
    """The corpus in `folder`; None if there is none. A damaged one is removed."""
    if not folder.exists():
        return None
    try:
        about = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        dtype = np.dtype(about["dtype"])
        parts = {}
        for part in ("train", "validation"):
            path, tokens = folder / f"{part}.bin", about[f"{part}_tokens"]
            if path.stat().st_size != tokens * dtype.itemsize:
                raise ValueError(f"{path} has {path.stat().st_size} bytes, not {tokens * dtype.itemsize}")
            parts[part] = np.memmap(path, dtype, mode="r", shape=(tokens,))
        numbers = {name: about[name] for name in ("train_bytes", "validation_bytes", "validation_first_bytes")}
        return Corpus(**parts, **numbers, tokenizer=tokenizer, fingerprint=about["fingerprint"], from_cache=from_cache)
    except (ValueError, KeyError, TypeError, OSError) as error:
        warnings.warn(f"the token cache {folder} is damaged and made anew ({error})", stacklevel=3)
        _discard(folder)
        return None


@contextlib.contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder that becomes `target` in one step at the end, unless another process was faster."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent)
        temporary = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"cannot write to the cache {target.parent} ({error.strerror}); set cache_dir") from None
    try:
        yield temporary
        for path in temporary.iterdir():  # a power failure must not leave the name without the content
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Remove a folder so that nobody sees half of it."""
    with contextlib.suppress(OSError):  # another process may be doing the same
        unfinished = folder.with_name(f".unfinished-{os.getpid()}-{folder.name}")
        folder.rename(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed processes left behind: unfinished folders that nothing was written to for a day."""
    for folder in parent.glob(".unfinished-*"):
        with contextlib.suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a bar while it is open, on terminals only; the function yielded takes the characters done."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda characters: None
        return
    amount = TextColumn("{task.fields[millions]:.1f} million characters")
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total, millions=0.0)
        done = 0

        def advance(characters: int) -> None:
            nonlocal done
            done += characters
            progress.update(task, completed=done, millions=done / 1e6)

        yield advance
