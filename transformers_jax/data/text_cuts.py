"""Long texts in chunks whose ids, one after the other, are those of the whole."""

import re
from collections.abc import Iterable, Iterator
from typing import Literal

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
