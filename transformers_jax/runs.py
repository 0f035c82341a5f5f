"""A run's directory: who may work in it, what it says of its run, and whether another command continues that run."""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from transformers_jax.training.checkpoint import Checkpointer
from transformers_jax.training.distributed import exchange, first
from transformers_jax.training.loop import TrainingConfig
from transformers_jax.training.settings import flat, to_data

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# What may differ when a run is continued: it changes how the numbers are computed, not which.
CHANGEABLE = (
    "mesh",
    "initial_checkpoint",
    "model.remat",
    "model.unroll",
    "model.attention",
    "task.sample_text",
    "task.sample_prompt",
    "task.sample_tokens",
    "task.sample_temperature",
    *(
        f"training.{field.name}"
        for field in dataclasses.fields(TrainingConfig)
        if field.name not in ("batch_size", "batch_tokens", "ema", "group_by_length")
    ),
)


def describe(experiment: Any, examples: Any) -> dict[str, Any]:
    """A run as data: its settings, and fingerprints of what they cannot show."""
    return {
        "experiment": to_data(experiment),
        "data": examples.fingerprint,
        "processor": examples.processor.fingerprint,
    }


def read_description(workdir: Path) -> dict[str, Any]:
    path = workdir / "experiment.json"
    try:
        description = json.loads(path.read_text())
        if not isinstance(description["experiment"], dict):
            raise TypeError("its experiment is not an object")
        return description
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); take it from a copy of the run"
        ) from None


def description_of_run(checkpointer: Checkpointer) -> dict[str, Any] | None:
    """What the newest good checkpoint says of its run; None where no run has begun.

    Checkpoints of which none can be used are a ValueError: starting anew would delete them.
    """
    try:
        return checkpointer.read_meta("latest")[1].get("description")
    except FileNotFoundError:
        if names := first(lambda: ", ".join(path.name for path in checkpointer.found())):
            raise ValueError(
                f"{checkpointer.directory} holds {names}, but nothing that can be used; repair it, or move it away to "
                "start from the beginning"
            ) from None
        return None


FINGERPRINTS = {
    "data": "the examples, their tokens or their held-out part are not those the run began with",
    "processor": "the tokenizer or image processor is not the one the run began with",
}


def check_same_run(old: dict[str, Any], new: dict[str, Any], workdir: Path) -> list[str]:
    """The harmless differences between two descriptions of a run; ValueError if there are others."""
    old, new = flat(old), flat(new)
    differences = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]

    def harmless(name: str) -> bool:
        # The data's fingerprint says whether the text is the same, wherever it lies.
        names = (*(f"experiment.{changeable}" for changeable in CHANGEABLE), "experiment.data")
        return name in names or name.startswith(tuple(f"{changeable}." for changeable in names))

    def describe(name: str) -> str:
        change = f"{name.removeprefix('experiment.')} {old.get(name)} -> {new.get(name)}"
        return FINGERPRINTS.get(name, change)

    refused = [describe(name) for name in differences if not harmless(name)]
    if refused:
        raise ValueError(
            f"{workdir} holds a run with other settings: {'; '.join(refused)}. "
            f"Use another --workdir, or the settings it was started with"
        )
    return [describe(name) for name in differences]


@contextlib.contextmanager
def alone_in(workdir: Path) -> Iterator[None]:
    """Hold the working directory: two runs in one would delete each other's checkpoints."""
    if workdir.exists() and not workdir.is_dir():
        raise NotADirectoryError(f"{workdir} is a file; a run needs a directory")
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / ".lock").open("w") as file:
        if fcntl is not None and jax.process_index() == 0:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            except BlockingIOError:
                raise ValueError(f"another process is training in {workdir}; use another --workdir") from None
        check_shared(workdir)
        yield


def check_shared(workdir: Path, *, seconds: float = 15.0) -> None:
    """ValueError unless all processes of the run see what process 0 writes into `workdir`."""
    token = exchange(f".seen-by-all-{secrets.token_hex(8)}")[0]
    path = workdir / token
    if jax.process_count() == 1:
        return
    if jax.process_index() == 0:
        path.touch()
    exchange("written")
    deadline = time.monotonic() + seconds
    while not (seen := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.2)
        list(workdir.iterdir())  # a network file system looks again
    blind = [str(index) for index, sees in enumerate(exchange(seen)) if not sees]
    if jax.process_index() == 0:
        path.unlink()
    if blind:
        raise ValueError(
            f"process {', '.join(blind)} of {jax.process_count()} does not see what process 0 writes into {workdir}; "
            "--workdir must be on a file system that all machines share"
        )


def check_same_start(experiment: Any) -> None:
    """ValueError unless all processes were started with the same settings. Data may lie elsewhere on each machine."""
    mine = {name: value for name, value in flat(to_data(experiment)).items() if not name.startswith("data.")}
    ours, *others = exchange(mine)
    for index, theirs in enumerate(others, 1):
        different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if different:
            listed = "; ".join(f"{name} is {theirs.get(name)} and {ours.get(name)}" for name in different)
            raise ValueError(f"processes {index} and 0 were started with different settings: {listed}; start all alike")


def check_same_examples(examples: Any) -> None:
    """ValueError unless all processes have read the same examples and made the same tokenizer of them."""
    mine = [len(examples.train), examples.fingerprint, examples.processor.fingerprint]
    ours, *others = exchange(mine)
    for index, theirs in enumerate(others, 1):
        if theirs != ours:
            what = "tokenizer or image processor" if theirs[:2] == ours[:2] else "data"
            raise ValueError(
                f"process {index} has another {what} than process 0 ({theirs[0]:,} and {ours[0]:,} examples to train "
                "on); give all machines the same files"
            )


def write_atomically(path: Path, text: str) -> None:
    """Write all of a file or nothing. In a run of many processes only process 0 does."""
    if jax.process_index() > 0:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)
