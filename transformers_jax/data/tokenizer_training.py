"""Vocabularies learned from text, and those that need no learning: each a tokenizer and its configuration.

`Tokenizer` has them as class methods, which say what they promise.
"""

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from transformers_jax.data.sentencepiece_files import import_sentencepiece
from transformers_jax.data.tokenizer_schemes import (
    BERT,
    BYTE_SYMBOLS,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    SUBWORD_TOKENS,
    add_special_tokens,
    byte_level,
    characters,
    end_with,
    gpt2_config,
    subword,
    wordpiece,
)

Made = tuple[tokenizers.Tokenizer, dict[str, Any]]


def make_character(text: Iterable[str]) -> Made:
    found = sorted(set(text) if isinstance(text, str) else set(itertools.chain.from_iterable(text)))
    if not found:
        raise ValueError("a character tokenizer needs at least one character of text")
    vocab = {character: i for i, character in enumerate(found)}
    return characters(vocab), {"tokenizer_class": "PreTrainedTokenizerFast"}


def make_byte() -> Made:
    vocab = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)} | {END_OF_TEXT: 256}
    return byte_level(models.BPE(vocab=vocab, merges=[])), gpt2_config()


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Made:
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}, but 256 bytes and {END_OF_TEXT} need at least 257")
    backend = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend, gpt2_config()


def train_wordpiece(texts: Iterable[str], *, vocab_size: int, lowercase: bool) -> Made:
    if vocab_size < 16:
        raise ValueError(f"vocab_size is {vocab_size}, but five special tokens and some characters need at least 16")
    specials = list(SPECIAL_TOKENS[BERT].values())
    config = {"do_lower_case": lowercase, "strip_accents": None, "tokenize_chinese_chars": True}
    backend = wordpiece(models.WordPiece(unk_token="[UNK]"), config)
    texts = texts if isinstance(texts, Sequence) else list(texts)
    alphabet = _alphabet(texts, backend.normalizer, limit=vocab_size // 4)
    if not alphabet:
        raise ValueError("a WordPiece tokenizer needs at least one character of text")

    def train(vocab_size: int, first: list[str]) -> list[str]:
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=first,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        vocab = backend.get_vocab()
        return sorted(vocab, key=lambda token: vocab[token])

    # The trainer meets words in random order and numbers the characters inside them as it goes, and these numbers
    # decide between equally frequent pieces: it is told their order, which a training without pieces shows.
    inside = sorted(token for token in train(0, specials) if len(token) == 3 and token.startswith("##"))
    vocab = {token: i for i, token in enumerate(train(vocab_size, specials + inside))}
    backend = wordpiece(models.WordPiece(vocab=vocab, unk_token="[UNK]"), config)
    config = {"tokenizer_class": BERT} | config | SPECIAL_TOKENS[BERT]
    add_special_tokens(backend, config)
    return backend, config


def train_subword(texts: Iterable[str], *, vocab_size: int, kind: str) -> Made:
    if kind not in ("bpe", "unigram"):
        raise ValueError(f"kind is {kind!r}; use bpe or unigram")
    if vocab_size < 16:
        raise ValueError(f"vocab_size is {vocab_size}, but three special tokens and some characters need at least 16")
    specials = list(SUBWORD_TOKENS.values())
    backend = subword(models.BPE(unk_token="<unk>", fuse_unk=True))
    texts = texts if isinstance(texts, Sequence) else list(texts)
    alphabet = _alphabet(texts, backend.normalizer, limit=vocab_size // 4)
    alphabet = [character for character in alphabet if character != "▅"]  # sentencepiece's trainer has it for itself
    if not alphabet:
        raise ValueError("a subword tokenizer needs at least one character of text")
    if kind == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=specials,
            initial_alphabet=["▁", *alphabet],
            limit_alphabet=len(alphabet) + 1,
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
    else:
        normal = (backend.normalizer.normalize_str(text) for text in texts)
        backend = subword(models.Unigram(_train_unigram(normal, alphabet, vocab_size), unk_id=2))
    end_with(backend, "</s>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | SUBWORD_TOKENS
    add_special_tokens(backend, config)
    return backend, config


def _train_unigram(texts: Iterable[str], alphabet: Sequence[str], vocab_size: int) -> list[tuple[str, float]]:
    """Pieces and their log-probabilities, the special tokens first.

    By sentencepiece's own trainer: that of `tokenizers` adds in random order, and rounding then decides on the order of
    pieces.
    """
    sentencepiece = import_sentencepiece()
    kept, model = {*alphabet, " "}, io.BytesIO()
    # Named as nothing in a normalised text is: the trainer learns nothing from what is spelt like them.
    names = {f"{token.partition('_')[0]}_piece": f"▁▁{i}" for i, token in enumerate(SUBWORD_TOKENS)}
    sentencepiece.SentencePieceTrainer.train(
        # Characters outside the alphabet end a word here.
        sentence_iterator=("".join(c if c in kept else " " for c in text) for text in texts),
        model_writer=model,
        model_type="unigram",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        character_coverage=1.0,
        normalization_rule_name="identity",
        max_sentence_length=1 << 30,
        num_threads=1,  # one order of adding on every machine
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        **names,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    specials = [(token, 0.0) for token in SUBWORD_TOKENS.values()]
    learned = range(len(specials), processor.vocab_size())
    return specials + [(processor.id_to_piece(i), processor.get_score(i)) for i in learned]


def _alphabet(texts: Iterable[str], normalizer: normalizers.Normalizer, *, limit: int) -> list[str]:
    """The `limit` most frequent characters of normalised texts, in sorted order, without blanks."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(normalizer.normalize_str(text))
    return sorted(sorted((c for c in counts if not c.isspace()), key=lambda c: (-counts[c], c))[:limit])
