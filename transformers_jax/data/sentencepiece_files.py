"""Models of sentencepiece, read by the library itself, which is an extra."""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

UNIGRAM = 1  # of sentencepiece's TrainerSpec.ModelType


def import_sentencepiece() -> ModuleType:
    """The library, or an ImportError that says how to install it."""
    try:
        import sentencepiece
    except ImportError:
        raise ImportError(
            "models of sentencepiece need the extra `sentencepiece`: pip install 'transformers-jax[sentencepiece]'"
        ) from None
    return sentencepiece


@dataclass(frozen=True)
class Unigram:
    """What T5's tokenizers take from a model of sentencepiece."""

    vocab: list[tuple[str, float]]
    """Pieces and their log-probabilities, in the order of their ids."""
    charsmap: bytes | None
    """The compiled normaliser."""
    control: list[str]
    """Pieces that no text becomes."""
    whole: list[str]
    """Pieces that are never cut."""


def read_unigram(path: Path) -> Unigram:
    """Raises `ValueError` for what is no unigram model that begins with `<pad>`, `</s>`, `<unk>`, as those of T5 do."""
    import_sentencepiece()
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:
        raise ValueError(f"{path} is not a sentencepiece model ({error})") from None
    if model.trainer_spec.model_type != UNIGRAM:
        raise ValueError(f"{path} is not a unigram model, as those of T5 are")
    vocab = [(piece.piece, piece.score) for piece in model.pieces]
    if [piece for piece, _ in vocab[:3]] != ["<pad>", "</s>", "<unk>"]:
        raise ValueError(f"{path} is not a model of T5: it begins with {[piece for piece, _ in vocab[:3]]}")
    control = [piece.piece for piece in model.pieces if piece.type == piece.CONTROL]
    whole = [piece.piece for piece in model.pieces if piece.type == piece.USER_DEFINED]
    return Unigram(vocab, model.normalizer_spec.precompiled_charsmap or None, control, whole)


def read_model(path: Path) -> bytes:
    """The content of a sentencepiece model. Raises `ValueError` for a file that is none."""
    content = path.read_bytes()
    try:
        import_sentencepiece().SentencePieceProcessor().LoadFromSerializedProto(content)
    except RuntimeError as error:
        raise ValueError(f"{path} is not a sentencepiece model ({error})") from None
    return content


@dataclass(frozen=True, eq=False)
class MarianPieces:
    """Marian's way between texts and ids: sentencepiece cuts, and a vocabulary of its own gives the ids.

    A text may begin with one token in `>>` and `<<`, the language to translate to.
    """

    model: bytes
    vocab: Mapping[str, int]
    specials: frozenset[str]
    unknown: int

    @functools.cached_property
    def processor(self) -> Any:
        return import_sentencepiece().SentencePieceProcessor(model_proto=self.model)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        split = [_language_code(text) for text in texts]
        cut = self.processor.encode([rest for _, rest in split], out_type=str)
        return [self._ids([*codes, *pieces]) for (codes, _), pieces in zip(split, cut, strict=True)]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Ids, and where each piece begins and ends in the text."""
        from sentencepiece import sentencepiece_pb2

        codes, rest = _language_code(text)
        start = len(text) - len(rest)
        parsed: Any = sentencepiece_pb2.SentencePieceText()  # pyright: ignore[reportAttributeAccessIssue]
        parsed.ParseFromString(self.processor.encode(rest, out_type="serialized_proto"))
        ids = self._ids([*codes, *(piece.piece for piece in parsed.pieces)])
        # sentencepiece counts bytes.
        places = np.cumsum([0, *(byte & 0xC0 != 0x80 for byte in rest.encode())])
        spans = [(int(places[piece.begin]), int(places[piece.end])) for piece in parsed.pieces]
        return ids, [(0, start)] * len(codes) + [(start + begin, start + end) for begin, end in spans]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = [token for token in map(self._tokens.get, ids) if token is not None]
        parts = [
            "".join(f"{token} " for token in run) if special else self.processor.decode_pieces(list(run))
            for special, run in itertools.groupby(tokens, key=self.specials.__contains__)
        ]
        return "".join(parts).replace("▁", " ").strip()

    def _ids(self, pieces: Sequence[str]) -> np.ndarray:
        # What sentencepiece does not know is its own piece, which may be spelt like a special token.
        return np.array([self._pieces.get(piece, self.unknown) for piece in pieces], np.uint32)

    @functools.cached_property
    def _pieces(self) -> dict[str, int]:
        return {piece: i for piece, i in self.vocab.items() if piece not in self.specials}

    @functools.cached_property
    def _tokens(self) -> dict[int, str]:
        return {i: token for token, i in self.vocab.items()}


def _language_code(text: str) -> tuple[list[str], str]:
    end = text.find("<<") + 2 if text.startswith(">>") else 0
    return ([text[:end]], text[end:]) if end > 1 else ([], text)
