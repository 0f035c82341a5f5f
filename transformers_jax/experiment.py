"""An experiment: a task, a model, data and training put together."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from transformers_jax.data import Data
from transformers_jax.models import ModelConfig
from transformers_jax.tasks import Task
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.mesh import MeshConfig
from transformers_jax.training.optimizer import OptimizerConfig


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a training run. Each field can be set from the command line."""

    task: Task
    model: ModelConfig
    data: Data
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    initial_checkpoint: str | None = None
    """A run or Hugging Face checkpoint to start from: its weights, tokenizer and sizes replace those of the config. A
    head of the task's kind goes on, for the same labels (or task.new_head starts another); otherwise a new one starts.
    """
    seed: int = 0
    """Decides initial weights, the order of the examples, and dropout."""

    def __post_init__(self):
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")


def load_config(name: str) -> Experiment:
    """The experiment of a config file: a path, or the name of a config that comes with the package."""
    path = Path(name)
    if not path.is_file():
        known = {file.stem: file for folder in _config_folders() for file in sorted(folder.glob("*.py"))}
        if path.stem not in known or path.parent != Path("."):
            raise FileNotFoundError(f"no config {name!r}; give a path, or one of {', '.join(known)}")
        path = known[path.stem]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        experiment = module.experiment() if hasattr(module, "experiment") else None
    except Exception as error:  # whatever the file does wrong
        raise ValueError(f"config {path}: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise ValueError(f"{path} must define a function experiment() that returns an Experiment")
    return experiment


def _config_folders() -> list[Path]:
    package = Path(__file__).parent
    return [folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir()]
