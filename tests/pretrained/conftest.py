"""A small GPT-2 checkpoint with what PyTorch computes with it, and ways to change the files of checkpoints."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from transformers_jax.pretrained import save_pretrained

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "gpt2_tiny"


@pytest.fixture
def tiny() -> Path:
    """The directory of a GPT2LMHeadModel with tied embeddings: 3 layers, 3 heads, width 24, MLP 40, 47 tokens."""
    return GOLDEN


@pytest.fixture(scope="session")
def outputs() -> dict[str, jax.Array]:
    with np.load(GOLDEN / "outputs.npz") as stored:
        return {name: jnp.asarray(stored[name]) for name in stored}


@pytest.fixture
def altered(tmp_path: Path) -> Callable[..., Path]:
    """Copy the checkpoint with other tensors and other fields in config.json (a value of ... takes a field out)."""

    def alter(tensors: Callable[[dict], dict] = dict, **fields: object) -> Path:
        directory = tmp_path / f"altered-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        config = json.loads((GOLDEN / "config.json").read_text()) | fields
        config = {name: value for name, value in config.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors(load_file(GOLDEN / "model.safetensors")), directory / "model.safetensors")
        return directory

    return alter


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "copied"))


@pytest.fixture
def written(tmp_path):
    """Write a model's checkpoint with other tensors and other fields in config.json (a value of ... takes one out)."""

    def write(model, tensors=dict, **fields):
        directory = tmp_path / f"checkpoint-{len(list(tmp_path.iterdir()))}"
        save_pretrained(model, directory)
        config = json.loads((directory / "config.json").read_text()) | fields
        config = {name: value for name, value in config.items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(config))
        save_file(tensors(load_file(directory / "model.safetensors")), directory / "model.safetensors")
        return directory

    return write
