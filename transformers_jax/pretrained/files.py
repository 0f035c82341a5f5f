"""The files of a Hugging Face checkpoint: found, read and written with numpy, without PyTorch."""

import json
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from transformers_jax.data.image_processor import FILE as PREPROCESSOR

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F16": jnp.float16, "BF16": jnp.bfloat16, "F32": jnp.float32, "F64": np.float64}
"""The types of safetensors files that parameters are read from."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
HUB_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model-*.safetensors", INDEX),
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model"),
    *("*.spm", "target_vocab.json"),
    PREPROCESSOR,
)


def find_directory(source: str | os.PathLike[str], *, revision: str | None = None) -> Path:
    """The directory `source`, or a downloaded copy of the model of that name on the Hugging Face hub.

    A name is one or two words ("gpt2", "owner/model"); a directory of that name comes first. `revision` is a branch,
    tag or commit on the hub. FileNotFoundError when there is neither, or when huggingface_hub is not installed.
    """
    path, name = Path(source).expanduser(), str(source)
    if path.is_dir():
        return path
    if path.exists():
        raise FileNotFoundError(f"{source} is a file; give the directory that holds its {CONFIG}")
    if not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"there is no directory {source}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileNotFoundError(
            f"there is no directory {name}; to read it from the Hugging Face hub install the extra `hub`: "
            "pip install 'transformers-jax[hub]'"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # unknown name, no network, no access: huggingface_hub has many types for them
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"{name} is neither a directory nor to be had from the Hugging Face hub ({reason})"
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; the ValueError or FileNotFoundError names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class TensorFiles:
    """The tensors in a directory's `model.safetensors`, or in the shards that its index names; a context manager.

    `shapes` and `types` (safetensors' names, "F32") describe them; only `read` touches their values.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._open, self._holder = ExitStack(), {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.types: dict[str, str] = {}
        try:
            for path, names in weight_files(directory).items():
                self._add(path, names)
        except BaseException:
            self._open.close()
            raise

    def _add(self, path: Path, promised: Sequence[str]) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path.name} is missing from {path.parent}, but {INDEX} names it")
        try:
            file = self._open.enter_context(safe_open(path, framework="np"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is cut off or damaged: {error}") from None
        names = set(file.keys())
        if absent := sorted(set(promised) - names):
            raise ValueError(f"{path} does not hold {', '.join(absent)}, but {INDEX} says so")
        for name in names:
            if name in self._holder:
                raise ValueError(f"{path} holds {name}, which another shard holds too")
            view = file.get_slice(name)
            self._holder[name], self.shapes[name], self.types[name] = file, tuple(view.get_shape()), view.get_dtype()

    def read(self, name: str, *, axis: int = 0, start: int = 0, stop: int | None = None) -> np.ndarray:
        """A tensor, or its part from `start` to `stop` along `axis`; only that part is read."""
        if start == 0 and stop in (None, self.shapes[name][axis] if self.shapes[name] else None):
            return self._holder[name].get_tensor(name)
        part: list[slice] = [slice(None)] * len(self.shapes[name])
        part[axis] = slice(start, stop)
        return self._holder[name].get_slice(name)[tuple(part)]

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.close()


def weight_files(directory: Path) -> dict[Path, list[str]]:
    """The files that hold the weights, and the tensors that an index promises in each."""
    if (directory / WEIGHTS).is_file():
        return {directory / WEIGHTS: []}
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(f"{directory / INDEX} has no weight_map")
        promised: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            promised.setdefault(directory / file, []).append(name)
        return promised
    pickled = sorted(path.name for path in directory.glob("pytorch_model*.bin"))
    if pickled:
        raise ValueError(
            f"{directory} holds {pickled[0]} and no {WEIGHTS}; convert it where PyTorch is installed: "
            f"{convert_command(directory, pickled)}"
        )
    raise FileNotFoundError(f"there is neither {WEIGHTS} nor {INDEX} in {directory}")


def convert_command(directory: Path, pickled: Sequence[str]) -> str:
    """A shell command that turns PyTorch's pickled weights into `model.safetensors`."""
    code = (
        "import torch, safetensors.torch as s; "
        f"w = {{k: v.clone().contiguous() for f in {list(pickled)} "
        "for k, v in torch.load(f, map_location='cpu', weights_only=True).items()}; "
        f"s.save_file(w, '{WEIGHTS}', metadata={{'format': 'pt'}})"
    )
    return f'cd {shlex.quote(str(directory))} && python -c "{code}"'


def parse_size(size: int | str) -> int:
    """Bytes: a number, or a text like "5GB" (powers of 1000) or "2GiB" (powers of 1024)."""
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", size, re.IGNORECASE)
        if match is None:
            raise ValueError(
                f"max_shard_size={size!r} is not a size; write bytes as a number, or '5GB', '200MB', '1GiB'"
            )
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ["", "K", "M", "G", "T"].index(unit.upper()))
    if size < 1:
        raise ValueError(f"max_shard_size={size} must be at least 1 byte")
    return size


def write_tensors(
    directory: Path, sizes: Mapping[str, int], read: Callable[[str], np.ndarray], *, max_shard_size: int
) -> None:
    """Write tensors in the order of `sizes` (bytes by name); `read(name)` gives one. One shard is held at a time."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    files = [WEIGHTS]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        save_file(
            {name: np.ascontiguousarray(read(name)) for name in names}, directory / file, metadata={"format": "pt"}
        )  # fmt: skip
    if len(shards) > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


@contextmanager
def written_at_once(directory: Path) -> Iterator[Path]:
    """A directory to write a checkpoint's files into, moved to `directory` when the block ends without an error.

    `config.json` goes first and comes last, so that at no moment does a mixture of old and new, or a part, pass for a
    checkpoint. Weights that were there are replaced; other files stay.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{directory} is, or lies under, a file; give another directory to write to") from None
    new = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
    try:
        yield new
        mode = (new / CONFIG).stat().st_mode  # safetensors makes files that only their owner can read
        (directory / CONFIG).unlink(missing_ok=True)
        for old in (directory / WEIGHTS, directory / INDEX, *directory.glob("model-*-of-*.safetensors")):
            old.unlink(missing_ok=True)
        for path in sorted(new.iterdir(), key=lambda path: path.name == CONFIG):
            path.chmod(mode)
            os.replace(path, directory / path.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
