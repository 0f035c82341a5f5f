"""The files of tokenizers: Hugging Face's own, GPT-2's and RoBERTa's pairs, WordPiece's vocabulary, T5's and Marian's
sentencepiece models. `Tokenizer.load` says which is read when."""

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, processors

from transformers_jax.data.sentencepiece_files import read_model, read_unigram
from transformers_jax.data.tokenizer_schemes import (
    BERT,
    GPT2,
    MARIAN,
    ROBERTA,
    SPECIAL_NAMES,
    SPECIAL_TOKENS,
    SUBWORD_TOKENS,
    T5,
    add_special_tokens,
    byte_level,
    follow_config,
    named,
    t5,
    token_text,
    wordpiece,
)

FILE_SETS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"), ("vocab.txt",), ("spiece.model",))
SOURCE_MODEL, TARGET_MODEL, VOCAB, TARGET_VOCAB = "source.spm", "target.spm", "vocab.json", "target_vocab.json"
CONFIG, SPECIALS_MAP, BACKEND = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"

Read = tuple[tokenizers.Tokenizer, dict[str, Any]]


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory / SPECIALS_MAP) | read_json(directory / CONFIG)


def read_tokenizer(path: Path) -> Read:
    """The tokenizer in a directory, or that of one of its files, and its configuration."""
    directory = path if path.is_dir() else path.parent
    set_of = {name: names for names in FILE_SETS for name in names}
    if path.is_dir():
        file, sets = directory / BACKEND, FILE_SETS
    elif path.suffix in (".txt", ".model") or path.name in set_of:
        file, sets = None, (set_of.get(path.name, (path.name,)),)
    else:
        file, sets = path, ()
    config = read_config(directory)
    if file is not None and file.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            raise ValueError(f"{file} is not a tokenizer.json of Hugging Face tokenizers ({error})") from None
        backend = _rebuilt_t5(backend) if _family(config) == T5 else backend
        follow_config(backend, config)
    else:
        for names in sets:
            if all((directory / name).is_file() for name in names):
                break
        else:
            wanted = " or ".join([BACKEND] * path.is_dir() + [" + ".join(names) for names in sets])
            raise FileNotFoundError(f"no tokenizer in {directory}: {wanted} is needed")
        backend = _read_files([directory / name for name in names], config)
        file = None
    family, special_names = _special_names(backend, config)
    config = special_names | config
    add_special_tokens(backend, config)
    ends = [(token, backend.token_to_id(token) or 0) for token in named(config, "sep_token", "cls_token")]
    if family == ROBERTA and len(ends) == 2 and isinstance(backend.post_processor, processors.ByteLevel | None):
        adds = bool(config.get("add_prefix_space", False))
        backend.post_processor = processors.RobertaProcessing(ends[0], ends[1], add_prefix_space=adds)
    if file is None:
        kinds = {models.WordPiece: BERT, models.Unigram: T5}
        default_class = kinds.get(type(backend.model), ROBERTA if family == ROBERTA else GPT2)
    else:
        default_class = "PreTrainedTokenizerFast"
    return backend, {"tokenizer_class": default_class} | config


def read_marian(directory: Path) -> tuple[Read, Read | None, bytes, bytes]:
    """Marian's vocabulary and configuration, those of the target where they are others, and the two models."""
    needed = [SOURCE_MODEL, TARGET_MODEL, VOCAB]
    config = {"tokenizer_class": MARIAN} | SUBWORD_TOKENS | read_config(directory)
    if config.get("separate_vocabs"):
        needed.append(TARGET_VOCAB)
    if missing := [name for name in needed if not (directory / name).is_file()]:
        raise FileNotFoundError(f"no tokenizer of Marian in {directory}: {', '.join(missing)} is missing")
    first, *other = ((_words(directory / name, config), config) for name in needed[2:])
    source, target = (read_model(directory / name) for name in needed[:2])
    return first, other[0] if other else None, source, target


def _words(file: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    vocab, unknown = read_json(file), token_text(config["unk_token"])
    if not all(isinstance(i, int) and i >= 0 for i in vocab.values()):
        raise ValueError(f"{file} is not a vocabulary: an object of tokens and their ids")
    if unknown not in vocab:
        raise ValueError(f"{file} is not a vocabulary of Marian: {unknown} is not in it")
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=unknown))
    add_special_tokens(backend, config)
    return backend


def _read_files(files: Sequence[Path], config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of `vocab.txt`, or of a vocabulary and its merges."""
    if len(files) == 2:
        vocab, merges = files
        try:
            model = models.BPE.from_file(str(vocab), str(merges))
        except Exception as error:
            raise ValueError(f"{vocab} and {merges.name} are not the files of a BPE ({error})") from None
        return byte_level(model, add_prefix_space=bool(config.get("add_prefix_space", False)))
    (vocab,) = files
    if vocab.suffix == ".model":
        model = read_unigram(vocab)
        known = {piece for piece, _ in model.vocab}
        sentinels = [f"<extra_id_{i}>" for i in reversed(range(config.get("extra_ids", 100)))]
        backend = t5(model.vocab + [(token, 0.0) for token in sentinels if token not in known], model.charsmap)
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in model.control + sentinels])
        backend.add_tokens([AddedToken(piece, normalized=False) for piece in model.whole])
        return backend
    unknown = token_text(config.get("unk_token")) or "[UNK]"
    try:
        model = models.WordPiece.from_file(str(vocab), unk_token=unknown)
    except Exception as error:
        raise ValueError(f"{vocab} is not the vocabulary of a WordPiece tokenizer ({error})") from None
    if model.token_to_id(unknown) is None:
        raise ValueError(f"{vocab} is not the vocabulary of a WordPiece tokenizer: no line of it is {unknown}")
    return wordpiece(model, config)


def _rebuilt_t5(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """T5's scheme with the pieces and the normaliser of this one, which is all that transformers takes from it."""
    layout = json.loads(backend.to_str())
    if layout["model"]["type"] != "Unigram":
        raise ValueError(f"a tokenizer of T5 has a Unigram model, not {layout['model']['type']}")
    normalizer = layout["normalizer"] or {}
    maps = [
        base64.b64decode(part["precompiled_charsmap"])
        for part in normalizer.get("normalizers", [normalizer])
        if part.get("type") == "Precompiled"
    ]
    vocab = [(piece, score) for piece, score in layout["model"]["vocab"]]
    rebuilt = t5(vocab, maps[0] if maps else None)
    added = backend.get_added_tokens_decoder()
    rebuilt.add_tokens([added[i] for i in sorted(added)])  # marks of special ones are kept
    sentinels = (piece for piece, _ in vocab if re.fullmatch(r"<extra_id_\d+>", piece))
    rebuilt.add_special_tokens([AddedToken(token, normalized=False) for token in sentinels])
    return rebuilt


def _family(config: dict[str, Any]) -> str:
    family = str(config.get("tokenizer_class")).removesuffix("Fast")
    known = {"DistilBertTokenizer": BERT, "ElectraTokenizer": BERT, "MT5Tokenizer": T5}
    return known.get(family, family)


def _special_names(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[str | None, dict[str, str]]:
    """Whose conventions the tokenizer follows, and the names of special tokens that follow from them."""
    family = _family(config)
    if family in (BERT, ROBERTA, T5):
        return family, SPECIAL_TOKENS[family]
    if not any(name in config for name in SPECIAL_NAMES):
        for family, names in SPECIAL_TOKENS.items():
            if all(backend.token_to_id(token) is not None for token in names.values()):
                return family, names
    return None, {}


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content
