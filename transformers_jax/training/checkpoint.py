"""Checkpoints of a training run: arrays and a JSON document, written together or not at all (orbax).

One directory a checkpoint, named by its step:

    40/state/         all arrays of the state, by name (`model.backbone.norm.scale`), without Flax or optax classes
    40/meta/metadata  JSON: step, metrics, shapes and types of the arrays, and the caller's `meta`
    40/manifest.json  size and CRC-32 of every file above: tensorstore itself does not notice flipped bits

Orbax writes in the background into a temporary directory and renames it when all is there, so a killed process leaves
the previous checkpoints as they were. A step that is saved again gets a second directory, `40.1`, and the first one is
deleted once that is complete: nothing good is ever deleted before its successor exists.
"""

import concurrent.futures
import json
import logging
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from transformers_jax.training.distributed import exchange, first, note_saved
from transformers_jax.training.paths import named_leaves, with_leaves

Which = int | Literal["latest", "best"]

_NAME = re.compile(r"(\d+)(?:\.(\d+))?")
_LEFTOVER = re.compile(r".*\.(deleting|orbax-checkpoint-tmp.*)")
_MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)

# Orbax reports harmless things (a sharding of another mesh, say) as warnings and errors. Real ones raise.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in record.pathname)


class _Handler(ocp.CompositeCheckpointHandler):
    """Adds the manifest as the last thing before a checkpoint gets its final name."""

    def finalize(self, directory: epath.Path) -> None:
        super().finalize(directory)
        files = [path for item in ("state", "meta") for path in _files(directory / item)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            entries = pool.map(lambda path: (_relative(path, directory), [path.stat().length, _crc(path)]), files)
            manifest = {"files": dict(sorted(entries))}
        (directory / _MANIFEST).write_text(json.dumps(manifest, indent=1))


@ocp.args.register_with_handler(_Handler, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    pass


class _Entry(NamedTuple):
    step: int
    version: int
    path: epath.Path


class Checkpointer:
    """Writes and reads the checkpoints of one run. All processes call every method, in the same order."""

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep_latest: int = 2,
        keep_best: int = 1,
        best_metric: str = "eval/loss",
        best_mode: Literal["min", "max"] = "min",
    ) -> None:
        """The newest `keep_latest` and the best `keep_best` checkpoints by `best_metric` are kept, all others deleted.

        With two of the newest, a damaged newest one costs the steps since the one before, and no more. Nothing is
        created before the first `save`, so a run's checkpoints can be read where nothing may be written.
        """
        if keep_latest < 1 or keep_best < 0:
            raise ValueError(f"keep_latest is {keep_latest} and keep_best {keep_best}; at least 1 and 0 are needed")
        if best_mode not in ("min", "max"):
            raise ValueError(f"best_mode is {best_mode!r} but must be 'min' or 'max'")
        directory = epath.Path(directory)
        self.directory = directory if "://" in str(directory) else epath.Path(directory.expanduser().resolve())
        self._keep_latest, self._keep_best = keep_latest, keep_best
        self._best_metric, self._sign = best_metric, 1 if best_mode == "min" else -1
        self._checked: dict[epath.Path, str | None] = {}  # full checks made so far: what is wrong, or None
        self._writer: ocp.AsyncCheckpointer | None = None
        self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def save(self, step: int, state: Any, meta: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        """Copy `state` (any pytree of arrays) off the devices, write it in the background together with `meta` (JSON).

        Waits for the previous save first. The state may be donated as soon as this returns. `metrics` are the
        evaluation results that belong to this state, if there are any. Once complete, this is the newest checkpoint:
        those of later steps, left by a run that was continued from before them, are deleted.
        """
        self.wait()
        arrays = {
            name: leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
            for name, leaf in named_leaves(state).items()
        }
        document = {
            "step": step,
            "metrics": {name: float(value) for name, value in (metrics or {}).items() if math.isfinite(value)},
            "arrays": {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in arrays.items()},
            "meta": json.loads(json.dumps(dict(meta))),  # a copy, and an early error for what JSON cannot hold
        }
        if self._writer is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Compression takes the cores from training for seconds and saves some 7 % of float32.
            arrays_handler = ocp.PyTreeCheckpointHandler(use_compression=False)
            self._writer = ocp.AsyncCheckpointer(_Handler(state=arrays_handler, meta=ocp.JsonCheckpointHandler()))
        versions = (entry.version + 1 for entry in self._entries() if entry.step == step)
        version = exchange(max(versions, default=0))[0]
        path = self.directory / (f"{step}.{version}" if version else str(step))
        self._checked.pop(path, None)
        self._writer.save(path, args=_Items(state=ocp.args.PyTreeSave(arrays), meta=ocp.args.JsonSave(document)))
        self._pending = self._executor.submit(self._finish, self._writer, _Entry(step, version, path))

    def wait(self) -> None:
        """Wait until the last save is complete. Raises what went wrong in it, if anything did."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def close(self) -> None:
        """Wait, then release the background threads."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            if self._writer is not None:
                self._writer.close()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints. File sizes are checked, contents are not."""
        return sorted({entry.step for entry in self._entries() if self._damage(entry, contents=False) is None})

    def found(self) -> list[epath.Path]:
        """Whatever is named like a checkpoint and holds anything, complete or not, from oldest to newest."""
        return [entry.path for entry in self._entries() if any(entry.path.iterdir())]

    def best_step(self) -> int | None:
        """Step of the complete checkpoint with the best metric, None where none has one."""
        best = self._by_metric(self._entries())
        return best[0].step if best else None

    def restore_latest(self, abstract_state: Any) -> tuple[int, Any, dict[str, Any]] | None:
        """`restore("latest", ...)`, or None where there is no checkpoint that can be used."""
        try:
            return self.restore("latest", abstract_state)
        except FileNotFoundError:
            return None

    def restore(self, which: Which, abstract_state: Any, *, part: str = "") -> tuple[int, Any, dict[str, Any]]:
        """Read `(step, state, meta)` of the "latest" or "best" checkpoint, or of the one of a given step.

        `abstract_state` is a tree like the state whose leaves have a shape, a type and, if they have a `sharding`, a
        place (`jax.ShapeDtypeStruct`, or arrays): the mesh may differ from the one that wrote, and numbers are
        converted to the type asked for. With `part="model"` or "ema" it describes that part of the state only, and
        nothing else is read. "best" is the latest where no checkpoint has the metric. Arguments and results are the
        same on all processes.

        "latest" and "best" pass over unfinished and damaged checkpoints with a warning. Raises FileNotFoundError where
        there is no checkpoint, ValueError where the one asked for is damaged, or does not hold exactly the arrays of
        `abstract_state` in their shapes (all differences are listed).
        """
        entry = self._find(which)
        document = first(lambda: self._document(entry))
        prefix = f"{part}." if part else ""
        wanted = {prefix + name: leaf for name, leaf in named_leaves(abstract_state).items()}
        saved = {name: array for name, array in document["arrays"].items() if name.startswith(prefix)}
        self._check_fit(entry, saved, wanted)
        places = {name: _place(leaf) for name, leaf in wanted.items()}
        restored = ocp.PyTreeCheckpointHandler().restore(
            entry.path / "state",
            args=ocp.args.PyTreeRestore(
                {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for name, leaf in wanted.items()},
                restore_args={
                    name: ocp.ArrayRestoreArgs(dtype=leaf.dtype, sharding=places[name], global_shape=tuple(leaf.shape))
                    for name, leaf in wanted.items()
                },
                partial_restore=True,
            ),
        )
        state = with_leaves(abstract_state, {name.removeprefix(prefix): array for name, array in restored.items()})
        return entry.step, state, document["meta"]

    def read_meta(self, which: Which = "latest") -> tuple[int, dict[str, Any]]:
        """`(step, meta)` of a checkpoint without its arrays; chooses and raises like `restore`."""
        entry = self._find(which)
        return entry.step, first(lambda: self._document(entry))["meta"]

    def _finish(self, writer: ocp.AsyncCheckpointer, entry: _Entry) -> None:
        writer.wait_until_finished()
        note_saved(entry.step)
        if jax.process_index() == 0:
            self._prune(entry)

    def _prune(self, newest: _Entry) -> None:
        """Delete all but the newest and the best checkpoints, and what killed processes left."""
        good = {
            entry.step: entry  # the last version of each step
            for entry in self._entries()
            if (entry.step < newest.step or entry == newest) and self._damage(entry, contents=False) is None
        }
        entries = list(good.values())
        kept = {entry.path for entry in entries[-self._keep_latest :] + self._by_metric(entries)[: self._keep_best]}
        for path in list(self.directory.iterdir()):
            if _LEFTOVER.fullmatch(path.name):
                path.rmtree(missing_ok=True)
            elif _NAME.fullmatch(path.name) and path.is_dir() and path not in kept:
                # Renamed first, so that a half deleted checkpoint is never taken for one.
                path.rename(path.with_name(f"{path.name}.deleting")).rmtree(missing_ok=True)

    def _entries(self) -> list[_Entry]:
        """What is named like a checkpoint, from oldest to newest."""
        if not self.directory.is_dir():
            return []
        matches = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted(_Entry(int(m[1]), int(m[2] or 0), path) for m, path in matches if m and path.is_dir())

    def _by_metric(self, entries: list[_Entry]) -> list[_Entry]:
        """The complete ones that have the metric, best first; of equal ones the earlier first."""
        scored = []
        for entry in entries:
            if self._damage(entry, contents=False) is None:
                metrics = self._document(entry)["metrics"]
                if self._best_metric in metrics:
                    scored.append((self._sign * metrics[self._best_metric], entry))
        return [entry for _, entry in sorted(scored)]

    def _find(self, which: Which) -> _Entry:
        """What process 0 chooses, for all: they may not see the same files at the same time, and one that reads all of
        a checkpoint to check it is enough."""
        self.wait()
        name = first(lambda: self._choose(which, self._entries()).path.name)
        step, version = _NAME.fullmatch(name).groups()  # pyright: ignore[reportOptionalMemberAccess]
        return _Entry(int(step), int(version or 0), self.directory / name)

    def _choose(self, which: Which, entries: list[_Entry]) -> _Entry:
        if isinstance(which, int):
            candidates = [entry for entry in entries if entry.step == which][::-1]
        elif which == "best":
            # Then the others, newest first, in case none has the metric or all that have one are damaged.
            candidates = list(dict.fromkeys([*self._by_metric(entries), *reversed(entries)]))
        elif which == "latest":
            candidates = entries[::-1]
        else:
            raise ValueError(f"no checkpoint is called {which!r}; use 'latest', 'best' or a step")
        for entry in candidates:
            known = entry.path in self._checked
            if (damage := self._damage(entry, contents=True)) is None:
                return entry
            if isinstance(which, int):
                raise ValueError(f"checkpoint {entry.path} is damaged: {damage}; use another one of {self.steps()}")
            if not known:
                _log.warning("checkpoint %s is passed over: %s", entry.path, damage)
        if isinstance(which, int):
            raise FileNotFoundError(f"no checkpoint of step {which} in {self.directory}; there are {self.steps()}")
        raise FileNotFoundError(f"no {'usable ' if entries else ''}checkpoint in {self.directory}")

    def _damage(self, entry: _Entry, *, contents: bool) -> str | None:
        """What is wrong with a checkpoint, by its manifest; None if nothing is."""
        if entry.path not in self._checked:
            damage = _damage(entry.path, contents=contents)
            if not contents:
                return damage
            self._checked[entry.path] = damage
        return self._checked[entry.path]

    def _document(self, entry: _Entry) -> dict[str, Any]:
        return dict(ocp.JsonCheckpointHandler().restore(entry.path / "meta"))

    def _check_fit(self, entry: _Entry, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
        problems = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
        problems += [f"{name} is only in the checkpoint" for name in saved if name not in wanted]
        problems += [
            f"{name} has shape {tuple(saved[name]['shape'])} there and {tuple(leaf.shape)} here"
            for name, leaf in wanted.items()
            if name in saved and tuple(saved[name]["shape"]) != tuple(leaf.shape)
        ]
        if problems:
            raise ValueError(
                f"checkpoint {entry.path} does not fit: {'; '.join(problems)}. Use the configuration that wrote it, "
                "or another directory"
            )


def _place(leaf: Any) -> jax.sharding.Sharding:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _damage(path: epath.Path, *, contents: bool) -> str | None:
    try:
        files = json.loads((path / _MANIFEST).read_text())["files"]
        files = {name: (int(size), int(crc)) for name, (size, crc) in files.items()}
    except (FileNotFoundError, NotADirectoryError):
        return "it is unfinished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {_MANIFEST} cannot be read"
    if not {name.partition("/")[0] for name in files} >= {"state", "meta"}:
        return f"its {_MANIFEST} cannot be read"

    def check(name: str) -> str | None:
        size, crc = files[name]
        file = path / name
        if not file.exists():
            return f"{name} is missing"
        if (found := file.stat().length) != size:
            return f"{name} has {found} bytes instead of {size}"
        if contents and _crc(file) != crc:
            return f"the contents of {name} have changed"
        return None

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return next((damage for damage in pool.map(check, files) if damage), None)


def _files(directory: epath.Path) -> Iterator[epath.Path]:
    for path in directory.iterdir():
        yield from _files(path) if path.is_dir() else (path,)


def _crc(path: epath.Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 23):
            value = zlib.crc32(chunk, value)
    return value


def _relative(path: epath.Path, directory: epath.Path) -> str:
    return path.relative_to(directory).as_posix()
