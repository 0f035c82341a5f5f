"""BERT, GPT, ViT and their relatives in JAX and Flax, from one set of blocks.

`transformers_jax.nn` has the blocks, `transformers_jax.models` the families; `load` and `from_pretrained` read
checkpoints, `save_pretrained` writes them, and `Experiment` with `run` trains.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers_jax.experiment import Experiment
    from transformers_jax.loading import Loaded, evaluate, load
    from transformers_jax.pretrained import from_pretrained, save_pretrained
    from transformers_jax.running import run

_HOMES = {
    "Experiment": "experiment",
    "Loaded": "loading",
    "evaluate": "loading",
    "load": "loading",
    "run": "running",
    "from_pretrained": "pretrained",
    "save_pretrained": "pretrained",
}

__all__ = ["Experiment", "Loaded", "evaluate", "from_pretrained", "load", "run", "save_pretrained"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: whoever only wants the blocks does not load the data and checkpoint libraries.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
