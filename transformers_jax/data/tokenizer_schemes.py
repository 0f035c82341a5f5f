"""The schemes of known tokenizers, put together from parts of Hugging Face `tokenizers`, and their special tokens."""

import json
import re
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

END_OF_TEXT = "<|endoftext|>"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
ANY_CHARACTER = r"[\s\S]"
# What a tokenizer of this class calls its special tokens where its configuration does not say.
BERT, ROBERTA, GPT2 = "BertTokenizer", "RobertaTokenizer", "GPT2Tokenizer"
T5, MARIAN = "T5Tokenizer", "MarianTokenizer"
SUBWORD_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
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
    T5: SUBWORD_TOKENS,
}


def _byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`)."""
    symbols = [chr(byte) if chr(byte).isprintable() and not chr(byte).isspace() else "" for byte in range(256)]
    extra = iter(range(256, 512))
    return [symbol or chr(next(extra)) for symbol in symbols]


BYTE_SYMBOLS = _byte_symbols()
SYMBOL_BYTES = {symbol: byte for byte, symbol in enumerate(BYTE_SYMBOLS)}


def characters(vocab: dict[str, int]) -> tokenizers.Tokenizer:
    # Without an unknown token in the vocabulary this model refuses other characters; a BPE would drop them.
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(ANY_CHARACTER), "isolated")
    backend.decoder = decoders.Fuse()
    return backend


def byte_level(model: models.Model, *, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    if backend.token_to_id(END_OF_TEXT) is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False)])
    return backend


def gpt2_config() -> dict[str, Any]:
    names = ("bos_token", "eos_token", "unk_token")
    return {"tokenizer_class": GPT2, "add_prefix_space": False} | dict.fromkeys(names, END_OF_TEXT)


def wordpiece(model: models.Model, config: dict[str, Any]) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    follow_config(backend, config)
    return backend


def subword(model: models.Model) -> tokenizers.Tokenizer:
    """Pieces of words that say where blanks were, as sentencepiece's `nmt_nfkc` does: blanks and control characters of
    every kind are one blank, those at the ends none."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence(
        [
            normalizers.Nmt(),
            normalizers.NFKC(),
            normalizers.Replace("▁", " "),  # what stands for a blank is one
            normalizers.Replace(Regex(" {2,}"), " "),
            normalizers.Strip(),
        ]
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    split_lookalikes(backend, list(SUBWORD_TOKENS.values()))
    return backend


def t5(vocab: list[tuple[str, float]], charsmap: bytes | None) -> tokenizers.Tokenizer:
    """T5's pieces and log-probabilities, with the normaliser that sentencepiece compiled."""
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=2))
    if charsmap:
        backend.normalizer = normalizers.Precompiled(charsmap)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    backend.decoder = decoders.Metaspace()
    end_with(backend, "</s>")
    return backend


def split_lookalikes(backend: tokenizers.Tokenizer, specials: Sequence[str]) -> None:
    """Cut words within what is spelt like a special token, once: a vocabulary that has the special tokens among its
    pieces would find them there."""
    alike = "|".join(f"{re.escape(token[0])}(?={re.escape(token[1:])})" for token in sorted(specials))
    before = json.loads(backend.to_str())["pre_tokenizer"] or {}
    if any(part.get("pattern") == {"Regex": alike} for part in before.get("pretokenizers", [])):
        return
    split = pre_tokenizers.Split(Regex(alike), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([backend.pre_tokenizer, split] if before else [split])


def end_with(backend: tokenizers.Tokenizer, token: str) -> None:
    """What `transformers` adds to a text, or to each of two, as T5 does."""
    ends = [(token, backend.token_to_id(token) or 0)]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {token}", pair=f"$A {token} $B:1 {token}:1", special_tokens=ends
    )


def follow_config(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
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


def token_text(token: Any) -> str | None:
    """`tokenizer_config.json` names a token by its text or by a description that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def named(config: dict[str, Any], *names: str) -> list[str]:
    return [token for token in (token_text(config.get(name)) for name in names) if token]


def add_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    described = config.get("added_tokens_decoder") or {}
    names = [token_text(described[token_id]) for token_id in sorted(described, key=int)]
    special = {token_text(token) for token in described.values() if token.get("special", True)}
    names += named(config, *SPECIAL_NAMES)
    special.update(named(config, *SPECIAL_NAMES))
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in dict.fromkeys(name for name in names if name and name not in known):
        if token in special:
            backend.add_special_tokens([AddedToken(token, normalized=False)])
        elif backend.token_to_id(token) is None:
            backend.add_tokens([AddedToken(token, normalized=False)])
