"""What the tasks share that are given pictures."""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grain
import numpy as np
from PIL import Image

from transformers_jax.data.image_examples import Inputs, PrepareImage
from transformers_jax.data.image_files import SUFFIXES, check_image, show_path
from transformers_jax.tasks.base import Features, Row, Task


class ImageTask(Task):
    """Base of these tasks: where the pictures are to predict from, and how predictions name them. A subclass defines
    `prediction`."""

    input_columns: ClassVar[tuple[str, ...]] = ("image",)

    def input_files(self, name: str) -> list[str] | None:
        """The pictures in a directory (and below it) or of a glob, or the one; None for a file that lists inputs."""
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(str(file) for file in path.rglob("*") if _is_picture(file, below=path))
            if not found:
                raise FileNotFoundError(f"there is no picture in the directory {name}")
            return found
        if _is_picture(path):
            return [str(path)]
        if not path.exists() and glob.has_magic(name):
            return sorted(file for file in glob.glob(str(path), recursive=True) if _is_picture(Path(file))) or None
        return None

    def located(self, value: Any, folder: Path) -> Any:
        """An input that a file in `folder` names: its path, if relative, starts there."""
        if isinstance(value, Mapping):
            return {**value, "image": self.located(value.get("image"), folder)}
        return str(folder / Path(value).expanduser()) if isinstance(value, str) else value

    def check_input(self, value: Any, processor: Any, where: str, *, full: bool = False) -> None:
        image = _read_input(value, where)
        if isinstance(image, str | os.PathLike) and image != where:
            where = f"{where} ({show_path(os.fspath(image))})"
        if not full:
            check_image(image, channels=processor.channels, where=where)
            return
        inputs = Inputs([image], processor.channels, [where])
        PrepareImage(processor)(inputs[0])

    def features(self, inputs: Sequence[Any], processor: Any, config: Any) -> Features:
        """Paths, bytes of image files, Pillow's images, uint8 arrays (height, width, channels), or dictionaries with
        one of them as "image"."""
        images = [_read_input(value, f"input {i}") for i, value in enumerate(inputs)]
        names = [os.fspath(image) if isinstance(image, str | os.PathLike) else None for image in images]
        where = [f"input {i}" if name is None else show_path(name) for i, name in enumerate(names)]
        dataset = grain.MapDataset.source(Inputs(images, config.channels, where)).map(PrepareImage(processor))
        return Features(dataset, extra={"names": names})

    def predictions(self, rows: Sequence[Row], features: Features, config: Any) -> list[dict[str, Any]]:
        """`{"image": its path, if it has one}` and what `prediction` says, for each."""
        return [
            ({} if name is None else {"image": name}) | self.prediction(row, config)
            for name, row in zip(features.extra["names"], rows, strict=True)
        ]

    def prediction(self, row: Row, config: Any) -> dict[str, Any]:
        """What is said of one picture."""
        raise NotImplementedError


def _is_picture(path: Path, *, below: Path | None = None) -> bool:
    """Whether a file is one by its name; `below` a directory, hidden ones are not."""
    hidden = below is not None and any(part.startswith(".") for part in path.relative_to(below).parts)
    return path.suffix.lower() in SUFFIXES and path.is_file() and not hidden


def _read_input(value: Any, where: str) -> Any:
    image = value.get("image") if isinstance(value, Mapping) else value
    known = str | os.PathLike | bytes | np.ndarray | Image.Image
    if not isinstance(image, known) or (isinstance(image, str) and not image.strip()):
        raise ValueError(f'{where} is {" ".join(repr(value).split()):.60}, not a picture or {{"image": ...}}')
    return image
