"""What an evaluation leaves for a person to look at: tables, lines of JSON, contact sheets."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from transformers_jax.tasks.metrics import need


def write_jsonl(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def write_confusion_matrix(path: Path, labels: np.ndarray, predicted: np.ndarray, names: Sequence[str]) -> None:
    """A table whose rows are true classes and whose columns are predicted ones."""
    matrix = need("sklearn.metrics").confusion_matrix(labels, predicted, labels=range(len(names)))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true \\ predicted", *names])
        writer.writerows([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))


def contact_sheet(
    pictures: Sequence[Image.Image], captions: Sequence[str], *, columns: int = 8, side: int = 128
) -> Image.Image:
    """Thumbnails of `side` pixels with a caption below each."""
    columns = min(columns, len(pictures))
    line, gap = 14, 6
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * (side + gap) + gap, rows * (side + line + gap) + gap), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = gap + number % columns * (side + gap), gap + number // columns * (side + line + gap)
        # Small pictures keep their pixels visible.
        scale = side / max(picture.size)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        thumbnail = picture.convert("RGB").resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BOX)
        sheet.paste(thumbnail, (x + (side - size[0]) // 2, y + (side - size[1]) // 2))
        draw.text((x, y + side), _fitting(caption, side, font), fill="black", font=font)
    return sheet


def _fitting(text: str, width: int, font: Any) -> str:
    """As much of a text as fits."""
    while len(text) > 2 and font.getlength(text) > width:
        text = text[:-3] + ".."
    return text
