"""The command `patterns`: draws which keys the queries of attention patterns may look at, as text and as a picture."""

import dataclasses

import numpy as np
import tyro
from PIL import Image, ImageDraw
from rich.console import Console

from transformers_jax.arguments import parse
from transformers_jax.nn import Pattern, parse_pattern
from transformers_jax.nn.blockwise import plan
from transformers_jax.nn.kernels import SHORTEST_BY_BLOCKS

SHADES = "·░▒▓█"
CELL, MARGIN = 12, 24
"""Pixels of a place and around a matrix, in a picture."""
SEEN, UNSEEN, LINE = (38, 84, 160), (238, 240, 244), (255, 255, 255)


@dataclasses.dataclass(frozen=True)
class Patterns:
    """Draw attention patterns: which keys (columns) each query (row) may look at.

    transformers-jax patterns "causal" "causal & local(4)" "local(2, dilation=3) | global(2)" --output patterns.png
    """

    patterns: tyro.conf.Positional[tuple[str, ...]]
    """What to draw: full, causal, local(window, dilation=1), strided(stride), global(tokens), random(blocks, length,
    block=64, seed=0), combined by & and |."""
    length: int = 24
    """Places in the sequence."""
    width: int = 64
    """Columns of the drawing in text; of longer sequences each stands for several places."""
    output: str | None = None
    """A PNG to write."""
    debug: bool = False
    """Show the whole traceback of an error."""


def patterns_command(arguments: list[str]) -> int:
    command = parse(Patterns, arguments, "patterns")
    if not command.patterns:
        raise ValueError('no pattern is given, such as "causal & local(4)"')
    if command.length < 1 or command.width < 1:
        raise ValueError(f"--length {command.length} and --width {command.width} must be at least 1")
    patterns = [parse_pattern(text) for text in command.patterns]
    for pattern in patterns:
        pattern.check(command.length)
    console = Console(highlight=False)
    for pattern in patterns:
        console.print(f"{pattern}: {describe(pattern, command.length)}", soft_wrap=True)
        console.print(as_text(pattern, command.length, command.width), soft_wrap=True)
        console.print()
    if command.output is not None:
        as_picture(patterns, command.length).save(command.output, format="PNG")
        console.print(f"{command.output}: {len(patterns)} matrices of {command.length} x {command.length}")
    return 0


def describe(pattern: Pattern, length: int) -> str:
    """How much a query sees, and what computing that by blocks costs."""
    mask = matrix(pattern, length)
    parts = [f"{mask.sum() / length:,.1f} keys a query, {mask.mean():.1%} of all"]
    parts.append("causal" if pattern.causal else "sees both sides")
    if pattern.reach is not None:
        parts.append(f"looks back {pattern.reach:,} at most")
    if blind := int((~mask.any(axis=1)).sum()):
        parts.append(f"{blind} queries see nothing")
    if length >= SHORTEST_BY_BLOCKS:
        parts.append(f"by blocks {plan(pattern, length, length).cost / length**2:.1%} of the dense computation")
    return "; ".join(parts)


def matrix(pattern: Pattern, length: int) -> np.ndarray:
    """(queries, keys) bool."""
    indices = np.arange(length)
    return np.broadcast_to(pattern.allows(indices[:, None], indices[None, :]), (length, length))


def as_text(pattern: Pattern, length: int, width: int) -> str:
    """A line for each query, a character for each key; for several of them where there are more than `width`, the
    darker the more is seen."""
    step = -(-length // width)
    count = -(-length // step)
    filled = np.pad(matrix(pattern, length).astype(float), (0, count * step - length), constant_values=np.nan)
    shares = np.nanmean(filled.reshape(count, step, count, step), axis=(1, 3))
    shades = np.ceil(shares * (len(SHADES) - 1)).astype(int)
    return "\n".join("".join(SHADES[shade] for shade in row) for row in shades)


def as_picture(patterns: list[Pattern], length: int) -> Image.Image:
    """The matrices side by side, each under its name."""
    cell = max(1, min(CELL, 1024 // length))
    side = cell * length
    names = [str(pattern) for pattern in patterns]
    width = max(side, *(int(ImageDraw.Draw(Image.new("RGB", (1, 1))).textlength(name)) for name in names))
    picture = Image.new("RGB", ((width + MARGIN) * len(patterns) + MARGIN, side + 3 * MARGIN), LINE)
    draw = ImageDraw.Draw(picture)
    for number, (pattern, name) in enumerate(zip(patterns, names, strict=True)):
        left, top = MARGIN + number * (width + MARGIN), 2 * MARGIN
        draw.text((left, MARGIN), name, fill=(0, 0, 0))
        colours = np.where(matrix(pattern, length)[..., None], np.array(SEEN, np.uint8), np.array(UNSEEN, np.uint8))
        pixels = colours.repeat(cell, axis=0).repeat(cell, axis=1)
        if cell > 2:  # a thin line between the places
            pixels[::cell] = LINE
            pixels[:, ::cell] = LINE
        picture.paste(Image.fromarray(pixels), (left, top))
    return picture
